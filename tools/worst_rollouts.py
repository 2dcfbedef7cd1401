"""Which rollouts pulled a gradient step down most? Those with the lowest advantage, and their text.

python tools/worst_rollouts.py runs/demo.db 2 --rollouts 3
"""

from __future__ import annotations

import argparse
import asyncio

import trinity_buffer as tb
from trinity_buffer.inspector import blame, now, show


async def worst_rollouts(url: str, step: int, count: int) -> None:
    """Print the rows of gradient step ``step`` with the lowest advantages; changes nothing."""
    async with tb.open_store(url, read_only=True) as store:
        names = await store.experiments()
        if not names:
            raise SystemExit(f"no experiment in {url}")
        experiment = await store.experiment(names[0])
        contents = await blame(now(experiment), step)
        known = [row for row in contents.rows if row.advantage is not None and not row.experiment]
        for row in sorted(known, key=lambda row: row.advantage or 0.0)[:count]:
            print(f"{row.uid}  advantage {row.advantage:+.3f}  reward {row.reward}")
            found = await show(experiment, row.uid)
            print(f"  {found.objects.get('response_text', '')!r}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("store", help="path or URL")
    parser.add_argument("step", type=int, help="number of a gradient step")
    parser.add_argument("--rollouts", type=int, default=5, help="how many to print")
    given = parser.parse_args()
    try:
        asyncio.run(worst_rollouts(given.store, given.step, given.rollouts))
    except tb.TrinityBufferError as error:
        raise SystemExit(f"error: {error}") from None
