"""Why an experience is left out, in the words that are recorded."""

from __future__ import annotations

INVALID = "invalid"


def invalid(*fields: str) -> str:
    """Return the reason for rejecting what lacks ``fields``, or has them broken."""
    return f"{INVALID}: {', '.join(fields)}" if any(fields) else INVALID
