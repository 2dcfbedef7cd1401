"""The kinds of faults. A new one is a line in `KINDS`, and a `note` where it takes effect.

The line says how it comes about: `Inflicted` from outside (its function is in `inflict`), `Brought`
along by a process (its values go into `Life`, which `live` obeys), or, a plain `Kind`, done by a
role or by the proof on its own. Whoever sees it happen calls ``effects.note(folder, name)``. The
rest follows: each round goes through all kinds of its site, fails if one of them was not noted, and
leaves out what ``--without`` names.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.crash.points import CRASH_POINTS
from tests.torture import inflict

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A fault that a role does to itself, or the proof to a copy of the store.

    Attributes:
        name: what is noted when it takes effect.
        where: a part of the kind of the sites that know it.
        at_the_end: the proof does it.
    """

    name: str
    where: str = ""
    at_the_end: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Inflicted(Kind):
    """A fault from outside, at times of the plan.

    Attributes:
        weight: how often, relative to the others; 0: once, at the beginning.
        do: inflicts it; returns before it has taken effect, or behind that.
    """

    weight: int
    do: Callable[[inflict.Scene, inflict.Fault], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Brought(Kind):
    """A fault that a process brings along when it is born.

    Attributes:
        chance: how many of the lives do.
        first: the slot that brings it along, life by life, until it has taken effect once. Of g0
            and g1 one stands by, and writes nothing.
        life: draws what is special about the life of a role: arguments of `Life`.
    """

    chance: float
    first: str
    life: Callable[[random.Random, str], Mapping[str, Any]]


_POINTS = {
    "explorer": ("plan", "append"),
    "strategy": ("annotate",),
    "trainer": ("lease", "step", "checkpoint", "commit"),
}


def _crash(draw: random.Random, role: str) -> Mapping[str, Any]:
    if role not in _POINTS:
        return {}
    points = [point for point in CRASH_POINTS if point.endswith(_POINTS[role])]
    return {"crash_at": f"{draw.choice(points)}:{draw.randint(1, 3)}"}


def _wrong_clock(draw: random.Random, role: str) -> Mapping[str, Any]:
    return {"clock_s": draw.choice((-1, 1)) * draw.uniform(1, 9) * HOUR_S}


def _clock_jump(draw: random.Random, role: str) -> Mapping[str, Any]:
    return {"clock_jump": (draw.uniform(0, 2), draw.uniform(-9, 9) * HOUR_S)}


def _more_ranks(draw: random.Random, role: str) -> Mapping[str, Any]:
    return {"ranks": draw.randint(2, 3)} if role == "trainer" else {}


def _few_pages(draw: random.Random, role: str) -> Mapping[str, Any]:
    return {} if role == "reader" else {"pages": draw.randint(0, 12)}


KINDS: tuple[Kind, ...] = (
    Inflicted(name="kill", weight=8, do=inflict.kill),
    Inflicted(name="explorer killed for good", weight=0, do=inflict.kill_for_good),
    Inflicted(name="pause", weight=3, do=inflict.pause),
    Inflicted(name="lease taken over", weight=1, do=inflict.let_take_over),
    Inflicted(name="disk full", where="small disk", weight=2, do=inflict.fill_disk),
    Inflicted(name="backend terminated", where="postgresql", weight=2, do=inflict.hit_server),
    Inflicted(name="backend killed", where="postgresql", weight=1, do=inflict.hit_server),
    Inflicted(name="server killed", where="postgresql", weight=1, do=inflict.hit_server),
    Inflicted(name="server restarted", where="postgresql", weight=1, do=inflict.hit_server),
    Brought(name="kill at a crash point", chance=0.8, first="e0", life=_crash),
    Brought(name="clock wrong", chance=0.3, first="g0", life=_wrong_clock),
    Brought(name="clock jumped", chance=0.2, first="o0", life=_clock_jump),
    Brought(name="world size changed", chance=0.2, first="s0", life=_more_ranks),
    Brought(name="database full", where="sqlite", chance=0.15, first="e1", life=_few_pages),
    Kind(name="write sent again"),
    Kind(name="write sent twice at once"),
    Kind(name="changed write sent"),
    Kind(name="poison row"),
    Kind(name="bit flipped", at_the_end=True),
    Kind(name="file replaced", where="sqlite", at_the_end=True),
)
