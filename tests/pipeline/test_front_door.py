"""The front door: what a URL may be, what a stream takes, and what a second run says."""

from __future__ import annotations

import inspect
from pathlib import Path

import anyio
import pytest

import trinity_buffer as tb
from tests.contract.making import group, opened
from trinity_buffer import StreamOptions
from trinity_buffer.errors import (
    InvalidArgumentError,
    UnknownExperimentError,
    UnknownStoreError,
)


def test_the_stream_shows_every_option_with_its_default() -> None:
    shown = inspect.signature(tb.open_train_stream).parameters
    own = inspect.signature(StreamOptions).parameters
    assert list(shown) == ["url", *own, "experiment"]
    assert {name: shown[name].default for name in own} == {n: p.default for n, p in own.items()}
    assert all(p.kind is p.KEYWORD_ONLY for name, p in shown.items() if name != "url")


@pytest.mark.parametrize("write", [Path, str, "sqlite:///{}".format])
@pytest.mark.parametrize("home", [False, True])
async def test_a_path_and_the_users_folder_work_wherever_a_url_does(
    write: type[Path] | type[str], home: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / "a.db"
    url = write("~/a.db" if home else file)
    async with tb.open_store(url) as store:
        await store.experiment("run", config={})
    assert file.stat().st_size
    async with tb.open_store(url, read_only=True) as store:
        assert await store.experiments() == ["run"]


def test_a_trainer_that_comes_before_the_explorer_is_told_so(tmp_path: Path) -> None:
    store = tmp_path / "own.db"
    first = "start the explorer first, or wait until it has written"
    with (
        pytest.raises(UnknownStoreError, match=f"own\\.db: there is no store to read: {first}$"),
        tb.open_train_stream(store, experiment="own", strategy="grpo", follow=True),
    ):
        pass
    store.touch()
    with (
        pytest.raises(UnknownStoreError, match=f"empty: there is no store to read: {first}$"),
        tb.open_train_stream(store, experiment="own", strategy="grpo", follow=True),
    ):
        pass

    async def made() -> None:
        async with tb.open_store(store):
            pass

    anyio.run(made)
    with (
        pytest.raises(UnknownExperimentError) as refused,
        tb.open_train_stream(store, experiment="own", strategy="grpo", follow=True),
    ):
        pass
    assert refused.value.__notes__ == [first]


@pytest.mark.parametrize("follow", [False, True])
def test_a_mistyped_url_makes_no_store(follow: bool, tmp_path: Path) -> None:
    (tmp_path / "sort.db").touch()
    wrong = tmp_path / "sorr.db"
    with (
        pytest.raises(
            UnknownStoreError, match=r"sorr\.db: there is no store to read \(did you mean .*sort"
        ),
        tb.open_train_stream(wrong, experiment="run", strategy=None, follow=follow),
    ):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["sort.db"]


@pytest.mark.parametrize("is_there", [False, True])
async def test_a_folder_is_no_store(tmp_path: Path, is_there: bool) -> None:
    folder = tmp_path / "own"
    if is_there:
        folder.mkdir()
    for url in (f"{folder}/", f"sqlite:///{folder}/"):
        with pytest.raises(InvalidArgumentError, match=r"own/ names a directory.*own/run.db"):
            async with tb.open_store(url):
                pass
    assert folder.exists() == is_there


@pytest.mark.parametrize("name", ["postgresql", "sqlite"])
async def test_the_name_of_a_database_is_no_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidArgumentError, match=rf"'{name}' names no store; .*://user@"):
        async with tb.open_store(name):
            pass
    assert not await anyio.Path(name).exists()


async def test_an_empty_database_is_no_store_for_a_trainer(postgres_url: str) -> None:
    with pytest.raises(UnknownStoreError, match="is empty: there is no store"):
        async with tb.open_store(postgres_url, create=False):
            pass


async def test_a_second_run_says_what_it_found(
    store_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    said = []
    for _ in range(2):
        async with opened(store_url, rollouts_per_group=4) as experiment:
            await experiment.writer("e0").write(group())
            await tb.run_strategy(experiment, "grpo")
            async with experiment.train_stream(strategy="grpo") as stream:
                async for step in stream:
                    await stream.commit(step)
        said.append([record.getMessage() for record in caplog.records])
        caplog.clear()
    assert said[0] == []
    without_checkpoint, *others = said[1]
    assert without_checkpoint.startswith("trainer 'trainer' goes on after step 1, whose commit na")
    assert others == [
        "trainer 'trainer' ended without a step: of the 4 rows of set 'grpo' 4 are in committed "
        "steps, up to step 1"
    ]
