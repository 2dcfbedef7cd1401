"""What goes wrong in one round, and when: all of it follows from the seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from tests.torture.roles import Life
from trinity_buffer.crash_points import CRASH_POINTS

LEASE_TTL_S = 1.0
HOUR_S = 3600.0

_POINTS = {
    "explorer": ("plan", "append"),
    "strategy": ("annotate",),
    "trainer": ("lease", "step", "checkpoint", "commit"),
    "reader": (),
}

# How often, relative to each other. Kills at crash points are not here: lives bring their own.
_EVERYWHERE = {"kill": 8, "pause": 3}
_SERVER = {**_EVERYWHERE, "backend terminated": 2, "backend killed": 1, "server killed": 1}
_WEIGHTS = {
    "sqlite": _EVERYWHERE,
    "sqlite on a small disk": {**_EVERYWHERE, "disk full": 2},
    "postgresql": _SERVER,
    "postgresql on a small disk": {**_SERVER, "disk full": 2},
}


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that happens to a process, or to the store.

    Attributes:
        at_s: seconds after the start of the round.
        kind: such as ``kill``.
        slot: whose process; of no meaning where the store is hit.
        lasts_s: of a pause, or of a full disk.
        draw: a number in [0, 1) for what the plan cannot know, such as which backends there are.
    """

    at_s: float
    kind: str
    slot: str
    lasts_s: float
    draw: float


def faults(
    seed: int, number: int, site: str, slots: dict[str, str], seconds: float, mean_gap_s: float
) -> list[Fault]:
    """Return the faults of round ``number`` in their order.

    Args:
        site: a key of the table of weights above.
        slots: name -> role.
    """
    draw = random.Random(f"{seed}/{number}/faults")
    weights = _WEIGHTS[site]
    # Half of all pauses hit trainers: it is them whose lease runs out.
    favoured = [name for name, role in slots.items() if role == "trainer"]
    found: list[Fault] = []
    at_s = 0.0
    while (at_s := at_s + draw.uniform(0.2, 1.8) * mean_gap_s) < seconds:
        (kind,) = draw.choices(list(weights), list(weights.values()))
        pool = favoured if kind == "pause" and draw.random() < 0.5 else list(slots)
        lasts_s = draw.uniform(0.2, 2.5) * LEASE_TTL_S if kind == "pause" else draw.uniform(0.1, 1)
        found.append(Fault(at_s, kind, draw.choice(pool), lasts_s, draw.random()))
    return found


def lives(seed: int, number: int, site: str, slot: str, role: str) -> Iterator[Life]:
    """Yield the lives of one process, without end."""
    draw = random.Random(f"{seed}/{number}/{slot}")
    points = [p for p in CRASH_POINTS if p.endswith(_POINTS[role])] if _POINTS[role] else []
    while True:
        crash_at = None
        if points and draw.random() < 0.8:
            crash_at = f"{draw.choice(points)}:{draw.randint(1, 3)}"
        clock_s = draw.choice((-1, 1)) * draw.uniform(1, 9) * HOUR_S if draw.random() < 0.3 else 0.0
        jump = None
        if draw.random() < 0.2:
            jump = (draw.uniform(0, 2), draw.uniform(-9, 9) * HOUR_S)
        full = site.startswith("sqlite") and role != "reader" and draw.random() < 0.15
        yield Life(crash_at, clock_s, jump, draw.randint(0, 12) if full else None)
