"""What is asked of a run that mixes in an expert's rows, and of the expert."""

from __future__ import annotations

import torch

from tests.handles import Experiment, Store
from trinity_buffer import EID, Experience, inspector, open_store, run_strategy
from trinity_buffer.inspector.source import as_of, now
from trinity_buffer.inspector.tracking import numbers_of

TASKS = 4


def rollout(batch: str, task: int, run: int, version: int, length: int) -> Experience:
    return Experience(
        eid=EID(batch, task, run),
        tokens=torch.arange(1 + length),
        prompt_length=1,
        logprobs=torch.zeros(length),
        reward=float(run) if batch == "own" else 100.0,
        info={"model_version": version},
    )


async def mixed(store: Store, *, steps: int = TASKS, **options: object) -> Experiment:
    """Return an expert's experiment, the rows of which a trainer of ``run`` mixed in."""
    expert = await store.experiment("expert", config={"rollouts_per_group": 1})
    await expert.writer("x").write(
        [rollout("x", task, 0, 0, 40 if task else 100) for task in range(6)]
    )
    run = await store.experiment("run", config={"rollouts_per_group": 2})
    own = [rollout("own", task, run, task, 3) for task in range(TASKS) for run in range(2)]
    await run.writer("e").write(own)
    await run_strategy(run, "grpo")
    stream = run.train_stream(
        strategy="grpo",
        groups_per_step=2,
        sample_strategy="mix",
        expert_experiment="expert",
        expert_data_ratio=0.5,
        **options,
    )
    async with stream as served:
        for _ in range(steps):
            await served.commit(await anext(served))
        if steps < TASKS:
            await anext(served)
    return expert


async def test_an_experts_row_is_trained_where_another_experiment_trained_it(
    store_url: str,
) -> None:
    async with open_store(store_url) as store:
        expert = now(await mixed(store, steps=2))
        (taken,) = [row for row in await _blamed(store, 1) if row.experiment == "expert"]
        found = await inspector.why(expert, taken.uid)
        shown = await inspector.show(expert, taken.uid)
        held = await inspector.why(expert, "x/2/0/0/")
        left = await inspector.why(expert, "x/5/0/0/")
        groups = await inspector.groups(expert)
        await inspector.tokens(expert, taken.uid)
    assert found.trained
    assert found.verdict == "trained in step 1 of run/trainer (set recorded)"
    assert found.reasons[-1].what == (
        "trainer run/trainer: trained in step 1, as the log of 'run' says"
    )
    ((step,),) = [one.steps for one in shown.sets]
    assert (step.trainer, step.step, step.committed) == ("run/trainer", 1, True)
    assert held.verdict == "never trained: leased in step 3 of run/trainer (set recorded)"
    assert left.verdict == "never trained: ready (set recorded)"
    states = [one.state for one in groups]
    assert states[0] == "ready"
    assert states[3:] == [f"{how} of run/trainer" for how in ("leased in step 3", *_TRAINED)]


_TRAINED = ("trained in step 2", "trained in step 1")


async def _blamed(store: Store, step: int) -> tuple[inspector.TrainedRow, ...]:
    return (await inspector.blame(now(await store.experiment("run")), step)).rows


async def test_an_expert_as_it_was_knows_of_no_other_experiment(store_url: str) -> None:
    async with open_store(store_url) as store:
        expert = await mixed(store)
        async with as_of(expert, await now(expert).head()) as source:
            found = await inspector.why(source, "x/0/0/0/")
    assert found.verdict == "never trained: ready (set recorded)"


async def test_what_a_trainer_of_another_experiment_rejects_is_why_it_was_not_trained(
    store_url: str,
) -> None:
    async with open_store(store_url) as store:
        expert = await mixed(store, steps=1, max_tokens=50)
        found = await inspector.why(now(expert), "x/0/0/0/")
    assert found.verdict == "never trained: rejected by run/trainer: oversize (set recorded)"
    assert found.reasons[-1].position is not None
    assert found.reasons[-1].what == "trainer run/trainer: rejected, oversize"


async def test_the_numbers_of_a_step_leave_out_the_experts_rows(sqlite_url: str) -> None:
    async with open_store(sqlite_url) as store:
        await mixed(store)
        source = now(await store.experiment("run"))
        lines = await inspector.steps(source)
        lags = await inspector.staleness(source)
    assert [(one.rows, one.tokens, one.reward, one.oldest) for one in lines] == [(3, 8, 0.5, 0)] * 4
    assert [one.staleness for one in lines] == [one.mean for one in lags] == [0] * 4
    assert numbers_of(lines[3])["batch/staleness"] == 0
