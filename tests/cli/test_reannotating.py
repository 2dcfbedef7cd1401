"""What `reannotate` says of what it did, and where nothing was left to do."""

from __future__ import annotations

import anyio

from tests.cli.calling import Cli
from tests.contract.making import group, opened
from trinity_buffer import run_strategy


async def _recorded(url: str, *batches: str) -> None:
    async with opened(url, rollouts_per_group=4) as experiment:
        for batch in batches:
            await experiment.writer("e0").write(group(batch))


def test_a_set_that_is_complete_is_said_to_be(cli: Cli, new_sqlite_url: str) -> None:
    words = ("reannotate", "--store", new_sqlite_url, "--strategy", "grpo", "--name", "mine")
    anyio.run(_recorded, new_sqlite_url)
    nothing = "set mine: 0 annotated, 0 rejected, 0 waiting in 0 incomplete groups"
    assert cli(*words).out.strip() == nothing, "a new set of nothing"
    anyio.run(_recorded, new_sqlite_url, "b0")
    assert cli(*words).out.startswith("set mine: 4 annotated, 0 rejected, 0 waiting")
    told = "set mine was complete already: all that is recorded is decided in it"
    assert cli(*words).out.strip() == told
    assert cli(*words, "--json").json == [
        {"set": "mine", "annotated": 0, "rejected": 0, "waiting": 0, "waiting_groups": 0}
    ]
    anyio.run(_recorded, new_sqlite_url, "b1")
    assert cli(*words).out.startswith("set mine: 4 annotated, ")


def test_annotate_takes_up_the_set_of_a_plain_call_in_python(cli: Cli, new_sqlite_url: str) -> None:
    """The command spells the arguments out, the call in Python leaves them at their defaults."""

    async def annotated() -> None:
        await _recorded(new_sqlite_url, "b0")
        async with opened(new_sqlite_url, rollouts_per_group=4) as experiment:
            await run_strategy(experiment, "grpo")

    anyio.run(annotated)
    ended = cli("annotate", "--store", new_sqlite_url)
    assert " 0 annotated, 0 rejected" in ended.out, ended.err
    anyio.run(_recorded, new_sqlite_url, "b1")
    assert " 4 annotated, 0 rejected" in cli("annotate", "--store", new_sqlite_url).out
