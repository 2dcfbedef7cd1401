"""Demonstrations as TRL and Hugging Face data sets hold them.

``messages``, of which the last one is trained, or ``prompt`` and ``completion``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.experience import Experience
from trinity_buffer.identity import EID
from trinity_buffer.integrations.imports.rows import name_of, reading, rows
from trinity_buffer.integrations.imports.texts import Texts


def read(path: Path, texts: Texts) -> Iterator[Experience]:
    """Yield a demonstration for each row."""
    for number, (where, row) in enumerate(rows(path)):
        with reading(where, row):
            messages = row.get("messages")
            prompt: Any
            answer: Any
            if messages:
                *prompt, last = messages
                answer = [last]
            elif {"prompt", "completion"} <= row.keys():
                prompt, answer = row["prompt"], row["completion"]
            else:
                raise InvalidArgumentError(
                    f"{where}: a demonstration has messages, or prompt and completion, not "
                    f"{sorted(row)}"
                )
            before = texts.prompt(prompt)
            yield Experience(
                eid=EID(name_of(path), number, 0),
                tokens=before + texts.answer(prompt, answer),
                prompt_length=len(before),
                messages=messages or None,
                tools=row.get("tools"),
                prompt_text=prompt if isinstance(prompt, str) else None,
                response_text=answer if isinstance(answer, str) else None,
            )
