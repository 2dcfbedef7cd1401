"""What a strategy is given, and what becomes of what it says."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from typing_extensions import override

from tests.contract.making import assert_conserved, group, kinds, opened, rollout
from tests.handles import ConsumerReport
from tests.pipeline.planting import unguarded
from tests.pipeline.watching import BatchWatcher, Watcher, reasons, rejected_groups
from tests.raw_store import contents, rows, sql
from tests.small_sizes import resized
from tests.whole_stores import rebuild
from trinity_buffer import StrategyConsumer, run_strategy
from trinity_buffer.algorithm.add_strategy import AddStrategy
from trinity_buffer.errors import (
    ConflictingStrategyError,
    InvalidArgumentError,
    StoreError,
    TrinityBufferError,
    UnknownNameError,
)
from trinity_buffer.experience import Experience
from trinity_buffer.pipeline.annotate.deciding import Decision


@pytest.fixture(autouse=True)
def nothing_seen() -> None:
    Watcher.seen.clear()
    BatchWatcher.seen.clear()


async def test_grpo_computes_what_the_formula_says(store_url: str) -> None:
    async with opened(store_url, rollouts_per_group=4) as experiment:
        await experiment.writer("e0").write(group(rewards=[0.0, 1.0, 1.0, 1.0]))
        report = await run_strategy(experiment, "grpo", {"epsilon": 1e-6})
        assert report == ConsumerReport(annotated=4, rejected=0, waiting=0, waiting_groups=0)
        async with experiment.train_stream(strategy="grpo") as stream:
            (microbatch,) = (await anext(stream)).microbatches
        await assert_conserved(experiment)
    std = math.sqrt((0.75**2 + 3 * 0.25**2) / 3)
    expected = [-0.75 / (std + 1e-6), *[0.25 / (std + 1e-6)] * 3]
    for advantages, mask, value in zip(
        microbatch["advantages"], microbatch["action_mask"], expected, strict=True
    ):
        torch.testing.assert_close(advantages, mask * torch.tensor(value, dtype=torch.float32))


async def test_a_lease_of_null_is_that_of_the_default(store_url: str) -> None:
    async with opened(store_url, lease_ttl_s=None) as experiment:
        assert (await run_strategy(experiment, "grpo")).annotated == 0


async def test_units_are_whole_groups_and_steps_count_the_calls(store_url: str) -> None:
    async with opened(store_url) as experiment:
        writer = experiment.writer("e0")
        await writer.plan("b", [0, 1], 2)
        await writer.write([rollout(task=1, run=1), rollout(task=0, run=0)])
        assert (await run_strategy(experiment, Watcher)).waiting_groups == 2
        await writer.write([rollout(task=1, run=0, step=step) for step in (1, 0)])
        await run_strategy(experiment, Watcher)
        await writer.write([rollout(task=0, run=1)])
        report = await run_strategy(experiment, Watcher)
        assert (report.annotated, report.waiting) == (2, 0)
        assert Watcher.seen == [
            (0, ["b/1/0/0/", "b/1/0/1/", "b/1/1/0/"]),
            (1, ["b/0/0/0/", "b/0/1/0/"]),
        ]
        await assert_conserved(experiment)


@pytest.mark.long
@pytest.mark.parametrize("unit", [Watcher, BatchWatcher])
async def test_a_seal_closes_what_is_incomplete(store_url: str, unit: type[Watcher]) -> None:
    async with opened(store_url) as experiment:
        writer = experiment.writer("e0")
        await writer.plan("b", [0, 1, 2], 2)
        await writer.write([*group(task=0, runs=2), rollout(task=1)])
        await run_strategy(experiment, unit, name="all")
        await writer.seal("b", 3)
        report = await run_strategy(experiment, unit, name="all")
        assert report.waiting == 0
        seen = [uid for _, uids in unit.seen for uid in uids]
        assert sorted(seen) == ["b/0/0/0/", "b/0/1/0/", "b/1/0/0/"]
        assert await rejected_groups(experiment, "all") == 1, "task 2 has nothing to train on"
        await assert_conserved(experiment)


@pytest.mark.parametrize("incomplete", ["keep", "reject"])
async def test_an_incomplete_group_is_kept_or_rejected_as_configured(
    store_url: str, incomplete: str
) -> None:
    async with opened(store_url, on_incomplete_group=incomplete) as experiment:
        writer = experiment.writer("e0")
        await writer.plan("b", [0, 1], 2)
        await writer.write([*group(task=0, runs=2), rollout(task=1)])
        await writer.seal("b", 3)
        report = await run_strategy(experiment, Watcher, name="all")
        expected = {} if incomplete == "keep" else {"b/1/0": "incomplete_group"}
        assert await reasons(experiment, "all") == expected
        assert (report.annotated, report.rejected) == (3 - len(expected), len(expected))
        assert await rejected_groups(experiment, "all") == len(expected)
        await assert_conserved(experiment)


@pytest.mark.parametrize("incomplete", ["keep", "reject"])
async def test_a_group_with_a_damaged_experience_is_incomplete(
    sqlite_url: str, incomplete: str
) -> None:
    async with opened(
        sqlite_url, rollouts_per_group=2, on_incomplete_group=incomplete
    ) as experiment:
        for run in range(2):
            await experiment.writer("e0").write([rollout(run=run)])
        first = (await rows(experiment, "experience"))[0]["segment"]
    await unguarded(sqlite_url, sql("UPDATE segment SET checksum = 0 WHERE key = :key", key=first))
    async with opened(sqlite_url) as experiment:
        await run_strategy(experiment, Watcher, name="all", on_incomplete_group=incomplete)
        also = {} if incomplete == "keep" else {"b/0/1": "incomplete_group"}
        assert await reasons(experiment, "all") == {"b/0/0": "damaged", **also}


async def test_an_unplanned_task_of_a_planned_batch_closes_no_other_group(store_url: str) -> None:
    async with opened(store_url) as experiment:
        writer = experiment.writer("e0")
        await writer.plan("b", [0, 1], 2)
        consumer = StrategyConsumer(experiment, Watcher, name="all", speaks=False)  # no lease

        async def advance() -> None:
            page = partial(consumer._read_page, live=False)
            for units in (await experiment.database.session(page))[-1]:
                await consumer._decide(units)

        await writer.write([rollout(task=0)])
        await consumer.run()
        await writer.write([rollout(task=1)])
        await advance()
        await writer.write([rollout(task="stray", run=run) for run in range(2)])
        await advance()
        await writer.write([rollout(task=0, run=1), rollout(task=1, run=1)])
        await advance()
        assert await reasons(experiment, "all") == {}
        assert sorted(uids for _, uids in Watcher.seen) == [
            ["b/0/0/0/", "b/0/1/0/"],
            ["b/1/0/0/", "b/1/1/0/"],
            ["b/stray/0/0/", "b/stray/1/0/"],
        ]
        await assert_conserved(experiment)
        by_uid = {row["address"]: row["task"] for row in await rows(experiment, "experience")}
        planned = {
            by_uid[row["experience"]]: row["planned"]
            for row in await rows(experiment, "annotation")
        }
        assert planned == {"0": True, "1": True, "stray": False}


async def test_copies_are_rows_of_their_own_group(store_url: str) -> None:
    async with opened(store_url) as experiment:
        writer = experiment.writer("e0")
        await writer.plan("b", [0, 1], 2)
        await writer.write(group(task=0, rewards=[0.0, 1.0]) + group(task=1, rewards=[1.0, 1.0]))
        await writer.seal("b", 4)
        chain = ["duplicate_informative", "grpo"]
        report = await run_strategy(experiment, chain, name="double")
        assert (report.annotated, report.rejected) == (4, 2)
        assert await reasons(experiment, "double") == {
            "b/1/0": "zero_variance",
            "b/1/1": "zero_variance",
        }
        found = await rows(experiment, "annotation")
        assert [row["group_slot"] for row in found] == [0, 0, 1, 1]
        assert [row["planned"] for row in found] == [True, True, False, False]
        assert found[0]["experience"] == found[2]["experience"]
        assert await rejected_groups(experiment, "double") == 1
        await assert_conserved(experiment)
        async with experiment.train_stream(strategy="double", groups_per_step=2) as stream:
            step = await anext(stream)
            assert (step.manifest.num_groups, step.manifest.planned_groups) == (2, 1)
            (microbatch,) = step.microbatches
            assert torch.equal(microbatch["advantages"][:2], microbatch["advantages"][2:])


async def test_a_list_filters_first_and_commits_once(store_url: str) -> None:
    async with opened(store_url, rollouts_per_group=2) as experiment:
        writer = experiment.writer("e0")
        await writer.write(group(task=0, rewards=[0.0, 1.0]) + group(task=1, rewards=[1.0, 1.0]))
        report = await run_strategy(experiment, ["reward_variance", "grpo"])
        assert (report.annotated, report.rejected) == (2, 2)
        assert (await kinds(experiment))[-2:] == ["ExperiencesAnnotated", "ExperiencesRejected"]
        (name,) = {row["name"] for row in await rows(experiment, "consumer")}
        assert set((await reasons(experiment, name)).values()) == {"zero_variance"}
        await assert_conserved(experiment)


async def test_two_sets_stand_side_by_side(store_url: str) -> None:
    async with opened(store_url, rollouts_per_group=2) as experiment:
        await experiment.writer("e0").write(group(runs=2))
        await run_strategy(experiment, "grpo")
        before = await contents(store_url)
        await run_strategy(experiment, "grpo", {"ddof": 0}, name="population")
        after = await contents(store_url)
        assert set(before["annotation"]) < set(after["annotation"])
        assert set(before["segment"]) < set(after["segment"])
        await assert_conserved(experiment)


async def test_another_configuration_under_a_taken_name_is_refused(store_url: str) -> None:
    async with opened(store_url, rollouts_per_group=2) as experiment:
        await run_strategy(experiment, "grpo", {"epsilon": 1e-6})
        before = await contents(store_url)
        for call in (
            {"args": {"epsilon": 1e-5}},
            {"args": {"epsilon": 1e-6}, "rollouts_per_group": 3},
        ):
            with pytest.raises(ConflictingStrategyError, match=r"name="):
                await run_strategy(experiment, "grpo", **call)
        async with experiment.train_stream(strategy="grpo", consumer="t"):
            pass
        with pytest.raises(ConflictingStrategyError):
            await run_strategy(experiment, "grpo", {"epsilon": 1e-6}, name="t")
        assert set(before["annotation"]) == set((await contents(store_url))["annotation"])


class WithPair(Watcher):
    """Takes what JSON does not tell from a list."""

    def __init__(self, writer: Any, pair: tuple[int, int] = (1, 2), **more: Any) -> None:
        super().__init__(writer, **more)
        self.pair = pair


async def test_the_same_arguments_again_are_the_same_configuration(store_url: str) -> None:
    async with opened(store_url) as experiment:
        for _ in range(2):
            await run_strategy(experiment, WithPair, {"pair": (3, 4)}, name="pairs")
        with pytest.raises(InvalidArgumentError, match="pair"):
            await run_strategy(experiment, WithPair, {"pair": {1, 2}}, name="other")


class Long(AddStrategy):
    """Gives each token of the whole sequence an advantage, not of the response alone."""

    families: ClassVar[tuple[str, ...]] = ("light",)

    @override
    async def add(self, experiences: list[Experience], step: int) -> tuple[int, dict[str, Any]]:
        """Write what does not fit."""
        for experience in experiences:
            experience.advantages = torch.ones(7)
        await self.writer.write(experiences)
        return len(experiences), {}


async def test_advantages_that_do_not_fit_the_response_are_refused(sqlite_url: str) -> None:
    async with opened(sqlite_url, rollouts_per_group=2) as experiment:
        await experiment.writer("e0").write(group(runs=2))
        with pytest.raises(InvalidArgumentError, match=r"advantages of shape \[7\]: its response"):
            await run_strategy(experiment, Long)
        assert (await contents(sqlite_url))["annotation"] == []


async def test_advantages_stored_at_another_length_are_not_trained(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of one row would spill into the next."""
    async with opened(sqlite_url, rollouts_per_group=2) as experiment:
        await experiment.writer("e0").write(group(task=0, runs=2))
        with monkeypatch.context() as earlier:
            earlier.setattr(Decision, "require_fitting", lambda *_: None)
            await run_strategy(experiment, Long)
        async with experiment.train_stream(strategy="Long", needs=("advantages",)) as stream:
            assert [step async for step in stream] == []
        found = await rows(experiment, "rejection")
        assert [row["reason"] for row in found] == ["invalid: advantages"] * 2


async def test_a_class_of_the_user_s_own_is_a_strategy(store_url: str) -> None:
    async with opened(store_url, rollouts_per_group=2) as experiment:
        await experiment.writer("e0").write(group(runs=2))
        report = await run_strategy(experiment, Watcher)
        assert report.annotated == 2
        (row,) = await rows(experiment, "consumer")
        assert row["name"] == "Watcher"


class Bad(AddStrategy):
    """Goes wrong in a way of its own choice."""

    families: ClassVar[tuple[str, ...]] = ("light",)
    fault: ClassVar[str] = ""

    @override
    async def add(self, experiences: list[Experience], step: int) -> tuple[int, dict[str, Any]]:
        """Write, and go wrong."""
        await self.writer.write(experiences)
        if self.fault == "raises":
            raise RuntimeError("no idea")
        if self.fault == "makes":
            await self.writer.write([rollout("made", "up")])
        if self.fault == "both":
            self.reject(experiences, "filtered")
        return len(experiences), {}


@pytest.mark.parametrize(
    ("fault", "error"),
    [("raises", RuntimeError), ("makes", InvalidArgumentError), ("both", InvalidArgumentError)],
)
async def test_a_strategy_that_goes_wrong_leaves_the_store_as_it_was(
    store_url: str, fault: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(store_url, rollouts_per_group=2) as experiment:
        await experiment.writer("e0").write(group(task=0, runs=2) + group(task=1, runs=2))
        consumer = StrategyConsumer(experiment, Bad)
        monkeypatch.setattr(Bad, "fault", fault)
        with pytest.raises(error):
            await consumer.run()
        before = await contents(store_url)
        assert (before["annotation"], before["waiting"]) == ([], [])
        with pytest.raises(error):
            await consumer.run()
        assert await contents(store_url) == before
        monkeypatch.setattr(Bad, "fault", "")
        assert (await consumer.run()).annotated == 4
        await assert_conserved(experiment)


async def test_a_row_that_the_table_lacks_is_made_again_by_a_rebuild(store_url: str) -> None:
    async with opened(store_url, rollouts_per_group=2) as experiment:
        await experiment.writer("e0").write(group(runs=2))
        await experiment.database.write(sql("DELETE FROM experience WHERE run = 1"))
        with pytest.raises(StoreError, match=r"'run': the table experience lacks 2:1.*rebuild"):
            await run_strategy(experiment, Watcher, name="all")
        await rebuild(experiment.database, experiment.key)
        assert (await run_strategy(experiment, Watcher, name="all")).annotated == 2


@pytest.mark.parametrize(
    ("follow", "page", "commits"),
    [(False, 256, [16]), (True, 256, [4] * 4), (True, 2, [8, 8])],
    ids=["to the end", "live", "behind"],
)
async def test_commits_are_small_only_where_a_trainer_may_wait_for_them(
    sqlite_url: str, follow: bool, page: int, commits: list[int]
) -> None:
    async with opened(sqlite_url, rollouts_per_group=4) as experiment:
        for task in range(4):
            await experiment.writer("e0").write(group(task=task))
        await experiment.finish("done")
        with resized(experiences_per_live_commit=4, events_per_page=page):
            await run_strategy(experiment, "grpo", follow=follow)
        found = experiment.events(kinds=("ExperiencesAnnotated",))
        assert [len(event.body["experiences"]) async for event in found] == commits


async def test_without_a_reward_there_is_no_advantage(store_url: str) -> None:
    async with opened(store_url, rollouts_per_group=3) as experiment:
        some = [*group(runs=2), rollout(run=2, reward=None)]
        await experiment.writer("e0").write(some)
        report = await run_strategy(experiment, "grpo")
        assert (report.annotated, report.rejected) == (2, 1)
        assert await reasons(experiment, "grpo") == {"b/0/2": "invalid: reward"}
        await assert_conserved(experiment)


@pytest.mark.parametrize(
    ("strategy", "more", "error", "match"),
    [
        ("grop", {}, UnknownNameError, "grpo"),
        (dict, {}, TrinityBufferError, "AddStrategy"),
        ([], {}, InvalidArgumentError, "strategies"),
        ("grpo", {"args": {"epsilom": 1}}, InvalidArgumentError, "epsilom"),
        ("grpo", {"rollout_per_group": 3}, InvalidArgumentError, "rollouts_per_group"),
        ("grpo", {"group_timeout_s": 0}, InvalidArgumentError, "group_timeout_s"),
    ],
)
async def test_an_impossible_strategy_is_refused(
    store_url: str, strategy: Any, more: dict[str, Any], error: type[Exception], match: str
) -> None:
    async with opened(store_url) as experiment:
        before = await contents(store_url)
        with pytest.raises(error, match=match):
            await run_strategy(experiment, strategy, **more)
        assert await contents(store_url) == before


@pytest.mark.parametrize(
    ("attribute", "value", "problem"),
    [
        ("families", ("lihgt",), "has families='lihgt': accepted are light, tokens, text, heavy"),
        ("unit", "batches", "has unit='batches': accepted are group and batch"),
    ],
)
async def test_a_strategy_that_reads_what_there_is_not_is_refused(
    store_url: str, monkeypatch: pytest.MonkeyPatch, attribute: str, value: Any, problem: str
) -> None:
    monkeypatch.setattr(Watcher, attribute, value)
    async with opened(store_url, rollouts_per_group=4) as experiment:
        await experiment.writer("e0").write(group())
        before = await kinds(experiment)
        with pytest.raises(InvalidArgumentError, match=problem):
            await run_strategy(experiment, Watcher)
        assert await kinds(experiment) == before
