"""The digest of a checkpoint with large files: hashed in pieces, and as it was recorded before."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.contract.making import group, opened
from tests.handles import Experiment
from tests.small_sizes import resized
from tests.whole_stores import digest_of
from trinity_buffer import run_strategy, verify
from trinity_buffer.errors import CheckpointError
from trinity_buffer.pipeline.manifest import ManifestChain
from trinity_buffer.pipeline.train import checkpoint
from trinity_buffer.pipeline.train.checkpoint import (
    contents_of,
    make_durable,
    require_digest,
    write_manifest_chain,
    written,
)

PIECE = 1000


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checkpoint.PIECE_BYTES == 64 << 20  # of the format
    monkeypatch.setattr(checkpoint, "PIECE_BYTES", PIECE)


def plain(checkpoint: Path) -> str:
    """Return the digest as all versions before computed it."""
    total = hashlib.sha256()
    for file in sorted(one for one in checkpoint.rglob("*") if one.is_file()):
        name, content = file.relative_to(checkpoint).as_posix(), file.read_bytes()
        whole = hashlib.sha256(content).hexdigest()
        total.update(f"{name}\0{len(content)}\0{whole}\n".encode())
    return total.hexdigest()


def checkpoint_of(root: Path, *sizes: int) -> Path:
    folder = root / "step-1"
    folder.mkdir(parents=True)
    for number, size in enumerate(sizes):
        (folder / f"file-{number}").write_bytes(bytes(at * 7 % 251 for at in range(size)))
    return folder


@pytest.mark.parametrize("size", [0, PIECE - 1, PIECE])
def test_files_up_to_a_piece_have_the_digest_that_they_always_had(
    tmp_path: Path, size: int
) -> None:
    folder = checkpoint_of(tmp_path, size, 3)
    assert make_durable(folder) == digest_of(folder) == plain(folder)


@pytest.mark.parametrize("size", [PIECE + 1, 2 * PIECE, 17 * PIECE + 5])
def test_a_larger_file_is_hashed_in_pieces_which_its_digest_says(tmp_path: Path, size: int) -> None:
    folder = checkpoint_of(tmp_path, size, 3)
    large = (folder / "file-0").read_bytes()
    pieces = [large[at : at + PIECE] for at in range(0, size, PIECE)]
    joined = hashlib.sha256(b"".join(hashlib.sha256(piece).digest() for piece in pieces))
    small = hashlib.sha256((folder / "file-1").read_bytes()).hexdigest()
    lines = f"file-0\0{size}\0pieces:{joined.hexdigest()}\nfile-1\x003\0{small}\n"
    wanted = "v2:" + hashlib.sha256(lines.encode()).hexdigest()
    assert make_durable(folder) == digest_of(folder) == wanted
    assert digest_of(folder, like=wanted) == wanted
    assert digest_of(folder, like=plain(folder)) == plain(folder)


@pytest.mark.parametrize("threads", [1, 3, 16])
@pytest.mark.parametrize("bytes_at_once", [1, 333, 1 << 20])
def test_threads_and_memory_change_no_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int, bytes_at_once: int
) -> None:
    folder = checkpoint_of(tmp_path, 5 * PIECE + 1, PIECE, 0, 2 * PIECE)
    wanted = digest_of(folder)
    monkeypatch.setattr(os, "cpu_count", lambda: threads)
    with resized(bytes_per_hash=bytes_at_once):
        assert (digest_of(folder), make_durable(folder)) == (wanted, wanted)
        assert digest_of(folder, like="00") == plain(folder)


def test_a_recorded_digest_of_either_version_is_accepted_and_other_content_refused(
    tmp_path: Path,
) -> None:
    folder = checkpoint_of(tmp_path, 3 * PIECE, 3)
    recorded = [plain(folder), digest_of(folder)]
    for digest in recorded:
        require_digest(folder, digest)
    content = bytearray((folder / "file-0").read_bytes())
    content[2 * PIECE] ^= 1
    (folder / "file-0").write_bytes(content)
    for digest in recorded:
        with pytest.raises(CheckpointError, match="is not the one that was committed"):
            require_digest(folder, digest)


def test_pieces_in_another_order_are_other_content(tmp_path: Path) -> None:
    folder = checkpoint_of(tmp_path, 2 * PIECE)
    recorded = digest_of(folder)
    content = (folder / "file-0").read_bytes()
    (folder / "file-0").write_bytes(content[PIECE:] + content[:PIECE])
    assert digest_of(folder) != recorded


def test_a_version_that_is_not_known_is_an_error(tmp_path: Path) -> None:
    folder = checkpoint_of(tmp_path, 3)
    with pytest.raises(CheckpointError, match=r"is of version 3.*use a newer version"):
        require_digest(folder, "v3:00")


def test_hashes_of_whole_files_that_somebody_hands_over_are_computed_anew(tmp_path: Path) -> None:
    """As from code that was written for the digests of before."""
    folder = checkpoint_of(tmp_path, 3 * PIECE, 3)
    wanted = digest_of(folder)
    known = {one: hashlib.sha256(one.read_bytes()).hexdigest() for one in folder.iterdir()}
    assert make_durable(folder, known) == wanted
    files = [*folder.iterdir()]
    assert known == dict(zip(files, written(files), strict=True))
    assert [*known.values()] == contents_of([*known])


def test_many_files_take_no_thread_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, threads, hashed = checkpoint_of(tmp_path, PIECE, *[3] * 40), set(), threading.Event()

    def flush(_: int) -> None:
        threads.add(threading.get_ident())
        assert hashed.wait(60)

    def contents(files: Sequence[Path], version: int = checkpoint.VERSION) -> list[str]:
        hashed.set()  # all files wait for the disk
        return contents_of(files, version)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(checkpoint, "contents_of", contents)
    make_durable(folder)
    assert len(threads) <= checkpoint.THREADS + 1  # and ours, of folders


async def committed(experiment: Experiment, folder: Path) -> str:
    """Commit a step with the checkpoint ``folder``; return the digest that was recorded."""
    await experiment.writer("e0").write([*group(task=1), *group(task=2)])
    await run_strategy(experiment, "grpo")
    async with experiment.train_stream(strategy="grpo", groups_per_step=1) as stream:
        step = await anext(stream)
        write_manifest_chain(folder, ManifestChain().after(step.manifest.digest), step.log_head)
        await stream.commit(step, checkpoint=folder)
    policy = await experiment.newest_policy()
    assert policy is not None
    return policy.digest


@pytest.mark.parametrize("version", [1, 2])
async def test_a_store_goes_on_from_a_checkpoint_whose_digest_is_of_either_version(
    store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    folder = checkpoint_of(tmp_path, 3 * PIECE)
    async with opened(store_url, rollouts_per_group=4) as experiment:
        with monkeypatch.context() as patch:
            if version == 1:  # the log as an older version wrote it
                patch.setattr(checkpoint, "PIECE_BYTES", 1 << 40)
            recorded = await committed(experiment, folder)
        assert recorded == (plain(folder) if version == 1 else digest_of(folder))
        for options in ({}, {"resume_from": 1}):
            async with experiment.train_stream(strategy="grpo", **options) as stream:
                assert stream.resume is not None
                assert stream.resume.digest == recorded
        moved = folder.rename(tmp_path / "moved")
        assert (await verify(experiment, checkpoint=moved)).ok
        moved.rename(folder)
        (folder / "file-0").write_bytes(bytes(3 * PIECE))
        with pytest.raises(CheckpointError, match="is not the one that was committed"):
            await experiment.train_stream(strategy="grpo").__aenter__()
        with pytest.raises(CheckpointError, match="whose content is another now"):
            await experiment.train_stream(strategy="grpo", resume_from=1).__aenter__()
        report = await verify(experiment, checkpoint=folder)
        assert any(f"recorded {recorded}" in problem.what for problem in report.problems)
