"""Two roads to one schema, and the refusal of every other database."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pysqlite3 import dbapi2
from sqlalchemy import text

from tests.handles import Transaction
from tests.whole_stores import downgrade, migrate, open_for_migration, revisions
from trinity_buffer import open_store
from trinity_buffer.errors import (
    InvalidArgumentError,
    SchemaOutdatedError,
    SchemaTooNewError,
    StoreError,
    UnknownStoreError,
)
from trinity_buffer.pipeline.history import migrate as migrations
from trinity_buffer.store import schema, sqlite, tables
from trinity_buffer.store.connection import open_database
from trinity_buffer.store.schema import clauses_of

SQLITE_SCHEMA = "SELECT type, name, tbl_name, sql FROM sqlite_master WHERE name NOT LIKE 'sqlite_%'"

# Everything that PostgreSQL knows of our schema, each as one text.
POSTGRESQL_SCHEMA = (
    "SELECT table_name || '.' || column_name, ordinal_position::text || data_type || is_nullable "
    "|| coalesce(column_default, '') FROM information_schema.columns WHERE table_schema = 'public'",
    "SELECT conrelid::regclass || ' ' || conname, pg_get_constraintdef(oid) FROM pg_constraint "
    "WHERE connamespace = 'public'::regnamespace",
    "SELECT indexname, indexdef FROM pg_indexes WHERE schemaname = 'public'",
    "SELECT tgrelid::regclass || ' ' || tgname, pg_get_triggerdef(oid) FROM pg_trigger "
    "WHERE NOT tgisinternal",
    "SELECT proname, pg_get_functiondef(oid) FROM pg_proc "
    "WHERE pronamespace = 'public'::regnamespace",
    "SELECT sequencename, data_type::text FROM pg_sequences WHERE schemaname = 'public'",
    "SELECT viewname, definition FROM pg_views WHERE schemaname = 'public'",
    "SELECT attrelid::regclass || '.' || attname, attstorage::text FROM pg_attribute "
    "WHERE attnum > 0 AND attrelid = 'segment'::regclass",
)


async def schema_of(url: str) -> set[tuple[str, ...]]:
    """Return everything that the database says of its schema, columns in their order."""
    async with open_for_migration(url) as database:
        return await database.read(_schema_of)


def _schema_of(tx: Transaction) -> set[tuple[str, ...]]:
    found: set[tuple[str, ...]] = set()
    if tx.dialect.name == "sqlite":
        for kind, name, table, sql in tx.execute(text(SQLITE_SCHEMA)).all():
            found.add((kind, name, table, *clauses_of(sql)))
        return found
    for number, query in enumerate(POSTGRESQL_SCHEMA):
        rows = tx.execute(text(query)).all()
        assert rows
        found |= {(str(number), *row) for row in rows}
    return found


async def migrated(url: str) -> None:
    if url.startswith("sqlite"):
        sqlite.prepare_file(Path(url.removeprefix("sqlite:///")))
    async with open_for_migration(url) as database:
        await database.write(migrations.upgrade)


async def emptied(url: str) -> None:

    def empty(tx: Transaction) -> None:
        downgrade(tx, "base")
        tx.execute(text("DROP TABLE alembic_version"))

    async with open_for_migration(url) as database:
        await database.write(empty)


async def test_a_created_and_a_migrated_store_have_one_schema(store_url: str) -> None:
    async with open_store(store_url):
        pass
    created = await schema_of(store_url)
    await emptied(store_url)
    if store_url.startswith("sqlite"):
        assert not await schema_of(store_url)
    await migrated(store_url)
    assert await schema_of(store_url) == created
    joined = " ".join(" ".join(row) for row in created)
    for name in ("event_forbids_delete", "segment_forbids_delete", "ck_event_position", "rollouts"):
        assert name in joined
    if store_url.startswith("sqlite"):
        assert "AUTOINCREMENT" in joined
        assert "WITHOUT ROWID" in joined


async def test_the_comparison_sees_what_a_missing_check_changes() -> None:
    one = clauses_of("CREATE TABLE a (b INTEGER, CHECK (b > 1)) WITHOUT ROWID")
    assert one != clauses_of("CREATE TABLE a (b INTEGER) WITHOUT ROWID")
    assert one != clauses_of("CREATE TABLE a (b INTEGER, CHECK (b > 1))")
    assert one == clauses_of(
        'CREATE TABLE "a" (\n\tb INTEGER, \n\tCHECK (b > 1)\n)\n WITHOUT ROWID'
    )
    two = clauses_of("CREATE TABLE a (b INTEGER, c TEXT)")
    assert two != clauses_of("CREATE TABLE a (c TEXT, b INTEGER)")


async def test_a_filled_store_goes_down_and_up_again(store_url: str) -> None:
    async with open_store(store_url) as store:
        experiment = await store.experiment("sort", config={})
        await experiment.writer("e0").plan("b", [1, 2], 4)
    before = await schema_of(store_url)
    async with open_for_migration(store_url) as database:
        await database.write(downgrade, "base")
    async with open_for_migration(store_url) as database:
        await database.write(migrations.upgrade)
    assert await schema_of(store_url) == before
    async with open_store(store_url) as store:
        assert await store.experiments() == []
        experiment = await store.experiment("again", config={})
        assert [event.kind async for event in experiment.events()] == ["ExperimentCreated"]


async def test_an_interrupted_migration_has_not_happened(store_url: str) -> None:
    async with open_store(store_url) as store:
        await store.experiment("sort", config={})
    before = await schema_of(store_url)
    with pytest.raises(InvalidArgumentError, match="stop"):
        await go_down_and_fail(store_url)
    assert await schema_of(store_url) == before
    async with open_store(store_url) as store:
        assert await store.experiments() == ["sort"]


async def go_down_and_fail(url: str) -> None:

    def fail(tx: Transaction) -> None:
        downgrade(tx, "base")
        raise InvalidArgumentError("stop")

    async with open_for_migration(url) as database:
        await database.write(fail)


def test_the_tables_are_those_of_the_last_migration() -> None:
    assert revisions() == list(schema.KNOWN_REVISIONS)
    assert revisions()[-1] == tables.SCHEMA_REVISION


async def stamp(url: str, revision: str) -> None:
    new = text("UPDATE alembic_version SET version_num = :r")
    async with open_for_migration(url) as database:
        await database.write(lambda tx: tx.execute(new, {"r": revision}))


async def test_an_older_store_is_refused_with_the_command_that_mends_it(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_store(store_url):
        pass
    monkeypatch.setattr(tables, "SCHEMA_REVISION", "9999")
    with pytest.raises(SchemaOutdatedError, match="trinity-buffer migrate --store"):
        async with open_store(store_url):
            pass


async def test_a_newer_store_is_refused_with_the_command_that_mends_it(store_url: str) -> None:
    async with open_store(store_url):
        pass
    await stamp(store_url, "9999")
    with pytest.raises(SchemaTooNewError, match="pip install --upgrade trinity-buffer"):
        async with open_store(store_url):
            pass
    with pytest.raises(SchemaTooNewError, match="9999"):
        await migrate(store_url)


async def test_migrating_what_is_up_to_date_changes_nothing(store_url: str) -> None:
    async with open_store(store_url):
        pass
    before = await schema_of(store_url)
    assert await migrate(store_url) == (tables.SCHEMA_REVISION, tables.SCHEMA_REVISION)
    assert await schema_of(store_url) == before


async def test_a_database_of_somebody_else_is_left_alone(store_url: str) -> None:
    await create_foreign(store_url)
    before = await schema_of(store_url) if store_url.startswith("sqlite") else None
    for opening in (open_database(store_url), open_database(store_url, read_only=True)):
        with pytest.raises(UnknownStoreError, match="is not a Trinity Buffer store"):
            async with opening:
                pass
    with pytest.raises(UnknownStoreError, match="is not a Trinity Buffer store"):
        await migrate(store_url)
    assert before is None or await schema_of(store_url) == before


async def create_foreign(url: str) -> None:
    if url.startswith("sqlite"):
        with dbapi2.connect(url.removeprefix("sqlite:///")) as connection:
            connection.execute("CREATE TABLE customer (id INTEGER)")
        connection.close()
        return
    async with open_for_migration(url) as database:
        await database.write(lambda tx: tx.execute(text("CREATE TABLE customer (id INTEGER)")))


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("read_only", [False, True])
async def test_a_text_file_is_no_store_and_stays_as_it_is(tmp_path: Path, read_only: bool) -> None:
    file = tmp_path / "notes.db"
    file.write_text("Dear diary, " * 500)
    with pytest.raises(UnknownStoreError, match=re.escape(str(file))):
        async with open_store(str(file), read_only=read_only):
            pass
    assert file.read_text() == "Dear diary, " * 500
    assert names_in(tmp_path) == ["notes.db"]


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("missing/run.db", "no such directory; create it first"),
        ("folder", "is a directory; name a file in it"),
        ("", "is a directory; name a file in it"),
    ],
)
async def test_a_place_that_can_hold_no_store_is_named(
    tmp_path: Path, place: str, said: str
) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(UnknownStoreError, match=said):
        async with open_store(f"sqlite:///{tmp_path / place}"):
            pass
    assert names_in(tmp_path) == ["folder"]


async def test_reading_creates_nothing(tmp_path: Path) -> None:
    with pytest.raises(UnknownStoreError, match="there is no store to read"):
        async with open_store(f"sqlite:///{tmp_path / 'a.db'}", read_only=True):
            pass
    with pytest.raises(UnknownStoreError, match="there is no store to read"):
        await migrate(f"sqlite:///{tmp_path / 'a.db'}")
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("url", ["mysql://host/a", "sqlite:///:memory:", "sqlite://", "a://b://c"])
async def test_a_url_that_can_be_no_store_is_refused(url: str) -> None:
    with pytest.raises((InvalidArgumentError, StoreError)):
        async with open_store(url):
            pass


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        ("INSERT INTO alembic_version VALUES ('0001')", f"0001, {tables.SCHEMA_REVISION}"),
        ("DELETE FROM alembic_version", "none"),
    ],
)
async def test_a_store_of_no_one_revision_is_named_as_damaged(
    store_url: str, edit: str, said: str
) -> None:
    async with open_store(store_url):
        pass
    async with open_for_migration(store_url) as database:
        await database.write(lambda tx: tx.execute(text(edit)))
    with pytest.raises(UnknownStoreError, match=f"alembic_version names {said}, where"):
        await open_store(store_url).__aenter__()
    with pytest.raises(UnknownStoreError, match=f"alembic_version names {said}, where"):
        await migrate(store_url)
