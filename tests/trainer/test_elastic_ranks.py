"""Any number of ranks may follow any other; every row is trained once all the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import anyio
import pytest
import torch
from torch import Tensor

from tests.handles import Experiment, TrainStep, TrainStream
from tests.trainer.data import policy, prepared, recorded, rollouts
from tests.whole_stores import replayed_steps
from trinity_buffer import inspector, open_store, verify
from trinity_buffer.algorithm import Algorithm, build
from trinity_buffer.inspector.source import now
from trinity_buffer.store.rows import format_address
from trinity_buffer.trainer.models import Models, prepare
from trinity_buffer.trainer.requirements import strategy_of

OPTIONS: dict[str, Any] = {"strategy": None, "groups_per_step": 2}
Taken = dict[int, Counter[int]]
"""Step -> address of an experience -> how many rows of it were trained."""


async def life(
    experiment: Experiment,
    ranks: int,
    *,
    deliver: int,
    commit: int,
    take: Callable[[TrainStep], None] = lambda _: None,
    **options: Any,
) -> Taken:
    """Let so many ranks take ``deliver`` steps and commit the first ``commit`` of them.

    Args:
        take: called with each step of each rank.
    """
    found: Taken = {}
    taking, all_have = set(range(ranks)), anyio.Event()

    async def of(rank: int) -> None:
        chosen = OPTIONS | options | {"rank": rank, "world_size": ranks}
        async with experiment.train_stream(**chosen) as stream:
            await _take(stream, found, deliver, commit, take)
            taking.discard(rank)
            if not taking:
                all_have.set()
            await all_have.wait()  # rank 0 must not leave while another still takes

    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            for rank in reversed(range(ranks)):
                group.start_soon(of, rank)
    return found


async def _take(
    stream: TrainStream, found: Taken, deliver: int, commit: int, take: Callable[[TrainStep], None]
) -> None:
    number = 0
    async for step in stream:
        note(found, step)
        take(step)
        number += 1
        if number <= commit:
            await stream.commit(step)
        if number == deliver:
            break


def note(found: Taken, step: TrainStep) -> None:
    """Add the rows of one rank's part of a step."""
    slots = {slot for m in step.microbatches for slot in m["sample_index"].tolist()}
    rows = [step.manifest.experiences[slot] for slot in slots]
    found.setdefault(step.step, Counter()).update(rows)


async def trained_once(experiment: Experiment, found: Taken) -> bool:
    stored = len([one async for one in experiment.read()])
    trained = sum(found.values(), Counter())
    return set(trained.values()) == {1} and len(trained) == stored


MORE_RANKS = [pytest.param(*ranks, marks=pytest.mark.long) for ranks in [(1, 2), (2, 4), (2, 3)]]


@pytest.mark.parametrize(("before", "after"), [(2, 1), (4, 2), *MORE_RANKS])
async def test_what_ranks_of_an_earlier_life_left_is_trained_whole(
    store_url: str, before: int, after: int
) -> None:
    async with open_store(store_url) as store:
        experiment = await recorded(store, "run", "experience", rollouts())
        left = await life(experiment, before, deliver=2, commit=0)
        parts: list[tuple[int, int]] = []
        trained = await life(
            experiment,
            after,
            deliver=99,
            commit=99,
            take=lambda step: parts.append(
                (step.step, sum(len(m["sample_index"]) for m in step.microbatches))
            ),
        )
        assert {step: trained[step] for step in left} == left
        with_rows = sum(1 for step, rows in parts if step == 1 and rows)
        assert with_rows == min(after, OPTIONS["groups_per_step"])  # none is left without a group
        assert await trained_once(experiment, trained)
        assert (await verify(experiment)).ok


async def test_questions_see_a_step_as_it_was_dealt_last(store_url: str) -> None:
    async with open_store(store_url) as store:
        experiment = await recorded(store, "run", "experience", rollouts())
        await life(experiment, 2, deliver=2, commit=0)
        served: list[TrainStep] = []
        await life(experiment, 1, deliver=2, commit=1, take=served.append)
        source = now(experiment)
        lines = await inspector.steps(source)
        told = [(one.step, one.state) for one in lines if one.step <= 2]
        assert told == [(1, "committed"), (2, "leased")]
        for step, proven in zip(served, [True, None], strict=True):
            found = await inspector.blame(source, step.step)
            addresses = [format_address(one) for one in step.manifest.experiences]
            assert [row.address for row in found.rows] == addresses
            assert (found.digest, found.proven) == (step.manifest.digest.hex(), proven)
            rows = [row async for row in experiment.read(trained_in=step.step)]
            assert {row.eid.uid for row in rows} == {row.uid for row in found.rows}
        trained = sum(len(step.manifest.experiences) for step in served)
        stale = [one.rows for one in await inspector.staleness(source) if one.step <= 2]
        assert sum(stale) == trained


Gradients = dict[int, Tensor]
"""Step -> its gradient, flat: the mean over the ranks."""


def gradient_of(algorithm: Algorithm, models: Models, step: TrainStep) -> Tensor:
    """Return the gradient of one rank's part of a step, at the same weights for every step."""
    models.policy.zero_grad(set_to_none=True)  # type: ignore[attr-defined]  # a module
    prepare(step, algorithm, models)
    for microbatch in step.microbatches:
        scores = models.policy.scores(microbatch)
        loss, _ = algorithm.loss(
            scores.logprob, microbatch, entropy=scores.entropy, layout=microbatch.layout
        )
        loss.backward()
    assert all(weight.grad is not None for weight in models.policy.parameters())
    return torch.cat([w.grad.flatten() for w in models.policy.parameters() if w.grad is not None])


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("grpo", {"layout": "packed"}),
        ("dpo", {"layout": "padded"}),
        pytest.param("grpo", {"layout": "padded"}, marks=pytest.mark.long),
        pytest.param("dpo", {"layout": "packed"}, marks=pytest.mark.long),
    ],
    ids=str,
)
async def test_ranks_1_2_1_4_3_have_the_gradients_of_one(
    store_url: str, name: str, cut: dict[str, Any]
) -> None:
    algorithm = build(name)
    await prepared(store_url, algorithm)
    models = Models(policy(0), reference=policy(1))
    chosen = {"strategy": strategy_of(algorithm), "tokens_per_microbatch": 24, **cut}
    async with open_store(store_url) as store:
        experiment = await store.experiment("run")

        async def gradients(ranks: int, deliver: int, commit: int, consumer: str) -> Gradients:
            found: Gradients = {}

            def add(step: TrainStep) -> None:
                part = gradient_of(algorithm, models, step) / ranks
                found[step.step] = found[step.step] + part if step.step in found else part

            trained = await life(
                experiment,
                ranks,
                deliver=deliver,
                commit=commit,
                take=add,
                consumer=consumer,
                **chosen,
            )
            assert all(set(rows.values()) == {1} for rows in trained.values())
            return found

        alone = await gradients(1, 99, 99, "alone")
        served: list[int] = []
        for ranks in (1, 2, 1, 4, 3):
            last = ranks == 3
            found = await gradients(ranks, 99 if last else 2, 99 if last else 0, "trainer")
            for step, gradient in found.items():
                scale = float(alone[step].abs().max())
                assert float((gradient - alone[step]).abs().max()) <= 1e-6 * scale > 0
            served = list(found)
        assert served == list(alone)
        assert (await verify(experiment)).ok


async def test_a_join_of_a_process_that_is_gone_answers_no_later_call(sqlite_url: str) -> None:
    async with open_store(sqlite_url) as store:
        experiment = await recorded(store, "run", "experience", rollouts())
        with anyio.move_on_after(0.2):  # nobody calls it, and it dies
            await experiment.train_stream(**OPTIONS, rank=1, world_size=2).__aenter__()
        assert len([e async for e in experiment.events(kinds=("RankJoined",))]) == 1
        trained = await life(experiment, 2, deliver=99, commit=99)
        assert await trained_once(experiment, trained)


async def test_a_step_of_two_ranks_replays_whole_on_one_and_on_three(sqlite_url: str) -> None:
    async with open_store(sqlite_url) as store:
        experiment = await recorded(store, "run", "experience", rollouts())
        await life(experiment, 2, deliver=99, commit=99)
        for ranks in (1, 3):
            replayed: Taken = {}
            for rank in range(ranks):
                async for step in replayed_steps(experiment, rank=rank, world_size=ranks):
                    note(replayed, step)
            assert await trained_once(experiment, replayed)
