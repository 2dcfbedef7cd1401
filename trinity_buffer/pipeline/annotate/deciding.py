"""What becomes of groups: a table of their rewards, or experiences, and the decision to commit.

A strategy may be the user's own code, so that every answer is checked and every error notes which
strategy raised it, and where. It is given by name or class, and all processes that annotate one set
must give it the same configuration.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trinity_buffer import events
from trinity_buffer.algorithm import ADD_STRATEGY
from trinity_buffer.algorithm.add_strategy import AddStrategy, AdvantageAddStrategy
from trinity_buffer.algorithm.advantage_fn import PipelineAdvantage
from trinity_buffer.algorithm.copies import original_uid
from trinity_buffer.algorithm.group_scores import Over, RewardScorer
from trinity_buffer.codec.objects import new_event
from trinity_buffer.codec.segments import ANNOTATED, Column, content_digest, encode_segment
from trinity_buffer.errors import InvalidArgumentError, UnknownNameError
from trinity_buffer.experience import Experience
from trinity_buffer.identity import storable
from trinity_buffer.options import GroupingRules, renamed
from trinity_buffer.pipeline.annotate.grouping import Group
from trinity_buffer.pipeline.encoding import encode_annotations
from trinity_buffer.pipeline.handle import as_json
from trinity_buffer.store.rows import MAX_ROWS_PER_EVENT, SLOT_BITS, ExperienceRow
from trinity_buffer.store.segments import SegmentRow, SegmentStore, new_key
from trinity_buffer.writer import StagedWriter, invalid

Integers = NDArray[np.int64]
Numbers = NDArray[np.float64]

_NO_REWARD, _NOT_FINITE = invalid("reward"), invalid("advantages", "returns")
_COPYING = (
    "a copy is made by `trinity_buffer.algorithm.copies.copy_experience`, under a task of its own"
)


def table_of(
    groups: Sequence[Group],
    recorded: Mapping[int, events.ExperiencesRecorded],
    assigned: Mapping[int, float] | None = None,
) -> dict[str, NDArray[Any]]:
    """Return columns of the members of ``groups``, ordered by group, run and step.

    Beside what is recorded of each row, they are its ``address`` and the number of its ``group``.
    A missing reward is NaN.

    Args:
        groups: each with members.
        recorded: position -> what was recorded there, for all members.
        assigned: address -> reward, in place of the recorded ones.
    """
    addresses = np.fromiter(chain.from_iterable(g.members for g in groups), np.int64)
    group = np.repeat(np.arange(len(groups)), [len(group.members) for group in groups])
    positions = np.array(sorted(recorded), np.int64)
    columns = [recorded[position].columns for position in positions.tolist()]
    starts = np.cumsum([0, *(len(each.run) for each in columns)])
    event = np.searchsorted(positions, addresses >> SLOT_BITS)
    rows = starts[event] + (addresses & (MAX_ROWS_PER_EVENT - 1))
    integers = ("step", "run", "response_length", "trained_tokens")
    dtypes: dict[str, Any] = dict.fromkeys(integers, np.int64)
    dtypes |= {"suffix": np.str_, "task": object, "batch": object, "reward": np.float64}
    table: dict[str, NDArray[Any]] = {
        name: np.array([value for each in columns for value in getattr(each, name)], dtype)[rows]
        for name, dtype in dtypes.items()
    }
    # Batch and task of one group read alike as text; 7 and "7" still sort apart, as in `sort_key`.
    texts = [[isinstance(key, str) for key in table[name]] for name in ("task", "batch")]
    by = [table[name] for name in ("suffix", "step", "run")]
    order = np.lexsort([*by, *map(np.array, texts), group])
    table = {name: column[order] for name, column in table.items()}
    table |= {"address": addresses[order], "group": group[order]}
    if assigned is not None:
        rewards = [assigned.get(address, np.nan) for address in table["address"].tolist()]
        table["reward"] = np.array(rewards, np.float64)
    return table


@dataclass(slots=True)
class Decision:
    """The verdicts of a strategy on some groups, and the events that record them.

    Attributes:
        strategy: name of the annotation set.
        seen: position up to which the log was read.
        after: where the cursor must stand for the commit to succeed, None: anywhere. Only groups
            without rows need it: a row can be decided only once, which protects the others.
        planned: tid of each group that it covers -> whether it was planned.
        reasons: address of an experience -> why it is rejected.
        metrics: what each call of the strategy returned.
        experiences, groups: address and group number of each annotated row.
        without_advantages: how many of these have none.
        tids: of the groups that have annotated rows.
        changed: fields that the strategy changed and that are not stored.
        blob: what was computed for them.
    """

    strategy: str
    seen: int
    after: int | None = None
    planned: dict[str, bool] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    metrics: list[dict[str, float]] = field(default_factory=list)
    experiences: list[int] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    without_advantages: int = 0
    tids: list[str] = field(default_factory=list)
    changed: set[str] = field(default_factory=set)
    blob: bytes = b""

    def reject(self, addresses: Iterable[int], reason: str) -> None:
        """Reject experiences without asking the strategy."""
        self.reasons.update(dict.fromkeys(addresses, reason))

    def score(
        self,
        groups: Sequence[Group],
        table: Mapping[str, NDArray[Any]],
        score: RewardScorer,
        over: Over = "rows",
    ) -> None:
        """Decide ``groups`` by the rewards in their `table_of`, those of one size at a time.

        Rows without a finite reward are rejected as ``invalid`` before scoring, rows without a
        finite score after it. Over runs, a row without a reward takes that of the last row of its
        run.
        """
        rewards, runs = table["reward"], None
        keys = list(zip(table["group"].tolist(), table["run"].tolist(), strict=True))
        if over == "runs" and len(set(keys)) < len(keys):
            last = dict(zip(keys, rewards.tolist(), strict=True))  # the last of a run's rows
            rewards = np.where(np.isnan(rewards), [last[key] for key in keys], rewards)
            runs = table["run"]
        usable = np.isfinite(rewards)
        self.reject(table["address"][~usable].tolist(), _NO_REWARD)
        addresses, group = table["address"][usable], table["group"][usable]
        sizes = np.bincount(group, minlength=len(groups))
        scored = score(rewards[usable], sizes, None if runs is None else runs[usable])
        is_kept, reasons = scored.verdicts(len(addresses))
        self.reasons |= zip(addresses[~is_kept].tolist(), reasons[~is_kept].tolist(), strict=True)
        weights = None
        if scored.scores is not None:
            with np.errstate(over="ignore"):
                weights = scored.scores.astype(np.float32)
            # Factors of masks: of one that selects nothing, a signed zero, as tensors would give.
            nothing = (table["trained_tokens"][usable] == 0) & np.isfinite(weights)
            weights[nothing] = np.copysign(np.float32(0), weights[nothing])
            weights[table["response_length"][usable] == 0] = 0.0
            broken = is_kept & ~np.isfinite(weights)
            self.reject(addresses[broken].tolist(), _NOT_FINITE)
            is_kept = is_kept & ~broken
            weights = weights[is_kept]
        values = (numbers.tolist() for numbers in scored.metrics.values())
        self.metrics += [
            {n: v for n, v in zip(scored.metrics, of_group, strict=True) if math.isfinite(v)}
            for _, *of_group in zip(groups, *values, strict=True)
        ]
        self.experiences = addresses[is_kept].tolist()
        self.without_advantages = len(self.experiences) if weights is None else 0
        of_rows = group[is_kept].tolist()
        # Groups without kept rows get no number: numbers in an event are dense.
        numbers = {number: place for place, number in enumerate(dict.fromkeys(of_rows))}
        self.groups = [numbers[number] for number in of_rows]
        self.tids = ["/".join(groups[number].key) for number in numbers]
        if self.experiences:  # the same bytes as `encode_annotations` makes for boolean masks
            columns, rows = list[Column](), len(self.experiences)
            if weights is not None:
                shapes, data = np.zeros((rows, 0), np.int64), weights.view(np.uint8)
                columns = [Column("advantages", "float32", shapes, data, None, "scaled_mask")]
            aliases = {"returns": "advantages"} if columns else {}
            self.blob = encode_segment(columns, {}, rows, aliases=aliases)

    def take(
        self,
        staged: StagedWriter,
        shown: Mapping[int, Mapping[str, Any]],
        rows: Mapping[int, ExperienceRow],
    ) -> None:
        """Empty ``staged``, and decide what the strategy wrote to it. Encodes.

        Experiences that were neither written nor rejected are rejected as ``filtered``, those whose
        computed values are not finite, and their copies, as ``invalid``.

        Args:
            staged: the writer of the strategy.
            shown: address of each experience that it saw -> what `fields_of` said before.
            rows: the rows at these addresses.

        Raises:
            InvalidArgumentError: an experience that was not given, or both written and rejected;
                values that do not fit.
        """
        written = [*chain.from_iterable(staged.groups)]
        rejected, staged.rejections, staged.groups = staged.rejections, [], []
        for experience in [*written, *(experience for experience, _ in rejected)]:
            if experience.address not in shown:
                raise InvalidArgumentError(
                    f"strategy {self.strategy!r} wrote {experience.eid.uid}, which it was not "
                    "given; a strategy may keep, copy or leave out experiences, not make them, and "
                    f"{_COPYING}"
                )
        self.reasons |= {e.address or 0: reason for e, reason in rejected}
        addresses = {e.address or 0 for e in written}
        # Either answer alone could be meant, so guessing would hide a bug of the strategy.
        if contradictory := addresses & self.reasons.keys():
            raise InvalidArgumentError(
                f"strategy {self.strategy!r} both wrote and rejected {len(contradictory)} "
                "experiences of one unit"
            )
        self.reject(shown.keys() - addresses - self.reasons.keys(), "filtered")
        self.require_fitting(written, rows)
        self.reasons |= _broken(written)
        groups: dict[str, list[Experience]] = {}
        for experience in written:
            if experience.address not in self.reasons:
                before = shown[experience.address or 0]
                self.changed |= _changed(before, experience)
                # Advantages are decoded beside the stored mask, so they are encoded by it as well.
                experience.action_mask = before["action_mask"]
                groups.setdefault(experience.eid.tid, []).append(experience)  # a copy's is another
        annotated = [experience for group in groups.values() for experience in group]
        self.experiences = [experience.address or 0 for experience in annotated]
        self.without_advantages = sum(e.__dict__.get("advantages") is None for e in annotated)
        self.groups = [number for number, group in enumerate(groups.values()) for _ in group]
        self.tids = list(groups)
        self.blob = encode_annotations(annotated) if annotated else b""

    def require_fitting(self, written: list[Experience], rows: Mapping[int, ExperienceRow]) -> None:
        """Raise unless each experience occurs once, unchanged, with one number per token.

        Raises:
            InvalidArgumentError: names the first experience that does not.
        """
        whose, there = f"strategy {self.strategy!r}", set[str]()
        for experience in written:
            row, uid = rows[experience.address or 0], experience.eid.uid
            own = row.eid
            # A copy may go into a group of its own, never into one of other recorded rows.
            is_copy = original_uid(experience) == own.uid
            in_other = experience.eid.tid != own.tid and experience.eid.tid in self.planned
            if uid != own.uid and (in_other or not is_copy):
                raise InvalidArgumentError(
                    f"{whose} wrote {own.uid} as {uid}: what it keeps stays under its own address, "
                    f"and {_COPYING}"
                )
            if uid in there:
                raise InvalidArgumentError(f"{whose} wrote {uid} twice: {_COPYING}")
            there.add(uid)
            tokens = row.length - row.prompt_length
            for name in ANNOTATED:
                if (value := experience.__dict__.get(name)) is None:
                    continue
                if not isinstance(value, Tensor):
                    problem = f"of type {type(value).__name__}, which is not a tensor"
                elif value.is_complex() or value.layout != torch.strided:
                    problem = f"of dtype {value.dtype} and layout {value.layout}"
                elif tuple(value.shape) != (tokens,):
                    problem = f"of shape {list(value.shape)}"
                else:
                    continue
                raise InvalidArgumentError(
                    f"{whose} gave {uid} {name} {problem}: its response has {tokens} tokens, so "
                    f"give [{tokens}]"
                )

    def encode(
        self, store: SegmentStore, *, calls: int
    ) -> tuple[list[events.NewEvent], list[SegmentRow]]:
        """Return the events of the decision, and the rows of its segment in ``store``.

        Args:
            store: where annotations are put.
            calls: how often the strategy was called so far.
        """
        made, segment_rows = list[events.NewEvent](), list[SegmentRow]()
        known: dict[str, Any] = {"consumer": self.strategy, "seen": self.seen, "calls": calls}
        if self.experiences:
            key = new_key()
            segment_rows = store.put(key, {"annotation": [self.blob]})
            annotated = events.ExperiencesAnnotated(
                **known,
                after=self.after,
                segment=key,
                families={"annotation": len(self.blob)},
                digest=content_digest([self.blob]),
                experiences=self.experiences,
                groups=self.groups,
                planned=[self.planned.get(tid, False) for tid in self.tids],
                metrics=self.metrics,
            )
            made.append(new_event(annotated))
        # Bounds of explorers count planned groups, so those that will not come are recorded.
        left_out = sum(self.planned[tid] for tid in self.planned.keys() - set(self.tids))
        for address, reason in self.reasons.items():
            if not isinstance(reason, str):
                raise InvalidArgumentError(
                    f"strategy {self.strategy!r} rejects with the reason {reason!r:.60}: it must "
                    "be a text"
                )
            self.reasons[address] = storable(reason)
        if self.reasons or left_out:
            addresses = sorted(self.reasons)
            rejected = events.ExperiencesRejected(
                **known,
                # One event of the commit is enough to check the cursor.
                after=None if made else self.after,
                by="strategy",
                experiences=addresses,
                reasons=[self.reasons[address] for address in addresses],
                planned_groups=left_out,
            )
            made.append(new_event(rejected))
        return made, segment_rows


def fields_of(experience: Experience, over: Over) -> dict[str, Any]:
    """Return copies of the fields that a strategy changes without effect.

    What it sets is stored of the fields in `ANNOTATED` alone. Over runs, a row without a reward
    takes that of its run.
    """
    read = experience.__dict__.get
    fields = {name: read(name) for name in ("action_mask", "logprobs", "tokens", "reward")}
    if over == "runs" and fields["reward"] is None:
        del fields["reward"]
    # Torch counts the edits of a tensor, but none of those that are made through numpy().
    return {n: value.clone() if isinstance(value, Tensor) else value for n, value in fields.items()}


def _changed(before: Mapping[str, Any], experience: Experience) -> set[str]:
    """Return which of `fields_of` are no longer what they were."""
    changed = set[str]()
    for name, value in before.items():
        after = experience.__dict__.get(name)
        same = after is value or (name == "reward" and after == value)
        if isinstance(after, Tensor) and isinstance(value, Tensor):
            same = after.shape == value.shape and bool((after.cpu() == value).all())
        if not same:
            changed.add(name)
    return changed


def _broken(written: Sequence[Experience]) -> dict[int, str]:
    """Return address -> reason, of experiences whose values are not finite in float32.

    That is the dtype of micro-batches.
    """
    values = [(e, name, e.__dict__.get(name)) for e in written for name in ANNOTATED]
    computed = [(e, name, value.detach().float()) for e, name, value in values if value is not None]
    # One reduction for all tensors; only a failure is examined tensor by tensor.
    if not computed or bool(torch.cat([value for *_, value in computed]).isfinite().all()):
        return {}
    fields: dict[int, list[str]] = {}  # by experience: a copy has the address of its original
    for experience, name, value in computed:
        if not value.isfinite().all():
            fields.setdefault(id(experience), []).append(name)
    return {e.address or 0: invalid(*fields[id(e)]) for e in written if id(e) in fields}


@contextmanager
def blame_strategy(strategy: str, uid: Callable[[], str]) -> Iterator[None]:
    """Add to errors raised inside which strategy raised them, and its first experience."""
    try:
        yield
    except Exception as error:
        error.add_note(
            f"in strategy {strategy!r}, which was given {uid()} first; nothing of it is committed"
        )
        raise


def metrics_of(answer: object) -> dict[str, float]:
    """Return the finite metrics of what ``add`` returned.

    Raises:
        TypeError: the answer is not a number and a mapping of numbers.
    """
    if not (isinstance(answer, Sequence) and len(answer) == 2 and isinstance(answer[1], Mapping)):
        raise TypeError(
            f"`add` returned {_short(answer)}: it must return how many experiences it wrote and a "
            "mapping of metrics, as in `return len(kept), {}`"
        )
    metrics: dict[str, float] = {}
    for name, value in answer[1].items():
        try:
            metrics[name] = float(value)
        except (TypeError, ValueError):
            raise TypeError(
                f"`add` returned {_short(value)} as metric {name!r}: it must be a number"
            ) from None
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def _short(value: Any) -> str:
    """Return the type of ``value`` and the beginning of its repr."""
    return f"{type(value).__name__} {value!r:.60}" if value is not None else "None"


StrategyClass = type[AddStrategy] | type[PipelineAdvantage]
"""A strategy, or advantages of lists of experiences, which are one."""

StrategyLike = str | StrategyClass | Sequence[str | StrategyClass]

Classes = Sequence[tuple[str, type[AddStrategy]]]
"""The strategies of a set, by name."""


def classes_of(strategies: StrategyLike) -> Classes:
    """Return the name and class of one strategy, or of several.

    A strategy has its registered name, or that of its class.

    Raises:
        UnknownNameError: neither a name nor a strategy.
    """
    if isinstance(strategies, (str, type)) or not isinstance(strategies, Iterable):
        strategies = [strategies]
    classes: list[tuple[str, type[AddStrategy]]] = []
    for strategy in strategies:
        kind: object = ADD_STRATEGY.get(strategy) if isinstance(strategy, str) else strategy
        if not (isinstance(kind, type) and issubclass(kind, (AddStrategy, PipelineAdvantage))):
            hint = " (give its class)" if isinstance(kind, (AddStrategy, PipelineAdvantage)) else ""
            known = ", ".join(ADD_STRATEGY.names())
            raise UnknownNameError(f"{strategy!r} is not an AddStrategy{hint}; known are {known}")
        name = strategy if isinstance(strategy, str) else ADD_STRATEGY.name_of(kind)
        if issubclass(kind, PipelineAdvantage):
            members = {"advantage_fn": kind, "__module__": kind.__module__}
            kind = type(kind.__name__, (AdvantageAddStrategy,), members)
        classes.append((name, kind))
    return classes


Settings = Mapping[str, Any]


def _by_name(args: Settings, classes: Classes) -> Settings:
    """Return the arguments of each strategy of a set; those of an only one have no name around."""
    return args if len(classes) > 1 else {name: args for name, _ in classes}


def with_over(args: Settings, classes: Classes, recorded: Settings | None) -> dict[str, Any]:
    """Return the arguments of a set with ``over``, the unit of its statistics, filled in.

    By default each run counts once. A set made before ``over`` existed counts rows, so that its
    arithmetic stays the same.

    Args:
        args: the arguments from the caller.
        classes: of the set.
        recorded: the configuration of the set, if it exists.
    """
    before = None
    # A set of other strategies is refused, whatever it counts.
    if recorded is not None and len(recorded["strategy"]) == len(classes):
        before = _by_name(recorded["args"], classes)
    filled = dict(_by_name(args, classes))
    for name, cls in classes:
        filled[name] = dict(filled.get(name, {}))
        if cls.takes_over():
            rows = before is not None and "over" not in before.get(name, {})
            filled[name].setdefault("over", "rows" if rows else "runs")
    if len(classes) == 1:
        return dict(filled[classes[0][0]])
    # Unknown names stay: `compose` refuses them.
    return {name: of_one for name, of_one in filled.items() if of_one}


def config_diff(classes: Classes, recorded: Settings, wanted: Settings) -> tuple[str, str] | None:
    """Return the settings that only the first and only the second configuration has, as text.

    None if they are equal, with the defaults of ``classes`` filled in.
    """
    # ``module:Class`` means ``module.Class``.
    before, after = (
        {"strategy": "+".join(config["strategy"]).replace(":", ".")}
        for config in (recorded, wanted)
    )
    if before == after:
        before, after = (_flat(classes, config) for config in (recorded, wanted))
    if before == after:
        return None
    first, second = (
        ", ".join(f"{k}={v!r}" for k, v in mine.items() if k not in other or other[k] != v)
        for mine, other in ((before, after), (after, before))
    )
    return first or "none of it", second or "none of it"


def _flat(classes: Classes, config: Settings) -> dict[str, Any]:
    """Return a configuration with all defaults, and one key per value."""
    flat = {k: v for k, v in config.items() if k not in ("strategy", "args", "grouping")}
    # An old set lacks newer rules, and has those of its time by their older names.
    flat |= asdict(GroupingRules()) | renamed(config.get("grouping", {}), warn=False)
    for name, cls in classes:
        prefix = f"{name}." if len(classes) > 1 else ""
        args = _defaults(cls)
        if cls.takes_over():  # what sets from before ``over`` do
            args["over"] = "rows"
        args |= _by_name(config["args"], classes).get(name, {})
        flat |= {f"{prefix}{key}": value for key, value in args.items()}
    return flat


def _defaults(cls: type[AddStrategy]) -> dict[str, Any]:
    """Return those default arguments of a class that JSON can say."""
    defaults = {}
    for key, value in cls.default_args().items():
        with suppress(InvalidArgumentError):  # no JSON value equals it
            defaults[key] = as_json(key, value)
    return defaults


def effective(args: Settings, classes: Classes) -> dict[str, Any]:
    """Return arguments of a set with the defaults of the user's classes, which may change."""
    filled = dict(_by_name(args, classes))
    for name, cls in classes:
        if not cls.__module__.startswith("trinity_buffer."):
            filled[name] = _defaults(cls) | filled.get(name, {})
    return dict(filled[classes[0][0]]) if len(classes) == 1 else filled
