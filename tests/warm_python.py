"""A ``python`` that has imported torch already: what a test types costs milliseconds to start.

`make_python` writes a small program with the command line of Python. It has a server fork a process
that becomes what was asked for: with its arguments, environment, folder and open files, at
the top of ``__main__``. The server has imported what others wrote and takes long, and nothing of
ours: the package is the one that the command finds. The program hands on signals and ends as its
process did; if it is killed, so is its process. Options of Python other than ``-u``, ``-P``, ``-m``
and ``-c`` get a Python of their own, and so does pytest, which rewrites what it imports, and
whoever installs.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import marshal
import os
import random
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from itertools import dropwhile
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

IMPORTED = (
    *("torch", "torch._dynamo", "torch.multiprocessing", "safetensors.torch", "numpy"),
    *("sqlalchemy.dialects.postgresql", "aiosqlite", "pysqlite3", "psycopg", "alembic.command"),
    *("anyio", "msgspec", "msgpack", "typer", "rich.console", "yaml"),
)
HEADER = struct.Struct("!I")
ENDED = struct.Struct("!i")
BEGUN = b"!"
OPTIONS = ("-u", "-P")
MOST_FILES = 500
ENDS_WITH_PARENT = "TRINITY_BUFFER_ENDS_WITH_PARENT"
_PR_SET_PDEATHSIG = 1

PROGRAM = """\
#!{interpreter} -IS
import array, marshal, os, signal, struct, sys, _socket

def own_python():
    os.execv({own!r}, [{own!r}, *sys.argv[1:]])

kind = next((word for word in sys.argv[1:] if word not in {options}), "-")
if kind not in ("-m", "-c") and kind.startswith("-"):
    own_python()
if {{"pip", "pytest", "venv"}} & {{*sys.argv}}:
    own_python()
files = [int(name) for name in os.listdir("/proc/self/fd")]
files = [one for one in files if os.path.exists(f"/proc/self/fd/{{one}}")]
server = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
try:
    server.connect({address!r})
    asked = marshal.dumps((files, sys.argv, os.getcwd(), dict(os.environ)))
    passed = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS, array.array("i", files))
    server.sendmsg([struct.pack("!I", len(asked))], [passed])
    server.sendall(asked)
    begun = server.recv(4)
except OSError:
    begun = b""
if not begun:
    own_python()
with open("/proc/self/comm", "w") as name:
    name.write("for %d" % struct.unpack("!I", begun))
def hand_on(number, frame):
    server.send(bytes([number]))

for name in ("INT", "TERM", "HUP", "QUIT", "USR1", "USR2"):
    signal.signal(getattr(signal, f"SIG{{name}}"), hand_on)
for one in files:
    os.close(one)
told = server.recv(4)
(ended,) = struct.unpack("!i", told) if len(told) == 4 else (1,)
if ended < 0:
    signal.signal(-ended, signal.SIG_DFL) if ended != -signal.SIGKILL else None
    os.kill(os.getpid(), -ended)
os._exit(ended)
"""


class Asked(NamedTuple):
    """What a process is to become.

    Attributes:
        files: the numbers of its open files.
        words: the program, and its command line.
    """

    files: list[int]
    words: list[str]
    folder: str
    environment: dict[str, str]


def make_python(path: Path, own: Path, address: Path) -> None:
    """Write the program to ``path``; ``own`` is a Python for what the server does not take."""
    text = PROGRAM.format(
        interpreter=sys.executable, own=str(own), address=str(address), options=OPTIONS
    )
    path.write_text(text)
    path.chmod(0o755)


def process_of(program: int) -> int:
    """Return the number of the process that a running program is for."""
    return int(Path(f"/proc/{program}/comm").read_text().removeprefix("for "))


@contextmanager
def served(folder: Path) -> Iterator[Path]:
    """Have a server while the context is open, one for all processes that name this folder."""
    address = folder / "warm"
    with (folder / "warm.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        kept = _connected(address)
        if kept is None:
            address.unlink(missing_ok=True)
            command = [sys.executable, __file__, str(address)]
            with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as one:
                assert one.stdout is not None
                one.stdout.read(1)  # it listens
                one.returncode = 0  # it ends when nobody wants it any more: nobody waits for it
            kept = _connected(address)
    assert kept is not None, f"no server listens at {address}: its error stands above"
    with kept:
        yield address


def _connected(address: Path) -> socket.socket | None:
    """Return a connection that keeps the server, if there is one."""
    kept = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with suppress(OSError):
        kept.connect(str(address))
        kept.sendall(HEADER.pack(0))
        if kept.recv(1) == BEGUN:
            return kept
    kept.close()
    return None


class _Server:
    """It forks a process for each program that connects, and ends when nobody keeps it."""

    def __init__(self, address: str) -> None:
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.bind(address)
        self._listening.listen(1000)
        self._address = address
        self._programs: dict[socket.socket, int] = {}
        self._keepers: set[socket.socket] = set()
        self._begun = False
        self._waiting = selectors.DefaultSelector()
        self._awake, waking = socket.socketpair()
        self._awake.setblocking(False)
        waking.setblocking(False)
        self._waking = waking
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waking.fileno(), warn_on_full_buffer=False)

    def asked(self) -> Asked | None:
        """Return what to become, in a forked process; or None, in this one, at its end."""
        self._waiting.register(self._listening, selectors.EVENT_READ)
        self._waiting.register(self._awake, selectors.EVENT_READ)
        asked = None
        while asked is None and (self._keepers or not self._begun):
            ((key, _), *_) = self._waiting.select()
            one = key.fileobj
            assert isinstance(one, socket.socket)
            if one is self._awake:
                self._awake.recv(1000)
                self._tell_ended()
            elif one is self._listening:
                asked = self._begin(one.accept()[0])
            else:
                self._hear(one)
        if asked is None:
            Path(self._address).unlink(missing_ok=True)
        return asked

    def _begin(self, connected: socket.socket) -> Asked | None:
        head, files, _, _ = socket.recv_fds(connected, HEADER.size, MOST_FILES)
        if len(head) < HEADER.size:
            connected.close()
            return None
        (length,) = HEADER.unpack(head)
        self._waiting.register(connected, selectors.EVENT_READ)
        if not length:
            self._keepers.add(connected)
            self._begun = True
            connected.sendall(BEGUN)
            return None
        text = b""
        while len(text) < length:
            text += connected.recv(length - len(text))
        asked = Asked(*marshal.loads(text))
        server = os.getpid()
        if pid := os.fork():
            for one in files:
                os.close(one)
            self._programs[connected] = pid
            connected.sendall(HEADER.pack(pid))
            return None
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != server:
            os._exit(1)
        os.setsid()
        _open(dict(zip(asked.files, files, strict=True)))
        _detach(self._listening, self._awake, self._waking, connected)
        _detach(*self._programs, *self._keepers)
        return asked

    def _hear(self, one: socket.socket) -> None:
        """Hand on the signals that a program got; if it is gone, kill its process."""
        numbers = b""
        with suppress(OSError):
            numbers = one.recv(1000)
        if (process := self._programs.get(one)) is not None:
            for number in numbers or [signal.SIGKILL]:
                os.kill(process, number)
        if not numbers:
            self._forget(one)

    def _tell_ended(self) -> None:
        """Tell each program whose process has ended how it did."""
        for process, status in _ended():
            for one in [one for one, its in self._programs.items() if its == process]:
                with suppress(OSError):  # it is gone already
                    one.sendall(ENDED.pack(os.waitstatus_to_exitcode(status)))
                self._forget(one)

    def _forget(self, one: socket.socket) -> None:
        self._keepers.discard(one)
        self._programs.pop(one, None)
        self._waiting.unregister(one)
        one.close()


def _ended() -> Iterator[tuple[int, int]]:
    with suppress(ChildProcessError):  # there is none any more
        while (one := os.waitpid(-1, os.WNOHANG))[0]:
            yield one


def _detach(*closed: socket.socket) -> None:
    """Have these close nothing: their numbers are those of other files now."""
    for one in closed:
        one.detach()


def _open(files: dict[int, int]) -> None:
    """Have just these files open, each under its number."""
    apart = {number: fcntl.fcntl(one, fcntl.F_DUPFD, MOST_FILES) for number, one in files.items()}
    os.closerange(0, MOST_FILES)
    for number, one in apart.items():
        os.dup2(one, number)
        os.close(one)


def _become(asked: Asked, own_path: list[str]) -> None:
    """Go on as ``python`` does that was called like this, in this process."""
    os.environ.clear()
    os.environ.update(asked.environment)
    os.environ.pop(ENDS_WITH_PARENT, None)  # the parent is the server
    os.chdir(asked.folder)
    vars(tempfile).update(tempdir=None)  # the environment may name another
    random.seed()
    sys.modules["numpy"].random.seed()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.executable = os.path.abspath(asked.words[0])  # noqa: PTH100
    kind, *words = dropwhile(lambda word: word in OPTIONS, asked.words[1:])
    options = asked.words[1 : -1 - len(words)]
    _speak(at_once="-u" in options or bool(asked.environment.get("PYTHONUNBUFFERED")))
    given = asked.environment.get("PYTHONPATH", "")
    sys.path[:] = [*(one for one in given.split(os.pathsep) if one), *own_path]
    first = {"-m": asked.folder, "-c": ""}.get(kind, str(Path(kind).resolve().parent))
    if "-P" not in options:
        sys.path.insert(0, first)
    importlib.invalidate_caches()
    sys.path_importer_cache.clear()
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    if kind == "-m":
        sys.argv[:] = words
        runpy._run_module_as_main(words[0])  # type: ignore[attr-defined]
    elif kind == "-c":
        sys.argv[:] = ["-c", *words[1:]]
        exec(compile(words[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv[:] = [kind, *words]
        main.__file__ = kind
        exec(compile(Path(kind).read_text(), kind, "exec"), main.__dict__)


def _code_of(asked: Asked, own_path: list[str]) -> int:
    """Do what was asked for; return the exit code, as Python has it."""
    try:
        _become(asked, own_path)
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def _end(code: int) -> None:
    """End as Python does, but for the objects that it would take apart: a third of a second."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


def _speak(*, at_once: bool) -> None:
    """Have the three standard files as Python opens them."""
    for name, number, mode, errors in (
        ("stdin", 0, "r", "strict"),
        ("stdout", 1, "w", "strict"),
        ("stderr", 2, "w", "backslashreplace"),
    ):
        file = os.fdopen(number, mode, errors=errors, closefd=False)
        if isinstance(file, TextIOWrapper) and mode == "w":
            lines = number == 2 or os.isatty(number)
            file.reconfigure(line_buffering=lines, write_through=at_once)
        setattr(sys, name, file)
        setattr(sys, f"__{name}__", file)


def _own_path() -> list[str]:
    """Return where Python looks, whatever the environment says."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return [one for one in sys.path[1:] if one not in given]


if __name__ == "__main__":
    _PATH = _own_path()
    _SERVER = _Server(sys.argv[1])
    os.write(1, BEGUN)
    os.close(1)
    os.open(os.devnull, os.O_WRONLY)
    for _name in IMPORTED:
        importlib.import_module(_name)
    gc.freeze()
    _ASKED = _SERVER.asked()
    if _ASKED is not None:
        _end(_code_of(_ASKED, _PATH))
