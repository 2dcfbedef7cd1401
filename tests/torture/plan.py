"""What goes wrong in one round, and when: all of it follows from the seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tests.torture.inflict import Fault
from tests.torture.kinds import KINDS, Brought, Inflicted, Kind
from tests.torture.roles import Life

MEAN_GAP_S = 0.2
"""From one fault to the next."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The faults of round ``number``.

    Attributes:
        site: what kind of site its store is at.
        without: kinds that do not come, and are missed all the same.
    """

    seed: int
    number: int
    site: str
    without: frozenset[str] = frozenset()

    def kinds(self) -> list[Kind]:
        """Return the kinds that must take effect."""
        return [kind for kind in KINDS if kind.where in self.site]

    def comes(self) -> list[Kind]:
        """Return those that do come."""
        return [kind for kind in self.kinds() if kind.name not in self.without]

    def inflicted(self) -> list[Inflicted]:
        """Return those that come from outside."""
        return [kind for kind in self.comes() if isinstance(kind, Inflicted)]

    def brought(self) -> list[Brought]:
        """Return those that processes bring along."""
        return [kind for kind in self.comes() if isinstance(kind, Brought)]

    def first_faults(self, slots: Mapping[str, str]) -> list[Fault]:
        """Return one fault of each kind that comes from outside."""
        draw = self._draw("first faults")
        return [
            Fault(0.0, kind.name, draw.choice(list(slots)), draw.random())
            for kind in self.inflicted()
        ]

    def first_lives(self, slots: Mapping[str, str]) -> list[tuple[Brought, Life]]:
        """Return one life with each kind that processes bring along."""
        draw = self._draw("first lives")
        return [(k, Life(**k.life(draw, slots[k.first]))) for k in self.brought()]

    def faults(self, slots: Mapping[str, str], seconds: float) -> list[Fault]:
        """Return the faults of ``seconds`` in their order; ``slots`` are name -> role."""
        draw = self._draw("faults")
        weights = {kind.name: kind.weight for kind in self.inflicted()}
        found: list[Fault] = []
        at_s = 0.0
        while weights and (at_s := at_s + draw.uniform(0.2, 1.8) * MEAN_GAP_S) < seconds:
            (kind,) = draw.choices(list(weights), list(weights.values()))
            found.append(Fault(at_s, kind, draw.choice(list(slots)), draw.random()))
        return found

    def lives(self, slot: str, role: str) -> Iterator[Life]:
        """Yield the lives of one process, without end."""
        draw = self._draw(slot)
        while True:
            life = Life()
            for kind in self.brought():
                if draw.random() < kind.chance:
                    life = life.with_fault(kind.life(draw, role))
            yield life

    def _draw(self, of: str) -> random.Random:
        return random.Random(f"{self.seed}/{self.number}/{of}")
