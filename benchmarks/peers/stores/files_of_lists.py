"""Plain files as trainers write them: msgspec's messages, with lists of Python's numbers.

prime-rl passes its rollouts so. Otherwise it is as `files`, which writes the arrays' own bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
from typing_extensions import override

from benchmarks.peers.rollouts import Rollout
from benchmarks.peers.stores import files
from benchmarks.peers.stores.files import Row, serving

__all__ = ["Client", "serving"]


_Message = tuple[int, float, str, float, list[int], list[float], list[bool], float | None]
"""Number, reward, text, moment of writing; tokens, log-probs and mask; advantage."""


class Client(files.Client):
    """Reads each file once."""

    @override
    def packed(self, rows: Sequence[Row]) -> bytes:
        data: bytes = msgspec.msgpack.encode([_message(*row) for row in rows])
        return data

    @override
    def unpacked(self, data: bytes) -> Iterator[Row]:
        return map(_row, _DECODER.decode(data))


def _message(one: Rollout, advantage: float | None) -> _Message:
    arrays = (one.tokens.tolist(), one.logprobs.tolist(), one.mask.tolist())
    return (one.number, one.reward, one.text, one.written_at, *arrays, advantage)


def _row(message: _Message) -> Row:
    number, reward, text, written_at, tokens, logprobs, mask, advantage = message
    rollout = Rollout(
        number,
        np.array(tokens, np.int32),
        np.array(logprobs, np.float32),
        np.array(mask, np.bool_),
        reward,
        text,
        written_at,
    )
    return Row(rollout, advantage)


_DECODER = msgspec.msgpack.Decoder(list[_Message])
