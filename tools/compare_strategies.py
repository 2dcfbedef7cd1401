"""What would another strategy have said of the same rollouts? Annotates again and compares.

python tools/compare_strategies.py runs/demo.db grpo opmd
"""

from __future__ import annotations

import argparse
import asyncio

import trinity_buffer as tb
from trinity_buffer.inspector import compare_sets, now


async def compare_strategies(url: str, first: str, second: str) -> None:
    """Add the annotation set ``second`` if it is missing, and print how the two differ."""
    async with tb.open_store(url, create=False) as store:
        names = await store.experiments()
        if not names:
            raise SystemExit(f"no experiment in {url}")
        experiment = await store.experiment(names[0])
        await tb.run_strategy(experiment, second)
        found = await compare_sets(now(experiment), first, second, limit=5)
        print(f"{found.experiences} rollouts, {found.both} with an advantage in both sets")
        print(
            f"{found.equal} equal, {found.opposite} of opposite sign, mean difference {found.mean}"
        )
        for row in found.rows:
            print(f"  {row.uid}  {row.first_advantage} -> {row.second_advantage}")
        for unreadable in found.unreadable:
            print(f"  {unreadable}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("store", help="path or URL")
    parser.add_argument("first", help="an annotation set")
    parser.add_argument("second", help="a registered strategy")
    given = parser.parse_args()
    try:
        asyncio.run(compare_strategies(given.store, given.first, given.second))
    except tb.TrinityBufferError as error:
        raise SystemExit(f"error: {error}") from None
