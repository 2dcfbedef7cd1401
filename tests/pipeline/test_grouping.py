"""When a group or a batch is ready, without any database."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import count
from typing import Any, Literal

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from trinity_buffer import GroupingRules
from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.identity import EID, Key
from trinity_buffer.pipeline.annotate.consumer import sort_key
from trinity_buffer.pipeline.annotate.grouping import (
    Group,
    Grouping,
    ReadyUnit,
    Row,
)
from trinity_buffer.store.rows import BatchRow, ExperienceRow

S = 1_000_000
_addresses = count(1)


def row(
    batch: Key = "b", task: Key = 0, run: int = 0, step: int = 0, refused: str | None = None
) -> list[Row]:
    return [
        (stored(batch, task, run, step, refused).address, batch, task, run, refused is not None)
    ]


def stored(
    batch: Key = "b", task: Key = 0, run: int = 0, step: int = 0, refused: str | None = None
) -> ExperienceRow:
    eid = EID(batch, task, run, step)
    return ExperienceRow(next(_addresses), eid, 0.5, 0, 1, 2, 1, None, refused, b"", b"")


def planned(batch: Key = "b", tasks: Sequence[Key] = (0,), runs: int = 2) -> BatchRow:
    return BatchRow(batch, "e0", runs, 1, None, None, tuple(tasks))


def grouping(unit: Literal["group", "batch"] = "group", **rules: Any) -> Grouping:
    return Grouping(unit, GroupingRules(**rules))


def keys(units: Sequence[ReadyUnit]) -> list[list[str]]:
    """Return the (batch, task) of the groups of each unit, as one text each."""
    return [["/".join(group.key) for group in unit] for unit in units]


def addresses_of(rows: list[Row]) -> list[int]:
    return [address for address, *_ in rows]


def addresses(unit: ReadyUnit) -> list[int]:
    return [address for group in unit for address in group.members]


def is_short(unit: ReadyUnit) -> bool:
    return any(group.short for group in unit)


def test_a_group_is_ready_when_its_planned_runs_are_there() -> None:
    it = grouping()
    it.apply_plan(planned(tasks=[0, 1]), sealed=False)
    it.record(row(task=0, run=0), 0)
    it.record(row(task=1, run=1), 0)
    assert it.take_ready(0) == []
    it.record(row(task=1, run=0), 0)
    assert keys(it.take_ready(0)) == [["b/1"]]
    assert it.take_ready(0) == []
    assert it.num_waiting == (1, 1)


def test_a_straggler_holds_back_nobody_in_other_groups() -> None:
    it = grouping()
    for batch in range(5):
        it.apply_plan(planned(batch, tasks=[0, 1]), sealed=False)
        it.record(row(batch, 0, 0), 0)
        for run in range(2):
            it.record(row(batch, 1, run), 0)
    assert keys(it.take_ready(0)) == [[f"{batch}/1"] for batch in range(5)]


def test_rows_are_sorted_by_task_run_and_step_numbers_as_numbers() -> None:
    places = (("x", 0, 0), (10, 0, 1), (9, 0, 0), (10, 0, 0))
    rows = sorted((stored("b", task, run, step) for task, run, step in places), key=sort_key)
    assert [(r.eid.task, r.eid.step) for r in rows] == [(9, 0), (10, 0), (10, 1), ("x", 0)]


def test_a_number_and_its_text_are_one_group() -> None:
    it = grouping()
    it.apply_plan(planned(7, tasks=["8"]), sealed=False)
    it.record(row("7", 8, 0), 0)
    it.record(row(7, "8", 1), 0)
    assert keys(it.take_ready(0)) == [["7/8"]]


def test_a_run_that_is_not_planned_completes_no_planned_group() -> None:
    it, free = grouping(on_incomplete_group="reject"), grouping(rollouts_per_group=2)
    it.apply_plan(planned(runs=2), sealed=False)
    for run in (0, 5):
        it.record(row(run=run), 0)
        free.record(row(run=run), 0)
    assert it.take_ready(0) == []
    assert keys(free.take_ready(0)) == [["b/0"]], "nobody said which runs there should be"
    it.record(row(run=1), 0)
    (unit,) = it.take_ready(0)
    assert len(addresses(unit)) == 3
    assert not is_short(unit)


def test_a_batch_waits_for_all_of_its_groups() -> None:
    it = grouping("batch")
    it.apply_plan(planned(tasks=[0, 1]), sealed=False)
    for task in (0, 1):
        assert it.take_ready(0) == []
        for run in range(2):
            it.record(row(task=task, run=run), 0)
    (unit,) = it.take_ready(0)
    assert keys([unit]) == [["b/0", "b/1"]]
    assert not is_short(unit)


@pytest.mark.parametrize("unit", ["group", "batch"])
def test_a_seal_makes_ready_what_is_there(unit: Literal["group", "batch"]) -> None:
    it = grouping(unit)
    it.apply_plan(planned(tasks=[0, 1, 2]), sealed=False)
    it.record(row(task=0), 0)
    it.record(row(task=0, run=1), 0)
    it.record(row(task=1), 0)
    it.take_ready(0)
    it.seal("b")
    units = it.take_ready(0)
    expected = [["b/0", "b/1", "b/2"]] if unit == "batch" else [["b/1"], ["b/2"]]
    assert keys(units) == expected
    assert all(is_short(found) for found in units)


def test_an_unplanned_batch_needs_a_number_a_seal_or_a_deadline() -> None:
    without, number = grouping(), grouping(rollouts_per_group=2)
    for it in (without, number):
        for run in range(2):
            it.record(row(run=run), 0)
    assert without.take_ready(10**12) == []
    assert keys(number.take_ready(0)) == [["b/0"]]
    without.seal("b")
    (unit,) = without.take_ready(0)
    assert not is_short(unit), "nobody said how many there should be"


def test_an_unplanned_batch_is_no_unit_before_it_is_sealed() -> None:
    it = grouping("batch", rollouts_per_group=1)
    it.record(row(task=0), 0)
    it.record(row(task=1), 0)
    assert it.take_ready(0) == []
    it.seal("b")
    assert keys(it.take_ready(0)) == [["b/0", "b/1"]]


def test_a_plan_beats_the_rule() -> None:
    it = grouping(rollouts_per_group=1)
    it.apply_plan(planned(runs=3), sealed=False)
    it.record(row(), 0)
    assert it.take_ready(0) == []


def test_the_deadline_counts_from_the_first_experience_of_the_group() -> None:
    it = grouping(group_timeout_s=10)
    assert it.next_ends_us() == (math.inf, math.inf)
    it.apply_plan(planned(tasks=[0, 1, 2]), sealed=False)
    it.record(row(task=1), 3 * S)
    it.record(row(task=0), 5 * S)
    assert it.next_ends_us() == (13 * S, math.inf)
    assert it.take_ready(13 * S - 1) == []
    (unit,) = it.take_ready(13 * S)
    assert (keys([unit]), is_short(unit)) == ([["b/1"]], True)
    assert it.next_ends_us() == (15 * S, math.inf)
    assert keys(it.take_ready(15 * S)) == [["b/0"]]
    none = (math.inf, math.inf)
    assert it.next_ends_us() == none, "a group without a first experience has no deadline"


def test_the_deadline_of_one_group_closes_a_batch() -> None:
    it = grouping("batch", group_timeout_s=10)
    it.apply_plan(planned(tasks=[0, 1]), sealed=False)
    it.record(row(task=1), 0)
    assert it.take_ready(9 * S) == []
    assert keys(it.take_ready(10 * S)) == [["b/0", "b/1"]]


def test_a_group_of_unknown_size_is_closed_when_nothing_has_come_for_it() -> None:
    it = grouping(idle_s=10)
    it.record(row(task=1), 3 * S)
    it.record(row(task=0), 4 * S)
    it.record(row(task=1, run=1), 8 * S)
    assert it.next_ends_us() == (math.inf, 14 * S)
    assert keys(it.take_ready(14 * S)) == [["b/0"]]
    assert it.take_ready(18 * S - 1) == []
    (unit,) = it.take_ready(18 * S)
    assert (keys([unit]), is_short(unit)) == ([["b/1"]], False)
    assert it.next_ends_us() == (math.inf, math.inf)


def test_a_batch_of_groups_of_unknown_size_is_closed_when_all_are_idle() -> None:
    it = grouping("batch", idle_s=10)
    it.record(row(task=0), 0)
    it.record(row(task=1), 5 * S)
    assert it.take_ready(15 * S - 1) == []
    assert keys(it.take_ready(15 * S)) == [["b/0", "b/1"]]


def test_a_group_whose_number_of_runs_is_known_waits_for_them() -> None:
    it = grouping(idle_s=10, rollouts_per_group=2)
    it.record(row(task=0), 0)
    assert it.next_ends_us() == (math.inf, math.inf)
    assert it.take_ready(60 * S) == []
    it = grouping(idle_s=10)
    it.apply_plan(planned(tasks=[0], runs=2), sealed=False)
    it.record(row(task=0), 0)
    assert it.take_ready(60 * S) == []


@pytest.mark.parametrize("unit", ["group", "batch"])
def test_what_comes_for_a_decided_group_is_late(unit: Literal["group", "batch"]) -> None:
    it = grouping(unit)
    it.apply_plan(planned(tasks=[0, 1], runs=1), sealed=False)
    it.record(row(task=0), 0)
    if unit == "batch":
        it.record(row(task=1), 0)
    it.take_ready(0)
    it.mark_decided(("b", "0"))
    late = row(task=0, run=5)
    it.record(late, 0)
    it.record(row(task=0, run=6, refused="invalid"), 0)
    assert it.take_late() == addresses_of(late)
    assert it.take_late() == []


def test_a_batch_is_decided_as_a_whole() -> None:
    it = grouping("batch", rollouts_per_group=1)
    it.mark_decided(("b", "0"))
    other = row(task=1)
    it.record(other, 0)
    it.seal("b")
    assert (it.take_ready(0), it.take_late()) == ([], addresses_of(other))


def test_refused_runs_count_as_stored_and_are_no_members() -> None:
    it = grouping()
    it.apply_plan(planned(), sealed=False)
    it.record(row(run=0, refused="invalid"), 0)
    kept = row(run=1)
    it.record(kept, 0)
    (unit,) = it.take_ready(0)
    assert addresses(unit) == addresses_of(kept)
    assert is_short(unit), "nobody waits for the refused run, and it is lacking all the same"


def test_a_run_of_which_one_step_was_refused_is_there() -> None:
    it = grouping()
    it.apply_plan(planned(runs=1), sealed=False)
    it.record(row(run=0, step=1, refused="invalid"), 0)
    it.record(row(run=0), 0)
    (unit,) = it.take_ready(0)
    assert not is_short(unit)


def test_an_unplanned_task_of_a_planned_batch_is_not_planned() -> None:
    it = grouping()
    it.apply_plan(planned(tasks=[0], runs=1), sealed=False)
    it.record(row(task=0), 0)
    it.record(row(task=7), 0)
    assert [(unit[0].key[1], unit[0].planned) for unit in it.take_ready(0)] == [
        ("0", True),
        ("7", False),
    ]


@pytest.mark.parametrize("unit", ["group", "batch"])
def test_groups_without_members_that_were_ready_are_not_ready_again(
    unit: Literal["group", "batch"],
) -> None:
    it = grouping(unit)
    it.apply_plan(planned(tasks=[0, 1, 2], runs=1), sealed=False)
    it.group(("b", "0")).runs.add(0)  # refused
    if unit == "batch":
        it.mark_empty_groups("b")
        it.seal("b")
        assert keys(it.take_ready(0)) == [["b/0", "b/1", "b/2"]], "it was not ready before"
        return
    it.mark_empty_groups("b")
    it.record(row(task=1), 0)
    assert keys(it.take_ready(0)) == [["b/1"]]
    it.seal("b")
    assert keys(it.take_ready(0)) == [["b/2"]]


@pytest.mark.parametrize(
    "wrong",
    [
        {"on_incomplete_group": "maybe"},
        {"rollouts_per_group": 0},
        {"group_timeout_s": -1.0},
        {"idle_s": 0},
    ],
)
def test_impossible_rules_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(wrong))):
        GroupingRules(**wrong)


class GroupingMachine(RuleBasedStateMachine):
    """Whatever comes, in whichever order: each row goes to one place, at a time that is right."""

    @initialize(
        unit=st.sampled_from(["group", "batch"]), group_timeout_s=st.sampled_from([None, 5.0])
    )
    def start(self, unit: Literal["group", "batch"], group_timeout_s: float | None) -> None:
        self.it = grouping(unit, group_timeout_s=group_timeout_s, rollouts_per_group=2)
        self.group_timeout_s = group_timeout_s
        self.now = 0
        self.recorded: list[int] = []
        self.placed: list[int] = []
        self.runs: dict[str, int] = {}
        self.first: dict[tuple[str, str], int] = {}
        self.begun: set[str] = set()
        self.sealed: set[str] = set()
        self.decided: set[tuple[str, str]] = set()

    @rule(batch=st.integers(0, 2), runs=st.integers(1, 3))
    def plan(self, batch: int, runs: int) -> None:
        # A batch that holds experiences, or is sealed, cannot be planned any more.
        if str(batch) not in self.runs.keys() | self.sealed | self.begun:
            self.runs[str(batch)] = runs
            self.it.apply_plan(planned(batch, tasks=[0, 1], runs=runs), sealed=False)

    @rule(
        batch=st.integers(0, 2),
        task=st.integers(0, 3),
        run=st.integers(0, 3),
        refused=st.sampled_from([None, None, None, "invalid"]),
    )
    def record(self, batch: int, task: int, run: int, refused: str | None) -> None:
        if str(batch) in self.sealed:
            return  # refused at the door
        # The consumer asks for what the grouping has forgotten.
        for key in self.decided - self.it.groups.keys():
            self.it.mark_decided(key)
        found = row(batch, task, run, refused=refused)
        self.begun.add(str(batch))
        self.it.record(found, self.now)
        if refused is None:
            self.recorded += addresses_of(found)
            self.first.setdefault((str(batch), str(task)), self.now)

    @rule(batch=st.integers(0, 2))
    def seal(self, batch: int) -> None:
        if str(batch) not in self.sealed:
            self.sealed.add(str(batch))
            self.it.seal(str(batch))

    @rule(seconds=st.integers(0, 7))
    def take(self, seconds: int) -> None:
        self.now += seconds * S
        for unit in self.it.take_ready(self.now):
            self.placed += addresses(unit)
            in_time = [self.has_all(one) for one in unit]
            overdue = [self.is_overdue(one) for one in unit]
            assert all(in_time) or any(overdue)
            assert not self.decided & {one.key for one in unit}
            self.decided |= {one.key for one in unit}
        self.placed += self.it.take_late()

    def has_all(self, one: Group) -> bool:
        return one.key[0] in self.sealed or len(one.runs) >= self.runs.get(one.key[0], 2)

    def is_overdue(self, one: Group) -> bool:
        since = self.first.get(one.key)
        return (
            self.group_timeout_s is not None
            and since is not None
            and self.now - since >= self.group_timeout_s * S
        )

    @invariant()
    def nothing_is_lost_or_there_twice(self) -> None:
        placed = [*self.placed, *self.it._late]
        assert len(placed) == len(set(placed))
        assert set(placed) <= set(self.recorded)
        assert self.it.num_waiting[0] == len(self.recorded) - len(placed)


TestGroupingMachine = GroupingMachine.TestCase
TestGroupingMachine.settings = settings(
    max_examples=min(60, settings().max_examples), stateful_step_count=40
)
