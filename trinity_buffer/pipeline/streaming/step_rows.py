"""From taken rows to a manifest of rows that can all be trained; the others are rejected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trinity_buffer.errors import (
    ArchivedSegmentError,
    CodecError,
    DamagedSegmentError,
    InvalidArgumentError,
)
from trinity_buffer.pipeline.experiment import Experiment
from trinity_buffer.pipeline.rejection_watch import MAX_REJECTED_STEPS, RejectionWatch
from trinity_buffer.pipeline.streaming.collate import row_lengths
from trinity_buffer.pipeline.streaming.manifest import Manifest
from trinity_buffer.pipeline.streaming.ready_groups import ReadyGroup
from trinity_buffer.pipeline.streaming.row_loader import LoadedRows, RowLoader
from trinity_buffer.pipeline.streaming.step_source import (
    StepSource,
    parted,
    planned_manifest,
    rows_without,
)
from trinity_buffer.pipeline.streaming.stream_options import StreamOptions
from trinity_buffer.rejections import invalid
from trinity_buffer.store.transaction import Session

Unfit = Mapping[tuple[int, int], str]
"""(source, annotation) of a row -> why it cannot be trained."""


class StepRows:
    """Loads what a step took, before it is leased.

    Args:
        experiment: the trainer's own.
        options: of the stream.
        annotation_set: the set that is trained on.
        loader: of the stream.
        source: where the rows were taken from, and where they are rejected.
        watch: hears what was kept, and what was not.
    """

    def __init__(
        self,
        experiment: Experiment,
        options: StreamOptions,
        annotation_set: str,
        loader: RowLoader,
        source: StepSource,
        *,
        watch: RejectionWatch,
    ) -> None:
        self._options = options
        self._set = annotation_set
        self._loader = loader
        self._source = source
        self._pairs = experiment.config.get("schema") == "dpo"
        self._watch = watch

    def prepare(
        self, s: Session, step: int, taken: list[ReadyGroup]
    ) -> tuple[Manifest | None, LoadedRows | None]:
        """Return the manifest of ``taken`` and its columns, or nothing if no row can be trained.

        Raises:
            TrainingError: no row could be, of too many steps in a row.
        """
        groups, first, reasons = len(taken), None, set[str]()
        while taken:
            manifest = planned_manifest(step, self._set, taken, self._options)
            first = first or manifest
            try:
                rows = self._loader.load(s, manifest)
            except (ArchivedSegmentError, CodecError, DamagedSegmentError):
                unreadable = self._loader.unreadable(s, manifest)
                if not unreadable:
                    raise
                taken = self._left_of(s, taken, _named(manifest, unreadable))
                reasons.update(unreadable.values())
                continue
            unfit = self._unfit(s, manifest, rows)
            if unfit:
                taken = self._left_of(s, taken, unfit)
                reasons.update(unfit.values())
                continue
            self._watch.kept()
            if self._pairs:
                return self._of_pairs(step, manifest, rows, taken)
            return manifest, rows
        if first is not None:
            named = first
            self._watch.rejected(groups, reasons, lambda: self._loader.uids(s, named, [0])[0])
        return None, None

    def _unfit(self, s: Session, manifest: Manifest, rows: LoadedRows) -> Unfit:
        """Return the rows that lack a column, and the pairs that are too long."""
        needs, limit = self._options.needs, self._options.max_tokens
        if "advantages" in needs:
            self._require_advantages(s, rows, manifest)
        lacking: dict[int, list[str]] = {}
        for field in needs:
            for place in rows_without(rows, field, manifest.source):
                lacking.setdefault(place, []).append(field)
        reasons = {place: invalid(*lacking[place]) for place in sorted(lacking)}
        unfit = dict(_named(manifest, reasons))
        if self._pairs and limit is not None:
            sizes = row_lengths(manifest, rows, longest=True)
            large = [
                place
                for place, size in enumerate(sizes)
                if size > limit and not _source_of(manifest, place)
            ]
            unfit |= _named(manifest, dict.fromkeys(large, "oversize"))
        return unfit

    def _require_advantages(self, s: Session, rows: LoadedRows, manifest: Manifest) -> None:
        """Return if every row of the trainer's own experiment has advantages.

        Raises:
            InvalidArgumentError: names the set, a row, and what to do.
        """
        missing = rows_without(rows, "advantages", manifest.source)
        if missing:
            eid = self._loader.eid_of(s, manifest.experiences[missing[0]])
            raise InvalidArgumentError(
                f"the annotation set {manifest.annotation_set!r} has no advantages (for one, of "
                f"{eid.uid}), which this algorithm trains on: run a strategy that computes them, "
                "such as 'grpo', and name its set with strategy="
            )

    def _of_pairs(
        self, step: int, manifest: Manifest, rows: LoadedRows, taken: Sequence[ReadyGroup]
    ) -> tuple[Manifest, LoadedRows]:
        """Plan the micro-batches with the lengths of the pairs, which only the tensors tell."""
        lengths = dict(zip(manifest.annotations, row_lengths(manifest, rows), strict=True))
        exact = [lengths[address] for group in taken for address in group.annotations]
        final = planned_manifest(step, self._set, taken, self._options, lengths=exact)
        place_of = {address: place for place, address in enumerate(manifest.annotations)}
        return final, rows.reordered([place_of[address] for address in final.annotations])

    def _left_of(self, s: Session, taken: list[ReadyGroup], unfit: Unfit) -> list[ReadyGroup]:
        """Reject the ``unfit`` rows; return the others."""
        for reason in sorted(set(unfit.values())):

            def fits(group: ReadyGroup, why: str = reason) -> list[bool]:
                return [unfit.get((group.source, at)) != why for at in group.annotations]

            taken, gone = parted(taken, fits)
            self._source.reject(s, gone, reason, taken)
        return taken


def watch_of(experiment: Experiment, options: StreamOptions) -> RejectionWatch:
    """Return the watch over the rows that a stream rejects."""
    return RejectionWatch(
        f"trainer {options.consumer!r}",
        options.groups_per_step,
        experiment.config.get("max_rejected_steps", MAX_REJECTED_STEPS),
    )


def _source_of(manifest: Manifest, place: int) -> int:
    return manifest.source[place] if manifest.source else 0


def _named(manifest: Manifest, reasons: Mapping[int, str]) -> Unfit:
    return {(_source_of(manifest, p), manifest.annotations[p]): why for p, why in reasons.items()}
