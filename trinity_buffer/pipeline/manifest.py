"""The manifest of a gradient step: its rows, their order and micro-batches.

The event that records its lease is the manifest. A checkpoint records the chain of the manifests
that its weights were trained on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from heapq import heappop, heappush
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from trinity_buffer.errors import CodecError
from trinity_buffer.events import BatchLeased, StepDealt
from trinity_buffer.options import Layout
from trinity_buffer.pipeline.handle import ExperimentHandle, decoded, fact_at, stored_at
from trinity_buffer.store.rows import StepRow
from trinity_buffer.store.transaction import ReadSession, Transaction


class MicroBatchPlan(NamedTuple):
    """One micro-batch: the rows ``start`` to ``stop`` of the manifest, on one rank.

    It is empty if its rank has fewer rows than another rank has micro-batches.

    Attributes:
        width: padded: the width of the tensors; packed: their total number of tokens.
    """

    start: int
    stop: int
    width: int
    rank: int = 0


def plans_of(fact: BatchLeased | StepDealt) -> list[MicroBatchPlan]:
    """Return the micro-batches that an event recorded.

    Raises:
        CodecError: an invalid micro-batch.
    """
    # Older versions recorded no rank, which then is 0.
    if any(len(plan) not in (3, 4) for plan in fact.microbatches):
        raise CodecError(f"the manifest of step {fact.step} is damaged: invalid micro-batch")
    return [MicroBatchPlan(*plan) for plan in fact.microbatches]


def rows_by_rank(lease: BatchLeased) -> list[int]:
    """Return the number of rows of each rank; each has at least one micro-batch, if an empty one.

    Raises:
        CodecError: an invalid micro-batch.
    """
    plans = plans_of(lease)
    numbers = [0] * (1 + max(plan.rank for plan in plans))
    for plan in plans:
        numbers[plan.rank] += plan.stop - plan.start
    return numbers


def manifest_digest(lease: BatchLeased) -> bytes:
    """Return blake2b-128 over everything that determines what a step computes."""
    rows = (lease.annotations, lease.experiences, lease.groups)
    # Of integers, msgspec writes the same JSON in a tenth of the time; not of all texts and floats.
    content = [
        *(json.dumps(value).encode() for value in (lease.step, lease.annotation_set)),
        *map(msgspec.json.encode, rows),
        json.dumps(lease.layout).encode(),
        msgspec.json.encode(plans_of(lease)),
        json.dumps(lease.normalizer).encode(),
    ]
    # Steps of a single source leave both columns empty, as all older logs did.
    if lease.sources:
        names = json.dumps(lease.sources, separators=(",", ":")).encode()
        content += [names, msgspec.json.encode(lease.source)]
    return hashlib.blake2b(b"[%s]" % b",".join(content), digest_size=16).digest()


def repartitioned(
    lease: BatchLeased, order: Sequence[int], microbatches: Sequence[Sequence[int]]
) -> BatchLeased:
    """Return a manifest of only the rows ``order``, in that order and these micro-batches."""
    columns = {name: getattr(lease, name) for name in _COLUMNS}
    changes = {name: [of[place] for place in order] if of else [] for name, of in columns.items()}
    plans, num_groups = [[*plan] for plan in microbatches], len(set(changes["groups"]))
    changed = replace(lease, **changes, num_groups=num_groups, microbatches=plans)
    return replace(changed, digest=manifest_digest(changed))


_COLUMNS = ("annotations", "experiences", "groups", "source")


class LeasedStep(NamedTuple):
    """A leased step: its position, its first manifest, and the manifest it is served by.

    Attributes:
        order: places of the served rows in the first manifest.
        head: head of the log at the last event that determines the partition.
    """

    position: int
    first: BatchLeased
    order: Sequence[int]
    manifest: BatchLeased
    head: bytes | None


def leased_steps(
    tx: Transaction, key: int, experiment: str, positions: Sequence[int]
) -> dict[int, LeasedStep]:
    """Return position -> step, of steps that were leased or repartitioned at these positions.

    If a step was repartitioned, its last `StepDealt` determines its rows and their order.

    Raises:
        CodecError: an event is missing, its body is damaged, or it is not the lease of a step.
    """
    stored = stored_at(tx, key, experiment, positions)
    facts = {at: decoded(experiment, event).fact for at, event in stored.items()}
    # A `StepDealt` holds only the order; the rows are in the lease that it refers to.
    first_at = {at: fact.leased_at for at, fact in facts.items() if isinstance(fact, StepDealt)}
    first = stored | stored_at(tx, key, experiment, first_at.values())
    steps = {}
    for at, fact in facts.items():
        leased_at = first_at.get(at, at)
        lease = manifest = fact_at(experiment, first[leased_at], BatchLeased)
        order: Sequence[int] = range(len(lease.groups))
        if isinstance(fact, StepDealt):
            order, manifest = fact.order, repartitioned(lease, fact.order, plans_of(fact))
            manifest = replace(manifest, token=fact.token, digest=fact.digest)
        steps[at] = LeasedStep(leased_at, lease, order, manifest, stored[at].head)
    return steps


def leased_step(s: ReadSession, experiment: ExperimentHandle, row: StepRow) -> LeasedStep:
    """Return a leased step with its current partition, as it is served.

    Raises:
        CodecError: the body of its event is damaged.
    """
    at = row.leased_at
    step = s.read(leased_steps, experiment.key, experiment.name, [at])[at]
    # What weights go through is named by its content, not by what the log says of it.
    return step._replace(manifest=replace(step.manifest, digest=manifest_digest(step.manifest)))


def plan_microbatches(
    lengths: Sequence[int],
    groups: Sequence[int],
    *,
    layout: Layout,
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
    """
    order: list[int] = []
    per_rank = []
    size = 2 if pairs and layout == "padded" else 1
    ranks = [[*range(len(lengths))]]
    if world_size > 1:
        ranks = _on_ranks(lengths, groups, world_size)
    for rows in ranks:
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


def _on_ranks(lengths: Sequence[int], groups: Sequence[int], world_size: int) -> list[list[int]]:
    """Return the rows of each rank, with whole groups together."""
    members: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    loads = [(sum(lengths[row] for row in rows), rows) for rows in members.values()]
    ranks: list[tuple[int, int, list[int]]] = [(0, rank, []) for rank in range(world_size)]
    for tokens, rows in sorted(loads, key=lambda load: -load[0]):
        load, rank, own = heappop(ranks)
        heappush(ranks, (load + tokens, rank, own + rows))
    return [sorted(rows) for _, _, rows in sorted(ranks, key=lambda of: of[1])]


def _fill(
    rows: Sequence[int], lengths: Sequence[int], layout: Layout, budget: int | None, size: int = 1
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
