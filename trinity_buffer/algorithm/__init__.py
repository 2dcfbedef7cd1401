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
from trinity_buffer.algorithm.add_strategy.add_strategy import ADD_STRATEGY
from trinity_buffer.algorithm.advantage_fn import AdvantageFn, GroupAdvantage, GRPOAdvantageFn
from trinity_buffer.algorithm.advantage_fn.advantage_fn import ADVANTAGE_FN
from trinity_buffer.algorithm.algorithm import ALGORITHM_TYPE, AlgorithmType, Recipe
from trinity_buffer.algorithm.building import Algorithm, build, effective_args
from trinity_buffer.algorithm.entropy_loss_fn import (
    DefaultEntropyLossFn,
    DummyEntropyLossFn,
    EntropyLossFn,
    MixEntropyLossFn,
)
from trinity_buffer.algorithm.entropy_loss_fn.entropy_loss_fn import ENTROPY_LOSS_FN
from trinity_buffer.algorithm.functional import (
    aggregate_loss,
    masked_mean,
    masked_sum,
    masked_var,
    masked_whiten,
)
from trinity_buffer.algorithm.importance_correction import (
    IMPORTANCE_CORRECTION,
    IcePop,
    ImportanceCorrection,
    NoCorrection,
    SequenceMIS,
    SequenceTIS,
    TokenMIS,
    TokenTIS,
)
from trinity_buffer.algorithm.kl_fn import (
    AbsFn,
    CorrectedK3Fn,
    DummyKLFn,
    K1Fn,
    K2Fn,
    K3Fn,
    KLFn,
    LowVarKLFn,
)
from trinity_buffer.algorithm.kl_fn.kl_fn import KL_FN
from trinity_buffer.algorithm.layout import BatchLayout, Totals
from trinity_buffer.algorithm.policy_loss_fn import (
    CISPOPolicyLossFn,
    ClipCovLossFn,
    DPOLossFn,
    GMPOLossFn,
    GSPOLossFn,
    GSPOTokenLossFn,
    ImportanceSamplingLossFn,
    KLCovLossFn,
    LossAndMetrics,
    MIXCHORDPolicyLossFn,
    MIXPolicyLossFn,
    OPMDPolicyLossFn,
    PolicyLossFn,
    PPOPolicyLossFn,
    RECPolicyLossFn,
    SAPOPolicyLossFn,
    SFTISLossFn,
    SFTLossFn,
    SFTPhiLossFn,
    TOPRPolicyLossFn,
    sPPOPolicyLossFn,
)
from trinity_buffer.algorithm.policy_loss_fn.policy_loss_fn import POLICY_LOSS_FN
from trinity_buffer.algorithm.registry import Registry
from trinity_buffer.algorithm.sample_strategy import SampleStrategy
from trinity_buffer.algorithm.sample_strategy.sample_strategy import SAMPLE_STRATEGY

__all__ = [
    "ADD_STRATEGY",
    "ADVANTAGE_FN",
    "ALGORITHM_TYPE",
    "ENTROPY_LOSS_FN",
    "IMPORTANCE_CORRECTION",
    "KL_FN",
    "POLICY_LOSS_FN",
    "SAMPLE_STRATEGY",
    "AbsFn",
    "AddStrategy",
    "AdvantageFn",
    "Algorithm",
    "AlgorithmType",
    "BatchLayout",
    "CISPOPolicyLossFn",
    "ClipCovLossFn",
    "CorrectedK3Fn",
    "DPOLossFn",
    "DefaultEntropyLossFn",
    "DummyEntropyLossFn",
    "DummyKLFn",
    "EntropyLossFn",
    "GMPOLossFn",
    "GRPOAddStrategy",
    "GRPOAdvantageFn",
    "GSPOLossFn",
    "GSPOTokenLossFn",
    "GroupAdvantage",
    "GroupAdvantageStrategy",
    "IcePop",
    "ImportanceCorrection",
    "ImportanceSamplingLossFn",
    "K1Fn",
    "K2Fn",
    "K3Fn",
    "KLCovLossFn",
    "KLFn",
    "LossAndMetrics",
    "LowVarKLFn",
    "MIXCHORDPolicyLossFn",
    "MIXPolicyLossFn",
    "MixEntropyLossFn",
    "NoCorrection",
    "OPMDPolicyLossFn",
    "PPOPolicyLossFn",
    "PolicyLossFn",
    "RECPolicyLossFn",
    "Recipe",
    "Registry",
    "SAPOPolicyLossFn",
    "SFTISLossFn",
    "SFTLossFn",
    "SFTPhiLossFn",
    "SampleStrategy",
    "SequenceMIS",
    "SequenceTIS",
    "StepWiseGRPOStrategy",
    "TOPRPolicyLossFn",
    "TokenMIS",
    "TokenTIS",
    "Totals",
    "aggregate_loss",
    "build",
    "compose",
    "effective_args",
    "group_by",
    "masked_mean",
    "masked_sum",
    "masked_var",
    "masked_whiten",
    "sPPOPolicyLossFn",
]
