"""Puts each fault in a copy of the repository, and runs its test there.

``python -m tests.planted_faults.faulty --help``. Prints a JSON line for each: what, whether its
test turned red, and which one did. Processes are forked from this one, which has imported what
takes long, and nothing of the package.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

# What takes long to import, of other packages: a fork has it already.
import alembic.command  # noqa: F401
import anyio.pytest_plugin  # noqa: F401
import hypothesis.stateful  # noqa: F401
import psycopg  # noqa: F401
import pysqlite3  # noqa: F401
import pytest
import pytest_asyncio.plugin  # noqa: F401
import safetensors.torch  # noqa: F401
import sqlalchemy.dialects.postgresql  # noqa: F401
import torch._dynamo  # noqa: F401
import typer  # noqa: F401

from tests.planted_faults.fault import Fault
from tests.planted_faults.faults import FAULTS

ROOT = Path(__file__).parents[2]
LIMIT_S = 300
SAID = "said.txt"


@contextmanager
def planted(root: Path, fault: Fault) -> Iterator[None]:
    """Change the copy under ``root`` while the context is open."""
    path = root / "trinity_buffer" / fault.file
    text = path.read_text()
    if text.count(fault.old) != 1:
        raise SystemExit(f"{fault.file} has {fault.old!r} {text.count(fault.old)} times, not once")
    faulty = text.replace(fault.old, fault.new)
    compile(faulty, fault.file, "exec")  # a fault that is no Python would turn any test red
    path.write_text(faulty)
    _forget_compiled(path)
    try:
        yield
    finally:
        path.write_text(text)
        _forget_compiled(path)


def _forget_compiled(path: Path) -> None:
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


class _FirstFailure:
    def __init__(self) -> None:
        self.test = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.test:
            self.test = report.nodeid


def _child(root: Path, fault: Fault, out: int) -> None:
    """Run the test of ``fault`` in this process, and say how it went."""
    os.chdir(root)
    sys.path.insert(0, str(root))
    for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
        del sys.modules[name]
    signal.alarm(LIMIT_S)
    seen = _FirstFailure()
    # A folder of its own: where several pytest tidy one up, they trip over each other.
    options = ["-x", "-q", "-m", "not outside", "-p", "no:cacheprovider", f"--basetemp={root}/tmp"]
    # Only the name of the red test counts: the diff of two long lists can take pytest minutes.
    options += ["--assert=plain"]
    with (root / SAID).open("w") as said, redirect_stdout(said), redirect_stderr(said):
        code = int(pytest.main([*options, *fault.test.split()], plugins=[seen]))
    os.write(out, json.dumps([code, seen.test]).encode())


def red_test(root: Path, fault: Fault) -> tuple[int, str]:
    """Return pytest's exit code under ``fault`` (1: red), and which test failed first."""
    answer, out = os.pipe()
    with planted(root, fault):
        child = os.fork()
        if child == 0:
            try:
                _child(root, fault, out)
            except BaseException as error:
                os.write(out, json.dumps([-1, f"pytest broke off: {error!r}"]).encode())
                raise
            finally:
                os._exit(1)
        os.close(out)
        with os.fdopen(answer) as told:
            text = told.read()
        os.waitpid(child, 0)
    if not text:
        text = json.dumps([-1, f"no answer in {LIMIT_S} s; it said {(root / SAID).read_text()!r}"])
    code, test = json.loads(text)
    return code, test


def main() -> None:
    """Run the faults that are asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.planted_faults.faulty")
    parser.add_argument("text", nargs="?", default="", help="only faults whose description has it")
    parser.add_argument("--part", default="0/1", help="only every n-th, beginning with: 0/4")
    asked = parser.parse_args()
    first, step = map(int, asked.part.split("/"))
    with TemporaryDirectory() as folder:
        root = Path(folder) / "copy"
        root.mkdir()
        for name in ("trinity_buffer", "tests", "migrations"):
            shutil.copytree(ROOT / name, root / name)
        for name in ("pyproject.toml", "README.md"):
            shutil.copy(ROOT / name, root)
        gc.freeze()  # else each fork walks, and so copies, all that was imported
        for fault in FAULTS[first::step]:
            if asked.text in fault.what:
                code, test = red_test(root, fault)
                found = {"what": fault.what, "red": code == 1, "test": test}
                print(json.dumps(found), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
