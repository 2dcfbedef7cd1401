"""Entropy bonuses: `EntropyLossFn` and its kinds."""

from trinity_buffer.algorithm.entropy_loss_fn.entropy_loss_fn import (
    ENTROPY_LOSS_FN,
    DefaultEntropyLossFn,
    DummyEntropyLossFn,
    EntropyLossFn,
    MixEntropyLossFn,
)

__all__ = [
    "ENTROPY_LOSS_FN",
    "DefaultEntropyLossFn",
    "DummyEntropyLossFn",
    "EntropyLossFn",
    "MixEntropyLossFn",
]
