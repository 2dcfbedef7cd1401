"""Algorithm types: five constants and a recipe each, the names and arguments of its parts."""

from __future__ import annotations

from abc import ABC, ABCMeta
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

from typing_extensions import override

from trinity_buffer.algorithm.arguments import Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Names of parts and their arguments; ``build`` makes objects of them.

    Attributes:
        add_strategy: strategies that annotate the data, filters first; none: trained as recorded.
        advantage_fn: advantages that the trainer computes; None: those of the annotation set.
        sample_strategy: which data a step takes.
        policy_loss_fn: the loss.
        kl_penalty_fn: divergence from the reference policy that is taken off the rewards.
        kl_loss_fn: divergence from the reference policy that is added to the loss.
        entropy_loss_fn: entropy that is taken off the loss.
        importance_correction: what weighs the difference between rollout engine and trainer.
        rollouts_per_group: how many runs of a task make a group; None: one.
        args: part -> arguments that differ from the part's own defaults; those of several
            strategies by strategy name.
    """

    add_strategy: tuple[str, ...] = ()
    advantage_fn: str | None = None
    sample_strategy: str = "default"
    policy_loss_fn: str = "ppo"
    kl_penalty_fn: str = "none"
    kl_loss_fn: str = "none"
    entropy_loss_fn: str = "default"
    importance_correction: str = "none"
    rollouts_per_group: int | None = None
    args: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def names(self) -> dict[str, Any]:
        """Return the name of each part, and ``rollouts_per_group``."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "args"}

    def as_config(self) -> dict[str, Any]:
        """Return `names`, the arguments of each part, and Trinity's names of two of them.

        ``repeat_times`` is ``rollouts_per_group``, and ``advantage_fn`` the last strategy where the
        trainer computes no advantages.
        """
        arguments = {f"{part}_args": dict(args) for part, args in self.args.items()}
        # Trinity names the last strategy here; the filters before it compute none.
        advantage = self.advantage_fn or next(reversed(self.add_strategy), None)
        named = {"repeat_times": self.rollouts_per_group or 1, "advantage_fn": advantage}
        return {**self.names(), **named, **arguments}

    @classmethod
    def of_config(cls, config: Mapping[str, Any], *, strategies: Collection[str]) -> Recipe:
        """Return the recipe of a type that was written for Trinity, by its ``default_config()``.

        Args:
            config: names and arguments of the parts.
            strategies: names of advantages that are computed before the trainer.
        """
        parts = {part: config[part] for part in PARTS if config.get(part) is not None}
        # Trinity has one key for both; what is computed before the trainer is a strategy here.
        if parts.get("advantage_fn") in strategies:
            parts["add_strategy"] = (parts.pop("advantage_fn"),)
        args = {part: config[f"{part}_args"] for part in PARTS if config.get(f"{part}_args")}
        if "add_strategy" in parts and "advantage_fn" in args:
            (name,) = parts["add_strategy"]
            args["add_strategy"] = {name: args.pop("advantage_fn")}
        repeated = config.get("rollouts_per_group", config.get("repeat_times"))
        return cls(rollouts_per_group=repeated, args=args, **parts)


PARTS = tuple(f.name for f in fields(Recipe) if f.name not in ("rollouts_per_group", "args"))
"""The parts of a recipe; arguments of one go by ``<part>_args``."""


class ConstantMeta(ABCMeta):
    """Metaclass of classes whose attributes stay as they were written; new ones may be added."""

    @override
    def __setattr__(cls, name: str, value: Any) -> None:
        """Set an attribute that no class in the line of inheritance has.

        Raises:
            AttributeError: one has it.
        """
        # ABCMeta keeps its own books in names with an underscore.
        # hasattr, since a constant may be inherited.
        if not name.startswith("_") and hasattr(cls, name):
            raise AttributeError(f"{name} is already defined in {cls.__name__}; it is a constant")
        super().__setattr__(name, value)

    @override
    def __delattr__(cls, name: str) -> None:
        """Refuse.

        Raises:
            AttributeError: always, for public names.
        """
        if not name.startswith("_"):
            raise AttributeError(f"{name} of {cls.__name__} is a constant")
        super().__delattr__(name)


class AlgorithmType(ABC, metaclass=ConstantMeta):
    """A named algorithm.

    Attributes:
        use_critic: a value model is trained beside the policy.
        use_reference: a frozen reference policy scores the data.
        compute_advantage_in_trainer: advantages come from the trainer's tensors, not the store.
        can_balance_batch: rows may change places between micro-batches.
        use_rollout: the policy's own rollouts are trained (False where only recorded data are).
        schema: what the data are: ``experience``, ``sft``, ``dpo`` or ``cpt``.
        recipe: its parts.
    """

    use_critic: bool
    use_reference: bool
    compute_advantage_in_trainer: bool
    can_balance_batch: bool
    use_rollout: bool = True
    schema: str
    recipe: ClassVar[Recipe]

    @classmethod
    def name(cls) -> str:
        """Return the registered name, or the class's own if it is not registered."""
        return ALGORITHM_TYPE.name_of(cls)

    @classmethod
    def default_config(cls) -> dict[str, Any]:
        """Return the names and arguments of the parts, as a configuration writes them.

        A class that writes its own needs no ``recipe``.
        """
        return cls.recipe.as_config()


ALGORITHM_TYPE: Registry[type[AlgorithmType]] = Registry("algorithm_type")


class _Usual(AlgorithmType):
    """Flags of most algorithms: they compare the runs of a task, and hold the policy back."""

    use_critic: bool = False
    use_reference: bool = True
    compute_advantage_in_trainer: bool = False
    can_balance_batch: bool = True
    schema: str = "experience"


@ALGORITHM_TYPE.register_module("sft")
class SFTAlgorithm(_Usual):
    """Supervised fine-tuning on prompts with answers."""

    use_reference: bool = False
    use_rollout: bool = False
    schema: str = "sft"
    recipe = Recipe(policy_loss_fn="sft", entropy_loss_fn="none")


@ALGORITHM_TYPE.register_module("cpt")
class CPTAlgorithm(SFTAlgorithm):
    """Continued pre-training on plain text."""

    schema: str = "cpt"


@ALGORITHM_TYPE.register_module("ppo")
class PPOAlgorithm(_Usual):
    """Proximal policy optimization with a critic (arXiv:1707.06347)."""

    use_critic: bool = True
    compute_advantage_in_trainer: bool = True
    recipe = Recipe(advantage_fn="ppo", kl_loss_fn="k2", rollouts_per_group=1)


@ALGORITHM_TYPE.register_module("grpo")
class GRPOAlgorithm(_Usual):
    """Group-relative policy optimization (arXiv:2402.03300)."""

    recipe = Recipe(add_strategy=("grpo",), kl_loss_fn="k2", rollouts_per_group=2)


@ALGORITHM_TYPE.register_module("dapo")
class DAPOAlgorithm(_Usual):
    """Decoupled clipping and dynamic sampling (arXiv:2503.14476); no reference policy.

    For its length penalty put ``"overlong_penalty"`` before the other strategies.
    """

    use_reference: bool = False
    recipe = Recipe(
        add_strategy=("dapo_dynamic_sampling", "grpo"),
        rollouts_per_group=16,
        args={"policy_loss_fn": {"clip_range_low": 0.2, "clip_range_high": 0.28}},
    )


@ALGORITHM_TYPE.register_module("grpo_verl")
class GRPOverlAlgorithm(_Usual):
    """GRPO whose advantages the trainer computes."""

    compute_advantage_in_trainer: bool = True
    recipe = replace(GRPOAlgorithm.recipe, add_strategy=(), advantage_fn="grpo_verl")


@ALGORITHM_TYPE.register_module("reinforceplusplus")
class ReinforcePlusPlusAlgorithm(_Usual):
    """REINFORCE with advantages whitened over the whole step (arXiv:2501.03262)."""

    compute_advantage_in_trainer: bool = True
    recipe = replace(GRPOverlAlgorithm.recipe, advantage_fn="reinforceplusplus")


@ALGORITHM_TYPE.register_module("rloo")
class RLOOAlgorithm(_Usual):
    """REINFORCE leave-one-out (arXiv:2402.14740)."""

    compute_advantage_in_trainer: bool = True
    recipe = replace(GRPOverlAlgorithm.recipe, advantage_fn="rloo")


@ALGORITHM_TYPE.register_module("opmd")
class OPMDAlgorithm(_Usual):
    """Online policy mirror descent (arXiv:2501.12599)."""

    recipe = replace(GRPOAlgorithm.recipe, add_strategy=("opmd",), policy_loss_fn="opmd")


@ALGORITHM_TYPE.register_module("asymre")
class AsymREAlgorithm(_Usual):
    """Asymmetric REINFORCE (arXiv:2506.20520); no reference policy."""

    use_reference: bool = False
    recipe = Recipe(
        add_strategy=("asymre",),
        policy_loss_fn="opmd",
        entropy_loss_fn="none",
        rollouts_per_group=2,
    )


@ALGORITHM_TYPE.register_module("dpo")
class DPOAlgorithm(_Usual):
    """Direct preference optimization on pairs (arXiv:2305.18290)."""

    can_balance_batch: bool = False
    use_rollout: bool = False
    schema: str = "dpo"
    recipe = Recipe(policy_loss_fn="dpo", kl_loss_fn="k2", rollouts_per_group=1)


@ALGORITHM_TYPE.register_module("topr")
class TOPRAlgorithm(_Usual):
    """Tapered off-policy REINFORCE (arXiv:2503.14286)."""

    recipe = replace(GRPOAlgorithm.recipe, add_strategy=("reinforce",), policy_loss_fn="topr")


@ALGORITHM_TYPE.register_module("cispo")
class CISPOAlgorithm(_Usual):
    """Clipped importance weights that keep every token's gradient (arXiv:2506.13585)."""

    recipe = replace(GRPOAlgorithm.recipe, policy_loss_fn="cispo")


@ALGORITHM_TYPE.register_module("gspo")
class GSPOAlgorithm(_Usual):
    """Importance ratios of whole sequences (arXiv:2507.18071)."""

    recipe = replace(GRPOAlgorithm.recipe, policy_loss_fn="gspo")


@ALGORITHM_TYPE.register_module("sapo")
class SAPOAlgorithm(_Usual):
    """A smooth gate in place of hard clipping (arXiv:2511.20347)."""

    recipe = replace(GRPOAlgorithm.recipe, policy_loss_fn="sapo")


@ALGORITHM_TYPE.register_module("mix")
class MIXAlgorithm(_Usual):
    """The policy's own data with GRPO and an expert's with SFT, in one step."""

    recipe = replace(
        GRPOAlgorithm.recipe,
        sample_strategy="mix",
        policy_loss_fn="mix",
        entropy_loss_fn="mix",
        rollouts_per_group=8,
    )


@ALGORITHM_TYPE.register_module("mix_chord")
class MIXCHORDAlgorithm(_Usual):
    """MIX with a schedule for its weight, and tokens weighted by doubt (arXiv:2508.11408)."""

    recipe = replace(MIXAlgorithm.recipe, policy_loss_fn="mix_chord")


@ALGORITHM_TYPE.register_module("raft")
class RAFTAlgorithm(_Usual):
    """Supervised fine-tuning on the best answer of each group (arXiv:2304.06767)."""

    use_reference: bool = False
    recipe = replace(SFTAlgorithm.recipe, add_strategy=("best_of_group",), rollouts_per_group=8)


@ALGORITHM_TYPE.register_module("sppo")
class sPPOAlgorithm(_Usual):  # noqa: N801 (the documented name)
    """PPO's clipping, on the logarithm of the ratio; no reference policy."""

    use_reference: bool = False
    recipe = Recipe(
        add_strategy=("opmd",), policy_loss_fn="sppo", entropy_loss_fn="none", rollouts_per_group=2
    )


@ALGORITHM_TYPE.register_module("rec")
class RECAlgorithm(_Usual):
    """Group-relative REINFORCE with a choice of clipping and weights (arXiv:2509.24203)."""

    recipe = replace(GRPOAlgorithm.recipe, add_strategy=("rec",), policy_loss_fn="rec")


@ALGORITHM_TYPE.register_module("multi_step_grpo")
class MultiStepGRPOAlgorithm(_Usual):
    """GRPO for rollouts of several steps: the last step's reward scores all."""

    recipe = replace(GRPOAlgorithm.recipe, add_strategy=("step_wise_grpo",), rollouts_per_group=8)


@ALGORITHM_TYPE.register_module("gigpo")
class GiGPOAlgorithm(_Usual):
    """Group-in-group policy optimization (arXiv:2505.10978)."""

    recipe = replace(
        MultiStepGRPOAlgorithm.recipe,
        add_strategy=("gigpo",),
        args={"policy_loss_fn": {"clip_range_low": 0.2, "clip_range_high": 0.2}},
    )


@ALGORITHM_TYPE.register_module("on_policy_distill")
class OnPolicyDistillAlgorithm(_Usual):
    """A teacher scores every token that the policy sampled (arXiv:2306.13649)."""

    use_reference: bool = False
    compute_advantage_in_trainer: bool = True
    recipe = Recipe(advantage_fn="on_policy_distill", entropy_loss_fn="none", rollouts_per_group=8)


@ALGORITHM_TYPE.register_module("jsd")
class JSDAlgorithm(_Usual):
    """Distillation by a generalized Jensen-Shannon divergence (arXiv:2306.13649)."""

    use_reference: bool = False
    compute_advantage_in_trainer: bool = True
    recipe = replace(OnPolicyDistillAlgorithm.recipe, advantage_fn="jsd")
