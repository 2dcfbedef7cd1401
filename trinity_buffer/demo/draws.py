"""Random numbers that depend on their key alone: not on the order, nor on what else is drawn."""

from __future__ import annotations

import hashlib
import json

import numpy as np
from numpy.typing import NDArray

from trinity_buffer.identity import Key


def draws(count: int, *key: Key) -> NDArray[np.float64]:
    """Return ``count`` numbers, uniform in [0, 1), that are the same for the same ``key`` for ever.

    ``7`` and ``"7"`` are one key, as everywhere. A longer row starts with the shorter one.
    """
    # A hash is its own generator here: seeding a usual one per rollout costs ten times as much.
    name = json.dumps([str(part) for part in key]).encode()
    words = np.frombuffer(hashlib.shake_128(name).digest(8 * count), dtype="<u8")
    numbers: NDArray[np.float64] = (words >> np.uint64(11)).astype(np.float64)
    return numbers * 2.0**-53


def whole_draws(count: int, below: int, *key: Key) -> tuple[int, ...]:
    """Return ``count`` whole numbers, uniform in 0 ... ``below`` - 1, by `draws`."""
    return tuple((draws(count, *key) * below).astype(int).tolist())
