"""Checkpoints on disk: made durable before a commit names them, and recognised by their digest."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trinity_buffer.errors import CheckpointError
from trinity_buffer.sizes import sizes

MANIFESTS_FILE = "manifests.json"
"""In the folder of a checkpoint: digests of the manifests that its weights went through."""


def make_durable(checkpoint: Path) -> str:
    """Write a checkpoint (a file or a folder) through to the disk and return its digest.

    The digest is sha256 over the sorted (relative path, size, sha256) of its files.

    Raises:
        CheckpointError: there is nothing at this path, it is empty, or it goes meanwhile.
    """
    with _staying(checkpoint):
        for file in _files(checkpoint):
            _fsync(file)
        folders = (
            {checkpoint.parent, *(p for p in checkpoint.rglob("*") if p.is_dir())}
            if checkpoint.is_dir()
            else set()
        )
        for folder in (*folders, checkpoint if checkpoint.is_dir() else checkpoint.parent):
            _fsync(folder)
    return digest_of(checkpoint)


def digest_of(checkpoint: Path) -> str:
    """Return the digest of a checkpoint, as `make_durable` does, without touching the disk.

    Raises:
        CheckpointError: there is nothing at this path, it is empty, or it goes meanwhile.
    """
    total = hashlib.sha256()
    with _staying(checkpoint):
        for file in _files(checkpoint):
            name = file.name if file == checkpoint else file.relative_to(checkpoint).as_posix()
            total.update(f"{name}\0{file.stat().st_size}\0{_sha256(file)}\n".encode())
    return total.hexdigest()


@contextmanager
def _staying(checkpoint: Path) -> Iterator[None]:
    """Say what it means if a file that was just there is not there any more."""
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointError(
            f"checkpoint {checkpoint} is being removed while it is read, {error.filename} is gone: "
            "a trainer that took over tidies up so; start again to resume from the last commit"
        ) from error


@contextmanager
def being_read(path: Path) -> Iterator[None]:
    """Keep `may_remove` from saying yes to the file ``path`` while the body runs.

    A lock of the operating system's, so that whoever dies lets go of it. A path that is no file
    here, as the address of a server, is nobody's to remove.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        yield  # whoever reads it says what is wrong
        return
    try:
        with suppress(OSError):  # a file system without locks: then it may be gone, and asked again
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


def may_remove(path: Path) -> bool:
    """Return whether nobody is reading the file ``path`` right now; see `being_read`."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return True


def require_digest(checkpoint: Path, digest: str) -> None:
    """Do nothing if the checkpoint is the one that was committed.

    Raises:
        CheckpointError: it is missing, or its content is another.
    """
    found = digest_of(checkpoint)
    if found != digest:
        raise CheckpointError(
            f"checkpoint {checkpoint} is not the one that was committed (sha256 {found[:12]}…, "
            f"recorded {digest[:12]}…): restore it, or resume from an older step with resume_from="
        )


def read_manifests(folder: Path) -> list[bytes]:
    """Return the digests of the manifests that the weights in ``folder`` went through, in order.

    Raises:
        CheckpointError: there are none in this folder.
    """
    try:
        return [
            bytes.fromhex(digest)
            for digest in json.loads((folder / MANIFESTS_FILE).read_text())["manifests"]
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{folder} holds no {MANIFESTS_FILE} of a trainer: {error}"
        ) from error


def read_head(folder: Path) -> bytes:
    """Return the head of the log that a checkpoint names; empty if it names none."""
    try:
        return bytes.fromhex(json.loads((folder / MANIFESTS_FILE).read_text())["log_head"])
    except (OSError, ValueError, KeyError, TypeError):
        return b""


def _files(checkpoint: Path) -> list[Path]:
    files = (
        sorted(p for p in checkpoint.rglob("*") if p.is_file())
        if checkpoint.is_dir()
        else [checkpoint]
    )
    if not files or not all(file.is_file() for file in files):
        raise CheckpointError(
            f"checkpoint {checkpoint} is missing or empty: write it before commit(), or resume "
            "from an older step"
        )
    return files


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as handle:
        while chunk := handle.read(sizes().bytes_per_hash):
            digest.update(chunk)
    return digest.hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
