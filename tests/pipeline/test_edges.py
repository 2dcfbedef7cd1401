"""What happens just at an edge: a budget that is just filled, the last step, a reward of zero."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from tests.contract.making import rollout
from tests.raw_store import encode_experiences
from tests.whole_stores import replayed_steps
from trinity_buffer import assign_rewards, open_replay_stream, open_store
from trinity_buffer.codec.objects import encode_body
from trinity_buffer.codec.segments import decode_segment
from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.events import (
    BatchLeased,
    ConsumerRegistered,
    ExperiencesAnnotated,
    Fact,
    RewardsAssigned,
    StepDealt,
    StepMeasured,
    TrainerRewound,
    body_of,
)
from trinity_buffer.pipeline.load.columns import Block, Field
from trinity_buffer.pipeline.manifest import manifest_digest, plan_microbatches, repartitioned
from trinity_buffer.pipeline.verify.log_audit import (
    LogAudit,
    Problem,
    TrainerAudit,
)
from trinity_buffer.pipeline.verify.segments import wrong_columns
from trinity_buffer.store import segments
from trinity_buffer.store.log import EventChain, StoredEvent

PAIR = {"rollouts_per_group": 2}


@pytest.mark.parametrize(("budget", "cuts"), [(9, [1, 2, 3]), (10, [2, 3]), (15, [3])])
def test_a_micro_batch_may_just_fill_its_budget(budget: int, cuts: list[int]) -> None:
    _, plans = plan_microbatches(
        [5, 5, 5], [0, 1, 2], layout="padded", tokens_per_microbatch=budget, world_size=1
    )
    assert [plan.stop for plan in plans] == cuts


@pytest.mark.parametrize(("most", "trained"), [(5, 0), (6, 1), (7, 2)])
async def test_a_row_of_just_as_many_tokens_as_are_allowed_is_trained(
    sqlite_url: str, most: int, trained: int
) -> None:
    async with open_store(sqlite_url) as store:
        experiment = await store.experiment("run", config=PAIR)
        await experiment.writer("e0").write([rollout(run=0, length=6), rollout(run=1, length=7)])
        async with experiment.train_stream(strategy=None, max_tokens=most) as stream:
            steps = [step async for step in stream]
    assert sum(len(step.manifest.experiences) for step in steps) == trained


async def test_a_replay_from_the_middle_has_the_chain_of_the_whole(sqlite_url: str) -> None:
    """Up to the last step that was handed out, committed or not."""
    async with open_store(sqlite_url) as store:
        experiment = await store.experiment("run", config=PAIR)
        some = [rollout(task=task, run=run) for task in range(3) for run in range(2)]
        await experiment.writer("e0").write(some)
        async with experiment.train_stream(strategy=None, groups_per_step=1) as stream:
            served = [step async for step in stream]
            await stream.commit(served[1])
        again = [step async for step in replayed_steps(experiment, first=2, last=3)]
    assert [(step.step, step.chain) for step in again] == [(s.step, s.chain) for s in served[1:]]


def test_an_option_that_a_replay_does_not_take_is_named(sqlite_url: str) -> None:
    wrong = r"takes no argument 'frist'; did you mean 'first'\? \(accepted: .* from_checkpoint"
    with (
        pytest.raises(InvalidArgumentError, match=wrong),
        open_replay_stream(sqlite_url, experiment="run", frist=2),
    ):
        pass


async def test_a_reward_of_zero_is_a_reward(sqlite_url: str) -> None:
    async with open_store(sqlite_url) as store:
        experiment = await store.experiment("run", config=PAIR)
        await experiment.writer("e0").write([rollout(run=run) for run in range(2)])
        scored = await assign_rewards(experiment, "zero", lambda e: 0.0 if e.eid.run else None)
        (event,) = [one async for one in experiment.events(kinds=["RewardsAssigned"])]
    assert (scored, event.actor) == (1, "user")


LEASED = BatchLeased(
    consumer="t",
    step=1,
    token=1,
    annotations=[1 << 20, 2 << 20],
    groups=[0, 0],
    num_groups=1,
    planned_groups=1,
    microbatches=[[0, 2, 8, 0]],
    layout="padded",
    annotation_set="s",
    experiences=[1 << 20, 2 << 20],
    normalizer=None,
    digest=bytes(16),
)
DEALT = StepDealt(
    consumer="t",
    token=2,
    step=1,
    leased_at=5,
    world_size=2,
    order=[0, 1],
    microbatches=[[0, 1, 8, 0], [1, 2, 8, 1]],
    digest=bytes(16),
)


def test_what_is_wrong_with_a_step_that_is_dealt_anew_is_told() -> None:
    audit = TrainerAudit("t")
    assert list(audit.leased(5, structs.replace(LEASED, digest=manifest_digest(LEASED)))) == []
    dealt = repartitioned(LEASED, DEALT.order, DEALT.microbatches).digest.hex()
    assert list(audit.dealt(7, DEALT, lambda _: LEASED)) == [
        f"step 1 as it was dealt has the digest {dealt}, recorded is {'00' * 16}",
        "a group of step 1 lies on two ranks",
    ]
    assert list(audit.dealt(7, structs.replace(DEALT, step=2), lambda _: LEASED)) == [
        "step 2 was dealt anew, and was not leased or is committed"
    ]


def test_a_trainer_goes_back_to_a_step_that_it_has_committed() -> None:
    audit = TrainerAudit("t")
    audit.live = {1: b"one", 2: b"two", 3: b"three"}
    assert list(audit.rewound(TrainerRewound(consumer="t", step=2, from_step=3))) == []
    assert list(audit.live) == [1, 2]
    assert list(audit.rewound(TrainerRewound(consumer="t", step=3, from_step=2))) == [
        "it goes back to step 3, which was not committed"
    ]
    assert list(audit.rewound(TrainerRewound(consumer="t", step=0, from_step=2))) == []
    assert audit.live == {}


def test_a_block_with_fewer_values_than_rows_gives_none_of_them() -> None:
    """As of a segment that somebody put in the place of a longer one."""
    whole = Block(np.array([2, 0]), np.array([1, 2, 3]), np.array([0, 1, 3]))
    found = Field(3, [whole]).values()
    assert [None if one is None else np.asarray(one).tolist() for one in found] == [
        *([2, 3], None, [1])
    ]
    with pytest.raises(ValueError, match="shorter"):
        Field(3, [replace(whole, rows=np.array([2, 0, 1]))]).values()


ANNOTATED = ExperiencesAnnotated(
    consumer="s",
    seen=2,
    calls=1,
    segment=b"annotations".ljust(16),
    families={},
    experiences=[1 << 20, 2 << 20],
    groups=[0, 0],
    planned=[True],
    metrics=[{}],
)


def problems_of(audit: LogAudit, fact: Fact) -> list[Problem]:
    """Return what an audit finds wrong with the next event."""
    kind, before = type(fact).__name__, len(audit.problems)
    body = encode_body(kind, body_of(fact))
    audit.add([StoredEvent(audit.position + 1, kind, "somebody", 1, body, None)])
    return audit.problems[before:]


def test_what_a_trainer_did_is_told_with_its_check_and_its_place() -> None:
    audit = LogAudit(EventChain("run"), lambda _: None)
    config = {"strategy": "s"}
    problems_of(audit, ConsumerRegistered(consumer="t", kind="trainer", config=config))
    measured = StepMeasured(
        consumer="t", step=1, segment=bytes(16), families={}, digest=b"", rows=2, metrics={}
    )
    for check, fact in (
        ("manifests", DEALT),
        ("commits", measured),
        ("commits", TrainerRewound(consumer="t", step=3, from_step=2)),
    ):
        told = [problem for problem in problems_of(audit, fact) if "step " in problem.what]
        where = f"position {audit.position} (trainer 't')"
        assert [(problem.check, problem.where) for problem in told] == [(check, where)]


def test_a_manifest_is_compared_with_the_annotations_that_it_names() -> None:
    audit = LogAudit(EventChain("run"), lambda _: None)
    audit.position = 2

    def about_annotations(fact: Fact) -> list[str]:
        named = (problem for problem in problems_of(audit, fact) if "annotation" in str(problem))
        return [f"{problem.where}: {problem.what}" for problem in named]

    for name, role in (("s", "strategy"), ("t", "trainer")):
        registered = ConsumerRegistered(consumer=name, kind=role, config={})
        assert about_annotations(registered) == []
    assert about_annotations(ANNOTATED) == []
    assert audit.segments == {ANNOTATED.segment: 5}
    own = [5 << 20, (5 << 20) + 1]
    assert about_annotations(structs.replace(LEASED, annotations=own)) == []
    assert about_annotations(structs.replace(LEASED, annotations=own[::-1], step=2)) == [
        "position 7 (trainer 't'): row 0 trains 1:0 with annotation 5:1, which is of 2:0"
    ]
    assert about_annotations(structs.replace(LEASED, step=3)) == [
        "position 8 (trainer 't'): set 's' has no annotation 1:0",
        "position 8 (trainer 't'): set 's' has no annotation 2:0",
    ]


@pytest.mark.parametrize(
    "fact",
    [
        structs.replace(LEASED, annotations=[1 << 63, 1]),
        RewardsAssigned(scoring="s", experiences=[1 << 63], rewards=[1.0]),
    ],
)
def test_a_number_that_can_be_no_address_is_a_wrong_form(fact: Fact) -> None:
    kind = type(fact).__name__
    audit = LogAudit(EventChain("run"), lambda _: None)
    audit.position = 6
    body = encode_body(kind, body_of(fact))
    audit.add([StoredEvent(7, kind, "somebody", 1, body, None)])
    (problem,) = audit.problems
    assert (problem.check, problem.where) == ("log", "position 7")
    assert problem.what.startswith(f"its body has not the form of {kind}: OverflowError(")


def test_why_a_rollout_ended_is_told_by_its_info_or_by_what_was_cut() -> None:
    ended, cut, never = rollout(run=0), rollout(run=1), rollout(run=2, version=None)
    ended.info["finish_reason"] = "stop"
    cut.truncate_status = "response_truncated"
    write = encode_experiences([ended, cut, never])
    columns = write.meta
    decoded = [decode_segment(b"".join(blob)) for blob in write.families.values()]
    assert list(wrong_columns(columns, {}, decoded)) == []
    what = "its policy version and finish reason are"
    assert list(wrong_columns(structs.replace(columns, finish_reason=[None] * 3), {}, decoded)) == [
        (0, f"{what} (0, 'stop'), its event says (0, None)"),
        (1, f"{what} (0, 'response_truncated'), its event says (0, None)"),
    ]


def test_how_a_rollout_was_sampled_is_told_by_its_info() -> None:
    hot, plain = rollout(run=0), rollout(run=1)
    hot.info["sampling_segments"] = [{"temperature": 0.5}]
    write = encode_experiences([hot, plain])
    columns = write.meta
    decoded = [decode_segment(b"".join(blob)) for blob in write.families.values()]
    assert write.sampling == {0: [[hot.prompt_length, len(hot.tokens), 0.5, None]]}
    assert list(wrong_columns(columns, write.sampling, decoded)) == []
    (said,) = write.sampling.values()
    wrong = {1: [[2, 3, 2.0, None]]}
    assert list(wrong_columns(columns, wrong, decoded)) == [
        (0, f"it was sampled with {said}, its event says None"),
        (1, f"it was sampled with [], its event says {wrong[1]}"),
    ]


async def test_what_is_held_is_counted_from_where_one_looks(sqlite_url: str) -> None:
    async with open_store(sqlite_url) as store:
        experiment = await store.experiment("run", config=PAIR)
        for task in range(3):
            await experiment.writer("e0").write([rollout(task=task, run=run) for run in range(2)])
        read, key = store.database.read, experiment.key
        held = await read(segments.held_segments, key, after=-1, limit=9)
        assert [(one.ordinal, one.last - one.first) for one in held] == [(1, 1), (2, 1), (3, 1)]
        for seen, one in enumerate(held, 1):
            left = await read(segments.held_segments, key, after=one.last, limit=9)
            assert left == [later._replace(ordinal=later.ordinal - seen) for later in held[seen:]]
