"""A short torture on each backend; `make torture` is the long one."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.torture import plan, sites
from tests.torture.round import run_round


# Some fifteen seconds each, with the start, the end and the proof.
@pytest.mark.parametrize("store", ["sqlite", "postgresql"])
def test_whatever_goes_wrong_nothing_is_lost_doubled_or_skipped(store: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        if store == "postgresql":
            site: sites.Site = stack.enter_context(sites.postgresql())
        else:
            (tmp_path / "stores").mkdir()
            site = sites.SQLiteSite(tmp_path / "stores")
        report = run_round(1, 0, site, tmp_path / "round", seconds=5.0, mean_gap_s=0.15, say=print)

    assert report.problems == []
    assert (report.lost, report.duplicated, report.skipped, report.different) == (0, 0, 0, 0)
    assert report.kills >= 1  # how many find somebody alive is up to the machine
    assert report.replayed >= 8
    assert report.faults["bit flipped"] == 1


def test_a_seed_is_a_plan() -> None:
    slots = {"e0": "explorer", "t0": "trainer", "r0": "reader"}

    def planned(seed: int, number: int) -> list[object]:
        faults = plan.faults(seed, number, "postgresql", slots, 20.0, 0.3)
        births = [plan.lives(seed, number, "sqlite", name, role) for name, role in slots.items()]
        return [*faults, *(next(lives) for lives in births for _ in range(5))]

    assert planned(1, 2) == planned(1, 2)
    assert len({str(planned(*which)) for which in ((1, 2), (1, 3), (2, 2))}) == 3
    assert {fault.kind for fault in plan.faults(1, 2, "postgresql", slots, 60.0, 0.1)} == {
        *("kill", "pause", "backend terminated", "backend killed", "server killed")
    }
