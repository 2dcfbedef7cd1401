"""KL divergences: `KLFn` and its estimators."""

from trinity_buffer.algorithm.kl_fn.kl_fn import (
    AbsFn,
    CorrectedK3Fn,
    DummyKLFn,
    K1Fn,
    K2Fn,
    K3Fn,
    KLFn,
    LowVarKLFn,
)
from trinity_buffer.algorithm.registry import KL_FN

__all__ = [
    "KL_FN",
    "AbsFn",
    "CorrectedK3Fn",
    "DummyKLFn",
    "K1Fn",
    "K2Fn",
    "K3Fn",
    "KLFn",
    "LowVarKLFn",
]
