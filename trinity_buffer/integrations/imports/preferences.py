"""Pairs as TRL and Hugging Face data sets hold them: ``prompt``, ``chosen``, ``rejected``.

Each is a text or a list of messages; where there is no prompt, it is what both answers begin with.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from trinity_buffer.errors import InvalidExperienceError
from trinity_buffer.experience import Experience
from trinity_buffer.identity import EID
from trinity_buffer.integrations.imports.rows import Rows, name_of
from trinity_buffer.integrations.imports.texts import Templating, Texts


def read(path: Path, texts: Texts, rows: Rows) -> Iterator[Experience]:
    """Yield a pair for each row."""
    for number, where, row in rows.of(path):
        with rows.reading(where, row) as made:
            prompt, chosen, rejected = _parts(row)
            how = Templating.of(row)
            tokens = texts.prompt(prompt, how)
            answers = [texts.answer(prompt, one, how) for one in (chosen, rejected)]
            made.append(
                Experience(
                    eid=EID(name_of(path), number, 0),
                    tokens=tokens,
                    prompt_length=len(tokens),
                    chosen=torch.tensor(answers[0], dtype=torch.int32),
                    rejected=torch.tensor(answers[1], dtype=torch.int32),
                    prompt_text=prompt if isinstance(prompt, str) else None,
                    chosen_messages=chosen if isinstance(chosen, list) else None,
                    tools=how.tools,
                    rejected_messages=rejected if isinstance(rejected, list) else None,
                )
            )
        yield from made


def _parts(row: dict[str, Any]) -> tuple[Any, Any, Any]:
    if not {"chosen", "rejected"} <= row.keys():
        raise InvalidExperienceError(f"a pair has chosen and rejected, not {sorted(row)}")
    chosen, rejected = row["chosen"], row["rejected"]
    if row.get("prompt") is not None:
        return row["prompt"], chosen, rejected
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    if not shared or isinstance(chosen, str):
        raise InvalidExperienceError(
            "there is no prompt, and no messages that both answers begin with"
        )
    return chosen[:shared], chosen[shared:], rejected[shared:]
