"""The proof from outside: what explorers and checkpoints remember, against what the log holds.

A store cannot know what it lost. Explorers append the uid of every experience of a receipt to a
file of their own after ``write`` returned; a checkpoint names the manifests that its weights really
went through. Neither asks the store.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.pipeline import checkpoint as checkpoints
from trinity_buffer.pipeline.verifying.findings import Problem
from trinity_buffer.pipeline.verifying.log_audit import Names
from trinity_buffer.pipeline.verifying.trainer_audit import Commit, LeasedManifest, TrainerAudit

_SLASHES_OF_UID = 4


@dataclass(frozen=True, slots=True)
class Chain:
    """What a checkpoint says it was trained on.

    Attributes:
        checkpoint: the file or folder.
        manifests: their digests, in the order in which the weights went through them.
        digest: of the checkpoint itself.
    """

    checkpoint: Path
    manifests: tuple[bytes, ...]
    digest: str


@dataclass(frozen=True, slots=True)
class ChainFindings:
    """What the chain of a checkpoint and the log say of each other."""

    lost: tuple[str, ...]
    duplicated: tuple[str, ...]
    problems: tuple[Problem, ...]


def read_acknowledged(place: Path) -> list[str]:
    """Return the uids in a file, or in all files of a folder: one a line, each uid once.

    A last line without its end counts if it has the form of a uid: an explorer that is killed while
    it appends leaves the beginning of a line, of a receipt that it had.

    Raises:
        InvalidArgumentError: there is no such file or folder, or a file is no text.
    """
    if not place.exists():
        raise InvalidArgumentError(f"acknowledged={place}: there is no such file or folder")
    files = sorted(f for f in place.rglob("*") if f.is_file()) if place.is_dir() else [place]
    found: dict[str, None] = {}
    for file in files:
        try:
            *lines, last = file.read_text("utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgumentError(f"{file} cannot be read as uids: {error}") from error
        found.update(dict.fromkeys(line for line in lines if line))
        if last.count("/") >= _SLASHES_OF_UID:
            found[last] = None
    return list(found)


def lost_experiences(acknowledged: Sequence[str], recorded: Names) -> tuple[str, ...]:
    """Return which of the acknowledged uids no event recorded."""
    hashes = np.fromiter(map(hash, acknowledged), np.int64, len(acknowledged))
    lacking = np.flatnonzero(recorded.lacking(hashes)).tolist()
    return tuple(f"experience {acknowledged[index]}" for index in lacking)


def read_chain(checkpoint: Path) -> Chain:
    """Return the chain that a checkpoint carries.

    Raises:
        CheckpointError: it carries none, or is missing.
    """
    manifests = checkpoints.read_manifests(checkpoint)
    return Chain(checkpoint.absolute(), tuple(manifests), checkpoints.digest_of(checkpoint))


def named(digest: bytes, leased: LeasedManifest | None = None) -> str:
    """Return how a manifest is told in a report."""
    place = "" if leased is None else f" (step {leased.step}, position {leased.position})"
    return f"manifest {digest.hex()}{place}"


def examine_chain(
    chain: Chain, trainers: Mapping[str, TrainerAudit], consumer: str | None = None
) -> ChainFindings:
    """Compare the chain of a checkpoint with what its trainer leased and committed.

    Raises:
        InvalidArgumentError: several trainers could have written it; ``consumer`` says which.
    """
    trainer = _trainer_of(chain, trainers, consumer)
    leased = {some.digest: some for some in trainer.steps.values()}
    distinct = list(dict.fromkeys(chain.manifests))
    lost = [named(digest) for digest in distinct if digest not in leased]
    known = [leased[digest] for digest in distinct if digest in leased]
    commit = _commit_of(chain, trainer)
    last = max((some.step for some in known), default=0)
    last = max(last, commit.step if commit is not None else 0)
    gone_through = set(distinct)
    lost += [
        named(digest, leased.get(digest))
        for step, digest in sorted(trainer.live.items())
        if step <= last and digest not in gone_through
    ]
    twice = {digest for digest in distinct if chain.manifests.count(digest) > 1}
    twice |= _sharing_rows(known)
    return ChainFindings(
        tuple(dict.fromkeys(lost)),
        tuple(named(digest, leased.get(digest)) for digest in distinct if digest in twice),
        tuple(_contradictions(chain, known, commit)),
    )


def _sharing_rows(known: Sequence[LeasedManifest]) -> set[bytes]:
    """Return the digests of manifests with an annotation row that an earlier one has too."""
    if not known:
        return set()
    rows = np.concatenate([some.rows for some in known])
    owners = np.repeat(np.arange(len(known)), [len(some.rows) for some in known])
    order = np.lexsort((owners, rows))
    rows, owners = rows[order], owners[order]
    again = (rows[1:] == rows[:-1]) & (owners[1:] != owners[:-1])
    return {known[index].digest for index in np.unique(owners[1:][again]).tolist()}


def _commit_of(chain: Chain, trainer: TrainerAudit) -> Commit | None:
    """Return the last commit of this checkpoint; it may have been moved since."""
    for commit in reversed(trainer.commits):
        if commit.checkpoint == str(chain.checkpoint) or commit.digest == chain.digest:
            return commit
    return None


def _contradictions(
    chain: Chain, known: Sequence[LeasedManifest], commit: Commit | None
) -> list[Problem]:
    where, found = f"checkpoint {chain.checkpoint}", []
    steps = [some.step for some in known]
    if steps != sorted(steps):
        found.append(Problem("commits", where, f"its chain goes through the steps {steps}"))
    if commit is not None and commit.digest not in (None, chain.digest):
        what = f"its sha256 is {chain.digest}, position {commit.position} recorded {commit.digest}"
        found.append(Problem("commits", where, what))
    return found


def require_trainer(trainers: Mapping[str, TrainerAudit], consumer: str) -> None:
    """Do nothing if ``consumer`` is one of the trainers.

    Raises:
        InvalidArgumentError: it is not.
    """
    if consumer not in trainers:
        known = ", ".join(trainers) or "none"
        raise InvalidArgumentError(f"consumer={consumer!r} is no trainer here (there: {known})")


def _trainer_of(
    chain: Chain, trainers: Mapping[str, TrainerAudit], consumer: str | None
) -> TrainerAudit:
    if consumer is not None:
        require_trainer(trainers, consumer)
        return trainers[consumer]
    candidates = [t for t in trainers.values() if _commit_of(chain, t) is not None]
    candidates = candidates or [
        trainer
        for trainer in trainers.values()
        if {some.digest for some in trainer.steps.values()} & set(chain.manifests)
    ]
    candidates = candidates or list(trainers.values())
    if len(candidates) > 1:
        raise InvalidArgumentError(
            f"the checkpoint {chain.checkpoint} may be of several trainers "
            f"({', '.join(trainers)}): say which with consumer="
        )
    return candidates[0] if candidates else TrainerAudit("")
