"""Few columns of experiences and what sets made of them: for questions about very many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from sqlalchemy import ColumnElement, bindparam, func, select

from trinity_buffer.sizes import sizes
from trinity_buffer.store.rows import ConsumerRow, first_address
from trinity_buffer.store.tables import annotation, experience, rejection, waiting
from trinity_buffer.store.transaction import Prepared, Transaction, among_given, given

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Decisions:
    """What one annotation set made of some experiences, in their order.

    Attributes:
        states: ``unseen``, ``waiting``, ``rejected: REASON`` or ``annotated``.
        notes: address of the first annotation; 0 where there is none.
    """

    states: npt.NDArray[np.object_]
    notes: Integers


NUMBERS = ("reward", "policy_version", "length", "trained_tokens")
"""What is counted of an experience."""


def row_numbers(
    tx: Transaction, experiment: int, wanted: Sequence[int]
) -> tuple[Integers, npt.NDArray[np.float64]]:
    """Return those of ``wanted`` that there are, in order, and their `NUMBERS`; NaN for None.

    Args:
        wanted: addresses, in order.
    """
    size, known = sizes().rows_per_page, [np.zeros(0, np.int64)]
    numbers = [np.zeros((0, len(NUMBERS)))]
    for start in range(0, len(wanted), size):  # more objects at once, and Python sweeps all it has
        some = given(tx, wanted[start : start + size])
        rows = _numbers(tx.dialect.name).rows(tx, of=experiment, wanted=some)
        if rows:
            found, *columns = zip(*rows, strict=True)
            known.append(np.array(found, np.int64))
            numbers.append(np.array(columns, np.float64).T)
    return np.concatenate(known), np.concatenate(numbers)


@cache
def _numbers(dialect: str) -> Prepared:
    columns = (experience.c[name] for name in ("address", *NUMBERS))
    some = select(*columns).where(
        experience.c.experiment == bindparam("of"),
        among_given(dialect, experience.c.address, "wanted"),
    )
    return Prepared(some.order_by(experience.c.address))


def addresses(tx: Transaction, experiment: int, *, after: int, limit: int) -> Integers:
    """Return addresses of experiences that were not refused, above ``after``, in order."""
    rows = _ADDRESSES.rows(tx, of=experiment, after=after, most=limit)
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
    tx: Transaction, experiment: int, consumer: ConsumerRow, wanted: Integers
) -> Decisions:
    """Return what a set made of the experiences at ``wanted``, some addresses in order."""
    span = {"of": experiment, "name": consumer.name}
    span |= {"first": int(wanted[0]), "last": int(wanted[-1])}
    states = np.full(len(wanted), "waiting", object)
    states[wanted >= first_address(consumer.cursor + 1)] = "unseen"
    notes = np.zeros(len(wanted), np.int64)
    _put(states, wanted, [(at, "waiting") for (at,) in _WAITING.rows(tx, **span)])
    _put(states, wanted, [(at, f"rejected: {why}") for at, why in _REJECTED.rows(tx, **span)])
    _put(notes, wanted, _NOTES.rows(tx, **span))
    states[notes > 0] = "annotated"
    return Decisions(states, notes)


def _put(into: npt.NDArray[Any], wanted: Integers, rows: Sequence[tuple[int, Any]]) -> None:
    """Put the second of each row where its address stands in ``wanted``, if it does."""
    if not rows:
        return
    some, values = zip(*rows, strict=True)
    places = np.searchsorted(wanted, some)
    there = wanted[places] == some  # none is above the last
    into[places[there]] = np.array(values, into.dtype)[there]


def _of_set(address: ColumnElement[Any], consumer: ColumnElement[Any]) -> tuple[Any, ...]:
    """Return the conditions on what one set made of a span of experiences."""
    return consumer == bindparam("name"), address.between(bindparam("first"), bindparam("last"))


_WAITING = Prepared(
    select(waiting.c.address).where(
        waiting.c.experiment == bindparam("of"), *_of_set(waiting.c.address, waiting.c.consumer)
    )
)
_REJECTED = Prepared(
    select(rejection.c.address, rejection.c.reason).where(
        rejection.c.experiment == bindparam("of"),
        *_of_set(rejection.c.address, rejection.c.consumer),
    )
)
_NOTES = Prepared(
    select(annotation.c.experience, func.min(annotation.c.address))
    .where(
        annotation.c.experiment == bindparam("of"),
        # Joined to nothing: else SQLite may walk through every annotation of the set.
        *_of_set(annotation.c.experience, annotation.c.consumer.concat("")),
    )
    .group_by(annotation.c.experience)
)
