"""What a content digest covers: all of an experience but its address and its metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trinity_buffer.codec.columns import Column, Segment
from trinity_buffer.codec.digests import content_digest
from trinity_buffer.codec.objects import FromTensor, ObjectPacker

_DIGEST_VERSION = 1
_NOT_CONTENT = "metrics"


class Contents:
    """Collects, row by row, what a content digest covers; when writing, and when checking again.

    Args:
        heads: of each experience its type, prompt length and reward.
        from_tensor: for tensors inside objects, see `ObjectPacker`.
    """

    def __init__(
        self, heads: Sequence[tuple[str, int, float | None]], from_tensor: FromTensor | None = None
    ) -> None:
        self._packer = packer = (
            ObjectPacker(from_tensor, canonical=True)
            if from_tensor
            else ObjectPacker(canonical=True)
        )
        self._heads: list[list[bytes]] = [
            [packer.pack([_DIGEST_VERSION, *head], "reward")] for head in heads
        ]
        self._buffers: list[list[memoryview]] = [[] for _ in heads]

    def add_objects(self, field: str, values: Sequence[Any], pieces: Sequence[bytes]) -> None:
        """Add one field of objects, packed as ``pieces``; an empty piece is no object."""
        if field == _NOT_CONTENT:
            return
        name, canonical = self._packer.pack(field, field), self._packer.pack
        for head, value, piece in zip(self._heads, values, pieces, strict=True):
            if piece:
                head += (name, piece if type(value) is str else canonical(value, field))

    def add_column(self, column: Column) -> None:
        """Add the tensors of one column."""
        width, known = column.elements.itemsize, {}
        ends, shapes = (column.offsets * width).tolist(), column.shapes.tolist()
        view = column.data.data
        rows = range(len(self._heads)) if column.rows is None else column.rows.tolist()
        for index, row in enumerate(rows):
            shape = tuple(shapes[index])
            if shape not in known:
                form = [column.field, column.dtype, shapes[index]]
                known[shape] = self._packer.pack(form, column.field)
            self._heads[row].append(known[shape])
            self._buffers[row].append(view[ends[index] : ends[index + 1]])

    def digests(self) -> list[bytes]:
        """Return the content digest of each row."""
        return [
            content_digest(b"".join(head), buffers)
            for head, buffers in zip(self._heads, self._buffers, strict=True)
        ]


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
    heads = zip(meta["kind"], meta["prompt_length"], meta["reward"], strict=True)
    contents = Contents(list(heads))
    for segment in segments:
        for field, objects in segment.objects.items():
            contents.add_objects(field, list(objects), objects.pieces)
        for columns in segment.columns.values():
            for column in columns:
                contents.add_column(column)
    return contents.digests()
