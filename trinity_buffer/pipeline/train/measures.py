"""What a trainer measured of a gradient step, row by row: the segment beside its commit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from torch import Tensor

from trinity_buffer.codec import Column, content_digest, encode_segment
from trinity_buffer.events import MEASURED_ROWS, MEASURED_TOKENS, StepMeasured
from trinity_buffer.pipeline.handle import new_event
from trinity_buffer.pipeline.tensors import columns_of
from trinity_buffer.store.log import NewEvent
from trinity_buffer.store.segments import SegmentRow, SegmentStore, new_key

Numbers = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class StepMeasures:
    """What was measured of one step.

    Attributes:
        rows: name -> ``[rows of the manifest]``, NaN where a row has no such number.
        metrics: numbers of the whole step.
        tokens: name -> for each row of the manifest ``[its tokens]``; empty where not asked for.
    """

    step: int
    rows: Mapping[str, Numbers]
    metrics: Mapping[str, float] = field(default_factory=dict)
    tokens: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)


def measured_events(
    consumer: str, measures: Sequence[StepMeasures], store: SegmentStore
) -> tuple[list[NewEvent], list[SegmentRow]]:
    """Return the events that record ``measures``, and what was put into ``store`` for them.

    Encodes: call it off the event loop.
    """
    events: list[NewEvent] = []
    rows: list[SegmentRow] = []
    for step_measures in measures:
        key, families = new_key(), _families(step_measures)
        rows += store.put(key, families)
        measured = StepMeasured(
            consumer=consumer,
            step=step_measures.step,
            segment=key,
            families={family: len(blob) for family, blob in families.items()},
            digest=content_digest(list(families.values())),
            rows=_count(step_measures),
            metrics={
                name: value for name, value in step_measures.metrics.items() if math.isfinite(value)
            },
        )
        events.append(new_event(measured))
    return events, rows


def _count(measures: StepMeasures) -> int:
    return len(next(iter(measures.rows.values())))


def _families(measures: StepMeasures) -> dict[str, bytes]:
    count = _count(measures)
    columns = [_column(name, values) for name, values in measures.rows.items()]
    families = {MEASURED_ROWS: encode_segment(columns, {}, count)}
    if measures.tokens:
        token_columns = [
            c for name, values in measures.tokens.items() for c in columns_of(name, values)
        ]
        families[MEASURED_TOKENS] = encode_segment(token_columns, {}, count)
    return families


def _column(name: str, values: Numbers) -> Column:
    """Return one number per row."""
    data = np.ascontiguousarray(values, np.dtype("<f4")).view(np.uint8)
    return Column(name, "float32", np.zeros((len(values), 0), np.int64), data)
