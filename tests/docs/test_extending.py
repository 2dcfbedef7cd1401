"""The code of docs/extending.md runs, block after block."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"


def test_the_page_runs_as_it_is_printed(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 5
    script = tmp_path / "extending.py"
    script.write_text("\n".join(blocks))
    # A process of its own: what the page registers must not be known to other tests.
    run = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        capture_output=True,
        text=True,
        cwd=PAGE.parents[1],
        check=False,
    )
    assert run.returncode == 0, run.stderr
