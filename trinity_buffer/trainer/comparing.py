"""How far replayed weights are from the recorded ones, where their bits are not the same."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trinity_buffer.errors import CheckpointError


class LargestDifference(NamedTuple):
    """Of all tensors of two sets of weights.

    Attributes:
        relative: of its elements, as a part of the largest recorded one; infinite where only one
            set has the tensor, or in another shape, or where a difference is no number.
        tensor: in which it is.
    """

    relative: float
    tensor: str


def largest_difference(recorded: Path, replayed: Path) -> LargestDifference:
    """Return the tensor that two sets of weights differ most in.

    Args:
        recorded: a file of safetensors, or a folder of some.
        replayed: likewise.

    Raises:
        CheckpointError: they cannot be read.
    """
    try:
        with _opened(recorded) as theirs, _opened(replayed) as ours:
            names = sorted({*theirs, *ours})
            sizes = [
                _relative(theirs[name].get_tensor(name), ours[name].get_tensor(name))
                if name in theirs and name in ours
                else math.inf
                for name in names
            ]
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"the weights in {recorded} and the replayed ones cannot be compared: {error}"
        ) from error
    if not names:
        raise CheckpointError(f"the weights in {recorded} and the replayed ones hold no tensor")
    at = max(range(len(names)), key=sizes.__getitem__)
    return LargestDifference(sizes[at], names[at])


@contextmanager
def _opened(weights: Path) -> Iterator[dict[str, Any]]:
    """Open the tensors in a file or folder: name -> the file that holds it."""
    files = sorted(weights.glob("*.safetensors")) if weights.is_dir() else [weights]
    if not files:
        raise CheckpointError(f"{weights} holds no safetensors, which weights are compared by")
    with ExitStack() as stack:
        opened = [stack.enter_context(safe_open(file, "pt")) for file in files]
        yield {name: file for file in opened for name in file.keys()}  # noqa: SIM118 - no dict


def _relative(recorded: Tensor, replayed: Tensor) -> float:
    if recorded.shape != replayed.shape or recorded.dtype != replayed.dtype:
        return math.inf
    if torch.equal(recorded, replayed):
        return 0.0
    # Torch promotes no type of 8 bits.
    is_short = recorded.dtype.itemsize <= 2
    exact = torch.float32 if is_short else torch.promote_types(recorded.dtype, torch.float32)
    apart = float((recorded.to(exact) - replayed.to(exact)).abs().max())
    size = float(recorded.to(exact).abs().max())
    part = apart / size if size else math.inf
    return math.inf if math.isnan(part) else part
