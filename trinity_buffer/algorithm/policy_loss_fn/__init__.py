"""Policy losses, one module each; `PolicyLossFn` says how to write another."""

from trinity_buffer.algorithm.policy_loss_fn.chord_policy_loss import (
    MIXCHORDPolicyLossFn,
    SFTISLossFn,
    SFTPhiLossFn,
)
from trinity_buffer.algorithm.policy_loss_fn.cispo_policy_loss import CISPOPolicyLossFn
from trinity_buffer.algorithm.policy_loss_fn.cov_policy_loss import ClipCovLossFn, KLCovLossFn
from trinity_buffer.algorithm.policy_loss_fn.dpo_loss import DPOLossFn
from trinity_buffer.algorithm.policy_loss_fn.gmpo_policy_loss import GMPOLossFn
from trinity_buffer.algorithm.policy_loss_fn.gspo_policy_loss import GSPOLossFn, GSPOTokenLossFn
from trinity_buffer.algorithm.policy_loss_fn.importance_sampling_policy_loss import (
    ImportanceSamplingLossFn,
)
from trinity_buffer.algorithm.policy_loss_fn.mix_policy_loss import MIXPolicyLossFn
from trinity_buffer.algorithm.policy_loss_fn.opmd_policy_loss import OPMDPolicyLossFn
from trinity_buffer.algorithm.policy_loss_fn.policy_loss_fn import (
    POLICY_LOSS_FN,
    LossAndMetrics,
    PolicyLossFn,
)
from trinity_buffer.algorithm.policy_loss_fn.ppo_policy_loss import PPOPolicyLossFn
from trinity_buffer.algorithm.policy_loss_fn.rec_policy_loss import RECPolicyLossFn
from trinity_buffer.algorithm.policy_loss_fn.sapo_policy_loss import SAPOPolicyLossFn
from trinity_buffer.algorithm.policy_loss_fn.sft_loss import SFTLossFn
from trinity_buffer.algorithm.policy_loss_fn.sppo_loss_fn import sPPOPolicyLossFn
from trinity_buffer.algorithm.policy_loss_fn.topr_policy_loss import TOPRPolicyLossFn

__all__ = [
    "POLICY_LOSS_FN",
    "CISPOPolicyLossFn",
    "ClipCovLossFn",
    "DPOLossFn",
    "GMPOLossFn",
    "GSPOLossFn",
    "GSPOTokenLossFn",
    "ImportanceSamplingLossFn",
    "KLCovLossFn",
    "LossAndMetrics",
    "MIXCHORDPolicyLossFn",
    "MIXPolicyLossFn",
    "OPMDPolicyLossFn",
    "PPOPolicyLossFn",
    "PolicyLossFn",
    "RECPolicyLossFn",
    "SAPOPolicyLossFn",
    "SFTISLossFn",
    "SFTLossFn",
    "SFTPhiLossFn",
    "TOPRPolicyLossFn",
    "sPPOPolicyLossFn",
]
