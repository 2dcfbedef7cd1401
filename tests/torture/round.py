"""One round: many processes, everything that can go wrong, and then the proof from outside."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import anyio

from tests.torture import plan, proof
from tests.torture.fleet import Fleet, Slot
from tests.torture.sites import Site
from trinity_buffer.cli.run_config import resolved
from trinity_buffer.pipeline.store import open_store

EXPERIMENT = "torture"
CONFIG = {
    "task": {"digits": 1},
    "model": {"width": 8, "layers": 1, "heads": 1},
    "groups_per_batch": 2,
    "rollouts_per_group": 2,
    "groups_per_step": 2,
    "max_staleness": 2,
    "lease_ttl_s": plan.LEASE_TTL_S,
}
STEPS_AFTERWARDS = 3
"""Every trainer must get so much further when the faults have stopped."""

CALM_LIMIT_S = 60.0


@dataclass(slots=True)
class RoundReport:
    """What happened in one round, and what was found afterwards.

    Attributes:
        faults: by kind, how often.
        replayed: checkpoints that an undisturbed replay wrote and that the log knows the digest of.
        different: how many of these came out otherwise.
        problems: whatever is wrong, in words; a round is good if there are none.
    """

    seed: int
    number: int
    store: str
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    events: int = 0
    experiences: int = 0
    acknowledged: int = 0
    steps: int = 0
    lost: int = 0
    duplicated: int = 0
    skipped: int = 0
    replayed: int = 0
    different: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def kills(self) -> int:
        """How many processes were killed with SIGKILL."""
        return self.faults["kill"] + self.faults["kill at a crash point"]

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as JSON values."""
        return {**asdict(self), "faults": dict(self.faults), "kills": self.kills}


def slots_of(seed: int, number: int, url: str, folder: Path, site: str) -> list[Slot]:
    """Return the processes of a round: two of everything that may be there twice."""
    common = {"url": url, "experiment": EXPERIMENT}
    where = {**common, "folder": str(folder)}
    roles: dict[str, tuple[str, dict[str, Any]]] = {}
    for name in ("e0", "e1"):
        own = {"actor": name, "seed": f"{seed}/{number}/{name}"}
        roles[name] = ("explorer", {**where, **own})
    for name, of, epsilon in (("g0", "grpo", 1e-6), ("g1", "grpo", 1e-6), ("o0", "other", 1e-2)):
        roles[name] = ("strategy", {**common, "name": of, "args": {"epsilon": epsilon}})
    for name, of, on in (
        ("t0", "trainer", "grpo"),
        ("t1", "trainer", "grpo"),
        ("s0", "second", "other"),
    ):
        trains = {"consumer": of, "strategy": on, "publishes": of == "trainer"}
        roles[name] = ("trainer", {**where, **trains})
    roles["r0"] = ("reader", {**common, "path": str(folder / "r0.read")})
    return [
        Slot(name, role, args, plan.lives(seed, number, site, name, role), folder / f"{name}.log")
        for name, (role, args) in roles.items()
    ]


def run_round(
    seed: int,
    number: int,
    site: Site,
    folder: Path,
    *,
    seconds: float,
    mean_gap_s: float = 0.3,
    say: Callable[[str], None] = lambda _: None,
) -> RoundReport:
    """Torture one fresh store for about ``seconds``, and return what was found.

    Args:
        folder: an empty folder for checkpoints, acknowledgements and logs; on a disk with space.
        mean_gap_s: from one fault of the plan to the next.
        say: hears of every fault.
    """
    begin = time.monotonic()
    report = RoundReport(seed, number, site.kind)
    url = site.fresh(f"round_{number}")
    (folder / "acks").mkdir(parents=True)
    anyio.run(_create, url)
    fleet = Fleet(slots_of(seed, number, url, folder, site.kind))
    fleet.start()
    try:
        roles = {slot.name: slot.role for slot in fleet.slots.values()}
        planned = plan.faults(seed, number, site.kind, roles, seconds, mean_gap_s)
        _go_on(fleet, url, report, "at first", steps=1)
        fleet.become_wild()
        _inflict(planned, fleet, site, url, say)
        _end_calmly(fleet, site, url, report)
    finally:
        report.problems += [f"{name} did not end" for name in fleet.stop()]
    report.faults += fleet.counts
    report.problems += fleet.unexpected
    for file in folder.glob("*.resent"):
        report.faults["write sent again"] += len(file.read_text().splitlines())
    if not report.problems:
        proof.examine(report, site, url, folder, f"{seed}/{number}")
    if not report.problems:
        site.remove(url)
    report.seconds = time.monotonic() - begin
    return report


async def _create(url: str) -> None:
    async with open_store(url) as store:
        await store.experiment(EXPERIMENT, config=resolved(CONFIG).model_dump())


def _inflict(
    planned: list[plan.Fault], fleet: Fleet, site: Site, url: str, say: Callable[[str], None]
) -> None:
    begin = time.monotonic()
    for fault in planned:
        fleet.tend(begin + fault.at_s)
        if fleet.unexpected:
            return
        say(f"{fault.at_s:6.2f} s  {fault.kind} {fault.slot}")
        if fault.kind == "kill":
            fleet.kill(fault.slot)
        elif fault.kind == "pause":
            fleet.pause(fault.slot, fault.lasts_s)
        elif fault.kind == "disk full":
            site.fill()
            fleet.tend(time.monotonic() + fault.lasts_s)
            site.empty()
            fleet.counts["disk full"] += 1
        elif site.hit(fault.kind, url, fault.draw):
            fleet.counts[fault.kind] += 1


def _end_calmly(fleet: Fleet, site: Site, url: str, report: RoundReport) -> None:
    """Stop all faults; everybody must get further, and then come to an end by himself."""
    site.settle()
    fleet.become_calm()
    if _go_on(fleet, url, report, "after the faults", steps=STEPS_AFTERWARDS):
        fleet.may_end = True
        anyio.run(_finish, url)
        fleet.tend(time.monotonic() + CALM_LIMIT_S)


def _go_on(fleet: Fleet, url: str, report: RoundReport, when: str, *, steps: int) -> bool:
    """Return True as soon as every trainer has committed so many more steps."""
    before = anyio.run(_committed, url)
    deadline = time.monotonic() + CALM_LIMIT_S
    while not fleet.unexpected:
        fleet.tend(time.monotonic() + 0.1)
        now = anyio.run(_committed, url)
        if all(now.get(name, 0) >= before.get(name, 0) + steps for name in TRAINERS):
            return True
        if time.monotonic() > deadline:
            report.problems.append(f"{when}: trainers went only from {before} to {now}")
            return False
    return False


TRAINERS = ("trainer", "second")


async def _committed(url: str) -> dict[str, int]:
    """Return the last committed step of each trainer, as its events tell."""
    steps: dict[str, int] = {}
    async with open_store(url, read_only=True) as store:
        experiment = await store.experiment(EXPERIMENT)
        async for event in experiment.events(kinds=("StepsCommitted",)):
            steps[event.body["consumer"]] = event.body["steps"][-1]
    return steps


async def _finish(url: str) -> None:
    async with open_store(url) as store:
        await (await store.experiment(EXPERIMENT)).finish("the round is over")
