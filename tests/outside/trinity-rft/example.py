"""Trinity-RFT's own loop, fed from a store: `python example.py sqlite:///runs/run.db runs/job 20`.

In Trinity's configuration this is

    algorithm:
      sample_strategy: trinity_buffer.integrations.trinity_rft.StoreSampleStrategy
      sample_strategy_args: {url: "sqlite:///runs/run.db", experiment: run, groups_per_step: 2,
                             checkpoints: runs/job}
"""

import asyncio
import sys
from pathlib import Path

from trinity.algorithm.sample_strategy import SAMPLE_STRATEGY

URL, JOB, STEPS = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
LATEST = JOB / "latest_checkpointed_iteration.txt"


def save(step: int) -> None:
    """Write a checkpoint as Trinity does: the folder, and then the file that names it."""
    folder = JOB / f"global_step_{step}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "weights").write_text(str(step))
    (JOB / "new").write_text(str(step))
    (JOB / "new").replace(LATEST)


async def train() -> None:
    chosen = SAMPLE_STRATEGY.get("trinity_buffer.integrations.trinity_rft.StoreSampleStrategy")
    strategy = chosen(
        buffer_config=None,
        url=URL,
        experiment="run",
        groups_per_step=2,
        checkpoints=str(JOB),
        lease_ttl_s=1,
    )
    first = int(LATEST.read_text()) + 1 if LATEST.exists() else 1
    for step in range(first, STEPS + 1):
        experiences, metrics, _ = await strategy.sample(step)
        print("step", step, len(experiences), metrics, flush=True)
        if step % 2 == 0:
            save(step)
    await strategy.close()


asyncio.run(train())
