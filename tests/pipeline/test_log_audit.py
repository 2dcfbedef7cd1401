"""Which planned runs are stored is known to `verify`, however they come, in little memory."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trinity_buffer.pipeline.verify.addresses import Batches, Names, lacking

BATCHES = st.sampled_from(["a", "b", "c"])
RUN = st.tuples(BATCHES, st.integers(0, 2), st.integers(0, 3))
STEPS = st.one_of(
    st.tuples(st.just("planned"), BATCHES, st.lists(st.integers(0, 2)), st.integers(1, 3)),
    st.tuples(st.just("recorded"), st.lists(RUN, min_size=1)),
    st.tuples(st.just("sealed"), BATCHES),
)


@given(st.lists(STEPS, max_size=12))
def test_they_are_counted_as_sets_would(steps: list[tuple[object, ...]]) -> None:
    """A batch is planned once; what is recorded may come before, between, twice, and late."""
    found, stored, planned = Batches(), set(), defaultdict(set)
    for step in steps:
        match step:
            case ("planned", str(batch), list(tasks), int(rollouts)) if batch not in planned:
                found.plan(batch, tasks, rollouts)
                planned[batch] = {(batch, t, run) for t in tasks for run in range(rollouts)}
            case ("recorded", list(runs)):
                batches, tasks_of, numbers = zip(*runs, strict=True)
                found.record(batches, tasks_of, numbers, ())
                stored |= set(runs)
            case ("sealed", str(batch)):
                found.seal(batch)
        assert found.stored() == len(set().union(*planned.values()) & stored)


def test_a_complete_batch_is_forgotten_when_it_is_sealed() -> None:
    found = Batches()
    found.plan("a", range(2), 2)
    found.record(["a"] * 4, [0, 0, 1, 1], [0, 1, 0, 1], ())
    assert found.seal("a") == 4
    (batch,) = found.by_name.values()
    assert (found.stored(), len(batch.planned), len(batch.runs)) == (4, 0, 0)
    found.record(["a"], [0], [7], late=[0])
    assert found.stored() == 4


def test_what_was_refused_as_late_and_what_was_sealed_must_agree() -> None:
    found = Batches()
    assert found.record(["a", "b"], [0, 0], [0, 0], late=[1]) == [1]
    assert (found.seal("a"), found.seal("b")) == (1, 0)
    assert found.record(["a", "a", "c"], [0, 0, 0], [1, 2, 0], late=[1]) == [0]


@given(st.lists(st.integers(0, 9)), st.lists(st.integers(0, 9)))
def test_names_know_what_was_added_and_what_came_twice(first: list[int], later: list[int]) -> None:
    names = Names()
    for some in (first, later):
        names.add(map(str, some))
        wanted = np.array([hash(str(one)) for one in range(10)], np.int64)
        every = first if some is first else first + later
        assert lacking(names.hashes, wanted).tolist() == [one not in every for one in range(10)]
        twice = {hash(str(one)) for one in every if every.count(one) > 1}
        assert names.repeated() == twice


def test_what_is_looked_up_in_several_goes_is_found() -> None:
    known = np.arange(0, 2_000_000, 2)
    assert lacking(known, np.arange(2_000_000)).tolist() == [False, True] * 1_000_000
