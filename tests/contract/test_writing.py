"""A write is durable when it returns, is written once, and is all or nothing."""

from __future__ import annotations

import sqlite3
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

from tests.conftest import Resize
from tests.contract.making import group, kinds, opened, rollout
from tests.raw_store import contents, count, rows
from trinity_buffer.errors import (
    ConflictingExperienceError,
    ConflictingSealError,
    InvalidArgumentError,
    InvalidExperienceError,
    StoreError,
)
from trinity_buffer.experience import Experience
from trinity_buffer.store import log
from trinity_buffer.store.connection import Database
from trinity_buffer.writer import WriteReceipt


async def own_commits(experiment: Any) -> int:
    """Return how many transactions this process has committed to the store."""
    own, _ = await experiment.database.changes.state()
    return int(own)


async def test_another_store_reads_what_was_acknowledged(store_url: str) -> None:
    written = group()
    async with opened(store_url) as experiment, opened(store_url) as other:
        receipt = await experiment.writer("e0").write(written)
        found = [experience async for experience in other.read()]
    assert (receipt.position, receipt.written, receipt.duplicates, receipt.rejected) == (2, 4, 0, 0)
    assert receipt.uids == tuple(e.eid.uid for e in written)
    assert [e.eid for e in found] == [e.eid for e in written]
    for one, other_one in zip(written, found, strict=True):
        assert torch.equal(one.tokens, other_one.tokens)
        assert one.logprobs is not None
        assert torch.equal(one.logprobs, other_one.logprobs)  # type: ignore[arg-type]


async def test_a_receipt_means_that_the_file_holds_it(sqlite_url: str, tmp_path: Path) -> None:
    async with opened(sqlite_url) as experiment:
        await experiment.writer("e0").write(group())
        # A reader that knows nothing of this process, as after kill -9 of it.
        plain = sqlite3.connect(f"file:{tmp_path / 'store.db'}?mode=ro", uri=True)
        assert plain.execute("SELECT count(*) FROM experience").fetchone() == (4,)
        plain.close()


async def test_writing_twice_is_writing_once(store_url: str) -> None:
    async with opened(store_url) as experiment:
        writer = experiment.writer("e0")
        first = await writer.write(group())
        before = await contents(store_url)
        again = await writer.write(group())
        assert (again.position, again.written, again.duplicates) == (0, 0, 4)
        assert again.uids == first.uids
        assert await contents(store_url) == before


async def test_only_what_is_new_of_a_call_is_written(store_url: str) -> None:
    async with opened(store_url) as experiment:
        writer = experiment.writer("e0")
        await writer.write(group()[:2])
        receipt = await writer.write(group())
        assert (receipt.position, receipt.written, receipt.duplicates) == (3, 2, 2)
        assert len([e async for e in experiment.read()]) == 4


async def test_an_experience_twice_in_one_call_is_one(store_url: str) -> None:
    async with opened(store_url) as experiment:
        receipt = await experiment.writer("e0").write([rollout(), rollout()])
        assert (receipt.written, receipt.duplicates) == (1, 1)
        assert await count(experiment, "experience") == 1


async def test_two_contents_under_one_address_refuse_the_whole_call(store_url: str) -> None:
    async with opened(store_url) as experiment:
        writer = experiment.writer("e0")
        await writer.write([rollout()])
        before = await contents(store_url)
        for call in (
            [rollout(task=5), rollout(reward=0.75), rollout(task=6)],
            [rollout(task=5), rollout(task=6), rollout(task=6, reward=0.75)],
        ):
            with pytest.raises(ConflictingExperienceError, match=r"b/(0|6)/0/0/"):
                await writer.write(call)
            assert await contents(store_url) == before


async def test_metrics_and_address_are_no_content(store_url: str) -> None:
    async with opened(store_url) as experiment:
        writer = experiment.writer("e0")
        await writer.write([rollout()])
        again = rollout()
        again.metrics["seconds"] = 2.5
        again.address = 17
        assert (await writer.write([again])).duplicates == 1


async def test_a_second_attempt_has_a_suffix_of_its_own(store_url: str) -> None:
    async with opened(store_url) as experiment:
        writer = experiment.writer("e0")
        await writer.write([rollout()])
        receipt = await writer.write([rollout(suffix="a1", reward=1.0)])
        assert receipt.written == 1


async def test_a_number_and_its_text_are_one_key_that_keeps_its_type(store_url: str) -> None:
    async with opened(store_url) as experiment:
        writer = experiment.writer("e0")
        await writer.write([rollout(7, 8), rollout("8", "9", reward=1.0), rollout(-1, "x/y")])
        assert (await writer.write([rollout("7", "8"), rollout(8, 9, reward=1.0)])).duplicates == 2
        with pytest.raises(ConflictingExperienceError):
            await writer.write([rollout("7", 8, reward=0.75)])
        found = [(e.eid.batch, e.eid.task) async for e in experiment.read()]
        assert found == [(7, 8), ("8", "9"), (-1, "x/y")]
        assert [e.eid.task async for e in experiment.read(batch="7", task="8")] == [8]


async def test_nothing_to_write_is_no_event(store_url: str) -> None:
    async with opened(store_url) as experiment:
        assert await experiment.writer("e0").write([]) == WriteReceipt(0, 0, 0)
        assert await kinds(experiment) == ["ExperimentCreated"]


async def test_fifty_calls_share_transactions_and_hear_of_their_own_rows(store_url: str) -> None:
    receipts: dict[int, WriteReceipt] = {}
    async with opened(store_url) as experiment:
        writer = experiment.writer("e0")
        before = await own_commits(experiment)

        async def call(task: int) -> None:
            receipts[task] = await writer.write(group(task=task))

        async with anyio.create_task_group() as tasks:
            for task in range(50):
                tasks.start_soon(call, task)
        commits = await own_commits(experiment) - before
        assert 1 <= commits <= 25, "calls that wait together commit together"
        recorded = (await kinds(experiment))[1:]
        assert recorded == ["ExperiencesRecorded"] * commits, "and are one event"
        by_task = {e.eid.task: e.address async for e in experiment.read() if e.eid.run == 3}
    assert {r.position for r in receipts.values()} == set(range(2, 2 + commits))
    for task, receipt in receipts.items():
        address = by_task[task]
        assert address is not None
        assert receipt.position == address >> 20
        assert (receipt.written, receipt.duplicates) == (4, 0)


async def test_of_calls_that_fill_several_events_each_hears_of_its_own(
    store_url: str, resize: Resize
) -> None:
    resize(rows_per_event=8)
    receipts: list[WriteReceipt] = []
    async with opened(store_url) as experiment:
        writer = experiment.writer("e0")

        async def call(task: int) -> None:
            receipts.append(await writer.write(group(task=task)))

        async with anyio.create_task_group() as tasks:
            for task in range(12):
                tasks.start_soon(call, task)
        positions = {e.eid.uid: (e.address or 0) >> 20 async for e in experiment.read()}
    for receipt in receipts:
        assert {positions[uid] for uid in receipt.uids} == {receipt.position}


async def test_a_refused_call_leaves_the_others_of_its_transaction_alone(store_url: str) -> None:
    refused: list[int] = []
    async with opened(store_url) as experiment:
        writer = experiment.writer("e0")
        await writer.write([rollout(task=task) for task in range(0, 30, 3)])

        async def call(task: int) -> None:
            try:
                receipt = await writer.write(
                    [rollout(task=task, reward=0.75), rollout(task=task, run=1)]
                )
                assert receipt.written == 2
            except ConflictingExperienceError:
                refused.append(task)

        async with anyio.create_task_group() as tasks:
            for task in range(30):
                tasks.start_soon(call, task)
        stored = {e.eid.task async for e in experiment.read(run=1)}
        referred = {row["segment"] for row in await rows(experiment, "experience")}
        assert {row["key"] for row in await rows(experiment, "segment")} == referred
    assert sorted(refused) == list(range(0, 30, 3))
    assert stored == set(range(30)) - set(refused)


async def test_an_invalid_call_leaves_those_that_wait_with_it_alone(store_url: str) -> None:
    refused: list[int] = []
    async with opened(store_url) as experiment:
        writer = experiment.writer("e0")

        async def call(task: int) -> None:
            given = group(task=task)
            if task % 5 == 0:
                given[2].reward = float("nan")
            if task % 5 == 1:
                given[2].info["when"] = object()
            try:
                assert (await writer.write(given)).written == 4
            except (InvalidArgumentError, InvalidExperienceError):
                refused.append(task)

        async with anyio.create_task_group() as tasks:
            for task in range(20):
                tasks.start_soon(call, task)
        stored = {e.eid.task async for e in experiment.read()}
    assert sorted(refused) == [task for task in range(20) if task % 5 < 2]
    assert stored == set(range(20)) - set(refused)


async def test_what_the_database_refuses_of_one_call_harms_no_other(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if a value slipped through the door that the database does not take.
    real = log.append

    def append(tx: Any, key: int, said: Any, **more: Any) -> list[log.Place]:
        if any(actor == "broken" for actor, _ in said):
            raise StoreError("a value out of range")
        return real(tx, key, said, **more)

    monkeypatch.setattr(log, "append", append)
    errors: list[StoreError] = []
    async with opened(store_url) as experiment:

        async def call(task: int) -> None:
            writer = experiment.writer("broken" if task == 3 else "e0")
            try:
                await writer.write(group(task=task))
            except StoreError as error:
                errors.append(error)

        async with anyio.create_task_group() as tasks:
            for task in range(8):
                tasks.start_soon(call, task)
        assert len(errors) == 1
        assert {e.eid.task async for e in experiment.read()} == set(range(8)) - {3}


@pytest.mark.parametrize("shared", [True, False])
async def test_one_address_from_many_at_once_is_stored_once(store_url: str, shared: bool) -> None:
    receipts: list[WriteReceipt] = []
    async with opened(store_url) as experiment, opened(store_url) as second:
        writers = [experiment.writer("e0"), (experiment if shared else second).writer("e1")]

        async def call(number: int) -> None:
            receipts.append(await writers[number % 2].write(group()))

        async with anyio.create_task_group() as tasks:
            for number in range(8):
                tasks.start_soon(call, number)
        assert await count(experiment, "experience") == 4
    assert sum(r.written for r in receipts) == 4
    assert sum(r.duplicates for r in receipts) == 28


async def test_of_two_contents_at_once_one_wins_whole(store_url: str) -> None:
    won: list[float] = []
    async with opened(store_url) as experiment, opened(store_url) as second:
        calls = [(experiment, 0.25), (second, 0.75), (experiment, 0.5)]

        async def call(of: Any, reward: float) -> None:
            try:
                await of.writer("e").write([rollout(run=run, reward=reward) for run in range(4)])
                won.append(reward)
            except ConflictingExperienceError:
                pass

        async with anyio.create_task_group() as tasks:
            for of, reward in calls:
                tasks.start_soon(call, of, reward)
        assert len(won) == 1
        assert [e.reward async for e in experiment.read()] == won * 4


async def test_rows_that_another_store_writes_again_and_again_meanwhile_are_duplicates(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, session = group(), Database.session
    async with opened(store_url) as experiment, opened(store_url) as other:
        beside = iter([written[:1], written[1:2], written[2:3]])

        async def after_another(self: Database, *args: Any, **kwargs: Any) -> Any:
            is_ours = self is experiment.database and kwargs.get("writes", True)
            if is_ours and (rows := next(beside, None)):
                await other.writer("e1").write(rows)
            return await session(self, *args, **kwargs)

        monkeypatch.setattr(Database, "session", after_another)
        receipt = await experiment.writer("e0").write(written)
        assert (receipt.written, receipt.duplicates) == (1, 3)
        assert len([row async for row in experiment.read()]) == 4


async def test_late_experiences_are_recorded_as_rejected(store_url: str) -> None:
    async with opened(store_url) as experiment:
        writer = experiment.writer("e0")
        await writer.write(group())
        await writer.seal("b", 4)
        receipt = await writer.write([rollout(run=9), rollout("c"), rollout(run=0, reward=0.0)])
        assert (receipt.written, receipt.duplicates, receipt.rejected) == (2, 1, 1)
        await writer.seal("b", 4)
        assert await writer.stored("b") == 4
        late = [e async for e in experiment.read(include_refused=True)]
        assert [e.eid.uid for e in late][4:] == ["b/0/9/0/", "c/0/0/0/"]
        assert "b/0/9/0/" not in [e.eid.uid async for e in experiment.read()]
        found = await rows(experiment, "experience")
        assert [row["refused"] for row in found] == [None] * 4 + ["late", None]


async def test_a_seal_between_two_concurrent_calls_refuses_only_what_came_after(
    store_url: str,
) -> None:
    async with opened(store_url) as experiment, opened(store_url) as second:
        writer = experiment.writer("e0")
        await writer.write(group())
        receipts: list[WriteReceipt] = []

        async def call(run: int) -> None:
            receipts.append(await second.writer("e1").write([rollout(run=run)]))

        async def seal() -> None:
            while not [e async for e in experiment.events(kinds=["BatchSealed"])]:
                with suppress(ConflictingSealError):  # one more came meanwhile
                    await writer.seal("b", await writer.stored("b"))

        async with anyio.create_task_group() as tasks:
            for run in range(4, 12):
                tasks.start_soon(call, run)
                if run == 7:
                    tasks.start_soon(seal)
        found = await rows(experiment, "experience")
        (sealed,) = [e.position async for e in experiment.events(kinds=["BatchSealed"])]
        for row in found:
            assert (row["refused"] == "late") == (row["address"] >> 20 > sealed)


async def test_invalid_experiences_are_quarantined_on_request(store_url: str) -> None:
    bad = rollout(task=1)
    bad.reward = float("nan")
    async with opened(store_url) as experiment:
        with pytest.raises(InvalidExperienceError, match="b/1/0/0/: reward"):
            await experiment.writer("e0").write([rollout(), bad])
        assert await count(experiment, "experience") == 0
        receipt = await experiment.writer("e0", on_invalid="quarantine").write([rollout(), bad])
        assert (receipt.written, receipt.rejected) == (2, 1)
        found = await rows(experiment, "experience")
        assert [row["refused"] for row in found] == [None, "invalid: reward"]


async def test_a_big_write_is_several_events_of_one_transaction(store_url: str) -> None:
    many = [rollout(task=task, run=run) for task in range(300) for run in range(8)]
    async with opened(store_url) as experiment:
        before = await own_commits(experiment)
        receipt = await experiment.writer("e0").write(many)
        assert await own_commits(experiment) - before == 1
        assert (receipt.position, receipt.written) == (4, 2400)
        assert await kinds(experiment) == ["ExperimentCreated", *["ExperiencesRecorded"] * 3]
        found = [e.eid async for e in experiment.read(families=["light"])]
    assert found == [e.eid for e in many]


@pytest.mark.long
async def test_a_write_that_is_bigger_than_a_statement_may_bind(store_url: str) -> None:
    many = [rollout(task=task) for task in range(7000)]
    async with opened(store_url) as experiment:
        writer = experiment.writer("e0")
        assert (await writer.write(many)).written == 7000
        again = [*many[:3500], rollout("new"), *many[3500:]]
        receipt = await writer.write(again)
        assert (receipt.written, receipt.duplicates) == (1, 7000)


async def test_unplanned_batches_are_just_written(store_url: str) -> None:
    async with opened(store_url) as experiment:
        await experiment.writer("import").write(group("2024", "task"))
        assert await count(experiment, "batch") == 0


async def test_a_stranger_s_tensors_come_back_as_they_were(store_url: str) -> None:
    odd = Experience(
        eid=rollout().eid,
        tokens=torch.arange(6, dtype=torch.int64),
        prompt_length=2,
        logprobs=torch.tensor([-1.0, -2.0, -3.0, -4.0], dtype=torch.bfloat16),
        action_mask=[True, False, True, True],
        reward=3,
        response_text="ärger \U0001f600",
        messages=[{"role": "user", "content": "x"}],
        multi_modal_inputs={"pixels": torch.rand(2, 3, 4).to(torch.bfloat16)},
        info={"model_version": 3, "nested": {"a": [1, 2.5, None, "x"]}},
        metrics={"seconds": 1.5},
    )
    async with opened(store_url) as experiment:
        await experiment.writer("e0").write([odd, rollout(task=9)])
        (found, plain) = [e async for e in experiment.read()]
        (light,) = [e async for e in experiment.read(task=0, families=["light"])]
    assert found.tokens.dtype == torch.int64
    assert found.reward == 3
    assert isinstance(found.reward, int)
    assert found.logprobs is not None
    assert torch.equal(found.logprobs, odd.logprobs)  # type: ignore[arg-type]
    assert found.multi_modal_inputs is not None
    assert torch.equal(found.multi_modal_inputs["pixels"], odd.multi_modal_inputs["pixels"])  # type: ignore[index]
    assert (found.info, found.metrics) == (odd.info, odd.metrics)
    assert (found.messages, found.response_text) == (odd.messages, odd.response_text)
    assert plain.response_text is None
    assert plain.multi_modal_inputs is None
    with pytest.raises(AttributeError, match="'tokens'"):
        _ = light.tokens


async def test_changing_what_was_read_does_not_change_the_store(store_url: str) -> None:
    async with opened(store_url) as experiment:
        await experiment.writer("e0").write(group())
        for experience in [e async for e in experiment.read()]:
            experience.tokens.fill_(0)
        assert all(int(e.tokens.sum()) for e in [e async for e in experiment.read()])
