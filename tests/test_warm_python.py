"""The warm Python of the tests: a command in it does what it does in a Python of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.warm_python import make_python, process_of

pytestmark = pytest.mark.long  # what it is for is long, too

AT_THE_END = """\
import atexit, threading
atexit.register(print, 2)
threading.Timer(0.1, print, "1").start()
"""
SPAWNS = """\
import multiprocessing
one = multiprocessing.get_context("spawn").Process(target=print, args="1")
one.start(), one.join()
"""
ALIKE = {
    "a text": ["-c", "import sys; print(sys.argv, sys.path[0])", "a", "-b"],
    "a module": ["-m", "said", "a"],
    "a file": ["said.py", "-u"],
    "options": ["-u", "-P", "-c", "import sys; print('' in sys.path, sys.argv)", "-u"],
    "a folder": ["-c", "import tempfile; print(tempfile.gettempdir())"],
    "what it is told": ["-c", "import sys; print(sys.stdin.read().upper())"],
    "last words": ["-c", "raise SystemExit('no')"],
    "an exit code": ["-c", "raise SystemExit(7)"],
    "a kill": ["-c", "import os; os.kill(os.getpid(), 9)"],
    "a signal": ["-c", "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"],
    "what is done at the end": ["-c", AT_THE_END],
    "a process of its own": ["-c", SPAWNS],
    "another option": ["-V"],
}
SAID = "import os, sys\nprint(__name__, sys.argv, sys.path[0], os.getcwd(), os.environ['OF_IT'])\n"
WAITS = "import os, time; print(os.getpid(), flush=True); time.sleep(100)"


def ended(python: str, words: list[str], folder: Path) -> tuple[int, str, str]:
    """Return how a Python ended, what it said, and how its last words ended."""
    (folder / "said.py").write_text(SAID)
    environment = os.environ | {"OF_IT": "1", "PYTHONPATH": str(folder), "TMPDIR": str(folder)}
    done = subprocess.run(
        [python, *words],
        cwd=folder,
        env=environment,
        input="told",
        text=True,
        capture_output=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr[-100:]


@pytest.mark.parametrize("words", ALIKE.values(), ids=ALIKE)
def test_a_command_does_what_it_does_in_a_python_of_its_own(
    warm_python: str, tmp_path: Path, words: list[str]
) -> None:
    assert ended(warm_python, words, tmp_path) == ended(sys.executable, words, tmp_path)


def test_torch_is_there_and_nothing_of_ours(warm_python: str, tmp_path: Path) -> None:
    code = "import sys; print(*('torch' in sys.modules, 'tests' in sys.modules))"
    code += "; print([name for name in sys.modules if name.startswith('trinity_buffer')])"
    assert ended(warm_python, ["-c", code], tmp_path) == (0, "True False\n[]\n", "")


def test_an_error_is_told(warm_python: str, tmp_path: Path) -> None:
    code, _, said = ended(warm_python, ["-c", "1 / 0"], tmp_path)
    assert (code, said.splitlines()[-1]) == (1, "ZeroDivisionError: division by zero")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_the_program_and_its_process(warm_python: str, number: int) -> None:
    with subprocess.Popen(
        [warm_python, "-c", WAITS], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as program:
        assert program.stdout is not None
        process = int(program.stdout.readline())
        assert process == process_of(program.pid) != program.pid
        program.send_signal(number)
        assert program.wait() == -number
    until = time.monotonic() + 60
    while Path(f"/proc/{process}").exists():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_without_a_server_it_is_a_python_of_its_own(tmp_path: Path) -> None:
    make_python(tmp_path / "python", Path(sys.executable), tmp_path / "nobody")
    code = "import sys; print('torch' in sys.modules)"
    assert ended(str(tmp_path / "python"), ["-c", code], tmp_path) == (0, "False\n", "")
