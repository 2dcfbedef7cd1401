"""Every fault at an edge turns the fast test that is named beside it red."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.planted_faults.faults import FAULTS, table

ROOT = Path(__file__).parents[2]
PARTS = 2
"""Processes, each of which imports torch for five seconds, and then takes one for each fault."""


def test_the_documents_show_these_faults_in_code_and_tests_that_exist() -> None:
    assert table() in (ROOT / "docs" / "proofs" / "faults.md").read_text()
    assert len({fault.what for fault in FAULTS}) == len(FAULTS)
    for fault in FAULTS:
        file, _, name = fault.test.partition("::")
        assert f"def {name}(" in (ROOT / file).read_text(), fault.test
        text = (ROOT / "trinity_buffer" / fault.file).read_text()
        assert text.count(fault.old) == 1, f"{fault.what}: the code is another now"


@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
def test_the_fault_is_found(part: int) -> None:
    command = [sys.executable, "-m", "tests.planted_faults.faulty", "--part", f"{part}/{PARTS}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stderr
    assert [one["what"] for one in found] == [fault.what for fault in FAULTS[part::PARTS]]
    assert [one for one in found if not one["red"]] == []
