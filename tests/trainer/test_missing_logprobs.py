"""Log-probabilities that nobody recorded: no key, or a mask, and a loss that names a row."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.handles import Experiment, MicroBatch, Store, TrainStep
from tests.trainer.data import RUNS, policy, recorded, rollouts, solutions
from tests.whole_stores import replayed_steps
from trinity_buffer import open_store, run_strategy
from trinity_buffer.algorithm import ADVANTAGE_FN, build
from trinity_buffer.errors import InvalidArgumentError, TrainingError, TrinityBufferError
from trinity_buffer.experience import Experience
from trinity_buffer.trainer.models import Models, StepMeter, prepare
from trinity_buffer.trainer.parallel import Processes
from trinity_buffer.trainer.requirements import stream_options

STEP: dict[str, Any] = {"strategy": "grpo", "groups_per_step": 2, "tokens_per_microbatch": 20}
LACKING = 1
"""Row without log-probabilities."""


def without(*lacking: int) -> list[Experience]:
    """Return two groups, of which some rows have no log-probabilities."""
    made = rollouts(tasks=2)
    for row in lacking:
        made[row].logprobs = None
    return made


async def annotated(store: Store, made: list[Experience]) -> Experiment:
    """Return an experiment with these rows and their advantages."""
    experiment = await recorded(store, "run", "experience", made)
    await run_strategy(experiment, "grpo")
    return experiment


async def served(experiment: Experiment, **options: Any) -> TrainStep:
    """Return the first step."""
    async with experiment.train_stream(**(STEP | options)) as stream:
        return await anext(stream)


def loss_of(microbatch: MicroBatch, algorithm: str = "grpo", **parts: Any) -> torch.Tensor:
    """Return the loss of a policy that finds every token as likely."""
    logprob = torch.full_like(microbatch["input_ids"], -1.0, dtype=torch.float32)
    made = build(algorithm, kl_loss_fn="none", entropy_loss_fn="none", **parts)
    return made.loss(logprob, microbatch, layout=microbatch.layout)[0]


@pytest.mark.parametrize("layout", ["padded", "packed"])
async def test_what_nobody_recorded_is_no_key_of_any_micro_batch(
    store_url: str, layout: str
) -> None:
    async with open_store(store_url) as store:
        experiment = await annotated(store, without(*range(2 * RUNS)))
        step = await served(experiment, layout=layout)
    assert len(step.microbatches) > 1
    for microbatch in step.microbatches:
        assert {"rollout_logprob", "old_logprob", "logprob_mask"}.isdisjoint(microbatch)
        with pytest.raises(InvalidArgumentError, match=r"'old_logprob'.*no row of the step"):
            loss_of(microbatch)


@pytest.mark.parametrize("layout", ["padded", "packed"])
async def test_where_some_rows_recorded_theirs_a_mask_tells_which(
    store_url: str, layout: str
) -> None:
    async with open_store(store_url) as store:
        experiment = await annotated(store, without(LACKING))
        step = await served(experiment, layout=layout)
    masks = torch.cat([microbatch["logprob_mask"] for microbatch in step.microbatches])
    slots = [address & 0xFFFFF for address in step.manifest.experiences]
    assert masks.dtype == torch.bool
    assert masks.tolist() == [slot != LACKING for slot in slots]
    assert len({frozenset(microbatch) for microbatch in step.microbatches}) == 1


async def test_a_trainer_of_tokens_is_given_no_zeros_for_log_probs(store_url: str) -> None:
    async with open_store(store_url) as store:
        step = await served(await annotated(store, without(LACKING)))
    with pytest.raises(TrainingError, match=r"row b0/0/1/0/ has no log-prob.*needs="):
        step.microbatches[0].require_plain(1.0)


def without_a_reward() -> list[Experience]:
    made = without()
    made[LACKING].reward = None
    return made


@pytest.mark.parametrize(
    ("made", "refused"),
    [
        (without(LACKING), lambda step: step.microbatches[0].require_plain(1.0)),
        (without(LACKING), lambda step: loss_of(step.microbatches[0])),
        (without_a_reward(), lambda step: step.compute(ADVANTAGE_FN.get("rloo")())),
    ],
)
async def test_a_row_that_lacks_something_is_left_out_as_the_error_says(
    sqlite_url: str, made: list[Experience], refused: Callable[[TrainStep], object]
) -> None:
    """Of a step that is handed out, ``needs=`` alone rejects nothing."""
    async with open_store(sqlite_url) as store:
        experiment = await recorded(store, "run", "experience", made)
        with pytest.raises(TrinityBufferError) as caught:
            refused(await served(experiment, strategy=None))
        (drop,) = re.findall(r"drop=\['(.*?)'\]", str(caught.value))
        refused(await served(experiment, strategy=None, drop=[drop]))


async def test_a_loss_that_would_read_a_row_that_nobody_recorded_names_it(store_url: str) -> None:
    async with open_store(store_url) as store:
        step = await served(await annotated(store, without(LACKING)))
    for microbatch in step.microbatches:  # all alike, so that no rank trains alone
        with pytest.raises(InvalidArgumentError, match=rf"with b0/0/{LACKING}/0/ "):
            loss_of(microbatch)
        assert loss_of(microbatch, policy_loss_fn="sft").isfinite()
        microbatch["old_logprob"] = torch.full_like(microbatch["rollout_logprob"], -1.0)
        assert loss_of(microbatch).isfinite(), "the trainer computed those of every row"


@pytest.mark.parametrize(
    ("algorithm", "parts", "reader"),
    [
        ("rloo", {"kl_penalty_fn": "k1"}, "K1Fn"),
        ("on_policy_distill", {}, "OnPolicyDistillAdvantage"),
    ],
)
async def test_what_is_computed_before_a_loss_takes_no_zeros_for_log_probs(
    store_url: str, algorithm: str, parts: dict[str, Any], reader: str
) -> None:
    made = build(algorithm, policy_loss_fn="opmd", **parts)  # a loss that reads none itself
    async with open_store(store_url) as store:
        step = await served(await annotated(store, without(LACKING)))
    models = Models(policy(), reference=policy(1), teacher=policy(2))
    with pytest.raises(InvalidArgumentError, match=rf"{reader} reads 'old_logprob'.* b0/0/1/0/ "):
        prepare(step, made, models)
    prepare(step, made, models, recompute_old_logprob=True)


@pytest.mark.parametrize("name", ["clipb", "clipv"])
async def test_advantages_are_computed_from_no_zeros_for_log_probs(
    store_url: str, name: str
) -> None:
    made = build("rloo", advantage_fn=name, kl_loss_fn="none", policy_loss_fn="opmd")
    async with open_store(store_url) as store:
        step = await served(await annotated(store, without(LACKING)))
    for microbatch in step.microbatches:  # of a loop of one's own
        microbatch["entropy"] = microbatch["necs"] = torch.zeros_like(microbatch["old_logprob"])
    with pytest.raises(InvalidArgumentError, match=r"ClipBAdvantageFn reads .* b0/0/1/0/ "):
        step.compute(ADVANTAGE_FN.get("clipb")())
    assert ("logprobs" in stream_options(made, recompute_old_logprob=True)["needs"]) is (
        name == "clipb"
    )
    if name == "clipv":  # which reads what the trainer computes of every row
        prepare(step, made, Models(policy()), recompute_old_logprob=True)
        return
    with pytest.raises(InvalidArgumentError, match=r"'rollout_logprob' .* b0/0/1/0/ .* to come$"):
        prepare(step, made, Models(policy()), recompute_old_logprob=True)


async def test_the_ratio_to_log_probs_that_the_trainer_computed_is_known_of_every_row(
    store_url: str,
) -> None:
    async with open_store(store_url) as store:
        step = await served(await annotated(store, without(LACKING)))
    models = Models(policy(), reference=policy(1))
    prepare(step, build("grpo"), models, recompute_old_logprob=True)
    meter = StepMeter(step)
    for microbatch in step.microbatches:
        meter.add(microbatch, models.policy.scores(microbatch))
    measured = meter.measures({}, Processes()).rows
    assert measured["ratio_mean"] == pytest.approx(1.0)
    assert np.isnan(measured["gap_mean"]).sum() == 1


async def test_advantages_are_computed_from_no_zeros_for_rewards(store_url: str) -> None:
    made = without()
    made[LACKING].reward = None
    async with open_store(store_url) as store:
        step = await served(await recorded(store, "run", "experience", made), strategy=None)
        for penalty in ("none", "k1"):
            made_of = build("rloo", kl_loss_fn="none", kl_penalty_fn=penalty)
            with pytest.raises(InvalidArgumentError, match=r"RLOOAdvantageFn .* b0/0/1/0/ has no"):
                prepare(step, made_of, Models(policy(), reference=policy(1)))
        prepare(step, build("sft", kl_loss_fn="none"), Models(policy()))


async def test_a_penalty_without_a_coefficient_needs_no_reference(store_url: str) -> None:
    none: dict[str, Any] = {"kl_loss_fn": "none", "kl_penalty_fn_args": {"kl_coef": 0.0}}
    made = build("rloo", kl_penalty_fn="k1", **none)
    assert not made.needs_reference
    async with open_store(store_url) as store:
        experiment = await recorded(store, "run", "experience", rollouts())
        step = await served(experiment, strategy=None)
    prepare(step, made, Models(policy()))
    assert all(microbatch["advantages"].any() for microbatch in step.microbatches)


async def test_advantages_are_computed_of_rewards_that_the_trainer_gives(store_url: str) -> None:
    made = without()
    for one in made:
        one.reward = None
    async with open_store(store_url) as store:
        step = await served(await recorded(store, "run", "experience", made), strategy=None)
    for microbatch in step.microbatches:  # of a reward model in the trainer, say
        scores = torch.zeros_like(microbatch["token_level_rewards"])
        scores[:, -1] = microbatch["run_index"] % 2
        microbatch["token_level_rewards"] = scores
    step.compute(ADVANTAGE_FN.get("rloo")())
    assert all(microbatch["advantages"].any() for microbatch in step.microbatches)


async def test_a_loss_for_two_kinds_of_rows_reads_none_of_the_experts(store_url: str) -> None:
    mixed = {
        "sample_strategy": "mix",
        "expert_experiment": "expert",
        "expert_data_ratio": 1 / 2,
        "tokens_per_microbatch": None,
    }
    async with open_store(store_url) as store:
        experiment = await annotated(store, rollouts())
        await recorded(store, "expert", "sft", solutions())
        step = await served(experiment, **mixed)
    (microbatch,) = step.microbatches
    assert microbatch["logprob_mask"].tolist() == (~microbatch["expert_mask"]).tolist()
    assert loss_of(microbatch, "mix").isfinite()
    with pytest.raises(InvalidArgumentError, match="with s/0/0/0/ "):
        loss_of(microbatch, "grpo")


async def test_a_replay_sees_the_same_keys_and_tensors(store_url: str) -> None:
    async with open_store(store_url) as store:
        experiment = await annotated(store, without(LACKING))
        async with experiment.train_stream(**STEP) as stream:
            step = await anext(stream)
            await stream.commit(step)
        replayed = [one async for one in replayed_steps(experiment)]
    assert len(replayed) == 1
    for one, other in zip(step.microbatches, replayed[0].microbatches, strict=True):
        assert one.keys() == other.keys()
        assert one.unrecorded == other.unrecorded
        for name, value in one.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other[name]))
