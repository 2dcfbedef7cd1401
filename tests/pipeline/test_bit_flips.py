"""One bit of a store is flipped: it is named, or nothing that is stored is another."""

from __future__ import annotations

import random
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pysqlite3 import dbapi2

from tests.contract.making import opened, rollout
from tests.raw_store import guards, metadata
from tests.sample_run import SampleRun
from tests.whole_stores import rebuild
from trinity_buffer import open_store, verify
from trinity_buffer.errors import StoreError, TrinityBufferError

PER_TEST = 10


def everything(path: Path) -> dict[str, list[Any]]:
    """Return all rows of all tables that follow from the log, and the schema but for its spaces."""
    with closing(dbapi2.connect(str(path))) as connection:
        connection.text_factory = bytes
        names = [row[0].decode() for row in connection.execute(TABLES)]
        found = {name: connection.execute(f'SELECT * FROM "{name}"').fetchall() for name in names}
        schema = connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_master")
        found["schema"] = [
            tuple(b" ".join((word or b"").split()) for word in row) for row in schema
        ]
        assert connection.execute("PRAGMA integrity_check").fetchall() == [(b"ok",)]
    return {name: sorted(rows, key=repr) for name, rows in found.items()}


TABLES = "SELECT name FROM sqlite_master WHERE type = 'table' AND name <> 'presence'"
"""Who is there is in no event: each process says it anew while it lives."""


async def is_named(sample: SampleRun) -> bool:
    """Return whether a full look says that something is wrong. No foreign error may escape."""
    try:
        async with open_store(sample.url, read_only=True) as store:
            report = await verify(await store.experiment(sample.name))
    except TrinityBufferError:
        return True
    return not report.ok


def file_of(sample: SampleRun) -> Path:
    return Path(sample.url.removeprefix("sqlite:///"))


def size_of(path: Path) -> int:
    return path.stat().st_size


def copy_flipped(original: Path, path: Path, place: int, bit: int) -> None:
    flipped = bytearray(original.read_bytes())
    flipped[place] ^= 1 << bit
    path.write_bytes(flipped)


async def flip(sample: SampleRun, folder: Path, numbers: range) -> None:
    original, path = file_of(sample), folder / "flipped.db"
    sound, size = everything(original), size_of(original)
    unseen: list[str] = []
    for number in numbers:
        draw = random.Random(number)
        place, bit = draw.randrange(size), draw.randrange(8)
        copy_flipped(original, path, place, bit)
        named = await is_named(replace(sample, url=f"sqlite:///{path}"))
        if not named and everything(path) != sound:
            unseen.append(f"flip {number}: byte {place}, bit {bit}")
    assert not unseen


@pytest.mark.parametrize("first", range(0, 40, PER_TEST))
async def test_a_flipped_bit_is_named_or_changes_nothing(
    sqlite_sample: SampleRun, tmp_path: Path, first: int
) -> None:
    await flip(sqlite_sample, tmp_path, range(first, first + PER_TEST))


@pytest.mark.long
@pytest.mark.parametrize("first", range(40, 1040, 250))
async def test_a_thousand_flipped_bits_are_named_or_change_nothing(
    sqlite_sample: SampleRun, tmp_path: Path, first: int
) -> None:
    await flip(sqlite_sample, tmp_path, range(first, first + 250))


async def test_a_schema_that_is_no_text_is_named(sqlite_sample: SampleRun, tmp_path: Path) -> None:
    """SQLite quotes it in its message, which Python then cannot read."""
    path = tmp_path / "flipped.db"
    place = file_of(sqlite_sample).read_bytes().index(b"EATE TABLE annotation")
    copy_flipped(file_of(sqlite_sample), path, place, 7)
    assert await is_named(replace(sqlite_sample, url=f"sqlite:///{path}"))


async def test_a_flipped_bit_in_a_unique_index_is_named(
    sqlite_sample: SampleRun, tmp_path: Path
) -> None:
    """Else writing twice would be writing twice: the index would not find what is stored."""
    for number, place in enumerate(places_of_index(sqlite_sample)[:3]):
        path = tmp_path / f"{number}.db"
        copy_flipped(file_of(sqlite_sample), path, place, 0)
        assert await is_named(replace(sqlite_sample, url=f"sqlite:///{path}"))


def places_of_index(sample: SampleRun) -> list[int]:
    """Return where the entries of the unique index of experiences lie in the file."""
    path = sample.url.removeprefix("sqlite:///")
    with closing(dbapi2.connect(path)) as connection:
        (root,) = connection.execute(
            "SELECT rootpage FROM sqlite_master WHERE name = 'uq_experience_eid'"
        ).fetchone()
        (size,) = connection.execute("PRAGMA page_size").fetchone()
    page = Path(path).read_bytes()[(root - 1) * size : root * size]
    found = [at for at in range(len(page) - 2) if page[at : at + 2] == b"b0"]
    assert found
    return [(root - 1) * size + at for at in found]


async def test_what_is_no_json_any_more_is_named_and_mended(sqlite_sample: SampleRun) -> None:
    path = file_of(sqlite_sample)
    sound = everything(path)
    with closing(dbapi2.connect(str(path))) as connection, connection:
        connection.execute("UPDATE consumer SET config = replace(config, ':', '2')")
    assert await is_named(sqlite_sample)
    async with open_store(sqlite_sample.url) as store:
        experiment = await store.experiment(sqlite_sample.name)
        await rebuild(experiment.database, experiment.key)
    assert everything(path) == sound


@pytest.mark.parametrize(
    ("table", "column", "value"),
    [
        ("configuration", "config", "'-1'"),
        ("batch", "batch", "x'6230'"),
        ("experience", "refused", "x'6c617465'"),
        ("consumer", "name", "x'6772706f'"),
        ("consumer", "config", "'[1]'"),
        ("consumer", "cursor", "'abc'"),
        ("waiting", "consumer", "x'6772706f'"),
        ("rejection", "reason", "x''"),
        ("delivery", "source", "x''"),
        ("assigned_reward", "scoring", "x'ff'"),
        ("counter", "number", "'many'"),
        ("counter", "key", "x'00'"),
        ("archived", "segment", "'a text'"),
        ("archived", "segment", "7"),
    ],
)
async def test_a_value_of_another_type_in_a_projection_is_named_and_mended(
    sqlite_sample: SampleRun, table: str, column: str, value: str
) -> None:
    path = file_of(sqlite_sample)
    sound = everything(path)
    with closing(dbapi2.connect(str(path))) as connection, connection:
        keys = ", ".join(key.name for key in metadata.tables[table].primary_key)
        first = f"({keys}) = (SELECT {keys} FROM {table} LIMIT 1)"
        connection.execute(f"UPDATE {table} SET {column} = {value} WHERE {first}")
    assert await is_named(sqlite_sample)
    async with open_store(sqlite_sample.url) as store:
        await rebuild(store.database, 1)
    assert everything(path) == sound
    assert not await is_named(sqlite_sample)  # `everything` takes a text for its bytes


async def test_a_name_that_is_no_text_is_named(sqlite_sample: SampleRun) -> None:
    async with open_store(sqlite_sample.url) as store:
        await store.experiment("other", config={})
    (guard,) = (one for one in guards("sqlite") if one.name == "experiment_forbids_update")
    with closing(dbapi2.connect(str(file_of(sqlite_sample)))) as connection, connection:
        connection.execute(f"DROP TRIGGER {guard.name}")
        connection.execute("UPDATE experiment SET name = CAST(name AS BLOB) WHERE id = 1")
        connection.execute(guard.statements("sqlite")[0])
    what = "the name of experiment 1 is b'sort', which is no text: restore"
    async with open_store(sqlite_sample.url, read_only=True) as store:
        with pytest.raises(StoreError, match=what):
            await store.experiments()
        with pytest.raises(StoreError, match=what):
            await store.experiment(sqlite_sample.name)
        (problem,) = (await verify(await store.experiment("other"))).problems
    assert problem.check == "database"
    assert what in problem.what


def cell_of_blob(path: Path, family: str) -> tuple[int, int]:
    """Return where the type and size of a segment's blob lie in the file, and of how many bytes."""
    with closing(dbapi2.connect(str(path))) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        query = "SELECT key, length(data) FROM segment WHERE family = ? ORDER BY rowid"
        key, size = connection.execute(query, (family,)).fetchone()
    kind = 2 * size + 12
    said = [kind & 0x7F]
    while kind := kind >> 7:
        said.insert(0, 0x80 | kind & 0x7F)
    # Before it, those of a key of 16 bytes, the family, part 0 and a checksum; then the key itself.
    before = bytes((44, 2 * len(family) + 13, 8, 6))
    return path.read_bytes().rindex(before + bytes(said) + key) + len(before), len(said)


@pytest.mark.parametrize("tokens", [8, 2_000, 11_000, 100_000])  # no number, 2, NULL, a long one
async def test_a_flipped_bit_that_makes_no_blob_of_a_blob_damages_its_rows_alone(
    sqlite_url: str, tmp_path: Path, tokens: int
) -> None:
    async with opened(sqlite_url) as experiment:
        writer = experiment.writer("e0")
        for task in range(2):
            await writer.write([rollout(task=task, length=tokens)])
    original = Path(sqlite_url.removeprefix("sqlite:///"))
    start, size = cell_of_blob(original, "tokens")
    for place, bit in [(start + n, 7) for n in range(size - 1)] + [(start + size - 1, 0)]:
        path = tmp_path / f"{place}-{bit}.db"
        copy_flipped(original, path, place, bit)
        async with open_store(f"sqlite:///{path}", read_only=True) as store:
            experiment = await store.experiment("run")
            report = await verify(experiment)
            read = [one.damaged is None async for one in experiment.read()]
        assert "segments" in {problem.check for problem in report.problems}
        assert read == [False, True]


async def test_a_flipped_bit_that_makes_another_type_of_a_value_of_an_event_is_named(
    sqlite_sample: SampleRun, tmp_path: Path
) -> None:
    original = file_of(sqlite_sample)
    sound = everything(original)  # closes its log, too
    with closing(dbapi2.connect(str(original))) as connection:
        query = "SELECT actor, recorded_at FROM event WHERE kind = 'ExperiencesRecorded'"
        actor, at = connection.execute(query).fetchone()
    said = b"ExperiencesRecorded" + actor.encode() + at.to_bytes(8, "big")
    start = original.read_bytes().rindex(said)  # the types of the row precede it
    for place in range(start - 8, start):
        for bit in (0, 7):
            path = tmp_path / f"{place}-{bit}.db"
            copy_flipped(original, path, place, bit)
            named = await is_named(replace(sqlite_sample, url=f"sqlite:///{path}"))
            assert named or everything(path) == sound
