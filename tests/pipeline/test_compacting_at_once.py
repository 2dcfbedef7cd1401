"""Several processes that compact, or restore, one experiment at once."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import anyio
import pyarrow.parquet
import pytest

from tests.conftest import Resize
from tests.handles import Transaction
from tests.pipeline.test_compaction import trained
from tests.small_sizes import resized
from tests.whole_stores import restore
from trinity_buffer import compact, open_store, verify
from trinity_buffer.errors import StoreError
from trinity_buffer.inspector import show
from trinity_buffer.pipeline import archive
from trinity_buffer.store import segments


async def test_two_at_once_leave_one_sound_archive(store_url: str, tmp_path: Path) -> None:
    async with open_store(store_url) as store:
        await trained(await store.experiment("x", config={}), steps=4)
    errors: list[str] = []

    async def one() -> None:
        async with open_store(store_url) as store:
            experiment = await store.experiment("x")
            try:
                await compact(experiment, keep_steps=0, archive=tmp_path)
            except StoreError as error:
                errors.append(str(error))

    with resized(rows_per_file=2):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one)
            tasks.start_soon(one)
    assert set(errors) <= {"another process has compacted some of these segments: run it again"}
    async with open_store(store_url) as store:
        experiment = await store.experiment("x")
        await compact(experiment, keep_steps=0, archive=tmp_path)
        assert (await verify(experiment)).problems == ()
        assert len([one async for one in experiment.read()]) == 8
    assert not list(tmp_path.rglob("*.writing"))  # noqa: ASYNC240 - nothing else runs


async def test_what_was_archived_meanwhile_is_told(
    store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_store(store_url) as store:
        experiment = await store.experiment("x", config={})
        await trained(experiment, steps=4)
        digest_of = archive.digest_of

        def beaten(path: Path) -> str:
            async def another() -> None:
                async with open_store(store_url) as other:
                    await compact(
                        await other.experiment("x"), keep_steps=0, archive=None, delete=True
                    )

            anyio.run(another)
            return digest_of(path)

        with monkeypatch.context() as patch:
            patch.setattr(archive, "digest_of", beaten)
            with pytest.raises(StoreError, match="another process has compacted"):
                await compact(experiment, keep_steps=0, archive=tmp_path)
        assert (await verify(experiment)).problems == ()


async def test_what_a_trainer_goes_back_to_meanwhile_stays(store_url: str) -> None:
    async def go_back() -> None:
        async with open_store(store_url) as other:
            experiment = await other.experiment("x")
            async with experiment.train_stream(strategy="grpo", resume_from=0):
                pass

    trainers = [Thread(target=anyio.run, args=(go_back,))]

    def after_the_first_file(*_: object) -> None:
        while trainers:
            trainer = trainers.pop()
            trainer.start()
            trainer.join()

    async with open_store(store_url) as store:
        experiment = await store.experiment("x", config={})
        await trained(experiment, steps=4)
        delete = partial(compact, experiment, keep_steps=0, archive=None, delete=True)
        with resized(rows_per_file=2), pytest.raises(StoreError, match="began, or went back"):
            await delete(progress=after_the_first_file)
        assert not trainers
        for task in range(1, 4):
            assert len([row async for row in experiment.read(task=task)]) == 2
        assert (await delete()).segments == 0


async def test_what_comes_back_while_it_is_read_is_not_missing(
    store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a strategy would reject a row that is read alone for good, as damaged."""
    archived_at = segments.archived_at

    async def bring_back() -> None:
        async with open_store(store_url) as other:
            await restore(await other.experiment("x"))

    def after_it_came_back(tx: Transaction, keys: Sequence[bytes]) -> Any:
        monkeypatch.undo()
        other = Thread(target=anyio.run, args=(bring_back,))
        other.start()
        other.join()
        return archived_at(tx, keys)

    async with open_store(store_url) as store:
        experiment = await store.experiment("x", config={})
        await trained(experiment, steps=4)
        await compact(experiment, keep_steps=0, archive=tmp_path)
        monkeypatch.setattr(segments, "archived_at", after_it_came_back)
        assert (await show(experiment, "b/0/0/0/")).tensors["tokens"].first == (1, 2, 3)
        assert segments.archived_at is archived_at


async def test_what_leaves_while_it_is_verified_is_not_missing(
    store_url: str, resize: Resize
) -> None:
    resize(events_per_page=1)
    left = []

    async def another() -> None:
        async with open_store(store_url) as store:
            experiment = await store.experiment("x")
            left.append(await compact(experiment, keep_steps=0, archive=None, delete=True))

    def meanwhile(stage: str, done: int, _total: int) -> None:
        if (stage, done) == ("log", 1):
            other = Thread(target=anyio.run, args=(another,), daemon=True)
            other.start()
            other.join(10)

    async with open_store(store_url) as store:
        experiment = await store.experiment("x", config={})
        await trained(experiment, steps=4)
        assert (await verify(experiment, progress=meanwhile)).problems == ()
    assert [report.segments for report in left] == [4]


@pytest.mark.long
async def test_two_that_restore_at_once_bring_everything_back_once(
    store_url: str, tmp_path: Path
) -> None:
    async with open_store(store_url) as store:
        experiment = await store.experiment("x", config={})
        await trained(experiment, steps=4)
        await compact(experiment, keep_steps=0, archive=tmp_path)
    errors: list[str] = []

    async def one() -> None:
        async with open_store(store_url) as store:
            try:
                await restore(await store.experiment("x"))
            except StoreError as error:
                errors.append(str(error))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one)
        tasks.start_soon(one)
    assert set(errors) <= {"another process has restored some of these segments: run it again"}
    async with open_store(store_url) as store:
        assert (await verify(await store.experiment("x"))).problems == ()


@pytest.mark.long
def test_who_writes_an_archive_at_the_same_time_has_a_file_of_their_own(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Path] = []

    class Noted(pyarrow.parquet.ParquetWriter):  # type: ignore[misc]
        def __init__(self, path: Path, *args: Any, **options: Any) -> None:
            written.append(path)
            super().__init__(path, *args, **options)

    monkeypatch.setattr(pyarrow.parquet, "ParquetWriter", Noted)

    async def prepare() -> None:
        async with open_store(sqlite_url) as store:
            await trained(await store.experiment("x", config={}), steps=4)

    async def archived(url: str) -> tuple[str, ...]:
        async with open_store(url) as store:
            experiment = await store.experiment("x")
            return (await compact(experiment, keep_steps=0, archive=tmp_path / "a")).files

    anyio.run(prepare)
    copy = tmp_path / "copy.db"
    shutil.copy(sqlite_url.removeprefix("sqlite:///"), copy)
    assert anyio.run(archived, sqlite_url) == anyio.run(archived, f"sqlite:///{copy}")  # one name
    assert len({*written}) == 2
