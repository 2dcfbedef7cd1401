"""Rollouts that verl wrote with ``trainer.rollout_data_dir``: ``STEP.jsonl``, texts and scores.

Written against verl 0.9.1, whose lines name the trajectory as ``{uid}_{session}_{index}``. Of any
other uid all rows of a step are a group; without one, as in older dumps, those of the same input.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trinity_buffer.errors import InvalidExperienceError
from trinity_buffer.experience import Experience
from trinity_buffer.identity import EID, Key
from trinity_buffer.integrations.imports.rows import Rows
from trinity_buffer.integrations.imports.texts import Texts

NEEDED = ("input", "output", "score", "step")
OWN = (*NEEDED, "uid")


def read(path: Path, texts: Texts, rows: Rows) -> Iterator[Experience]:
    """Yield a rollout for each line; a step is a batch, what else a line holds is in ``info``."""
    seen: dict[int, dict[str, tuple[Key, int]]] = {}
    for _, where, row in rows.of(path):
        with rows.reading(where, row) as made:
            made.append(_rollout(row, texts, seen))
        yield from made


def _rollout(
    row: dict[str, Any], texts: Texts, seen: dict[int, dict[str, tuple[Key, int]]]
) -> Experience:
    if missing := [name for name in NEEDED if name not in row]:
        raise InvalidExperienceError(
            f"this row lacks {', '.join(missing)}, which a row of verl's dumps has"
        )
    prompt = texts.prompt(row["input"])
    return Experience(
        eid=_eid(row, seen),
        tokens=prompt + texts.answer(row["input"], row["output"]),
        prompt_length=len(prompt),
        reward=float(row["score"]),
        prompt_text=row["input"],
        response_text=row["output"],
        info={
            "model_version": int(row["step"]) - 1,
            **{name: value for name, value in row.items() if name not in OWN},
        },
    )


def _eid(row: dict[str, Any], seen: dict[int, dict[str, tuple[Key, int]]]) -> EID:
    """Return where a rollout stands; ``seen``: per step and group its task and runs so far."""
    step, uid = int(row["step"]), row.get("uid")
    parts = str(uid).rsplit("_", 2)
    if len(parts) == 3 and parts[1].isdigit() and parts[2].isdigit():
        return EID(f"step-{step}", parts[0], int(parts[1]), int(parts[2]))
    groups = seen.setdefault(step, {})
    named = uid is not None and uid != ""
    group = str(uid if named else row["input"])
    task, run = groups.get(group, (group if named else len(groups), -1))
    groups[group] = (task, run + 1)
    return EID(f"step-{step}", task, run + 1)
