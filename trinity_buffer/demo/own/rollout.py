"""What is practised: to find a number from 0 to 3 in a conversation of at most three guesses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio

import trinity_buffer as tb

HIGHEST, GUESSES = 3, 3

tasks = [number for _ in range(25) for number in range(HIGHEST + 1)]
"""What is attempted, in this order: the hidden number of each task. Any values will do."""


async def rollout(hidden: int, model: Any) -> Sequence[tb.Experience]:
    """Attempt one task: talk to the model, and return what it said with its reward."""
    talk = tb.Conversation([{"role": "user", "content": f"0-{HIGHEST}?"}])
    for left in reversed(range(GUESSES)):
        said = talk.said(await model.chat(talk.messages, max_tokens=1)).text
        if said == str(hidden):
            return talk.experiences(reward=1.0)
        if said not in {str(number) for number in range(HIGHEST + 1)}:
            return talk.experiences(reward=0.0)  # no number: a random model begins like this
        if left:
            talk.heard({"role": "user", "content": "+" if int(said) < hidden else "-"})
    return talk.experiences(reward=0.2)  # all were numbers


async def evaluate(model: Any) -> float:
    """Return the share of the numbers that the model finds, at its likeliest guesses."""
    found = []

    async def play(hidden: int) -> None:
        *_, last = await rollout(hidden, model)
        found.append(last.reward == 1.0)

    async with anyio.create_task_group() as group:
        for hidden in range(HIGHEST + 1):
            group.start_soon(play, hidden)
    return sum(found) / len(found)
