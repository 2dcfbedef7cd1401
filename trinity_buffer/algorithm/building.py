"""From a recipe to objects. The one place that decides which argument wins."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from trinity_buffer.algorithm import arguments, importance_correction
from trinity_buffer.algorithm.add_strategy.add_strategy import ADD_STRATEGY
from trinity_buffer.algorithm.advantage_fn.advantage_fn import ADVANTAGE_FN, TrainerAdvantage
from trinity_buffer.algorithm.algorithm import ALGORITHM_TYPE, PARTS, AlgorithmType, Recipe
from trinity_buffer.algorithm.entropy_loss_fn.entropy_loss_fn import ENTROPY_LOSS_FN, EntropyLossFn
from trinity_buffer.algorithm.functional import keep
from trinity_buffer.algorithm.kl_fn.kl_fn import KL_FN, KLFn
from trinity_buffer.algorithm.layout import BatchLayout, tokens_per_row
from trinity_buffer.algorithm.policy_loss_fn.policy_loss_fn import POLICY_LOSS_FN, PolicyLossFn
from trinity_buffer.algorithm.sample_strategy.sample_strategy import SAMPLE_STRATEGY, SampleStrategy
from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.user_code import kind_of

_logger = logging.getLogger(__name__)

OF_ROLLOUTS = ("old_logprob", "rollout_logprob")
"""Tensors that come from what explorers recorded of their own policy."""


def require_recorded(batch: Mapping[str, Any], user: Any, reads: Collection[str]) -> None:
    """Raise unless every row has the log-probabilities that ``user`` reads.

    Who takes ``expert_mask`` reads those of the usual rows only.

    Raises:
        InvalidArgumentError: names a row that has none.
    """
    read = [key for key in OF_ROLLOUTS if key in reads and key in batch]
    unrecorded: Mapping[str, str] | None = getattr(batch, "unrecorded", None)
    rollout: Any = batch.get("rollout_logprob")
    moved = unrecorded is None
    if unrecorded is None:
        unrecorded = _unrecorded_rows(batch) if read and rollout is not None else {}
    # What the trainer has computed since is there for every row.
    recorded = [
        key
        for key in read
        if batch[key] is rollout or (moved and unrecorded and torch.equal(batch[key], rollout))
    ]
    kinds = ("usual",) if "expert_mask" in reads else ("usual", "expert")
    for uid in (unrecorded[kind] for kind in kinds if recorded and kind in unrecorded):
        how = "its uid is in microbatch.unrecorded" if moved else f"drop=[{uid!r}]"
        raise InvalidArgumentError(
            f"{type(user).__name__} reads {recorded[0]!r} of every row, and none was recorded with "
            f"{uid} (logprob_mask tells which rows have one): go on without it ({how}) and ask "
            "the stream for needs=('logprobs',), which rejects those of the steps to come"
            + (", or recompute_old_logprob=True" if recorded[0] == "old_logprob" else "")
        )


def _unrecorded_rows(batch: Mapping[str, Any]) -> dict[str, str]:
    """Return a row of each kind without log-probabilities, of a dict made of a micro-batch.

    Of a row that is masked none is read.
    """
    there, mask = batch.get("logprob_mask"), batch.get("action_mask")
    if there is None or mask is None:
        return {}
    unknown = ~there & (tokens_per_row(mask, batch.get("cu_seqlens")) > 0)
    expert = batch.get("expert_mask", torch.zeros_like(there))
    lacking = {"usual": unknown & ~expert, "expert": unknown & expert}
    return {kind: f"row {int(rows.int().argmax())}" for kind, rows in lacking.items() if rows.any()}


def needed(batch: Mapping[str, Any], key: str, user: Any) -> Tensor:
    """Return a tensor of the micro-batch.

    Raises:
        InvalidArgumentError: it is not there.
    """
    tensor = batch.get(key)
    if tensor is None:
        held = ", ".join(sorted(name for name in batch if batch[name] is not None))
        unrecorded = (
            ": no row of the step recorded log-probabilities; store them with the experiences "
            "(logprobs=), or let the trainer compute them before the step "
            "(recompute_old_logprob=True)"
        )
        raise InvalidArgumentError(
            f"{type(user).__name__} needs the tensor {key!r}, which the micro-batch lacks "
            f"(it holds {held}){unrecorded if key in OF_ROLLOUTS else ''}"
        )
    return cast("Tensor", tensor)


def require_correctable(correction: str, loss: Any) -> None:
    """Raise unless ``loss`` reads what an importance correction weighs, and all its rows have it.

    Raises:
        InvalidArgumentError: it reads no advantages, or its experts' rows no log-probabilities.
    """
    kind, reads = type(loss).__name__, loss.select_keys
    if correction == "none" or ("advantages" in reads and "expert_mask" not in reads):
        return
    why = f"it weighs advantages, and {kind} reads none"
    if "advantages" in reads:
        why = f"{kind} trains rows of experts too, which have no log-probabilities to be compared"
    raise InvalidArgumentError(f"importance_correction={correction!r}: {why}; leave it at 'none'")


REGISTRY_OF: dict[str, arguments.Registry[Any]] = {
    "add_strategy": ADD_STRATEGY,
    "advantage_fn": ADVANTAGE_FN,
    "sample_strategy": SAMPLE_STRATEGY,
    "policy_loss_fn": POLICY_LOSS_FN,
    "kl_penalty_fn": KL_FN,
    "kl_loss_fn": KL_FN,
    "entropy_loss_fn": ENTROPY_LOSS_FN,
    "importance_correction": importance_correction.IMPORTANCE_CORRECTION,
}
RUN_TIME = frozenset(
    {"writer", "reader", "expert_reader", "batch_size", "backend", "on_unknown", "rng"}
)
"""Constructor arguments that a run supplies, not a configuration."""

ACCEPTED = (*PARTS, *(f"{part}_args" for part in PARTS), "rollouts_per_group", "loss_agg_mode")
"""What `build` takes beside the algorithm."""

Arguments = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A part that was chosen: its name, its class, and the arguments that won."""

    name: str
    cls: type[Any]
    args: Arguments

    def make(self, **run_time: Any) -> Any:
        """Return the object."""
        return arguments.made(self.cls, **self.args, **run_time)


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """An algorithm, ready to train with.

    Attributes:
        type: its constants.
        strategies: what annotates its data, filters first; empty: trained as recorded.
        advantage: what computes advantages from the trainer's tensors, or None.
        sample: which data a step takes.
        policy_loss: the loss.
        kl_loss: divergence that is added to it.
        kl_penalty: divergence that is taken off the rewards.
        entropy_loss: entropy that is taken off the loss.
        correction: what weighs the difference between rollout engine and trainer.
        loss_agg_mode: how divergence and entropy become one number.
        rollouts_per_group: runs of a task that make a group.
        choices: part -> what was chosen, with the arguments that won.
    """

    type: type[AlgorithmType]
    strategies: tuple[Choice, ...]
    advantage: TrainerAdvantage | None
    sample: SampleStrategy
    policy_loss: PolicyLossFn
    kl_loss: KLFn
    kl_penalty: KLFn
    entropy_loss: EntropyLossFn
    correction: importance_correction.ImportanceCorrection
    loss_agg_mode: str
    rollouts_per_group: int
    choices: Mapping[str, Choice]

    @property
    def name(self) -> str:
        """The registered name."""
        return self.type.name()

    @property
    def tensors(self) -> frozenset[str]:
        """Names of the tensors that the policy loss takes beside ``logprob``."""
        return frozenset(self.policy_loss.select_keys)

    @property
    def reads(self) -> frozenset[str]:
        """Names of the tensors that the policy loss and the advantage function read."""
        return self.tensors | frozenset(() if self.advantage is None else self.advantage.tensors)

    @property
    def needs_advantages(self) -> bool:
        """Whether the data must come with advantages: the loss wants them, the trainer has none."""
        return "advantages" in self.tensors and self.advantage is None

    @property
    def needs_entropy(self) -> bool:
        """Whether the loss is not defined without the policy's entropy."""
        is_there = self.choices["entropy_loss_fn"].name != "none"
        return is_there and self.entropy_loss.entropy_coef != 0

    @property
    def needs_reference(self) -> bool:
        """Whether the log-probabilities of a reference policy are used."""
        used = [
            self.choices[part].name != "none" and (kl.kl_coef != 0 or kl.adaptive)
            for part, kl in (("kl_loss_fn", self.kl_loss), ("kl_penalty_fn", self.kl_penalty))
        ]
        return any(used) or "ref_logprob" in self.tensors

    def check_schema(self, schema: str) -> None:
        """Raise unless data of this schema can be trained on.

        Raises:
            InvalidArgumentError: the algorithm needs another one.
        """
        if schema != self.type.schema:
            fitting = [n for n in ALGORITHM_TYPE.names() if ALGORITHM_TYPE.get(n).schema == schema]
            raise InvalidArgumentError(
                f"algorithm {self.name!r} trains on data of schema {self.type.schema!r}, these are "
                f"{schema!r} (for them: {', '.join(fitting) or 'none'})"
            )

    def loss(
        self,
        logprob: Tensor,
        batch: Mapping[str, Any],
        *,
        entropy: Tensor | None = None,
        layout: BatchLayout | None = None,
        weigh: Callable[[Tensor], None] | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return ``policy - entropy + divergence``, and metrics under ``actor/``.

        Args:
            logprob: of the policy, with the shape of the micro-batch's tokens.
            batch: the micro-batch, under our names.
            entropy: of the policy at each token; may be missing where its coefficient is 0.
            layout: boundaries of the rows and denominators of the step; None: those that a
                micro-batch of a stream brings, and of any other batch its own.
            weigh: hears, in the backward pass, of ``d policy / d logprob``, with its shape.

        Raises:
            InvalidArgumentError: a tensor is missing; the message names it and who needs it.
        """
        layout = layout or _layout_of(batch)
        reader, own, corrected, metrics = self.policy_loss, logprob, batch, dict[str, Tensor]()
        if self.choices["importance_correction"].name != "none":
            compared = ("old_logprob", "rollout_logprob", "action_mask")
            require_recorded(batch, self.correction, compared)
            log_probs = [needed(batch, key, self.correction) for key in compared]
            weights, metrics = self.correction(*log_probs, layout=layout)
            corrected = {**batch, "advantages": needed(batch, "advantages", reader) * weights}
        require_recorded(batch, reader, reader.select_keys)
        tensors = _read_by(reader, corrected, entropy)
        if logprob.requires_grad:
            own = logprob.view_as(logprob)  # a node of its own: its gradient is this term's alone
            if weigh is not None:
                own.register_hook(weigh)
        answer: Any = self.policy_loss(logprob=own, layout=layout, **tensors)
        loss, of_policy = _loss_and_metrics(reader, answer)
        if logprob.requires_grad and logprob.numel() and not _is_reached(own, loss):
            mask = batch.get("action_mask")
            if mask is None or bool(mask.any()):
                raise InvalidArgumentError(
                    f"the loss of {type(reader).__name__} does not depend on logprob, so that no "
                    "training would lower it: compute it from logprob itself, without detach(), "
                    "item(), numpy() or torch.no_grad()"
                )
            # A constant is right where nothing is acted; it goes backward as all others do.
            loss = loss + keep(mask, own).sum()
        metrics.update(of_policy)
        if self.choices["entropy_loss_fn"].name != "none" and entropy is not None:
            mask = needed(batch, "action_mask", self.entropy_loss)
            of_tokens = entropy, mask, batch.get("expert_mask")
            bonus, parts = self.entropy_loss(*of_tokens, self.loss_agg_mode, layout=layout)
            loss = loss - bonus
            metrics.update(parts)
        elif self.needs_entropy:
            raise InvalidArgumentError(
                f"algorithm {self.name!r} has entropy_coef={self.entropy_loss.entropy_coef} "
                "and needs entropy=, which was not given"
            )
        kl = self.kl_loss
        # With a coefficient of 0 the divergence is still reported where a reference is there.
        if self.choices["kl_loss_fn"].name != "none" and (kl.kl_coef or "ref_logprob" in batch):
            if kl.reads_old_logprob:
                require_recorded(batch, kl, ("old_logprob",))
                needed(batch, "old_logprob", kl)
            divergence, parts = kl.calculate_kl_loss(
                logprob,
                needed(batch, "ref_logprob", kl),
                needed(batch, "action_mask", kl),
                self.loss_agg_mode,
                batch.get("old_logprob"),
                layout=layout,
            )
            loss = loss + divergence
            metrics.update(parts)
        named = {f"actor/{name}": value for name, value in metrics.items()}
        return loss, {"final_loss": loss.detach(), **named}


def _layout_of(batch: Mapping[str, Any]) -> BatchLayout | None:
    """Return the layout of a micro-batch of a stream, or the boundaries of other packed rows."""
    layout: BatchLayout | None = getattr(batch, "layout", None)
    # Only the micro-batches of a stream have a sample_index.
    if layout is None and "sample_index" in batch and not torch.compiler.is_compiling():
        warn_of_copy()
    mask = batch.get("action_mask")
    if layout is None and "cu_seqlens" in batch and mask is not None and mask.dim() == 1:
        # A dict of the tensors, moved to a device, say.
        columns = {name: batch.get(name) for name in ("cu_seqlens", "group_index", "expert_mask")}
        expert = columns["expert_mask"]
        if expert is not None and expert.shape == mask.shape:  # one per token
            columns["expert_mask"] = tokens_per_row(expert, columns["cu_seqlens"]) > 0
        return BatchLayout.of_step(mask, **columns)
    return layout


@cache
def warn_of_copy() -> None:
    """Say, once, that denominators are those of a part of a step."""
    _logger.warning(
        "a loss is given the tensors of a micro-batch without its layout, as in a dict, and "
        "divides by the tokens and rows of this micro-batch: of several in a step, the gradients "
        "then add up to a multiple of the step's; give layout=microbatch.layout"
    )


def _read_by(loss: PolicyLossFn, batch: Mapping[str, Any], entropy: Tensor | None) -> Arguments:
    """Return the tensors that a loss names; the entropy is ``entropy``, which has a gradient."""
    own = {} if entropy is None else {"entropy": entropy}
    return {key: own[key] if key in own else needed(batch, key, loss) for key in loss.select_keys}


def _loss_and_metrics(loss: PolicyLossFn, answer: Any) -> Sequence[Any]:
    """Return the answer of a loss, perhaps one of the user, if it has both."""
    if not (isinstance(answer, Sequence) and len(answer) == 2):
        raise TypeError(
            f"the loss of {type(loss).__name__} returned {kind_of(answer)}: it must return the "
            "loss and a mapping of metrics, as in `return loss, {}`"
        )
    if isinstance(answer[0], Tensor) and answer[0].numel() != 1:
        raise TypeError(
            f"the loss of {type(loss).__name__} returned a tensor of shape "
            f"{list(answer[0].shape)}: it must be one number, as aggregate_loss() makes it"
        )
    return answer


def _is_reached(tensor: Tensor, loss: Tensor) -> bool:
    """Return whether the gradient of ``loss`` reaches ``tensor``, which some operation made."""
    left, seen = [getattr(loss, "grad_fn", None)], set[Any]()
    while left:
        node = left.pop()
        if node is tensor.grad_fn:
            return True
        if node is not None and node not in seen:
            seen.add(node)
            left += [before for before, _ in node.next_functions]
    return False


def build(algorithm: str | type[AlgorithmType], **user: Any) -> Algorithm:
    """Return ``algorithm`` with the user's choices.

    One rule decides between arguments of a part: its signature gives way to its ``tuned`` values,
    these to the recipe's ``args`` (if the recipe's own class is used), and these to the user's.

    Args:
        algorithm: a registered name, or a class.
        user: for each part ``<part>=`` a name or class (several for ``add_strategy``) and
            ``<part>_args=`` its arguments; ``rollouts_per_group=``; ``loss_agg_mode=`` for
            the loss, divergence and entropy alike (by default the last two follow the loss).

    Raises:
        UnknownNameError: a name that is not registered.
        InvalidArgumentError: an argument that nothing takes, or one that is missing; a correction
            of the log-probabilities that an expert's rows do not have; a penalty, or arguments of a
            part, without effect.
    """
    arguments.refuse_unknown("build", user, ACCEPTED)
    kind = ALGORITHM_TYPE.get(algorithm) if isinstance(algorithm, str) else algorithm
    recipe = recipe_of(kind)
    choices = {}
    for part in PARTS:
        if part == "add_strategy":  # of which there may be several
            continue
        own, args = getattr(recipe, part), user.get(f"{part}_args") or {}
        wanted = user.get(part, own)
        # An explicit None means "without it", which is not the recipe's default.
        if wanted is None and part in user and part != "advantage_fn":
            wanted = "none"
            if wanted not in REGISTRY_OF[part].names():
                raise InvalidArgumentError(f"{part}=None: every algorithm has one, name it")
        if wanted is not None:
            # Arguments of the recipe are tuned for its own class, not for another choice.
            tuned = recipe.args.get(part, {}) if wanted == own else {}
            choices[part] = _chosen(part, wanted, tuned, args)
        if wanted is None or choices[part].name == "none":
            _refuse_idle(kind, part, args)
    mode = user.get("loss_agg_mode")
    policy = choices["policy_loss_fn"]
    if mode is not None and "loss_agg_mode" in arguments.declared_arguments(policy.cls):
        policy.args.update({"loss_agg_mode": mode} | user.get("policy_loss_fn_args", {}))
    rollouts = user.get("rollouts_per_group", recipe.rollouts_per_group)
    is_count = isinstance(rollouts, int) and not isinstance(rollouts, bool) and rollouts >= 1
    rule = "be a whole number of at least 1"
    arguments.require(rollouts is None or is_count, "rollouts_per_group", rollouts, rule)
    advantage = choices.get("advantage_fn")
    if advantage is not None and not advantage.cls.compute_in_trainer():
        raise InvalidArgumentError(
            f"advantage_fn {advantage.name!r} works on stored experiences: name it as add_strategy"
        )
    penalty = choices["kl_penalty_fn"].name
    if penalty != "none" and not (advantage is not None and advantage.cls.reads_rewards):
        raise InvalidArgumentError(
            f"kl_penalty_fn={penalty!r} lowers rewards in the trainer, where nothing of algorithm "
            f"{kind.name()!r} reads them: choose kl_loss_fn={penalty!r}, or an advantage_fn that "
            "the trainer computes, such as 'grpo_verl'"
        )
    loss = policy.make(backend="trinity")
    require_correctable(choices["importance_correction"].name, loss)
    return Algorithm(
        type=kind,
        strategies=_strategies(recipe, user),
        advantage=None if advantage is None else advantage.make(),
        sample=choices["sample_strategy"].make(),
        policy_loss=loss,
        kl_loss=choices["kl_loss_fn"].make(),
        kl_penalty=choices["kl_penalty_fn"].make(),
        entropy_loss=choices["entropy_loss_fn"].make(),
        correction=choices["importance_correction"].make(),
        loss_agg_mode=mode or policy.args.get("loss_agg_mode") or "token-mean",
        rollouts_per_group=1 if rollouts is None else rollouts,
        choices=choices,
    )


def effective_args(algorithm: str | type[AlgorithmType], **user: Any) -> dict[str, Any]:
    """Return the parts that `build` would use, ready for printing: name and arguments."""
    built = build(algorithm, **user)
    parts = {part: {"name": c.name, "args": dict(c.args)} for part, c in built.choices.items()}
    flags = ("use_critic", "use_reference", "compute_advantage_in_trainer", "can_balance_batch")
    return {
        "algorithm": built.name,
        "schema": built.type.schema,
        **{flag: getattr(built.type, flag) for flag in flags},
        "rollouts_per_group": built.rollouts_per_group,
        "loss_agg_mode": built.loss_agg_mode,
        "add_strategy": [{"name": c.name, "args": dict(c.args)} for c in built.strategies],
        **parts,
    }


def recipe_of(kind: type[AlgorithmType]) -> Recipe:
    """Return the recipe of a type, or what its ``default_config`` makes of one."""
    writes = [cls for cls in kind.__mro__ if {"recipe", "default_config"} & vars(cls).keys()]
    if writes and "recipe" in vars(writes[0]):
        return kind.recipe
    if not writes or writes[0] is AlgorithmType:
        raise InvalidArgumentError(
            f"algorithm {kind.__name__} says neither recipe= nor default_config(): what is it?"
        )
    # What is computed on lists of experiences runs as a strategy, before the trainer.
    stored = [n for n in ADVANTAGE_FN.names() if not ADVANTAGE_FN.get(n).compute_in_trainer()]
    # Trinity's default of a type that names no divergence; its own mix is one.
    config = {"kl_loss_fn": "k2"} if getattr(kind, "use_reference", False) else {}
    config |= kind.default_config()
    return Recipe.of_config(config, strategies={*ADD_STRATEGY.names(), *stored})


def _refuse_idle(kind: type[AlgorithmType], part: str, args: Mapping[str, Any]) -> None:
    """Raise InvalidArgumentError if ``args`` are of a part that there is none of."""
    for name, value in args.items():
        if value:  # a coefficient of 0 says what is so anyway
            raise InvalidArgumentError(
                f"{part}_args: {name}={value!r} has no effect, since algorithm {kind.name()!r} has "
                f"no {part} here: name one ({part}=NAME), or leave {part}_args out (of a run that "
                f"has recorded it, by --set 'algorithm_args.{part}_args={{}}' of explore or train)"
            )


def _strategies(chosen: Recipe, user: Mapping[str, Any]) -> tuple[Choice, ...]:
    """Return the choices for the strategies; arguments go by name if there are several."""
    part, own = "add_strategy", chosen.add_strategy
    wanted = user.get(part, own)
    listed: Sequence[Any] = [wanted] if isinstance(wanted, str | type) else list(wanted or ())
    names = [_name_of(part, strategy) for strategy in listed]
    if len(set(names)) < len(names):
        raise InvalidArgumentError(f"add_strategy: {'+'.join(names)} names one of them twice")
    args = dict(user.get("add_strategy_args") or {})
    # The arguments of an only strategy need no name around them.
    args = {names[0]: args} if len(names) == 1 else args
    arguments.refuse_unknown("add_strategy_args", args, names)
    tuned = {name: chosen.args.get(part, {}).get(name, {}) for name in own}
    return tuple(
        _chosen(part, strategy, tuned.get(name, {}), args.get(name) or {})
        for name, strategy in zip(names, listed, strict=True)
    )


def _chosen(part: str, wanted: Any, recipe: Mapping[str, Any], own: Mapping[str, Any]) -> Choice:
    """Return a choice whose arguments were decided: signature < tuned < recipe < user."""
    cls = REGISTRY_OF[part].get(wanted) if isinstance(wanted, str) else wanted
    if not (isinstance(cls, type) and hasattr(cls, "default_args")):
        raise InvalidArgumentError(
            f"{part} {wanted!r}: {cls!r} is no class with default_args, give one that derives from "
            "the base of its kind in trinity_buffer.algorithm (docs/extending.md)"
        )
    name = _name_of(part, wanted)
    defaults: Arguments = cls.default_args()
    # The order is the rule: what comes later wins.
    chosen = {**recipe, **own}
    # Both limits at once, from the user: those of either side that are tuned give way.
    both = own.get("clip_range") is not None
    one_sided = {"clip_range_low", "clip_range_high"} - own.keys() if both else ()
    args = {name: value for name, value in (defaults | chosen).items() if name not in one_sided}
    taken = arguments.declared_arguments(cls)
    accepted = (taken.keys() | defaults.keys()) - RUN_TIME
    arguments.refuse_unknown(f"{part} {name!r}", chosen, accepted)
    # Found here, by name: the constructor would name the class and a position.
    required = [n for n, parameter in taken.items() if parameter.default is arguments.REQUIRED]
    missing = [n for n in required if n not in args and n not in RUN_TIME]
    if missing:
        raise InvalidArgumentError(
            f"{part} {name!r} needs {', '.join(missing)}: give {part}_args={{{missing[0]!r}: ...}}"
        )
    return Choice(name=name, cls=cls, args=args)


def _name_of(part: str, wanted: Any) -> str:
    """Return the registered name of a part, or the name of a class that is not registered."""
    return wanted if isinstance(wanted, str) else REGISTRY_OF[part].name_of(wanted)
