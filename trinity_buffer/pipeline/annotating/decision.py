"""What a strategy said of some units, checked and made ready to be committed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import torch
from torch import Tensor

from trinity_buffer.algorithm.copies import original_uid
from trinity_buffer.codec import ANNOTATED, content_digest
from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.events import ExperiencesAnnotated, ExperiencesRejected
from trinity_buffer.experience import Experience
from trinity_buffer.identity import storable
from trinity_buffer.pipeline.annotating.grouping import Group
from trinity_buffer.pipeline.annotating.reward_table import RowVerdicts
from trinity_buffer.pipeline.annotation_encoding import encode_annotations, encode_scores
from trinity_buffer.pipeline.events import new_event, now_us
from trinity_buffer.rejections import invalid
from trinity_buffer.store import log
from trinity_buffer.store.log import NewEvent, Place
from trinity_buffer.store.rows import ExperienceRow
from trinity_buffer.store.segments import SegmentRow, SegmentStore, new_key
from trinity_buffer.store.transaction import Transaction
from trinity_buffer.writer import StagedWriter

_Kept = Mapping[str, Sequence[Experience]]
"""What a strategy wrote, by group."""

_COPYING = (
    "a copy is made by `trinity_buffer.algorithm.copies.copy_experience`, under a task of its own"
)


@dataclass(frozen=True, slots=True)
class Decision:
    """What is committed for some units: events, the segment that they refer to, and numbers."""

    events: list[NewEvent]
    segment_rows: list[SegmentRow]
    annotated: int
    rejected: int
    reasons: Counter[str]

    def append(
        self,
        tx: Transaction,
        store: SegmentStore,
        experiment: int,
        strategy: str,
        *,
        require: Callable[[Transaction], Place | None] | None = None,
    ) -> None:
        """Record it, as what ``strategy`` says, with what it has put into ``store``.

        Args:
            require: raises if another may decide; else tells where the log ends, if it has asked.
        """
        store.take_in(tx, self.segment_rows)
        last = None if require is None else require(tx)
        log.append(tx, experiment, self.events, actor=strategy, now_us=now_us(), last=last)


class _Annotated(NamedTuple):
    """Rows that are kept: address and number of the group of each, and tid of each group."""

    addresses: list[int]
    groups: list[int]
    tids: list[str]


def _tid(group: Group) -> str:
    return f"{group.key[0]}/{group.key[1]}"


@dataclass(slots=True)
class Verdicts:
    """Collects, over several units, what was given to a strategy and what came of it.

    Attributes:
        strategy: name of the annotation set.
        store: where what is annotated is put.
        reasons: address of an experience -> why it is rejected.
        planned: tid of a group -> whether it was planned.
        given: addresses that the strategy saw, and the action mask of each.
        metrics: what each of its calls returned.
    """

    strategy: str
    store: SegmentStore
    reasons: dict[int, str] = field(default_factory=dict)
    planned: dict[str, bool] = field(default_factory=dict)
    given: dict[int, Tensor | None] = field(default_factory=dict)
    metrics: list[dict[str, float]] = field(default_factory=list)

    def reject(self, addresses: Sequence[int], reason: str) -> None:
        """Leave experiences out without asking the strategy."""
        self.reasons.update(dict.fromkeys(addresses, reason))

    def concern(self, groups: Sequence[Group]) -> None:
        """Note that ``groups`` are decided now, whatever becomes of them."""
        self.planned.update({_tid(group): group.planned for group in groups})

    def taken_from(self, staged: StagedWriter) -> dict[str, list[Experience]]:
        """Empty ``staged`` and return what was kept, by group in order of first appearance.

        What was neither written nor rejected is rejected as ``filtered``.

        Raises:
            InvalidArgumentError: an experience that was not given, or both written and rejected.
        """
        written, staged.groups = staged.groups, []
        rejected, staged.rejections = staged.rejections, []
        self.reasons.update({self._address(e): reason for e, reason in rejected})
        kept: dict[str, list[Experience]] = {}
        for experience in (e for some in written for e in some):
            # The advantages are read again beside the mask that is stored.
            experience.action_mask = self.given[self._address(experience)]
            kept.setdefault(experience.eid.tid, []).append(experience)  # a copy has another tid
        addresses = {self._address(e) for group in kept.values() for e in group}
        for address in self.given.keys() - addresses - self.reasons.keys():
            self.reasons[address] = "filtered"
        contradictory = addresses & self.reasons.keys()
        if contradictory:
            raise InvalidArgumentError(
                f"strategy {self.strategy!r} both wrote and rejected {len(contradictory)} "
                "experiences of one unit"
            )
        return kept

    def require_fitting(self, kept: _Kept, rows: Mapping[int, ExperienceRow]) -> None:
        """Raise unless each experience is there once, as itself, with one number for each token.

        Raises:
            InvalidArgumentError: names the first that is not.
        """
        self._require_own_addresses(kept, rows)
        for experience in (e for group in kept.values() for e in group):
            row = rows[self._address(experience)]
            tokens = row.length - row.prompt_length
            for name in ANNOTATED:
                problem = _misfit(experience.__dict__.get(name), tokens)
                if problem is not None:
                    raise InvalidArgumentError(
                        f"strategy {self.strategy!r} gave {experience.eid.uid} {name} {problem}: "
                        f"its response has {tokens} tokens, so give [{tokens}]"
                    )

    def _require_own_addresses(self, kept: _Kept, rows: Mapping[int, ExperienceRow]) -> None:
        """Raise unless each experience has its own address, and each copy one that is nobody's.

        Raises:
            InvalidArgumentError: names the first that has not.
        """
        there = set[str]()
        for experience in (e for group in kept.values() for e in group):
            own, uid = rows[self._address(experience)].eid, experience.eid.uid
            is_copy = original_uid(experience) == own.uid
            in_other = experience.eid.tid != own.tid and experience.eid.tid in self.planned
            if uid != own.uid and (in_other or not is_copy):
                raise InvalidArgumentError(
                    f"strategy {self.strategy!r} wrote {own.uid} as {uid}: what it keeps stays "
                    f"under its own address, and {_COPYING}"
                )
            if uid in there:
                raise InvalidArgumentError(
                    f"strategy {self.strategy!r} wrote {uid} twice: {_COPYING}"
                )
            there.add(uid)

    def _leave_out_broken(self, kept: _Kept) -> _Kept:
        """Return what is finite; reject the others as ``invalid``, with all copies of theirs."""
        if _all_finite([experience for group in kept.values() for experience in group]):
            return kept
        broken = {
            self._address(experience): invalid(*fields)
            for group in kept.values()
            for experience in group
            if (fields := _broken_fields(experience))
        }
        self.reasons.update(broken)
        left = {
            tid: [experience for experience in group if self._address(experience) not in broken]
            for tid, group in kept.items()
        }
        return {tid: group for tid, group in left.items() if group}

    def _address(self, experience: Experience) -> int:
        address = experience.address
        if address is None or address not in self.given:
            raise InvalidArgumentError(
                f"strategy {self.strategy!r} wrote {experience.eid.uid}, which it was not given; a "
                f"strategy may keep, copy or leave out experiences, not make them, and {_COPYING}"
            )
        return address

    def decision(self, kept: _Kept, *, seen: int, calls: int, after: int | None = None) -> Decision:
        """Return what to commit. Encodes: call it off the event loop.

        Args:
            kept: from `taken_from`.
            seen: position up to which the log was read.
            calls: how often the strategy was called so far.
            after: where the cursor must be for the commit to hold. For groups without rows: others
                are decided once because each row can be taken once.
        """
        kept = self._leave_out_broken(kept)
        experiences = [experience for group in kept.values() for experience in group]
        annotated = _Annotated(
            [cast("int", one.address) for one in experiences],
            [number for number, group in enumerate(kept.values()) for _ in group],
            list(kept),
        )
        blob = encode_annotations(experiences) if experiences else b""
        self.metrics = list(map(_finite, self.metrics))
        return self._decision(annotated, blob, seen=seen, calls=calls, after=after)

    def decision_by_rewards(
        self, groups: Sequence[Group], found: RowVerdicts, *, seen: int, calls: int
    ) -> Decision:
        """Return what to commit of groups that were decided by their rewards. Encodes.

        Args:
            groups: in the order of their numbers in ``found``.
            found: what becomes of their rows.
            seen, calls: as in `decision`.
        """
        self.reasons |= found.reasons
        self.metrics = found.metrics
        numbers = {number: place for place, number in enumerate(dict.fromkeys(found.groups))}
        annotated = _Annotated(
            found.addresses,
            [numbers[number] for number in found.groups],
            [_tid(groups[number]) for number in numbers],
        )
        blob = encode_scores(found.scores, len(found.addresses)) if found.addresses else b""
        return self._decision(annotated, blob, seen=seen, calls=calls, after=None)

    def _decision(
        self, kept: _Annotated, blob: bytes, *, seen: int, calls: int, after: int | None
    ) -> Decision:
        events: list[NewEvent] = []
        rows: list[SegmentRow] = []
        if kept.addresses:
            key = new_key()
            rows = self.store.put(key, {"annotation": blob})
            annotated = ExperiencesAnnotated(
                consumer=self.strategy,
                seen=seen,
                calls=calls,
                after=after,
                segment=key,
                families={"annotation": len(blob)},
                digest=content_digest([blob]),
                experiences=kept.addresses,
                groups=kept.groups,
                planned=[self.planned.get(tid, False) for tid in kept.tids],
                metrics=self.metrics,
            )
            events.append(new_event(annotated))
        there = set(kept.tids)
        left_out = sum(planned and tid not in there for tid, planned in self.planned.items())
        if self.reasons or left_out:
            addresses = sorted(self.reasons)
            self.reasons = {address: self._said(self.reasons[address]) for address in addresses}
            rejected = ExperiencesRejected(
                consumer=self.strategy,
                seen=seen,
                calls=calls,
                after=None if events else after,
                by="strategy",
                experiences=addresses,
                reasons=[self.reasons[address] for address in addresses],
                planned_groups=left_out,
            )
            events.append(new_event(rejected))
        reasons = Counter(self.reasons.values())
        return Decision(events, rows, len(kept.addresses), len(self.reasons), reasons)

    def _said(self, reason: object) -> str:
        """Return a reason as it is recorded."""
        if not isinstance(reason, str):
            raise InvalidArgumentError(
                f"strategy {self.strategy!r} rejects with the reason {reason!r:.60}: it must be a "
                "text"
            )
        return storable(reason)


def _misfit(value: object, tokens: int) -> str | None:
    """Return what a value is that is not a plain tensor of one number for each token."""
    if value is None:
        return None
    if not isinstance(value, Tensor):
        return f"of type {type(value).__name__}, which is no tensor"
    if value.is_complex() or value.layout != torch.strided:
        return f"of dtype {value.dtype} and layout {value.layout}"
    return None if tuple(value.shape) == (tokens,) else f"of shape {list(value.shape)}"


def _all_finite(experiences: Sequence[Experience]) -> bool:
    """Return whether all that a strategy computed is finite in float32, as micro-batches are."""
    tensors = [
        value
        for experience in experiences
        for name in ANNOTATED
        if (value := experience.__dict__.get(name)) is not None
    ]
    return not tensors or bool(
        torch.cat([t.detach().float().flatten() for t in tensors]).isfinite().all()
    )


def _broken_fields(experience: Experience) -> list[str]:
    """Return what a strategy computed for an experience and is not finite."""
    found = [(name, experience.__dict__.get(name)) for name in ANNOTATED]
    return [
        name for name, value in found if value is not None and not value.float().isfinite().all()
    ]


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if math.isfinite(value)}
