"""Long blobs are filled in place, and read piece by piece."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import Resize
from tests.contract.making import group, opened
from tests.handles import Transaction
from tests.raw_store import dbapi2
from trinity_buffer.codec.blob import Buffer, mapped, writable
from trinity_buffer.codec.segments import decode_segment
from trinity_buffer.errors import StoreError
from trinity_buffer.pipeline import encoding
from trinity_buffer.store import segments
from trinity_buffer.store.connection import FILLED_BYTES
from trinity_buffer.store.sqlite import open_blob

SIZES = (0, 1, FILLED_BYTES - 1, FILLED_BYTES, FILLED_BYTES + 1, 3 * FILLED_BYTES)


async def test_blobs_of_any_size_and_in_any_pieces_come_back(store_url: str) -> None:
    async with opened(store_url) as experiment:
        store, key = experiment.database.segments, segments.new_key()
        whole = bytes(range(251)) * (4 * FILLED_BYTES // 251)
        given: dict[str, list[Buffer]] = {
            f"f{size}": [whole[: size // 3], memoryview(whole)[size // 3 : size]] for size in SIZES
        }
        rows = store.put(key, given)
        await experiment.database.write(lambda tx: store.attach(tx, rows))
        found = await experiment.database.read_session(lambda s: store.get(s, [key], list(given)))
    blobs = {family: segments.blob_of(key, family, found[key, family]) for family in given}
    assert blobs == {family: b"".join(pieces) for family, pieces in given.items()}


@pytest.mark.parametrize("at_once", [1, 7, FILLED_BYTES, FILLED_BYTES + 1])
async def test_blobs_that_are_read_in_pieces_are_those_that_are_read_whole(
    at_once: int, new_sqlite_url: str, resize: Resize
) -> None:
    async with opened(new_sqlite_url) as experiment:
        database, key = experiment.database, segments.new_key()
        given = {f"f{size}": (bytes(range(251)) * 200)[:size] for size in (0, 1, 7, 8, 40_000)}
        rows = database.segments.put(key, {family: [blob] for family, blob in given.items()})
        await database.write(lambda tx: database.segments.attach(tx, rows))
        resize(bytes_read_at_once=at_once)
        read = database.segments.get
        found = await database.read_session(lambda s: read(s, [key], list(given)))
    for family, blob in given.items():
        ((part, checksum, data),) = found[key, family]
        assert (part, checksum) == (0, segments.checksum(key, family, 0, blob))
        assert data == blob
        assert isinstance(data, memoryview) == (len(blob) > at_once)


async def test_what_is_read_in_pieces_is_no_copy_and_not_the_store(
    new_sqlite_url: str, resize: Resize, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Any] = []

    def decoded(blob: Buffer) -> Any:
        read.append(blob)
        return decode_segment(blob)

    monkeypatch.setattr(encoding, "decode_segment", decoded)
    resize(bytes_read_at_once=1)
    async with opened(new_sqlite_url, rollouts_per_group=4) as experiment:
        given = group()
        await experiment.writer("e0").write(given)
        for _ in range(2):
            found = [one async for one in experiment.read()]
            assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(found, given, strict=True))
            for one in found:
                one.tokens.fill_(7)
    assert {type(blob) for blob in read} == {memoryview}


def test_bytes_are_copied_before_they_are_written() -> None:
    kept = b"abc"
    for given in (kept, memoryview(kept)):
        changed = writable(given)
        memoryview(changed)[0] = 0
        assert (kept, bytes(changed)) == (b"abc", b"\0bc")
    for own in (bytearray(kept), mapped(3)):
        assert writable(own) is own


async def test_nothing_of_a_long_blob_stays_where_the_transaction_fails(
    new_sqlite_url: str,
) -> None:
    async with opened(new_sqlite_url) as experiment:
        database, key = experiment.database, segments.new_key()
        rows = database.segments.put(key, {"light": [bytes(2 * FILLED_BYTES)]})

        def fail(tx: Transaction) -> None:
            database.segments.attach(tx, rows)
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
