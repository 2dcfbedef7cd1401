"""Sample strategies of this package, and the names under which they are found."""

from trinity_buffer.algorithm.sample_strategy.mix_sample_strategy import MixSampleStrategy
from trinity_buffer.algorithm.sample_strategy.sample_strategy import (
    SAMPLE_STRATEGY,
    DefaultSampleStrategy,
    SamplePlan,
    SampleReader,
    SampleStrategy,
    StalenessControlSampleStrategy,
    WarmupSampleStrategy,
)

__all__ = [
    "SAMPLE_STRATEGY",
    "DefaultSampleStrategy",
    "MixSampleStrategy",
    "SamplePlan",
    "SampleReader",
    "SampleStrategy",
    "StalenessControlSampleStrategy",
    "WarmupSampleStrategy",
]
