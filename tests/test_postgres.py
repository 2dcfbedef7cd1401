from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError

from tests.postgres import PostgresServer
from tests.sample_run import rollout
from trinity_buffer import open_store

ROOT = Path(__file__).parents[1]
OWNER_OF_A_SERVER = """
import signal
from tests.postgres import PostgresServer
server = PostgresServer(durable=False)
server.start()
print(server._process.pid, server.socket_dir, flush=True)
signal.pause()
"""


def ask(url: str, sql: str) -> object:
    engine = create_engine(make_url(url).set(drivername="postgresql+psycopg"))
    try:
        with engine.begin() as connection:
            result = connection.execute(text(sql))
            return result.scalar() if result.returns_rows else None
    finally:
        engine.dispose()


@pytest.mark.parametrize("_turn", [1, 2])
async def test_each_test_has_an_empty_database_for_sqlalchemy_and_psycopg(
    postgres_url: str, _turn: int
) -> None:
    assert ask(postgres_url, "SELECT count(*) FROM pg_tables WHERE schemaname = 'public'") == 0
    ask(postgres_url, "CREATE TABLE rest (x int)")


@pytest.mark.parametrize(
    "meanwhile",
    [
        "CREATE TABLE rest (x int)",
        "ALTER TABLE event DISABLE TRIGGER event_forbids_delete",
        "UPDATE alembic_version SET version_num = 'another'",
        "DROP TABLE lease",
        "SELECT 1",
        "SELECT 2",
    ],
)
async def test_each_test_has_a_store_as_it_was_made(
    postgres_store_url: str, meanwhile: str
) -> None:
    async with open_store(postgres_store_url) as store:
        assert await store.experiments() == []
        experiment = await store.experiment("run", config={})
        assert experiment.key == 1
        await experiment.writer("e0").write([rollout("b0", 0, 0, 1.0)])
    with pytest.raises(DBAPIError, match="append-only"):
        ask(postgres_store_url, "DELETE FROM event")
    ask(postgres_store_url, meanwhile)


def test_a_store_url_names_its_backend(store_url: str, request: pytest.FixtureRequest) -> None:
    assert store_url.startswith(request.node.callspec.params["store_url"] + "://")


@pytest.mark.long
async def test_a_durable_server_is_as_postgresql_comes_and_survives_a_kill() -> None:
    with PostgresServer() as server:
        ask(server.url(), "CREATE TABLE kept AS SELECT 7 AS x")
        server.kill9()
        server.start()
        assert ask(server.url(), "SELECT x FROM kept") == 7
        assert ask(server.url(), "SHOW fsync") == "on"
        assert ask(server.url(), "SHOW wal_segment_size") == "16MB"
        assert ask(server.url(), "SHOW max_wal_size") == "1GB"


@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_server_outlives_the_process_that_started_it(how: signal.Signals) -> None:
    command = [sys.executable, "-c", OWNER_OF_A_SERVER]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as owner:
        assert owner.stdout is not None
        pid, folder = owner.stdout.readline().decode().split()
        server = psutil.Process(int(pid))
        processes = [server, *server.children(recursive=True)]
        owner.send_signal(how)
    _, alive = psutil.wait_procs(processes, timeout=20)
    shutil.rmtree(folder)  # the one thing that nobody is left to do
    assert not alive
