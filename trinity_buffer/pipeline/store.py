"""Opens stores, and the experiments in them: their writers, their events, their stored rollouts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

from trinity_buffer import errors
from trinity_buffer import events as facts
from trinity_buffer.codec.blob import keep_what_is_freed
from trinity_buffer.codec.objects import new_event
from trinity_buffer.identity import SCHEMAS, problem_of_name, problem_of_text, require_name
from trinity_buffer.limits import sizes
from trinity_buffer.options import renamed
from trinity_buffer.pipeline import handle
from trinity_buffer.pipeline.coordination.waiting import ReportedWait, settle_imports
from trinity_buffer.pipeline.manifest import leased_steps
from trinity_buffer.pipeline.train.checkpoint import resolve_moved
from trinity_buffer.store import log, trainer_queries, writer_queries
from trinity_buffer.store.connection import Database, Durability, open_database
from trinity_buffer.store.log import StoredEvent
from trinity_buffer.store.rows import ExperienceRow
from trinity_buffer.store.transaction import Transaction
from trinity_buffer.store.url import StoreURL

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from trinity_buffer.experience import Experience
    from trinity_buffer.identity import Key
    from trinity_buffer.pipeline.train.stream import TrainStream
    from trinity_buffer.pipeline.write.batch import OnInvalid
    from trinity_buffer.pipeline.write.writer import GroupCommit, SQLWriter

MAX_URI = 4096
"""Longest address of a policy in characters: that of a path on Linux."""


@dataclass(frozen=True, slots=True)
class PublishedPolicy:
    """Weights that a trainer has published.

    Attributes:
        version: their number, equal to the gradient step that produced them.
        uri: their path or address.
        digest: sha256 of the file, "" if it was not computed.
        position: position of the event.
    """

    version: int
    uri: str
    digest: str
    position: int


class Experiment(handle.ExperimentHandle):
    """One named training run. Made by `Store.experiment`."""

    def __init__(self, store: Store, key: int, name: str, config: Mapping[str, Any]) -> None:
        super().__init__(store.database, key, name, config)
        self._store = store

    def writer(self, actor: str, *, on_invalid: OnInvalid = "raise") -> SQLWriter:
        """Return a writer for the process ``actor``, which checks against the experiment's schema.

        Args:
            on_invalid: ``"raise"``, or ``"quarantine"``: record invalid rows as rejected and go
                on.

        Raises:
            InvalidArgumentError: ``actor`` is no valid name.
        """
        from trinity_buffer.pipeline.write import writer  # noqa: PLC0415 - torch, which readers do not need

        require_name("an actor's name", actor)
        # The first full garbage collection is better spent here than in the first write.
        settle_imports()
        if self._store.group_commit is None:
            self._store.group_commit = writer.GroupCommit(self.database)
        commits, schema = self._store.group_commit, self.config.get("schema", "experience")
        return writer.SQLWriter(
            self.database, commits, self.key, actor=actor, schema=schema, on_invalid=on_invalid
        )

    async def events(
        self, after: int = 0, *, follow: bool = False, kinds: Sequence[str] | None = None
    ) -> AsyncIterator[handle.Event]:
        """Yield the events after position ``after``, in order, each exactly once.

        Args:
            follow: wait for more at the end of the log; an ``ExperimentFinished`` event ends it.
            kinds: only these.
        """
        limit = sizes.events_per_page
        state = (0, 0)
        while True:
            if follow:  # a hot standby cannot notify, and only followers need it
                state = await self.database.changes.state()
            head, page, finished = await self.database.read(self._page, after, limit, kinds)
            for stored in page:
                yield handle.decoded(self.name, stored)
            if len(page) == limit:
                after = page[-1].position
                continue
            after = max(after, head)
            if not follow or finished:
                return
            await self.database.changes.changed(state)

    def _page(
        self, tx: Transaction, after: int, limit: int, kinds: Sequence[str] | None
    ) -> tuple[int, list[StoredEvent], bool]:
        head = log.head(tx, self.key)
        page = log.read_after(tx, self.key, after, limit=limit, kinds=kinds)
        return head, page, writer_queries.is_finished(tx, self.key)

    def _append(self, tx: Transaction, event: facts.NewEvent, actor: str) -> None:
        log.append(tx, self.key, [(actor, event)])

    async def until_finished(self) -> None:
        """Wait until the experiment is finished.

        Raises:
            RunStalledError: it made no progress for ``stalled_after_s``.
        """

        async def tell() -> str:
            return f"the end of experiment {self.name!r} is waited for"

        wait = ReportedWait(self.database, self.key, tell, aloud=False)
        while True:
            state = await self.database.changes.state()
            if await self.is_finished():
                return
            await wait.changed(state)

    async def finish(self, reason: str, *, actor: str = "user") -> None:
        """Record that nothing more will be generated or trained; its followers end.

        Raises:
            InvalidArgumentError: the reason is no text.
        """
        if not isinstance(reason, str):
            raise errors.InvalidArgumentError(
                f"experiment {self.name!r}: reason={reason!r:.40}, it must be a text"
            )
        event = new_event(facts.ExperimentFinished(reason=reason))
        await self.database.write(self._append, event, actor)

    async def read(  # noqa: PLR0913 - all by keyword, each a filter
        self,
        *,
        batch: Key | None = None,
        task: Key | None = None,
        run: int | None = None,
        policy_version: int | None = None,
        reward_min: float | None = None,
        reward_max: float | None = None,
        families: Sequence[str] = ("light", "tokens", "text", "heavy"),
        include_refused: bool = False,
        annotation_set: str | None = None,
        state: writer_queries.State | None = None,
        trained_in: int | None = None,
        trainer: str = "trainer",
    ) -> AsyncIterator[Experience]:
        """Yield the stored experiences that match every given keyword, oldest first, decoded.

        An unreadable one is included, with what the log knows of it: a warning is logged, its
        ``damaged`` says why, and its other attributes raise DamagedSegmentError.

        Args:
            families: the column families to load; attributes of others raise an error that names
                the family.
            include_refused: also experiences that were recorded as late or invalid.
            annotation_set: the set that ``state`` refers to; alone, the experiences it annotated.
            state: ``unseen``, ``waiting``, ``annotated`` or ``rejected`` in ``annotation_set``.
            trained_in: only experiences of this gradient step of ``trainer``; the rows of an
                expert's experiment are read from that experiment.

        Raises:
            InvalidArgumentError: a ``state`` without a set.
            UnknownNameError: no such annotation set, or no such step of ``trainer``.
        """
        if annotation_set is not None or state is not None:
            state = await self._checked_state(annotation_set, state)
        addresses = None if trained_in is None else await self._rows_of_step(trainer, trained_in)
        # A batch is mostly small: looking up its addresses beats a scan of the experiment.
        if addresses is None and batch is not None:
            most = sizes.rows_looked_up
            addresses = await self.database.read(
                writer_queries.addresses_in_batch, self.key, batch, task, limit=most + 1
            )
            addresses = addresses if len(addresses) <= most else None
        wanted = writer_queries.Filter(
            *(batch, task, run, policy_version, reward_min, reward_max, include_refused),
            *(annotation_set, state, addresses),
        )
        from trinity_buffer.pipeline.load.columns import load_experiences  # noqa: PLC0415 - torch
        from trinity_buffer.pipeline.load.reading import EventCache  # noqa: PLC0415 - torch

        cache = EventCache(self.key, self.name)
        async for rows in self._pages(wanted):
            for experience in await load_experiences(self.database, cache, rows, families):
                yield experience

    async def _pages(self, wanted: writer_queries.Filter) -> AsyncIterator[list[ExperienceRow]]:
        """Yield pages of the wanted rows by address; known addresses are looked up directly."""
        most, known = sizes.experiences_per_page, sorted(wanted.addresses or ())
        read, of = self.database.read, self.key
        for start in range(0, len(known), most):
            page = tuple(known[start : start + most])
            named = replace(wanted, addresses=page)
            yield await read(writer_queries.experiences, of, named, after=-1, limit=most)
        after = -1
        while wanted.addresses is None:
            rows = await read(writer_queries.experiences, of, wanted, after=after, limit=most)
            if not rows:
                return
            yield rows
            after = rows[-1].address

    async def _checked_state(
        self, name: str | None, state: writer_queries.State | None
    ) -> writer_queries.State:
        """Return the state to read, checked against the registered sets."""
        if state not in (None, *(states := get_args(writer_queries.State))):
            raise errors.InvalidArgumentError(f"state={state!r}: accepted are {', '.join(states)}")
        if name is None:
            raise errors.InvalidArgumentError(f"state={state!r} of which set? say annotation_set=")
        consumers = await self.database.read(writer_queries.consumers, self.key)
        # Trainers are consumers too, but have no annotations.
        names = [consumer.name for consumer in consumers.values() if consumer.kind == "strategy"]
        if name not in names:
            known = ", ".join(names) or "none"
            raise errors.UnknownNameError(f"no annotation set {name!r} (there: {known})")
        return state or "annotated"

    async def _rows_of_step(self, trainer: str, step: int) -> tuple[int, ...]:
        """Return the addresses of this experiment's rows in a step's manifest."""

        def load(tx: Transaction) -> facts.BatchLeased | None:
            if (row := trainer_queries.step_at(tx, self.key, trainer, step)) is None:
                return None
            return leased_steps(tx, self.key, self.name, [row.leased_at])[row.leased_at].manifest

        if (leased := await self.database.read(load)) is None:
            raise errors.UnknownNameError(f"trainer {trainer!r} was never handed step {step}")
        sources = leased.source or [0] * len(leased.experiences)
        pairs = zip(leased.experiences, sources, strict=True)
        return tuple(sorted({address for address, source in pairs if source == 0}))

    async def publish_policy(
        self, version: int, uri: str, *, digest: str = "", actor: str = "user"
    ) -> None:
        """Record that the weights of policy ``version`` are at ``uri``; explorers load them.

        Args:
            version: their number, 0 or more. It may be below the newest one only after a trainer
                was rewound.
            uri: path, or the address of a server.
            digest: digest of the file, as `checkpoint.digest_of` computes it: explorers refuse a
                different file; "": explorers load any file.

        Raises:
            InvalidArgumentError: not a valid version, address or digest.
            ConflictError: a newer version is published.
        """
        _check_policy(version, uri, digest)
        event = new_event(facts.PolicyPublished(number=version, uri=uri, digest=digest))

        def publish(tx: Transaction) -> None:
            tx.lock(self.key)
            newest = writer_queries.newest_of_followed(tx, self.key)
            newest_version, _, _, after = newest or (version, "", "", 0)
            if version < newest_version and not log.read_after(
                tx, self.key, after, limit=1, kinds=facts.kinds_of(facts.TrainerRewound)
            ):
                raise errors.ConflictError(
                    f"experiment {self.name!r}: policy {newest_version} is published (position "
                    f"{after}), so {version} is not news; to go back, rewind the trainer with "
                    "resume_from="
                )
            self._append(tx, event, actor)

        await self.database.write(publish)

    async def columns(self) -> frozenset[str] | None:
        """Return the fields of the first readable experience; None if none can be read."""
        with suppress(errors.ArchivedSegmentError):
            async for experience in self.read():
                if experience.damaged is not None:
                    continue
                fields = experience.__dict__.items()
                return frozenset(name for name, value in fields if value is not None)
        return None

    async def newest_policy(self) -> PublishedPolicy | None:
        """Return the policy that was published last, or None.

        If several trainers publish, only the one that the configuration names (``trainer``) counts,
        as it is now: explorers follow one model.
        """
        newest = await self.database.read(writer_queries.newest_of_followed, self.key)
        if newest is None:
            return None
        version, uri, digest, position = newest
        path = resolve_moved(uri, digest or None, self.database.folder)
        return PublishedPolicy(version, str(path) if digest else uri, digest, position)

    async def committed_step(self, trainer: str = "trainer") -> int:
        """Return the last committed step of the live line of ``trainer``, or 0."""
        row = await self.database.read(writer_queries.consumer_row, self.key, trainer)
        return 0 if row is None else row.committed_step

    async def last_checkpoint(self, trainer: str = "trainer") -> str | None:
        """Return the checkpoint of the last committed step that has one, on the live line."""
        last = await self.database.read(trainer_queries.last_checkpoint, self.key, trainer)
        if last is None or last.checkpoint is None:
            return None
        return str(resolve_moved(last.checkpoint, last.checkpoint_digest, self.database.folder))

    def train_stream(self, **options: Any) -> AbstractAsyncContextManager[TrainStream]:
        """Open the stream of gradient steps, an async context manager; see `StreamOptions`."""
        from trinity_buffer.pipeline.train.stream import open_async_train_stream  # noqa: PLC0415 - torch

        return open_async_train_stream(self, **options)


def _check_policy(version: object, uri: object, digest: object) -> None:
    if type(version) is not int or not 0 <= version < 1 << 63:
        raise errors.InvalidArgumentError(
            f"policy version {version!r:.40}: it must be an int, 0 or more"
        )
    if not isinstance(uri, str) or not 0 < len(uri) <= MAX_URI or not uri.isprintable():
        raise errors.InvalidArgumentError(
            f"policy {version}: uri={uri!r:.80}: give a path or the address of a server"
        )
    if (problem := problem_of_name(digest)) is not None:
        raise errors.InvalidArgumentError(f"policy {version}: digest {problem}")


class Store:
    """An open store. Made by `open_store`; closed by leaving its context.

    Attributes:
        database: connections and transactions; for tools that only read.
        group_commit: commits for all its writers; None as long as there are none.
    """

    def __init__(self, database: Database) -> None:
        self.database = database
        self.group_commit: GroupCommit | None = None

    @property
    def url(self) -> str:
        """Where the store is, without a password."""
        return self.database.name

    async def settle(self) -> None:
        """Wait until every write under way has ended, also those of cancelled callers."""
        if self.group_commit is not None:
            await self.group_commit.drain()

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
        stored = await self.database.read(handle.experiment_called, name)
        if stored is None:  # older versions accepted any text
            require_name("an experiment's name", name)
        if config is None or self.database.read_only:
            if stored is not None:
                return Experiment(self, stored[0], name, stored[1])
            known = ", ".join(await self.experiments()) or "none"
            remedy = "" if self.database.read_only else "; pass config={} to create it"
            raise errors.UnknownExperimentError(
                f"{self.url} holds no experiment {name!r} (there: {known}){remedy}"
            )
        wanted = handle.as_json(f"the config of experiment {name!r}", renamed(config))
        if schema is not None:
            wanted = {"schema": schema, **wanted}
        fresh = {"schema": "experience", **wanted}
        if fresh["schema"] not in SCHEMAS:
            raise errors.InvalidArgumentError(
                f"experiment {name!r}: schema={fresh['schema']!r}, accepted are "
                f"{', '.join(SCHEMAS)}"
            )
        created = new_event(facts.ExperimentCreated(config=fresh))
        change = partial(_create_or_change, name=name, wanted=wanted, fresh=fresh, created=created)
        its_key, current = await self.database.write(change, actor=actor)
        return Experiment(self, its_key, name, current)


def _create_or_change(
    tx: Transaction,
    name: str,
    wanted: dict[str, Any],
    fresh: dict[str, Any],
    created: facts.NewEvent,
    actor: str,
) -> tuple[int, dict[str, Any]]:
    """Create an experiment or record its changed configuration; return key and configuration."""
    from trinity_buffer.pipeline.config import CONFIG, EXTRA, refuse_unknown, require_values  # noqa: PLC0415 - all options

    key = log.create_experiment(tx, name)
    tx.lock(key)
    stored = handle.config_of(tx, key, name)
    old = stored or {}
    changes = {k: [old.get(k), v] for k, v in wanted.items() if k not in old or old[k] != v}
    new = {k: wanted[k] for k in changes}
    known = ("schema", EXTRA, *(k for k in old if k not in CONFIG))  # of an older version
    remedy = f" Keep what is your own under {EXTRA!r}"
    refuse_unknown(new, f"experiment {name!r}: ", known, remedy)
    if stored is None:
        require_values(name, wanted)
        log.append(tx, key, [(actor, created)])
        return key, fresh
    require_values(name, new)
    if "schema" in changes:  # it describes what is stored
        then, now = changes["schema"]
        raise errors.InvalidArgumentError(
            f"experiment {name!r} has schema={then!r}, which cannot become {now!r}; create another "
            "experiment"
        )
    after = {**old, **wanted}
    if changes:
        event = new_event(facts.ConfigurationChanged(changes=changes, config=after))
        log.append(tx, key, [(actor, event)])
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
    opened = open_database(url, read_only=read_only, durability=durability, create=create)
    async with opened as database:
        store = Store(database)
        try:
            yield store
        finally:
            await store.settle()
