"""The processes that run the tests report what one process would, and outlive a test that dies."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long  # each starts a pytest

ROOT = Path(__file__).parents[1]
CONFTEST = """
from tests.workers import Workers

def pytest_configure(config):
    config.pluginmanager.register(Workers(config, 2, lambda item: item.name.split("_")[1]))
"""
TESTS = """
import os, pathlib, signal, time, warnings
import pytest

@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    yield tmp_path_factory.getbasetemp()
    pathlib.Path(f"ended-{os.getpid()}").touch()

@pytest.mark.parametrize("number", range(6))
def test_first_passes(number, shared):
    assert shared.name.startswith("w")
    print("what it says")
    assert number != 3

def test_second_is_killed(shared): os.kill(os.getpid(), signal.SIGKILL)
def test_second_ends(shared): os._exit(0)
def test_second_goes_on(shared): warnings.warn("beware")
def test_third_is_interrupted(shared): raise KeyboardInterrupt
def test_third_follows(shared): pass
@pytest.mark.skip(reason="not today")
def test_third_is_left_out(): pass
"""


def run(folder: Path, *options: str) -> tuple[int, str]:
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "pytest.ini").write_text("[pytest]\nasyncio_default_fixture_loop_scope = function\n")
    (folder / "test_some.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-rA", f"--basetemp={folder / 'base'}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    done = subprocess.run(
        [*command, *options],
        cwd=folder,
        env=environment,
        text=True,
        capture_output=True,
        timeout=60,
    )
    return done.returncode, done.stdout + done.stderr


def test_every_test_is_reported_once_though_some_end_their_process(tmp_path: Path) -> None:
    code, output = run(tmp_path)
    assert code == 1
    assert "4 failed, 7 passed, 1 skipped, 1 warning" in output
    for line in (
        "FAILED test_some.py::test_first_passes[3] - assert 3 != 3",
        "FAILED test_some.py::test_second_is_killed - the process of this test ended with -9",
        "FAILED test_some.py::test_second_ends - the process of this test ended with 0",
        "FAILED test_some.py::test_third_is_interrupted - Traceback",
        ": not today",
        "UserWarning: beware",
        "what it says",
    ):
        assert line in output, output
    assert list(tmp_path.glob("ended-*"))  # fixtures end with the process


def test_after_the_first_failure_it_stops_where_it_is_told_to(tmp_path: Path) -> None:
    code, output = run(tmp_path, "-x")
    assert code == 1
    assert "stopping after" in output
    assert "12 passed" not in output
