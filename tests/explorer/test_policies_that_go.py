"""Policy files that are gone, half there or replaced: the explorer asks for the newest again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.from_thread
import anyio.to_thread
import pytest

from tests.handles import Experiment
from tests.whole_stores import digest_of
from trinity_buffer import open_store
from trinity_buffer.demo.policy import PolicyConfig, TransformerPolicy
from trinity_buffer.demo.rollout import TaskSampler
from trinity_buffer.demo.tasks import SortDigits
from trinity_buffer.errors import CheckpointError
from trinity_buffer.experience import Experience
from trinity_buffer.explorer.explore import BatchReport, ExploreOptions, SamplingExplorer, Weights
from trinity_buffer.identity import Key
from trinity_buffer.trainer.checkpoint import POLICY_FILE, remove_old

TASK = SortDigits(digits=2)


def policy(seed: int = 0) -> TransformerPolicy:
    shape = PolicyConfig(TASK.vocab_size, width=16, layers=1, heads=2, max_length=TASK.max_length)
    return TransformerPolicy(shape, seed=seed)


def written(root: Path, version: int) -> Path:
    path = root / f"step-{version:08d}" / POLICY_FILE
    path.parent.mkdir(parents=True)
    policy(version).save(path)
    return path


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def exchanged(path: Path) -> None:
    policy(99).save(path)


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def with_a_gap(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[8:40] = b"x" * 32
    path.write_bytes(data)


BREAKS = (Path.unlink, cut, emptied, a_folder, with_a_gap)


@dataclass
class Interrupted:
    """A sampler to whose first file something happens before it is opened."""

    sampler: TaskSampler
    happens: Callable[[str], None]

    def load(self, uri: str) -> TaskSampler:
        self.happens(uri)
        return self.sampler.load(uri)

    def rollout(
        self, pairs: Sequence[tuple[Key, int]], *, batch: Key, policy_version: int
    ) -> list[Experience]:
        raise AssertionError("the weights of version 0 are not asked for")


async def explored(
    experiment: Experiment, sampler: TaskSampler | Interrupted, batches: int = 1
) -> list[BatchReport]:
    reports: list[BatchReport] = []
    options = ExploreOptions(
        groups_per_batch=2, rollouts_per_group=2, max_batches=batches, report=reports.append
    )
    await SamplingExplorer(experiment, sampler, "e0", options).run()
    return reports


@pytest.mark.parametrize("breaks", BREAKS)
async def test_the_newest_is_asked_for_again(
    breaks: Callable[[Path], None], sqlite_url: str, tmp_path: Path
) -> None:
    first, second = written(tmp_path, 1), written(tmp_path, 2)

    async with open_store(sqlite_url) as store:
        experiment = await store.experiment("run", config={})
        await experiment.publish_policy(1, str(first), digest=digest_of(first))

        def happens(uri: str) -> None:
            if uri == str(first):
                anyio.from_thread.run(experiment.publish_policy, 2, str(second))
                breaks(first)

        sampler = Interrupted(TaskSampler(policy(), TASK, 0), happens)
        (report,) = await explored(experiment, sampler)
    assert report.policy_version == 2


@pytest.mark.parametrize("breaks", [*BREAKS, exchanged])
async def test_a_newest_policy_that_nobody_can_load_is_one_error_that_names_it(
    breaks: Callable[[Path], None], sqlite_url: str, tmp_path: Path
) -> None:
    path = written(tmp_path, 1)
    digest = digest_of(path)
    breaks(path)
    async with open_store(sqlite_url) as store:
        experiment = await store.experiment("run", config={})
        await experiment.publish_policy(1, str(path), digest=digest)
        with pytest.raises(CheckpointError, match=POLICY_FILE):
            await explored(experiment, TaskSampler(policy(), TASK, 0))


@dataclass
class OfFolder:
    """A model whose weights are a folder, as those of transformers are."""

    def load(self, uri: str) -> OfFolder:
        assert (Path(uri) / "config.json").is_file()
        return self


def with_another_shard(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"other weights")


def with_one_file_more(folder: Path) -> None:
    (folder / "adapter.safetensors").write_bytes(b"more weights")


@dataclass
class Remembering:
    """A model that knows where its weights came from."""

    uri: str = ""

    def load(self, uri: str) -> Remembering:
        return Remembering(uri)


async def test_other_weights_of_the_same_version_are_loaded_too(sqlite_url: str) -> None:
    """A trainer that was wound back publishes a version that was there before."""
    async with open_store(sqlite_url) as store:
        experiment = await store.experiment("run", config={})
        weights = Weights(experiment, Remembering())
        for uri in ("first", "second"):
            await experiment.publish_policy(1, uri)
            await weights.load_newest()
            assert (weights.version, weights.model.uri) == (1, uri)


@pytest.mark.parametrize("breaks", [None, with_another_shard, with_one_file_more])
async def test_a_folder_is_loaded_only_if_it_is_the_one_that_was_published(
    breaks: Callable[[Path], None] | None, sqlite_url: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"the weights")
    async with open_store(sqlite_url) as store:
        experiment = await store.experiment("run", config={})
        await experiment.publish_policy(1, str(folder), digest=digest_of(folder))
        weights = Weights(experiment, OfFolder())
        if breaks is None:
            await weights.load_newest()
            assert weights.version == 1
            return
        breaks(folder)
        with pytest.raises(CheckpointError, match="model is not the one that was committed"):
            await weights.load_newest()
    assert weights.version == 0


async def test_an_explorer_outlives_a_trainer_that_commits_and_removes_without_pause(
    sqlite_url: str, tmp_path: Path
) -> None:
    async def keep_publishing(experiment: Experiment, explored_enough: anyio.Event) -> None:
        version = 0
        while not explored_enough.is_set():
            version += 1
            path = await anyio.to_thread.run_sync(written, tmp_path, version)
            await experiment.publish_policy(version, str(path), digest=digest_of(path))
            remove_old(tmp_path, keep=1, committed=path.parent)

    async with open_store(sqlite_url) as store:
        experiment = await store.experiment("run", config={})
        enough = anyio.Event()
        async with anyio.create_task_group() as group:
            group.start_soon(keep_publishing, experiment, enough)
            reports = await explored(experiment, TaskSampler(policy(), TASK, 0), batches=12)
            enough.set()
    assert len(reports) == 12
    versions = [report.policy_version or 0 for report in reports]
    assert versions[-1] > versions[0]
