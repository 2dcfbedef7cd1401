"""A group that went wrong as a pytest case: its rewards, and what the strategy made of them.

python tools/group_as_test.py runs/demo.db --output test_group.py
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import trinity_buffer as tb
from trinity_buffer.inspector import groups

CASE = '''"""Group {batch}/{task} of experiment {name!r}, as it was recorded."""

import asyncio
from pathlib import Path

import pytest
import torch

import trinity_buffer as tb
from trinity_buffer.inspector import groups

STRATEGY, ARGS = {strategy}, {args}
REWARDS = {rewards}
ADVANTAGES = {advantages}


def test_this_group_gets_the_advantages_that_were_recorded(tmp_path: Path) -> None:
    rollouts = [
        tb.Experience(
            eid=tb.EID({batch!r}, {task!r}, run, step),
            tokens=torch.tensor([1, 2]),
            prompt_length=1,
            logprobs=torch.zeros(1),
            reward=reward,
        )
        for (run, step), reward in REWARDS.items()
    ]

    async def annotated() -> list[float | None]:
        async with tb.open_store(f"sqlite:///{{tmp_path}}/store.db") as store:
            experiment = await store.experiment("group", config={{}})
            writer = experiment.writer("e0")
            await writer.write(rollouts)
            await writer.seal({batch!r}, len(rollouts))
            await tb.run_strategy(experiment, STRATEGY, ARGS, name="again")
            (group,) = await groups(experiment, annotation_set="again")
            return [run.advantage for run in group.runs]

    assert asyncio.run(annotated()) == pytest.approx(ADVANTAGES, abs=1e-4)
'''


async def group_as_test(url: str) -> str:
    """Return the group whose rewards spread most as a test; nothing in the store is changed.

    It runs the first strategy that annotated a whole group by the rewards that were recorded.
    """
    async with tb.open_store(url, read_only=True) as store:
        names = await store.experiments()
        if not names:
            raise SystemExit(f"no experiment in {url}")
        experiment = await store.experiment(names[0])
        async for event in experiment.events(kinds=["ConsumerRegistered"]):
            of, config = event.body["consumer"], event.body["config"]
            if event.body["kind"] != "strategy" or "rewards" in config:
                continue
            found = await groups(experiment, annotation_set=of, order="deviation", limit=100)
            for group in found:
                if all(run.advantage is not None for run in group.runs):
                    return CASE.format(
                        batch=group.batch,
                        task=group.task,
                        name=names[0],
                        strategy=config["strategy"],
                        args=config["args"],
                        rewards={(run.run, run.step): run.reward for run in group.runs},
                        advantages=[run.advantage for run in group.runs],
                    )
        raise SystemExit(f"no group of {names[0]!r} in {url} has advantages of a strategy yet")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("store", help="path or URL")
    parser.add_argument("--output", type=Path, default=Path("test_group.py"), help="file to write")
    given = parser.parse_args()
    try:
        case = asyncio.run(group_as_test(given.store))
    except tb.TrinityBufferError as error:
        raise SystemExit(f"error: {error}") from None
    given.output.write_text(case)
    print(f"{case.splitlines()[0].strip(chr(34))}: {given.output}")
