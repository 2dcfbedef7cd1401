"""What a longer run costs is measured size by size, goes on where it stopped, and is summed up."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import growth, performance
from benchmarks.measuring import Cost
from tests.crash.forking import as_module, said_by


def line(case: str, size: int, median: float, unit: str = "ms", **more: Any) -> dict[str, Any]:
    found = growth.Found(case, unit, [[(median / growth.SCALES.get(unit, 1), 1.0)]]).line(size)
    return {**found, "backend": "sqlite", "date": "2026-11-24", "commit": "abcdef0", **more}


def test_the_ratio_is_the_median_of_neighbouring_rounds() -> None:
    here, small = [[(3.0, 1.1), (3.0, 9.0), (9.0, 1.1)], [(8.0, 1.0)]], [[(2.0, 1.0)], [(8.0, 1.0)]]
    found = growth.Found("write 64", "ms", here, small).line(1000)
    assert (found["ratio"], found["cpu_ratio"]) == (1.25, 1.05)
    assert (found["median"], found["low"], found["high"], found["repetitions"]) == (
        *(5500, 3000, 9000),
        4,
    )
    memory = growth.Found("memory of reader", "MB", [[(220.0,) * 2]], [[(200.0,) * 2]]).line(1000)
    assert memory["ratio"] == 1.1
    assert "cpu_median" not in memory


def test_each_operation_is_limited_by_what_it_was_at_the_smallest_size() -> None:
    lines = [
        line("write 64", 100, 2.0, ratio=1.0),
        line("write 64", 1000, 2.6, ratio=1.3),
        line("show", 100, 2.0, ratio=1.0),
        line("show", 1000, 2.7, ratio=1.35),
        line("memory of trainer", 1000, 221.0, "MB", ratio=1.101),
    ]
    write, show, memory = growth.summed_up(lines)
    assert (write["ratio"], write["kept"]) == (1.3, True)
    assert (write["sizes"], write["medians"]) == ([100, 1000], [2.0, 2.6])
    assert (show["limit"], show["kept"]) == (1.3, False)
    assert (memory["limit"], memory["kept"]) == (1.1, False)


def test_what_goes_through_the_whole_run_is_limited_by_experience() -> None:
    million = 1_000_000
    lines = [
        line("verify", 10_000, 90.0, "s per million"),  # it starts, too
        line("verify", million, 61.0, "s per million"),
        line("rebuild", million, 60.0, "s per million"),
        line("memory of rebuild", million, 161.0, "MB"),
        line("memory of verify", million, 160.0, "MB"),
    ]
    found = {row["case"]: (row["limit"], row["kept"]) for row in growth.summed_up(lines)}
    assert found == {
        "verify": (60, False),
        "rebuild": (60, True),
        "memory of rebuild": (160, False),
        "memory of verify": (160, True),
    }


def test_a_later_call_measures_what_is_not_measured(tmp_path: Path) -> None:
    kept, asked = tmp_path / "run.growth.jsonl", []

    def measure(size: int) -> Iterator[dict[str, Any]]:
        asked.append(size)
        yield line("write 64", size, 1.0)
        if size == 1000 and len(asked) == 2:
            raise KeyboardInterrupt

    assert len(growth.grown(kept, [100], measure)) == 1
    with pytest.raises(KeyboardInterrupt):
        growth.grown(kept, [100, 1000], measure)
    assert len(growth.grown(kept, [100, 1000], measure)) == 2
    assert asked == [100, 1000, 1000]


def test_the_table_has_a_column_for_each_size() -> None:
    lines = [
        line("show", 100, 2.0, ratio=1.0, cpu_ratio=1.0),
        line("show", 1000, 2.7, ratio=1.35, cpu_ratio=1.2),
        line("verify", 1000, 50.0, "s per million"),
    ]
    rows = {("growth", row["case"]): row for row in growth.summed_up(lines)}
    said = performance.growth(rows)
    head, _, show, verify = said.splitlines()
    assert head == "| what | 100 | 1,000 | ratio | of processor time | limit | measured |"
    assert show == "| show | 2 ms | 2.7 ms | 1.35 | 1.2 | 1.3 | 2026-11-24, abcdef0 |"
    assert verify.startswith("| verify |  | 50 s per million |  |  | 60 s per million | ")


@pytest.mark.long
def test_a_run_grows_from_one_size_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In processes that are forked from one; tests/doors starts them as a user does."""

    def forked(command: Sequence[str]) -> tuple[str, Cost]:
        began = time.perf_counter()
        (said,) = said_by(as_module, [command[2:]], tmp_path)
        code, _, output = said.partition(": ")
        assert code == "0", said
        seconds = time.perf_counter() - began
        return output.splitlines()[-1], Cost(seconds, seconds, 100)

    monkeypatch.setattr(growth, "run_measured", forked)
    small = ["growth", "--first", "512", "--rounds", "1", "--batches", "8"]
    summed: dict[str, Any] = {}
    at = ["--store", str(tmp_path / "run.db"), "--experiences"]
    for size in ("512", "5120"):
        monkeypatch.setattr(sys, "argv", [*small, *at, size])
        growth.main()
        rows = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
        measured = [row for row in rows if "kept" not in row]
        assert {row["experiences"] for row in measured} == {int(size)}
        summed = {row["case"]: row for row in rows if "kept" in row}
        assert len(summed) == len(measured) > 20
    assert summed["write 64"]["sizes"] == [512, 5120]
    assert {"commit a step", "show", "why", "groups", "rebuild", "verify"} <= summed.keys()
    assert {"memory of explorer", "memory of strategy", "memory of trainer"} <= summed.keys()
