"""REINFORCE (Williams, 1992) without a baseline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from typing_extensions import override

from trinity_buffer.algorithm.advantage_fn.advantage_fn import ADVANTAGE_FN, GroupAdvantage
from trinity_buffer.algorithm.annotating import annotate, reward_of
from trinity_buffer.experience import Experience


@ADVANTAGE_FN.register_module("reinforce")
class REINFORCEGroupAdvantage(GroupAdvantage):
    """The reward on every action token."""

    reference_args: ClassVar[Mapping[str, Any]] = {"on_unknown": "ignore"}

    @override
    def calculate_group_advantage(
        self, group_id: str, exps: list[Experience]
    ) -> tuple[list[Experience], dict[str, Any]]:
        """Score each member with its reward."""
        rewards = [reward_of(e) for e in exps]
        for experience, reward in zip(exps, rewards, strict=True):
            annotate(experience, reward)
        return exps, {"reward_mean": sum(rewards) / len(rewards)}
