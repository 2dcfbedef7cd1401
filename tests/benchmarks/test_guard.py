"""A figure that has halved is named, after it was measured twice; others are not."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from benchmarks import guard, performance
from benchmarks.measuring import Figure
from benchmarks.throughput import WRITES

RECORDED = {("write", "64 per call"): {"ratio": 0.35, "date": "2026-11-23"}}


def figure(ratio: float, case: str = "64 per call") -> Figure:
    return Figure("write", case, "sqlite", "experiences/s", 700, 2000, ratio, 0.1, 0.4, 3)


def test_a_figure_under_half_of_the_recorded_one_is_named() -> None:
    (line,) = guard.slow([figure(0.174), figure(0.176)], RECORDED)
    assert line.startswith("write, 64 per call, sqlite: 0.174 of the bare speed (700 /s)")
    assert line.endswith("where 0.35 is recorded (2026-11-23)")


def test_a_figure_that_nobody_recorded_is_not_judged() -> None:
    assert guard.slow([figure(0.001, "another")], RECORDED) == []


@pytest.mark.parametrize(("again", "number"), [(0.1, 1), (0.3, 0)])
def test_a_slow_figure_is_measured_once_more(again: float, number: int) -> None:
    asked = []

    def measure(name: str, factor: int) -> Iterator[Figure]:
        asked.append((name, factor))
        yield figure(again if factor > 1 else 0.1)

    assert len(guard.guarded(["write"], measure, RECORDED)) == number
    assert asked == [("write", 1), ("write", 3)]


def test_the_command_fails_with_the_name_of_a_slow_figure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(guard, "newest_rows", lambda: RECORDED)
    monkeypatch.setattr("sys.argv", ["guard", "--only", "write"])
    monkeypatch.setitem(guard.GUARDED, "write", lambda *_: [figure(0.1)])
    assert guard.main() == 1
    assert "too slow: write, 64 per call, sqlite: 0.1 of" in capsys.readouterr().err
    monkeypatch.setitem(guard.GUARDED, "write", lambda *_: [figure(0.3)])
    assert guard.main() == 0


def test_each_guarded_figure_is_recorded_with_its_ratio() -> None:
    rows = [row for (op, _), row in performance.newest_rows().items() if op in guard.GUARDED]
    assert len(rows) == len(WRITES) + 3  # GRPO, and a stream in each layout
    assert all(row["ratio"] > 0 and re.match(r"\d{4}-", row["date"]) for row in rows)
