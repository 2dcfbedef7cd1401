"""Segments may lie anywhere: everything that wants one asks the `SegmentStore` of its database."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from typing_extensions import override

from tests.contract.making import group
from tests.handles import Experiment, ReadSession, StepMeasures, Transaction
from tests.raw_store import count
from tests.whole_stores import restore
from trinity_buffer import compact, open_store, run_strategy, verify
from trinity_buffer.codec.blob import Buffer
from trinity_buffer.inspector.overviews import overview
from trinity_buffer.store.segments import SegmentRow, SegmentStore
from trinity_buffer.store.transaction import SegmentParts

STORE = Path(__file__).parents[2] / "trinity_buffer" / "store"


class FolderSegments(SegmentStore):
    """A file for each part, in place of a row: as an object store would have it, if less safely."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.taken_in: set[bytes] = set()

    @override
    def put(self, key: bytes, families: Mapping[str, Sequence[Buffer]]) -> list[SegmentRow]:
        made = SegmentStore().put(key, families)
        for row in made:
            self.path_of(key, row.family, row.part, row.checksum).write_bytes(b"".join(row.data))
        return made

    @override
    def attach(self, tx: Transaction, rows: Sequence[SegmentRow]) -> None:
        assert all(self.path_of(*row[:4]).exists() for row in rows)
        self.taken_in |= {row.key for row in rows}

    @override
    def get(self, s: ReadSession, keys: Sequence[bytes], families: Sequence[str]) -> SegmentParts:
        return self.parts_of(keys, families)

    @override
    def delete(self, tx: Transaction, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.taken_in.discard(key)
            for path in self.folder.glob(f"{key.hex()}-*"):
                path.unlink()

    @override
    def keys(self, tx: Transaction) -> set[bytes]:
        return {bytes.fromhex(path.name.partition("-")[0]) for path in self.folder.iterdir()}

    @override
    def segment_parts(self, tx: Transaction) -> int:
        return len(list(self.folder.iterdir()))

    def path_of(self, key: bytes, family: str, part: int, checksum: int) -> Path:
        return self.folder / f"{key.hex()}-{family}-{part}-{checksum & (1 << 64) - 1:x}"

    def parts_of(self, keys: Sequence[bytes], families: Sequence[str]) -> SegmentParts:
        found: SegmentParts = {}
        for key in keys:
            for path in sorted(self.folder.glob(f"{key.hex()}-*")):
                _, family, part, checksum = path.name.split("-")
                if family in families:
                    signed = (int(checksum, 16) + (1 << 63)) % (1 << 64) - (1 << 63)
                    some = found.setdefault((key, family), [])
                    some.append((int(part), signed, path.read_bytes()))
        return found


async def trained(experiment: Experiment) -> None:
    """Write, annotate, train and measure, which are the ways in which segments come to be."""
    writer = experiment.writer("e0")
    await writer.plan("b", [0, 1], 4)
    for task in range(2):
        await writer.write(group("b", task))
    await run_strategy(experiment, "grpo")
    async with experiment.train_stream(strategy="grpo", groups_per_step=1) as stream:
        async for step in stream:
            entropy = {"entropy": np.full(len(step.manifest.experiences), 0.5, np.float32)}
            stream.measure(StepMeasures(step.step, entropy))
            await stream.commit(step)


async def test_a_store_works_whose_segments_lie_elsewhere(store_url: str, tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    async with open_store(store_url) as store:
        store.database.segments = blobs = FolderSegments(tmp_path / "blobs")
        experiment = await store.experiment("x", config={})
        await trained(experiment)
        assert len(blobs.taken_in) == 2 + 1 + 2, "written, annotated, measured"
        assert await count(store, "segment") == 0
        assert (await overview(store)).segment_parts == len(list(blobs.folder.iterdir()))
        assert [e.tokens.tolist() for e in [e async for e in experiment.read(task=0)]] == [
            e.tokens.tolist() for e in group("b", 0)
        ]
        assert (await verify(experiment)).problems == ()
        gone = await compact(experiment, keep_steps=1, archive=tmp_path / "archive")
        assert gone.segments == 1
        back = await restore(experiment)
        assert back.segments == 1
        assert (await verify(experiment)).problems == ()
        next(blobs.folder.glob("*-tokens-*")).write_bytes(b"damaged")
        assert [one.where for one in (await verify(experiment)).problems] != []
        (blobs.folder / f"{b'nobody'.hex()}-light-0-0").write_bytes(b"")
        assert any("no event" in one.what for one in (await verify(experiment)).problems)


def test_nothing_but_its_store_touches_the_table() -> None:
    allowed = {"segments.py", "tables.py"}
    found = [
        path.name
        for path in STORE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module == "trinity_buffer.store.tables"
        if "segment" in {alias.name for alias in node.names}
    ]
    assert set(found) - allowed == set()
    assert found
