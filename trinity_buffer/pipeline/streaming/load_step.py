"""The rows of a step as experiences, for trainers that collate by themselves."""

from __future__ import annotations

from trinity_buffer.errors import DamagedSegmentError, InvalidArgumentError
from trinity_buffer.experience import Experience
from trinity_buffer.pipeline.encoding import decode_annotations
from trinity_buffer.pipeline.experiment import Experiment
from trinity_buffer.pipeline.loading import EventCache, load_experiences
from trinity_buffer.pipeline.stored_segments import joined, read_segments
from trinity_buffer.pipeline.streaming.manifest import Manifest
from trinity_buffer.store import queries
from trinity_buffer.store.address import position_of, slot_of
from trinity_buffer.store.transaction import ReadSession

FAMILIES = ("light", "tokens", "text", "heavy")


async def experiences_of(experiment: Experiment, manifest: Manifest) -> list[Experience]:
    """Return the rows of a step in their order, each with the advantages that it trains on.

    Args:
        manifest: of the step, of a trainer of ``experiment``.

    Raises:
        InvalidArgumentError: rows of another experiment are mixed in.
        DamagedSegmentError: an annotation cannot be read.
    """
    if any(manifest.source):
        raise InvalidArgumentError(
            f"step {manifest.step} mixes in rows of {', '.join(manifest.sources)}: read its "
            "micro-batches"
        )
    database, cache = experiment.database, EventCache(experiment.key, experiment.name)
    rows = await database.read(
        queries.experience_rows, cache.experiment, sorted(set(manifest.experiences))
    )
    found = await load_experiences(database, cache, rows, FAMILIES)
    by_address = {row.address: one for row, one in zip(rows, found, strict=True)}
    ordered = [by_address[address] for address in manifest.experiences]
    await database.read_session(lambda s: _annotate(s, cache, manifest.annotations, ordered))
    return ordered


def _annotate(
    s: ReadSession, cache: EventCache, annotations: tuple[int, ...], ordered: list[Experience]
) -> None:
    """Give each experience what its annotation computed; one without tensors keeps its own."""
    events = cache.events(s, {position_of(address) for address in annotations})
    places: dict[bytes, list[int]] = {}
    for place, address in enumerate(annotations):
        key = events[position_of(address)].segment
        if key:
            places.setdefault(key, []).append(place)
    blobs = joined(read_segments(s, places, ("annotation",)).all_parts())
    for key, some in places.items():
        if key not in blobs:
            raise DamagedSegmentError(f"segment {key.hex()} is missing: run `verify`")
        slots = [slot_of(annotations[place]) for place in some]
        masks = [ordered[place].action_mask for place in some]
        computed = decode_annotations(blobs[key]["annotation"], slots, masks)
        for place, tensors in zip(some, computed, strict=True):
            vars(ordered[place]).update((n, t) for n, t in tensors.items() if t is not None)
