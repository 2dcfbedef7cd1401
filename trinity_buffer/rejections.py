"""Why an experience is left out, in the words that are recorded."""

from __future__ import annotations

INVALID = "invalid"

DROPPED = "dropped"
"""A trainer was told to leave it out."""

OVERSIZE = "oversize"
"""It is longer than a trainer takes."""


def invalid(*fields: str) -> str:
    """Return the reason for rejecting what lacks ``fields``, or has them broken."""
    return f"{INVALID}: {', '.join(fields)}" if any(fields) else INVALID
