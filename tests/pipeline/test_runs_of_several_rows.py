"""The unit of a group's statistics is the run, however many rows it has."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from typing_extensions import override

from tests.contract.making import opened, rollout
from tests.handles import Experiment, Store
from tests.pipeline.test_reward_table import by_experiences, by_rewards, said
from tests.pipeline.test_reward_table import recorded as as_events
from tests.raw_store import new_event, rows
from tests.whole_stores import experiences_of
from trinity_buffer import inspector, open_store, run_strategy
from trinity_buffer.algorithm import ADD_STRATEGY, ADVANTAGE_FN
from trinity_buffer.algorithm.add_strategy import (
    AddStrategy,
    ASYMREAddStrategy,
    BestOfGroupAddStrategy,
    GRPOAddStrategy,
    OPMDAddStrategy,
    RECAddStrategy,
    RewardStrategy,
    compose,
)
from trinity_buffer.algorithm.compat import reference_kwargs
from trinity_buffer.algorithm.group_scores import Rewards, ScoredGroups
from trinity_buffer.errors import ConflictingStrategyError, InvalidArgumentError
from trinity_buffer.events import ConsumerRegistered
from trinity_buffer.experience import Experience, group_by
from trinity_buffer.pipeline.annotate.grouping import Group
from trinity_buffer.pipeline.load.columns import RowLoader
from trinity_buffer.pipeline.load.reading import EventCache
from trinity_buffer.pipeline.train.collate import collate_step
from trinity_buffer.pipeline.train.microbatch import Mover, StepMemory
from trinity_buffer.store import writer_queries
from trinity_buffer.writer import StagedWriter

Run = float | None | list[float | None]
"""The reward of a run, or those of its rows."""


class Halving(RewardStrategy):
    """A strategy of somebody's own, which knows nothing of rows."""

    @override
    def score_groups(self, rewards: Rewards) -> ScoredGroups:
        """Return the distance from half the sum."""
        half = rewards.sum(axis=-1) / 2
        return ScoredGroups(scores=rewards - half[:, None], metrics={"half": half})


STRATEGIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "grpo": ("grpo", {}),
    "grpo with a threshold": ("grpo", {"std_threshold": 0.1}),
    "grpo, zero alone": ("grpo", {"single_member": "zero", "ddof": 0}),
    "opmd": ("opmd", {}),
    "opmd, soft": ("opmd", {"opmd_baseline": "logavgexp", "tau": 0.5}),
    "asymre": ("asymre", {}),
    "rec": ("rec", {"std_normalize": True}),
    "rec, balanced": ("rec", {"drop": "balance"}),
    "reinforce": ("reinforce", {}),
    "grpo_grouped": ("grpo_grouped", {}),
    "grpo_grouped of a batch": ("grpo_grouped", {"std_cal_level": "batch"}),
    "grpo_grouped, ranked": ("grpo_grouped", {"rank_penalty": 0.25}),
    "correct_bias": ("correct_bias", {}),
    "step_wise_grpo": ("step_wise_grpo", {}),
    "best": ("best_of_group", {"num_kept": 2}),
    "sampled": ("dapo_dynamic_sampling", {}),
    "gated": ("outcome_gate", {"min_correct": 2}),
    "varied": ("reward_variance", {"variance_threshold": 0.1}),
    "varied, then scored": (["reward_variance", "grpo"], {}),
    "the best, then scored": (["best_of_group", "grpo"], {"best_of_group": {"num_kept": 2}}),
    "of one's own": (Halving, {}),
}


def rows_of(run: Run) -> list[float | None]:
    return run if isinstance(run, list) else [run]


def group(task: int, runs: Sequence[Run]) -> list[Experience]:
    """Return the rows of some runs; their likelihood is that of the run."""
    made = []
    for run, rewards in enumerate(runs):
        for step, reward in enumerate(rows_of(rewards)):
            one = rollout(task=task, run=run, step=step, reward=reward)
            one.logprobs = torch.full((5,), -0.25 * (1 + run))
            made.append(one)
    return made


Place = tuple[int, int, int]
"""Task, run and step."""


async def decided(experiment: Experiment, name: str) -> dict[Place, Any]:
    """Return the advantage of each row in the set ``name``, or why it was rejected."""
    found: dict[Place, Any] = {}
    async with experiment.train_stream(
        strategy=name, consumer=f"of-{name}", groups_per_step=99
    ) as stream:
        async for step in stream:
            for one in await experiences_of(experiment, step.manifest):
                value = None if one.advantages is None else float(one.advantages[0])
                found[int(one.eid.task), one.eid.run, one.eid.step] = value
    mine = [experiment.key, name]
    reasons = {
        row["address"]: row["reason"]
        for row in await rows(experiment, "rejection")
        if [row["experiment"], row["consumer"]] == mine
    }
    for row in await rows(experiment, "experience"):
        if row["experiment"] == experiment.key and row["address"] in reasons:
            found[int(row["task"]), row["run"], row["step"]] = reasons[row["address"]]
    return found


async def metrics_of(experiment: Experiment, name: str) -> list[dict[str, float]]:
    """Return the metrics of all groups that a set has annotated."""
    return [
        metrics
        async for event in experiment.events(kinds=("ExperiencesAnnotated",))
        if event.actor == name
        for metrics in event.body["metrics"]
    ]


async def recorded(store: Store, name: str, groups: list[list[Run]]) -> Experiment:
    """Return a new experiment with these groups, in one sealed batch."""
    experiment = await store.experiment(name, config={})
    some = [one for task, runs in enumerate(groups) for one in group(task, runs)]
    await experiment.writer("e0").write(some)
    await experiment.writer("e0").seal("b", len(some))
    return experiment


SPLIT: list[list[Run]] = [
    [[1.0] * 9, 0.0, 0.0, 0.0],
    [[None] * 3 + [1.0], [0.0] * 2, 0.25, 0.5],
    [[0.1] * 7, 0.1, [0.1] * 3],
    [[2.0, 2.0]],
    [[None, None], 1.0],
    [[1.0, 1.0], [0.0, 0.0], [1.0, 1.0]],
]
WHOLE: list[list[Run]] = [
    [1.0, 0.0, 0.0, 0.0],
    [1.0, 0.0, 0.25, 0.5],
    [0.1, 0.1, 0.1],
    [2.0],
    [None, 1.0],
    [1.0, 0.0, 1.0],
]


@pytest.mark.parametrize("name", STRATEGIES)
async def test_a_run_of_several_rows_is_one_run(store_url: str, name: str) -> None:
    strategy, args = STRATEGIES[name]
    found, metrics = [], []
    async with open_store(store_url) as store:
        for called, groups in (("split", SPLIT), ("whole", WHOLE)):
            experiment = await recorded(store, called, groups)
            await run_strategy(experiment, strategy, args, name="s")
            found.append(await decided(experiment, "s"))
            metrics.append(await metrics_of(experiment, "s"))
    split, whole = found
    assert len(split) == sum(len(rows_of(run)) for runs in SPLIT for run in runs)
    for (task, run, _), of_row in split.items():
        assert of_row == whole[task, run, 0]
    assert [*map(repr, metrics[0])] == [*map(repr, metrics[1])]


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("over", ["runs", "rows"])
async def test_with_one_row_for_each_run_nothing_changes(
    sqlite_url: str, name: str, over: str
) -> None:
    strategy, args = STRATEGIES[name]
    if isinstance(strategy, list):
        args = {one: {**args.get(one, {}), "over": over} for one in strategy}
    elif strategy != "step_wise_grpo":
        args = {**args, "over": over}
    single: list[list[Run]] = [[0.3, 0.7, 0.1, 1 / 3, 1.0], [0.1] * 7, [0.9], [1.0, 0.0, 0.0, None]]
    async with open_store(sqlite_url) as store:
        experiment = await recorded(store, "run", single)
        await run_strategy(experiment, strategy, args, name="s")
        found = await decided(experiment, "s")
    assert found == await by_hand_over_rows(strategy, args, single)


async def by_hand_over_rows(
    strategy: Any, args: dict[str, Any], groups: list[list[Run]]
) -> dict[Place, Any]:
    """Return what the classes make of rows that each count for themselves, called by hand."""
    some = [one for task, runs in enumerate(groups) for one in group(task, runs)]
    writer = StagedWriter()
    if isinstance(strategy, list):
        made: Any = compose(writer, strategy, {k: {**v, "over": "rows"} for k, v in args.items()})
    else:
        kind = ADD_STRATEGY.get(strategy) if isinstance(strategy, str) else strategy
        given = {key: value for key, value in args.items() if key != "over"}
        made = kind(writer, **given)
    for units in [some] if made.unit_for(**args) == "batch" else by_task(some):
        await made.add(units, 0)
    found: dict[Place, Any] = {place_of(e): "filtered" for e in some}
    for e in (e for written in writer.groups for e in written):
        found[place_of(e)] = None if e.advantages is None else float(e.advantages[0])
    return found | {place_of(e): reason for e, reason in writer.rejections}


def by_task(some: list[Experience]) -> list[list[Experience]]:
    return [*group_by(some, "task").values()]


def place_of(e: Experience) -> Place:
    return int(e.eid.task), e.eid.run, e.eid.step


OWN: list[Run] = [[0.0, 0.5, 1.0], [1.0, None], 0.25, [None, 0.5]]
"""Rows with rewards of their own, and two of runs that have one."""


async def test_each_row_is_compared_by_its_own_reward_if_it_has_one(store_url: str) -> None:
    async with open_store(store_url) as store:
        experiment = await recorded(store, "run", [OWN])
        await run_strategy(experiment, "grpo")
        found = await decided(experiment, "grpo")
        (view,) = await inspector.groups(experiment)
    filled = [[0.0, 0.5, 1.0], [1.0], [0.25], [0.5, 0.5]]
    mean = fmean(map(fmean, filled))
    spread = sum(fmean((one - mean) ** 2 for one in run) for run in filled) / 3
    assert found[0, 1, 1] == "invalid: reward"  # the last row of its run has none to give
    for run, rewards in enumerate(filled):
        for step, reward in enumerate(rewards):
            wanted = (reward - mean) / (math.sqrt(spread) + 1e-6)
            assert found[0, run, step] == pytest.approx(wanted, rel=1e-6)
    assert [view.mean, view.deviation] == pytest.approx([mean, math.sqrt(spread)])


REWARDS = st.one_of(st.none(), st.sampled_from([0.0, 1.0, 0.1]), st.floats(-9, 9, width=32))
GROUPS = st.lists(
    st.lists(st.lists(REWARDS, min_size=1, max_size=4), min_size=1, max_size=4),
    min_size=1,
    max_size=4,
)
MADE: dict[str, Callable[[StagedWriter], AddStrategy]] = {
    "grpo": lambda w: GRPOAddStrategy(w, over="runs"),
    "opmd": lambda w: OPMDAddStrategy(w, "logavgexp", 0.5, over="runs"),
    "rec": lambda w: RECAddStrategy(w, std_normalize=True, over="runs"),
    "asymre": lambda w: ASYMREAddStrategy(w, over="runs"),
    "best": lambda w: BestOfGroupAddStrategy(w, 2, over="runs"),
    "of one's own": lambda w: Halving(w, over="runs"),
    "in turn": lambda w: compose(
        w,
        ["best_of_group", "reward_variance", "grpo"],
        {
            "best_of_group": {"num_kept": 3, "over": "runs"},
            "reward_variance": {"over": "runs"},
            "grpo": {"over": "runs"},
        },
    ),
}


@pytest.mark.parametrize("name", MADE)
@settings(max_examples=min(25, settings().max_examples))
@given(GROUPS, st.randoms())
def test_both_roads_take_runs_alike(name: str, groups: list[list[Run]], mixed: Any) -> None:
    some = [one for task, runs in enumerate(groups) for one in group(task, runs)]
    mixed.shuffle(some)
    events = as_events(some, [7])
    by_key: dict[tuple[str, str], Group] = {}
    for one in some:
        key = (str(one.eid.batch), str(one.eid.task))
        unit = by_key.setdefault(key, Group(key, planned=False, rollouts=None))
        unit.members.append(one.address or 0)
    units, make = list(by_key.values()), MADE[name]
    assert said(by_rewards(make, units, events)) == said(by_experiences(make, units, some, events))


async def registered_before(
    experiment: Experiment, name: str, strategy: list[str], args: Any
) -> None:
    """Register a set as a version did that did not know of runs."""
    grouping = {"rollouts_per_group": None, "group_timeout_s": None, "on_incomplete_group": "keep"}
    config = {"strategy": strategy, "args": args, "grouping": grouping}
    event = new_event(ConsumerRegistered(consumer=name, kind="strategy", config=config))
    await experiment.database.write(writer_queries.registered, experiment.key, name, event)


@pytest.mark.parametrize(
    ("strategy", "args"),
    [
        (["grpo"], {}),
        (["grpo"], {"epsilon": 1e-6, "ddof": 1}),
        (["reward_variance", "grpo"], {}),
        (["reward_variance", "grpo"], {"grpo": {"epsilon": 1e-6}}),
    ],
)
async def test_a_set_of_an_older_version_goes_on_as_it_did(
    store_url: str, caplog: pytest.LogCaptureFixture, strategy: list[str], args: Any
) -> None:
    async with open_store(store_url) as store:
        experiment = await recorded(store, "run", SPLIT[:1])
        await registered_before(experiment, "s", strategy, args)
        given: Any = strategy if len(strategy) > 1 else strategy[0]
        runs: Any = {"grpo": {"over": "runs"}} if len(strategy) > 1 else {"over": "runs"}
        with pytest.raises(ConflictingStrategyError, match=r"over='rows', this is .*over='runs'"):
            await run_strategy(experiment, given, runs, name="s")
        caplog.clear()
        await run_strategy(experiment, given, name="s")
        (told,) = caplog.messages
        assert told.startswith("annotation set 's' was made by an older version and goes on as it")
        found = await decided(experiment, "s")
        assert found[0, 0, 0] == pytest.approx(0.5527, rel=1e-3)
        assert found[0, 1, 0] == pytest.approx(-1.6583, rel=1e-3)
        caplog.clear()
        await run_strategy(experiment, given, name="new")
        await run_strategy(experiment, given, name="new")
        assert caplog.messages == []
        assert (await decided(experiment, "new"))[0, 0, 0] == pytest.approx(1.5, 1e-5)


async def test_what_counts_once_is_part_of_a_set(sqlite_url: str) -> None:
    async with open_store(sqlite_url) as store:
        experiment = await recorded(store, "run", SPLIT[:1])
        await run_strategy(experiment, "grpo", reference_kwargs("add_strategy", "grpo"), name="ref")
        assert (await decided(experiment, "ref"))[0, 0, 0] == pytest.approx(0.5527, rel=1e-3)
        await run_strategy(experiment, "grpo")
        with pytest.raises(ConflictingStrategyError, match="over='runs', this is over='rows'"):
            await run_strategy(experiment, "grpo", {"over": "rows"})
        with pytest.raises(InvalidArgumentError, match="over must be one of 'runs', 'rows', not"):
            await run_strategy(experiment, "grpo", {"over": "turns"}, name="x")


async def test_a_row_behind_its_group_says_whose_it_was(
    store_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(store_url, rollouts_per_group=2) as experiment:
        writer = experiment.writer("e0")
        await writer.write([rollout(run=0), rollout(run=1)])
        await run_strategy(experiment, "grpo")
        caplog.clear()
        await writer.write([rollout(run=1, step=1)])
        report = await run_strategy(experiment, "grpo")
        assert report.rejected == 1
        assert caplog.messages[0] == (
            "strategy 'grpo' rejects 1 experience as late: b/0/1/1/ of run b/0/1 (group b/0) came "
            "after the group was decided; write all rows of a run in one call"
        )


TRAINER: dict[str, dict[str, Any]] = {
    "rloo": {},
    "grpo_verl": {},
    "opmd_verl": {"opmd_baseline": "logavgexp"},
    "asymre_verl": {},
    "reinforceplusplus": {},
}


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("name", TRAINER)
async def test_advantages_in_the_trainer_take_each_run_once(
    store_url: str, name: str, layout: Any
) -> None:
    found = []
    async with open_store(store_url) as store:
        for called, groups in (("split", SPLIT[:4]), ("whole", WHOLE[:4])):
            experiment = await recorded(store, called, groups)
            async with experiment.train_stream(
                strategy=None, groups_per_step=9, layout=layout, needs=("reward",)
            ) as stream:
                step = await anext(stream)
            step.compute(ADVANTAGE_FN.get(name)(**TRAINER[name]))
            by_run: dict[tuple[int, int], float] = {}
            for microbatch in step.microbatches:
                rows_in_it = len(microbatch["run_index"])
                width = len(microbatch["advantages"].flatten()) // rows_in_it
                values = microbatch["advantages"].reshape(rows_in_it, width)[:, -1].tolist()
                groups_in_it = microbatch["group_index"].tolist()
                runs = microbatch["run_index"].tolist()
                for of, run, value in zip(groups_in_it, runs, values, strict=True):
                    assert by_run.setdefault((of, run), value) == pytest.approx(value, abs=1e-6)
            found.append([value for _, value in sorted(by_run.items())])
    split, whole = found
    assert split == pytest.approx(whole, abs=1e-6)


async def test_a_step_of_an_older_version_is_computed_as_it_was(sqlite_url: str) -> None:
    async with open_store(sqlite_url) as store:
        experiment = await recorded(store, "run", SPLIT[:2])
        async with experiment.train_stream(strategy=None, groups_per_step=1) as stream:
            step, rewarded_last = await anext(stream), await anext(stream)
        event, _ = [e async for e in experiment.events(kinds=("BatchLeased",))]
        assert event.body["by_run"] is True
        loader = RowLoader(EventCache(experiment.key, experiment.name))
        rows_of_step = await experiment.database.read_session(
            lambda s: loader.load(s, step.manifest)
        )
        partly = structs.replace(rewarded_last.manifest, by_run=False)
        loaded = await experiment.database.read_session(lambda s: loader.load(s, partly))
        assert loaded.unrewarded is None, "it was trained with 0 on the rows before the last"
    old = structs.replace(step.manifest, by_run=False)
    here = Mover("cpu"), StepMemory()
    (before,) = collate_step(old, rows_of_step, *here).microbatches
    assert "run_index" not in before
    (now,) = collate_step(step.manifest, rows_of_step, *here).microbatches
    assert sorted(now["run_index"].tolist()) == [0] * 9 + [1, 2, 3]
