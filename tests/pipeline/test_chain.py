"""The chain over the log: who kept one head finds every edit of what lies before it."""

from __future__ import annotations

import errno
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.handles import Transaction, VerifyReport
from tests.pipeline.planting import chain_anew, events_of, unguarded
from tests.raw_store import sql
from tests.sample_run import SampleRun, rollout
from tests.whole_stores import rebuild
from trinity_buffer import open_store, verify
from trinity_buffer.codec.objects import decode_body, encode_body
from trinity_buffer.errors import InvalidArgumentError, StoreError
from trinity_buffer.explorer.explore import Acknowledgements
from trinity_buffer.pipeline.verify.addresses import Names
from trinity_buffer.pipeline.verify.verify import Acknowledged

Change = Callable[[Transaction], object]


async def verified(sample: SampleRun, **evidence: Any) -> VerifyReport:
    async with open_store(sample.url, read_only=True) as store:
        return await verify(await store.experiment((await store.experiments())[0]), **evidence)


def of_chain(report: VerifyReport) -> list[str]:
    return [str(problem) for problem in report.problems if problem.check == "chain"]


def body_edited(position: int, kind: str, field: str, value: object) -> Change:
    """Return what writes another value into the body of an event."""

    def change(tx: Transaction) -> None:
        ((stored,),) = sql("SELECT body FROM event WHERE position = :at", at=position)(tx)
        body = encode_body(kind, {**decode_body(kind, stored), field: value})
        sql("UPDATE event SET body = :body WHERE position = :at", body=body, at=position)(tx)

    return change


async def rewarded(sample: SampleRun) -> Change:
    scored = (await events_of(sample.url, "RewardsAssigned"))[0]
    rewards = [9.0, *scored.body["rewards"][1:]]
    return body_edited(scored.position, scored.kind, "rewards", rewards)


@pytest.mark.parametrize("what", ["actor", "recorded_at", "kind", "body", "head"])
async def test_an_edited_column_of_an_event_is_named(sample: SampleRun, what: str) -> None:
    scored = (await events_of(sample.url, "RewardsAssigned"))[0]
    values = {"actor": "me", "recorded_at": 1, "kind": "Other", "head": bytes(32)}
    change = await rewarded(sample)
    if what != "body":
        edit, at = f"UPDATE event SET {what} = :value WHERE position = :at", scored.position
        change = sql(edit, value=values[what], at=at)
    await unguarded(sample.url, change, chained=False)
    found = of_chain(await verified(sample, quick=True))
    assert f"chain: position {scored.position}: its head is" in found[0]
    assert len(found) == (2 if what == "head" else 1)


async def test_a_head_that_was_taken_away_is_named_and_nothing_follows_it(
    sample: SampleRun,
) -> None:
    async with open_store(sample.url) as store:
        end = [e async for e in (await store.experiment(sample.name)).events()][-1].position
    gone = sql("UPDATE event SET head = NULL WHERE position = :at", at=end)
    await unguarded(sample.url, gone, chained=False)
    (found,) = of_chain(await verified(sample))
    assert f"position {end}: it has no head" in found
    async with open_store(sample.url) as store:
        with pytest.raises(StoreError, match=f"event at position {end} has no head"):
            await (await store.experiment(sample.name)).publish_policy(9, "elsewhere")


async def test_a_log_without_any_head_is_named(sample: SampleRun) -> None:
    await unguarded(sample.url, sql("UPDATE event SET head = NULL"), chained=False)
    assert "no event up to here has a head" in of_chain(await verified(sample))[0]


async def test_an_editor_who_chains_anew_is_found_by_any_head_that_was_kept(
    sample: SampleRun,
) -> None:
    before = await verified(sample)
    assert (before.ok, len(before.head)) == (True, 64)
    await unguarded(sample.url, await rewarded(sample))
    async with open_store(sample.url) as store:
        await rebuild(store.database, 1)
    assert (await verified(sample)).ok
    (found,) = of_chain(await verified(sample, head=before.head))
    assert f"head {before.head}: no event has it" in found


async def test_the_checkpoint_and_the_receipts_keep_heads(sample: SampleRun) -> None:
    async with open_store(sample.url) as store:
        writer = (await store.experiment(sample.name)).writer("e1")
        receipt = await writer.write([rollout("c", 0, 0, 1.0)])
        again = await writer.write([rollout("c", 0, 0, 1.0)])
    assert (await verified(sample, head=receipt.head)).ok
    assert (receipt.head, receipt.digests) == (again.head, again.digests)
    assert receipt.lines == (f"c/0/0/0/\t{receipt.digests[0].hex()}\t{receipt.head}",)


async def test_a_head_that_is_none_is_refused(sqlite_sample: SampleRun) -> None:
    for wrong in ("", "abc", "g" * 64, "0" * 63):
        with pytest.raises(InvalidArgumentError, match="a head is 64 digits of hex"):
            await verified(sqlite_sample, head=wrong)


async def test_a_renamed_experiment_breaks_its_chain(sqlite_sample: SampleRun) -> None:

    def rename(tx: Transaction) -> None:
        sql("DROP TRIGGER experiment_forbids_update")(tx)
        sql("UPDATE experiment SET name = 'mine'")(tx)

    await unguarded(sqlite_sample.url, rename, chained=False)
    report = await verified(sqlite_sample)
    assert "position 1: its head is" in of_chain(report)[0]
    assert any(
        "trigger experiment_forbids_update is missing" in str(one) for one in report.problems
    )


async def test_a_rebuild_of_an_edited_log_is_refused(sample: SampleRun) -> None:
    scored = (await events_of(sample.url, "RewardsAssigned"))[0]
    await unguarded(sample.url, await rewarded(sample), chained=False)
    async with open_store(sample.url) as store:
        with pytest.raises(StoreError, match=f"position {scored.position} breaks the chain"):
            await rebuild(store.database, 1)


async def test_exchanged_annotations_are_found_by_the_digest_in_their_events(
    sample: SampleRun,
) -> None:
    one, other = (
        bytes(found.body["segment"])
        for found in await events_of(sample.url, "ExperiencesAnnotated")
    )

    def exchange(tx: Transaction) -> None:
        read = "SELECT data, checksum FROM segment WHERE key = :key"
        write = "UPDATE segment SET data = :data, checksum = :checksum WHERE key = :key"
        (mine,), (others,) = sql(read, key=one)(tx), sql(read, key=other)(tx)
        sql(write, key=one, **others._asdict())(tx)
        sql(write, key=other, **mine._asdict())(tx)

    await unguarded(sample.url, exchange)
    report = await verified(sample)
    named = [str(problem) for problem in report.problems if one.hex() in problem.where]
    assert any("the checksum does not match" in problem for problem in named), report.problems


def test_lines_of_every_age_are_read(tmp_path: Path) -> None:
    digest, head = "ab" * 16, "cd" * 32
    lines = ["a/0/0/0/", f"b/0/0/0/\t{digest}\t{head}", f"c/0/0/0/\t{digest}\t", "a/0/0/0/"]
    torn = f"d/0/0/0/\t{digest[:9]}"
    (tmp_path / "e0.ack").write_text("\n".join([*lines, torn]))
    found = Acknowledged(tmp_path)
    assert (found.uids.number, found.contents.number) == (4, 2)
    assert found.heads == {bytes.fromhex(head)}
    uids, contents = Names(), Names()
    assert found.lost(uids, None) == tuple(f"experience {letter}/0/0/0/" for letter in "abcd")
    uids.add(f"{letter}/0/0/0/" for letter in "abc")
    contents.add([("b/0/0/0/", bytes.fromhex(digest))])
    told = f"acknowledged with the content {digest}, recorded with another"
    assert found.lost(uids, contents) == ("experience d/0/0/0/", f"experience c/0/0/0/ ({told})")


@pytest.mark.parametrize(
    ("torn", "uids"), [("e0-1/", 2), ("e0-1/t/0/0/\tab", 3), ("e0-1/a/b/1/0/", 2)]
)
def test_a_line_that_was_torn_is_no_uid_after_a_restart(
    tmp_path: Path, torn: str, uids: int
) -> None:
    path, whole = tmp_path / "e0.ack", f"e0-0/t/0/0/\t{'ab' * 16}\t{'cd' * 32}\n"
    path.write_text(whole + torn)
    Acknowledgements(path).close()
    with path.open("a") as file:
        file.write(whole.replace("e0-0", "e0-2"))
    assert Acknowledged(tmp_path).uids.number == uids


def test_files_as_long_as_a_run_take_little_memory(tmp_path: Path) -> None:
    lines = (f"e0-{n}/prompt/0/0/\t{n:032x}\t{n >> 6:064x}\n" for n in range(20_000))
    (tmp_path / "e0.ack").write_text("".join(lines))
    tracemalloc.start()
    found = Acknowledged(tmp_path)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.uids.number == 20_000
    assert held < 40 * 20_000
    assert peak < held + 4_000_000


async def test_an_acknowledgement_file_may_have_been_through_an_editor(
    sqlite_url: str, tmp_path: Path
) -> None:
    noted, edited = Acknowledgements(tmp_path / "e0.ack"), tmp_path / "edited.ack"
    async with open_store(sqlite_url) as store:
        run = await store.experiment("run", config={})
        noted.note(await run.writer("e0").write([rollout("b", task, 0, 1.0) for task in range(3)]))
        lines = (tmp_path / "e0.ack").read_text().replace("\n", "\r\n")
        edited.write_bytes(b"\xef\xbb\xbf" + lines.encode())
        report = await verify(run, edited)
    assert (report.lost, report.contents, report.ok) == (0, 3, True)


async def test_lines_of_which_the_disk_takes_a_part_are_written_to_their_end(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted, write = Acknowledgements(tmp_path / "e0.ack"), os.write
    async with open_store(sqlite_url) as store:
        run = await store.experiment("run", config={})
        receipt = await run.writer("e0").write([rollout("b", task, 0, 1.0) for task in range(3)])
    with monkeypatch.context() as nearly_full:
        nearly_full.setattr(os, "write", lambda file, text: write(file, text[:7]))
        noted.note(receipt)
    assert (tmp_path / "e0.ack").read_text().splitlines() == list(receipt.lines)


async def test_a_full_disk_names_the_file_of_acknowledgements_and_the_remedy(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int, text: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async with open_store(sqlite_url) as store:
        run = await store.experiment("run", config={})
        receipt = await run.writer("e0").write([rollout("b", 0, 0, 1.0)])
    noted = Acknowledgements(tmp_path / "e0.ack")
    (tmp_path / "torn.ack").write_text("b/0/0/0/\tab")
    said = r"e0\.ack: No space left on device.* stored all the same: make room"
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(StoreError, match=said):
            noted.note(receipt)
        with pytest.raises(InvalidArgumentError, match=r"torn\.ack: No space left on device"):
            Acknowledgements(tmp_path / "torn.ack")


async def test_other_content_under_an_acknowledged_name_is_lost(
    store_url: str, tmp_path: Path
) -> None:
    """As after a rollback to an older file: the names are all there again, with something else."""
    noted = Acknowledgements(tmp_path / "e0.ack")
    async with open_store(store_url) as store:
        writer = (await store.experiment("run", config={})).writer("e0")
        noted.note(await writer.write([rollout("b", task, 0, 1.0) for task in range(3)]))
    async with open_store(store_url) as store:
        writer = (await store.experiment("other", config={})).writer("e0")
        some = [rollout("b", 0, 0, 1.0), rollout("b", 1, 0, 0.5)]
        await writer.write([*some, rollout("b", 2, 0, 1.0)])
        report = await verify(await store.experiment("other"), tmp_path / "e0.ack")
    assert (report.lost, report.contents, report.ok) == (1, 3, False)
    assert report.lost_items[0].startswith("experience b/1/0/0/ (acknowledged with the content")
    assert "none of their heads is in this log: they are of another" in of_chain(report)[0]
    assert "no event has it" in of_chain(report)[1]
    (tmp_path / "bare").write_text("b/1/0/0/\n")
    async with open_store(store_url, read_only=True) as store:
        report = await verify(await store.experiment("other"), tmp_path / "bare")
    assert (report.lost, report.acknowledged, report.contents) == (0, 1, 0)


def test_concurrent_calls_get_the_digests_of_their_own_rows(store_url: str) -> None:
    receipts: dict[int, Any] = {}

    async def main() -> None:
        async with open_store(store_url) as store:
            writer = (await store.experiment("run", config={})).writer("e0")

            async def write(task: int) -> None:
                mine = [rollout("b", task, run, 1.0) for run in range(task % 3 + 1)]
                receipts[task] = await writer.write([*mine, mine[0]])

            async with anyio.create_task_group() as tasks:
                for task in range(8):
                    tasks.start_soon(write, task)
            for task in range(8):
                some = [rollout("b", task, run, 1.0) for run in range(4)]
                again = await writer.write(some)
                first = receipts[task]
                assert again.digests[: task % 3 + 1] == first.digests[:-1]
                assert first.digests[-1] == first.digests[0]
                assert (len(again.digests), len(set(again.digests))) == (4, 4)

    anyio.run(main)


def test_planting_chains_as_the_log_does(sqlite_sample: SampleRun) -> None:
    """Else every test with a planted fault would see the chain break, and nothing else."""
    anyio.run(unguarded, sqlite_sample.url, chain_anew)
    assert anyio.run(verified, sqlite_sample).ok
