"""What a trainer of long rows holds, in payloads of a step."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.long_rows import trained
from benchmarks.sites import SQLiteSite


@pytest.mark.long
def test_a_trainer_of_long_rows_holds_few_payloads_of_a_step(tmp_path: Path) -> None:
    lines = trained(SQLiteSite(tmp_path), "128k tokens", Namespace(rows=8, steps=3))
    line = next(lines)
    assert line["case"] == "steps of 64 rows of 128k tokens, padded, loss"
    # The next one as it was stored, and two payloads of columns; a third is room for malloc.
    assert 2 < line["peak_payloads"] < 4.2, line
