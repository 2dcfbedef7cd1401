"""What an archive holds: all of its segments, in columns that have a type."""

from __future__ import annotations

from pathlib import Path

import pyarrow
import pyarrow.parquet
import torch

from tests.contract.making import group, rows
from tests.pipeline.edits import in_body
from tests.pipeline.planting import beside_heads, unguarded
from tests.pipeline.test_compaction import trained
from trinity_buffer.pipeline.annotating.strategy_consumer import run_strategy
from trinity_buffer.pipeline.history.compaction import compact
from trinity_buffer.pipeline.history.restoring import restore
from trinity_buffer.pipeline.store import open_store
from trinity_buffer.pipeline.verifying.verify import verify
from trinity_buffer.store.tables import segment


async def test_what_arrow_has_no_type_for_comes_back_byte_for_byte(
    sqlite_url: str, tmp_path: Path
) -> None:
    """Objects that are no JSON, and tensors of several dimensions, in some rows alone too."""
    async with open_store(sqlite_url) as store:
        experiment = await store.experiment("x", config={"rollouts_per_group": 2})
        one, other = group(runs=2)
        one.info = {"raw": b"\x00", "pair": (1, 2)}
        one.routed_experts = torch.arange(32, dtype=torch.uint8).reshape(8, 2, 2)
        await experiment.writer("e0").write([one, other])
        await run_strategy(experiment, "grpo")
        async with experiment.train_stream(strategy="grpo") as stream:
            await stream.commit(await anext(stream))
        before = await rows(store.database, segment)
        (name,) = (await compact(experiment, keep_steps=0, archive=tmp_path)).files
        archived = pyarrow.parquet.read_table(name)
        assert archived["routed_experts:shape"].to_pylist() == [[8, 2, 2], None]
        assert archived["info:msgpack"].null_count == 0
        assert not [column for column in archived.column_names if column.startswith("kept:")]
        await restore(experiment)
        assert await rows(store.database, segment) == before


async def test_columns_of_an_archive_have_a_type_where_no_row_has_a_value(
    sqlite_url: str, tmp_path: Path
) -> None:
    async with open_store(sqlite_url) as store:
        experiment = await store.experiment("x", config={})
        await trained(experiment, steps=4)
        (name,) = (await compact(experiment, keep_steps=0, archive=tmp_path)).files
    table = pyarrow.parquet.read_table(name)
    types = {column: str(table.schema.field(column).type) for column in table.column_names}
    assert set(table["policy_version"].to_pylist()) == {None}
    assert (types["policy_version"], types["prompt_length"]) == ("int64", "int64")
    assert (types["reward"], types["finish_reason"], types["refused"]) == (
        *("double", "string", "string"),
    )


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
