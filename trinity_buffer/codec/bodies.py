"""Bodies of events: msgpack maps with a version per kind, and the way up from old ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trinity_buffer.blob import Buffer
from trinity_buffer.codec.objects import ObjectPacker, unpack_object
from trinity_buffer.errors import CodecError, CodecVersionError, InvalidArgumentError
from trinity_buffer.events import UPCASTERS, Fact, body_of, fact_of, kind_of, version_of

_VERSION = "v"


def encode_fact(fact: Fact) -> bytes:
    """Return the bytes of the body of ``fact``, as `encode_body` does."""
    return encode_body(kind_of(fact), body_of(fact))


def decode_fact(kind: str, blob: Buffer) -> Fact:
    """Return what an event says, whatever version wrote it; an unknown kind as `UnknownEvent`.

    Raises:
        CodecError: bytes that are no body, or a body that lacks a field of its kind.
        CodecVersionError: a newer version of this package wrote it.
    """
    return fact_of(kind, decode_body(kind, blob))


def encode_body(kind: str, body: Mapping[str, Any]) -> bytes:
    """Return the body of an event as bytes, its version included.

    Raises:
        InvalidArgumentError: a value that does not come back as it is, or the key ``v``.
    """
    if _VERSION in body:
        raise InvalidArgumentError(f"a body of {kind} has the key 'v', which is its version")
    return ObjectPacker().pack({_VERSION: version_of(kind), **body}, f"the body of {kind}")


def decode_body(kind: str, blob: Buffer) -> dict[str, Any]:
    """Return the body of an event as it would be written today, without its version.

    Raises:
        CodecError: bytes that are no body.
        CodecVersionError: a newer version of this package wrote it.
    """
    body = unpack_object(blob)
    version = body.pop(_VERSION, None) if isinstance(body, dict) else None
    if type(version) is not int or version < 1:
        raise CodecError(f"the body of an event {kind} is damaged: it is no map with a version")
    latest = version_of(kind)
    if version > latest:
        raise CodecVersionError(
            f"an event {kind} has version {version}, this package reads up to {latest}: "
            "upgrade trinity-buffer"
        )
    try:
        for old in range(version, latest):
            body = UPCASTERS[kind, old](body)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise CodecError(
            f"an event {kind} of version {version} cannot be brought to version {latest}: {error!r}"
        ) from error
    return dict(body)
