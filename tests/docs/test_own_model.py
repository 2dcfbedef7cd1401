"""The program of docs/own_model.md runs as it is printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "own_model.md"


@pytest.mark.long
def test_the_program_trains_and_replays(tmp_path: Path) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^step (\d)", done.stdout, re.MULTILINE) == ["1", "2", "1", "2"]
    assert done.stdout.endswith("replayed to the same bits\n")
