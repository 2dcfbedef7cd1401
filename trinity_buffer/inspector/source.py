"""What questions are asked of: an experiment as it is, or as it was at a position of its log."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Concatenate, ParamSpec, TypeVar

import anyio.to_thread

from trinity_buffer import errors
from trinity_buffer.events import BatchLeased
from trinity_buffer.pipeline.handle import Event, decoded
from trinity_buffer.pipeline.manifest import leased_steps
from trinity_buffer.pipeline.store import Experiment
from trinity_buffer.pipeline.verify.projections import Progress, chained, no_progress, pages
from trinity_buffer.store import fold, log, refold
from trinity_buffer.store.connection import Database
from trinity_buffer.store.rows import ConsumerRow
from trinity_buffer.store.transaction import Transaction

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Source:
    """An experiment to ask, as it is or as it was.

    Attributes:
        position: the last event that counts; None: all there are.
    """

    database: Database
    key: int
    name: str
    position: int | None = None
    _earlier: Database | None = field(default=None, repr=False)

    async def read(
        self, f: Callable[Concatenate[Transaction, P], T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Return the result of a function of `store` on the projections."""
        return await (self._earlier or self.database).read(f, *args, **kwargs)

    async def events(self, positions: Sequence[int]) -> dict[int, Event]:
        """Return position -> event, of those of ``positions`` that count."""
        # As it was, later events do not exist, even where a row of today names one.
        last = self.position
        wanted = sorted(at for at in set(positions) if last is None or at <= last)
        stored = await self.read(log.read_at, self.key, wanted)
        return {event.position: decoded(self.name, event) for event in stored}

    async def leases(self, positions: Sequence[int]) -> dict[int, BatchLeased]:
        """Return position -> manifest, where steps say that they were handed out."""
        steps = await self.database.read(leased_steps, self.key, self.name, positions)
        return {at: step.manifest for at, step in steps.items()}

    async def head(self) -> int:
        """Return the last position that counts."""
        if self.position is not None:
            return self.position
        return await self.database.read(log.head, self.key)


def now(experiment: Experiment | Source) -> Source:
    """Return the experiment as it is; what is a source already stays what it is."""
    if isinstance(experiment, Source):
        return experiment
    return Source(experiment.database, experiment.key, experiment.name)


@asynccontextmanager
async def as_of(
    experiment: Experiment, position: int | None, progress: Progress = no_progress
) -> AsyncGenerator[Source]:
    """Open the experiment as it was when ``position`` was its last event; None: as it is.

    The log is folded up to there into temporary tables of one more connection, which hide those of
    the same names: it takes some 20 s for a million experiences, and others can write meanwhile.

    Raises:
        InvalidArgumentError: the log has no such position.
        CodecError: an event that says how it was is damaged; the message names its position.
        StoreError: an event was altered, is missing, or contradicts those before it.
    """
    if position is None:
        yield now(experiment)
        return
    database, key, decode = experiment.database, experiment.key, chained(experiment.name)
    await require_position(experiment, position)
    async with database.dedicated_connection() as connection:
        await connection.read(refold.make_temporary_tables)
        async for page in pages(database, key, up_to=position):
            facts = await anyio.to_thread.run_sync(decode, page)
            try:
                await connection.read(fold.fold_all, key, facts)
            except (errors.StoreBusyError, errors.StoreUnavailableError):
                raise  # of the database, and not of the log
            except refold.CANNOT_FOLD as error:
                raise errors.StoreError(
                    f"{database.name}: one of the events {page[0].position} to {page[-1].position} "
                    f"cannot be folded ({error}): `trinity-buffer verify` names it"
                ) from error
            progress("fold", page[-1].position, position)
        with as_of_position(position):
            yield Source(database, key, experiment.name, position, connection)


@contextmanager
def as_of_position(position: int) -> Iterator[None]:
    """Say of a name that is not known as of which position: it may be known now."""
    try:
        yield
    except errors.UnknownNameError as error:
        raise errors.UnknownNameError(f"as of position {position}: {error}") from error


async def require_position(experiment: Experiment, position: int) -> None:
    """Raise InvalidArgumentError unless the log has this position."""
    head = await experiment.database.read(log.head, experiment.key)
    if not 1 <= position <= head:
        raise errors.InvalidArgumentError(
            f"--as-of {position}: the log of {experiment.name!r} goes from 1 to {head}"
        )


def chosen_set(
    consumers: Mapping[str, ConsumerRow], wanted: str | None, trainer: str | None = None
) -> str | None:
    """Return the annotation set to ask about, if there is any.

    Args:
        wanted: its name; None: that of ``trainer``, or the first one where nothing is trained.
        trainer: None: the one furthest ahead.

    Raises:
        UnknownNameError: there is no set of this name.
    """
    names = [name for name, row in consumers.items() if row.kind == "strategy"]
    if wanted is not None and wanted not in names:
        known = ", ".join(names) or "none"
        raise errors.UnknownNameError(f"no annotation set {wanted!r} (there: {known})")
    trainers = [row for row in consumers.values() if row.kind == "trainer"]
    asked = [row for row in trainers if trainer in (None, row.name)]
    trained = [row.config["strategy"] for row in sorted(asked, key=lambda row: -row.leased_step)]
    return wanted or next(iter([*trained, *names]), None)
