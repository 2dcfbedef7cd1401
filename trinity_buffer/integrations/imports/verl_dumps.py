"""Rollouts that verl wrote with ``trainer.rollout_data_dir``: ``STEP.jsonl``, texts and scores.

Written against verl 0.9.1, whose lines name the trajectory as ``{uid}_{session}_{index}``; in older
ones rows with the same input are a group.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.experience import Experience
from trinity_buffer.identity import EID
from trinity_buffer.integrations.imports.rows import rows
from trinity_buffer.integrations.imports.texts import Texts

OWN = ("input", "output", "score", "step", "uid")


def read(path: Path, texts: Texts) -> Iterator[Experience]:
    """Yield a rollout for each line; a step is a batch, what else a line holds is in ``info``."""
    seen: dict[tuple[int, str], int] = {}
    for where, row in rows(path):
        if missing := [name for name in ("input", "output", "score", "step") if name not in row]:
            raise InvalidArgumentError(f"{where}: verl's dumps have {', '.join(missing)}")
        prompt = texts.prompt(row["input"])
        yield Experience(
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


def _eid(row: dict[str, Any], seen: dict[tuple[int, str], int]) -> EID:
    step = int(row["step"])
    parts = str(row.get("uid", "")).rsplit("_", 2)
    if len(parts) == 3 and parts[1].isdigit() and parts[2].isdigit():
        return EID(f"step-{step}", parts[0], int(parts[1]), int(parts[2]))
    group = (step, row["input"])
    seen[group] = seen.get(group, -1) + 1
    tasks = dict.fromkeys(text for at, text in seen if at == step)
    return EID(f"step-{step}", list(tasks).index(row["input"]), seen[group])
