"""Bytes of segments and of events, and back. NumPy and msgpack alone: torch is never imported.

Whatever the bytes are, only `CodecError` escapes from reading them, and what they claim is checked
against what is there before anything is allocated.
"""

from trinity_buffer.codec.bodies import decode_body, decode_fact, encode_body, encode_fact
from trinity_buffer.codec.columns import ANNOTATED, Column, ObjectColumn, Segment, is_scorable
from trinity_buffer.codec.contents import Contents, digests_of_segments
from trinity_buffer.codec.digests import content_digest
from trinity_buffer.codec.dtypes import DTYPES
from trinity_buffer.codec.objects import ObjectPacker, RawTensor, unpack_object
from trinity_buffer.codec.segments import SEGMENT_VERSION, decode_segment, encode_segment

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
    "unpack_object",
]
