"""Long blobs are filled in place."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests.contract.making import opened
from trinity_buffer.blob import Blob, Buffer
from trinity_buffer.errors import StoreError
from trinity_buffer.store import segments
from trinity_buffer.store.sqlite import dbapi2, open_blob
from trinity_buffer.store.sqlite_seats import FILLED_BYTES
from trinity_buffer.store.transaction import Transaction

SIZES = (0, 1, FILLED_BYTES - 1, FILLED_BYTES, FILLED_BYTES + 1, 3 * FILLED_BYTES)


async def test_blobs_of_any_size_and_in_any_pieces_come_back(store_url: str) -> None:
    async with opened(store_url) as experiment:
        store, key = experiment.database.segments, segments.new_key()
        whole = bytes(range(251)) * (4 * FILLED_BYTES // 251)
        given: dict[str, list[Buffer]] = {
            f"f{size}": [whole[: size // 3], memoryview(whole)[size // 3 : size]] for size in SIZES
        }
        rows = store.put(key, {family: Blob(pieces) for family, pieces in given.items()})
        await experiment.database.write(lambda tx: store.take_in(tx, rows))
        found = await experiment.database.read_session(lambda s: store.get(s, [key], list(given)))
    blobs = {family: segments.blob_of(key, family, found[key, family]) for family in given}
    assert blobs == {family: b"".join(pieces) for family, pieces in given.items()}


async def test_nothing_of_a_long_blob_stays_where_the_transaction_fails(sqlite_url: str) -> None:
    async with opened(sqlite_url) as experiment:
        database, key = experiment.database, segments.new_key()
        rows = database.segments.put(key, {"light": bytes(2 * FILLED_BYTES)})

        def fail(tx: Transaction) -> None:
            database.segments.take_in(tx, rows)
            raise StoreError("after it was filled")

        with pytest.raises(StoreError, match="after it was filled"):
            await database.write(fail)
        assert key not in await database.read(database.segments.keys)


@pytest.mark.parametrize("library", [dbapi2, sqlite3])
def test_both_libraries_fill_a_value_in_place(library: object, tmp_path: Path) -> None:
    connect = library.connect  # type: ignore[attr-defined]  # of a module
    with closing(connect(str(tmp_path / "x.db"))) as connection:
        connection.execute("CREATE TABLE t (a, b)")
        row = connection.execute("INSERT INTO t VALUES (1, zeroblob(3))").lastrowid
        with closing(open_blob(connection, "t", "b", row)) as room:
            room.write(b"a")
            room.write(memoryview(b"bc"))
        assert connection.execute("SELECT b FROM t").fetchall() == [(b"abc",)]
