"""The log address of one row of one event: ``position * 2**20 + slot``, one integer.

It is derived from the log, hence no surrogate key: rebuilding the projections gives every row the
same address. Sorting by address sorts by position, then by slot.
"""

from __future__ import annotations

SLOT_BITS = 20
MAX_ROWS_PER_EVENT = 1 << SLOT_BITS


def address_of(position: int, slot: int) -> int:
    """Return the address of row ``slot`` of the event at ``position``."""
    return position << SLOT_BITS | slot


def first_address(position: int) -> int:
    """Return the lowest address of the event at ``position``."""
    return position << SLOT_BITS


def position_of(address: int) -> int:
    """Return the position of the event that ``address`` points into."""
    return address >> SLOT_BITS


def slot_of(address: int) -> int:
    """Return the row of the event that ``address`` points to."""
    return address & (MAX_ROWS_PER_EVENT - 1)


def written_as(address: int) -> str:
    """Return ``position:slot``, as people read it."""
    return f"{position_of(address)}:{slot_of(address)}"
