"""A store of an older version, brought up to date."""

from __future__ import annotations

from trinity_buffer.store import migrations
from trinity_buffer.store.database import StoreURL, open_for_migration
from trinity_buffer.store.tables import SCHEMA_REVISION


async def migrate(url: StoreURL) -> tuple[str, str]:
    """Bring the store at ``url`` up to date; return its revision before and after.

    All of it happens in one transaction: an interrupted migration has not happened.

    Raises:
        UnknownStoreError: nothing there, or a database that is not ours.
        SchemaTooNewError: written by a newer version.
    """
    async with open_for_migration(url) as database:
        before = await database.read(migrations.current, database.name)
        if before != SCHEMA_REVISION:
            await database.write(migrations.upgrade)
        return before, SCHEMA_REVISION
