"""A few columns of very many experiences, as arrays, and what annotation sets made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trinity_buffer.limits import sizes
from trinity_buffer.store.rows import ConsumerRow, first_address
from trinity_buffer.store.transaction import Statement, Transaction

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
NO_VERSION = int(np.iinfo(np.int64).min)


def row_numbers(tx: Transaction, experiment: int, wanted: Sequence[int]) -> npt.NDArray[np.void]:
    """Return the `NUMBERS` of those of ``wanted`` that there are, in order.

    Args:
        wanted: addresses, in order.
    """
    size, numbers = sizes.rows_per_page, [np.zeros(0, NUMBERS)]
    for start in range(0, len(wanted), size):  # more objects at once, and Python sweeps all it has
        page_wanted = wanted[start : start + size]
        rows = _NUMBERS.fetch_all(tx, of=experiment, wanted=page_wanted, none=NO_VERSION)
        page = np.zeros(len(rows), NUMBERS)
        for name, values in zip(NUMBERS.names or (), zip(*rows, strict=True), strict=False):
            page[name] = values
        numbers.append(page)
    return np.concatenate(numbers)


# A number instead of NULL, so that the column stays an array of integers; of a pair as `tokens_of`.
_NUMBERS = Statement(
    "SELECT address, CASE WHEN prompt_length = length AND trained_tokens > 0 "
    "THEN 2 * length + trained_tokens ELSE length END, "
    "trained_tokens, run, step, coalesce(policy_version, :none), reward FROM experience "
    "WHERE experiment = :of AND address IN INTS(:wanted) ORDER BY address"
)


def addresses(tx: Transaction, experiment: int, *, after: int, limit: int) -> Integers:
    """Return addresses of experiences that were not refused, above ``after``, in order."""
    rows = _ADDRESSES.fetch_all(tx, of=experiment, after=after, most=limit)
    return np.array([address for (address,) in rows], np.int64)


_ADDRESSES = Statement(
    "SELECT address FROM experience WHERE experiment = :of AND address > :after "
    "AND refused IS NULL ORDER BY address LIMIT :most"
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
        states[wanted >= first_address(chosen.cursor + 1)] = "unseen"
        rejected = [(at, f"rejected: {why}") for at, why in _REJECTED.fetch_all(tx, **mine)]
        _put(states, wanted, rejected)
        states[own > 0] = "annotated"
        decided.append(Decisions(states, own))
    return decided


def _put(into: npt.NDArray[Any], wanted: Integers, rows: Sequence[tuple[Any, ...]]) -> None:
    """Put what follows the address of each row where that stands in ``wanted``, if it does."""
    if not rows:
        return
    at, *values = zip(*rows, strict=True)  # in columns: lists of pairs are swept by Python
    places = np.searchsorted(wanted, at)
    there = wanted[places] == at  # none is above the last
    into[places[there]] = np.array(values, into.dtype).T.reshape(-1, *into.shape[1:])[there]


_REJECTED = Statement(
    "SELECT address, reason FROM rejection "
    "WHERE experiment = :of AND consumer = :name AND address BETWEEN :first AND :last"
)
# The first annotation of each set, or 0.
_NOTES = Statement(
    "SELECT experience, coalesce(min(CASE WHEN consumer = :name THEN address END), 0), "
    "coalesce(min(CASE WHEN consumer = :other THEN address END), 0) FROM annotation "
    "WHERE experiment = :of AND experience BETWEEN :first AND :last GROUP BY experience"
)
