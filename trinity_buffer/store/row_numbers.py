"""A few columns of very many experiences, as arrays, and what annotation sets made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from sqlalchemy import BigInteger, ColumnElement, bindparam, case, func, literal, select

from trinity_buffer.limits import sizes
from trinity_buffer.store.rows import ConsumerRow, first_address
from trinity_buffer.store.tables import annotation, experience, rejection, waiting
from trinity_buffer.store.transaction import (
    Prepared,
    Transaction,
    bind_list,
    by_dialect,
    in_bound_list,
)

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Decisions:
    """What one annotation set made of some experiences, in their order.

    Attributes:
        states: ``unseen``, ``waiting``, ``rejected: REASON`` or ``annotated``.
        notes: address of the first annotation, or 0.
    """

    states: npt.NDArray[np.object_]
    notes: Integers


NUMBERS = np.dtype(
    [
        ("address", np.int64),
        ("length", np.int64),
        ("trained_tokens", np.int64),
        ("run", np.int64),
        ("step", np.int64),
        ("policy_version", np.int64),
        ("reward", np.float64),
    ]
)
"""What is counted of an experience; see `NO_VERSION`, and a reward that is not there is NaN."""
_WHOLE = ("address", "length", "trained_tokens", "run", "step")
NO_VERSION = int(np.iinfo(np.int64).min)


def row_numbers(tx: Transaction, experiment: int, wanted: Sequence[int]) -> npt.NDArray[np.void]:
    """Return the `NUMBERS` of those of ``wanted`` that there are, in order.

    Args:
        wanted: addresses, in order.
    """
    size, numbers = sizes().rows_per_page, [np.zeros(0, NUMBERS)]
    for start in range(0, len(wanted), size):  # more objects at once, and Python sweeps all it has
        page_wanted = bind_list(tx, wanted[start : start + size])
        rows = _numbers(tx.dialect.name).fetch_all(tx, of=experiment, wanted=page_wanted)
        page = np.zeros(len(rows), NUMBERS)
        for name, values in zip(NUMBERS.names or (), zip(*rows, strict=True), strict=False):
            page[name] = values
        numbers.append(page)
    return np.concatenate(numbers)


@by_dialect
def _numbers(dialect: str) -> Prepared:
    # The sentinel instead of NULL, so that the column stays an array of integers.
    columns = [experience.c[name] for name in _WHOLE]
    version = func.coalesce(experience.c.policy_version, literal(NO_VERSION, BigInteger))
    query = select(*columns, version, experience.c.reward).where(
        experience.c.experiment == bindparam("of"),
        in_bound_list(dialect, experience.c.address, "wanted"),
    )
    return Prepared(query.order_by(experience.c.address))


def addresses(tx: Transaction, experiment: int, *, after: int, limit: int) -> Integers:
    """Return addresses of experiences that were not refused, above ``after``, in order."""
    rows = _ADDRESSES.fetch_all(tx, of=experiment, after=after, most=limit)
    return np.array([address for (address,) in rows], np.int64)


_ADDRESSES = Prepared(
    select(experience.c.address)
    .where(
        experience.c.experiment == bindparam("of"),
        experience.c.address > bindparam("after"),
        experience.c.refused.is_(None),
    )
    .order_by(experience.c.address)
    .limit(bindparam("most"))
)


def decisions(
    tx: Transaction, experiment: int, sets: Sequence[ConsumerRow], wanted: Integers
) -> list[Decisions]:
    """Return the decisions of one set, or of each of two, on ``wanted``, addresses in order."""
    span: dict[str, Any] = {"of": experiment, "first": int(wanted[0]), "last": int(wanted[-1])}
    # Both sets in one walk through the index of annotations by experience.
    noted = _NOTES.fetch_all(tx, **span, name=sets[0].name, other=sets[-1].name)
    notes = np.zeros((len(wanted), 2), np.int64)
    _put(notes, wanted, noted)
    decided = []
    for chosen, own in zip(sets, notes.T, strict=False):
        mine = span | {"name": chosen.name}
        states = np.full(len(wanted), "waiting", object)
        # Later states overwrite earlier ones; the order is that of the decisions.
        states[wanted >= first_address(chosen.cursor + 1)] = "unseen"
        _put(states, wanted, [(at, "waiting") for (at,) in _WAITING.fetch_all(tx, **mine)])
        _put(
            states,
            wanted,
            [(at, f"rejected: {why}") for at, why in _REJECTED.fetch_all(tx, **mine)],
        )
        states[own > 0] = "annotated"
        decided.append(Decisions(states, own))
    return decided


def _put(into: npt.NDArray[Any], wanted: Integers, rows: Sequence[tuple[Any, ...]]) -> None:
    """Put what follows the address of each row where that stands in ``wanted``, if it does."""
    if not rows:
        return
    addresses_found, *values = zip(
        *rows, strict=True
    )  # in columns: lists of pairs are swept by Python
    places = np.searchsorted(wanted, addresses_found)
    there = wanted[places] == addresses_found  # none is above the last
    into[places[there]] = np.array(values, into.dtype).T.reshape(-1, *into.shape[1:])[there]


def _within(address: ColumnElement[Any]) -> ColumnElement[bool]:
    return address.between(bindparam("first"), bindparam("last"))


def _note_of(name: str) -> ColumnElement[int]:
    """Return the first annotation of a set, or 0."""
    mine = case((annotation.c.consumer == bindparam(name), annotation.c.address))
    return func.coalesce(func.min(mine), 0)


_WAITING = Prepared(
    select(waiting.c.address).where(
        waiting.c.experiment == bindparam("of"),
        waiting.c.consumer == bindparam("name"),
        _within(waiting.c.address),
    )
)
_REJECTED = Prepared(
    select(rejection.c.address, rejection.c.reason).where(
        rejection.c.experiment == bindparam("of"),
        rejection.c.consumer == bindparam("name"),
        _within(rejection.c.address),
    )
)
_NOTES = Prepared(
    select(annotation.c.experience, _note_of("name"), _note_of("other"))
    .where(annotation.c.experiment == bindparam("of"), _within(annotation.c.experience))
    .group_by(annotation.c.experience)
)
