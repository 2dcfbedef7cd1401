"""What the stream takes, and what it refuses: age, missing columns, pairs, schemas."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from tests.trainer.data import RUNS, pairs, recorded, rollouts, solutions
from trinity_buffer import StreamOptions, open_store, run_strategy
from trinity_buffer.algorithm import ADVANTAGE_FN, build
from trinity_buffer.errors import InvalidArgumentError, UnknownNameError
from trinity_buffer.experience import Experience
from trinity_buffer.trainer.requirements import stream_options


@pytest.mark.parametrize("reads", [False, True])
def test_an_own_advantage_function_says_whether_it_needs_recorded_logprobs(reads: bool) -> None:
    class Own(ADVANTAGE_FN.get("rloo")):  # type: ignore[misc]  # a class by its name
        reads_old_logprob = reads

    algorithm = build("rloo", advantage_fn=Own, policy_loss_fn="opmd")
    assert ("logprobs" in stream_options(algorithm)["needs"]) == reads


async def test_groups_that_are_too_old_are_rejected_whole(store_url: str) -> None:
    made = [*rollouts("old", version=0, tasks=2), *rollouts("new", version=5, tasks=2)]
    for late in made[1:RUNS]:
        late.info["model_version"] = 5  # one old run makes a group old
    async with open_store(store_url) as store:
        experiment = await recorded(store, "run", "experience", made)
        await run_strategy(experiment, "grpo")
        async with experiment.train_stream(
            strategy="grpo", sample_strategy="staleness_control", max_staleness=0
        ) as stream:
            first = await anext(stream)
            await stream.commit(first)
            second = await anext(stream)
        events = [e async for e in experiment.events(kinds=("ExperiencesRejected",))]
    # Step 1 starts from version 0, of which nothing is too old; step 2 from version 1.
    assert first.policy_versions == [0, 5, 5]
    assert second.policy_versions == [5] * RUNS
    assert [reason for e in events for reason in e.body["reasons"]] == ["stale"] * RUNS


async def test_a_group_may_be_just_as_old_as_is_allowed(store_url: str) -> None:
    made = [*rollouts("first", version=0, tasks=1), *rollouts("second", version=1, tasks=1)]
    async with open_store(store_url) as store:
        experiment = await recorded(store, "run", "experience", made)
        await run_strategy(experiment, "grpo")
        choice = {"sample_strategy": "staleness_control", "max_staleness": 0, "groups_per_step": 1}
        async with experiment.train_stream(strategy="grpo", **choice) as stream:
            await stream.commit(await anext(stream))
            assert (await anext(stream)).policy_versions == [1] * RUNS


async def test_a_group_rejected_before_its_turn_hides_no_older_one(store_url: str) -> None:
    made = [*rollouts("new", version=9, tasks=8), *rollouts("old", version=0, tasks=1)]
    served: list[Sequence[int]] = []
    async with open_store(store_url) as store:
        experiment = await recorded(store, "run", "experience", made)
        await run_strategy(experiment, "grpo")
        choice = {"sample_strategy": "staleness_control", "max_staleness": 0}
        async with experiment.train_stream(strategy="grpo", **choice) as stream:
            for _ in range(2):  # at the second step the old one behind all others is rejected
                step = await anext(stream)
                await stream.commit(step)
                served.append(step.manifest.experiences)
        async with experiment.train_stream(strategy="grpo", **choice) as stream:
            served += [step.manifest.experiences async for step in stream]
    assert len({row for rows in served for row in rows}) == 8 * RUNS


@pytest.mark.parametrize(
    ("given", "groups", "layout"),
    [({}, [4, 2], "packed"), ({"groups_per_step": 3, "layout": "padded"}, [3, 3], "padded")],
)
async def test_what_nobody_gives_is_what_the_experiment_is_configured_with(
    given: dict[str, object], groups: list[int], layout: str, store_url: str
) -> None:
    config = {"groups_per_step": 4, "tokens_per_microbatch": 20, "layout": "packed"}
    async with open_store(store_url) as store:
        await recorded(store, "run", "experience", rollouts())
        experiment = await store.experiment("run", config={"rollouts_per_group": RUNS, **config})
        await run_strategy(experiment, "grpo")
        async with experiment.train_stream(strategy="grpo", **given) as stream:
            steps = [step async for step in stream]
    assert [len(set(step.manifest.groups)) for step in steps] == groups
    assert {step.manifest.layout for step in steps} == {layout}
    assert min(len(step.microbatches) for step in steps) > 1


async def test_a_step_size_that_is_no_number_is_named(sqlite_url: str) -> None:
    async with open_store(sqlite_url) as store:
        experiment = await store.experiment("run", config={})
        with pytest.raises(
            InvalidArgumentError, match=r"groups_per_step='four': it must be an int"
        ):
            async with experiment.train_stream(strategy="grpo", groups_per_step="four"):
                pass


async def test_a_set_without_advantages_is_refused_before_the_first_step(store_url: str) -> None:
    async with open_store(store_url) as store:
        experiment = await recorded(store, "run", "experience", rollouts())
        async with experiment.train_stream(strategy=None, needs=("advantages",)) as stream:
            with pytest.raises(InvalidArgumentError, match="'recorded' has no advantages"):
                await anext(stream)
        leased = [e async for e in experiment.events(kinds=("BatchLeased",))]
    assert leased == []


@pytest.mark.parametrize(
    ("needs", "problem"),
    [
        ("logprob", r"needs='logprob': no column of rows; did you mean 'logprobs'\?"),
        ("info", "needs='info': no column of rows; there are reward, advantages"),
    ],
)
def test_a_column_that_no_row_can_have_is_refused(needs: str, problem: str) -> None:
    with pytest.raises(InvalidArgumentError, match=problem):
        StreamOptions(strategy=None, needs=("reward", "multi_modal_inputs.pixels", needs))


async def test_a_row_without_logprobs_is_rejected_and_the_others_trained(store_url: str) -> None:
    made = rollouts(tasks=2)
    made[1].logprobs = None
    async with open_store(store_url) as store:
        experiment = await recorded(store, "run", "experience", made)
        async with experiment.train_stream(
            strategy=None, groups_per_step=2, needs=("logprobs",)
        ) as stream:
            step = await anext(stream)
        events = [e async for e in experiment.events(kinds=("ExperiencesRejected",))]
    assert len(step.manifest.experiences) == 2 * RUNS - 1
    assert [e.body["reasons"] for e in events] == [["invalid: logprobs"]]


async def served(url: str, made: list[Experience], algorithm: str) -> tuple[list[int], list[str]]:
    """Return which rows a first step has, and why the others are rejected."""
    async with open_store(url) as store:
        experiment = await recorded(store, "run", "experience", made)
        options = stream_options(build(algorithm), teacher=True)
        async with experiment.train_stream(strategy=None, groups_per_step=2, **options) as stream:
            step = await anext(stream)
        events = [e async for e in experiment.events(kinds=("ExperiencesRejected",))]
    slots = sorted(address & 0xFFFFF for address in step.manifest.experiences)
    return slots, [reason for e in events for reason in e.body["reasons"]]


@pytest.mark.parametrize("algorithm", ["rloo", "ppo", "reinforceplusplus", "grpo_verl"])
async def test_a_row_without_a_reward_is_rejected_where_the_trainer_computes_advantages_of_it(
    algorithm: str, store_url: str
) -> None:
    made = rollouts(tasks=2)
    made[1].reward = None
    assert await served(store_url, made, algorithm) == ([0, 2, 3, 4, 5], ["invalid: reward"])


async def test_a_row_with_a_reward_for_each_token_has_a_reward(store_url: str) -> None:
    made = rollouts(tasks=2)
    made[1].reward = None
    made[1].token_level_reward = torch.zeros(len(made[1].tokens) - made[1].prompt_length)
    assert await served(store_url, made, "ppo") == ([0, 1, 2, 3, 4, 5], [])


async def test_a_row_needs_no_reward_where_a_teacher_gives_the_advantages(store_url: str) -> None:
    made = rollouts(tasks=2)
    made[1].reward = None
    for algorithm in ("on_policy_distill", "jsd"):
        assert not {"reward"} & set(stream_options(build(algorithm), teacher=True)["needs"])
    found = await served(store_url, made, "on_policy_distill")
    assert found == ([0, 1, 2, 3, 4, 5], [])


@pytest.mark.parametrize("layout", ["padded", "packed"])
async def test_a_pair_lies_in_one_micro_batch_chosen_first(store_url: str, layout: str) -> None:
    made = pairs()
    async with open_store(store_url) as store:
        experiment = await recorded(store, "run", "dpo", made)
        async with experiment.train_stream(
            strategy=None, groups_per_step=8, layout=layout, tokens_per_microbatch=40
        ) as stream:
            step = await anext(stream)
    rows: list[list[int]] = []
    for microbatch in step.microbatches:
        ids, mask = microbatch["input_ids"], microbatch["attention_mask"]
        if layout == "packed":
            sizes = microbatch["cu_seqlens"].diff().tolist()
            rows += [row.tolist() for row in ids.split(sizes)]
        else:
            rows += [row[kept].tolist() for row, kept in zip(ids, mask, strict=True)]
        assert len(microbatch["group_index"]) % 2 == 0
        computed = ids.numel()
        assert computed <= 40 or len(microbatch["group_index"]) == 2
    halves = [(e.tokens, half) for e in made for half in (e.chosen, e.rejected)]
    expected = [[*tokens.tolist(), *half.tolist()] for tokens, half in halves if half is not None]
    assert rows == expected
    assert len(step.microbatches) > 1
    assert step.microbatches[0].layout.total.sequences == 16


async def test_a_pair_is_too_long_where_its_longer_half_is(sqlite_url: str) -> None:
    made = pairs()
    longest = [
        len(e.tokens) + max(len(half) for half in (e.chosen, e.rejected) if half is not None)
        for e in made
    ]
    limit = sorted(longest)[4]
    async with open_store(sqlite_url) as store:
        experiment = await recorded(store, "run", "dpo", made)
        options = {"layout": "packed", "max_tokens": limit, "groups_per_step": 8}
        async with experiment.train_stream(strategy=None, **options) as stream:
            steps = [step async for step in stream]
        gone = [e async for e in experiment.events(kinds=("ExperiencesRejected",))]
    kept = sorted(at & 0xFFFFF for step in steps for at in step.manifest.experiences)
    assert kept == [at for at, size in enumerate(longest) if size <= limit]
    assert {reason for event in gone for reason in event.body["reasons"]} == {"oversize"}


async def test_prompts_with_answers_are_groups_of_one(store_url: str) -> None:
    async with open_store(store_url) as store:
        experiment = await recorded(store, "run", "sft", solutions())
        async with experiment.train_stream(strategy=None, groups_per_step=3) as stream:
            sizes = [len(step.manifest.experiences) async for step in stream]
    assert sizes == [3, 3, 2]


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("budget", [None, 30])
async def test_advantages_are_of_the_whole_step(
    store_url: str, layout: str, budget: int | None
) -> None:
    async with open_store(store_url) as store:
        experiment = await recorded(store, "run", "experience", rollouts())
        async with experiment.train_stream(
            strategy=None, groups_per_step=6, layout=layout, tokens_per_microbatch=budget
        ) as stream:
            step = await anext(stream)
    step.compute(ADVANTAGE_FN.get("rloo")())
    rewards = {(e.eid.task, e.eid.run): float(e.reward or 0) for e in rollouts()}
    expected = {
        (task, run): reward
        - sum(rewards[task, other] for other in range(RUNS) if other != run) / (RUNS - 1)
        for (task, run), reward in rewards.items()
    }
    found: dict[int, float] = {}
    for microbatch in step.microbatches:
        columns = [microbatch[name] for name in ("advantages", "action_mask")]
        if layout == "packed":
            sizes = microbatch["cu_seqlens"].diff().tolist()
            columns = [list(column.split(sizes)) for column in columns]
        for slot, values, mask in zip(microbatch["sample_index"].tolist(), *columns, strict=True):
            assert not values[~mask].any()
            (found[slot],) = set(values[mask].tolist())
    order = [divmod(address & 0xFFFFF, RUNS) for address in step.manifest.experiences]
    for slot, key in enumerate(order):
        assert found[slot] == pytest.approx(expected[key], abs=1e-6)


async def test_old_logprobs_are_left_to_the_trainer_on_request(sqlite_url: str) -> None:
    async with open_store(sqlite_url) as store:
        experiment = await recorded(store, "run", "experience", rollouts())
        async with experiment.train_stream(strategy=None, recompute_old_logprob=True) as stream:
            (microbatch,) = (await anext(stream)).microbatches
    assert "old_logprob" not in microbatch
    assert microbatch["rollout_logprob"].any()


async def test_what_is_changed_in_place_over_a_step_is_in_its_microbatches(sqlite_url: str) -> None:
    async with open_store(sqlite_url) as store:
        experiment = await recorded(store, "run", "experience", rollouts())
        async with experiment.train_stream(strategy=None, tokens_per_microbatch=60) as stream:
            step = await anext(stream)
    before = [microbatch["token_level_rewards"].clone() for microbatch in step.microbatches]

    def penalize(batch: dict[str, torch.Tensor], layout: object) -> dict[str, object]:
        batch["token_level_rewards"] -= 0.5 * batch["action_mask"]
        return {}

    step.apply(penalize)
    for microbatch, rewards in zip(step.microbatches, before, strict=True):
        lowered = rewards - 0.5 * microbatch["action_mask"]
        assert torch.equal(microbatch["token_level_rewards"], lowered)


async def test_dropped_tokens_change_the_denominators(sqlite_url: str) -> None:
    async with open_store(sqlite_url) as store:
        experiment = await recorded(store, "run", "experience", rollouts())
        async with experiment.train_stream(
            strategy=None, groups_per_step=6, tokens_per_microbatch=30
        ) as stream:
            step = await anext(stream)

    def drop(batch: dict[str, torch.Tensor], layout: object) -> dict[str, object]:
        mask = batch["action_mask"].clone()
        mask[1:] = False
        batch["action_mask"] = mask
        return {}

    left = int(step.microbatches[0]["action_mask"][0].sum())
    step.apply(drop)
    assert {m.layout.total.tokens for m in step.microbatches} == {left}
    assert {m.layout.total.active_sequences for m in step.microbatches} == {1}
    assert {m.layout.total.sequences for m in step.microbatches} == {6 * RUNS}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sample_strategy": "mixed"}, "mix"),
        ({"max_staleness": 1.0}, "staleness_control"),
        ({"expert_data_ratio": 0.5}, "mix"),
        ({"rank": 1}, "ranks count from 0"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises((InvalidArgumentError, UnknownNameError), match=message):
        StreamOptions(strategy=None, **options)  # type: ignore[arg-type]


def test_a_bound_of_staleness_that_a_run_does_not_give_is_missed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The run's own `max_staleness` bounds how far explorers go ahead, and no stream reads it."""
    algorithm = build("grpo", sample_strategy="staleness_control")
    StreamOptions(strategy="grpo", **stream_options(algorithm)).warn_of_unbounded()
    assert "sample_strategy_args={max_staleness=N}" in caplog.text


def test_an_algorithm_refuses_data_of_another_schema() -> None:
    with pytest.raises(InvalidArgumentError, match=r"'dpo' trains on data of schema 'dpo'.*'sft'"):
        build("dpo").check_schema("sft")
