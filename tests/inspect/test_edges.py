"""What is shown of groups and rows at an edge: two runs, several steps, copies, no tensor."""

from __future__ import annotations

import statistics
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import torch
from typing_extensions import override

from tests.conftest import Resize
from tests.contract.making import rollout
from tests.pipeline.planting import unguarded
from tests.raw_store import sql
from tests.trainer.test_mixing import filled, taken
from trinity_buffer import open_store, run_strategy
from trinity_buffer.algorithm.add_strategy import AddStrategy
from trinity_buffer.errors import UnknownNameError
from trinity_buffer.experience import Experience
from trinity_buffer.inspector import (
    blame,
    compare_runs,
    compare_sets,
    groups,
    leases,
    position_before,
    show,
    steps,
)
from trinity_buffer.inspector.experience import places_of
from trinity_buffer.inspector.fates import Fate, StepView
from trinity_buffer.inspector.source import now
from trinity_buffer.inspector.step_lines import trainer_of
from trinity_buffer.pipeline.coordination.lease import owner_name


async def test_two_runs_have_a_deviation_and_one_has_none(sqlite_url: str) -> None:
    async with open_store(sqlite_url) as store:
        experiment = await store.experiment("run", config={})
        rewards = [(0, 0, 0.25), (0, 1, 1.0), (1, 0, 1.0)]
        some = [rollout(task=task, run=run, reward=reward) for task, run, reward in rewards]
        await experiment.writer("e0").write(some)
        one, two = await groups(experiment)
    assert two.deviation == statistics.stdev([0.25, 1.0])
    assert (one.deviation, one.mean) == (None, 1.0)


async def test_a_run_of_several_steps_is_one_run(sqlite_url: str) -> None:
    async with open_store(sqlite_url) as store:
        experiment = await store.experiment("run", config={})
        writer = experiment.writer("e0")
        await writer.plan("b", [0], 3)
        await writer.write([rollout(run=1, step=step) for step in range(3)])
        (group,) = await groups(experiment)
    assert (group.rollouts, len(group.runs), group.missing) == (3, 3, 2)


async def test_the_last_events_are_all_of_them_where_there_are_fewer(sqlite_url: str) -> None:
    async with open_store(sqlite_url) as store:
        experiment = await store.experiment("run", config={})
        await experiment.writer("e0").write([rollout()])
        after = [await position_before(experiment, count) for count in (0, 1, 2, 3)]
    assert after == [2, 1, 0, 0]


def test_a_fate_tells_of_every_copy_once() -> None:
    trained = [StepView("t", 1, committed=True, reason=None)]
    fate = Fate("grpo", "annotated", None, {1: trained, 2: trained, 3: []})
    assert str(fate) == "trained in step 1 of t; ready"


async def test_what_no_strategy_has_seen_does_not_wait(sqlite_url: str) -> None:
    async with open_store(sqlite_url) as store:
        experiment = await store.experiment("run", config={"rollouts_per_group": 3})
        for run in range(2):
            await experiment.writer("e0").write([rollout(run=run)])
            if run == 0:
                await experiment.writer("e0").write([rollout(task=1, run=run) for run in range(3)])
                await run_strategy(experiment, "grpo")
        shown = [(await show(experiment, f"b/0/{run}/0/")).sets for run in range(2)]
    assert [[(one.annotation_set, one.state) for one in sets] for sets in shown] == [
        [("grpo", "waiting")],
        [("grpo", "unseen")],
    ]


def test_a_row_without_a_tensor_has_no_place_in_the_column() -> None:
    column = cast("Any", SimpleNamespace(rows=np.array([1, 3])))
    assert places_of(column, range(5)) == [None, 0, None, 1, None]


async def test_two_sets_are_compared_over_every_page(sqlite_url: str, resize: Resize) -> None:
    """Rows that differ most lie on the first page; the last has advantages of zero."""
    resize(rows_per_page=1)
    rewards = [(0.0, 0.1), (0.0, 1.0), (1.0, 1.0)]
    async with open_store(sqlite_url) as store:
        experiment = await store.experiment("run", config={"rollouts_per_group": 2})
        await experiment.writer("e0").write(
            [
                rollout(task=task, run=run, reward=rewards[task][run])
                for task in range(3)
                for run in (0, 1)
            ]
        )
        for name, epsilon in (("sharp", 1e-6), ("flat", 0.5)):
            await run_strategy(experiment, "grpo", {"epsilon": epsilon}, name=name)
        found = await compare_sets(now(experiment), "sharp", "flat", limit=2)
        counted = await compare_sets(now(experiment), "sharp", "flat", limit=0)
    assert (found.both, found.equal, found.opposite) == (6, 2, 0)
    assert {one.uid for one in found.rows} == {"b/0/0/0/", "b/0/1/0/"}
    assert (counted.both, counted.rows) == (6, [])


class AlmostNothing(AddStrategy):
    """Gives zero, as a sum of numbers of either sign comes out."""

    families: ClassVar[tuple[str, ...]] = ("light", "tokens")
    noise: ClassVar[tuple[float, ...]] = ()

    @override
    async def add(self, experiences: list[Experience], step: int) -> tuple[int, dict[str, Any]]:
        for row, noise in zip(experiences, self.noise, strict=True):
            size = len(row.tokens) - row.prompt_length
            row.advantages = torch.full((size,), noise, dtype=torch.float64)
        await self.writer.write(experiences)
        return len(experiences), {}


async def test_what_rounding_leaves_of_zero_is_zero_between_two_sets(sqlite_url: str) -> None:
    async with open_store(sqlite_url) as store:
        experiment = await store.experiment("run", config={"rollouts_per_group": 4})
        await experiment.writer("e0").write([rollout(run=run) for run in range(4)])
        for name, noise in (
            ("a", (-2e-16, 1.0, 0.1, 0.0)),
            ("b", (3e-16, 1.0 + 1e-15, -0.1, 0.05)),
        ):
            AlmostNothing.noise = noise
            await run_strategy(experiment, AlmostNothing, name=name)
        found = await compare_sets(now(experiment), "a", "b")
    assert (found.both, found.equal, found.opposite) == (4, 2, 1)
    assert [one.uid for one in found.rows] == ["b/0/2/0/", "b/0/3/0/"]


async def test_a_commit_by_a_clock_that_went_back_took_no_negative_time(sqlite_url: str) -> None:
    async with open_store(sqlite_url) as store:
        experiment = await store.experiment("run", config={"rollouts_per_group": 1})
        await experiment.writer("e0").write([rollout(task=task) for task in range(2)])
        async with experiment.train_stream(strategy=None) as stream:
            for metrics in ({"loss": -2e-16}, {"loss": 1e-17}):
                await stream.commit(await anext(stream), metrics=metrics)
        compared = await compare_runs(now(experiment), now(experiment))
    assert compared.steps[1]["loss"] == [0.0, 0.0]
    earlier = "recorded_at = recorded_at - 1000000000 WHERE kind = 'StepsCommitted'"
    await unguarded(sqlite_url, sql(f"UPDATE event SET {earlier}"))
    async with open_store(sqlite_url, read_only=True) as store:
        lines = await steps(now(await store.experiment("run")))
    assert [one.seconds for one in lines] == [None, None]


async def test_a_lease_that_is_held_names_its_owner(sqlite_url: str) -> None:
    async with open_store(sqlite_url) as store:
        experiment = await store.experiment("run", config={"rollouts_per_group": 1})
        await experiment.writer("e0").write([rollout()])
        async with experiment.train_stream(strategy=None, lease_ttl_s=600.0) as stream:
            await anext(stream)
            (held,) = await leases(now(experiment))
        (free,) = await leases(now(experiment))
    assert (held.trainer, held.state) == ("trainer", "held")
    host, pid, *_ = owner_name().rsplit(":", 3)
    assert held.owner is not None
    assert held.owner.rsplit(":", 3)[:2] == [host, pid]
    assert (held.token, held.leased_step, held.committed_step) == (1, 1, 0)
    assert held.expires_in_s == pytest.approx(600.0, abs=60.0)
    assert free == replace(held, state="free", owner=None, expires_in_s=None)


async def test_who_is_no_trainer_is_named_beside_those_that_are(sqlite_url: str) -> None:
    async with open_store(sqlite_url) as store:
        source = now(await store.experiment("run", config={}))
        for wanted, named in ((None, "no trainer"), ("me", "no trainer 'me'")):
            with pytest.raises(UnknownNameError) as unknown:
                await trainer_of(source, wanted)
            assert str(unknown.value) == f"{named} in 'run' (there: none)"


async def test_a_row_whose_experience_is_lost_is_shown_without_what_it_knew(
    sqlite_url: str,
) -> None:
    async with open_store(sqlite_url) as store:
        experiment = await filled(store)
        await taken(experiment, 1)
        (before,) = [row for row in (await blame(now(experiment), 1)).rows if row.experiment]
        expert = (await store.experiment("expert")).key
        lost = sql("DELETE FROM experience WHERE experiment = :expert", expert=expert)
        await store.database.write(lost)
        (after,) = [row for row in (await blame(now(experiment), 1)).rows if row.experiment]
    assert (before.length, before.trained_tokens) != (0, 0)
    assert after == replace(before, uid="", run=None, reward=None, length=0, trained_tokens=0)


async def test_ages_are_whole_numbers_however_large(sqlite_url: str) -> None:
    """As a float, 2**53 + 1 would be another number."""
    version = 2**53 + 1
    async with open_store(sqlite_url) as store:
        experiment = await store.experiment("run", config={"rollouts_per_group": 1})
        made = [rollout(task=task, version=[version, None][task]) for task in (0, 1)]
        made[1].reward = None
        await experiment.writer("e0").write(made)
        async with experiment.train_stream(strategy=None, groups_per_step=2) as stream:
            await stream.commit(await anext(stream))
        (line,) = await steps(now(experiment))
    assert (line.oldest, line.staleness, line.reward) == (-version, float(-version), 0.5)
