"""The type of an open transaction, for those who pass it on without speaking SQL."""

from __future__ import annotations

from typing import TypeAlias

from sqlalchemy.ext.asyncio import AsyncConnection

Transaction: TypeAlias = AsyncConnection


class TakenKeyError(Exception):
    """A unique key is taken already; for callers who know what that means."""
