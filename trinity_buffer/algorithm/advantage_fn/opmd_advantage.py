"""Online policy mirror descent (arXiv:2501.12599): the reward less a baseline of its group."""

from __future__ import annotations

from dataclasses import field

from typing_extensions import override

from trinity_buffer.algorithm.advantage_fn import advantage_fn
from trinity_buffer.algorithm.arguments import configured
from trinity_buffer.algorithm.group_scores import Rewards, ScoredGroups, baseline, check_baseline


@configured
class _LessBaseline(advantage_fn.AdvantageFn):
    """The distance from a baseline of the group.

    Args:
        opmd_baseline: ``"mean"`` or ``"logavgexp"``: ``tau log(mean(exp(reward / tau)))``.
        tau: temperature of the second.
        kwargs: of `AdvantageFn`.
    """

    opmd_baseline: str = "mean"
    tau: float = 1.0

    def score_groups(self, rewards: Rewards, weights: Rewards | None = None) -> ScoredGroups:
        """Return the distance from the baseline."""
        compared = baseline(rewards, self.opmd_baseline, self.tau, weights)
        return advantage_fn.less_baseline(rewards, compared, weights)


@advantage_fn.ADVANTAGE_FN.register_module("opmd")
@configured
class OPMDGroupAdvantage(_LessBaseline, advantage_fn.RewardAdvantage):
    """``reward - baseline`` on every action token of a group."""

    reference_args = {"over": "rows"}

    @override
    def __post_init__(self) -> None:
        check_baseline(self.opmd_baseline, self.tau)


@advantage_fn.ADVANTAGE_FN.register_module("opmd_verl")
@configured
class OPMDAdvantageFn(_LessBaseline, advantage_fn.GroupScoredAdvantage):
    """``reward - baseline`` of the rows' summed token-level rewards.

    Args:
        opmd_baseline: ``"mean"`` or ``"logavgexp"``.
        tau: temperature of the second.
        check_early: refuse a wrong baseline at once; False waits for a group that needs one, as the
            reference does.
        kwargs: of `GroupScoredAdvantage`.
    """

    reference_args = {"check_early": False, "over": "rows"}

    check_early: bool = field(default=True, kw_only=True)

    @override
    def __post_init__(self) -> None:
        # The reference finds a wrong baseline only in a group that needs one.
        if self.check_early:
            check_baseline(self.opmd_baseline, self.tau)
