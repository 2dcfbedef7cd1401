"""Values that are not columns of numbers, as msgpack: texts, messages, `info`, bodies of events.

None, bool, int, float, str, bytes, list, tuple, dict with str or int keys, NumPy scalars and
arrays, and tensors (as `RawTensor`) come back as they were; a subclass of one of them comes back as
the class itself.

The body of an event is a map with the version of its kind; old versions are upcast when read.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from typing import Any, TypeAlias

import msgpack
import msgspec
from msgspec import structs

from trinity_buffer import events
from trinity_buffer.codec.blob import Buffer
from trinity_buffer.errors import CodecError, CodecVersionError, InvalidArgumentError

Place: TypeAlias = "tuple[Place | str, object] | str"

MAX_DEPTH = 64
"""Levels of nesting; deeper values are refused when written, and nested extensions when read."""

MAX_INT_BYTES = 1024
"""Of an int. Longer ones cannot even be printed: Python refuses over 4,300 digits."""

_LEAST_INT, _GREATEST_INT = -(1 << 63), (1 << 64) - 1
_TUPLE, _BIG_INT, _TENSOR = 1, 2, 5  # 3 and 4 are those of `arrays`
_SCALARS = frozenset({type(None), bool, float, str, bytes})
_DIRECT = _SCALARS | {int}
_TEXT = frozenset({str})
_DICT = frozenset({dict})
_PLAIN = _DIRECT | {dict, list}
_KEYS = _TEXT | {int}
_DIRECT_LEVELS = 8  # deeper values are rare, and go the longer way
_BASES: tuple[type, ...] = (int, float, bytes, list, tuple, dict)

# msgpack allocates a list as soon as its length is claimed, and claims may be nested a thousand
# deep; up to this length that is bounded by 128 MB, beyond it the claims are added up first.
_TRUSTED_LENGTH = 16384

# Two more than when writing: the bytes of an array in the innermost value are a level too.
_LEVELS = MAX_DEPTH + 2


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor as bytes: torch's dtype name, shape, and elements in C order, little-endian."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


AsTensor: TypeAlias = Callable[[RawTensor], Any]
FromTensor: TypeAlias = Callable[[object], RawTensor | None]


@dataclass(frozen=True, slots=True)
class ObjectPacker:
    """Turns values into msgpack. Cheap for many values.

    Attributes:
        from_tensor: returns the `RawTensor` of a foreign value, None for what it does not know.
        canonical: equal values become equal bytes, whatever the order of their keys; without it
            the order is kept.
    """

    from_tensor: FromTensor = lambda _value: None
    canonical: bool = False

    def pack(self, value: object, place: str) -> bytes:
        """Return ``value`` as msgpack; ``place`` names it in errors.

        Raises:
            InvalidArgumentError: a type that does not come back as it is.
        """
        return self.pack_all([value], place)[0] or pack_plain(None)

    def pack_all(
        self, values: Sequence[object], place: str, plainness: tuple[bool, bool] | None = None
    ) -> list[bytes]:
        """Return each of ``values`` as `pack` does, and nothing (``b""``) for None."""
        is_plain, in_order = plainness or _plainness(values)
        if is_plain and (in_order or not self.canonical):
            encode = ENCODER.encode
            try:
                return [b"" if value is None else encode(value) for value in values]
            except (OverflowError, UnicodeEncodeError):  # an int beyond 64 bits, a lone surrogate
                pass
        return [
            b"" if value is None else _packb(self._plain(value, place, MAX_DEPTH))
            for value in values
        ]

    def pack_twice(self, values: Sequence[object], place: str) -> tuple[list[bytes], list[bytes]]:
        """Return the bytes of `pack_all`, and those of a canonical packer.

        Values in canonical order are packed once; most are.
        """
        plainness = _plainness(values)
        pieces = self.pack_all(values, place, plainness)
        if plainness == (True, True):
            return pieces, pieces
        return pieces, ObjectPacker(self.from_tensor, canonical=True).pack_all(values, place)

    def _plain(self, value: object, place: Place, depth: int) -> object:
        """Return ``value`` in the types that msgpack knows, extensions included."""
        kind = type(value)
        if kind in _SCALARS:
            return value
        if kind is int:
            return _plain_int(value, place)  # type: ignore[arg-type]  # its type was just compared
        if depth == 0:
            raise InvalidArgumentError(f"{_name(place)} is nested deeper than {MAX_DEPTH} levels")
        if kind is dict:
            return self._plain_dict(value, place, depth - 1)  # type: ignore[arg-type]  # as above
        if kind is list:
            return self._plain_list(value, place, depth - 1)  # type: ignore[arg-type]  # as above
        return self._foreign(value, place, depth)

    def _plain_list(self, value: list[Any], place: Place, depth: int) -> list[object]:
        plain, scalars = self._plain, _SCALARS
        kinds = set(map(type, value))
        fits = kinds == {int} and min(value) >= _LEAST_INT and max(value) <= _GREATEST_INT
        if kinds <= scalars or fits:
            return value  # most lists by far: columns of an event's body
        return [
            item if type(item) in scalars else plain(item, (place, index), depth)
            for index, item in enumerate(value)
        ]

    def _plain_dict(self, value: dict[Any, object], place: Place, depth: int) -> object:
        plain, scalars = self._plain, _SCALARS
        for key in value:
            if type(key) is not str and type(key) is not int:
                raise InvalidArgumentError(
                    f"{_name(place)} has the key {key!r} of type {type(key).__name__}: "
                    "keys are str or int"
                )
        items: Iterable[tuple[Any, object]] = value.items()
        if self.canonical:  # ints first, then texts
            items = sorted(items, key=lambda item: (type(item[0]) is str, item[0]))
        return {
            (_plain_int(key, place) if type(key) is int else key): item
            if type(item) in scalars
            else plain(item, (place, key), depth)
            for key, item in items
        }

    def _foreign(self, value: object, place: Place, depth: int) -> object:
        if type(value) is tuple:
            items = self._plain_list(list(value), place, depth - 1)
            return msgpack.ExtType(_TUPLE, _packb(items))
        if "numpy" in sys.modules and _arrays().is_array(value):  # else none is loaded
            code, packed = _arrays().packed_form(value, _name(place))
            return msgpack.ExtType(code, _packb(packed))
        try:
            tensor = value if isinstance(value, RawTensor) else self.from_tensor(value)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"{_name(place)}: {error}") from error
        if tensor is not None:
            if len(tensor.shape) > (most := _arrays().MAX_DIMENSIONS):
                raise InvalidArgumentError(
                    f"{_name(place)} is a tensor of {len(tensor.shape)} dimensions, the limit is "
                    f"{most}"
                )
            return msgpack.ExtType(_TENSOR, _packb([tensor.dtype, list(tensor.shape), tensor.data]))
        if isinstance(value, str):
            return str.__str__(value)  # str() of a member of an Enum is its name
        for base in _BASES:
            if isinstance(value, base):
                return self._plain(base(value), place, depth)
        raise InvalidArgumentError(
            f"{_name(place)} is a {type(value).__module__}.{type(value).__qualname__}: it may hold "
            "None, bool, int, float, str, bytes, list, tuple, dict, NumPy numbers and tensors"
        )


def _plainness(values: Sequence[object]) -> tuple[bool, bool]:
    """Return whether msgpack packs ``values`` as `ObjectPacker` would, and their keys are in order.

    Long ints apart. Walks level by level, all values together: most of what is packed is a column
    of texts, or of small dicts of plain values with the same keys.
    """
    level: Any = values
    in_order = True
    for _ in range(_DIRECT_LEVELS):
        kinds = set(map(type, level))
        if kinds <= _DIRECT:
            return True, in_order
        if not kinds <= _PLAIN:
            break
        dicts = level if kinds == _DICT else [value for value in level if type(value) is dict]
        key_kinds = set(map(type, chain(*dicts)))
        if not key_kinds <= _KEYS:
            break
        if in_order:
            orders = set(map(tuple, dicts))
            in_order = key_kinds <= _TEXT and all(list(keys) == sorted(keys) for keys in orders)
        lists = (value for value in level if type(value) is list) if list in kinds else ()
        level = [*chain(*map(dict.values, dicts)), *chain(*lists)]
    return False, False


_packb = partial(msgpack.packb, strict_types=True, unicode_errors="surrogatepass")
ENCODER = msgspec.msgpack.Encoder()
"""Packs in a tenth of msgpack's time, but neither extensions nor lone surrogates."""


def pack_plain(value: object) -> bytes:
    """Return a value of plain types as its bytes."""
    try:
        return ENCODER.encode(value)
    except UnicodeEncodeError:
        return _packb(value)


def _plain_int(value: int, place: Place) -> object:
    if _LEAST_INT <= value <= _GREATEST_INT:
        return value
    size = value.bit_length() // 8 + 1
    if size > MAX_INT_BYTES:
        raise InvalidArgumentError(
            f"{_name(place)} is an int of {size} bytes, the limit is {MAX_INT_BYTES}"
        )
    return msgpack.ExtType(_BIG_INT, value.to_bytes(size, "big", signed=True))


def _name(place: Place) -> str:
    return place if isinstance(place, str) else f"{_name(place[0])}[{place[1]!r}]"


def unpack_object(blob: Buffer, as_tensor: AsTensor | None = None, depth: int = _LEVELS) -> Any:
    """Return the value that an `ObjectPacker` packed.

    Args:
        blob: all of it.
        as_tensor: makes a tensor of its bytes; by default tensors come back as `RawTensor`.
        depth: levels of extensions that it may have.

    Raises:
        CodecError: bytes that no `ObjectPacker` wrote.
    """
    if depth == 0:
        raise CodecError(
            f"a value is nested deeper than {MAX_DEPTH} levels: it was not written here"
        )
    try:
        if len(blob) > _TRUSTED_LENGTH:
            # Lists and maps must not claim more items than the blob has; this makes none of them.
            parser = msgpack.Unpacker(max_buffer_size=len(blob))
            parser.feed(blob)
            parser.skip()
        return msgpack.unpackb(
            blob,
            strict_map_key=False,
            unicode_errors="surrogatepass",
            ext_hook=partial(_extension, as_tensor, depth),
        )
    except CodecError:
        raise
    except msgpack.OutOfData as error:
        raise CodecError("a value claims more items than it has bytes: it is damaged") from error
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise CodecError(f"a value cannot be read, its bytes are damaged: {error}") from error


def _extension(as_tensor: AsTensor | None, depth: int, code: int, data: Buffer) -> Any:
    match code:
        case 1:  # _TUPLE
            return tuple(_listed(data, depth, as_tensor))
        case 2 if len(data) <= MAX_INT_BYTES:  # _BIG_INT
            return int.from_bytes(data, "big", signed=True)
        case 3 | 4:  # arrays.ARRAY, arrays.SCALAR
            return _arrays().array_of(_listed(data, depth), scalar=code == _arrays().SCALAR)
        case 5:  # _TENSOR
            raw = RawTensor(*_arrays().checked(_listed(data, depth)))
            return raw if as_tensor is None else as_tensor(raw)
        case _:
            raise CodecError(f"a value has an extension of unknown form ({code})")


def _arrays() -> Any:
    """Import `arrays` late: NumPy takes as long to load as all else of a short command."""
    from trinity_buffer.codec import arrays  # noqa: PLC0415 - few values are arrays

    return arrays


def _listed(data: Buffer, depth: int, as_tensor: AsTensor | None = None) -> list[Any]:
    items = unpack_object(data, as_tensor, depth - 1)
    if not isinstance(items, list):
        raise CodecError("an extension does not hold a list: its bytes are damaged")
    return items


_VERSION = "v"
_SHORT_MAP, _LONG_MAP = 0x80, 0xDE
_VERSION_KEY = b"\xa1v"
_LONGEST_HEAD = 3 + len(_VERSION_KEY)  # of a map, and its first key


_OPEN = ("config", "changes", "environment", "metrics")
"""Fields of events that hold values of any type."""


_LOOKING = threading.Lock()


@cache
def _decoder(kind: type[events.Recorded]) -> msgspec.msgpack.Decoder[events.Recorded]:
    # One at a time. For its first decoder msgspec looks at the fields of a class; another thread
    # that decodes meanwhile finds some of them without a type, which crashes the process.
    with _LOOKING:
        return msgspec.msgpack.Decoder(kind, ext_hook=partial(_extension, None, MAX_DEPTH))


def new_event(fact: events.Recorded) -> events.NewEvent:
    """Return the event to append, its version included. Encodes: call it outside transactions.

    Raises:
        InvalidArgumentError: a value that does not come back as it is.
    """
    try:
        # msgspec would write a tuple as a list, and a date or a Decimal as a text.
        is_plain = _plainness([getattr(fact, name, None) for name in _OPEN])[0]
        blob = ENCODER.encode(fact) if is_plain else b""
    except (TypeError, OverflowError, UnicodeEncodeError):
        blob = b""  # NumPy's numbers, ints beyond 64 bits, and texts with lone surrogates
    if not blob:
        blob = encode_body(events.kind_of(fact), events.body_of(fact))
    # The head that msgspec writes has room for all fields; the bytes of events have the shortest.
    elif blob[0] == _LONG_MAP and (size := int.from_bytes(blob[1:3], "big")) < 16:
        blob = bytes((_SHORT_MAP | size,)) + blob[3:]
    return events.NewEvent(fact, blob)


def decode_fact(kind: str, blob: Buffer) -> events.Fact:
    """Return the fact of an event of any version; an unknown kind becomes an `UnknownEvent`.

    Raises:
        CodecError: bytes that are no body, or a body that lacks a field of its kind, or has one of
            another type.
        CodecVersionError: a newer version of this package wrote it.
    """
    cls = events.KINDS.get(kind)
    if cls is None:
        return events.UnknownEvent(kind=kind, body=decode_body(kind, blob))
    decoder = _decoder(cls)  # before `convert` too, which looks at the class as it does
    if _VERSION_KEY in bytes(blob[:_LONGEST_HEAD]):
        try:
            return decoder.decode(blob)
        except (msgspec.DecodeError, CodecError, ValueError, TypeError, RecursionError):
            pass  # of another version, with a text that is no UTF-8, or damaged
    body = decode_body(kind, blob)
    try:
        if cls is events.ExperiencesRecorded:
            return _recorded(body)
        return msgspec.convert(body, cls)
    except msgspec.ValidationError as error:
        raise CodecError(f"the body of an event {kind} is damaged: {error}") from error


def _recorded(body: dict[str, Any]) -> events.ExperiencesRecorded:
    """Return a fact whose rewards may be NumPy's float64; then its digests are of those.

    Such were written where one was assigned as a reward, up to version 0.1.0.
    """
    kind = events.ExperiencesRecorded
    match body:
        case {"meta": {"reward": [*rewards]} as meta} if {*map(type, rewards)} - _DIRECT:
            plain = [float(value) if isinstance(value, float) else value for value in rewards]
            fact = msgspec.convert({**body, "meta": {**meta, "reward": plain}}, kind)
            return structs.replace(fact, columns=structs.replace(fact.columns, reward=rewards))
    return msgspec.convert(body, kind)


def encode_body(kind: str, body: Mapping[str, Any]) -> bytes:
    """Return the body of an event as bytes, its version included.

    Raises:
        InvalidArgumentError: a value that does not come back as it is, or the key ``v``.
    """
    if _VERSION in body:
        raise InvalidArgumentError(f"a body of {kind} has the key 'v', which is its version")
    return ObjectPacker().pack({_VERSION: events.version_of(kind), **body}, f"the body of {kind}")


def decode_body(kind: str, blob: Buffer) -> dict[str, Any]:
    """Return the body of an event as it would be written today, without its version.

    Raises:
        CodecError: bytes that are no body.
        CodecVersionError: a newer version of this package wrote it.
    """
    body = unpack_object(blob)
    version = body.pop(_VERSION, None) if isinstance(body, dict) else None
    if type(version) is not int or version < 1:
        raise CodecError(f"the body of an event {kind} is damaged: it is not a map with a version")
    latest = events.version_of(kind)
    if version > latest:
        raise CodecVersionError(
            f"an event {kind} has version {version}, this package reads up to {latest}: "
            "upgrade trinity-buffer"
        )
    try:
        for old in range(version, latest):
            body = events.UPCASTERS[kind, old](body)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise CodecError(
            f"an event {kind} of version {version} cannot be brought to version {latest}: {error!r}"
        ) from error
    return dict(body)
