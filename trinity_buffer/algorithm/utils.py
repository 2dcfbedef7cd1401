"""Trinity's ``algorithm.utils`` under its own name; see `trinity_buffer.algorithm.functional`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from trinity_buffer.algorithm import functional
from trinity_buffer.algorithm.functional import *  # noqa: F403 - all that it exports

__all__ = ["prefix_metrics"]
__all__ += functional.__all__


def prefix_metrics(
    src_metrics: Mapping[str, Any], prefix: str, dst_metrics: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return ``dst_metrics`` with the metrics added as ``prefix/name``, tensors as plain floats.

    Our losses leave metrics on the device; reading them is the wait that Trinity's losses have
    inside.
    """
    prefixed = {} if dst_metrics is None else dst_metrics
    for name, value in src_metrics.items():
        prefixed[f"{prefix}/{name}"] = float(value) if isinstance(value, Tensor) else value
    return prefixed
