"""The columns of an event against the tensors that they describe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trinity_buffer.codec import Segment, unpack_object
from trinity_buffer.events import ExperienceColumns
from trinity_buffer.sampling import SEGMENTS, sampled

Integers = npt.NDArray[np.int64]
_UNKNOWN = -1


def wrong_columns(
    columns: ExperienceColumns, sampling: Mapping[int, Any], segments: Sequence[Segment]
) -> Iterator[tuple[int, str]]:
    """Yield (slot, what is wrong) where a column is not what the decoded segments hold.

    Args:
        columns, sampling: of the event.
        segments: of it.

    Raises:
        CodecError: an object is damaged.
    """
    pairs = np.array([kind == "dpo" for kind in columns.kind])
    tokens, mask = _sizes(segments, "tokens", columns), _sizes(segments, "action_mask", columns)
    chosen, rejected = _sizes(segments, "chosen", columns), _sizes(segments, "rejected", columns)
    expected = {
        "length": tokens,
        "response_length": np.where(pairs, np.maximum(chosen, rejected), mask),
        "trained_tokens": np.where(
            pairs,
            np.where((chosen >= 0) & (rejected >= 0), chosen + rejected, _UNKNOWN),
            _trained(segments, columns),
        ),
    }
    for name, wanted in expected.items():
        said = np.array(getattr(columns, name), np.int64)
        for slot in np.flatnonzero((wanted != _UNKNOWN) & (said != wanted)).tolist():
            yield slot, f"its {name} is {wanted[slot]}, its event says {said[slot]}"
    yield from _wrong_of_info(columns, segments)
    yield from _wrong_sampling(columns, sampling, segments)


def _sizes(segments: Sequence[Segment], field: str, columns: ExperienceColumns) -> Integers:
    """Return how many elements a field has in each row; -1 where it has none."""
    found = np.full(len(columns), _UNKNOWN, np.int64)
    for segment in segments:
        for column in segment.columns.get(field, ()):
            found[slice(None) if column.rows is None else column.rows] = column.sizes
    return found


def _trained(segments: Sequence[Segment], columns: ExperienceColumns) -> Integers:
    found = np.full(len(columns), _UNKNOWN, np.int64)
    for segment in segments:
        for column in segment.columns.get("action_mask", ()):
            nonzero = np.concatenate([[0], np.cumsum(column.elements != 0)])
            counts = nonzero[column.offsets[1:]] - nonzero[column.offsets[:-1]]
            found[slice(None) if column.rows is None else column.rows] = counts
    return found


def _wrong_of_info(
    columns: ExperienceColumns, segments: Sequence[Segment]
) -> Iterator[tuple[int, str]]:
    """Compare the policy version and the finish reason with what ``info`` says of them."""
    infos, cuts = (_pieces(segments, name, columns) for name in ("info", "truncate_status"))
    known: dict[tuple[bytes, bytes], tuple[int | None, str | None]] = {}
    said = zip(columns.policy_version, columns.finish_reason, strict=True)
    for slot, (pieces, recorded) in enumerate(
        zip(zip(infos, cuts, strict=True), said, strict=True)
    ):
        if pieces not in known:  # rows of one write mostly say the same
            known[pieces] = _of_info(*pieces)
        if known[pieces] != recorded:
            what = "its policy version and finish reason are"
            yield slot, f"{what} {known[pieces]}, its event says {recorded}"


def _wrong_sampling(
    columns: ExperienceColumns, sampling: Mapping[int, Any], segments: Sequence[Segment]
) -> Iterator[tuple[int, str]]:
    """Compare how rows were sampled with what ``info`` says of it."""
    key = SEGMENTS.encode()
    infos = _pieces(segments, "info", columns)
    for slot in sorted({*sampling, *(slot for slot, info in enumerate(infos) if key in info)}):
        said = unpack_object(infos[slot]) if infos[slot] else None
        sizes = columns.prompt_length[slot], columns.length[slot]
        wanted = [*map(list, sampled(said if isinstance(said, dict) else {}, *sizes) or ())]
        if [*map(list, sampling.get(slot, ()))] != wanted:
            yield slot, f"it was sampled with {wanted}, its event says {sampling.get(slot)}"


def _pieces(segments: Sequence[Segment], name: str, columns: ExperienceColumns) -> list[bytes]:
    for segment in segments:
        if name in segment.objects:
            return segment.objects[name].pieces
    return [b""] * len(columns)


def _of_info(info: bytes, truncated: bytes) -> tuple[int | None, str | None]:
    said = unpack_object(info) if info else None
    said = said if isinstance(said, dict) else {}
    version = said.get("model_version")
    reason = said.get("finish_reason") or (unpack_object(truncated) if truncated else None)
    return None if version is None else int(version), None if reason is None else str(reason)
