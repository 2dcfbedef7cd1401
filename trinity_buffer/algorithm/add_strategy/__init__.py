"""Strategies of this package, and the names under which they are found."""

from trinity_buffer.algorithm.add_strategy.add_strategy import (
    ADD_STRATEGY,
    AddStrategy,
    GroupAdvantageStrategy,
    GRPOAddStrategy,
    OPMDAddStrategy,
    RewardVarianceAddStrategy,
    group_by,
)
from trinity_buffer.algorithm.add_strategy.copies import COPY_OF, original_uid
from trinity_buffer.algorithm.add_strategy.correct_bias_add_strategy import CorrectBiasAddStrategy
from trinity_buffer.algorithm.add_strategy.duplicate_add_strategy import (
    DuplicateInformativeAddStrategy,
)
from trinity_buffer.algorithm.add_strategy.step_wise_add_strategy import StepWiseGRPOStrategy

__all__ = [
    "ADD_STRATEGY",
    "COPY_OF",
    "AddStrategy",
    "CorrectBiasAddStrategy",
    "DuplicateInformativeAddStrategy",
    "GRPOAddStrategy",
    "GroupAdvantageStrategy",
    "OPMDAddStrategy",
    "RewardVarianceAddStrategy",
    "StepWiseGRPOStrategy",
    "group_by",
    "original_uid",
]
