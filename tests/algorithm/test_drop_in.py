"""What code that was written for Trinity-RFT finds here under the names that it knows."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typing_extensions import override

import trinity_buffer as tb
from trinity_buffer.algorithm import (
    ADVANTAGE_FN,
    ALGORITHM_TYPE,
    ENTROPY_LOSS_FN,
    KL_FN,
    POLICY_LOSS_FN,
    build,
)
from trinity_buffer.algorithm.advantage_fn import GroupAdvantage
from trinity_buffer.algorithm.algorithm import AlgorithmType
from trinity_buffer.algorithm.key_mapper import ALL_MAPPERS
from trinity_buffer.algorithm.policy_loss_fn.ppo_policy_loss import PPOPolicyLossFn
from trinity_buffer.algorithm.sample_strategy.utils import representative_sample
from trinity_buffer.algorithm.utils import masked_mean, prefix_metrics
from trinity_buffer.errors import InvalidArgumentError, UnknownNameError

SHAPE = (2, 3)


def tensors(*names: str) -> dict[str, torch.Tensor]:
    return {name: torch.full(SHAPE, -1.0) for name in names}


def proto(**columns: Any) -> SimpleNamespace:
    """Return what looks like verl's DataProto."""
    tensors = {name: value for name, value in columns.items() if isinstance(value, torch.Tensor)}
    others = {name: value for name, value in columns.items() if name not in tensors}
    return SimpleNamespace(batch=tensors, non_tensor_batch=others)


def test_a_loss_passes_over_tensors_that_it_does_not_read() -> None:
    loss: Any = PPOPolicyLossFn(clip_range=0.2)
    given = {
        "response_mask": torch.ones(SHAPE, dtype=torch.bool),
        **tensors("old_log_probs", "advantages"),
    }
    plain, _ = loss(logprob=torch.zeros(SHAPE), **given)
    offered, _ = loss(logprob=torch.zeros(SHAPE), **given, ref_log_prob=torch.zeros(SHAPE))
    assert plain == offered
    with pytest.raises(TypeError, match="takes no tensor 'ref_log"):
        loss(logprob=torch.zeros(SHAPE), **given, ref_log_probs=torch.zeros(SHAPE))


@pytest.mark.parametrize("name", ENTROPY_LOSS_FN.names())
def test_an_entropy_loss_passes_over_them_too(name: str) -> None:
    mask, expert = torch.ones(SHAPE, dtype=torch.bool), torch.tensor([True, False])
    offered: dict[str, Any] = {**tensors("old_log_probs", "ref_log_prob")}
    found, _ = ENTROPY_LOSS_FN.get(name)(entropy_coef=1.0)(
        entropy=torch.ones(SHAPE),
        action_mask=mask,
        expert_mask=expert,
        loss_agg_mode="token-mean",
        **offered,
    )
    assert float(found) == (0.0 if name == "none" else 1.0)


def test_advantages_and_penalties_change_a_data_proto_in_place() -> None:
    given = proto(
        response_mask=torch.ones(SHAPE, dtype=torch.bool),
        token_level_scores=torch.ones(SHAPE),
        uid=["a", "a"],
        **tensors("old_log_probs", "ref_log_prob"),
    )
    found, metrics = KL_FN.get("k1")(kl_coef=0.5).apply_kl_penalty_to_reward(given)
    assert found is given
    assert torch.equal(given.batch["token_level_rewards"], torch.ones(SHAPE))
    assert float(metrics["kl"]) == 0.0
    given.batch["token_level_rewards"][0] = 3.0
    found, _ = ADVANTAGE_FN.get("rloo")()(given)
    assert found is given
    assert given.batch["advantages"][:, 0].tolist() == [6.0, -6.0]
    assert given.non_tensor_batch == {"uid": ["a", "a"]}


def test_a_default_config_names_what_trinity_reads() -> None:
    found = ALGORITHM_TYPE.get("dapo").default_config()
    assert (found["repeat_times"], found["advantage_fn"]) == (16, "grpo")
    assert found["policy_loss_fn_args"] == {"clip_range_low": 0.2, "clip_range_high": 0.28}


def test_a_type_that_writes_its_own_default_config_needs_no_recipe() -> None:
    class Theirs(AlgorithmType):
        use_critic = False
        use_reference = True
        compute_advantage_in_trainer = False
        can_balance_batch = True
        schema = "experience"

        @classmethod
        @override
        def default_config(cls) -> dict[str, Any]:
            return {
                "repeat_times": 4,
                "advantage_fn": "grpo",
                "policy_loss_fn": "ppo",
                "policy_loss_fn_args": {"clip_range": 0.3},
                "kl_loss_fn": "k2",
                "entropy_loss_fn": "default",
            }

    built = build(Theirs)
    assert built.rollouts_per_group == 4
    assert [choice.name for choice in built.strategies] == ["grpo"]
    assert built.choices["policy_loss_fn"].args["clip_range"] == 0.3
    assert built.choices["kl_loss_fn"].name == "k2"


@pytest.mark.parametrize(("has_reference", "divergence"), [(True, "k2"), (False, "none")])
def test_a_type_that_names_no_divergence_has_trinitys_default(
    has_reference: bool, divergence: str
) -> None:
    class Mixed(AlgorithmType):
        use_critic = False
        use_reference = has_reference
        compute_advantage_in_trainer = False
        can_balance_batch = True
        schema = "experience"

        @classmethod
        @override
        def default_config(cls) -> dict[str, Any]:
            return {"repeat_times": 8, "advantage_fn": "grpo", "policy_loss_fn": "ppo"}

    assert build(Mixed).choices["kl_loss_fn"].name == divergence
    assert build(Mixed, kl_loss_fn="none").choices["kl_loss_fn"].name == "none"


def test_a_type_that_says_nothing_is_refused_in_words() -> None:
    class Nothing(AlgorithmType):
        schema = "experience"

    with pytest.raises(InvalidArgumentError, match="neither recipe= nor default_config"):
        build(Nothing)


def test_a_registry_takes_dotted_paths_and_names_what_is_none() -> None:
    path = "trinity_buffer.algorithm.policy_loss_fn.ppo_policy_loss.PPOPolicyLossFn"
    assert POLICY_LOSS_FN.get(path) is POLICY_LOSS_FN.get("ppo")
    with pytest.raises(UnknownNameError, match=r"no policy_loss_fn at 'nowhere\.Loss'"):
        POLICY_LOSS_FN.get("nowhere.Loss")
    nothing: Any = None
    with pytest.raises(UnknownNameError, match="None is no name of a policy_loss_fn"):
        POLICY_LOSS_FN.get(nothing)


def test_the_modules_of_trinity_are_there() -> None:
    assert ALL_MAPPERS["verl"].from_trinity("old_logprob") == "old_log_probs"
    assert ALL_MAPPERS["verl"].to_trinity("response_mask") == "action_mask"
    assert ALL_MAPPERS["tinker"].to_trinity("response_mask") == "response_mask"
    assert float(masked_mean(torch.ones(3), torch.tensor([1, 0, 1]))) == pytest.approx(1.0)
    found = prefix_metrics({"loss": torch.tensor(0.5)}, "actor", {"x": 1})
    assert found == {"x": 1, "actor/loss": 0.5}
    assert isinstance(found["actor/loss"], float)
    given = [tb.Experience(tokens=[1, 2, 3], prompt_length=1, reward=r) for r in (0.0, 1.0)]
    assert [row["reward"] for row in representative_sample(given)] == [0.0, 1.0]


async def test_the_fields_of_a_name_may_be_assigned_until_it_is_written(tmp_path: Any) -> None:
    experience = tb.Experience(tokens=[1, 2, 3], prompt_length=1, logprobs=[-1.0, -1.0], reward=1.0)
    experience.eid.batch, experience.eid.task, experience.eid.run = "b0", 7, 3
    assert experience.eid == tb.EID("b0", 7, 3)
    assert hash(experience.eid) == hash(tb.EID("b0", 7, 3))
    with pytest.raises(AttributeError):
        experience.eid.tsk = 8
    async with tb.open_store(f"sqlite:///{tmp_path}/run.db") as store:
        experiment = await store.experiment("run", config={})
        await experiment.writer(actor="explorer-0").write([experience])
    with pytest.raises(AttributeError, match="b0/7/3/0/ is written"):
        experience.eid.run = 4
    for copied in (
        copy.copy(experience.eid),
        pickle.loads(pickle.dumps(experience.eid)),
        dataclasses.replace(experience.eid),
    ):
        assert copied == experience.eid
        copied.run = 4


async def test_advantages_of_a_class_of_ones_own_annotate_a_store(store_url: str) -> None:
    class Centred(GroupAdvantage):
        @override
        def calculate_group_advantage(
            self, group_id: str, exps: list[tb.Experience]
        ) -> tuple[list[tb.Experience], dict[str, Any]]:
            mean = sum(one.reward or 0.0 for one in exps) / len(exps)
            for one in exps:
                assert one.action_mask is not None
                assert one.reward is not None
                one.advantages = one.action_mask * (one.reward - mean)
                one.returns = one.advantages.clone()
            return exps, {"mean": mean}

    async with tb.open_store(store_url) as store:
        experiment = await store.experiment("run", config={"rollouts_per_group": 2})
        await experiment.writer(actor="explorer-0").write(
            [
                tb.Experience(
                    eid=tb.EID("b0", 0, run),
                    tokens=[1, 2, 3],
                    prompt_length=1,
                    logprobs=[-1.0, -1.0],
                    reward=float(run),
                )
                for run in range(2)
            ]
        )
        await tb.run_strategy(experiment, Centred)
        async with experiment.train_stream(strategy="Centred") as stream:
            step = await anext(stream)
    assert step.microbatches[0]["advantages"][:, 1].tolist() == [-0.5, 0.5]
