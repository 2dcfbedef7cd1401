"""The code of the pages that teach by code runs, block after block."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.long
@pytest.mark.parametrize(("page", "count"), [("extending.md", 6), ("own_rollout.md", 4)])
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


@pytest.mark.parametrize(
    ("module", "name"), [("torch_data", "StepDataset"), ("trl", "StoredGRPOTrainer")]
)
def test_the_block_of_an_adapter_imports_it(module: str, name: str) -> None:
    text = (DOCS / "other_trainers.md").read_text()
    blocks = re.findall(r"^```text\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    (block,) = (block for block in blocks if f" {name}(" in block)
    assert block.startswith(f"from trinity_buffer.integrations.{module} import {name}\n")
    source = DOCS.parent / "trinity_buffer" / "integrations" / f"{module}.py"
    assert f"class {name}(" in source.read_text()


def test_the_files_on_the_path_of_an_experience_are_there() -> None:
    text = (DOCS / "how_it_works.md").read_text()
    lines = [re.findall(r"[\w/]+\.py\b", line) for line in text.splitlines()]
    # A bare name is in the folder of the file before it.
    files = [
        Path(name) if "/" in name else Path(names[0]).parent / name
        for names in lines
        for name in names
    ]
    assert len(files) > 15
    assert [file for file in files if not (DOCS.parent / "trinity_buffer" / file).is_file()] == []
