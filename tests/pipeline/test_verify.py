"""Planted faults: each is found, named, and counted as what it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import pytest
from msgspec import structs
from sqlalchemy import update

from tests.handles import Transaction, VerifyReport
from tests.pipeline.planting import (
    append_unfolded,
    beside_heads,
    delete_event,
    events_of,
    first_row,
    unguarded,
    write_body,
)
from tests.raw_store import PROJECTIONS, append, sql
from tests.sample_run import RUNS, SampleRun, record_sample_run, rollout
from tests.whole_stores import digest_of
from trinity_buffer import open_store, verify
from trinity_buffer.codec.objects import encode_body
from trinity_buffer.errors import CheckpointError, CodecError, InvalidArgumentError
from trinity_buffer.events import BatchLeased, ExperiencesRejected, StepsCommitted, body_of
from trinity_buffer.pipeline.manifest import manifest_digest
from trinity_buffer.store import segments


async def verified(sample: SampleRun, **options: Any) -> VerifyReport:
    async with open_store(sample.url, read_only=True) as store:
        experiment = await store.experiment(sample.name)
        return await verify(experiment, sample.acknowledged, sample.checkpoint, **options)


def told(report: VerifyReport) -> str:
    return "\n".join(map(str, report.problems))


@pytest.mark.parametrize("quick", [False, True])
async def test_a_store_that_nobody_harmed_holds(sample: SampleRun, quick: bool) -> None:
    report = await verified(sample, quick=quick)
    assert report.ok, report
    assert (report.lost, report.duplicated) == (0, 0)
    assert (report.acknowledged, report.chain) == (18, 2)
    assert (report.experiences, report.manifests) == (18, 3)
    assert report.segments == (0 if quick else 8)
    assert (report.plans.planned, report.plans.stored, report.plans.missing) == (20, 17, 3)
    grpo, varied = report.strategies
    assert (grpo.recorded, grpo.waiting, grpo.annotated, grpo.rejected) == (18, 1, 16, {"late": 1})
    assert varied.rejected == {"late": 1, "zero_variance": RUNS}
    (trainer,) = report.trainers
    assert (trainer.ready, trainer.leased, trainer.committed) == (4, 4, 8)
    assert json.loads(json.dumps(report.to_dict()))["ok"] is True


@pytest.mark.parametrize("quick", [False, True])
async def test_a_lost_experience_is_lost_once_and_named(sample: SampleRun, quick: bool) -> None:
    last = (await events_of(sample.url, "ExperiencesRecorded"))[-1]
    await delete_event(sample.url, last.position)
    report = await verified(sample, quick=quick)
    assert (report.lost, report.duplicated, report.ok) == (1, 0, False)
    assert report.lost_items == ("experience b1/0/1/0/",)
    assert f"position {last.position}: there is no event" in told(report)


async def test_a_deleted_event_loses_everything_that_it_held(sample: SampleRun) -> None:
    await delete_event(sample.url, (await events_of(sample.url, "ExperiencesRecorded"))[0].position)
    report = await verified(sample, quick=True)
    assert report.lost_items == tuple(f"experience b0/0/{run}/0/" for run in range(RUNS))


async def test_a_lost_manifest_is_lost_once(sample: SampleRun) -> None:
    leased = (await events_of(sample.url, "BatchLeased"))[1]
    await delete_event(sample.url, leased.position)
    report = await verified(sample)
    assert (report.lost, report.duplicated, report.ok) == (1, 0, False)
    assert report.lost_items == (f"manifest {sample.manifests[1].hex()}",)
    assert "step 2 was committed and never leased" in told(report)


async def test_a_committed_step_that_the_weights_did_not_go_through_is_lost(
    store_url: str, tmp_path: Path
) -> None:
    # told anew: the log names the folder of the checkpoint, which changes here
    sample = await record_sample_run(store_url, tmp_path / "run")
    sample.say_chain(sample.manifests[1:])
    report = await verified(sample, quick=True)
    assert (report.lost, report.duplicated) == (1, 0)
    assert sample.manifests[0].hex() in report.lost_items[0]
    sample.say_chain(sample.manifests[:1])
    report = await verified(sample, quick=True)
    assert (report.lost, report.duplicated) == (1, 0)
    assert sample.manifests[1].hex() in report.lost_items[0]
    assert "its sha256 is" in told(report)


async def test_a_manifest_that_was_committed_twice_is_there_twice(sample: SampleRun) -> None:
    commit = (await events_of(sample.url, "StepsCommitted"))[1].fact
    assert isinstance(commit, StepsCommitted)
    async with open_store(sample.url) as store:
        experiment = await store.experiment(sample.name)
        (position,) = await append(experiment, commit, actor="trainer")
    for quick in (False, True):
        report = await verified(sample, quick=quick)
        assert (report.lost, report.duplicated, report.ok) == (0, 1, False)
        assert sample.manifests[1].hex() in report.duplicated_items[0]
        assert f"position {position} (trainer 'trainer'): step 2 was committed before" in told(
            report
        )


async def test_a_batch_that_was_trained_twice_is_there_twice(sample: SampleRun) -> None:
    sample.say_chain([*sample.manifests, sample.manifests[1]])
    report = await verified(sample)
    assert (report.lost, report.duplicated, report.ok) == (0, 1, False)
    assert sample.manifests[1].hex() in report.duplicated_items[0]


async def test_two_manifests_with_one_row_are_a_row_trained_twice(sample: SampleRun) -> None:
    leased = (await events_of(sample.url, "BatchLeased"))[1]
    assert isinstance(leased.fact, BatchLeased)
    again = structs.replace(leased.fact, step=4)
    again = structs.replace(again, digest=manifest_digest(again))
    position = await append_unfolded(sample.url, "BatchLeased", body_of(again))
    sample.say_chain([*sample.manifests, again.digest])
    report = await verified(sample)
    assert (report.lost, report.duplicated, report.ok) == (0, 1, False)
    assert again.digest.hex() in report.duplicated_items[0]
    assert f"fold: position {position}: BatchLeased contradicts" in told(report)
    assert f"was given out at position {leased.position} before" in told(report)


async def test_an_experience_that_two_events_recorded_is_there_twice(sample: SampleRun) -> None:
    last = (await events_of(sample.url, "ExperiencesRecorded"))[-1]
    position = await append_unfolded(sample.url, "ExperiencesRecorded", dict(last.body))
    report = await verified(sample, quick=True)
    assert (report.lost, report.duplicated, report.ok) == (0, 1, False)
    where = f"({last.position}:0, {position}:0)"
    assert report.duplicated_items == (f"experience b1/0/1/0/ {where}",)


async def test_rewinding_is_no_loss_and_no_repetition(store_url: str, tmp_path: Path) -> None:
    # told anew: the log names the folder of the checkpoint, which changes here
    sample = await record_sample_run(store_url, tmp_path / "run")
    async with open_store(sample.url) as store:
        experiment = await store.experiment(sample.name)
        options = {"strategy": "grpo", "groups_per_step": 1, "resume_from": 1}
        sample.say_chain(sample.manifests[:1])
        await commit_anew(sample.url, sample)
        async with experiment.train_stream(**options) as stream:
            second = await anext(stream)
            sample.say_chain([*sample.manifests[:1], second.manifest.digest])
            await stream.commit(second, checkpoint=sample.checkpoint)
    report = await verified(sample)
    assert report.ok, report
    assert (report.lost, report.duplicated) == (0, 0)


async def commit_anew(url: str, sample: SampleRun) -> None:
    """Let both commits name the checkpoint as it lies on the disk now."""
    digest = digest_of(sample.checkpoint)

    for commit in await events_of(url, "StepsCommitted"):
        changed = encode_body(commit.kind, {**commit.body, "checkpoint_digest": digest})
        await write_body(url, commit.position, changed)
    same = "UPDATE step SET checkpoint_digest = :digest WHERE committed_at IS NOT NULL"
    await unguarded(url, sql(same, digest=digest))


async def test_a_flipped_bit_is_found_where_it_is(sample: SampleRun) -> None:
    recorded = (await events_of(sample.url, "ExperiencesRecorded"))[2]
    key = bytes(recorded.body["segment"])
    await change_segment(sample.url, key, keep_checksum=True)
    report = await verified(sample)
    (problem,) = beside_heads(report)
    assert problem.check == "segments"
    assert f"segment {key.hex()} of position {recorded.position}" in told(report)
    assert "family 'tokens'" in told(report)
    assert (report.lost, report.duplicated) == (0, 0)
    assert (await verified(sample, quick=True)).ok


async def test_content_that_is_another_is_found_by_its_digest(sample: SampleRun) -> None:
    recorded = (await events_of(sample.url, "ExperiencesRecorded"))[2]
    await change_segment(sample.url, bytes(recorded.body["segment"]), keep_checksum=False)
    report = await verified(sample)
    (problem,) = beside_heads(report)
    assert problem.check == "digests"
    assert f"experience {recorded.position}:" in told(report)


async def change_segment(url: str, key: bytes, *, keep_checksum: bool) -> None:
    """Change the last byte of the tokens of a segment."""

    def change(tx: Transaction) -> None:
        where = "segment WHERE key = :key AND family = 'tokens'"
        ((data, checksum),) = sql(f"SELECT data, checksum FROM {where}", key=key)(tx)
        data = data[:-1] + bytes([data[-1] ^ 1])
        if not keep_checksum:
            checksum = segments.checksum(key, "tokens", 0, data)
        change = where.replace("WHERE", "SET data = :data, checksum = :checksum WHERE")
        sql(f"UPDATE {change}", key=key, data=data, checksum=checksum)(tx)

    await unguarded(url, change)


async def test_a_missing_segment_is_named(sample: SampleRun) -> None:
    key = bytes((await events_of(sample.url, "ExperiencesAnnotated"))[0].body["segment"])
    await unguarded(sample.url, sql("DELETE FROM segment WHERE key = :key", key=key))
    report = await verified(sample)
    (problem,) = beside_heads(report)
    assert key.hex() in problem.where
    assert "is missing" in problem.what


async def test_a_damaged_body_is_named(sample: SampleRun) -> None:
    position = (await events_of(sample.url, "PolicyPublished"))[0].position
    await write_body(sample.url, position, b"\xc1nonsense")
    problem = beside_heads(await verified(sample))[0]
    assert problem.where == f"position {position}"
    assert "its body cannot be read" in problem.what


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("ExperiencesRecorded", "families", 3),
        ("ExperiencesAnnotated", "experiences", ["x"]),
        ("BatchLeased", "digest", None),
        ("StepsCommitted", "steps", 1),
    ],
)
async def test_a_body_of_another_form_is_named_and_the_rest_is_read(
    sample: SampleRun, kind: str, field: str, value: object
) -> None:
    damaged, *others = await events_of(sample.url, kind)
    body = encode_body(kind, {**damaged.body, field: value})
    await write_body(sample.url, damaged.position, body)
    report = await verified(sample)
    (told,) = [one for one in report.problems if "cannot be read" in one.what]
    assert (told.where, f"$.{field}" in told.what) == (f"position {damaged.position}", True)
    assert report.events > others[-1].position
    with pytest.raises(CodecError, match=rf"'{sample.name}', the event at position"):
        await events_of(sample.url, kind)


async def test_a_manifest_that_is_not_its_digest_is_named(sample: SampleRun) -> None:
    leased = (await events_of(sample.url, "BatchLeased"))[2]
    body = encode_body("BatchLeased", {**leased.body, "normalizer": 7.0})
    await write_body(sample.url, leased.position, body)
    report = await verified(sample, quick=True)
    (problem,) = beside_heads(report)
    assert problem.check == "manifests"
    assert f"position {leased.position}" in problem.where


OTHER_VALUES: dict[str, dict[str, Any]] = {
    "configuration": {"finished": True},
    "batch": {"expected": 99},
    "plan": {"ordinal": 99},
    "experience": {"reward": 0.123},
    "consumer": {"calls": 99},
    "waiting": {"consumer": "other"},
    "annotation": {"group_slot": 99},
    "rejection": {"reason": "made up"},
    "delivery": {"step": 99},
    "step": {"groups": 99},
    "policy": {"uri": "elsewhere"},
    "assigned_reward": {"reward": 99.0},
    "counter": {"number": 99},
    "archived": {"uri": "elsewhere"},
}


def test_every_projection_is_changed_once() -> None:
    assert list(OTHER_VALUES) == [table.name for table in PROJECTIONS]


@pytest.mark.parametrize("table", PROJECTIONS, ids=lambda table: table.name)
async def test_a_changed_row_is_named(sample: SampleRun, table: Any) -> None:
    def change(tx: Transaction) -> dict[str, Any]:
        row = first_row(tx, table)
        key = [column == row[column.name] for column in table.primary_key]
        tx.execute(update(table).where(*key).values(OTHER_VALUES[table.name]))
        return row

    row = await unguarded(sample.url, change)
    report = await verified(sample)
    found = [problem for problem in report.problems if problem.check == "projections"]
    moved = table.name == "waiting"  # its key is all that a row of it is
    assert len(found) == (2 if moved else 1)
    assert {problem.where for problem in found} == {table.name}
    assert all(problem.what.endswith("; `trinity-buffer rebuild` mends it") for problem in found)
    for column in table.primary_key:
        if column.name != "experiment":
            value = row[column.name]
            shown = value.hex() if isinstance(value, bytes) else repr(value)
            if column.name == "address":
                shown = f"{value >> 20}:{value & 0xFFFFF}"
            assert f"{column.name}={shown}" in told(report)
    assert (report.lost, report.duplicated) == (0, 0)


@pytest.mark.parametrize(
    "table", [t for t in PROJECTIONS if t.name != "configuration"], ids=lambda table: table.name
)
async def test_a_quick_look_counts_rows(sample: SampleRun, table: Any) -> None:
    def change(tx: Transaction) -> None:
        row = first_row(tx, table)
        key = [column == row[column.name] for column in table.primary_key]
        tx.execute(table.delete().where(*key))

    await unguarded(sample.url, change)
    report = await verified(sample, quick=True)
    assert f"projections: {table.name}: it has" in told(report)


async def test_a_row_handed_out_and_not_there_is_named(sample: SampleRun) -> None:
    columns = "experiment, consumer, source, address, step"
    other = columns.replace("address", "address + 999")
    await unguarded(
        sample.url, sql(f"INSERT INTO delivery ({columns}) SELECT {other} FROM delivery LIMIT 1")
    )
    report = await verified(sample)
    assert "is there, but no event made it" in told(report)


async def test_a_row_rejected_and_not_there_breaks_the_equation(sample: SampleRun) -> None:
    fact = ExperiencesRejected(
        consumer="trainer", by="trainer", experiences=[7 << 40], reasons=["stale"], planned_groups=0
    )
    async with open_store(sample.url) as store:
        await append(await store.experiment(sample.name), fact)
    report = await verified(sample, quick=True)
    assert not report.trainers[0].holds
    assert "conservation: trainer: the terms do not add up" in told(report)


async def test_the_last_line_of_a_killed_explorer_counts_if_it_is_whole(
    sqlite_sample: SampleRun,
) -> None:
    for last, lost in (("b9/0/0", 0), ("b9/0/0/0/", 1), ("b9/0/0\n", 1)):
        (sqlite_sample.acknowledged / "e1.ack").write_text(f"b0/0/0/0/\n\n{last}")
        assert (await verified(sqlite_sample, quick=True)).lost == lost


async def test_unreadable_evidence_is_refused(sqlite_sample: SampleRun, tmp_path: Path) -> None:
    async with open_store(sqlite_sample.url, read_only=True) as store:
        experiment = await store.experiment(sqlite_sample.name)
        with pytest.raises(InvalidArgumentError, match="no such file or folder"):
            await verify(experiment, tmp_path / "nowhere")
        with pytest.raises(CheckpointError, match=r"manifests\.json"):
            await verify(experiment, checkpoint=tmp_path)
        with pytest.raises(InvalidArgumentError, match="is no trainer here"):
            await verify(experiment, checkpoint=sqlite_sample.checkpoint, consumer="nobody")
        with pytest.raises(InvalidArgumentError, match="is no trainer here"):
            await verify(experiment, consumer="grpo")


async def test_verifying_goes_on_while_others_write(sample: SampleRun) -> None:
    url = sample.url
    async with open_store(url) as writing, open_store(url, read_only=True) as reading:
        writer = (await writing.experiment(sample.name)).writer("e1")
        experiment = await reading.experiment(sample.name)
        stages: list[str] = []

        def look(stage: str, _done: int, _total: int) -> None:
            stages.append(stage)

        async def write() -> None:
            for number in range(40):
                await writer.write([rollout(f"c{number}", 0, 0, 1.0)])

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(write)
            for _ in range(3):
                report = await verify(
                    experiment, sample.acknowledged, sample.checkpoint, progress=look
                )
                assert report.ok, report
    assert {"log", "compare"} <= set(stages) <= {"log", "compare", "fold"}
