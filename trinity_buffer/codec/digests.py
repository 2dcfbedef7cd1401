"""The content digest: what tells "the same again" from "the same address, other content".

What a content digest covers: all of an experience but its address and its metrics.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from itertools import pairwise
from typing import Any

from trinity_buffer.blob import Buffer
from trinity_buffer.codec.columns import Column, Segment
from trinity_buffer.codec.objects import FromTensor, ObjectPacker, unpack_object

DIGEST_SIZE = 16


def content_digest(pieces: Iterable[Buffer]) -> bytes:
    """Return the first 16 bytes of SHA-256 of a canonical head and the buffers that it describes.

    Processors have instructions for it: it takes two thirds of the time of BLAKE2b, and is the
    longest part of a write all the same.
    """
    # Joined first: one call instead of one for each piece, at the price of a copy in the cache.
    return sha256(b"".join(pieces)).digest()[:DIGEST_SIZE]


_DIGEST_VERSION = 1
_NOT_CONTENT = "metrics"


class Contents:
    """Collects, row by row, what a content digest covers; when writing, and when checking again.

    Args:
        kinds, prompts, rewards: of each experience its type, prompt length and reward.
        from_tensor: for tensors inside objects, see `ObjectPacker`.

    Attributes:
        packer: makes the same bytes of equal objects.
    """

    def __init__(
        self,
        kinds: Sequence[str],
        prompts: Sequence[int],
        rewards: Sequence[float | None],
        from_tensor: FromTensor | None = None,
    ) -> None:
        self.packer = (
            ObjectPacker(from_tensor, canonical=True)
            if from_tensor
            else ObjectPacker(canonical=True)
        )
        self._rows = len(kinds)
        heads = ([_DIGEST_VERSION] * self._rows, kinds, prompts, rewards)
        # One list per field, with a piece for each row: the rows are joined at the end, in C.
        self._heads: list[Sequence[bytes]] = [self.packer.pack_rows(heads, "reward")]
        self._buffers: list[Sequence[Buffer]] = []

    def add_objects(self, field: str, pieces: Sequence[bytes]) -> None:
        """Add one field of objects, packed in order; an empty piece is no object."""
        if field == _NOT_CONTENT:
            return
        name = self.packer.pack(field, field)
        names = (
            [name] * len(pieces) if all(pieces) else [name if piece else b"" for piece in pieces]
        )
        self._heads += [names, pieces]

    def add_packed(self, field: str, pieces: Sequence[bytes]) -> None:
        """Add one field of objects as it lies in a segment.

        Rows of one write say the same again and again, so each distinct piece is read once; a text
        is canonical as it is.

        Raises:
            CodecError: a damaged piece.
        """
        if field == _NOT_CONTENT:
            return
        known = {piece: self._canonical(piece, field) for piece in set(pieces) if piece}
        self.add_objects(field, [known.get(piece, b"") for piece in pieces])

    def _canonical(self, piece: bytes, field: str) -> bytes:
        is_text = 0xA0 <= piece[0] < 0xC0 or 0xD9 <= piece[0] <= 0xDB
        return piece if is_text else self.packer.pack(unpack_object(piece), field)

    def add_column(self, column: Column) -> None:
        """Add the tensors of one column."""
        view, width = column.data.data, column.elements.itemsize
        ends = (column.offsets * width).tolist()
        shapes = list(map(tuple, column.shapes.tolist()))
        form = [column.field, column.dtype]
        known = {shape: self.packer.pack([*form, list(shape)], "a shape") for shape in set(shapes)}
        heads = list(map(known.__getitem__, shapes))
        buffers: list[Buffer] = [view[start:stop] for start, stop in pairwise(ends)]
        if column.rows is not None:
            rows = column.rows.tolist()
            heads = _spread(heads, rows, self._rows)
            buffers = _spread(buffers, rows, self._rows)
        self._heads.append(heads)
        self._buffers.append(buffers)

    def digests(self) -> list[bytes]:
        """Return the `content_digest` of each row."""
        # Written out, as a call for each row shows in the time of a write.
        return [
            sha256(b"".join(row)).digest()[:DIGEST_SIZE]
            for row in zip(*self._heads, *self._buffers, strict=True)
        ]


def _spread(pieces: Sequence[Buffer], rows: Sequence[int], number: int) -> list[Any]:
    """Return one piece for each of ``number`` rows: empty for those that are not in ``rows``."""
    spread: list[Buffer] = [b""] * number
    for row, piece in zip(rows, pieces, strict=True):
        spread[row] = piece
    return spread


def digests_of_segments(
    meta: Mapping[str, Sequence[Any]], segments: Sequence[Segment]
) -> list[bytes]:
    """Return the content digests of one write from its decoded segments, without torch.

    Args:
        meta: of its event's body.
        segments: all that it has, in the order in which the body names them.

    Raises:
        CodecError: an object is damaged.
    """
    contents = Contents(meta["kind"], meta["prompt_length"], meta["reward"])
    for segment in segments:
        for field, objects in segment.objects.items():
            contents.add_packed(field, objects.pieces)
        for columns in segment.columns.values():
            for column in columns:
                contents.add_column(column)
    return contents.digests()
