"""What rollouts, names and errors say is shown by the command, never obeyed by the terminal."""

from __future__ import annotations

import json
import re
import sqlite3
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.cli.calling import Cli, Ended
from trinity_buffer import Experience, open_store, run_strategy
from trinity_buffer.experience import EID

ORDERS = "\x1b]52;c;aGk=\x07\x1b[2J\x9b31m\u202etxt\u2066\x7f"
EVIL = f"{ORDERS}[bold]b[/bold] :smile:\n0 wrong"
OBEYED = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


@pytest.fixture
def url(new_sqlite_url: str, tmp_path: Path) -> str:
    """A store of an older day, whose door let any text into a name."""

    async def write() -> None:
        async with open_store(new_sqlite_url) as store:
            experiment = await store.experiment("sort", config={})
            said: dict[str, Any] = {"info": {EVIL: EVIL}, "response_text": EVIL}
            await experiment.writer("e0").write(
                [Experience(eid=EID("b", "t", 0, 0), tokens=[1, 2], reward=1.0, **said)]
            )
            await experiment.finish(EVIL)

    anyio.run(write)
    with sqlite3.connect(tmp_path / "store.db") as database:
        guards = database.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'")
        triggers = dict(guards.fetchall())
        for name in triggers:
            database.execute(f"DROP TRIGGER {name}")
        database.execute("UPDATE event SET actor = ? WHERE position > 1", (EVIL,))
        database.execute("UPDATE experience SET task = ?", (EVIL,))
        database.execute("UPDATE experiment SET name = ?", (EVIL,))
        for trigger in triggers.values():
            database.execute(trigger)
    database.close()
    return new_sqlite_url


def assert_harmless(told: Ended) -> None:
    assert OBEYED.findall(told.out + told.err) == []
    assert not any(line.startswith("0 wrong") for line in told.out.splitlines())


def test_no_text_of_a_store_reaches_the_terminal_as_an_order(cli: Cli, url: str) -> None:
    for command in ("stats", "events", "groups", "verify"):
        told = cli(command, "--store", url)
        assert_harmless(told)
        assert r"\x1b]52" in told.out, command
        assert r"\u202e" in told.out
        assert "[bold]b[/bold] :smile:" in told.out


def test_show_takes_the_uid_that_groups_prints(cli: Cli, url: str) -> None:
    (line,) = [line for line in cli("groups", "--store", url).out.splitlines() if "b/" in line]
    uid = line[: line.index("/0/0/") + 5]
    told = cli("show", uid, "--store", url)
    assert (told.code, told.err) == (0, "")
    assert_harmless(told)
    assert r"response_text: \x1b]52;c;aGk=\x07" in told.out


def test_json_escapes_what_a_terminal_obeys_and_reads_back_the_same(cli: Cli, url: str) -> None:
    for command in (("stats",), ("events",), ("groups",), ("verify",), ("show", f"b/{EVIL}/0/0/")):
        told = cli(*command, "--store", url, "--json")
        assert_harmless(told)
        assert EVIL in " ".join(map(str, _texts([json.loads(x) for x in told.out.splitlines()])))


def test_errors_are_escaped(cli: Cli, url: str) -> None:
    told = cli("show", f"{ORDERS}/0/0/0/", "--store", url)
    assert told.code == 2
    assert_harmless(told)


def _texts(value: object) -> list[str]:
    if isinstance(value, dict):
        return [text for pair in value.items() for item in pair for text in _texts(item)]
    return [t for item in value for t in _texts(item)] if isinstance(value, list) else [str(value)]


def test_names_in_brackets_are_shown_in_titles_and_headings(cli: Cli, new_sqlite_url: str) -> None:
    async def write() -> None:
        async with open_store(new_sqlite_url) as store:
            experiment = await store.experiment("sort[v=2]", config={"rollouts_per_group": 1})
            said: dict[str, Any] = {"tokens": [1, 2], "prompt_length": 1, "logprobs": [-0.1]}
            row = Experience(eid=EID("b", "t", 0, 0), reward=1.0, **said)
            await experiment.writer("e0").write([row])
            for number in (1, 2):
                await run_strategy(experiment, "grpo", name=f"grpo[eps={number}]")

    anyio.run(write)
    told = cli("diff", "grpo[eps=1]", "grpo[eps=2]", "--store", new_sqlite_url).out
    assert "grpo[eps=1] / grpo[eps=2]\n" in told
    assert "sort[v=2]" in cli("top", "--once", "--store", new_sqlite_url).out
