"""What an archive holds: all of its segments, as the store had them; older forms are read."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet
import pytest
import torch

from tests.conftest import Resize
from tests.contract.making import group
from tests.pipeline.edits import in_body
from tests.pipeline.planting import beside_heads, unguarded
from tests.pipeline.test_compaction import trained
from tests.raw_store import rows
from tests.whole_stores import restore
from trinity_buffer import compact, open_store, run_strategy, verify
from trinity_buffer.errors import StoreError
from trinity_buffer.identity import FAMILIES
from trinity_buffer.pipeline.archive import read_archive
from trinity_buffer.store.segments import blob_of

FORMS = ("typed", "parts")


OLD = Path(__file__).parent / "archives"
"""Files of three segments, as older versions wrote them: of typed columns, and of parts. They hold
objects that are no JSON, bfloat16, complex numbers and tensors of three dimensions."""


def test_an_archive_of_typed_columns_makes_the_same_segments() -> None:
    keys = sorted(set(pyarrow.parquet.read_table(OLD / "parts.parquet")["segment"].to_pylist()))
    typed, parts = (
        read_archive(str(OLD / f"{name}.parquet"), keys, tuple(FAMILIES)) for name in FORMS
    )
    assert typed.keys() == parts.keys()
    assert {family for _, family in typed} == {"heavy", "light", "text", "tokens"}
    for place in parts:
        assert blob_of(*place, typed[place]) == blob_of(*place, parts[place]), place


@pytest.mark.parametrize("form", FORMS)
def test_of_an_old_archive_only_what_is_asked_for_is_read(form: str) -> None:
    path = str(OLD / f"{form}.parquet")
    key = pyarrow.parquet.read_table(path)["segment"][0].as_py()
    assert list(read_archive(path, [key], ("tokens",))) == [(key, "tokens")]
    with pytest.raises(StoreError, match="does not hold 6d697373696e67"):
        read_archive(path, [key, b"missing"], ("tokens",))


async def test_an_archive_holds_segments_as_the_store_had_them(
    sqlite_url: str, tmp_path: Path
) -> None:
    async with open_store(sqlite_url) as store:
        experiment = await store.experiment("x", config={"rollouts_per_group": 2})
        one, other = group(runs=2)
        one.info = {"raw": b"\x00", "pair": (1, 2)}
        one.routed_experts = torch.arange(32, dtype=torch.uint8).reshape(8, 2, 2)
        await experiment.writer("e0").write([one, other])
        await run_strategy(experiment, "grpo")
        async with experiment.train_stream(strategy="grpo") as stream:
            await stream.commit(await anext(stream))
        before = await rows(store, "segment")
        (name,) = (await compact(experiment, keep_steps=0, archive=tmp_path)).files
        gone = {row["key"] for row in before} - {row["key"] for row in await rows(store, "segment")}
        archived = pyarrow.parquet.read_table(name).to_pylist()
        recorded = await anext(experiment.events(kinds=["ExperiencesRecorded"]))
        assert {(row["experiment"], row["position"]) for row in archived} == {
            ("x", recorded.position)
        }
        names = ("family", "part", "checksum", "data")
        assert sorted((row["segment"], *map(row.get, names)) for row in archived) == sorted(
            (row["key"], *map(row.get, names)) for row in before if row["key"] in gone
        )
        await restore(experiment)
        assert await rows(store, "segment") == before


async def test_a_row_group_of_an_archive_holds_one_family(
    sqlite_url: str, tmp_path: Path, resize: Resize
) -> None:
    """Readers skip the others: most ask for the light columns of many rows."""
    resize(bytes_per_row_group=300)
    async with open_store(sqlite_url) as store:
        experiment = await store.experiment("x", config={})
        await trained(experiment, steps=4)
        (name,) = (await compact(experiment, keep_steps=0, archive=tmp_path)).files
        assert [one.tokens.tolist() async for one in experiment.read()] == [[1, 2, 3]] * 8
    file = pyarrow.parquet.ParquetFile(name)
    groups = [file.read_row_group(n).to_pylist() for n in range(file.num_row_groups)]
    assert [len({row["family"] for row in some}) for some in groups] == [1] * len(groups)
    assert len(groups) > len({row["family"] for some in groups for row in some})


def overwrite(file: Path) -> None:
    file.write_bytes(b"no Parquet")


async def test_an_archive_of_which_no_digest_was_noted_is_read_by_verify(
    sqlite_url: str, tmp_path: Path
) -> None:
    async with open_store(sqlite_url) as store:
        experiment = await store.experiment("x", config={})
        await trained(experiment, steps=4)
        (name,) = (await compact(experiment, keep_steps=0, archive=tmp_path)).files
    await unguarded(sqlite_url, in_body("SegmentsArchived", digest=None))
    async with open_store(sqlite_url, read_only=True) as store:
        experiment = await store.experiment("x")
        assert beside_heads(await verify(experiment)) == []
        overwrite(Path(name))
        (problem,) = beside_heads(await verify(experiment))
        assert (problem.check, problem.where) == ("archives", name)
        archived = (await anext(experiment.events(kinds=["SegmentsArchived"]))).position
        said = f"position {archived} archived 4 segments to it, and that file cannot be read ("
        assert problem.what.startswith(said)
