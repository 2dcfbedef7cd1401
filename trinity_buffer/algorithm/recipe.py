"""What an algorithm is made of: the names of its parts, and arguments for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

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
