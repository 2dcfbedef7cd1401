"""Strategies that remember what they were given, and ways to end those who run them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
from typing_extensions import override

from tests.crash import points
from tests.handles import Experiment
from tests.raw_store import rows
from trinity_buffer import open_store, verify
from trinity_buffer.algorithm.add_strategy import AddStrategy
from trinity_buffer.experience import Experience


class Watcher(AddStrategy):
    """Keeps everything, and remembers what it was given."""

    families: ClassVar[tuple[str, ...]] = ("light",)
    annotates: ClassVar[bool] = False
    seen: ClassVar[list[tuple[int, list[str]]]] = []

    @override
    async def add(self, experiences: list[Experience], step: int) -> tuple[int, dict[str, Any]]:
        """Write all."""
        self.seen.append((step, [experience.eid.uid for experience in experiences]))
        await self.writer.write(experiences)
        return len(experiences), {"size": float(len(experiences))}


class BatchWatcher(Watcher):
    """The same of whole batches."""

    unit = "batch"
    seen: ClassVar[list[tuple[int, list[str]]]] = []


class Killed(BaseException):
    """The process is gone."""


@contextmanager
def killed_at(point: str, time: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """End what runs in the body when it reaches ``point`` for the ``time``-th time."""
    times = 0

    def reached(name: str) -> None:
        nonlocal times
        times += name == point
        if name == point and times == time:
            raise Killed

    with monkeypatch.context() as patch:
        points.install(reached, patch.setattr)
        yield


async def reasons(experiment: Experiment, name: str) -> dict[str, str]:
    """Return uid -> why the set ``name`` left it out."""
    uid = {
        row["address"]: f"{row['batch']}/{row['task']}/{row['run']}"
        for row in await rows(experiment, "experience")
    }
    return {
        uid[row["address"]]: row["reason"]
        for row in await rows(experiment, "rejection")
        if row["consumer"] == name
    }


async def rejected_groups(experiment: Experiment, name: str) -> int:
    """Return how many planned groups the set has left out as a whole."""
    found = {row["name"]: row for row in await rows(experiment, "consumer")}
    return int(found[name]["rejected_groups"])


async def problems_of(url: str) -> list[Any]:
    async with open_store(url) as store:
        return list((await verify(await store.experiment("run"))).problems)
