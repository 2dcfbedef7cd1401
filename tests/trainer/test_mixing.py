"""Steps of two experiments: the policy's own groups, and an expert's rows."""

from __future__ import annotations

import pytest
import torch

from tests.handles import Experiment, Store, TrainStep
from tests.small_sizes import resized
from tests.trainer.data import RUNS, recorded, rollouts, solutions
from trinity_buffer import open_store, run_strategy, verify
from trinity_buffer.errors import InvalidArgumentError, TrainingError, UnknownExperimentError
from trinity_buffer.inspector import now, rejection_counts, rejections

MIXED = {
    "strategy": "grpo",
    "groups_per_step": 3,
    "sample_strategy": "mix",
    "expert_experiment": "expert",
    "expert_data_ratio": 1 / 3,
}


async def filled(store: Store) -> Experiment:
    """Return an experiment of 6 groups, beside 8 rows of an expert."""
    experiment = await recorded(store, "run", "experience", rollouts())
    await recorded(store, "expert", "sft", solutions())
    await run_strategy(experiment, "grpo")
    return experiment


async def taken(experiment: Experiment, number: int, **options: object) -> list[TrainStep]:
    """Return the first steps that the stream serves, uncommitted."""
    async with experiment.train_stream(**MIXED | options) as stream:
        return [await anext(stream) for _ in range(number)]


async def test_a_step_takes_its_share_from_the_expert(store_url: str) -> None:
    async with open_store(store_url) as store:
        (step,) = await taken(await filled(store), 1)
    (microbatch,) = step.microbatches
    expert = microbatch["expert_mask"]
    assert expert.tolist() == [False] * 2 * RUNS + [True]
    layout = microbatch.layout
    assert (layout.usual.groups, layout.expert.groups, layout.total.groups) == (2, 1, 3)
    assert layout.usual.tokens + layout.expert.tokens == layout.total.tokens
    assert microbatch["action_mask"][expert].any()
    for name in ("rollout_logprob", "advantages", "returns", "token_level_rewards"):
        assert not microbatch[name][expert].any()
    assert microbatch["logprob_mask"].tolist() == [True] * 2 * RUNS + [False]
    assert step.manifest.sources == ["expert"]


async def test_what_was_leased_is_served_again_byte_for_byte(store_url: str) -> None:
    async with open_store(store_url) as store:
        experiment = await filled(store)
        first = await taken(experiment, 2)
        again = await taken(experiment, 2, groups_per_step=1)
    for one, other in zip(first, again, strict=True):
        assert other.recorded
        assert other.manifest == one.manifest
        for name, value in one.microbatches[0].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other.microbatches[0][name]))


async def test_no_row_of_either_experiment_is_served_twice(store_url: str) -> None:
    async with open_store(store_url) as store:
        experiment = await filled(store)
        steps = await taken(experiment, 3)
    rows = [
        (source, annotation)
        for step in steps
        for source, annotation in zip(step.manifest.source, step.manifest.annotations, strict=True)
    ]
    assert len(rows) == len(set(rows)) == 6 * RUNS + 3


async def test_a_store_with_an_experts_rows_verifies(sqlite_url: str) -> None:
    async with open_store(sqlite_url) as store:
        experiment = await filled(store)
        async with experiment.train_stream(**MIXED) as stream:
            async for step in stream:
                await stream.commit(step)
        report = await verify(experiment)
    assert report.ok, report.problems


async def test_an_expert_above_the_limit_is_rejected_in_its_own_experiment(store_url: str) -> None:
    long = solutions()
    limit = min(e.length for e in long) + 1
    async with open_store(store_url) as store:
        experiment = await filled(store)
        async with experiment.train_stream(**MIXED | {"max_tokens": limit}) as stream:
            steps = [step async for step in stream]
        assert all(m["input_ids"].shape[1] <= limit for s in steps for m in s.microbatches)
        expert = await store.experiment("expert")
        events = [e async for e in expert.events(kinds=("ExperiencesRejected",))]
        told = await rejections(now(expert))
        assert await rejections(now(expert), by="run/trainer", reason="oversize") == told
        counts = await rejection_counts(now(expert))
    lost = sum(len(e.body["reasons"]) for e in events)
    assert {one.uid for one in told} <= {e.eid.uid for e in long if e.length > limit}
    assert {(one.by, one.kind) for one in told} == {("run/trainer", "trainer")}
    assert (counts, len(told)) == ({"run/trainer": {"oversize": lost}}, lost)
    assert {e.body["consumer"] for e in events} == {"run/trainer"}
    assert {reason for e in events for reason in e.body["reasons"]} == {"oversize"}


async def test_a_stream_that_follows_takes_what_an_expert_records_meanwhile(store_url: str) -> None:
    made = solutions()
    async with open_store(store_url) as store:
        experiment = await recorded(store, "run", "experience", rollouts())
        await run_strategy(experiment, "grpo")
        expert = await recorded(store, "expert", "sft", made[:1])
        async with experiment.train_stream(**MIXED, follow=True) as stream:
            first = await anext(stream)
            await expert.writer("test").write(made[1:2])
            second = await anext(stream)
    assert [step.manifest.source.count(1) for step in (first, second)] == [1, 1]


async def test_a_stream_ends_where_the_expert_is_finished_and_has_too_few(store_url: str) -> None:
    async with open_store(store_url) as store:
        experiment = await recorded(store, "run", "experience", rollouts())
        await run_strategy(experiment, "grpo")
        expert = await recorded(store, "expert", "sft", solutions()[:1])
        await expert.finish("no more")
        async with experiment.train_stream(**MIXED, follow=True) as stream:
            await anext(stream)
            with pytest.raises(
                TrainingError, match=r"'expert' is finished and has 0 groups left, .* takes 1"
            ):
                await anext(stream)


@pytest.mark.long
@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize("expert_is_finished", [False, True])
async def test_a_run_that_is_finished_before_it_is_trained_mixes_the_experts_rows_too(
    store_url: str, follow: bool, expert_is_finished: bool
) -> None:
    """However much the expert recorded: what is stored is read before the end is decided."""
    async with open_store(store_url) as store:
        experiment = await filled(store)
        await experiment.finish("all tasks are through")
        if expert_is_finished:
            await (await store.experiment("expert")).finish("no more")
        async with experiment.train_stream(**MIXED, follow=follow) as stream:
            sources = [step.manifest.source.count(1) async for step in stream]
    assert sources == [1, 1, 1]


@pytest.mark.long
@pytest.mark.parametrize(("follow", "finished"), [(False, False), (True, True)])
async def test_rows_as_they_were_recorded_are_trained_beside_an_expert_with_too_few(
    store_url: str, follow: bool, finished: bool
) -> None:
    """Its own rows are still being read when those of the expert are through."""
    as_recorded = MIXED | {"strategy": None, "follow": follow}
    async with open_store(store_url) as store:
        experiment = await recorded(store, "run", "experience", rollouts())
        expert = await recorded(store, "expert", "sft", solutions()[:1])
        if finished:
            await experiment.finish("all tasks are through")
            await expert.finish("no more")
        for sources in ([1, 0, 0], []):
            served = []
            with resized(events_per_page=1, experiences_per_page=2, experiences_per_commit=2):
                async with experiment.train_stream(**as_recorded) as stream:
                    async for step in stream:
                        served.append(step.manifest.source.count(1))
                        await stream.commit(step)
            assert served == sources


async def test_steps_without_the_expert_are_told_of_once(
    store_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_store(store_url) as store:
        experiment = await recorded(store, "run", "experience", rollouts())
        await run_strategy(experiment, "grpo")
        await recorded(store, "expert", "sft", solutions()[:1])
        steps = await taken(experiment, 3)
    assert [step.manifest.source.count(1) for step in steps] == [1, 0, 0]
    told = "from step 2 on fewer of the expert's groups are mixed in, or none: experiment 'expert'"
    assert caplog.text.count(told) == 1


async def test_a_body_of_one_source_says_nothing_of_sources(sqlite_url: str) -> None:
    async with open_store(sqlite_url) as store:
        experiment = await filled(store)
        async with experiment.train_stream(strategy="grpo") as stream:
            await anext(stream)
        bodies = [event.body async for event in experiment.events(kinds=("BatchLeased",))]
    assert bodies
    assert not any({"sources", "source"} & body.keys() for body in bodies)


async def test_an_expert_that_is_not_there_is_named(sqlite_url: str) -> None:
    async with open_store(sqlite_url) as store:
        experiment = await filled(store)
        with pytest.raises(UnknownExperimentError, match=r"'experts' is not in this store.*expert"):
            await taken(experiment, 1, expert_experiment="experts")
        with pytest.raises(InvalidArgumentError, match="go together"):
            await taken(experiment, 1, expert_experiment=None)


async def test_names_with_slashes_take_no_rows_from_each_other(store_url: str) -> None:
    """What trainer ``a/t`` of ``r`` rejected is not rejected by trainer ``t`` of ``r/a``."""
    async with open_store(store_url) as store:
        runs = [await recorded(store, name, "experience", rollouts()) for name in ("run", "run/a")]
        await recorded(store, "expert", "sft", solutions())
        for run in runs:
            await run_strategy(run, "grpo")
        with pytest.raises(InvalidArgumentError, match="choose one without"):
            await taken(runs[0], 1, consumer="a/trainer")
        async with runs[1].train_stream(**MIXED, max_tokens=2, consumer="t") as stream:
            assert [step async for step in stream] == []
        expert = await store.experiment("expert")
        rejected = expert.events(kinds=["ExperiencesRejected"])
        by = {event.body["consumer"] async for event in rejected}
        assert by == {"run%2Fa/t"}
        for name in ("run%2Fa/t", "run/t"):
            with pytest.raises(InvalidArgumentError, match=f"consumer '{name}'"):
                async with expert.train_stream(strategy=None, consumer=name) as stream:
                    await anext(stream)
        with pytest.raises(InvalidArgumentError, match="consumer 'run/t'"):
            await run_strategy(runs[0], "grpo", name="run/t")
