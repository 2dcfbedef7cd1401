"""Bodies of events: msgpack maps with a version per kind, and the way up from old ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trinity_buffer.codec.objects import Buffer, ObjectPacker, unpack_object
from trinity_buffer.errors import CodecError, CodecVersionError, InvalidArgumentError

BODY_VERSIONS: dict[str, int] = {}
"""Kind of event -> version that is written today; 1 where a kind is not named."""

UPCASTERS: dict[tuple[str, int], Callable[[dict[str, Any]], dict[str, Any]]] = {}
"""(kind, version) -> returns a body of that version as one of the next."""

_VERSION = "v"


def encode_body(kind: str, body: Mapping[str, Any]) -> bytes:
    """Return the body of an event as bytes, its version included.

    Raises:
        InvalidArgumentError: a value that does not come back as it is, or the key ``v``.
    """
    if _VERSION in body:
        raise InvalidArgumentError(f"a body of {kind} has the key 'v', which is its version")
    return ObjectPacker().pack(
        {_VERSION: BODY_VERSIONS.get(kind, 1), **body}, f"the body of {kind}"
    )


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
    latest = BODY_VERSIONS.get(kind, 1)
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
