"""What must hold after a round, by what explorers, checkpoints and readers noted themselves."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import torch

from tests.crash.forking import CONTEXT
from tests.handles import VerifyReport
from tests.torture.effects import note
from tests.torture.inflict import EXPERIMENT
from tests.torture.plan import Plan
from tests.torture.roles import Life, live
from tests.torture.sites import Site
from trinity_buffer import open_store, run_strategy, verify
from trinity_buffer.errors import StoreReplacedError
from trinity_buffer.experience import EID, Experience
from trinity_buffer.store.counts import PlanCounts, StrategyCounts, TrainerCounts

if TYPE_CHECKING:
    from tests.torture.round import RoundReport

CONSUMERS = {"trainer": "grpo", "second": "other"}
REPLAY_LIMIT_S = 900.0
READ_BY_NOBODY = {"text", "measures"}
"""Families that neither a strategy nor a trainer opens."""


def examine(report: RoundReport, plan: Plan, site: Site, url: str, folder: Path) -> None:
    """Put into ``report`` everything that does not hold."""
    replays = _start_replays(url, folder)
    anyio.run(_verify, report, url, folder)
    _compare_reader(report, folder / "r0.read")
    for consumer, process in replays.items():
        process.join(REPLAY_LIMIT_S)
        _take_replay(report, folder, consumer, process)
    ends = {kind.name for kind in plan.comes() if kind.at_the_end}
    if "file replaced" in ends:
        copy = site.copy(url)
        if anyio.run(_write_while_replaced, report, site, copy):
            note(folder, "file replaced")
        site.remove(copy)
    if "bit flipped" in ends:
        copy = site.copy(url)
        key, family = site.flip(copy, random.Random(f"{plan.seed}/{plan.number}/flip").random())
        if anyio.run(_go_on_damaged, report, copy, key, family):
            note(folder, "bit flipped")
        site.remove(copy)


async def _verify(report: RoundReport, url: str, folder: Path) -> None:
    plans = PlanCounts(0, 0)
    async with open_store(url) as store:
        experiment = await store.experiment(EXPERIMENT)
        for consumer, quick in {"second": True, "trainer": False}.items():
            checkpoint = await experiment.last_checkpoint(consumer)
            assert checkpoint is not None  # each has committed, or the round would not have ended
            found = await verify(
                experiment,
                acknowledged=None if quick else folder / "acks",
                checkpoint=Path(checkpoint),
                consumer=consumer,
                quick=quick,
            )
            report.lost += found.lost
            report.duplicated += found.duplicated
            report.problems += [f"lost: {item}" for item in found.lost_items]
            report.problems += [f"duplicated: {item}" for item in found.duplicated_items]
            report.problems += map(str, found.problems)
            report.steps += found.chain or 0
            report.events, report.experiences = found.events, found.experiences
            report.acknowledged, plans = found.acknowledged or 0, found.plans
        missing = 0
        async for event in experiment.events(kinds=("BatchPlanned",)):
            missing += len(await experiment.writer("auditor").missing(event.body["batch"]))
    if missing or plans.planned != plans.stored:
        told = f"planned {plans.planned}, stored {plans.stored}, missing {missing}"
        report.problems.append(f"not every plan was fulfilled: {told}")
    if not report.acknowledged:
        report.problems.append("no explorer has acknowledged anything")


def _compare_reader(report: RoundReport, noted: Path) -> None:
    """The reader must have seen each position once, in order, through all of its lives."""
    lines = noted.read_text().splitlines()
    positions = [int(line.split()[0]) for line in lines]
    report.skipped = len(set(range(1, max(positions, default=0) + 1)) - set(positions))
    if positions != list(range(1, len(positions) + 1)):
        wrong = next(i for i, position in enumerate(positions, 1) if position != i)
        report.problems.append(f"the reader's line {wrong} is position {positions[wrong - 1]}")
    if not any(line.split()[1] == "ExperimentFinished" for line in lines):
        report.problems.append(f"the reader ended after {len(lines)} events, before the end")


def _start_replays(url: str, folder: Path) -> Mapping[str, Any]:
    started = {}
    for consumer in CONSUMERS:
        arguments = {"url": url, "experiment": EXPERIMENT, "consumer": consumer}
        log = str(folder / f"replay-{consumer}.log")
        call = ("replay", {**arguments, "folder": str(folder)}, Life(), log)
        started[consumer] = CONTEXT.Process(target=live, args=call, daemon=True)
        started[consumer].start()
    return started


def _take_replay(report: RoundReport, folder: Path, consumer: str, process: Any) -> None:
    result = folder / f"replay-{consumer}.json"
    if process.exitcode != 0 or not result.exists():
        log = (folder / f"replay-{consumer}.log").read_text()
        report.problems.append(f"replay of {consumer!r}: exit code {process.exitcode}\n{log}")
        process.kill()
        return
    found = json.loads(result.read_text())
    report.replayed += found["compared"]
    report.different += len(found["different"])
    if found["different"] or not found["compared"] or found["compared"] != found["recorded"]:
        report.problems.append(f"replay of {consumer!r} came out otherwise: {found}")


async def _write_while_replaced(report: RoundReport, site: Site, url: str) -> bool:
    """Replace the store's file under writers: what is acknowledged must be in the new one.

    Returns whether all who wrote afterwards were told.
    """
    acknowledged, told = set[int](), set[int]()

    async def write(task: int) -> None:
        tokens = torch.tensor([1, 2])
        one = Experience(eid=EID("b", task, 0), tokens=tokens, prompt_length=1, reward=1.0)
        try:
            await writer.write([one])
        except StoreReplacedError:
            told.add(task)
        else:
            acknowledged.add(task)

    before, afterwards = range(4), range(4, 8)
    async with open_store(url) as store:
        experiment = await store.experiment("replaced", config={"rollouts_per_group": 1})
        writer = experiment.writer(actor="e0")
        await writer.plan("b", [*before, *afterwards], 1)
        for task in before:
            await write(task)
        site.replace(url)
        async with anyio.create_task_group() as group:
            for task in afterwards:
                group.start_soon(write, task)
    async with open_store(url, read_only=True) as store:
        experiment = await store.experiment("replaced")
        lost = acknowledged - {one.eid.task async for one in experiment.read()}
        report.problems += map(str, (await verify(experiment)).problems)
    report.lost += len(lost)
    report.problems += [f"file replaced: task {task} was acknowledged and lost" for task in lost]
    return told == set(afterwards)


async def _go_on_damaged(report: RoundReport, url: str, key: str, family: str) -> bool:
    """Everybody must go on without the segment of which a bit was flipped.

    Returns whether `verify` named it, and nothing else.
    """
    async with open_store(url) as store:
        experiment = await store.experiment(EXPERIMENT)
        found = await verify(experiment)
        named = [p for p in found.problems if p.check == "segments" and key in p.where]
        is_named = bool(named) and set(found.problems) == set(named)
        if not is_named:
            report.problems.append(f"bit flipped in {key} {family}: {found.problems}")
        await run_strategy(experiment, "grpo", name="on damaged data")
        for annotation_set in (*CONSUMERS.values(), "on damaged data"):
            async with experiment.train_stream(
                strategy=annotation_set, consumer=f"after {annotation_set}", groups_per_step=4
            ) as stream:
                async for step in stream:
                    await stream.commit(step)
        report.problems += _left_over(await verify(experiment), key, family)
    return is_named


def _left_over(found: VerifyReport, key: str, family: str) -> list[str]:
    """Return what is wrong after all have gone on, but the damage itself."""
    wrong = [str(p) for p in found.problems if p.check != "segments" or key not in p.where]
    rejected: dict[str, int] = {}
    everything: list[StrategyCounts | TrainerCounts] = [*found.strategies, *found.trainers]
    for counts in everything:
        if "damage" in counts.consumer or counts.consumer.startswith("after"):
            wrong += [] if counts.holds else [f"does not add up: {counts}"]
            rejected |= counts.rejected
        unfinished = getattr(counts, "ready", 0) + getattr(counts, "waiting", 0)
        if unfinished and counts.consumer not in CONSUMERS:
            wrong.append(f"left over: {counts}")
    if family not in READ_BY_NOBODY and "damaged" not in rejected:
        wrong.append(f"a bit was flipped in {key} {family}, and nothing was rejected as damaged")
    return wrong
