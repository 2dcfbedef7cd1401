"""The code of the pages that teach by code runs, block after block."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.long
@pytest.mark.parametrize(("page", "count"), [("extending.md", 5), ("own_rollout.md", 3)])
def test_the_page_runs_as_it_is_printed(page: str, count: int, tmp_path: Path) -> None:
    text = (DOCS / page).read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert len(blocks) == count
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks))
    # A process of its own: what the page registers must not be known to other tests.
    run = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        capture_output=True,
        text=True,
        cwd=DOCS.parent,
        check=False,
    )
    assert run.returncode == 0, run.stderr
