"""An experiment as it was when an earlier position was the last one of its log."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio.to_thread

from trinity_buffer.errors import StoreBusyError, StoreError, StoreUnavailableError
from trinity_buffer.pipeline.verify.projections import Progress, decoded_events, no_progress, pages
from trinity_buffer.store import fold, refold
from trinity_buffer.store.database import Database, DedicatedConnection


@asynccontextmanager
async def open_as_of(
    database: Database, experiment: int, position: int, progress: Progress = no_progress
) -> AsyncGenerator[DedicatedConnection]:
    """Open the projections of ``experiment`` as they were at ``position``.

    The log is folded up to there into temporary tables of one more connection, which hide those of
    the same names: it takes some 20 s for a million experiences, and others can write meanwhile.

    Raises:
        CodecError: an event that says how it was is damaged; the message names its position.
        StoreError: an event contradicts those before it.
    """
    async with database.dedicated_connection() as connection:
        await connection.change(refold.make_temporary_tables)
        async for page in pages(database, experiment, up_to=position):
            facts = await anyio.to_thread.run_sync(decoded_events, page)
            try:
                await connection.change(fold.fold_all, experiment, facts)
            except (StoreBusyError, StoreUnavailableError):
                raise  # of the database, and not of the log
            except refold.CANNOT_FOLD as error:
                raise StoreError(
                    f"{database.name}: one of the events {page[0].position} to {page[-1].position} "
                    f"cannot be folded ({error}): `trinity-buffer verify` names it"
                ) from error
            progress("fold", page[-1].position, position)
        yield connection
