"""Algorithms: strategies, advantages, losses. Tensors in, tensors out; no SQL.

Importing this package registers every class of it.
"""

from trinity_buffer.algorithm import (
    entropy_loss_fn,
    functional,
    importance_correction,
    kl_fn,
    policy_loss_fn,
)
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
from trinity_buffer.algorithm.arguments import Registry
from trinity_buffer.algorithm.building import Algorithm, build, effective_args
from trinity_buffer.algorithm.entropy_loss_fn import *  # noqa: F403 - all that it exports
from trinity_buffer.algorithm.functional import *  # noqa: F403 - all that it exports
from trinity_buffer.algorithm.importance_correction import *  # noqa: F403 - all that it exports
from trinity_buffer.algorithm.kl_fn import *  # noqa: F403 - all that it exports
from trinity_buffer.algorithm.layout import BatchLayout, Totals
from trinity_buffer.algorithm.policy_loss_fn import *  # noqa: F403 - all that it exports
from trinity_buffer.algorithm.sample_strategy import SampleStrategy
from trinity_buffer.algorithm.sample_strategy.sample_strategy import SAMPLE_STRATEGY

__all__ = [
    "ADD_STRATEGY",
    "ADVANTAGE_FN",
    "ALGORITHM_TYPE",
    "SAMPLE_STRATEGY",
    "AddStrategy",
    "AdvantageFn",
    "Algorithm",
    "AlgorithmType",
    "BatchLayout",
    "GRPOAddStrategy",
    "GRPOAdvantageFn",
    "GroupAdvantage",
    "GroupAdvantageStrategy",
    "Recipe",
    "Registry",
    "SampleStrategy",
    "StepWiseGRPOStrategy",
    "Totals",
    "build",
    "compose",
    "effective_args",
    "group_by",
]
__all__ += entropy_loss_fn.__all__
__all__ += functional.__all__
__all__ += importance_correction.__all__
__all__ += kl_fn.__all__
__all__ += policy_loss_fn.__all__
