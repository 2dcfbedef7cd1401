"""Trinity-RFT's registries and classes around the store."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import anyio
import pytest
import torch
from trinity.algorithm.policy_loss_fn import POLICY_LOSS_FN as THEIRS
from trinity.buffer.operators.experience_operator import create_operators
from trinity.common.config import OperatorConfig
from trinity.common.experience import EID, CustomField, Experience, gather_action_masks

import trinity_buffer as tb
from trinity_buffer.algorithm.policy_loss_fn import POLICY_LOSS_FN as OURS
from trinity_buffer.integrations import trinity_rft

TASKS, RUNS, BATCHES = 8, 2, 5
EXAMPLE = Path(__file__).with_name("example.py")


def rollouts(batch: int, seed: int = 0) -> list[Experience]:
    draw = torch.Generator().manual_seed(1000 * seed + batch)
    return [
        Experience(
            eid=EID(batch=batch, task=task, run=run),
            tokens=torch.randint(0, 64, (3 + size,), generator=draw),
            prompt_length=3,
            logprobs=-4 + torch.rand(size, generator=draw),
            reward=float(torch.rand((), generator=draw)),
            response_text=f"answer {task}/{run}",
            info={"model_version": batch, "score": 0.5},
            metrics={"accuracy": 1.0},
            custom_fields=[CustomField("score", "scores", torch.float32)],
        )
        for task in range(TASKS)
        for run in range(RUNS)
        for size in [2 + (task + run) % 4]
    ]


async def explore(url: str, batches: range, seed: int = 0) -> list[float]:
    """Run Trinity's operators over what an explorer made; return how many were new each time."""
    args = {"url": url, "experiment": "run", "config": {"rollouts_per_group": RUNS}}
    name = "trinity_buffer.integrations.trinity_rft.StoreOperator"
    (operator,) = create_operators([OperatorConfig(name=name, args=args)])
    await operator.prepare()
    written = []
    for batch in batches:
        left, metrics = await operator.process(rollouts(batch, seed))
        assert left == []
        written.append(metrics["store/written"])
    await operator.close()
    return written


def test_a_batch_that_is_explored_again_keeps_what_is_stored(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/run.db"
    assert asyncio.run(explore(url, range(2))) == [16, 16]
    assert asyncio.run(explore(url, range(1, 3), seed=7)) == [0, 16]


def test_every_field_comes_back_as_trinity_gave_it() -> None:
    given = rollouts(0)
    found = trinity_rft.to_trinity(trinity_rft.from_trinity(given))
    for one, other in zip(given, found, strict=True):
        for name in trinity_rft.PLAIN:
            a, b = getattr(one, name), getattr(other, name)
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, name
        assert one.custom_fields == other.custom_fields
        assert one.eid.tid == other.eid.tid
    twice = trinity_rft.from_trinity([*given, *given])
    assert [one.eid.suffix for one in twice] == [""] * 16 + ["a1"] * 16


def test_killed_and_resumed_each_group_is_trained_once(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/run.db"
    asyncio.run(explore(url, range(BATCHES)))
    command = [sys.executable, str(EXAMPLE), url, str(tmp_path / "job"), "20"]
    seen: list[int] = []
    for kill_after in (7, 4, None):
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        steps = 0
        for line in child.stdout:
            if line.startswith("step "):
                seen.append(int(line.split()[1]))
                steps += 1
            if steps == kill_after:
                os.kill(child.pid, signal.SIGKILL)
                break
        child.wait()
        child.stdout.close()
    assert child.returncode == 0
    assert sorted(set(seen)) == list(range(1, 21))

    async def trained() -> tuple[int, list[int]]:
        async with tb.open_store(url) as store:
            experiment = await store.experiment("run")
            committed = await experiment.committed_step()
            async with experiment.train_stream(strategy="grpo", groups_per_step=2) as stream:
                return committed, [step.step async for step in stream]

    committed, left = anyio.run(trained)
    assert committed == 18  # 20 is in a checkpoint that the next start commits
    assert left == [19, 20]
    with tb.open_replay_stream(url, experiment="run", last=20) as replay:
        rows = [row for step in replay for row in step.manifest.experiences]
    assert len(rows) == len(set(rows)) == BATCHES * TASKS * RUNS


def test_a_trainer_beside_its_explorer_waits_for_it(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/run.db"

    async def both() -> int:
        await explore(url, range(0))
        strategy = trinity_rft.StoreSampleStrategy(url=url, experiment="run", groups_per_step=2)
        exploring = asyncio.create_task(explore(url, range(1)))
        found, _, _ = await strategy.sample(1)
        await strategy.close()
        await exploring
        return len(found)

    assert asyncio.run(both()) == 2 * RUNS


def damage(path: Path, batch: int) -> None:
    """Flip a bit in the tokens of a batch, which was written at once."""
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        named = "SELECT sql FROM sqlite_master WHERE name = 'segment_forbids_update'"
        (guard,) = database.execute(named).fetchone()
        database.execute("DROP TRIGGER segment_forbids_update")
        families = "SELECT rowid, data FROM segment WHERE family = 'tokens' ORDER BY rowid"
        place, data = database.execute(families).fetchall()[batch]
        flipped = bytes([*data[:-1], data[-1] ^ 1])
        database.execute("UPDATE segment SET data = ? WHERE rowid = ?", (flipped, place))
        database.execute(guard)


def test_a_step_of_which_every_row_was_dropped_is_passed_over(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/run.db"
    asyncio.run(explore(url, range(3)))

    async def sampled(*steps: int) -> list[set[int]]:
        strategy = trinity_rft.StoreSampleStrategy(
            url=url, experiment="run", groups_per_step=TASKS, damaged_rows="drop"
        )
        found = [(await strategy.sample(step))[0] for step in steps]
        await strategy.close()
        return [{one.eid.batch for one in rows} for rows in found]

    assert asyncio.run(sampled(1, 2)) == [{0}, {1}]
    damage(tmp_path / "run.db", 1)
    assert asyncio.run(sampled(2)) == [{2}]


def padded(values: list[torch.Tensor], width: int) -> torch.Tensor:
    return torch.stack([torch.nn.functional.pad(one, (0, width - len(one))) for one in values])


def test_twenty_samples_give_the_advantages_and_the_loss_of_the_store(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/run.db"
    asyncio.run(explore(url, range(BATCHES)))
    theirs = THEIRS.get("ppo")(clip_range=0.2)
    ours = OURS.get("ppo")(clip_range=0.2)

    async def sampled() -> list[list[Experience]]:
        strategy = trinity_rft.StoreSampleStrategy(url=url, experiment="run", groups_per_step=2)
        found = [(await strategy.sample(step))[0] for step in range(1, 21)]
        await strategy.close()
        return found

    with tb.open_train_stream(
        url, experiment="run", strategy="grpo", groups_per_step=2, consumer="second"
    ) as stream:
        for rows, step in zip(asyncio.run(sampled()), stream, strict=True):
            (batch,) = step.microbatches
            width = max(len(one.logprobs) for one in rows)

            def padded(
                name: str, rows: list[Experience] = rows, width: int = width
            ) -> torch.Tensor:
                values = [getattr(one, name).float() for one in rows]
                return torch.stack(
                    [torch.nn.functional.pad(v, (0, width - len(v))) for v in values]
                )

            mask = gather_action_masks(rows, width).bool()
            logprob = padded("logprobs") + 0.1
            expected, _ = theirs(
                logprob=logprob,
                old_logprob=padded("logprobs"),
                action_mask=mask,
                advantages=padded("advantages"),
            )
            kept = {name: batch[name] for name in ("old_logprob", "action_mask", "advantages")}
            shifted = batch["old_logprob"] + 0.1 * batch["action_mask"]
            loss, _ = ours(shifted, layout=batch.layout, **kept)
            assert float(loss) == pytest.approx(float(expected), rel=1e-5, abs=1e-6)
