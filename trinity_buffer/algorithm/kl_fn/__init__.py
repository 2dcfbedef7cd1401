"""KL divergences: `KLFn` and its estimators."""

from trinity_buffer.algorithm.kl_fn.kl_fn import (
    KL_FN,
    AbsFn,
    CorrectedK3Fn,
    DummyKLFn,
    K1Fn,
    K2Fn,
    K3Fn,
    KLFn,
    LowVarKLFn,
)

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
