"""Bytes of segments and of events, and back. NumPy and msgpack alone: torch is never imported.

Whatever the bytes are, only `CodecError` escapes from reading them, and what they claim is checked
against what is there before anything is allocated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trinity_buffer.lazy import lazy_exports

if TYPE_CHECKING:
    from trinity_buffer.codec.arrays import DTYPES
    from trinity_buffer.codec.objects import (
        ObjectPacker,
        RawTensor,
        decode_body,
        decode_fact,
        encode_body,
        encode_fact,
        unpack_object,
    )
    from trinity_buffer.codec.segments import (
        ANNOTATED,
        SEGMENT_VERSION,
        Column,
        Contents,
        ObjectColumn,
        Segment,
        content_digest,
        decode_segment,
        digests_of_segments,
        encode_segment,
        is_scorable,
        segment_blob,
    )

__all__ = [
    "ANNOTATED",
    "DTYPES",
    "SEGMENT_VERSION",
    "Column",
    "Contents",
    "ObjectColumn",
    "ObjectPacker",
    "RawTensor",
    "Segment",
    "content_digest",
    "decode_body",
    "decode_fact",
    "decode_segment",
    "digests_of_segments",
    "encode_body",
    "encode_fact",
    "encode_segment",
    "is_scorable",
    "segment_blob",
    "unpack_object",
]

_HOMES = {
    "decode_body": "trinity_buffer.codec.objects",
    "decode_fact": "trinity_buffer.codec.objects",
    "encode_body": "trinity_buffer.codec.objects",
    "encode_fact": "trinity_buffer.codec.objects",
    "ANNOTATED": "trinity_buffer.codec.segments",
    "Column": "trinity_buffer.codec.segments",
    "ObjectColumn": "trinity_buffer.codec.segments",
    "Segment": "trinity_buffer.codec.segments",
    "is_scorable": "trinity_buffer.codec.segments",
    "Contents": "trinity_buffer.codec.segments",
    "digests_of_segments": "trinity_buffer.codec.segments",
    "content_digest": "trinity_buffer.codec.segments",
    "DTYPES": "trinity_buffer.codec.arrays",
    "ObjectPacker": "trinity_buffer.codec.objects",
    "RawTensor": "trinity_buffer.codec.objects",
    "unpack_object": "trinity_buffer.codec.objects",
    "SEGMENT_VERSION": "trinity_buffer.codec.segments",
    "decode_segment": "trinity_buffer.codec.segments",
    "encode_segment": "trinity_buffer.codec.segments",
    "segment_blob": "trinity_buffer.codec.segments",
}

__getattr__, __dir__ = lazy_exports(__name__, _HOMES)
