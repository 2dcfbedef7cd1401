"""The manifest of a gradient step: its rows, their order and micro-batches.

A checkpoint records the chain of the manifests that its weights were trained on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import Literal, cast

from trinity_buffer.errors import CodecError, InvalidArgumentError
from trinity_buffer.events import BatchLeased, StepDealt

LayoutName = Literal["padded", "packed"]


@dataclass(frozen=True, slots=True)
class MicroBatchPlan:
    """One micro-batch: the rows ``start`` to ``stop`` of the manifest, on one rank.

    It is empty if its rank has fewer rows than another rank has micro-batches.

    Attributes:
        width: padded: the width of the tensors; packed: their total number of tokens.
    """

    start: int
    stop: int
    width: int
    rank: int = 0


@dataclass(frozen=True)
class Manifest:
    """An ordered list of (experience, annotation, micro-batch slot), as `BatchLeased` records it.

    Attributes:
        step: the gradient step, 1, 2, ... of this trainer.
        annotation_set: the set that the annotations belong to.
        annotations, experiences: log addresses, one per row, in the order of the rows.
        groups: per row, a number that rows of one group share.
        num_planned_groups: number of planned groups (copies and imports are not planned).
        layout: ``"padded"`` or ``"packed"``.
        normalizer: divisor of loss modes that divide by a constant; None: they need their own.
        sources: names of other experiments whose rows are an expert's; empty: no expert rows.
        source: per row, 0 for the trainer's own experiment, k for ``sources[k - 1]``; empty: all 0.
        by_run: whether micro-batches contain the run of each row.
    """

    step: int
    annotation_set: str
    annotations: tuple[int, ...]
    experiences: tuple[int, ...]
    groups: tuple[int, ...]
    num_planned_groups: int
    layout: LayoutName
    microbatches: tuple[MicroBatchPlan, ...]
    normalizer: float | None = None
    sources: tuple[str, ...] = ()
    source: tuple[int, ...] = ()
    by_run: bool = False

    @property
    def num_groups(self) -> int:
        """Number of groups that the step trains on."""
        return len(set(self.groups))

    @property
    def world_size(self) -> int:
        """Number of ranks of the step: each has at least one micro-batch, if an empty one."""
        return 1 + max(plan.rank for plan in self.microbatches)

    def rows_by_rank(self) -> list[int]:
        """Return the number of rows of each rank."""
        numbers = [0] * self.world_size
        for plan in self.microbatches:
            numbers[plan.rank] += plan.stop - plan.start
        return numbers

    def repartitioned(
        self, order: Sequence[int], microbatches: Sequence[MicroBatchPlan]
    ) -> Manifest:
        """Return the manifest of only the rows ``order``, in that order and these micro-batches."""

        def placed(column: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(column[place] for place in order)

        return replace(
            self,
            annotations=placed(self.annotations),
            experiences=placed(self.experiences),
            groups=placed(self.groups),
            source=placed(self.source) if self.source else (),
            microbatches=tuple(microbatches),
        )

    def rows_of(self, source: int) -> list[int]:
        """Return the places of the rows that come from ``source``, in order."""
        if not self.source:
            return [] if source else list(range(len(self.experiences)))
        return [row for row, of in enumerate(self.source) if of == source]

    @cached_property
    def digest(self) -> bytes:
        """blake2b-128 over everything that determines what the step computes."""
        content = [
            self.step,
            self.annotation_set,
            self.annotations,
            self.experiences,
            self.groups,
            self.layout,
            [[m.start, m.stop, m.width, m.rank] for m in self.microbatches],
            self.normalizer,
        ]
        if self.sources:
            content += [self.sources, self.source]
        return hashlib.blake2b(
            json.dumps(content, separators=(",", ":")).encode(), digest_size=16
        ).digest()

    def leased_by(self, consumer: str, token: int) -> BatchLeased:
        """Return the event that records the lease of the step by ``consumer``."""
        return BatchLeased(
            sources=list(self.sources),
            source=list(self.source) if self.sources else [],
            consumer=consumer,
            token=token,
            step=self.step,
            annotation_set=self.annotation_set,
            annotations=list(self.annotations),
            experiences=list(self.experiences),
            groups=list(self.groups),
            num_groups=self.num_groups,
            planned_groups=self.num_planned_groups,
            layout=self.layout,
            microbatches=[[m.start, m.stop, m.width, m.rank] for m in self.microbatches],
            normalizer=self.normalizer,
            digest=self.digest,
            by_run=self.by_run or None,
        )

    @classmethod
    def of(cls, leased: BatchLeased) -> Manifest:
        """Return the manifest that an event recorded.

        Raises:
            CodecError: an invalid layout or micro-batch.
        """
        if leased.layout not in ("padded", "packed"):
            raise CodecError(f"the manifest of step {leased.step} is damaged: unknown layout")
        return cls(
            step=leased.step,
            annotation_set=leased.annotation_set,
            annotations=tuple(leased.annotations),
            experiences=tuple(leased.experiences),
            groups=tuple(leased.groups),
            num_planned_groups=leased.planned_groups,
            layout=cast("LayoutName", leased.layout),
            microbatches=plans_of(leased),
            normalizer=leased.normalizer,
            # Steps of a single source leave the column empty, as all older logs did.
            sources=tuple(leased.sources),
            source=tuple(leased.source),
            by_run=bool(leased.by_run),
        )


def plans_of(fact: BatchLeased | StepDealt) -> tuple[MicroBatchPlan, ...]:
    """Return the micro-batches that an event recorded.

    Raises:
        CodecError: an invalid micro-batch.
    """
    plans = fact.microbatches
    # Older versions recorded no rank, which then is 0.
    if any(len(plan) not in (3, 4) for plan in plans):
        raise CodecError(f"the manifest of step {fact.step} is damaged: invalid micro-batch")
    return tuple(MicroBatchPlan(*plan) for plan in plans)


def plan_microbatches(
    lengths: Sequence[int],
    groups: Sequence[int],
    *,
    layout: LayoutName,
    tokens_per_microbatch: int | None,
    world_size: int = 1,
    pairs: bool = False,
    by_length: bool = True,
) -> tuple[list[int], list[MicroBatchPlan]]:
    """Return an order of the rows, and the micro-batches over it.

    A group stays on one rank; groups are assigned by their tokens, the largest first. Within a
    rank, padded rows are sorted by length to save padding. The budget counts computed tokens:
    rows × width when padded, tokens when packed; a row above it is a micro-batch of its own. Every
    rank gets the same number of micro-batches, empty ones if it has too few rows, so that it takes
    part in every collective.

    Args:
        lengths: tokens of each row; of a pair those of its longer half, or packed those of both.
        groups: per row, a number that rows of one group share.
        pairs: every row stands for two, the chosen and the rejected one, and rows keep their order
            so that pairs stay together.
        by_length: whether rows may be sorted by length.

    Raises:
        InvalidArgumentError: a budget that is not positive.
    """
    if tokens_per_microbatch is not None and tokens_per_microbatch < 1:
        raise InvalidArgumentError(
            f"tokens_per_microbatch={tokens_per_microbatch}: it must be at least 1"
        )
    order: list[int] = []
    per_rank = []
    size = 2 if pairs and layout == "padded" else 1
    for rows in _assign_to_ranks(lengths, groups, world_size):
        if by_length and layout == "padded" and tokens_per_microbatch is not None and not pairs:
            rows = sorted(rows, key=lambda row: -lengths[row])
        per_rank.append(_fill(rows, lengths, layout, tokens_per_microbatch, size))
    most = max(1, *map(len, per_rank))  # 1: a step that lost all its rows
    plans = []
    for rank, chunks in enumerate(per_rank):
        for chunk in _split_to(chunks, most):
            start, order = len(order), order + chunk
            sizes = [lengths[row] for row in chunk]
            # Models mostly accept no rows, but hardly any accepts no columns.
            width = max(sizes, default=1) if layout == "padded" else sum(sizes)
            plans.append(MicroBatchPlan(start, len(order), width, rank))
    return order, plans


def _assign_to_ranks(
    lengths: Sequence[int], groups: Sequence[int], world_size: int
) -> list[list[int]]:
    """Return the rows of each rank, with whole groups together."""
    if world_size == 1:
        return [list(range(len(lengths)))]
    members: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    ranks: list[list[int]] = [[] for _ in range(world_size)]
    load = [0] * world_size
    for rows in sorted(members.values(), key=lambda rows: -sum(lengths[row] for row in rows)):
        rank = min(range(world_size), key=lambda r: (load[r], r))
        ranks[rank] += rows
        load[rank] += sum(lengths[row] for row in rows)
    return [sorted(rows) for rows in ranks]


def _fill(
    rows: Sequence[int],
    lengths: Sequence[int],
    layout: LayoutName,
    budget: int | None,
    size: int = 1,
) -> list[list[int]]:
    if budget is None:
        return [list(rows)] if rows else []
    chunks: list[list[int]] = []
    width = total = 0
    for row in rows:
        width, total = max(width, lengths[row]), total + lengths[row]
        computed = width * (len(chunks[-1]) + 1 if chunks else 1) if layout == "padded" else total
        if not chunks or size * computed > budget:
            chunks.append([])
            width = total = lengths[row]
        chunks[-1].append(row)
    return chunks


def _split_to(chunks: list[list[int]], number: int) -> list[list[int]]:
    """Return exactly ``number`` chunks: halve the longest, then add empty ones.

    All ranks must run equally often.
    """
    chunks = list(chunks)
    while len(chunks) < number:
        longest = max(range(len(chunks)), key=lambda i: len(chunks[i]), default=-1)
        rows = chunks[longest] if chunks else []
        if len(rows) < 2:
            chunks.append([])
        else:
            chunks[longest : longest + 1] = [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
    return chunks


def chain(previous: bytes, digest: bytes) -> bytes:
    """Return the next link of a checkpoint's chain: blake2b-128(previous || digest)."""
    return hashlib.blake2b(previous + digest, digest_size=16).digest()


FIRST_LINK = bytes(16)

NAMED_MANIFESTS = 256
"""A checkpoint lists so many of the last manifests, and the chain of those before."""


@dataclass(frozen=True, slots=True)
class ManifestChain:
    """The manifests that weights were trained on, in order: the last ones, and a hash of the rest.

    Its size is bounded, and it does not depend on where the run was interrupted.

    Attributes:
        length: number of manifests.
        before: link of the chain before ``last``.
        last: digests of the last manifests.
    """

    length: int = 0
    before: bytes = FIRST_LINK
    last: tuple[bytes, ...] = ()

    @property
    def link(self) -> bytes:
        """The link of the chain after the last manifest."""
        return reduce(chain, self.last, self.before)

    def after(self, *digests: bytes) -> ManifestChain:
        """Return the chain extended by the manifests of ``digests``."""
        last = (*self.last, *digests)
        gone, named = last[:-NAMED_MANIFESTS], last[-NAMED_MANIFESTS:]
        return ManifestChain(self.length + len(digests), reduce(chain, gone, self.before), named)
