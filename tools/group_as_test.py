"""A group that went wrong as a pytest case: its rewards, and what the strategy made of them.

python tools/group_as_test.py runs/demo.db --output test_group.py
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import trinity_buffer as tb
from trinity_buffer.inspect import groups

CASE = '''"""Group {batch}/{task} of experiment {name!r}, as it was recorded."""

import pytest
import torch

from trinity_buffer.algorithm import ADVANTAGE_FN
from trinity_buffer.experience import EID, Experience

REWARDS = {rewards}
ADVANTAGES = {advantages}


def test_grpo_gives_this_group_the_advantages_that_were_recorded() -> None:
    rollouts = [
        Experience(
            eid=EID({batch!r}, {task!r}, run),
            tokens=torch.tensor([1, 2]),
            prompt_length=1,
            logprobs=torch.zeros(1),
            reward=reward,
        )
        for run, reward in enumerate(REWARDS)
    ]
    made, _ = ADVANTAGE_FN.get("grpo")()(rollouts)
    assert [float(one.advantages[0]) for one in made] == pytest.approx(ADVANTAGES, abs=1e-4)
'''


async def group_as_test(url: str) -> str:
    """Return the group whose rewards spread most as a test; nothing in the store is changed."""
    async with tb.open_store(url, read_only=True) as store:
        (name, *_) = await store.experiments()
        found = await groups(await store.experiment(name), order="deviation", limit=100)
        group = next(g for g in found if all(run.advantage is not None for run in g.runs))
        return CASE.format(
            batch=group.batch,
            task=group.task,
            name=name,
            rewards=[run.reward for run in group.runs],
            advantages=[run.advantage for run in group.runs],
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("store", help="path or URL")
    parser.add_argument("--output", type=Path, default=Path("test_group.py"), help="file to write")
    given = parser.parse_args()
    case = asyncio.run(group_as_test(given.store))
    given.output.write_text(case)
    print(f"{case.splitlines()[0].strip(chr(34))}: {given.output}")
