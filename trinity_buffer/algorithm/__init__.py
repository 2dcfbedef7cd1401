"""Algorithms: strategies, advantages, losses. Tensors in, tensors out; no SQL.

Importing this package registers every class of it.
"""

from trinity_buffer.algorithm.add_strategy import (
    AddStrategy,
    GroupAdvantageStrategy,
    GRPOAddStrategy,
    StepWiseGRPOStrategy,
    compose,
    group_by,
)
from trinity_buffer.algorithm.advantage_fn import AdvantageFn, GroupAdvantage, GRPOAdvantageFn
from trinity_buffer.algorithm.functional import (
    aggregate_loss,
    masked_mean,
    masked_sum,
    masked_var,
    masked_whiten,
)
from trinity_buffer.algorithm.layout import BatchLayout, Totals
from trinity_buffer.algorithm.policy_loss_fn import LossAndMetrics, PolicyLossFn, PPOPolicyLossFn
from trinity_buffer.algorithm.registry import (
    ADD_STRATEGY,
    ADVANTAGE_FN,
    ALGORITHM_TYPE,
    ENTROPY_LOSS_FN,
    KL_FN,
    POLICY_LOSS_FN,
    SAMPLE_STRATEGY,
    Registry,
)

__all__ = [
    "ADD_STRATEGY",
    "ADVANTAGE_FN",
    "ALGORITHM_TYPE",
    "ENTROPY_LOSS_FN",
    "KL_FN",
    "POLICY_LOSS_FN",
    "SAMPLE_STRATEGY",
    "AddStrategy",
    "AdvantageFn",
    "BatchLayout",
    "GRPOAddStrategy",
    "GRPOAdvantageFn",
    "GroupAdvantage",
    "GroupAdvantageStrategy",
    "LossAndMetrics",
    "PPOPolicyLossFn",
    "PolicyLossFn",
    "Registry",
    "StepWiseGRPOStrategy",
    "Totals",
    "aggregate_loss",
    "compose",
    "group_by",
    "masked_mean",
    "masked_sum",
    "masked_var",
    "masked_whiten",
]
