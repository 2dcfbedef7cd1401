"""What an algorithm is made of: the names of its parts, and arguments for them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from trinity_buffer.errors import InvalidArgumentError

PARTS: tuple[str, ...] = (
    "add_strategy",
    "advantage_fn",
    "sample_strategy",
    "policy_loss_fn",
    "kl_penalty_fn",
    "kl_loss_fn",
    "entropy_loss_fn",
    "importance_correction",
)
"""The parts of a recipe; arguments of one go by ``<part>_args``."""


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
        given = {f"{part}_args": dict(args) for part, args in self.args.items()}
        advantage = self.advantage_fn or next(reversed(self.add_strategy), None)
        named = {"repeat_times": self.rollouts_per_group or 1, "advantage_fn": advantage}
        return {**self.names(), **named, **given}

    @classmethod
    def of_config(cls, config: Mapping[str, Any], *, strategies: Collection[str]) -> Recipe:
        """Return the recipe of a type that was written for Trinity, by its ``default_config()``.

        Args:
            config: names and arguments of the parts.
            strategies: names of advantages that are computed before the trainer.
        """
        parts = {part: config[part] for part in PARTS if config.get(part) is not None}
        if parts.get("advantage_fn") in strategies:
            parts["add_strategy"] = (parts.pop("advantage_fn"),)
        args = {part: config[f"{part}_args"] for part in PARTS if config.get(f"{part}_args")}
        if "add_strategy" in parts and "advantage_fn" in args:
            (name,) = parts["add_strategy"]
            args["add_strategy"] = {name: args.pop("advantage_fn")}
        repeated = config.get("rollouts_per_group", config.get("repeat_times"))
        return cls(rollouts_per_group=repeated, args=args, **parts)


def default_args_of(what: str, cls: Any) -> dict[str, Any]:
    """Return the arguments that a part has by default.

    Raises:
        InvalidArgumentError: ``cls`` is no class of a part; ``what`` says whose it was to be.
    """
    if not (isinstance(cls, type) and hasattr(cls, "default_args")):
        raise InvalidArgumentError(
            f"{what}: {cls!r} has no default_args, derive a class from the base of its kind in "
            "trinity_buffer.algorithm (docs/extending.md)"
        )
    found: dict[str, Any] = cls.default_args()
    return found
