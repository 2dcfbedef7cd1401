"""What is stuck? Groups that wait for a run, steps that nobody commits, leases that ran out.

python tools/what_is_stuck.py runs/demo.db --groups 5
"""

from __future__ import annotations

import argparse
import asyncio

import trinity_buffer as tb
from trinity_buffer.inspector import groups, leases, now, steps


async def what_is_stuck(url: str, newest: int) -> None:
    """Print what waits in each experiment of the store; nothing is changed."""
    async with tb.open_store(url, read_only=True) as store:
        for name in await store.experiments():
            experiment = await store.experiment(name)
            waiting = [g for g in await groups(experiment, limit=newest) if "waiting" in g.state]
            print(f"experiment {name}: {len(waiting)} of the newest {newest} groups wait")
            for group in waiting:
                print(f"  {group.batch}/{group.task}: {group.state}")

            for lease in await leases(now(experiment)):
                print(f"  trainer {lease.trainer}: lease {lease.state}, owner {lease.owner}")
                last = await steps(now(experiment), trainer=lease.trainer)
                for step in (one for one in last if one.state == "leased"):
                    print(f"  step {step.step}: {step.rows} rows handed out, not committed")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("store", help="path or URL")
    parser.add_argument("--groups", type=int, default=100, help="how many groups to look at")
    given = parser.parse_args()
    try:
        asyncio.run(what_is_stuck(given.store, given.groups))
    except tb.TrinityBufferError as error:
        raise SystemExit(f"error: {error}") from None
