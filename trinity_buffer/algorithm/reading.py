"""How a loss takes its tensors out of a micro-batch: all are there, and somebody recorded them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, cast

from torch import Tensor

from trinity_buffer.errors import InvalidArgumentError

OF_ROLLOUTS = ("old_logprob", "rollout_logprob")
"""Tensors that come from what explorers recorded of their own policy."""


def require_recorded(batch: Mapping[str, Any], user: Any, reads: Collection[str]) -> None:
    """Return if every row has the log-probabilities that ``user`` reads.

    Who takes ``expert_mask`` reads those of the usual rows only.

    Raises:
        InvalidArgumentError: names a row that has none.
    """
    read = [key for key in OF_ROLLOUTS if key in reads and key in batch]
    # What the trainer has computed since is there for every row.
    recorded = [key for key in read if batch[key] is batch.get("rollout_logprob")]
    unrecorded: Mapping[str, str] = getattr(batch, "unrecorded", {})
    kinds = ("usual",) if "expert_mask" in reads else ("usual", "expert")
    for uid in (unrecorded[kind] for kind in kinds if recorded and kind in unrecorded):
        raise InvalidArgumentError(
            f"{type(user).__name__} reads {recorded[0]!r} of every row, and nobody recorded that "
            f"of {uid} (logprob_mask tells which rows have one): store logprobs= with it, ask the "
            "stream for needs=('logprobs',), which rejects such rows, or recompute_old_logprob=True"
        )


def needed(batch: Mapping[str, Any], key: str, user: Any) -> Tensor:
    """Return a tensor of the micro-batch.

    Raises:
        InvalidArgumentError: it is not there.
    """
    found = batch.get(key)
    if found is None:
        held = ", ".join(sorted(name for name in batch if batch[name] is not None))
        unrecorded = (
            ": no row of the step recorded log-probabilities; store them with the experiences "
            "(logprobs=), or let the trainer compute them before the step "
            "(recompute_old_logprob=True)"
        )
        raise InvalidArgumentError(
            f"{type(user).__name__} needs the tensor {key!r}, which the micro-batch lacks "
            f"(it holds {held}){unrecorded if key in OF_ROLLOUTS else ''}"
        )
    return cast("Tensor", found)


def require_correctable(correction: str, loss: Any) -> None:
    """Return if ``loss`` reads what an importance correction weighs, and all its rows have it.

    Raises:
        InvalidArgumentError: it reads no advantages, or its experts' rows no log-probabilities.
    """
    if correction == "none":
        return
    if "advantages" not in loss.select_keys:
        raise InvalidArgumentError(
            f"importance_correction={correction!r}: it weighs advantages, and "
            f"{type(loss).__name__} reads none; leave it at 'none'"
        )
    if "expert_mask" in loss.select_keys:
        raise InvalidArgumentError(
            f"importance_correction={correction!r}: {type(loss).__name__} trains rows of experts "
            "too, which have no log-probabilities to be compared; leave it at 'none'"
        )
