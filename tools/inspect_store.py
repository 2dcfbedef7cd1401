"""What is in this store? Experiments, events by kind, a few rollouts.

python tools/inspect_store.py runs/demo.db --rollouts 3
"""

from __future__ import annotations

import argparse
import asyncio
from collections import Counter

import trinity_buffer as tb


async def inspect_store(url: str, rollouts: int) -> None:
    """Print what the store at ``url`` holds; nothing is changed."""
    async with tb.open_store(url, read_only=True) as store:
        for name in await store.experiments():
            experiment = await store.experiment(name)
            print(f"experiment {name}: {experiment.config}")

            kinds: Counter[str] = Counter()
            async for event in experiment.events():
                kinds[event.kind] += 1
            for kind, count in kinds.most_common():
                print(f"  {count:>8} {kind}")

            shown = 0
            async for rollout in experiment.read(families=["light", "text"]):
                print(f"  {rollout.eid.uid}  reward {rollout.reward}  {rollout.response_text!r}")
                shown += 1
                if shown == rollouts:
                    break


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("store", help="path or URL")
    parser.add_argument("--rollouts", type=int, default=5, help="how many to print, per experiment")
    given = parser.parse_args()
    try:
        asyncio.run(inspect_store(given.store, given.rollouts))
    except tb.TrinityBufferError as error:
        raise SystemExit(f"error: {error}") from None
