"""A search finds what a plain loop over the texts finds, in the order of the log."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Resize
from tests.sample_run import rollout
from trinity_buffer import open_store
from trinity_buffer.experience import Experience
from trinity_buffer.inspector import search
from trinity_buffer.inspector.experience import AROUND
from trinity_buffer.inspector.source import as_of, now

LETTERS = ["a", "A", "b", "ß", "ẞ", "s", "S", "İ", "i", "I", "ﬃ", "f", "Σ", "ς", "\0", "\u0307"]
FIELDS = ("prompt_text", "response_text", "messages", "tools")


def some_text(chance: random.Random, longest: int = 6) -> str:
    return "".join(chance.choices(LETTERS, k=chance.randint(1, longest)))


def told(chance: random.Random, run: int) -> Experience:
    """Return a rollout some of whose texts are those of others, absent, or inside of others."""
    made = rollout("b", 0, run, 1.0)
    made.prompt_text = chance.choice(["ab", "aß", None])
    made.response_text = some_text(chance, 60)
    made.messages = [{"role": "i", "content": [some_text(chance)]}, {"n": 3, "s": "sS"}]
    made.tools = chance.choice([None, [], [{"f": {"f": some_text(chance)}}]])
    return made


def texts_of(value: Any, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from texts_of(inner, f"{name}.{key}")
    elif value is not None and not isinstance(value, int):
        for at, inner in enumerate(value):
            yield from texts_of(inner, f"{name}[{at}]")


def excerpt_of(text: str, wanted: str, *, exact: bool) -> str | None:
    """Return the first place, looked for letter by letter."""
    folded = [letter if exact else letter.casefold() for letter in text]
    at = "".join(folded).find(wanted if exact else wanted.casefold())
    if at < 0:
        return None
    owners = [place for place, some in enumerate(folded) for _ in some]
    last = owners[at + len(wanted if exact else wanted.casefold()) - 1]
    return text[max(0, owners[at] - AROUND) : last + 1 + AROUND]


def plainly(made: list[Experience], wanted: str, *, exact: bool) -> list[tuple[int, str, str]]:
    """Return run, field and excerpt of each text, by run, then by field."""
    return [
        (one.eid.run, field, excerpt)
        for one in made
        for name in FIELDS
        for field, text in sorted(texts_of(getattr(one, name), name))
        if (excerpt := excerpt_of(text, wanted, exact=exact)) is not None
    ]


@pytest.mark.long
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 4))]
)
async def test_any_text_is_found_where_a_plain_loop_finds_it(
    tmp_path: Path, resize: Resize, seed: int
) -> None:
    chance = random.Random(seed)
    resize(rows_per_page=7, events_per_page=3)
    made = [told(chance, run) for run in range(40)]
    made[3].response_text, made[4].response_text = "once in a", " lifetime"
    async with open_store(f"sqlite:///{tmp_path / 'store.db'}") as store:
        experiment = await store.experiment("run", config={})
        for start in range(0, len(made), 4):
            await experiment.writer("e0").write(made[start : start + 4])
        wanted = ["in a lifetime", "a\0a", "\0", *(some_text(chance, 3) for _ in range(60))]
        for text in wanted:
            for exact in (False, True):
                found = [one async for one in search(now(experiment), text, exact=exact)]
                order = [FIELDS.index(one.field.partition("[")[0]) for one in found]
                runs = [int(one.uid.split("/")[2]) for one in found]
                assert runs == sorted(runs)
                rows = [
                    (run, at, one.field, one.excerpt)
                    for run, at, one in zip(runs, order, found, strict=True)
                ]
                assert [(run, *rest) for run, _, *rest in sorted(rows)] == plainly(
                    made, text, exact=exact
                ), text
        assert not [one async for one in search(now(experiment), "in a lifetime")]


async def test_a_search_begins_after_an_address_and_ends_at_a_position(
    tmp_path: Path, resize: Resize
) -> None:
    resize(rows_per_page=2)
    reached: list[int] = []
    async with open_store(f"sqlite:///{tmp_path / 'store.db'}") as store:
        experiment = await store.experiment("run", config={})
        for task in range(4):
            made = [rollout("b", task, run, 1.0) for run in range(4)]
            await experiment.writer("e0").write(made)
        every = [one async for one in search(now(experiment), "and", on_page=reached.append)]
        assert [one.uid for one in every] == [f"b/{t}/{r}/0/" for t in range(4) for r in range(4)]
        for at, one in enumerate(every):
            rest = [other async for other in search(now(experiment), "AND", after=one.address)]
            assert rest == every[at + 1 :]
        for end in reached:
            rest = [other async for other in search(now(experiment), "and", after=end)]
            assert rest == [one for one in every if one.address > end]
        position = every[7].address >> 20
        async with as_of(experiment, position) as then:
            assert [one async for one in search(then, "and")] == every[:8]
