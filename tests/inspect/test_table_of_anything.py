"""What is exported of rows that several had, and of what nobody has checked before it is stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import pyarrow
import pytest
import torch
from pyarrow import parquet
from starlette.testclient import TestClient

import trinity_buffer as tb
from tests.cli.calling import Cli
from tests.cli.conftest import cli  # noqa: F401 - a fixture
from tests.small_sizes import resized
from trinity_buffer import open_store, run_strategy
from trinity_buffer.errors import UnknownNameError
from trinity_buffer.web.app import inspector

CELLS = ("state", "reason", "trainer", "trained_step")
LONE = "one \ud800 two"
SHOWN = "one \ufffd two"


def row(task: int, run: int, length: int = 3, **fields: Any) -> tb.Experience:
    given: dict[str, Any] = {"reward": float(run), "info": {"model_version": 0}} | fields
    return tb.Experience(
        eid=tb.EID("b", task, run),
        tokens=torch.arange(1 + length),
        prompt_length=1,
        logprobs=torch.zeros(length),
        **given,
    )


async def write(url: str, some: list[tb.Experience]) -> None:
    async with open_store(url) as store:
        experiment = await store.experiment("run", config={"rollouts_per_group": 2})
        writer = experiment.writer("e0")
        await writer.plan("b", sorted({int(str(one.eid.task)) for one in some}), 2)
        await writer.write(some)
        await writer.seal("b", len(some))


def cells(url: str, **wanted: Any) -> dict[str, tuple[Any, ...]]:
    """Return uid of the first run of a group -> what became of it."""
    rows = tb.to_arrow(url, **wanted).to_pylist()
    return {one["task"]: tuple(one[name] for name in CELLS) for one in rows if one["run"] == 0}


async def two_trainers(url: str) -> None:
    """Let trainer B take all groups; A finds the first too long, and leases the next."""
    await write(url, [row(task, run, 9 if task == 0 else 3) for task in range(3) for run in (0, 1)])
    async with open_store(url) as store:
        experiment = await store.experiment("run")
        await run_strategy(experiment, "grpo")
        async with experiment.train_stream(
            strategy="grpo", consumer="A", groups_per_step=2, max_tokens=8
        ) as stream:
            await anext(stream)
        async with experiment.train_stream(strategy="grpo", consumer="B", groups_per_step=1) as own:
            for _ in range(2):
                await own.commit(await anext(own))
            await anext(own)


def test_cells_of_a_row_are_of_one_trainer(sqlite_url: str) -> None:
    anyio.run(two_trainers, sqlite_url)
    of_b = {
        "0": ("committed", None, "B", 1),
        "1": ("committed", None, "B", 2),
        "2": ("leased", None, "B", 3),
    }
    of_a = {"0": ("rejected", "oversize", "A", None), "1": ("leased", None, "A", 1)}
    assert cells(sqlite_url) == cells(sqlite_url, trainer="B") == of_b
    found = cells(sqlite_url, trainer="A")
    assert {task: found[task] for task in of_a} == of_a
    assert cells(sqlite_url, step=2) == {"1": of_b["1"]}
    assert cells(sqlite_url, step=1, trainer="A") == {"1": of_a["1"]}
    with pytest.raises(UnknownNameError, match="no trainer 'C'"):
        tb.to_arrow(sqlite_url, trainer="C")


def test_cells_of_a_row_are_of_the_step_of_a_copy(sqlite_url: str) -> None:
    async def copy() -> None:
        await write(
            sqlite_url,
            [row(t, run, reward=1.0 if t else float(run)) for t in range(4) for run in (0, 1)],
        )
        async with open_store(sqlite_url) as store:
            experiment = await store.experiment("run")
            await run_strategy(experiment, ["duplicate_informative", "grpo"], name="copies")
            async with experiment.train_stream(strategy="copies", groups_per_step=1) as stream:
                for _ in range(2):
                    await stream.commit(await anext(stream))
                await anext(stream)

    anyio.run(copy)
    assert cells(sqlite_url)["0"] == ("committed", None, "trainer", 1)
    for step, state in ((1, "committed"), (2, "committed"), (3, "leased")):
        assert cells(sqlite_url, step=step) == {"0": (state, None, "trainer", step)}


@pytest.mark.parametrize(
    ("values", "column"),
    [
        ((1, 0.5, True), [1.0, 0.5, 1.0]),
        ((1, "a", None), [None, "a", None]),
        ((True, "a"), [None, "a"]),
        ((1, 2**60 + 1, 2**60, -(2**63), 2**64 - 1), [1.0, None, 2.0**60, -(2.0**63), None]),
        ((10**400, 2), [None, 2.0]),
        ((LONE, "b"), [SHOWN, "b"]),
        ((float("inf"), 1), [float("inf"), 1.0]),
    ],
)
def test_no_value_of_info_ends_an_export(
    sqlite_url: str, values: tuple[Any, ...], column: list[Any]
) -> None:
    anyio.run(write, sqlite_url, [row(0, i, info={"x": one}) for i, one in enumerate(values)])
    table = tb.to_arrow(sqlite_url)
    assert table["info.x"].to_pylist() == column
    whole = [json.loads(said)["x"] for said in table["info"].to_pylist()]
    known = [SHOWN if one == LONE else None if one == float("inf") else one for one in values]
    assert whole == known


def test_the_first_page_decides_what_a_column_of_info_holds(sqlite_url: str) -> None:
    values = (1, 2, "a", 2.5)
    anyio.run(write, sqlite_url, [row(0, i, info={"x": one}) for i, one in enumerate(values)])
    with resized(experiences_per_page=1):
        assert tb.to_arrow(sqlite_url)["info.x"].to_pylist() == [1.0, 2.0, None, 2.5]


def test_keys_that_are_written_alike_are_one(sqlite_url: str) -> None:
    anyio.run(write, sqlite_url, [row(0, 0, info={1: "a", "1": "b", "k\ud800": "c"})])
    (found,) = tb.to_arrow(sqlite_url).to_pylist()
    assert (found["info"], found["info.1"], found["info.k\ufffd"]) == (
        '{"1": "b", "k\ufffd": "c"}',
        "b",
        "c",
    )


@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
def test_a_lone_surrogate_ends_neither_an_export_nor_a_page(
    cli: Cli,  # noqa: F811
    sqlite_url: str,
    tmp_path: Path,
    ending: str,
) -> None:
    anyio.run(write, sqlite_url, [row(0, 0, response_text=LONE, prompt_text="é")])
    file = tmp_path / f"run.{ending}"
    assert cli("export", "-o", file, "--store", sqlite_url).code == 0
    if ending == "parquet":
        (found,) = parquet.read_table(file).to_pylist()
    else:
        found = json.loads(file.read_text())
    assert (found["response_text"], found["prompt_text"], found["tokens"]) == (
        SHOWN,
        "é",
        [0, 1, 2, 3],
    )
    with TestClient(inspector(sqlite_url), base_url="http://127.0.0.1") as client:
        for path in ("rollout?uid=b/0/0/0/", "search?text=two"):
            answer = client.get(f"/run/{path}")
            assert answer.status_code == 200
            assert SHOWN in answer.text
    assert cli("report", "-o", tmp_path / "run.html", "--store", sqlite_url).code == 0


def test_what_is_called_json_is_json(cli: Cli, sqlite_url: str, tmp_path: Path) -> None:  # noqa: F811
    info = {"x": float("nan"), "y": [float("-inf")], "NaN": "Infinity"}
    anyio.run(write, sqlite_url, [row(0, 0, info=info)])
    file = tmp_path / "run.jsonl"
    shown = cli("show", "b/0/0/0/", "--json", "--store", sqlite_url).out
    assert cli("export", "-o", file, "--store", sqlite_url).code == 0
    found = json.loads(file.read_text(), parse_constant=pytest.fail)
    told = {"x": None, "y": [None], "NaN": "Infinity"}
    assert json.loads(found["info"], parse_constant=pytest.fail) == told
    assert (found["info.x"], found["info.NaN"]) == (None, "Infinity")
    assert json.loads(shown, parse_constant=pytest.fail)["objects"]["info"] == told


def test_an_error_of_compiled_code_is_not_said_to_be_of_ones_own(
    cli: Cli,  # noqa: F811
    sqlite_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    anyio.run(write, sqlite_url, [row(0, 0)])
    monkeypatch.setattr("trinity_buffer.inspector.table.array_of", pyarrow.array)
    with pytest.raises((TypeError, ValueError)):
        cli("export", "-o", tmp_path / "run.jsonl", "--store", sqlite_url)
