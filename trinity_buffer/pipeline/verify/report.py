"""What `verify` says: problems, each with its place, and the counts that must add up."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from typing_extensions import override

from trinity_buffer.store.counts import PlanCounts, StrategyCounts, TrainerCounts


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is wrong.

    Attributes:
        check: which check found it: ``chain``, ``log``, ``fold``, ``projections``,
            ``conservation``, ``manifests``, ``commits``, ``segments``, ``digests``, ``archives`` or
            ``database``.
        where: the position, row, segment or manifest.
        what: what is wrong with it.
    """

    check: str
    where: str
    what: str

    @override
    def __str__(self) -> str:
        return f"{self.check}: {self.where}: {self.what}"


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What `verify` found.

    Attributes:
        experiment, store: what was looked at; ``version`` is of the database's library or server.
        quick: no segment was opened, and rows of projections were counted, not compared.
        events, experiences, manifests, segments: how many were looked at.
        head: of the last event, as hex; kept elsewhere, it proves all of this log.
        acknowledged: distinct uids in the acknowledgement files; None: none were given.
        contents: how many of them came with a content digest, and were compared by it.
        chain: manifests in the checkpoint's chain; None: no checkpoint was given.
        lost: how many acknowledged experiences and manifests of the chain the log does not hold,
            and committed manifests the weights did not go through; `lost_items` names each.
        duplicated: how many experiences were recorded by two events, and manifests trained or
            committed twice, or sharing rows with an earlier one of the chain; `duplicated_items`
            names each. Both count experiences and manifests, never the rows of a manifest.
        problems: everything else that is wrong.
        strategies, trainers, plans: what became of everything.
    """

    experiment: str
    store: str
    version: str
    quick: bool
    events: int
    experiences: int
    manifests: int
    segments: int
    head: str
    acknowledged: int | None
    contents: int
    chain: int | None
    lost_items: tuple[str, ...]
    duplicated_items: tuple[str, ...]
    problems: tuple[Problem, ...]
    strategies: tuple[StrategyCounts, ...]
    trainers: tuple[TrainerCounts, ...]
    plans: PlanCounts
    seconds: float

    @property
    def lost(self) -> int:
        """How many experiences and manifests were lost."""
        return len(self.lost_items)

    @property
    def duplicated(self) -> int:
        """How many experiences and manifests there are twice."""
        return len(self.duplicated_items)

    @property
    def measured(self) -> bool:
        """Whether there was evidence from outside: without it, a loss cannot be seen."""
        return self.acknowledged is not None and self.chain is not None

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not (self.lost_items or self.duplicated_items or self.problems)

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as JSON values."""
        fields = asdict(self)
        fields["plans"]["missing"] = self.plans.missing
        measured = {"ok": self.ok, "measured": self.measured}
        return {**measured, "lost": self.lost, "duplicated": self.duplicated, **fields}
