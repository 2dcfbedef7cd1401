"""What is given for a field of an experience, and what is kept of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from trinity_buffer.errors import InvalidExperienceError
from trinity_buffer.identity import EID

ZERO_OR_ONE = "it must be 1 where a token is trained and 0 elsewhere"
"""What is said of a mask that holds something else."""


def refused(eid: EID, field: str, what: str) -> InvalidExperienceError:
    """Return the error that says what is wrong with a field."""
    error = InvalidExperienceError(f"experience {eid.uid}: {field} {what}")
    error.field = field
    return error


def number_of(eid: EID, name: str, value: Any) -> Any:
    """Return ``value``; of a tensor or a NumPy scalar, the number of Python's.

    Raises:
        InvalidExperienceError: a tensor of more than one number, or of none.
    """
    if not isinstance(value, (Tensor, np.generic)):
        return value
    if isinstance(value, Tensor) and value.numel() != 1:
        raise refused(eid, name, f"has the shape {list(value.shape)}, it must be one number")
    return value.item()


def tensor_of(eid: EID, name: str, value: Any, dtype: torch.dtype | None) -> Any:
    """Return ``value`` as a tensor, a list as one of ``dtype``; None stays None.

    Raises:
        InvalidExperienceError: it cannot be one; or token ids, which are int32, are no integers; or
            a mask, which is bool, holds something else than 0 and 1.
    """
    if value is None or isinstance(value, Tensor):
        return value
    try:
        if isinstance(value, np.ndarray):
            return torch.from_numpy(value)
        if dtype is torch.bool:
            _check_mask(eid, name, value)
        ids = _token_ids(eid, name, value) if dtype is torch.int32 else None
        return torch.tensor(value, dtype=dtype) if ids is None else ids
    except InvalidExperienceError:
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        raise refused(
            eid,
            name,
            f"cannot be made a tensor ({error}); give a list of numbers, all rows of one length, "
            "or a tensor",
        ) from error


def _check_mask(eid: EID, name: str, value: Any) -> None:
    """Raise unless a list holds nothing but 0 and 1, of which torch would make True as well."""
    try:
        others = set(value) - {0, 1}
    except TypeError:  # lists in it, or no list at all: the next look says what is wrong
        return
    if others:
        raise refused(eid, name, f"holds {others.pop()!r:.40}, {ZERO_OR_ONE}")


def _token_ids(eid: EID, name: str, value: Any) -> Tensor | None:
    """Return a list of token ids as a tensor; None: torch says what is wrong with it."""
    made = np.array(value)  # twice as fast as torch, and it cuts no number off
    if made.size and made.dtype.kind in "bfc":
        raise refused(eid, name, f"is {made.dtype}, it must hold integer token ids")
    if made.size and made.dtype.kind not in "iu":
        return None
    ids = made.astype(np.int32)
    return torch.from_numpy(ids) if np.array_equal(ids, made) else None
