"""A rollout token by token: ids, their texts where a tokenizer is there, and what was computed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trinity_buffer.codec.segments import Segment
from trinity_buffer.errors import UnknownNameError
from trinity_buffer.inspector import experience
from trinity_buffer.inspector.fates import Fate
from trinity_buffer.inspector.source import Source
from trinity_buffer.store import writer_queries
from trinity_buffer.store.rows import ExperienceRow, position_of, slot_of

Numbers = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class TokenTable:
    """The tokens of one experience; every column is as long as ``ids``.

    Attributes:
        prompt_length: so many tokens come before the response.
        ids: ``int [L]``.
        mask: ``bool [L]``, what the loss counts; no token of the prompt. ``ratio``, ``gap`` and
            ``clipped`` are of these tokens alone.
        columns: name -> ``float [L]``, NaN where a token has no value: ``logprob``,
            ``teacher_logprob``, ``reward``, and ``advantage`` and ``return`` of the set; where a
            trainer recorded its tokens, of the last step that took it ``trained_logprob``,
            ``ratio``, ``entropy``, ``weight`` (d loss / d logprob), ``gap`` (trained_logprob -
            logprob) and ``clipped`` (1: it has an advantage and no gradient); and
            ``policy_version``, where the server told whose each token is.
        annotation_set: whose advantages they are, None where there are none.
        measured_in: the last step that recorded its tokens, and the trainer of that.
    """

    uid: str
    prompt_length: int
    ids: Numbers
    mask: Numbers
    columns: dict[str, Numbers]
    annotation_set: str | None
    measured_in: str | None = None

    def lists(self, start: int = 0, stop: int | None = None) -> dict[str, list[Any]]:
        """Return ids, mask and columns from ``start`` to ``stop``, with None in place of NaN."""
        part = slice(start, stop)
        lists = {"id": self.ids[part].tolist(), "mask": self.mask[part].tolist()}
        for name, values in self.columns.items():
            lists[name] = [None if math.isnan(value) else value for value in values[part].tolist()]
        return lists


_RECORDED = {
    "logprob": "logprobs",
    "teacher_logprob": "teacher_logprobs",
    "reward": "token_level_reward",
}
_SCORED = {"advantage": "advantages", "return": "returns"}
"""Column of a table -> the field of a rollout, or of its annotation."""


async def tokens(source: Source, uid: str, *, annotation_set: str | None = None) -> TokenTable:
    """Return the tokens of ``uid`` with the advantages of a set.

    By default of one that a committed step trained on; if there is none, of the first with any.

    Raises:
        InvalidArgumentError: not ``batch/task/run/step/suffix``.
        UnknownNameError: there is no such experience, or its tokens are not there any more.
        DamagedSegmentError: a checksum does not hold.
    """
    row, fates = await experience.row_and_fates(source, uid)
    position, slot = position_of(row.address), slot_of(row.address)
    recorded = await experience.events_with_segments(source, {position: uid}, ["light", "tokens"])
    event, segment = recorded[position], recorded[position].segment
    ids = experience.elements_of(segment, "tokens", slot)
    if ids is None:
        raise UnknownNameError(f"{uid}: {event.archived or 'it has no tokens'}")
    mask = np.zeros(row.length, bool)
    own_mask = experience.elements_of(segment, "action_mask", slot)
    mask[row.prompt_length :] = True if own_mask is None else own_mask.astype(bool)
    known = [f for f in fates if f.annotations and annotation_set in (None, f.annotation_set)]
    trained = (f for f in known if any(step.state == "trained" for step in f.steps))
    fate = next(chain(trained, known), None)

    def placed(names: Mapping[str, str], of: Segment, at: int) -> dict[str, Numbers | None]:
        """Return column -> the values of a field in the row ``at``, as `_placed` does."""
        values = {name: experience.elements_of(of, field, at) for name, field in names.items()}
        return {name: _placed(own, row, mask) for name, own in values.items()}

    columns, measured_in = placed(_RECORDED, segment, slot), None
    if fate is not None:
        note = fate.first or 0
        of_set = {position_of(note): uid}
        noted = await experience.events_with_segments(source, of_set, ["annotation"])
        columns |= placed(_SCORED, noted[position_of(note)].segment, slot_of(note))
        measured_in, measures = await _trained(source, fate)
        columns |= measures
        columns |= _compared(columns, mask)
    columns["policy_version"] = _versions(segment, slot, row)
    filled = {name: values for name, values in columns.items() if values is not None}
    chosen = None if fate is None else fate.annotation_set
    return TokenTable(row.eid.uid, row.prompt_length, ids, mask, filled, chosen, measured_in)


async def _trained(source: Source, fate: Fate) -> tuple[str | None, dict[str, Numbers | None]]:
    """Return the last step that recorded measures of each token of it or a copy, and these."""
    held = [(step, address) for address, steps in fate.annotations.items() for step in steps]
    for step, address in sorted(held, key=lambda of: of[0].step or 0, reverse=True):
        measures = await experience.measured_in(source, step, tokens=True)
        columns = {} if measures is None else measures.of_tokens(address)
        named = {"trained_logprob" if n == "logprob" else n: v for n, v in columns.items()}
        if named:
            return f"step {step.step} of {step.trainer}", {**named}
    return None, {}


def _compared(columns: Mapping[str, Numbers | None], mask: Numbers) -> dict[str, Numbers | None]:
    """Return columns that compare two numbers of each trained token, where both are known."""
    derived: dict[str, Numbers | None] = {}
    if (ratio := columns.get("ratio")) is not None:  # recorded as 1 where nothing was compared
        derived["ratio"] = np.where(mask, ratio, np.nan)
    trained, recorded = columns.get("trained_logprob"), columns.get("logprob")
    if trained is not None and recorded is not None:
        # Where others spoke, the recorded number stands for none.
        derived["gap"] = np.where(mask, trained - recorded, np.nan)
    weight, advantage = columns.get("weight"), columns.get("advantage")
    if weight is not None and advantage is not None:
        # The weight is d loss / d logprob: 0 in spite of an advantage means that clipping cut it.
        derived["clipped"] = np.where(mask, (weight == 0) & (advantage != 0), np.nan)
    return derived


LONGEST_VERSION = 15
"""Digits of a policy version; a longer number is exact in no column."""


def _versions(segment: Segment, slot: int, row: ExperienceRow) -> Numbers | None:
    """Return the policy version of each token; None where no server returned numbers for them."""
    info = segment.objects["info"][slot] if "info" in segment.objects else None
    parts = info.get("weight_segments") if isinstance(info, Mapping) else None
    if not isinstance(parts, list):
        return None
    placed = np.full(row.length, np.nan)
    for part in parts:  # what is in an info is the explorer's own: it may be anything
        match part:
            case {"later_version": _}:
                pass  # weights changed during the turn: whose each of its tokens is, none can tell
            case {"begin": int(begin), "end": int(end), "version": str(version)} if (
                version.isdecimal() and len(version) <= LONGEST_VERSION and 0 <= begin <= end
            ):
                placed[begin:end] = int(version)
    return None if np.isnan(placed).all() else placed


def _placed(values: Numbers | None, row: ExperienceRow, mask: Numbers) -> Numbers | None:
    """Return values of the response, or of all tokens, or one number times the mask, as ``[L]``."""
    if values is None or not len(values):
        return None
    placed = np.full(row.length, np.nan)
    if len(values) == row.length:
        placed[:] = values
    elif len(values) == row.length - row.prompt_length:
        placed[row.prompt_length :] = values
    # One number stands for the number times the action mask.
    elif len(values) == 1:
        placed[row.prompt_length :] = values[0] * mask[row.prompt_length :]
    else:
        return None
    return placed


NAMES = ("tokenizer", "model")
"""Keys of a configuration that may name a folder with a ``tokenizer.json``, the first one first."""


async def token_texts(source: Source, ids: Iterable[Any]) -> list[str] | None:
    """Return the text of each token, special ones included.

    None where the experiment's configuration names no folder with a ``tokenizer.json`` that is on
    this machine, seen from its ``folder``, or where the package ``tokenizers`` (extra ``hf``) is
    not installed.
    """
    config = await source.read(writer_queries.config_of, source.key)
    tokenizer = None if config is None else _named(config[0])
    if tokenizer is None:
        return None
    return [_text(tokenizer, int(token)) for token in ids]


def _named(config: Any) -> Any:
    folder = Path(config.get("folder") or ".")
    for name in NAMES:
        value = config.get(name)
        file = folder / value / "tokenizer.json" if isinstance(value, str) else None
        if file is not None and file.is_file():
            return _loaded(str(file), file.stat().st_mtime_ns)
    return None


# By the time of its last change too, so that a tokenizer that was replaced is read anew.
@lru_cache(maxsize=4)
def _loaded(file: str, _: int) -> Any:
    try:
        tokenizers = import_module("tokenizers")
    except ModuleNotFoundError:
        return None
    return tokenizers.Tokenizer.from_file(file)


def _text(tokenizer: Any, token: int) -> str:
    """Return the text of one token; the name in the vocabulary where it is part of a character."""
    text = tokenizer.decode([token], skip_special_tokens=False)
    whole = text and "\ufffd" not in text
    return str(text if whole else tokenizer.id_to_token(token) or f"<{token}>")
