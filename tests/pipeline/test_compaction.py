"""Retention: what leaves, what stays, and what is said of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import pyarrow
import pyarrow.parquet
import pytest
from sqlalchemy import update
from typer.testing import CliRunner

from tests.crash import points
from tests.handles import Experiment
from tests.pipeline.planting import events_of, unguarded
from tests.pipeline.watching import Killed
from tests.raw_store import rows, sql
from tests.small_sizes import resized
from tests.whole_stores import restore
from trinity_buffer import compact, open_store, run_strategy, verify
from trinity_buffer.cli.main import app
from trinity_buffer.errors import InvalidArgumentError, StoreError
from trinity_buffer.experience import EID, Experience
from trinity_buffer.store.tables import event


def _group(task: int) -> list[Experience]:
    return [
        Experience(
            eid=EID("b", task, run),
            tokens=[1, 2, 3],
            prompt_length=1,
            logprobs=[-0.1, -0.2],
            reward=float(run),
        )
        for run in range(2)
    ]


async def trained(experiment: Experiment, steps: int) -> None:
    """Write four groups in four writes, annotate them, and commit ``steps`` of one group each."""
    writer = experiment.writer("e0")
    await writer.plan("b", list(range(4)), 2)
    for task in range(4):
        await writer.write(_group(task))
    await run_strategy(experiment, "grpo")
    async with experiment.train_stream(strategy="grpo", groups_per_step=1) as stream:
        async for step in stream:
            if step.step <= steps:
                await stream.commit(step)


@pytest.mark.long
async def test_only_what_was_committed_before_the_horizon_leaves(
    store_url: str, tmp_path: Path
) -> None:
    async with open_store(store_url) as store:
        experiment = await store.experiment("x", config={})
        await trained(experiment, steps=3)
        report = await compact(experiment, keep_steps=1, archive=tmp_path / "archive")

        assert report.segments == 2
        rows = pyarrow.parquet.read_table(report.files[0]).to_pylist()
        assert len({row["segment"] for row in rows}) == 2
        assert [e.eid.task async for e in experiment.read(task=2)] == [2, 2]
        assert (await verify(experiment)).problems == ()
        again = await compact(experiment, keep_steps=1, archive=tmp_path / "archive")
        assert again.segments == 0


async def test_nothing_leaves_without_a_trainer_or_without_being_asked(store_url: str) -> None:
    async with open_store(store_url) as store:
        experiment = await store.experiment("x", config={})
        await experiment.writer("e0").write(_group(0))
        assert (await compact(experiment, keep_steps=0, archive=None, delete=True)).segments == 0
        with pytest.raises(InvalidArgumentError, match=r"folder to archive to .*, or delete=True"):
            await compact(experiment, keep_steps=0, archive=None)


async def test_a_segment_that_no_event_archived_cannot_be_deleted(store_url: str) -> None:
    async with open_store(store_url) as store:
        experiment = await store.experiment("x", config={})
        await experiment.writer("e0").write(_group(0))
        event = await anext(experiment.events(kinds=["ExperiencesRecorded"]))
        with pytest.raises(StoreError, match="archive it first"):
            await store.database.write(store.database.segments.delete, [event.body["segment"]])


@pytest.mark.long
@pytest.mark.parametrize("point", ["before-compact", "inside-compact", "after-compact"])
async def test_what_a_crash_left_half_done_is_finished_by_the_next(
    store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    def die(name: str) -> None:
        if name == point:
            raise Killed

    archive = tmp_path / "archive"
    async with open_store(store_url) as store:
        experiment = await store.experiment("a/b", config={})
        await trained(experiment, steps=3)
        with monkeypatch.context() as patch:
            points.install(die, patch.setattr)
            with pytest.raises(Killed):
                await compact(experiment, keep_steps=0, archive=archive)
        assert (await verify(experiment)).problems == ()
        left = 0 if point == "after-compact" else 3
        assert (await compact(experiment, keep_steps=0, archive=archive)).segments == left
        assert (await verify(experiment)).problems == ()
        named = [e.body async for e in experiment.events(kinds=["SegmentsArchived"])]
    files = [pyarrow.parquet.read_table(file) for file in archive.iterdir()]
    assert {body["uri"] for body in named} == {str(file) for file in archive.iterdir()}
    assert sorted(key for body in named for key in body["segments"]) == sorted(
        {row["segment"] for file in files for row in file.to_pylist()}
    )


async def _mixed(url: str) -> tuple[int, int]:
    """Train a step of one group and two of an expert's; return (run, expert) segments gone.

    The two experiments have the same events at the same positions, so that a row of the one has
    the address of a row of the other.
    """
    mixed = {"sample_strategy": "mix", "expert_experiment": "expert", "expert_data_ratio": 2 / 3}
    async with open_store(url) as store:
        experiment = await store.experiment("run", config={"rollouts_per_group": 2})
        expert = await store.experiment("expert", config={"schema": "sft"})
        for task in range(4):
            await experiment.writer("e0").write(_group(task))
            solved = [
                Experience(eid=EID("s", task, run), tokens=[1, 2, 3], prompt_length=1)
                for run in range(2)
            ]
            await expert.writer("e0").write(solved)
        await run_strategy(experiment, "grpo")
        stream = experiment.train_stream(strategy="grpo", groups_per_step=3, **mixed)
        async with stream as opened:
            await opened.commit(await anext(opened))
        gone = [
            (await compact(one, keep_steps=0, archive=None, delete=True)).segments
            for one in (experiment, expert)
        ]
        kept = [one.eid.task async for one in experiment.read() if one.archived is None]
        assert kept == [1, 1, 2, 2, 3, 3]
    return gone[0], gone[1]


async def test_a_row_of_an_expert_is_no_delivery_of_the_row_with_its_address(
    store_url: str,
) -> None:
    assert (await _mixed(store_url))[0] == 1


async def test_what_another_experiment_mixes_in_leaves_once_that_has_committed_it(
    store_url: str,
) -> None:
    assert (await _mixed(store_url))[1] == 2


async def test_what_was_archived_comes_back_byte_for_byte(store_url: str, tmp_path: Path) -> None:
    async with open_store(store_url) as store:
        experiment = await store.experiment("x", config={})
        await trained(experiment, steps=4)
        before = await rows(store, "segment")
        assert await store.database.read(store.database.segments.segment_parts) == len(before)
        archive = tmp_path / "archive"
        gone = await compact(experiment, keep_steps=0, archive=archive)
        left = len(await rows(store, "segment"))
        assert (
            await store.database.read(store.database.segments.segment_parts) == left < len(before)
        )

        archive.rename(tmp_path / "elsewhere")
        with pytest.raises(
            InvalidArgumentError, match=r"that file is not there.*restore --from FOLDER"
        ):
            await restore(experiment)
        seen: list[tuple[str, int, int]] = []
        back = await restore(
            experiment, folder=tmp_path / "elsewhere", progress=lambda *said: seen.append(said)
        )
        assert seen == [("restore", 0, 1), ("restore", 1, 1)]
        assert back.files == gone.files
        assert (back.segments, back.bytes) == (gone.segments, gone.bytes)
        assert await rows(store, "segment") == before
        assert await store.database.read(store.database.segments.segment_parts) == len(before)
        assert (await verify(experiment)).problems == ()
        assert (await restore(experiment)).segments == 0
        assert (await compact(experiment, keep_steps=0, archive=archive)).segments == 4
        assert (await verify(experiment)).problems == ()


async def test_an_experiment_may_have_a_name_that_is_too_long_for_a_file(
    sqlite_url: str, tmp_path: Path
) -> None:
    async with open_store(sqlite_url) as store:
        experiment = await store.experiment("名" * 200, config={})
        await trained(experiment, steps=4)
        assert (await compact(experiment, keep_steps=0, archive=tmp_path)).segments == 4
        assert (await verify(experiment)).problems == ()
        assert (await restore(experiment)).segments == 4


def take_away(file: Path) -> None:
    file.unlink()


def flip_a_bit(file: Path) -> None:
    whole = bytearray(file.read_bytes())
    whole[100] ^= 1
    file.write_bytes(whole)


async def test_verify_finds_an_archive_that_is_changed_or_gone(
    store_url: str, tmp_path: Path
) -> None:
    async with open_store(store_url) as store:
        experiment = await store.experiment("x", config={})
        await trained(experiment, steps=4)
        (name,) = (await compact(experiment, keep_steps=0, archive=tmp_path)).files
        flip_a_bit(Path(name))
        (changed,) = (await verify(experiment)).problems
        assert (changed.check, changed.where) == ("archives", name)
        assert "its sha256 is" in changed.what
        take_away(Path(name))
        for quick in (False, True):
            (gone,) = (await verify(experiment, quick=quick)).problems
            assert "there is no such file" in gone.what


@pytest.mark.parametrize("change", ["a row is gone", "a value is gone", "another experiment's"])
async def test_an_archive_that_is_not_what_was_written_is_not_restored(
    sqlite_url: str, tmp_path: Path, change: str
) -> None:
    """Its segments would be back in parts, and no event would ask for the file any more."""
    async with open_store(sqlite_url) as store:
        experiment, other = [await store.experiment(name, config={}) for name in ("x", "y")]
        names: list[str] = []
        for each in (experiment, other):
            await trained(each, steps=4)
            names += (await compact(each, keep_steps=0, archive=tmp_path)).files
        file, other_file = map(Path, names)
        sound = file.read_bytes()
        table = pyarrow.parquet.read_table(file)
        held = table.to_pylist()
        held[0]["data"] = None
        changed = {
            "a row is gone": pyarrow.Table.from_pylist(held[1:], table.schema),
            "a value is gone": pyarrow.Table.from_pylist(held, table.schema),
            "another experiment's": pyarrow.parquet.read_table(other_file),
        }
        pyarrow.parquet.write_table(changed[change], file)
        with pytest.raises(InvalidArgumentError, match="restore from"):
            await restore(experiment)
        damaged = [e async for e in experiment.read() if e.damaged or e.archived]
        assert damaged
        file.write_bytes(sound)
        assert (await restore(experiment)).segments == 4
        assert (await verify(experiment)).problems == ()


async def test_an_archive_of_an_older_version_is_read(store_url: str, tmp_path: Path) -> None:
    async with open_store(store_url) as store:
        experiment = await store.experiment("x", config={})
        await trained(experiment, steps=4)
        before = await rows(store, "segment")
        (name,) = (await compact(experiment, keep_steps=0, archive=tmp_path)).files
        parts = [
            {"segment": row["key"], **{k: row[k] for k in ("family", "part", "checksum", "data")}}
            for row in before
        ]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(parts), name)
        assert [one.tokens.tolist() async for one in experiment.read()] == [[1, 2, 3]] * 8


async def test_damaged_segments_stay_and_are_counted(sqlite_url: str, tmp_path: Path) -> None:
    async with open_store(sqlite_url) as store:
        experiment = await store.experiment("x", config={})
        await trained(experiment, steps=4)
    key = (await events_of(sqlite_url, "ExperiencesRecorded"))[0].body["segment"]
    await unguarded(sqlite_url, sql("UPDATE segment SET checksum = 0 WHERE key = :key", key=key))
    async with open_store(sqlite_url) as store:
        experiment = await store.experiment("x")
        report = await compact(experiment, keep_steps=0, archive=tmp_path)
        assert (report.segments, report.damaged) == (3, 1)
        assert key in {row["key"] for row in await rows(store, "segment")}


def test_a_deletion_says_how_many_segments_it_could_not_judge(sqlite_url: str) -> None:
    async def prepare() -> list[bytes]:
        async with open_store(sqlite_url) as store:
            await trained(await store.experiment("x", config={}), steps=4)
        first, *others = await events_of(sqlite_url, "ExperiencesRecorded")
        spoilt = update(event).where(event.c.position == first.position).values(body=b"spoilt")
        await unguarded(sqlite_url, lambda tx: tx.execute(spoilt))
        return [bytes(one.body["segment"]) for one in (first, *others)]

    async def left() -> list[bytes]:
        async with open_store(sqlite_url) as store:
            return [row["key"] for row in await rows(store, "segment")]

    kept, *gone = anyio.run(prepare)
    words = ["compact", "--store", sqlite_url, "--keep-steps", "0", "--delete"]
    told = CliRunner().invoke(app, words).stdout.splitlines()
    assert told[-1] == "1 cannot be read and stayed: `verify` names what is damaged"
    assert {*anyio.run(left)} & {kept, *gone} == {kept}
    assert json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)["damaged"] == 1


@pytest.mark.parametrize("size", [{}, {"bytes_per_file": 1}])  # 1: each goes alone
def test_an_interrupt_ends_it_and_leaves_whole_pages(
    size: dict[str, int], sqlite_url: str, tmp_path: Path
) -> None:
    seen: list[int] = []

    async def interrupted() -> None:
        def interrupt(what: str, done: int, total: int) -> None:
            seen.append(done)
            if len(seen) == 1:  # after a second one anyio's threads would hold this process
                os.kill(os.getpid(), signal.SIGINT)

        async with open_store(sqlite_url) as store:
            experiment = await store.experiment("x", config={})
            await trained(experiment, steps=4)
            await compact(experiment, keep_steps=0, archive=tmp_path, progress=interrupt)

    async def finish() -> tuple[int, int]:
        async with open_store(sqlite_url) as store:
            experiment = await store.experiment("x")
            assert (await verify(experiment)).problems == ()
            gone = [e async for e in experiment.events(kinds=["SegmentsArchived"])]
            again = await compact(experiment, keep_steps=0, archive=tmp_path)
            return len(gone), again.segments

    with resized(rows_per_file=2, **size), pytest.raises(KeyboardInterrupt):
        anyio.run(interrupted)
    written = len(list(tmp_path.glob("*.parquet")))
    gone, left = anyio.run(finish)
    assert len(seen) == gone == written  # no file that nobody knows
    assert gone in (1, 2)  # the file that was done, and the one beside it
    assert left == 4 - gone


def test_a_file_that_cannot_be_written_is_told_with_its_folder(sqlite_url: str) -> None:
    async def main() -> None:
        async with open_store(sqlite_url) as store:
            experiment = await store.experiment("x", config={})
            await trained(experiment, steps=4)
            with pytest.raises(StoreError, match="archive folder /proc: a file cannot be written"):
                await compact(experiment, keep_steps=0, archive=Path("/proc"))
            assert (await verify(experiment)).problems == ()

    anyio.run(main)


@pytest.mark.long
def test_a_pyarrow_that_cannot_be_imported_is_one_sentence(sqlite_url: str, tmp_path: Path) -> None:
    async def prepare() -> None:
        async with open_store(sqlite_url) as store:
            await trained(await store.experiment("x", config={}), steps=4)

    anyio.run(prepare)
    broken = tmp_path / "first" / "pyarrow"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('libarrow.so: no such file')")
    words = ["compact", "--store", sqlite_url, "--keep-steps", "0", "--archive", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "trinity_buffer", *words],
        env={**os.environ, "PYTHONPATH": str(broken.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    said = "error: archiving needs a pyarrow that works: libarrow.so: no such file\n"
    assert done.stderr.endswith(said)
    assert "Traceback" not in done.stderr
