"""A store of an older version, brought up to date: from one revision of the schema to another."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import anyio
import anyio.to_thread
from alembic import command
from alembic.config import Config

from trinity_buffer.errors import StoreBusyError, UnknownStoreError
from trinity_buffer.pipeline.coordination.waiting import REPEATED_AFTER, wait_report_s
from trinity_buffer.store import schema, sqlite
from trinity_buffer.store.connection import open_for_migration
from trinity_buffer.store.postgres import others
from trinity_buffer.store.tables import SCHEMA_REVISION
from trinity_buffer.store.transaction import Transaction
from trinity_buffer.store.url import StoreURL

_PACKAGE = Path(__file__).parents[2]

LOOK_AGAIN_S = 1.0
"""Polling interval: processes do not announce that they close the store."""

_logger = logging.getLogger(__name__)


async def migrate(url: StoreURL, *, wait: bool = False) -> tuple[str, str]:
    """Bring the store at ``url`` up to date; return its revision before and after.

    All of it happens in one transaction: an interrupted migration has not happened.

    Args:
        wait: for the end of every process that has the store open.

    Raises:
        UnknownStoreError: nothing there, or a database that is not ours.
        SchemaTooNewError: written by a newer version.
        StoreBusyError: a process has the store open, and ``wait`` is False.
    """
    async with open_for_migration(url) as database:
        before, name = await database.read(schema.revision_of, database.name), database.name
    if not before:
        raise UnknownStoreError(f"{name} is not a Trinity Buffer store: it is empty")
    if before == SCHEMA_REVISION:
        return before, before
    due = time.monotonic() + wait_report_s()
    while who := await _users(url):
        if not wait:
            raise StoreBusyError(
                f"{name} is open in {', '.join(who)}: end every process of the run, or migrate "
                "with --wait"
            )
        if time.monotonic() >= due:
            _logger.warning(
                "migrate waits: %s is open in %s; it goes on when these end", name, ", ".join(who)
            )
            due = time.monotonic() + REPEATED_AFTER * wait_report_s()
        await anyio.sleep(LOOK_AGAIN_S)
    async with open_for_migration(url) as database:
        await database.write(upgrade)
    return before, SCHEMA_REVISION


async def _users(url: StoreURL) -> list[str]:
    """Return who else has the store open, as far as can be told."""
    async with open_for_migration(url) as database:
        if database.dialect == "postgresql":
            return await database.read(others)
        # Looked at when our own connection is closed: it would count as a user.
        path = database.path
    used = await anyio.to_thread.run_sync(sqlite.in_use, path)
    return ["another process"] if used else []


def config(tx: Transaction | None = None) -> Config:
    """Return alembic's configuration, for what happens in a transaction."""
    # In the package of a wheel, beside it in a checkout.
    folder = _PACKAGE / "_migrations"
    folder = folder if folder.is_dir() else _PACKAGE.parent / "migrations"
    settings = Config()
    settings.set_main_option("script_location", str(folder).replace("%", "%%"))
    settings.attributes["connection"] = None if tx is None else tx.connection
    return settings


def upgrade(tx: Transaction, revision: str = "head") -> None:
    """Bring an older (or empty) database up to ``revision``."""
    command.upgrade(config(tx), revision)
