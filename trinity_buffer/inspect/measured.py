"""What trainers measured in gradient steps, row by row and token by token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trinity_buffer.codec import Segment
from trinity_buffer.events import (
    MEASURED_ROWS,
    MEASURED_TOKENS,
    BatchLeased,
    StepMeasured,
    StepsCommitted,
)
from trinity_buffer.inspect.blobs import events_with_segments
from trinity_buffer.inspect.source import Source
from trinity_buffer.inspect.tensors import elements_of
from trinity_buffer.store import trainer_queries
from trinity_buffer.store.rows import StepRow

Numbers = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """What a trainer measured in one step; `StepMeter` says what each number is.

    Attributes:
        metrics: numbers of the whole step.
        rows: name -> ``[rows]``; NaN where a row has no such number.
        tokens: name -> ``[tokens]`` of each row, where that was asked for.
        places: (experiment, address of the annotation) -> row; "" is the trainer's own experiment.
    """

    step: int
    metrics: Mapping[str, float]
    rows: Mapping[str, Numbers]
    tokens: Segment | None
    places: Mapping[tuple[str, int], int]

    def of_row(self, annotation: int, experiment: str = "") -> dict[str, float]:
        """Return the numbers that a row has, by the address of its annotation."""
        row = self.places[experiment, annotation]
        found = {name: float(values[row]) for name, values in self.rows.items()}
        return {name: value for name, value in found.items() if not np.isnan(value)}

    def of_tokens(self, annotation: int, experiment: str = "") -> dict[str, Numbers]:
        """Return name -> ``[tokens]`` of a row; empty where none were recorded."""
        if self.tokens is None:
            return {}
        row = self.places[experiment, annotation]
        found = {name: elements_of(self.tokens, name, row) for name in self.tokens.columns}
        return {name: values for name, values in found.items() if values is not None}


async def measured(
    source: Source, trainer: str, steps: Sequence[int], *, tokens: bool = False
) -> dict[int, Measured]:
    """Return step -> what ``trainer`` measured in it, of the committed ones that it measured.

    Args:
        tokens: also what it recorded token by token.

    Raises:
        DamagedSegmentError: a checksum does not hold.
    """
    if not steps:
        return {}
    rows = await source.read(
        trainer_queries.steps,
        source.key,
        trainer,
        after=min(steps) - 1,
        limit=max(steps) - min(steps) + 1,
    )
    wanted = {row.step: row for row in rows if row.step in set(steps) and row.committed_at}
    positions = await _positions(source, trainer, wanted)
    families = [MEASURED_ROWS, *([MEASURED_TOKENS] if tokens else [])]
    whose = {position: f"step {step} of {trainer}" for step, position in positions.items()}
    told = await events_with_segments(source, whose, families)
    places = await _places(source, [wanted[step] for step in positions])
    found = {}
    for step, position in positions.items():
        fact, segments = told[position].fact, told[position].families
        assert isinstance(fact, StepMeasured)  # what stands at these positions
        one = segments.get(MEASURED_ROWS)
        columns = {} if one is None else {n: some[0].elements for n, some in one.columns.items()}
        kept = segments.get(MEASURED_TOKENS)
        found[step] = Measured(step, fact.metrics, columns, kept, places[step])
    return found


async def _positions(source: Source, trainer: str, wanted: Mapping[int, StepRow]) -> dict[int, int]:
    """Return step -> position of its `StepMeasured`: it stands behind the commit of the step."""
    commits = await source.events([row.committed_at or 0 for row in wanted.values()])
    behind = [
        at + number
        for at, event in commits.items()
        if isinstance(event.fact, StepsCommitted)
        for number in range(1, len(event.fact.steps) + 2)  # a PolicyPublished may come first
    ]
    found = {}
    for position, event in (await source.events(behind)).items():
        fact = event.fact
        if isinstance(fact, StepMeasured) and fact.consumer == trainer and fact.step in wanted:
            found[fact.step] = position
    return found


async def _places(source: Source, rows: Sequence[StepRow]) -> dict[int, dict[tuple[str, int], int]]:
    """Return step -> where each annotation stands in its manifest, as it was served last."""
    leases = await source.leases([row.leased_at for row in rows])
    return {
        row.step: {name: place for place, name in enumerate(_names(leases[row.leased_at]))}
        for row in rows
    }


def _names(lease: BatchLeased) -> Iterator[tuple[str, int]]:
    """Yield experiment and address of the annotation of each row."""
    names = ["", *lease.sources]
    for row, annotation in enumerate(lease.annotations):
        yield names[lease.source[row]] if lease.source else "", annotation
