"""From a fact to the mapping that is encoded, and back, checked against the types of the fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from trinity_buffer.errors import CodecError
from trinity_buffer.rollout_events import ExperienceColumns

T = TypeVar("T")


def body_of(fact: object) -> dict[str, Any]:
    """Return ``fact`` as the mapping that is encoded, in the order of its fields."""
    plan = _plans(type(fact))
    said = ((name, getattr(fact, attribute), default) for attribute, name, default, _ in plan)
    return {name: _plain(value) for name, value, default in said if not _left_out(value, default)}


def _plain(value: Any) -> Any:
    return dict(vars(value)) if isinstance(value, ExperienceColumns) else value


def _left_out(value: Any, default: Any) -> bool:
    return default is not MISSING and value in (None, (), [])


def read(kind: type[T], body: Mapping[str, Any]) -> T:
    """Return the fact of this ``kind`` that a body says. Keys that are not known are passed over.

    Raises:
        CodecError: the body lacks a field of its kind, or has one of another type.
    """
    values = {}
    for attribute, name, default, form in _plans(kind):
        if name in body:
            values[attribute] = _checked(kind.__name__, name, body[name], form)
        elif default is MISSING:
            raise CodecError(f"the body of an event {kind.__name__} is damaged: it has no {name!r}")
    return kind(**values)


class _Form(NamedTuple):
    """Of which types a value may be, and of which its items; nothing: of any."""

    types: frozenset[type]
    items: frozenset[type]


class _Plan(NamedTuple):
    """A field: its attribute, its key in the body, what it is where it is left out, its form."""

    attribute: str
    name: str
    default: Any
    form: _Form


_READ_AS: Mapping[Any, frozenset[type]] = {
    Sequence: frozenset({list, tuple}),
    Mapping: frozenset({dict}),
    int: frozenset({int, bool}),
    float: frozenset({float, int, bool}),
}
_ANYTHING: frozenset[type] = frozenset()


def _types(hint: Any) -> frozenset[type]:
    """Return of which types a decoded value of this hint may be; nothing: of any."""
    if hint is Any:
        return _ANYTHING
    plain = get_origin(hint) or hint
    if plain in _READ_AS:
        return _READ_AS[plain]
    members = get_args(hint)
    return frozenset().union(*map(_types, members)) if members else frozenset({plain})


_OF_COLUMNS = _Form(frozenset({dict}), frozenset({list, tuple}))


def _form(hint: Any) -> _Form:
    if hint is ExperienceColumns:
        return _OF_COLUMNS
    items = get_args(hint)[-1] if get_origin(hint) in (Sequence, Mapping) else Any
    return _Form(_types(hint), _types(items))


def _checked(kind: str, name: str, value: Any, form: _Form) -> Any:
    sound = type(value) in form.types
    if sound and form.items:
        items = value.values() if type(value) is dict else value
        sound = form.items.issuperset(map(type, items))
    if not sound:
        raise CodecError(f"the body of an event {kind} is damaged: its {name!r} is {value!r:.100}")
    return _columns(kind, value) if form is _OF_COLUMNS else value


def _columns(kind: str, value: Mapping[str, Any]) -> ExperienceColumns:
    """Return the columns of an event. Those that are not known are passed over."""
    found = {}
    for attribute, name, _, form in _plans(ExperienceColumns):
        if name not in value:
            raise CodecError(f"the body of an event {kind} is damaged: it has no column {name!r}")
        found[attribute] = _checked(kind, name, value[name], form)
    if len(set(map(len, found.values()))) > 1:
        raise CodecError(f"the body of an event {kind} is damaged: its columns differ in length")
    return ExperienceColumns(**found)


def _plans(kind: type[Any]) -> tuple[_Plan, ...]:
    if kind not in _PLANS:
        hints = get_type_hints(kind)
        _PLANS[kind] = tuple(_plan(each, _form(hints[each.name])) for each in fields(kind))
    return _PLANS[kind]


def _plan(each: Field[Any], form: _Form) -> _Plan:
    default = each.default if each.metadata.get("optional") else MISSING
    return _Plan(each.name, each.metadata.get("name") or each.name, default, form)


_PLANS: dict[type[Any], tuple[_Plan, ...]] = {}
