"""How did the run go? Reward, length and staleness of what every gradient step trained on, as PNG.

python tools/plot_run.py runs/demo.db demo.png

All of it comes from the log: ``ExperiencesRecorded`` says what was generated, ``BatchLeased`` which
of it each step trained on; rows of an expert are left out. No tensor is loaded.
"""

from __future__ import annotations

import argparse
import asyncio
from itertools import repeat
from typing import NamedTuple

from matplotlib.figure import Figure

import trinity_buffer as tb


class Point(NamedTuple):
    """One gradient step: means over the experiences that it trained on."""

    step: int
    reward: float
    length: float
    staleness: float


async def points_of(url: str, experiment: str | None, trainer: str) -> list[Point]:
    """Return a point for each gradient step that was handed out."""
    # An experience's address is that of its event and its place in it: position * 2**20 + slot.
    generated: dict[int, tuple[float, int, int]] = {}
    points = []
    async with tb.open_store(url, read_only=True) as store:
        names = [experiment] if experiment else await store.experiments()
        if not names:
            raise SystemExit(f"no experiment in {url}")
        kinds = ["ExperiencesRecorded", "BatchLeased"]
        async for event in (await store.experiment(names[0])).events(kinds=kinds):
            body = event.body
            if event.kind == "ExperiencesRecorded":
                meta = body["meta"]
                rows = zip(meta["reward"], meta["length"], meta["policy_version"], strict=True)
                for slot, (reward, length, version) in enumerate(rows):
                    known = (reward or 0.0, length, version or 0)
                    generated[event.position * 2**20 + slot] = known
            elif body["consumer"] == trainer:
                # In a mixed step: 0 is this experiment, what is above it an expert's.
                leased = zip(body["experiences"], body.get("source") or repeat(0), strict=False)
                trained = [generated[address] for address, of in leased if of == 0]
                if not trained:
                    continue
                reward, length, version = (
                    sum(v) / len(trained) for v in zip(*trained, strict=True)
                )
                points.append(Point(body["step"], reward, length, body["step"] - 1 - version))
    return points


def plot(points: list[Point], file: str) -> None:
    """Write the curves to ``file``."""
    figure = Figure(figsize=(7, 6), layout="constrained")
    axes = figure.subplots(3, sharex=True)
    steps = [point.step for point in points]
    units = {"reward": "mean", "length": "tokens", "staleness": "policy versions"}
    for axis, (name, unit) in zip(axes, units.items(), strict=True):
        axis.plot(steps, [getattr(point, name) for point in points])
        axis.set_ylabel(f"{name} [{unit}]")
    axes[-1].set_xlabel("gradient step")
    figure.savefig(file)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("store", help="path or URL")
    parser.add_argument("picture", help="PNG file to write")
    parser.add_argument("--experiment", help="by default the first one")
    parser.add_argument("--trainer", default="trainer", help="name of the trainer")
    given = parser.parse_args()
    try:
        found = asyncio.run(points_of(given.store, given.experiment, given.trainer))
    except tb.TrinityBufferError as error:
        raise SystemExit(f"error: {error}") from None
    if not found:
        raise SystemExit(f"no gradient step of {given.trainer!r} in {given.store}")
    plot(found, given.picture)
    print(f"{len(found)} steps, last reward {found[-1].reward:.3f}: {given.picture}")
