"""The workload of the comparison: what each store is given, and what it has to deliver.

It is that of `benchmarks.workload`, in NumPy: the interpreters of other people's packages read it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

T = TypeVar("T")
Array = NDArray[Any]

RUNS = 8
PROMPT, RESPONSE = 256, 1024
TEXT = ("The quick brown fox reasons step by step about the answer. " * 40)[:2048]


@dataclass(slots=True)
class Rollout:
    """What an explorer hands to a store.

    Attributes:
        number: of all rollouts, from 0 on; every `RUNS` of them are the runs of a task.
        tokens: prompt and response, ``(PROMPT + RESPONSE,)`` int32.
        logprobs, mask: of the response, ``(RESPONSE,)`` float32 and bool.
        written_at: when the call of ``write`` began, in seconds of the machine's monotonic clock.
    """

    number: int
    tokens: Array
    logprobs: Array
    mask: Array
    reward: float
    text: str = TEXT
    written_at: float = 0.0

    @property
    def task(self) -> int:
        """Which task it is an attempt at."""
        return self.number // RUNS

    @property
    def run(self) -> int:
        """Which of the attempts at its task it is."""
        return self.number % RUNS


def rollouts(number: int, *, first: int = 0) -> list[Rollout]:
    """Return the rollouts from ``first`` on, each always the same."""
    return [_rollout(at) for at in range(first, first + number)]


def _rollout(number: int) -> Rollout:
    random = np.random.default_rng(number)
    return Rollout(
        number=number,
        tokens=random.integers(0, 151_000, PROMPT + RESPONSE, dtype=np.int32),
        logprobs=-random.random(RESPONSE, dtype=np.float32),
        mask=np.ones(RESPONSE, dtype=np.bool_),
        reward=float(random.random() < 0.5) + 0.01 * (number % RUNS),
    )


def scores(rewards: Sequence[float] | Array) -> Array:
    """Return the advantages of groups of `RUNS` rewards, one after the other, as GRPO has them."""
    groups = np.asarray(rewards, np.float32).reshape(-1, RUNS)
    spread = groups.std(axis=1, ddof=1, keepdims=True) + 1e-6
    found: Array = (groups - groups.mean(axis=1, keepdims=True)) / spread
    return found.reshape(-1)


class Groups(Generic[T]):
    """Rows of tasks of which some runs are still to come."""

    def __init__(self) -> None:
        self._waiting: dict[int, list[T]] = {}

    def add(self, task: int, row: T) -> list[T]:
        """Keep a row; return all of its task if it is the last one, or else nothing."""
        rows = self._waiting.setdefault(task, [])
        rows.append(row)
        return self._waiting.pop(task) if len(rows) == RUNS else []


@dataclass(frozen=True, slots=True)
class Batch:
    """What a trainer gets: a row each in padded tensors.

    Attributes:
        tokens: ``(rows, longest prompt and response)``.
        logprobs, mask, advantages: ``(rows, longest response)``; advantages are 0 off the mask.
        written_at: one per row, as the rollouts had it.
    """

    tokens: torch.Tensor
    logprobs: torch.Tensor
    mask: torch.Tensor
    advantages: torch.Tensor
    written_at: Sequence[float]


def padded(rows: Iterable[tuple[Array, Array, Array, float, float]]) -> Batch:
    """Return rows of (tokens, logprobs, mask, advantage, written_at) as a batch."""
    given = list(rows)
    long = max(len(row[0]) for row in given)
    answer = max(len(row[1]) for row in given)
    tokens = np.zeros((len(given), long), np.int32)
    logprobs = np.zeros((len(given), answer), np.float32)
    mask = np.zeros((len(given), answer), np.bool_)
    for at, row in enumerate(given):
        tokens[at, : len(row[0])] = row[0]
        logprobs[at, : len(row[1])] = row[1]
        mask[at, : len(row[2])] = row[2]
    advantages = mask * np.array([row[3] for row in given], np.float32)[:, None]
    return Batch(
        torch.from_numpy(tokens),
        torch.from_numpy(logprobs),
        torch.from_numpy(mask),
        torch.from_numpy(advantages),
        [row[4] for row in given],
    )
