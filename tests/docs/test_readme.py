"""The example of the README runs as it is printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_example_of_the_readme_runs(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^(\d+) tensor", done.stdout, re.MULTILINE) == ["1", "2"]
    # Rewards 0, 1, 0, 1: mean 1/2, deviation 0.577; on the two response tokens of each row.
    assert done.stdout.count("0.8660,  0.8660]") == 4
    assert done.stdout.count("-0.8660, -0.8660]") == 4


def test_every_page_is_listed_and_every_link_leads_somewhere() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "index.md" or f"({page.name})" in index, f"{page.name} is not listed"
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link} leads nowhere"
