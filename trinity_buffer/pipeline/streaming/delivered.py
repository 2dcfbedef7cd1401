"""The steps in a trainer's hands: what is said of them when they are committed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.pipeline.streaming.manifest import Manifest
from trinity_buffer.pipeline.streaming.stream_options import TrainStep


class _Delivered(NamedTuple):
    manifest: Manifest
    rows: int


class DeliveredSteps:
    """Steps that were delivered and are not committed, without their tensors."""

    def __init__(self) -> None:
        self._steps: dict[int, _Delivered] = {}

    def add(self, step: TrainStep) -> None:
        """Note that ``step`` was delivered."""
        self._steps[step.step] = _Delivered(step.manifest, step.rows)

    def between(self, committed: int, last: int) -> list[int]:
        """Return the steps after ``committed`` up to ``last``.

        Raises:
            InvalidArgumentError: one of them was not delivered.
        """
        steps = list(range(committed + 1, last + 1))
        missing = [number for number in steps if number not in self._steps]
        if missing:
            raise InvalidArgumentError(
                f"commit of step {last}: step {missing[0]} was not delivered by this stream"
            )
        return steps

    def digests(self, steps: Sequence[int]) -> list[bytes]:
        """Return the digests of the manifests of ``steps``."""
        return [self._steps[step].manifest.digest for step in steps]

    def rows(self, steps: Sequence[int]) -> list[int]:
        """Return how many rows of each of ``steps`` this rank was given."""
        return [self._steps[step].rows for step in steps]

    def require_rows(self, steps: Sequence[int], by_rank: Sequence[Sequence[int]]) -> None:
        """Return if each rank took the rows of ``steps`` that it was dealt.

        Args:
            steps: about to be committed.
            by_rank: of each step, how many rows each rank took, by its own account.

        Raises:
            InvalidArgumentError: rows of a step were not taken, or too many.
        """
        for step, taken in zip(steps, by_rank, strict=True):
            dealt = self._steps[step].manifest.rows_by_rank()
            if taken != dealt:
                raise InvalidArgumentError(
                    f"commit of step {step}: its ranks took {taken} rows, they were dealt {dealt}: "
                    "start all ranks again, they resume from the last commit"
                )

    def forget(self, steps: Sequence[int]) -> None:
        """Forget steps that are committed."""
        for step in steps:
            del self._steps[step]
