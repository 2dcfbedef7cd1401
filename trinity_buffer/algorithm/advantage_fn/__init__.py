"""Advantage functions of this package, and the names under which they are found."""

from trinity_buffer.algorithm.advantage_fn import advantage_fn
from trinity_buffer.algorithm.advantage_fn.advantage_fn import *  # noqa: F403 - all that it exports
from trinity_buffer.algorithm.advantage_fn.advantage_fn import RewardAdvantage
from trinity_buffer.algorithm.advantage_fn.asymre_advantage import (
    ASYMREAdvantageFn,
    ASYMREGroupAdvantage,
)
from trinity_buffer.algorithm.advantage_fn.clipb_advantage import ClipBAdvantageFn
from trinity_buffer.algorithm.advantage_fn.clipv_advantage import ClipVAdvantageFn
from trinity_buffer.algorithm.advantage_fn.gigpo_advantage import GiGPOAdvantageFn
from trinity_buffer.algorithm.advantage_fn.grpo_advantage import (
    GRPOAdvantageFn,
    GRPOGroupedAdvantage,
)
from trinity_buffer.algorithm.advantage_fn.jsd_advantage import JSDAdvantage
from trinity_buffer.algorithm.advantage_fn.multi_step_grpo_advantage import StepWiseGRPOAdvantageFn
from trinity_buffer.algorithm.advantage_fn.on_policy_distill_advantage import (
    OnPolicyDistillAdvantage,
)
from trinity_buffer.algorithm.advantage_fn.opmd_advantage import OPMDAdvantageFn, OPMDGroupAdvantage
from trinity_buffer.algorithm.advantage_fn.ppo_advantage import PPOAdvantageFn
from trinity_buffer.algorithm.advantage_fn.rec_advantage import RECGroupedAdvantage
from trinity_buffer.algorithm.advantage_fn.reinforce_advantage import REINFORCEGroupAdvantage
from trinity_buffer.algorithm.advantage_fn.reinforce_plus_plus_advantage import (
    REINFORCEPLUSPLUSAdvantageFn,
)
from trinity_buffer.algorithm.advantage_fn.remax_advantage import REMAXAdvantageFn
from trinity_buffer.algorithm.advantage_fn.rloo_advantage import RLOOAdvantageFn

__all__ = [
    "ASYMREAdvantageFn",
    "ASYMREGroupAdvantage",
    "ClipBAdvantageFn",
    "ClipVAdvantageFn",
    "GRPOAdvantageFn",
    "GRPOGroupedAdvantage",
    "GiGPOAdvantageFn",
    "JSDAdvantage",
    "OPMDAdvantageFn",
    "OPMDGroupAdvantage",
    "OnPolicyDistillAdvantage",
    "PPOAdvantageFn",
    "RECGroupedAdvantage",
    "REINFORCEGroupAdvantage",
    "REINFORCEPLUSPLUSAdvantageFn",
    "REMAXAdvantageFn",
    "RLOOAdvantageFn",
    "RewardAdvantage",
    "StepWiseGRPOAdvantageFn",
]
__all__ += advantage_fn.__all__
