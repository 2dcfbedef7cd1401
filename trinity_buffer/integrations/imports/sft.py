"""Demonstrations as TRL and Hugging Face data sets hold them.

``messages``, of which the last one is trained, or ``prompt`` and ``completion``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trinity_buffer.errors import InvalidExperienceError
from trinity_buffer.experience import Experience
from trinity_buffer.identity import EID
from trinity_buffer.integrations.imports.rows import Rows, name_of
from trinity_buffer.integrations.imports.texts import Templating, Texts


def read(path: Path, texts: Texts, rows: Rows) -> Iterator[Experience]:
    """Yield a demonstration for each row."""
    for number, where, row in rows.of(path):
        with rows.reading(where, row) as made:
            messages = row.get("messages")
            prompt: Any
            answer: Any
            if messages:
                *prompt, last = messages
                answer = [last]
            elif {"prompt", "completion"} <= row.keys():
                prompt, answer = row["prompt"], row["completion"]
            else:
                raise InvalidExperienceError(
                    f"a demonstration has messages, or prompt and completion, not {sorted(row)}"
                )
            how = Templating.of(row)
            before = texts.prompt(prompt, how)
            made.append(
                Experience(
                    eid=EID(name_of(path), number, 0),
                    tokens=before + texts.answer(prompt, answer, how),
                    prompt_length=len(before),
                    messages=messages or None,
                    tools=how.tools,
                    prompt_text=prompt if isinstance(prompt, str) else None,
                    response_text=answer if isinstance(answer, str) else None,
                )
            )
        yield from made
