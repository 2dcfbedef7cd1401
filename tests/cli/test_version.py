"""`trinity-buffer --version`."""

from __future__ import annotations

import subprocess
import sys

import trinity_buffer as tb

PROGRAM = """
import sys
from trinity_buffer.cli.main import run_command

sys.argv = ["trinity-buffer", "--version"]
try:
    run_command()
finally:
    print(sorted({"torch", "numpy", "sqlalchemy"} & set(sys.modules)))
"""


def test_the_version_is_told_and_nothing_large_is_loaded() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == f"trinity-buffer {tb.__version__}\n[]\n"
