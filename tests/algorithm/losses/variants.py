"""Every registered loss, with the arguments under which it is tested.

A new loss is covered by its `default_args`; an entry here adds what these do not reach.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from trinity_buffer.algorithm import POLICY_LOSS_FN, PolicyLossFn
from trinity_buffer.algorithm.arguments import declared_arguments
from trinity_buffer.algorithm.functional import AGGREGATION_MODES
from trinity_buffer.algorithm.policy_loss_fn.rec_policy_loss import (
    CLIP_MODES,
    REGULARIZERS,
    WEIGHTS,
)

EXTRA: dict[str, list[dict[str, Any]]] = {
    "ppo": [
        {"clip_range_low": 0.1, "clip_range_high": 0.28, "clip_ratio_c": 1.5},
        {"enable_sequence_masking": True, "delta_sequence_masking": 0.02},
        {"fallback_to_policy_gradient": True},
    ],
    "cispo": [{"enable_mask_clip": True, "mask_clip_range_low": 0.2, "clip_range_low": 0.2}],
    "gspo": [{"clip_range": 0.2}],
    "dpo": [{"label_smoothing": 0.1}],
    "sapo": [{"detach_gate": True}],
    "sft_phi": [{"cutoff_prob": 0.5}],
    "mix": [{"mu": 0.4}],
    "mix_chord": [
        {"mu_warmup_steps": 5, "mu_decay_steps": 4, "mu_peak": 0.8},
        {"enable_phi_function": False, "mu_decay_steps": 8, "mu_peak": 0.8},
    ],
    "rec": [
        {"clip_mode": clip, "weight": weight, "regularizer": regularizer, "regularizer_coef": 0.1}
        for clip, weight, regularizer in itertools.product(CLIP_MODES, WEIGHTS, REGULARIZERS)
    ],
}


def variants(*, every_mode: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, constructor arguments); if asked, the defaults with every aggregation mode."""
    for name in POLICY_LOSS_FN.names():
        cls = POLICY_LOSS_FN.get(name)
        default = cls.default_args()
        yield name, default
        for extra in EXTRA.get(name, []):
            yield name, default | extra
        if every_mode and "loss_agg_mode" in declared_arguments(cls):
            for mode in AGGREGATION_MODES:
                yield name, default | {"loss_agg_mode": mode}


def label(name: str, arguments: dict[str, Any]) -> str:
    """Return a readable test id."""
    default = POLICY_LOSS_FN.get(name).default_args()
    changed = [f"{k}={v}" for k, v in arguments.items() if default.get(k) != v]
    return "-".join([name, *changed])


def make(name: str, arguments: dict[str, Any]) -> PolicyLossFn:
    """Return the loss; callers use this package's names for the tensors."""
    return POLICY_LOSS_FN.get(name)(backend="trinity", **arguments)
