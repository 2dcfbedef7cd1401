"""The proof from outside: what explorers and checkpoints remember, against what the log holds.

A store cannot know what it lost. Explorers append the lines of each receipt (uid, content digest,
head) to a file of their own after ``write`` returned; a checkpoint names the manifests that its
weights really went through. Neither asks the store.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np

from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.limits import sizes
from trinity_buffer.pipeline.manifest import ManifestChain
from trinity_buffer.pipeline.train import checkpoint as checkpoints
from trinity_buffer.pipeline.train.checkpoint import version_of
from trinity_buffer.pipeline.verify.addresses import Names, unpacked
from trinity_buffer.pipeline.verify.log_audit import Commit, LeasedManifest, TrainerAudit
from trinity_buffer.pipeline.verify.report import Problem

_SLASHES_OF_UID = 4


class Acknowledged:
    """What explorers were told is durable: hashes alone, of files that may be as long as the run.

    Args:
        files: of lines; each is a uid, and perhaps a content digest and a head, by tabs.

    Attributes:
        uids: of all lines.
        compared: those that came with a content digest.
        heads: of the log, when each line was written.

    Raises:
        InvalidArgumentError: a file is no text, or cannot be read.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        self.uids = Names()
        self.compared = Names()
        self._contents = Names()
        self.heads: set[bytes] = set()
        for lines in _pages_of(files):
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
                    whole = (line.rstrip("\n") for line in page if _is_complete(line))
                    yield [line for line in whole if line]
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgumentError(f"{path} cannot be read as uids: {error}") from error


def _is_complete(line: str) -> bool:
    return line.endswith("\n") or line.count("/") >= _SLASHES_OF_UID


def _hex(text: str) -> bytes:
    """Return the bytes of a digest, none of what a kill cut short."""
    return bytes.fromhex(text) if len(text) in (32, 64) and _HEX.issuperset(text) else b""


_HEX = frozenset("0123456789abcdef")
_HEAD_DIGITS = 64


@dataclass(frozen=True, slots=True)
class Chain:
    """What a checkpoint says it was trained on.

    Attributes:
        checkpoint: the file or folder.
        manifests: what its weights went through.
        digest: of the checkpoint itself, of the version that is made now.
        head: of the log, when its last step was handed out; empty where it does not say so.
    """

    checkpoint: Path
    manifests: ManifestChain
    digest: str
    head: bytes
    _of_version: dict[int, str] = field(default_factory=dict, compare=False)

    def digest_like(self, recorded: str | None) -> str:
        """Return the digest of the checkpoint, of the version of a recorded one.

        Raises:
            CheckpointError: that version is not known, or the checkpoint is gone meanwhile.
        """
        version = version_of(recorded)
        if version == version_of(None):
            return self.digest
        if version not in self._of_version:  # it reads all files again: of a large one, slowly
            self._of_version[version] = checkpoints.digest_of(self.checkpoint, like=recorded)
        return self._of_version[version]


@dataclass(frozen=True, slots=True)
class ChainFindings:
    """What the chain of a checkpoint and the log say of each other."""

    lost: tuple[str, ...]
    duplicated: tuple[str, ...]
    problems: tuple[Problem, ...]


def read_acknowledged(place: Path) -> Acknowledged:
    """Read the acknowledgements of a file, or of all files of a folder.

    A line is one of `WriteReceipt.lines`, or a uid alone.

    Raises:
        InvalidArgumentError: there is no such file or folder, or a file is no text.
    """
    if not place.exists():
        raise InvalidArgumentError(f"acknowledged={place}: there is no such file or folder")
    files = sorted(f for f in place.rglob("*") if f.is_file()) if place.is_dir() else [place]
    return Acknowledged(files)


def read_chain(checkpoint: Path) -> Chain:
    """Return the chain that a checkpoint carries.

    Raises:
        CheckpointError: it carries none, or is missing.
    """
    manifests = checkpoints.read_manifest_chain(checkpoint)
    digest, head = checkpoints.digest_of(checkpoint), checkpoints.read_head(checkpoint)
    return Chain(checkpoint.absolute(), manifests, digest, head)


def manifest_text(digest: bytes, leased: LeasedManifest | None = None) -> str:
    """Return how a manifest is told in a report."""
    place = "" if leased is None else f" (step {leased.step}, position {leased.position})"
    return f"manifest {digest.hex()}{place}"


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that was given from outside of the store; None: not given."""

    acknowledged: Acknowledged | None
    chain: Chain | None
    heads: frozenset[bytes]

    @property
    def has_contents(self) -> bool:
        """Whether there are content digests to compare."""
        return self.acknowledged is not None and self.acknowledged.compared.number > 0


def read_evidence(acknowledged: Path | None, checkpoint: Path | None, head: str | None) -> Evidence:
    """Read the evidence from outside of the store.

    Raises:
        InvalidArgumentError: something cannot be read.
        CheckpointError: the checkpoint is missing or names no manifests.
    """
    receipts = None if acknowledged is None else read_acknowledged(Path(acknowledged))
    chain = None if checkpoint is None else read_chain(Path(checkpoint))
    heads = set() if receipts is None else receipts.heads
    if chain is not None and chain.head:
        heads = heads | {chain.head}
    if head is not None:
        if len(head) != _HEAD_DIGITS or not _hex(head):
            raise InvalidArgumentError(f"head={head!r}: a head is {_HEAD_DIGITS} digits of hex")
        heads = heads | {_hex(head)}
    return Evidence(receipts, chain, frozenset(heads))


def examine_chain(
    chain: Chain, trainers: Mapping[str, TrainerAudit], consumer: str | None = None
) -> ChainFindings:
    """Compare the chain of a checkpoint with what its trainer leased and committed.

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
    return ChainFindings(
        tuple(dict.fromkeys(lost)),
        tuple(manifest_text(digest, leased.get(digest)) for digest in times if digest in twice),
        tuple(_contradictions(chain, known, commit)),
    )


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
        problems.append(Problem("commits", where, f"no commit names its sha256, {chain.digest}"))
    elif commit.digest != (digest := chain.digest_like(commit.digest)):
        what = f"its sha256 is {digest}, position {commit.position} recorded {commit.digest}"
        problems.append(Problem("commits", where, what))
    elif commit.chain != chain.manifests.link:
        what = f"position {commit.position} committed another chain of manifests than it carries"
        problems.append(Problem("commits", where, what))
    return problems


def require_trainer(trainers: Mapping[str, TrainerAudit], consumer: str) -> None:
    """Raise unless ``consumer`` is one of the trainers.

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
        if {manifest.digest for manifest in trainer.steps.values()} & set(chain.manifests.last)
    ]
    candidates = candidates or list(trainers.values())
    if len(candidates) > 1:
        raise InvalidArgumentError(
            f"the checkpoint {chain.checkpoint} may be of several trainers "
            f"({', '.join(trainers)}): say which with consumer="
        )
    return candidates[0] if candidates else TrainerAudit("")
