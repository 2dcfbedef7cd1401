"""A checkpoint's digest covers all that is loaded, wherever it lies and whatever it is called."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.contract.making import group, opened
from tests.whole_stores import digest_of
from trinity_buffer import open_store, run_strategy
from trinity_buffer.errors import CheckpointError
from trinity_buffer.pipeline.train.checkpoint import make_durable, read_manifest_chain


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "step-1"
    (folder / "deep").mkdir(parents=True)
    (folder / "weights").write_text("weights")
    (folder / "deep" / "state").write_text("state")
    return folder


def test_weights_behind_a_link_are_part_of_it(checkpoint: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "base").write_text("base")
    (checkpoint / "linked").symlink_to(shared)
    before = make_durable(checkpoint)
    (shared / "base").write_text("bass")
    assert digest_of(checkpoint) != before


def test_a_checkpoint_that_is_a_link_is_what_it_leads_to(checkpoint: Path, tmp_path: Path) -> None:
    latest = tmp_path / "latest"
    latest.symlink_to(checkpoint)
    assert make_durable(latest) == make_durable(checkpoint)


@pytest.mark.parametrize("name", [b"a\nb", b"\xff\xfe", b"a b", "ü".encode(), b"-rf"])
def test_a_file_of_any_name_is_part_of_it(checkpoint: Path, name: bytes) -> None:
    file = os.path.join(os.fsencode(checkpoint), name)  # noqa: PTH118 - bytes
    without = make_durable(checkpoint)
    found = set()
    for content in (b"one", b"two"):
        with open(file, "wb") as handle:  # noqa: PTH123 - bytes
            handle.write(content)
        found.add(make_durable(checkpoint))
    assert len(found | {without}) == 3


def circle(folder: Path) -> None:
    (folder / "deep" / "up").symlink_to(folder)


def nowhere(folder: Path) -> None:
    (folder / "weights2").symlink_to(folder / "gone")


def pipe(folder: Path) -> None:
    os.mkfifo(folder / "pipe")


@pytest.mark.parametrize("broken", [circle, nowhere, pipe])
def test_what_cannot_be_loaded_is_no_checkpoint(
    checkpoint: Path, broken: Callable[[Path], None]
) -> None:
    broken(checkpoint)
    with pytest.raises(CheckpointError, match=r"link|leads nowhere|is no file"):
        make_durable(checkpoint)


@pytest.fixture
def runs(checkpoint: Path, tmp_path: Path) -> Path:
    """A folder for a store, with a checkpoint in it."""
    folder = tmp_path / "runs"
    folder.mkdir()
    checkpoint.rename(folder / "step-1")
    return folder


async def test_a_run_whose_folder_was_moved_goes_on(runs: Path, tmp_path: Path) -> None:
    checkpoint = runs / "step-1"
    async with opened(str(runs / "a.db"), rollouts_per_group=4) as experiment:
        await experiment.writer("e0").write([*group(task=1), *group(task=2)])
        await run_strategy(experiment, "grpo")
        async with experiment.train_stream(strategy="grpo") as stream:
            weights = checkpoint / "weights"
            await stream.commit(await anext(stream), checkpoint=checkpoint, policy=weights)
    moved = runs.rename(tmp_path / "archive")  # noqa: ASYNC240 - a test waits for nobody
    async with open_store(str(moved / "a.db")) as store:
        experiment = await store.experiment("run")
        for options in ({}, {"resume_from": 1}):
            async with experiment.train_stream(strategy="grpo", **options) as stream:
                assert stream.resume is not None
                assert stream.resume.checkpoint == moved / "step-1"
        policy = await experiment.newest_policy()
        assert policy is not None
        assert policy.uri == str(moved / "step-1" / "weights")
        assert await experiment.last_checkpoint() == str(moved / "step-1")
        (moved / "step-1" / "weights").write_text("others")
        with pytest.raises(CheckpointError, match="is not the one that was committed"):
            await experiment.train_stream(strategy="grpo").__aenter__()


@pytest.mark.parametrize(
    "said",
    [
        "",
        "[]",
        "{}",
        '{"manifests": 3}',
        '{"manifests": ["zz"]}',
        '{"manifests": [], "before": "", "length": 1e999}',
        '{"manifests": [], "before": "", "length": null}',
    ],
)
def test_manifests_that_cannot_be_read_are_an_error_of_the_checkpoint(
    tmp_path: Path, said: str
) -> None:
    (tmp_path / "manifests.json").write_text(said)
    with pytest.raises(CheckpointError, match=r"holds no manifests\.json of a trainer"):
        read_manifest_chain(tmp_path)


FORKS_WHILE_ALL_HASH = """
import hashlib, os, sys, threading
from pathlib import Path
from tests.whole_stores import digest_of

file, begun, never = Path(sys.argv[1]), threading.Semaphore(0), threading.Event()
real = hashlib.sha256

class Slow:
    def update(self, _):
        begun.release()
        never.wait()

hashlib.sha256 = Slow
for _ in range(os.cpu_count() + 1):
    threading.Thread(target=digest_of, args=[file], daemon=True).start()
while begun.acquire(timeout=1):
    pass
if child := os.fork():
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
hashlib.sha256 = real
print(digest_of(file), flush=True)
os._exit(0)
"""


@pytest.mark.long
def test_a_child_that_is_forked_during_a_checkpoint_reads_one(checkpoint: Path) -> None:
    file = checkpoint / "weights"
    answer = subprocess.run(
        [sys.executable, "-c", FORKS_WHILE_ALL_HASH, str(file)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert answer.stdout.strip() == digest_of(file), answer.stderr
