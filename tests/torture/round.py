"""One round: many processes, everything that can go wrong, and then the proof from outside."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import anyio

from tests.torture import effects, proof
from tests.torture.fleet import LEASE_TTL_S, Fleet, Slot
from tests.torture.inflict import EXPERIMENT, MORTAL, SHARED, Fault, Scene
from tests.torture.plan import Plan
from tests.torture.roles import POISON
from tests.torture.sites import Site
from trinity_buffer import open_store
from trinity_buffer.cli.run_config import resolved
from trinity_buffer.errors import StoreError

CONFIG = {
    "task": {"digits": 1},
    "model": {"width": 8, "layers": 1, "heads": 1},
    "groups_per_batch": 2,
    "rollouts_per_group": 2,
    "groups_per_step": 2,
    "max_staleness": 2,
    "lease_ttl_s": LEASE_TTL_S,
}
STEPS_AFTERWARDS = 3
"""Every trainer must get so much further when the faults have stopped."""

CALM_LIMIT_S = 600.0
EFFECT_LIMIT_S = 600.0
"""Until every kind of fault has taken effect once."""


@dataclass(slots=True)
class RoundReport:
    """What happened in one round, and what was found afterwards.

    Attributes:
        faults: by kind, how often they took effect.
        ended: by name, how many processes ended with one of our own errors.
        lives: how many processes were started.
        own_kills: how many were killed only to clean up, or to be born with a fault.
        replayed: checkpoints that an undisturbed replay wrote and that the log knows the digest of.
        different: how many of these came out otherwise.
        problems: whatever is wrong, in words; a round is good if there are none.
    """

    number: int
    store: str
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    lives: int = 0
    own_kills: int = 0
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
        """How many processes faults killed with SIGKILL."""
        return self.faults["kill"] + self.faults["kill at a crash point"]


def slots_of(plan: Plan, url: str, folder: Path) -> list[Slot]:
    """Return the processes of a round: two of everything that may be there twice."""
    common = {"url": url, "experiment": EXPERIMENT}
    where = {**common, "folder": str(folder)}
    roles: dict[str, tuple[str, dict[str, Any]]] = {}
    sends = [k.name for k in plan.comes() if "write" in k.name or k.name == POISON]
    for name in ("e0", "e1", MORTAL):
        roles[name] = ("explorer", {**where, "actor": name, "sends": sends})
    for name, of, epsilon in (("g0", "grpo", 1e-6), ("g1", "grpo", 1e-6), ("o0", "other", 1e-2)):
        roles[name] = ("strategy", {**common, "name": of, "args": {"epsilon": epsilon}})
    for name, of, on in (("t0", SHARED, "grpo"), ("t1", SHARED, "grpo"), ("s0", "second", "other")):
        trains = {"consumer": of, "strategy": on, "publishes": of == SHARED}
        roles[name] = ("trainer", {**where, **trains})
    roles["r0"] = ("reader", {**common, "path": str(folder / "r0.read")})
    return [
        Slot(name, role, args, plan.lives(name, role), folder / f"{name}.log")
        for name, (role, args) in roles.items()
    ]


def run_round(
    plan: Plan,
    site: Site,
    folder: Path,
    *,
    seconds: float,
    say: Callable[[str], None] = lambda _: None,
) -> RoundReport:
    """Torture one fresh store for about ``seconds``, and return what was found.

    Each kind of fault comes once before that, and the round waits until it has taken effect. The
    store of a round that failed is copied into ``folder``.

    Args:
        folder: an empty folder for checkpoints, acknowledgements and logs; on a disk with space.
        say: hears of every fault.
    """
    begin = time.monotonic()
    report = RoundReport(plan.number, site.kind)
    url = site.fresh(f"round_{plan.number}")
    (folder / "acks").mkdir(parents=True)
    anyio.run(_create, url)
    scene = Scene(Fleet(slots_of(plan, url, folder), folder), site, url, folder)
    _live_through(plan, scene, report, seconds, say)
    if not report.problems:
        proof.examine(report, plan, site, url, folder)
    report.faults = effects.seen(folder)
    if not report.problems:
        never = [kind.name for kind in plan.kinds() if kind.name not in report.faults]
        report.problems += [f"{kind}: never took effect" for kind in never]
    if report.problems:
        site.keep(url, folder)
    site.remove(url)
    report.seconds = time.monotonic() - begin
    return report


async def _create(url: str) -> None:
    async with open_store(url) as store:
        await store.experiment(EXPERIMENT, config=asdict(resolved(CONFIG)))


def _live_through(
    plan: Plan, scene: Scene, report: RoundReport, seconds: float, say: Callable[[str], None]
) -> None:
    """Let the processes of a round live, suffer and end."""
    fleet = scene.fleet
    # A fault of the one that dies for good would be waited for in vain.
    slots = {slot.name: slot.role for slot in fleet.slots.values() if slot.name != MORTAL}
    fleet.start()
    try:
        if _go_on(fleet, scene.url, report, "at first", steps=1):
            fleet.become_wild({k.first: (k.name, life) for k, life in plan.first_lives(slots)})
            _each_once(plan, scene, slots, say)
            _inflict(plan, scene, plan.faults(slots, seconds), say)
            _end_calmly(fleet, scene.site, scene.url, report)
    finally:
        report.problems += [f"{name} did not end" for name in fleet.stop()]
    report.problems += fleet.unexpected
    report.lives, report.own_kills, report.ended = fleet.lives, fleet.own_kills, fleet.ended


def _each_once(
    plan: Plan, scene: Scene, slots: Mapping[str, str], say: Callable[[str], None]
) -> None:
    """Inflict each kind until it has taken effect; wait until those have that come by themselves.

    What has not after `EFFECT_LIMIT_S` will be missed at the end of the round.
    """
    firsts = {fault.kind: fault for fault in plan.first_faults(slots)}
    awaited = [kind.name for kind in plan.comes() if not kind.at_the_end]
    deadline = time.monotonic() + EFFECT_LIMIT_S
    for kind in [*firsts, *awaited]:
        while kind not in effects.seen(scene.folder):
            if scene.fleet.unexpected or time.monotonic() > deadline:
                return
            if kind in firsts:
                _inflict(plan, scene, [firsts[kind]], say)
            scene.fleet.tend(time.monotonic() + 0.1)


def _inflict(plan: Plan, scene: Scene, faults: list[Fault], say: Callable[[str], None]) -> None:
    """Inflict each fault at its time."""
    does = {kind.name: kind.do for kind in plan.inflicted()}
    begin = time.monotonic()
    for fault in faults:
        scene.fleet.tend(begin + fault.at_s)
        if scene.fleet.unexpected:
            return
        say(f"{fault.at_s:6.2f} s  {fault.kind} {fault.slot}")
        does[fault.kind](scene, fault)


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
    before: Mapping[str, int] | None = None
    deadline = time.monotonic() + CALM_LIMIT_S
    while not fleet.unexpected:
        now = anyio.run(_committed, url)
        if now is not None:
            before = now if before is None else before
            if all(now.get(name, 0) >= before.get(name, 0) + steps for name in TRAINERS):
                return True
        if time.monotonic() > deadline:
            report.problems.append(f"{when}: trainers went only from {before} to {now}")
            return False
        fleet.tend(time.monotonic() + 0.1)
    return False


TRAINERS = (SHARED, "second")


async def _committed(url: str) -> Mapping[str, int] | None:
    """Return the last committed step of each trainer, as its events tell.

    None while the server recovers: it may notice only now that a backend of it was killed.
    """
    steps: dict[str, int] = {}
    try:
        async with open_store(url, read_only=True) as store:
            experiment = await store.experiment(EXPERIMENT)
            async for event in experiment.events(kinds=("StepsCommitted",)):
                steps[event.body["consumer"]] = event.body["steps"][-1]
    except StoreError:
        return None
    return steps


async def _finish(url: str) -> None:
    async with open_store(url) as store:
        await (await store.experiment(EXPERIMENT)).finish("the round is over")
