"""The proof from outside: what explorers and checkpoints remember, against what the log holds.

A store cannot know what it lost. Explorers append the lines of each receipt (uid, content digest,
head) to a file of their own after ``write`` returned; a checkpoint names the manifests that its
weights really went through. Neither asks the store.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.limits import sizes
from trinity_buffer.pipeline.train import checkpoint as checkpoints
from trinity_buffer.pipeline.train.checkpoint import version_of
from trinity_buffer.pipeline.verify.addresses import Names, unpacked
from trinity_buffer.pipeline.verify.log_audit import Commit, LeasedManifest, Problem, TrainerAudit

_SLASHES_OF_UID = 4


class Acknowledged:
    """What explorers were told is durable: hashes alone, of files that may be as long as the run.

    Args:
        place: a file of lines, or a folder of such files. A line is one of `WriteReceipt.lines`, or
            a uid alone.

    Attributes:
        uids: of all lines.
        compared: those that came with a content digest.
        heads: of the log, when each line was written.

    Raises:
        InvalidArgumentError: there is no such file or folder, or a file is no text.
    """

    def __init__(self, place: Path) -> None:
        if not place.exists():
            raise InvalidArgumentError(f"acknowledged={place}: there is no such file or folder")
        files = place.rglob("*") if place.is_dir() else [place]
        self._files = sorted(file for file in files if file.is_file())
        self.uids = Names()
        self.compared = Names()
        self._contents = Names()
        self.heads: set[bytes] = set()
        for lines in _pages_of(self._files):
            parsed = [*map(_parsed, lines)]
            self.uids.add(uid for uid, _, _ in parsed)
            self.compared.add(uid for uid, digest, _ in parsed if digest)
            self._contents.add((uid, digest) for uid, digest, _ in parsed if digest)
            self.heads.update(head for _, _, head in parsed if head)

    def lost(self, uids: Names, contents: Names | None) -> tuple[str, ...]:
        """Return the uids that no event recorded, and those recorded with another content."""
        gone = _lacking(self.uids, uids)
        other = set() if contents is None else _lacking(self._contents, contents)
        if not gone and not other:
            return ()
        lost: dict[str, None] = {}
        changed: dict[str, None] = {}
        for lines in _pages_of(self._files):
            for uid, digest, _ in map(_parsed, lines):
                if hash(uid) in gone:
                    lost[f"experience {uid}"] = None
                elif digest and hash((uid, digest)) in other:
                    what = f"acknowledged with the content {digest.hex()}, recorded with another"
                    changed[f"experience {uid} ({what})"] = None
        return (*lost, *changed)


def _lacking(acknowledged: Names, known: Names) -> set[int]:
    """Return the hashes of what was acknowledged and is not known."""
    hashes = acknowledged.hashes
    return set(hashes[known.lacking(hashes)].tolist())


def _parsed(line: str) -> tuple[str, bytes, bytes]:
    """Return the uid of a line, the content digest, and the head; empty where there is none."""
    uid, *rest = line.split("\t")
    digest, head = ([*rest, "", ""])[:2]
    return uid, _hex(digest), _hex(head)


def _pages_of(files: Sequence[Path]) -> Iterator[list[str]]:
    """Yield the lines of files, some at a time.

    A last line without its end counts if it begins with a uid: an explorer that is killed while it
    appends leaves the beginning of a line, of a receipt that it had.
    """
    for path in files:
        try:
            with path.open(encoding="utf-8-sig") as file:
                while page := [*islice(file, sizes().rows_per_page)]:
                    yield [
                        line.rstrip("\n")
                        for line in page
                        if line.strip("\n")
                        and (line.endswith("\n") or line.count("/") >= _SLASHES_OF_UID)
                    ]
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgumentError(f"{path} cannot be read as uids: {error}") from error


def _hex(text: str) -> bytes:
    """Return the bytes of a digest, none of what a kill cut short."""
    return bytes.fromhex(text) if len(text) in (32, 64) and _HEX.issuperset(text) else b""


_HEX = frozenset("0123456789abcdef")
_HEAD_DIGITS = 64


class Chain:
    """What a checkpoint says it was trained on.

    Attributes:
        checkpoint: the file or folder.
        manifests: what its weights went through.
        head: of the log, when its last step was handed out; empty where it does not say so.

    Raises:
        CheckpointError: it carries no chain, or is missing.
    """

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint.absolute()
        self.manifests = checkpoints.read_manifest_chain(checkpoint)
        self.head = checkpoints.read_head(checkpoint)
        self._digests = {version_of(None): checkpoints.digest_of(checkpoint)}

    def digest_like(self, recorded: str | None) -> str:
        """Return the digest of the checkpoint, of the version of a recorded one; None: of today's.

        Raises:
            CheckpointError: that version is not known, or the checkpoint is gone meanwhile.
        """
        version = version_of(recorded)
        if version not in self._digests:  # it reads all files again: of a large one, slowly
            self._digests[version] = checkpoints.digest_of(self.checkpoint, like=recorded)
        return self._digests[version]


def manifest_text(digest: bytes, leased: LeasedManifest | None = None) -> str:
    """Return how a manifest is told in a report."""
    place = "" if leased is None else f" (step {leased.step}, position {leased.position})"
    return f"manifest {digest.hex()}{place}"


class Evidence:
    """All that was given from outside of the store.

    Attributes:
        acknowledged, chain: None: not given.
        heads: of the log, of all of them.

    Raises:
        InvalidArgumentError: something cannot be read.
        CheckpointError: the checkpoint is missing or names no manifests.
    """

    def __init__(
        self, acknowledged: Path | None, checkpoint: Path | None, head: str | None
    ) -> None:
        self.acknowledged = None if acknowledged is None else Acknowledged(Path(acknowledged))
        self.chain = None if checkpoint is None else Chain(Path(checkpoint))
        heads = {_hex(head or "")} | (self.acknowledged.heads if self.acknowledged else set())
        if head is not None and (len(head) != _HEAD_DIGITS or not _hex(head)):
            raise InvalidArgumentError(f"head={head!r}: a head is {_HEAD_DIGITS} digits of hex")
        self.heads = (heads | {self.chain.head if self.chain else b""}) - {b""}
        self.has_contents = bool(self.acknowledged and self.acknowledged.compared.number)


def examine_chain(
    chain: Chain, trainers: Mapping[str, TrainerAudit], consumer: str | None = None
) -> tuple[list[str], list[str], list[Problem]]:
    """Compare the chain of a checkpoint with what its trainer leased and committed.

    Returns:
        What is lost, what is there twice, and what else is wrong.

    Raises:
        InvalidArgumentError: several trainers could have written it; ``consumer`` says which.
    """
    trainer = _trainer_of(chain, trainers, consumer)
    leased = {manifest.digest: manifest for manifest in trainer.steps.values()}
    carried, earlier = chain.manifests, trainer.manifests_up_to(chain.manifests.before)
    through = [*(earlier or ()), *carried.last]
    times = Counter(through)
    unknown = 0 if earlier is not None else carried.length - len(carried.last)
    lost = [f"one of the manifests of the steps 1 to {unknown}"] if unknown else []
    lost += [manifest_text(digest) for digest in times if digest not in leased]
    known = [leased[digest] for digest in times if digest in leased]
    commit = _commit_of(chain, trainer)
    last = max((manifest.step for manifest in known), default=0)
    # The commit counts too: where the chain lacks its last manifests, their steps are lost, and
    # not merely later than the checkpoint.
    last = max(last, commit.step if commit is not None else 0)
    lost += [
        manifest_text(digest, leased.get(digest))
        for step, digest in sorted(trainer.live.items())
        if unknown < step <= last and digest not in times
    ]
    twice = {digest for digest, number in times.items() if number > 1}
    twice |= _sharing_rows(known)
    duplicated = [manifest_text(digest, leased.get(digest)) for digest in times if digest in twice]
    return [*dict.fromkeys(lost)], duplicated, _contradictions(chain, known, commit)


def _sharing_rows(known: Sequence[LeasedManifest]) -> set[bytes]:
    """Return the digests of manifests with an annotation row that an earlier one has too."""
    if not known:
        return set()
    rows = np.concatenate([unpacked(manifest.rows) for manifest in known])
    owners = np.repeat(np.arange(len(known)), [manifest.count for manifest in known])
    order = np.lexsort((owners, rows))
    rows, owners = rows[order], owners[order]
    again = (rows[1:] == rows[:-1]) & (owners[1:] != owners[:-1])
    return {known[index].digest for index in np.unique(owners[1:][again]).tolist()}


def _commit_of(chain: Chain, trainer: TrainerAudit) -> Commit | None:
    """Return the last commit of this checkpoint; it may have been moved since."""
    for commit in reversed(trainer.commits):
        if commit.checkpoint == str(chain.checkpoint):
            return commit
        if commit.digest is not None and commit.digest == chain.digest_like(commit.digest):
            return commit
    return None


def _contradictions(
    chain: Chain, known: Sequence[LeasedManifest], commit: Commit | None
) -> list[Problem]:
    where, problems = f"checkpoint {chain.checkpoint}", []
    steps = [manifest.step for manifest in known]
    if steps != sorted(steps):
        problems.append(Problem("commits", where, f"its chain goes through the steps {steps}"))
    if commit is None:
        problems.append(
            Problem("commits", where, f"no commit names its sha256, {chain.digest_like(None)}")
        )
    elif commit.digest != (digest := chain.digest_like(commit.digest)):
        what = f"its sha256 is {digest}, position {commit.position} recorded {commit.digest}"
        problems.append(Problem("commits", where, what))
    elif commit.chain != chain.manifests.link:
        what = f"position {commit.position} committed another chain of manifests than it carries"
        problems.append(Problem("commits", where, what))
    return problems


def _trainer_of(
    chain: Chain, trainers: Mapping[str, TrainerAudit], consumer: str | None
) -> TrainerAudit:
    if consumer is not None:
        return trainers[consumer]
    candidates = [t for t in trainers.values() if _commit_of(chain, t) is not None]
    candidates = candidates or [
        trainer
        for trainer in trainers.values()
        if {manifest.digest for manifest in trainer.steps.values()} & set(chain.manifests.last)
    ]
    candidates = candidates or list(trainers.values())
    if len(candidates) > 1:
        raise InvalidArgumentError(
            f"the checkpoint {chain.checkpoint} may be of several trainers "
            f"({', '.join(trainers)}): say which with consumer="
        )
    return candidates[0] if candidates else TrainerAudit("")
