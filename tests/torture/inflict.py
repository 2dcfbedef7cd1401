"""What can be done to processes and to the store from outside."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import anyio

from tests.torture import effects
from tests.torture.fleet import LEASE_TTL_S, Fleet
from tests.torture.sites import Site
from trinity_buffer import open_store
from trinity_buffer.errors import StoreError
from trinity_buffer.store import counts, leases

EXPERIMENT = "torture"
SHARED = "trainer"
"""The consumer name for whose lease two processes contend."""

TAKE_OVER_LIMIT_S = 10 * LEASE_TTL_S


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that is to happen to a process, or to the store.

    Attributes:
        at_s: seconds after the start of the faults.
        kind: the name of a kind that is inflicted.
        slot: whose process; of no meaning where the store is hit.
        draw: a number in [0, 1) for all the rest: how long it lasts, which backend it hits.
    """

    at_s: float
    kind: str
    slot: str
    draw: float


@dataclass(frozen=True, slots=True)
class Scene:
    """Where a round takes place."""

    fleet: Fleet
    site: Site
    url: str
    folder: Path


def kill(scene: Scene, fault: Fault) -> None:
    """SIGKILL a process."""
    scene.fleet.kill(fault.slot, fault.kind)


MORTAL = "e2"
"""The explorer that dies once, and is not started again."""


def kill_for_good(scene: Scene, fault: Fault) -> None:
    """SIGKILL an explorer whose runs others wait for; another one must take its batch over."""
    if anyio.run(_lacks_runs, scene.url):
        scene.fleet.kill_for_good(MORTAL, fault.kind)


async def _lacks_runs(url: str) -> bool:
    """Return whether a batch of the mortal explorer is planned and not whole."""
    try:
        async with open_store(url, read_only=True) as store:
            experiment = await store.experiment(EXPERIMENT)
            batches = await store.database.read(counts.open_batches, experiment.key)
            writer = experiment.writer("auditor")
            mine = [batch.key for batch in batches if batch.actor == MORTAL]
            return any([await writer.missing(batch) for batch in mine])
    except StoreError:
        return False  # the server recovers from the last fault


def pause(scene: Scene, fault: Fault) -> None:
    """SIGSTOP a process for longer than a lease lasts."""
    scene.fleet.pause(fault.slot, fault.kind, (1.1 + 1.4 * fault.draw) * LEASE_TTL_S)


def let_take_over(scene: Scene, fault: Fault) -> None:
    """SIGSTOP the trainer who holds the lease until the other one has taken it."""
    owner = anyio.run(_holder, scene.url)
    holders = [s.name for s in scene.fleet.slots.values() if s.pid and f":{s.pid}:" in owner]
    if not holders:
        return  # it has just ended
    scene.fleet.pause(holders[0], None, TAKE_OVER_LIMIT_S)
    while scene.fleet.is_stopped(holders[0]):
        scene.fleet.tend(time.monotonic() + 0.1)
        if anyio.run(_holder, scene.url) not in ("", owner):
            if scene.fleet.is_stopped(holders[0]):
                effects.note(scene.folder, fault.kind)
            scene.fleet.resume()


async def _holder(url: str) -> str:
    """Return who holds the lease: ``host:pid:start:random``, or nothing."""
    try:
        async with open_store(url, read_only=True) as store:
            key = (await store.experiment(EXPERIMENT)).key
            held = await store.database.read(leases.holder, key, SHARED)
    except StoreError:
        return ""  # the server recovers from the last fault
    return "" if held is None else held[0]


def fill_disk(scene: Scene, fault: Fault) -> None:
    """Leave no space for a while; who is told so notes it."""
    scene.site.fill()
    scene.fleet.tend(time.monotonic() + 0.1 + 0.9 * fault.draw)
    scene.site.empty()


def hit_server(scene: Scene, fault: Fault) -> None:
    """Do ``fault.kind`` to the server."""
    if scene.site.hit(fault.kind, scene.url, fault.draw):
        effects.note(scene.folder, fault.kind)
