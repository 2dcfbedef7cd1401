"""Opens stores and experiments, and records what their configuration is."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from trinity_buffer.codec.blob import keep_what_is_freed
from trinity_buffer.errors import InvalidArgumentError, UnknownExperimentError
from trinity_buffer.events import ConfigurationChanged, ExperimentCreated
from trinity_buffer.identity import problem_of_text, require_name
from trinity_buffer.options import renamed
from trinity_buffer.pipeline.experiment import SCHEMA_NAMES, Experiment
from trinity_buffer.pipeline.handle import as_json, new_event, now_us
from trinity_buffer.pipeline.write.group_commit import GroupCommit
from trinity_buffer.store import log, writer_queries
from trinity_buffer.store.database import Database, Durability, open_database
from trinity_buffer.store.log import NewEvent
from trinity_buffer.store.transaction import Transaction
from trinity_buffer.store.url import StoreURL


class Store:
    """An open store. Made by `open_store`; closed by leaving its context.

    Attributes:
        database: connections and transactions; for tools that only read.
    """

    def __init__(self, database: Database) -> None:
        self.database = database
        self._group_commit = GroupCommit(database)

    @property
    def url(self) -> str:
        """Where the store is, without a password."""
        return self.database.name

    async def settle(self) -> None:
        """Wait until every write under way has ended, also those of cancelled callers."""
        await self._group_commit.drain()

    async def experiments(self) -> list[str]:
        """Return the names of all experiments, in order of creation."""
        return list(await self.database.read(log.experiment_names))

    async def experiment(
        self,
        name: str,
        *,
        config: Mapping[str, Any] | None = None,
        schema: str | None = None,
        actor: str = "user",
    ) -> Experiment:
        """Open the experiment ``name``; with a ``config``, create it or record what changed.

        Args:
            config: configuration of the run, JSON values only; your own values go under ``extra``.
                It is the experiment's first event; later differences are recorded as a
                ``ConfigurationChanged`` event. None: the experiment must exist.
            schema: the fields that its experiences must have: ``experience`` (the default of a new
                experiment), ``sft``, ``dpo`` or ``cpt``. It cannot change.

        Raises:
            UnknownExperimentError: it does not exist, and there is no ``config`` to create it with
                (or the store is read-only).
            InvalidArgumentError: the schema would change, an unknown key, or an invalid name.
        """
        if problem_of_text(name):
            require_name("an experiment's name", name)
        key, stored, names = await self.database.read(_find, name)
        if key is None:  # older versions accepted any text
            require_name("an experiment's name", name)
        if key is not None and stored is not None and (config is None or self.database.read_only):
            return Experiment(self.database, self._group_commit, key, name, stored[0])
        if config is None or self.database.read_only:
            known = ", ".join(names) or "none"
            remedy = "" if self.database.read_only else "; pass config={} to create it"
            raise UnknownExperimentError(
                f"{self.url} holds no experiment {name!r} (there: {known}){remedy}"
            )
        wanted = as_json(f"the config of experiment {name!r}", renamed(config))
        if schema is not None:
            wanted = {"schema": schema, **wanted}
        fresh = {"schema": SCHEMA_NAMES[0], **wanted}
        if fresh["schema"] not in SCHEMA_NAMES:
            raise InvalidArgumentError(
                f"experiment {name!r}: schema={fresh['schema']!r}, accepted are "
                f"{', '.join(SCHEMA_NAMES)}"
            )
        created = new_event(ExperimentCreated(config=fresh))
        change = partial(_create_or_change, name=name, wanted=wanted, fresh=fresh, created=created)
        its_key, current = await self.database.write(change, actor=actor)
        return Experiment(self.database, self._group_commit, its_key, name, current)


def _find(
    tx: Transaction, name: str
) -> tuple[int | None, tuple[dict[str, Any], bool] | None, dict[str, int]]:
    """Return an experiment's key and configuration, or the existing names if it is unknown."""
    key = log.find_experiment(tx, name)
    stored = None if key is None else writer_queries.config_of(tx, key)
    return key, stored, log.experiment_names(tx) if key is None else {}


def _create_or_change(
    tx: Transaction,
    name: str,
    wanted: dict[str, Any],
    fresh: dict[str, Any],
    created: NewEvent,
    actor: str,
) -> tuple[int, dict[str, Any]]:
    """Create an experiment or record its changed configuration; return key and configuration."""
    from trinity_buffer.pipeline.config import require_known, require_values  # noqa: PLC0415 - all options

    key = log.create_experiment(tx, name)
    tx.lock(key)
    stored = writer_queries.config_of(tx, key)
    require_known(name, wanted, () if stored is None else stored[0])
    if stored is None:
        require_values(name, wanted)
        log.append(tx, key, [(actor, created)], now_us=now_us())
        return key, fresh
    before = stored[0]
    changes = {
        k: [before.get(k), v] for k, v in wanted.items() if k not in before or before[k] != v
    }
    require_values(name, {key: wanted[key] for key in changes})
    if "schema" in changes:  # it describes what is stored
        then, now = changes["schema"]
        raise InvalidArgumentError(
            f"experiment {name!r} has schema={then!r}, which cannot become {now!r}; create another "
            "experiment"
        )
    after = {**before, **wanted}
    if changes:
        event = new_event(ConfigurationChanged(changes=changes, config=after))
        log.append(tx, key, [(actor, event)], now_us=now_us())
    return key, after


@asynccontextmanager
async def open_store(
    url: StoreURL,
    *,
    read_only: bool = False,
    durability: Durability = "normal",
    create: bool = True,
) -> AsyncIterator[Store]:
    """Open the store at ``url``, an async context manager; an empty database gets the schema.

    Args:
        url: ``sqlite:///runs/sort.db`` (or just the path, with ``~`` too) or
            ``postgresql://user@host/database``.
        read_only: change nothing, neither the database nor the content of its write-ahead log.
        durability: of SQLite. ``"normal"`` survives kill -9 of any process, but a power loss may
            take the last commits (never a part of one); ``"full"`` waits for the disk at each
            commit.
        create: False: a missing store is an error, as for trainers.

    Raises:
        UnknownStoreError: no store there, a missing folder, or a database of another program.
        SchemaOutdatedError: written by an older version; `SchemaTooNewError`: by a newer one.
        UnsafeStoreError: a network file system, or a SQLite library that may lose commits.
    """
    keep_what_is_freed()
    async with open_database(
        url, read_only=read_only, durability=durability, create=create
    ) as database:
        store = Store(database)
        try:
            yield store
        finally:
            await store.settle()
