"""Policy losses, one module each; `PolicyLossFn` says how to write another."""

from trinity_buffer.algorithm.policy_loss_fn.policy_loss_fn import (
    LossAndMetrics,
    PolicyLossFn,
)
from trinity_buffer.algorithm.policy_loss_fn.ppo_policy_loss import PPOPolicyLossFn
from trinity_buffer.algorithm.registry import POLICY_LOSS_FN

__all__ = ["POLICY_LOSS_FN", "LossAndMetrics", "PPOPolicyLossFn", "PolicyLossFn"]
