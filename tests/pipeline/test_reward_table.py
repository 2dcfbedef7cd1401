"""Groups that are scored by their rewards alone: the same bits as with experiences in hand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from typing_extensions import override

from tests.contract.making import assert_conserved, group, opened, rollout
from tests.handles import Experiment
from tests.pipeline.planting import beside_heads, write_body
from tests.raw_store import encode_experiences, record_unchecked, rows
from tests.whole_stores import experiences_of
from trinity_buffer import assign_rewards, run_strategy, verify
from trinity_buffer.algorithm.add_strategy import (
    AddStrategy,
    ASYMREAddStrategy,
    BestOfGroupAddStrategy,
    GRPOAddStrategy,
    OPMDAddStrategy,
    RECAddStrategy,
    REINFORCEAddStrategy,
    RewardVarianceAddStrategy,
    compose,
)
from trinity_buffer.codec.objects import encode_body
from trinity_buffer.events import ExperiencesAnnotated, ExperiencesRecorded
from trinity_buffer.experience import EID, Experience, order_of
from trinity_buffer.pipeline.annotate.deciding import Decision, fields_of, table_of
from trinity_buffer.pipeline.annotate.grouping import Group
from trinity_buffer.store import segments
from trinity_buffer.store.fold import rows_recorded_by
from trinity_buffer.store.rows import SLOT_BITS, address_of
from trinity_buffer.writer import StagedWriter

Made = Callable[[StagedWriter], AddStrategy]

STRATEGIES: dict[str, Made] = {
    "grpo": GRPOAddStrategy,
    "grpo without epsilon": lambda w: GRPOAddStrategy(w, 0.0, ddof=0, std_floor=0.0),
    "grpo, zero alone": lambda w: GRPOAddStrategy(w, single_member="zero"),
    "grpo with a threshold": lambda w: GRPOAddStrategy(w, std_threshold=0.1),
    "opmd": OPMDAddStrategy,
    "opmd, soft": lambda w: OPMDAddStrategy(w, "logavgexp", tau=0.7),
    "variance": RewardVarianceAddStrategy,
    "high variance": lambda w: RewardVarianceAddStrategy(w, 0.05),
    "asymre": ASYMREAddStrategy,
    "rec": RECAddStrategy,
    "rec, normalized": lambda w: RECAddStrategy(w, std_normalize=True),
    "reinforce": REINFORCEAddStrategy,
    "best": BestOfGroupAddStrategy,
    "variance, then grpo": lambda w: compose(w, ["reward_variance", "grpo"]),
    "best, grpo, opmd, variance": lambda w: compose(
        w,
        ["best_of_group", "grpo", "opmd", "reward_variance"],
        {"best_of_group": {"num_kept": 3, "min_reward": 0.0}, "grpo": {"std_threshold": 0.1}},
    ),
    "grpo, then best": lambda w: compose(
        w, ["grpo", "best_of_group"], {"grpo": {"std_threshold": 0.1}}
    ),
    "best two above zero": lambda w: BestOfGroupAddStrategy(w, 2, min_reward=0.0),
}

REWARDS = st.one_of(
    st.sampled_from([0.0, 1.0, -0.0, 0.1, 0.30000000000000004, True, 1, 2**63 - 1, None]),
    st.floats(-1e100, 1e100),
    st.floats(-1, 1, width=32),
)
MASKS = st.sampled_from([[], [True], [False], [False, True], [True, True, False]])
RUNS = st.tuples(REWARDS, MASKS, st.integers(0, 2))
GROUPS = st.lists(st.lists(RUNS, min_size=1, max_size=20), min_size=1, max_size=6)


def made(groups: Sequence[Sequence[Any]]) -> list[Experience]:
    """Return the experiences of ``groups`` of (reward, action mask, how it is called)."""
    names = [
        lambda t, r: EID("b", t, r),
        lambda t, r: EID("b", str(t), r),
        lambda t, r: EID("b", t, r // 2, r % 2, "a1"),
    ]
    return [
        Experience(
            eid=names[how](task, run),
            tokens=torch.arange(len(mask) + 1, dtype=torch.int32),
            prompt_length=1,
            action_mask=torch.tensor(mask, dtype=torch.bool),
            truncate_status=None if mask else "prompt_truncated",
            reward=reward,
        )
        for task, runs in enumerate(groups)
        for run, (reward, mask, how) in enumerate(runs)
    ]


def recorded(experiences: Sequence[Experience], sizes: Sequence[int]) -> dict[int, Any]:
    """Return ``experiences`` as events of so many each, and give each its address."""
    events, position, start = {}, 0, 0
    while start < len(experiences):
        some = experiences[start : start + sizes[position % len(sizes)]]
        start, position = start + len(some), position + 1
        for slot, experience in enumerate(some):
            experience.address = address_of(position, slot)
        columns = encode_experiences(some).meta
        events[position] = ExperiencesRecorded(
            segment=b"k", families={}, columns=columns, refused={}
        )
    return events


def by_experiences(
    make: Made,
    groups: Sequence[Group],
    experiences: Sequence[Experience],
    events: dict[int, ExperiencesRecorded],
) -> Decision:
    staged, decision = StagedWriter(), covering(groups)
    strategy, by_address = make(staged), {e.address: e for e in experiences}
    shown = {e.address or 0: fields_of(e, strategy.over) for e in experiences}
    known = {
        row.address: row
        for position, event in events.items()
        for row in rows_recorded_by(position, event)
    }

    async def add_all() -> None:
        for step, one in enumerate(groups):
            members = sorted((by_address[address] for address in one.members), key=place)
            _, found = await strategy.add(members, step)
            decision.metrics.append({name: float(value) for name, value in found.items()})

    asyncio.run(add_all())
    decision.take(staged, shown, known)
    return decision


def covering(groups: Sequence[Group]) -> Decision:
    return Decision("some", seen=9, planned={"/".join(one.key): one.planned for one in groups})


def place(e: Experience) -> tuple[Any, ...]:
    return (order_of(e.eid.batch), order_of(e.eid.task), e.eid.run, e.eid.step, e.eid.suffix)


def by_rewards(
    make: Made, groups: Sequence[Group], events: dict[int, ExperiencesRecorded]
) -> Decision:
    decision, strategy = covering(groups), make(StagedWriter())
    score = strategy.from_rewards()
    assert score is not None
    decision.score(groups, table_of(groups, events), score, strategy.over)
    return decision


def said(decision: Decision) -> list[Any]:
    """Return all that is committed, but for the key of the segment; numbers with their signs."""
    events, segment_rows = decision.encode(segments.SegmentStore(), calls=1)
    facts: list[Any] = [event.fact for event in events]
    plain = [replace(f, segment=b"") if isinstance(f, ExperiencesAnnotated) else f for f in facts]
    blobs = [(row.family, b"".join(row.data)) for row in segment_rows]
    return [repr(plain), blobs, decision.experiences, sorted(decision.reasons.items())]


@pytest.mark.parametrize("name", STRATEGIES)
@settings(max_examples=12, deadline=None)
@given(GROUPS, st.lists(st.integers(1, 9), min_size=1, max_size=4), st.randoms())
@example(
    [[(1.0, [True], 0)] * 8, [(None, [True], 0)], [(2.5, [False], 1), (1e100, [], 2)]], [3], None
)
@example([[(run / 7, [True], run % 2 * 2) for run in range(6)]], [64], None)
@example([[(-1e100, [True], 0)], [(-0.0, [False, True], 0)] * 9], [64], None)
def test_both_roads_commit_the_same_bits(
    name: str, groups: list[list[Any]], sizes: list[int], mixed: Any
) -> None:
    experiences = made(groups)
    if mixed is not None:
        mixed.shuffle(experiences)
    events = recorded(experiences, sizes)
    by_key: dict[tuple[str, str], Group] = {}
    for e in experiences:
        key = (str(e.eid.batch), str(e.eid.task))
        by_key.setdefault(key, Group(key, planned=key[1] != "1", rollouts=None)).members.append(
            e.address or 0
        )
    units = list(by_key.values())
    make = STRATEGIES[name]
    assert said(by_rewards(make, units, events)) == said(
        by_experiences(make, units, experiences, events)
    )


class SlowGRPO(GRPOAddStrategy):
    """GRPO by way of experiences: it changes something."""

    @override
    def group_experiences(self, exps: list[Experience]) -> dict[str, list[Experience]]:
        """Do what GRPO does."""
        return super().group_experiences(exps)


async def annotated(experiment: Experiment, name: str) -> list[Any]:
    """Return all that the set ``name`` says of each row, its tensors included."""
    groups: dict[tuple[int, int, bool], list[int]] = {}
    for row in await rows(experiment, "annotation"):
        if row["consumer"] == name:
            key = (row["address"] >> SLOT_BITS, row["group_slot"], row["planned"])
            groups.setdefault(key, []).append(row["experience"])
    found = [(some, planned) for (_, _, planned), some in groups.items()]
    told = [
        metrics
        async for event in experiment.events(kinds=("ExperiencesAnnotated",))
        if event.actor == name
        for metrics in event.body["metrics"]
    ]
    async with experiment.train_stream(
        strategy=name, consumer=f"trainer of {name}", groups_per_step=2
    ) as stream:
        tensors = [
            (one.eid.uid, one.advantages, one.returns, one.token_level_reward)
            async for step in stream
            for one in await experiences_of(experiment, step.manifest)
        ]
    rejected = [
        (row["address"], row["reason"])
        for row in await rows(experiment, "rejection")
        if row["consumer"] == name
    ]
    return [sorted(found), sorted(map(repr, told)), sorted(map(repr, tensors)), sorted(rejected)]


def plain(batch: str) -> Iterator[list[Experience]]:
    """Yield writes of whole and of broken groups: of one row, of equal rewards, without rewards."""
    yield group(batch, 0, rewards=[0.0, 1.0, 0.25, None]) + group(batch, 1, rewards=[0.1] * 4)
    yield group(batch, 2, runs=2)
    yield [rollout(batch, 2, run, reward=run / 3) for run in (3, 2)]
    yield [*group(batch, 3, rewards=[None] * 4), rollout(batch, 4, reward=2.0)]


@pytest.mark.parametrize("old", [False, True])
async def test_a_store_says_the_same_whichever_road_was_taken(store_url: str, old: bool) -> None:
    async with opened(store_url) as experiment:
        writer = experiment.writer("e0")
        for some in plain("new"):
            await writer.write(some)
        for some in plain("old"):
            await (record_unchecked(experiment, some) if old else writer.write(some))
        await writer.seal("new", 17)
        await writer.seal("old", 17)
        how: dict[str, Any] = {"rollouts_per_group": 4, "on_incomplete_group": "keep"}
        fast = await run_strategy(experiment, "grpo", **how)
        slow = await run_strategy(experiment, SlowGRPO, name="slow", **how)
        assert fast == slow
        assert (fast.annotated, fast.rejected, fast.waiting) == (24, 10, 0)
        assert await annotated(experiment, "grpo") == await annotated(experiment, "slow")
        await assert_conserved(experiment)
        assert (await verify(experiment)).ok


async def test_a_scoring_takes_the_place_of_recorded_rewards_on_both_roads(store_url: str) -> None:
    async with opened(store_url, rollouts_per_group=4) as experiment:
        await experiment.writer("e0").write(group(rewards=[None, 1.0, 0.0, 0.5]))
        await assign_rewards(experiment, "runs", lambda e: e.eid.run / 7 if e.eid.run < 3 else None)
        for name, strategy in (("fast", "grpo"), ("slow", SlowGRPO)):
            await run_strategy(experiment, strategy, name=name, rewards="runs")
        fast, slow = await annotated(experiment, "fast"), await annotated(experiment, "slow")
        assert fast == slow
        assert [reason for _, reason in fast[-1]] == ["invalid: reward"]


@pytest.mark.parametrize(
    "changed",
    [
        {"action_mask": torch.tensor([1, 1, 1, 0, 1])},
        {"action_mask": torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0])},
        {"token_level_reward": torch.ones(5)},
    ],
)
async def test_what_one_number_cannot_say_is_read(sqlite_url: str, changed: dict[str, Any]) -> None:
    some = group()
    vars(some[2]).update(changed)
    async with opened(sqlite_url, rollouts_per_group=4) as experiment:
        await experiment.writer("e0").write(some)
        (event,) = [e async for e in experiment.events(kinds=("ExperiencesRecorded",))]
        assert "scorable" not in event.body
        await run_strategy(experiment, "grpo")
        await run_strategy(experiment, SlowGRPO, name="slow")
        assert await annotated(experiment, "grpo") == await annotated(experiment, "slow")


async def test_a_group_that_waited_for_its_last_run_is_scored_by_whoever_takes_over(
    store_url: str,
) -> None:
    async with opened(store_url, rollouts_per_group=4) as experiment:
        writer = experiment.writer("e0")
        some = group(rewards=[0.0, 1.0, 0.25, 0.5])
        await writer.write([*some[:2], *group(task=1)])
        assert (await run_strategy(experiment, "grpo")).waiting == 2
        await writer.write(some[2:])
    async with opened(store_url) as experiment:
        assert (await run_strategy(experiment, "grpo", rollouts_per_group=4)).annotated == 4
        await run_strategy(experiment, SlowGRPO, name="slow", rollouts_per_group=4)
        fast, slow = await annotated(experiment, "grpo"), await annotated(experiment, "slow")
        assert fast[2:] == slow[2:]


async def test_an_event_that_wrongly_says_that_numbers_can_stand_for_its_rows_is_named(
    sqlite_url: str,
) -> None:
    some = group()
    some[1].token_level_reward = torch.zeros(5)
    async with opened(sqlite_url) as experiment:
        await experiment.writer("e0").write(some)
        (recorded,) = [e async for e in experiment.events(kinds=("ExperiencesRecorded",))]
    assert "scorable" not in recorded.body
    body = encode_body(recorded.kind, {**recorded.body, "scorable": True})
    await write_body(sqlite_url, recorded.position, body)
    async with opened(sqlite_url) as experiment:
        problems = beside_heads(await verify(experiment))
    assert any("one number per row" in problem.what for problem in problems)
