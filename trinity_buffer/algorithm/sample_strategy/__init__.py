"""Sample strategies of this package, and the names under which they are found."""

from trinity_buffer.algorithm.sample_strategy import sample_strategy
from trinity_buffer.algorithm.sample_strategy.mix_sample_strategy import MixSampleStrategy
from trinity_buffer.algorithm.sample_strategy.sample_strategy import *  # noqa: F403 - all of it

__all__ = ["MixSampleStrategy"]
__all__ += sample_strategy.__all__
