"""The processes of a measurement: what writes, what decides, what trains."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from importlib import import_module
from multiprocessing.synchronize import Barrier
from typing import Any, NamedTuple

import torch

from benchmarks.peers.protocol import Job, Role, StoreClient
from benchmarks.peers.rollouts import Batch, padded, rollouts, scores

LIMIT_S = 90.0
"""How long a role goes on; what takes so long is no result."""
START_LIMIT_S = 120.0
"""Until all processes have imported and connected what they need."""


class WrongRowsError(Exception):
    """A store delivered something else than what it was given."""


class Span(NamedTuple):
    """What a role did, in seconds of the machine's monotonic clock.

    Attributes:
        ended: when the last of its rows was there.
        delays: of each row that was read, from the call of ``write`` on, in seconds.
        first_rows, first_ended: what the first call of ``read`` gave, and when.
    """

    role: Role
    began: float
    ended: float
    rows: int
    delays: tuple[float, ...] = ()
    first_rows: int = 0
    first_ended: float = 0.0


def play(role: Role, number: int, job: Job, address: Any, gate: Barrier, results: Any) -> None:
    """Run one role, the ``number``-th of its kind; put its `Span`, or a text that says what failed.

    Args:
        gate: opened when everybody is ready.
        results: a queue.
    """
    try:
        results.put(_played(role, number, job, address, gate))
    except Exception as error:
        results.put(f"{role}: {type(error).__name__}: {error}"[:300])
        gate.abort()
        raise


def _played(role: Role, number: int, job: Job, address: Any, gate: Barrier) -> Span:
    client = client_of(job, address)
    try:
        return PLAYED[role](client, number, job, gate)
    finally:
        client.close()


def client_of(job: Job, address: Any) -> StoreClient:
    """Return a client in this process, with the first calls of everything behind it."""
    torch.set_num_threads(1)
    padded((one.tokens, one.logprobs, one.mask, 0.0, 0.0) for one in rollouts(8))
    client: StoreClient = import_module(job.module).Client(address)
    return client


def fill(job: Job, address: Any) -> None:
    """Store all rollouts with their advantages."""
    client = client_of(job, address)
    try:
        for first in range(0, job.experiences, job.per_write):
            some = rollouts(job.per_write, first=first)
            client.write(some, scores([one.reward for one in some]))
        client.flush()
    finally:
        client.close()


def _write(client: StoreClient, number: int, job: Job, gate: Barrier) -> Span:
    """Write a share of whole groups, at its share of the rate."""
    share = job.experiences // job.writers
    given = rollouts(share, first=number * share)
    client.prepare("writer", job.per_write)
    gate.wait(START_LIMIT_S)
    began = time.monotonic()
    for at in range(0, share, job.per_write):
        if job.rate:
            time.sleep(max(0.0, began + at * job.writers / job.rate - time.monotonic()))
        some, now = given[at : at + job.per_write], time.monotonic()
        for one in some:
            one.written_at = now
        client.write(some)
    client.flush()
    return Span("writer", began, time.monotonic(), share)


def _decide(client: StoreClient, number: int, job: Job, gate: Barrier) -> Span:  # noqa: ARG001
    client.prepare("strategy", job.per_decision)
    gate.wait(START_LIMIT_S)
    began = ended = time.monotonic()
    done = 0
    while done < job.experiences and ended - began < LIMIT_S:
        decided = client.decide(job.per_decision)
        ended = time.monotonic()
        done += decided
        if not decided:
            time.sleep(client.poll_s)
    return Span("strategy", began, ended, done)


def _train(client: StoreClient, number: int, job: Job, gate: Barrier) -> Span:  # noqa: ARG001
    """Read everything, and look afterwards whether it is what was written, each row once."""
    if job.operation == "pass":  # what is stored already would be fetched before the clock runs
        client.prepare("trainer", job.per_read)
    gate.wait(START_LIMIT_S)
    began = ended = time.monotonic()
    delays: list[float] = []
    samples = []
    first: tuple[int, float] | None = None
    while len(delays) < job.experiences and time.monotonic() - began < LIMIT_S:
        batch = client.read(job.per_read)
        if batch is None:
            time.sleep(client.poll_s)
            continue
        ended = time.monotonic()
        delays += [ended - at for at in batch.written_at]
        first = first or (len(delays), ended)
        samples.append(_sample(batch))
    _require_all(job, samples)
    return Span("trainer", began, ended, len(delays), tuple(delays), *(first or (0, began)))


def _sample(batch: Batch) -> torch.Tensor:
    """Return a little of each row: two tokens, a log-prob, an advantage."""
    tokens, logprobs, advantages = batch.tokens, batch.logprobs, batch.advantages
    columns = (tokens[:, 0], tokens[:, -1], logprobs[:, -1], advantages[:, -1])
    return torch.stack([column.double() for column in columns], dim=1)


def _require_all(job: Job, samples: Sequence[torch.Tensor]) -> None:
    """Raise if these rows are not those that were written, in whatever order.

    Raises:
        WrongRowsError: some are missing, repeated or changed.
    """
    number = sum(map(len, samples))
    if number < job.experiences:
        raise WrongRowsError(f"{number} of {job.experiences} rows came within {LIMIT_S:g} s")
    given = rollouts(job.experiences)
    advantages = scores([one.reward for one in given])
    expected = _sample(
        padded(
            (one.tokens, one.logprobs, one.mask, advantage, 0.0)
            for one, advantage in zip(given, advantages, strict=True)
        )
    )
    found, wanted = _sorted(torch.cat(list(samples))), _sorted(expected)
    if found.shape != wanted.shape or not torch.allclose(found, wanted, rtol=0.0, atol=1e-3):
        raise WrongRowsError("rows came that are repeated, or not as they were written")


def _sorted(samples: torch.Tensor) -> torch.Tensor:
    return samples[(samples[:, 0] * 2**20 + samples[:, 1]).argsort()]


PLAYED: dict[Role, Callable[[StoreClient, int, Job, Barrier], Span]] = {
    "writer": _write,
    "strategy": _decide,
    "trainer": _train,
}
