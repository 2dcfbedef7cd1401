"""Alembic's way into a store: the connection that `migrate` hands over, or a URL.

For those who write migrations: ``alembic -x url=sqlite:///runs/a.db upgrade head``.
"""

from __future__ import annotations

import anyio
from alembic import context
from sqlalchemy import Connection

from trinity_buffer.store.connection import open_for_migration
from trinity_buffer.store.tables import metadata


def run(connection: Connection) -> None:
    """Migrate inside the transaction that is open on ``connection``: all of it, or nothing."""
    context.configure(connection=connection, target_metadata=metadata, transactional_ddl=True)
    with context.begin_transaction():
        context.run_migrations()


async def run_by_hand() -> None:
    """Migrate the database of ``-x url=...``."""
    url = context.get_x_argument(as_dictionary=True).get("url")
    if url is None:
        raise SystemExit("which store? say -x url=sqlite:///runs/a.db")
    async with open_for_migration(url) as database:
        await database.write(lambda tx: run(tx.connection))


given = context.config.attributes.get("connection")
if given is not None:
    run(given)
else:
    anyio.run(run_by_hand)
