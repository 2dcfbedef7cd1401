from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from trinity_buffer.algorithm import (
    ALGORITHM_TYPE,
    AdvantageFn,
    Algorithm,
    AlgorithmType,
    BatchLayout,
    GRPOAddStrategy,
    PolicyLossFn,
    aggregate_loss,
    build,
    effective_args,
)
from trinity_buffer.algorithm.algorithm import CPTAlgorithm, GRPOAlgorithm
from trinity_buffer.algorithm.policy_loss_fn import GSPOLossFn
from trinity_buffer.errors import InvalidArgumentError, UnknownNameError
from trinity_buffer.trainer.requirements import stream_options

SCHEMAS = {"sft": "sft", "cpt": "cpt", "dpo": "dpo"}


def microbatch() -> dict[str, Tensor]:
    """Return a micro-batch with all that any algorithm needs."""
    draw = torch.Generator().manual_seed(0)
    shape = (4, 5)
    columns = ("old_logprob", "rollout_logprob", "ref_logprob", "advantages")
    batch = {name: -torch.rand(shape, generator=draw) for name in columns}
    mask = torch.ones(shape, dtype=torch.bool)
    mask[:, 0] = False
    return {
        **batch,
        "action_mask": mask,
        "expert_mask": torch.tensor([True, False, True, False]),
        "step": torch.full((4,), 3, dtype=torch.int32),
    }


def mode_of_loss(algorithm: Algorithm) -> object:
    """Return how the policy loss becomes one number."""
    return vars(algorithm.policy_loss)["loss_agg_mode"]


@pytest.mark.parametrize("name", ALGORITHM_TYPE.names())
def test_every_algorithm_builds_and_its_loss_has_a_gradient(name: str) -> None:
    algorithm = build(name)
    logprob = (microbatch()["old_logprob"] + 0.05).requires_grad_()
    layout = BatchLayout.of_step(
        microbatch()["action_mask"], expert_mask=microbatch()["expert_mask"], normalizer=5.0
    )
    loss, metrics = algorithm.loss(logprob, microbatch(), layout=layout)
    loss.backward()
    assert logprob.grad is not None
    assert torch.isfinite(logprob.grad).all()
    assert logprob.grad.any()
    assert float(metrics["final_loss"]) == float(loss.detach())
    assert all(key == "final_loss" or key.startswith("actor/") for key in metrics)


@pytest.mark.parametrize("name", ALGORITHM_TYPE.names())
def test_every_algorithm_says_what_it_is(name: str) -> None:
    kind = ALGORITHM_TYPE.get(name)
    algorithm = build(name)
    assert kind.name() == algorithm.name == name
    assert kind.schema == SCHEMAS.get(name, "experience")
    assert kind.__doc__
    assert kind.compute_advantage_in_trainer == (algorithm.advantage is not None)
    assert not (algorithm.needs_advantages and not algorithm.strategies)
    assert algorithm.needs_reference <= kind.use_reference


def test_constants_stay_what_they_are() -> None:
    with pytest.raises(AttributeError, match="use_critic is already defined"):
        GRPOAlgorithm.use_critic = True
    with pytest.raises(AttributeError, match="constant"):
        CPTAlgorithm.use_reference = True  # inherited ones too
    with pytest.raises(AttributeError, match="constant"):
        del GRPOAlgorithm.recipe
    assert GRPOAlgorithm.use_critic is False


def test_a_new_attribute_may_be_added_and_a_subclass_may_differ() -> None:
    class Mine(GRPOAlgorithm):
        """GRPO with a critic."""

        use_critic = True

    setattr(Mine, "note", "mine")  # noqa: B010 (no checker knows of it)
    assert Mine.use_critic
    assert vars(Mine)["note"] == "mine"
    assert build(Mine).strategies[0].cls is GRPOAddStrategy


def test_the_users_argument_beats_the_recipes_and_this_the_tuned_and_this_the_signature() -> None:
    assert build("ppo").choices["policy_loss_fn"].args["clip_range"] == 0.2  # tuned
    assert build("ppo", advantage_fn="clipv").choices["advantage_fn"].args["mu"] == 8.5
    assert build("dapo").choices["policy_loss_fn"].args["clip_range_high"] == 0.28  # recipe
    mine = build("dapo", policy_loss_fn_args={"clip_range_high": 0.3})
    assert mine.choices["policy_loss_fn"].args["clip_range_high"] == 0.3
    assert mine.choices["policy_loss_fn"].args["clip_range_low"] == 0.2
    assert mine.choices["policy_loss_fn"].args["clip_ratio_c"] == 3.0  # signature


@pytest.mark.parametrize("name", ["gspo", "dapo", "gigpo", "ppo"])
def test_a_clip_range_takes_the_place_of_tuned_limits(name: str) -> None:
    both: Any = build(name, policy_loss_fn_args={"clip_range": 0.1}).policy_loss
    assert (both.low, both.high) == (0.1, 0.1)
    one: Any = build(name, policy_loss_fn_args={"clip_range": 0.1, "clip_range_high": 0.3})
    assert (one.policy_loss.low, one.policy_loss.high) == (0.1, 0.3)


def test_no_clip_range_leaves_the_tuned_limits() -> None:
    none: Any = build("gspo", policy_loss_fn_args={"clip_range": None}).policy_loss
    assert (none.low, none.high) == (3e-4, 4e-4)


def test_the_recipes_arguments_belong_to_the_recipes_own_part() -> None:
    other = build("dapo", policy_loss_fn="sft")
    assert other.choices["policy_loss_fn"].args == {"loss_agg_mode": "token-mean"}


def test_a_part_may_be_a_name_or_a_class() -> None:
    by_name = build("grpo", policy_loss_fn="gspo")
    by_class = build("grpo", policy_loss_fn=GSPOLossFn)
    assert by_name.choices["policy_loss_fn"] == by_class.choices["policy_loss_fn"]


def test_gspo_keeps_its_own_aggregation_and_the_other_losses_follow_it() -> None:
    assert build("gspo").loss_agg_mode == "seq-mean-token-mean"
    assert mode_of_loss(build("gspo")) == "seq-mean-token-mean"


def test_one_aggregation_mode_can_be_set_for_all() -> None:
    algorithm = build("gspo", loss_agg_mode="token-mean")
    assert algorithm.loss_agg_mode == mode_of_loss(algorithm) == "token-mean"
    other = build(
        "gspo",
        loss_agg_mode="token-mean",
        policy_loss_fn_args={"loss_agg_mode": "seq-mean-token-sum"},
    )
    assert mode_of_loss(other) == "seq-mean-token-sum"
    assert other.loss_agg_mode == "token-mean"


def test_strategies_are_chosen_one_by_one() -> None:
    algorithm = build(
        "grpo",
        add_strategy=["reward_variance", "grpo"],
        add_strategy_args={"grpo": {"epsilon": 1e-3}},
    )
    assert [choice.name for choice in algorithm.strategies] == ["reward_variance", "grpo"]
    assert algorithm.strategies[1].args["epsilon"] == 1e-3
    assert build("grpo", add_strategy_args={"epsilon": 0.1}).strategies[0].args["epsilon"] == 0.1


def test_the_loss_is_policy_minus_entropy_plus_divergence() -> None:
    batch, logprob = microbatch(), microbatch()["old_logprob"] + 0.05
    entropy = torch.rand(4, 5, generator=torch.Generator().manual_seed(1))
    plain, _ = build("grpo", kl_loss_fn="none", entropy_loss_fn="none").loss(logprob, batch)
    whole, metrics = build(
        "grpo", kl_loss_fn_args={"kl_coef": 0.5}, entropy_loss_fn_args={"entropy_coef": 0.25}
    ).loss(logprob, batch, entropy=entropy)
    expected = plain - 0.25 * metrics["actor/entropy_loss"] + 0.5 * metrics["actor/kl_loss"]
    assert float(whole) == pytest.approx(float(expected))
    assert metrics["actor/kl_loss"] > 0


class OfRewards(AdvantageFn):
    """As the functions of Trinity-RFT are written that need the tensors of a trainer."""

    @classmethod
    @override
    def compute_in_trainer(cls) -> bool:
        return True

    @override
    def __call__(self, exps: Any, **kwargs: Any) -> Any:
        """Give each token what it earned."""
        exps["advantages"] = exps["returns"] = exps["token_level_rewards"] * exps["action_mask"]
        return exps, {}


def test_advantages_in_the_trainer_may_be_of_a_plain_function() -> None:
    algorithm = build("grpo_verl", advantage_fn=OfRewards)
    assert algorithm.reads == {"old_logprob", "action_mask", "advantages"}
    assert stream_options(algorithm)["needs"] == ("logprobs", "reward")


class Bonus(PolicyLossFn):
    """Wants to be uncertain."""

    @override
    def __call__(self, logprob: Tensor, entropy: Tensor, *, layout: Any = None) -> Any:
        """Return the sums."""
        return -logprob.sum() - 3.0 * entropy.sum(), {}


def test_the_entropy_that_a_loss_names_is_the_one_that_has_a_gradient() -> None:
    """That of the micro-batch is of the policy before the step, for advantage functions."""
    algorithm = build("sft", policy_loss_fn=Bonus)
    batch, logprob = microbatch(), microbatch()["old_logprob"].requires_grad_()
    entropy = torch.ones(4, 5, requires_grad=True)
    batch["entropy"] = entropy.detach()
    loss, _ = algorithm.loss(logprob, batch, entropy=entropy)
    loss.backward()
    assert entropy.grad is not None
    assert entropy.grad.unique().tolist() == [-3.0]
    assert torch.equal(algorithm.loss(logprob, batch)[0], loss)


class Early(PolicyLossFn):
    """Has nothing to compute where nothing is acted."""

    @override
    def __call__(self, logprob: Tensor, action_mask: Tensor, *, layout: Any = None) -> Any:
        """Return a number without history, or the sum."""
        if not action_mask.any():
            return torch.zeros(()), {}
        return (logprob * action_mask).sum(), {}


class Own(PolicyLossFn):
    """Reduces over what it is given."""

    @override
    def __call__(self, logprob: Tensor, action_mask: Tensor) -> Any:
        """Return the sum."""
        return (logprob * action_mask).sum(), {}


def test_a_loss_without_denominators_is_told_how_to_take_them() -> None:
    algorithm = build("grpo", policy_loss_fn=Own, kl_loss_fn="none", entropy_loss_fn="none")
    with pytest.raises(TypeError, match=r"Own takes no layout: .*layout=None.*aggregate_loss"):
        algorithm.loss(microbatch()["old_logprob"], microbatch())


class OfTrinity(PolicyLossFn):
    """As the losses of Trinity-RFT are written."""

    @override
    def __call__(self, logprob: Tensor, action_mask: Tensor, **kwargs: Any) -> Any:
        """Return the mean of what it is given."""
        return aggregate_loss(-logprob, action_mask), {}


def test_a_loss_of_keywords_is_warned_of_if_it_is_given_a_part_of_a_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    algorithm = build("sft", policy_loss_fn=OfTrinity)
    batch, logprob = microbatch(), microbatch()["old_logprob"]
    layout = BatchLayout.of_step(batch["action_mask"])
    algorithm.loss(logprob, batch, layout=layout)
    assert not caplog.messages
    part = {name: tensor[:2] for name, tensor in batch.items()}
    for _ in range(2):
        algorithm.loss(logprob[:2], part, layout=layout)
    (message,) = caplog.messages
    assert message.startswith("OfTrinity takes **kwargs, names no layout")
    assert "add `layout=None` to its parameters" in message


def test_a_dict_of_a_micro_batch_tells_of_rows_without_log_probs() -> None:
    batch = microbatch()
    batch |= {"logprob_mask": torch.tensor([True, False, True, True])}
    grpo, mix = (build(name, kl_loss_fn="none", entropy_loss_fn="none") for name in ("grpo", "mix"))
    logprob = batch["ref_logprob"]
    grpo.loss(logprob, batch)  # computed by the trainer: another tensor than the recorded one
    batch["rollout_logprob"] = batch["old_logprob"].clone()  # moved to a device
    for algorithm in (grpo, mix):
        with pytest.raises(
            InvalidArgumentError, match=r"recorded with row 1 .*unrecorded\) and ask"
        ):
            algorithm.loss(logprob, batch)
    batch["logprob_mask"] = torch.tensor([False, True, False, True])  # of the experts
    mix.loss(logprob, batch)
    batch["action_mask"] = batch["action_mask"] & batch["logprob_mask"][:, None]
    grpo.loss(logprob, batch)  # by the mask that tells of them, such rows are left out


@pytest.mark.parametrize("kl", ["none", "k2"])
def test_a_loss_may_be_a_constant_where_nothing_is_acted(kl: str) -> None:
    batch, logprob = microbatch(), microbatch()["old_logprob"].requires_grad_()
    batch["action_mask"] = torch.zeros_like(batch["action_mask"])
    algorithm = build("grpo", policy_loss_fn=Early, kl_loss_fn=kl, entropy_loss_fn="none")
    loss, _ = algorithm.loss(logprob, batch)
    loss.backward()
    assert logprob.grad is not None
    assert (loss.item(), logprob.grad.abs().sum().item()) == (0.0, 0.0)


@pytest.mark.parametrize("name", ["grpo", "sft", "on_policy_distill"])
def test_a_penalty_on_rewards_that_nothing_reads_is_refused(name: str) -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"'k1' lowers rewards .* choose kl_loss_fn='k1'"
    ):
        build(name, kl_penalty_fn="k1")
    build("grpo_verl", kl_penalty_fn="k1")


def test_a_correction_weighs_the_advantages() -> None:
    batch, logprob = microbatch(), microbatch()["old_logprob"] + 0.05
    plain, _ = build("asymre").loss(logprob, batch)
    corrected, metrics = build("asymre", importance_correction="token_tis").loss(logprob, batch)
    assert float(corrected) != float(plain)
    assert "actor/rollout_is/weight" in metrics


@pytest.mark.parametrize("name", ["mix", "mix_chord"])
def test_a_correction_of_an_experts_rows_is_refused(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"'token_tis': .*leave it at 'none'"):
        build(name, importance_correction="token_tis")


@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_a_correction_of_a_loss_without_advantages_is_refused(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"'token_tis': it weighs advantages, and "):
        build(name, importance_correction="token_tis")


def test_a_correction_compares_nothing_with_itself() -> None:
    batch = {**microbatch(), "old_logprob": (recorded := microbatch()["rollout_logprob"])}
    with pytest.raises(InvalidArgumentError, match="set recompute_old_logprob=True"):
        build("asymre", importance_correction="token_tis").loss(
            recorded, {**batch, "rollout_logprob": recorded}
        )


def test_entropy_is_not_needed_where_it_weighs_nothing() -> None:
    logprob = microbatch()["old_logprob"]
    assert not build("grpo").needs_entropy
    build("grpo").loss(logprob, microbatch())
    weighing = build("grpo", entropy_loss_fn_args={"entropy_coef": 0.1})
    assert weighing.needs_entropy
    with pytest.raises(InvalidArgumentError, match=r"entropy_coef=0\.1 and needs entropy="):
        weighing.loss(logprob, microbatch())


@pytest.mark.parametrize("missing", ["advantages", "old_logprob", "action_mask", "ref_logprob"])
def test_a_missing_tensor_is_named_with_who_needs_it(missing: str) -> None:
    batch = {key: value for key, value in microbatch().items() if key != missing}
    with pytest.raises(InvalidArgumentError, match=f"needs the tensor '{missing}'.*holds"):
        build("grpo").loss(batch.get("old_logprob", torch.zeros(4, 5)), batch)


def test_data_of_another_schema_are_refused_with_what_would_fit() -> None:
    build("dpo").check_schema("dpo")
    with pytest.raises(InvalidArgumentError, match=r"'dpo'.*'experience'.*grpo"):
        build("dpo").check_schema("experience")


@pytest.mark.parametrize(
    ("user", "message"),
    [
        ({"policy_los_fn": "ppo"}, "did you mean 'policy_loss_fn'"),
        ({"policy_loss_fn_args": {"clip_rang": 0.1}}, "did you mean 'clip_range'"),
        ({"policy_loss_fn_args": {"backend": "verl"}}, "'backend'"),
        ({"kl_loss_fn_args": {"coef": 0.1}}, "kl_coef"),
        ({"entropy_loss_fn_args": {"entropy_coeff": 0.1}}, "did you mean 'entropy_coef'"),
        ({"add_strategy_args": {"epsilom": 0.1}}, "did you mean 'epsilon'"),
        ({"add_strategy": ["grpo", "opmd"], "add_strategy_args": {"epsilon": 1}}, "'epsilon'"),
        ({"add_strategy": "overlong_penalty"}, "needs max_length, cache_length"),
        ({"advantage_fn": "grpo"}, "works on stored experiences"),
        ({"advantage_fn": "ppo", "advantage_fn_args": {"lamda": 1}}, "did you mean 'lam'"),
        ({"rollouts_per_group": 0}, "rollouts_per_group"),
        ({"kl_loss_fn": "none", "kl_loss_fn_args": {"kl_coef": 0.1}}, "kl_coef=0.1 has no effect"),
        ({"kl_penalty_fn_args": {"kl_coef": 0.1}}, "no kl_penalty_fn here: name one"),
        ({"entropy_loss_fn": None, "entropy_loss_fn_args": {"entropy_coef": 0.1}}, "no effect"),
        (
            {"advantage_fn_args": {"lam": 0.5}},
            r"leave advantage_fn_args out .* --set 'algorithm_args.advantage_fn_args=\{\}'",
        ),
        ({"sample_strategy": "mix", "sample_strategy_args": {"ratio": 1}}, "expert_data_ratio"),
    ],
)
def test_what_nothing_takes_is_refused_with_what_was_meant(
    user: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        build("grpo", **user)


def test_an_unknown_algorithm_or_part_is_refused_with_what_was_meant() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'grpo'"):
        build("gripo")
    with pytest.raises(UnknownNameError, match="did you mean 'grpo'"):
        build("gpro")  # as near to "gspo" by difflib, and of other letters
    with pytest.raises(UnknownNameError, match="did you mean 'gspo'"):
        build("grpo", policy_loss_fn="gspoo")


@pytest.mark.parametrize("name", ALGORITHM_TYPE.names())
def test_effective_arguments_say_everything_that_building_uses(name: str) -> None:
    found = effective_args(name)
    built = build(name)
    assert found["algorithm"] == name
    assert found["policy_loss_fn"]["args"] == built.choices["policy_loss_fn"].args
    assert [s["name"] for s in found["add_strategy"]] == [c.name for c in built.strategies]
    assert found["rollouts_per_group"] >= 1
    assert issubclass(built.type, AlgorithmType)
