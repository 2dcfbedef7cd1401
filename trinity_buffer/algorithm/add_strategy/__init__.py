"""Strategies of this package, and the names under which they are found."""

from trinity_buffer.algorithm.add_strategy import add_strategy
from trinity_buffer.algorithm.add_strategy.add_strategy import *  # noqa: F403 - all that it exports
from trinity_buffer.algorithm.add_strategy.advantage_add_strategy import (
    AdvantageAddStrategy,
    ASYMREAddStrategy,
    GiGPOAddStrategy,
    GRPOGroupedAddStrategy,
    RECAddStrategy,
    REINFORCEAddStrategy,
)
from trinity_buffer.algorithm.add_strategy.compose import CompositeAddStrategy, compose
from trinity_buffer.algorithm.add_strategy.correct_bias_add_strategy import CorrectBiasAddStrategy
from trinity_buffer.algorithm.add_strategy.duplicate_add_strategy import (
    DuplicateInformativeAddStrategy,
)
from trinity_buffer.algorithm.add_strategy.filters import (
    BestOfGroupAddStrategy,
    DynamicSamplingAddStrategy,
    OutcomeGateAddStrategy,
    OverlongPenaltyAddStrategy,
)
from trinity_buffer.algorithm.add_strategy.step_wise_add_strategy import StepWiseGRPOStrategy
from trinity_buffer.algorithm.copies import COPY_OF, original_uid
from trinity_buffer.algorithm.group_scores import ScoredGroups

__all__ = [
    "COPY_OF",
    "ASYMREAddStrategy",
    "AdvantageAddStrategy",
    "BestOfGroupAddStrategy",
    "CompositeAddStrategy",
    "CorrectBiasAddStrategy",
    "DuplicateInformativeAddStrategy",
    "DynamicSamplingAddStrategy",
    "GRPOGroupedAddStrategy",
    "GiGPOAddStrategy",
    "OutcomeGateAddStrategy",
    "OverlongPenaltyAddStrategy",
    "RECAddStrategy",
    "REINFORCEAddStrategy",
    "ScoredGroups",
    "StepWiseGRPOStrategy",
    "compose",
    "original_uid",
]
__all__ += add_strategy.__all__
