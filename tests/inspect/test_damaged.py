"""Questions about many rows go on behind what is damaged, and name the rows that it belongs to."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import anyio
import pytest
from sqlalchemy import delete, update
from starlette.testclient import TestClient

import trinity_buffer as tb
from tests.cli.calling import Cli, Ended
from tests.cli.conftest import cli  # noqa: F401 - a fixture
from tests.handles import Transaction
from tests.pipeline.edits import rows_of
from tests.pipeline.planting import unguarded
from tests.raw_store import sql
from tests.sample_run import RUNS, record_sample_run
from trinity_buffer.codec.objects import decode_body
from trinity_buffer.errors import CodecError, DamagedSegmentError
from trinity_buffer.inspector import blame, groups, search, steps, why
from trinity_buffer.inspector.source import now
from trinity_buffer.inspector.table import record_batches
from trinity_buffer.store.tables import event, segment
from trinity_buffer.web.app import inspector

HOW = ["changed", "gone", "event", "deleted"]
DAMAGED = [f"b0/0/{run}/0/" for run in range(RUNS)]


def damaged_store(url: str, folder: Path, kind: str, how: str) -> int:
    """Record a sample run and damage an event of a kind, or its segment; return its position.

    It is the first one of what was recorded, and the last one, of ``varied``, of annotations.
    """

    def damage(tx: Transaction) -> int:
        row = rows_of(tx, kind)[0 if kind == "ExperiencesRecorded" else -1]
        own = segment.c.key == decode_body(kind, row.body)["segment"]
        if how == "event":
            tx.execute(update(event).where(event.c.position == row.position).values(body=b"\xc1"))
        elif how == "deleted":
            tx.execute(delete(event).where(event.c.position == row.position))
        elif how == "gone":
            tx.execute(delete(segment).where(own))
        else:
            tx.execute(update(segment).where(own).values(data=b"nonsense"))
        return int(row.position)

    anyio.run(record_sample_run, url, folder / "run")
    return anyio.run(unguarded, url, damage)


def named(ended: Ended, position: int) -> list[str]:
    """Return the rows that a command named, which ended with an error for them alone."""
    assert ended.code == 1
    lines = [line.removeprefix("error: ") for line in ended.err.splitlines() if "error" in line]
    assert all(f": event {position} cannot be read: " in line for line in lines)
    return [line.partition(": ")[0] for line in lines]


@pytest.mark.long
@pytest.mark.parametrize("how", HOW)
def test_search_and_export_go_on_behind_what_is_damaged(
    cli: Cli,  # noqa: F811
    store_url: str,
    tmp_path: Path,
    how: str,
) -> None:
    position = damaged_store(store_url, tmp_path, "ExperiencesRecorded", how)
    given = ("--store", store_url, "--json")
    ended = cli("search", "and", "--limit", 14, *given)
    assert named(ended, position) == DAMAGED
    assert len(ended.json) == 13
    assert not {row["uid"] for row in ended.json} & set(DAMAGED)
    assert named(cli("search", "and", "--limit", 1, *given), position) == DAMAGED
    file = tmp_path / "run.jsonl"
    ended = cli("export", "-o", file, *given)
    assert named(ended, position) == DAMAGED
    found = [json.loads(line) for line in file.read_text().splitlines()]
    assert found == tb.to_arrow(store_url).to_pylist()
    assert [row["uid"] for row in found if row["damaged"]] == DAMAGED
    for row in found:
        assert (row["tokens"] is None) == (row["response_text"] is None) == bool(row["damaged"])
        assert (row["recorded_at"] is None) == (
            bool(row["damaged"]) and how in ("event", "deleted")
        )
    assert [row["reward"] for row in found[:RUNS]] == [0.0, 1.0, 0.0, 1.0]


@pytest.mark.long
@pytest.mark.parametrize("how", HOW)
def test_a_comparison_goes_on_behind_what_is_damaged(
    cli: Cli,  # noqa: F811
    store_url: str,
    tmp_path: Path,
    how: str,
) -> None:
    position = damaged_store(store_url, tmp_path, "ExperiencesAnnotated", how)
    damaged = [f"b0/{task}/{run}/0/" for task in range(3) for run in range(RUNS)]
    ended = cli("diff", "grpo", "varied", "--store", store_url, "--json")
    assert named(ended, position) == damaged
    (found,) = ended.json
    assert [row["uid"] for row in found["unreadable"]] == damaged
    assert (found["experiences"], found["both"]) == (17, 0)
    assert sorted(row["uid"] for row in found["rows"]) == [f"b0/3/{run}/0/" for run in range(RUNS)]
    rows = tb.to_arrow(store_url, set="varied").to_pylist()
    assert [row["uid"] for row in rows if row["damaged"]] == damaged
    assert {row["advantage"] for row in rows} == {None}
    with TestClient(inspector(store_url), base_url="http://127.0.0.1") as client:
        page = client.get("/sort/diff?first=grpo&second=varied").text
    assert page.count(f"event {position} cannot be read") == len(damaged)


@pytest.mark.parametrize("how", ["moved", "cut"])
def test_search_and_export_name_what_an_archive_that_cannot_be_read_holds(
    cli: Cli,  # noqa: F811
    sqlite_url: str,
    tmp_path: Path,
    how: str,
) -> None:
    anyio.run(record_sample_run, sqlite_url, tmp_path / "run")
    given = ("--store", sqlite_url)
    assert cli("compact", "--keep-steps", 0, "--archive", tmp_path / "archive", *given).code == 0
    file = tmp_path / "run.jsonl"
    assert len(cli("search", "and", *given, "--json").json) == 17
    assert cli("export", "-o", file, *given).code == 0
    (archive,) = (tmp_path / "archive").iterdir()
    if how == "moved":
        archive.rename(tmp_path / "elsewhere")
    else:
        archive.write_bytes(archive.read_bytes()[:-200])
    ended = cli("search", "and", *given, "--json")
    assert ended.code == 1
    lines = [line for line in ended.err.splitlines() if "were archived to" in line]
    assert len(lines) == 17 - len(ended.json) > 0
    assert cli("export", "-o", file, *given).code == 1
    found = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["uid"] for row in found if row["tokens"] is None] == [
        row["uid"] for row in found if "were archived to" in str(row["damaged"])
    ]
    assert cli("show", found[0]["uid"], *given).code == 0


def test_who_takes_no_list_of_damaged_rows_is_told_at_the_end(
    sqlite_url: str, tmp_path: Path
) -> None:
    damaged_store(sqlite_url, tmp_path, "ExperiencesRecorded", "changed")
    found: list[str] = []

    async def look() -> None:
        async with tb.open_store(sqlite_url, read_only=True) as store:
            async for one in search(now(await store.experiment("sort")), "and"):
                found.append(one.uid)

    with pytest.raises(DamagedSegmentError, match=DAMAGED[-1]):
        anyio.run(look)
    assert len(found) == 13


def test_a_page_of_a_search_names_what_cannot_be_read(sqlite_url: str, tmp_path: Path) -> None:
    position = damaged_store(sqlite_url, tmp_path, "ExperiencesRecorded", "changed")
    with TestClient(inspector(sqlite_url), base_url="http://127.0.0.1") as client:
        page = client.get("/sort/search?text=and").text
    assert page.count(f"event {position} cannot be read") == RUNS
    assert page.count("<tr data-row>") == 13


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("ExperiencesRecorded", ("show", DAMAGED[0])),
        ("ExperiencesRecorded", ("show", DAMAGED[0], "--tokens")),
        ("ExperiencesAnnotated", ("show", DAMAGED[0])),
        ("ExperiencesAnnotated", ("groups", "--set", "varied")),
    ],
)
def test_who_shows_what_is_damaged_names_the_row_and_the_event(
    cli: Cli,  # noqa: F811
    sqlite_url: str,
    tmp_path: Path,
    kind: str,
    words: tuple[str, ...],
    how: str,
) -> None:
    position = damaged_store(sqlite_url, tmp_path, kind, how)
    ended = cli(*words, "--store", sqlite_url)
    assert ended.code == 2
    assert f"{DAMAGED[0]}: event {position} cannot be read: " in ended.err


@pytest.mark.parametrize("which", ["leased_at", "committed_at"])
async def test_a_step_whose_event_was_deleted_names_the_position(
    sqlite_url: str, tmp_path: Path, which: str
) -> None:
    """Its rows are there, and say that it was handed out and trained."""
    sample = await record_sample_run(sqlite_url, tmp_path / "run")
    async with tb.open_store(sqlite_url) as store:
        contents = await blame(now(await store.experiment(sample.name)), 2)
    position = getattr(contents.line, which)

    def remove(tx: Transaction) -> None:
        tx.execute(delete(event).where(event.c.position == position))

    await unguarded(sqlite_url, remove)
    async with tb.open_store(sqlite_url) as store:
        source = now(await store.experiment(sample.name))
        for ask in (partial(blame, step=2), steps, partial(why, uid=contents.rows[0].uid)):
            with pytest.raises(CodecError, match=f"no event at position {position}, .*verify"):
                await ask(source)


async def test_a_commit_of_another_kind_is_named_and_a_lost_row_of_a_step(
    sqlite_url: str, tmp_path: Path
) -> None:
    sample = await record_sample_run(sqlite_url, tmp_path / "run")
    async with tb.open_store(sqlite_url) as store:
        contents = await blame(now(await store.experiment(sample.name)), 2)
    position, uid = contents.line.committed_at, contents.rows[0].uid
    change = "UPDATE event SET kind = 'Unheard' WHERE position = :at"
    await unguarded(sqlite_url, sql(change, at=position))
    async with tb.open_store(sqlite_url) as store:
        source = now(await store.experiment(sample.name))
        with pytest.raises(CodecError, match=f"position {position}: it is a Unheard, not a "):
            await steps(source)
        await store.database.write(sql("DELETE FROM step WHERE step = 2"))
        answer = await why(source, uid)
    told = " ".join(reason.what for reason in answer.reasons)
    assert "step 2 has no row; run `trinity-buffer rebuild`" in told


async def test_a_commit_that_is_damaged_costs_groups_and_an_export_nothing(
    sqlite_url: str, tmp_path: Path
) -> None:
    sample = await record_sample_run(sqlite_url, tmp_path / "run")
    async with tb.open_store(sqlite_url) as store:
        position = (await blame(now(await store.experiment(sample.name)), 2)).line.committed_at

    def change(tx: Transaction) -> None:
        tx.execute(update(event).where(event.c.position == position).values(body=b"junk"))

    await unguarded(sqlite_url, change)
    async with tb.open_store(sqlite_url) as store:
        source = now(await store.experiment(sample.name))
        shown = [run.state for view in await groups(source) for run in view.runs]
        rows = [r async for b in record_batches(source, None, None, None) for r in b.to_pylist()]
        with pytest.raises(CodecError, match=f"the event at position {position}: "):
            await steps(source)
    assert "trained in step 2 of trainer" in shown
    assert 2 in {row["trained_step"] for row in rows if row["state"] == "committed"}


@pytest.mark.parametrize("time", [1 << 62, "nine"])
@pytest.mark.parametrize("command", ["stats", "events", "top", "report"])
def test_a_time_that_is_none_is_shown_as_unknown(
    cli: Cli,  # noqa: F811
    sqlite_url: str,
    tmp_path: Path,
    command: str,
    time: int | str,
) -> None:
    """As one flipped bit makes it; `verify` names the event."""
    anyio.run(record_sample_run, sqlite_url, tmp_path / "run")
    change = sql("UPDATE event SET recorded_at = :time WHERE position = 27", time=time)
    anyio.run(partial(unguarded, sqlite_url, change, chained=False))
    words = {"top": ("--once",), "report": ("-o", tmp_path / "page.html")}.get(command, ())
    ended = cli(command, *words, "--store", sqlite_url)
    assert ended.code == 0, ended.err
