"""A pooler that lends a server's sessions works; one that lends its transactions is refused."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest

from tests.contract.making import group, opened
from tests.postgres import PostgresServer
from trinity_buffer import open_store, run_strategy
from trinity_buffer.errors import UnsafeStoreError

pytestmark = pytest.mark.outside
PORT = 6432


@contextmanager
def pooled(server: PostgresServer, mode: str, *settings: str) -> Iterator[str]:
    """Run Debian's pgbouncer in front of a server; yield the URL of its database ``test``."""
    program = shutil.which("pgbouncer")
    assert program is not None, "apt-get install pgbouncer"
    with tempfile.TemporaryDirectory(prefix="trinity-pgb-") as name:
        folder = Path(name)
        folder.chmod(0o777)
        lines = [
            "[databases]",
            f"test = host={server.socket_dir} user=postgres",
            "[pgbouncer]",
            "listen_addr =",
            f"listen_port = {PORT}",
            f"unix_socket_dir = {folder}",
            "auth_type = any",
            f"pool_mode = {mode}",
            f"logfile = {folder}/log",
            *settings,
        ]
        (folder / "pgbouncer.ini").write_text("\n".join(lines))
        process = subprocess.Popen(
            [program, "-u", "nobody", str(folder / "pgbouncer.ini")],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            while not (folder / f".s.PGSQL.{PORT}").exists():
                assert process.poll() is None, (folder / "log").read_text()
            yield f"postgresql://postgres@/test?host={folder}&port={PORT}"
        finally:
            process.terminate()
            process.wait()


@pytest.mark.parametrize("mode", ["transaction", "statement"])
@pytest.mark.parametrize("setting", ["", "server_round_robin = 1", "default_pool_size = 1"])
async def test_a_pooler_that_lends_transactions_is_refused_by_name(
    postgres_url: str, postgres_server: PostgresServer, mode: str, setting: str
) -> None:
    async with opened(postgres_url):
        pass
    with pooled(postgres_server, mode, setting) as url, anyio.fail_after(60):
        for _ in range(3):
            with pytest.raises(UnsafeStoreError, match=r"behind a pooler.*pool_mode = session"):
                await open_store(url).__aenter__()


async def test_a_pooler_that_lends_sessions_works(
    postgres_url: str, postgres_server: PostgresServer
) -> None:
    del postgres_url  # emptied afterwards
    with pooled(postgres_server, "session") as url:
        async with opened(url, rollouts_per_group=4) as one, opened(url) as two:
            async with anyio.create_task_group() as tasks:
                for task in range(8):
                    actor = (one, two)[task % 2].writer(f"e{task}")
                    tasks.start_soon(actor.write, group(task=task))
            assert (await run_strategy(one, "grpo")).annotated == 32
