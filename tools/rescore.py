"""What would another reward have given? Scores all rollouts anew and annotates with the scores.

python tools/rescore.py runs/demo.db

The recorded rewards stay; the new ones stand beside them as the scoring ``short``, and the
advantages that they give as the annotation set ``grpo-short``. Run it again after more rollouts.
"""

from __future__ import annotations

import argparse
import asyncio

import trinity_buffer as tb


def short(rollout: tb.Experience) -> float:
    """Return the reward: what was recorded, less a hundredth for each token of the response."""
    response = len(rollout.tokens) - rollout.prompt_length
    return (rollout.reward or 0.0) - response / 100


async def rescore(url: str) -> None:
    """Score every rollout of the first experiment with `short`, and annotate with GRPO."""
    async with tb.open_store(url, create=False) as store:
        names = await store.experiments()
        if not names:
            raise SystemExit(f"no experiment in {url}")
        experiment = await store.experiment(names[0])
        count = await tb.assign_rewards(experiment, "short", short)
        print(f"{count} rollouts scored")
        report = await tb.run_strategy(experiment, "grpo", name="grpo-short", rewards="short")
        print(f"{report.annotated} annotated, {report.rejected} rejected, {report.waiting} waiting")
        print(f"compare: trinity-buffer diff grpo grpo-short --store {url}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("store", help="path or URL")
    given = parser.parse_args()
    try:
        asyncio.run(rescore(given.store))
    except tb.TrinityBufferError as error:
        raise SystemExit(f"error: {error}") from None
