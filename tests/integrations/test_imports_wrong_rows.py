"""A row that is wrong is told with its place, and an import goes on after it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.integrations.test_imports import (
    DEMONSTRATIONS,
    _read,
    episode,
    imported,
    rows_of,
    trained,
)
from trinity_buffer.cli.main import app
from trinity_buffer.cli.supervisor import exit_code_of
from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.integrations.imports.formats import PER_WRITE, require_readable
from trinity_buffer.integrations.imports.texts import Texts
from trinity_buffer.integrations.imports.verl_dumps import read

VERL = {"input": "one two", "output": "three", "score": 1.0, "step": 1}
SFT = DEMONSTRATIONS["texts"]
PAIR = {"prompt": "one", "chosen": "two", "rejected": "three"}
MESSAGE = {"role": "assistant", "content": "three"}


def without_messages() -> dict[str, Any]:
    given = episode(1, "a", 1.0)
    del given["traces"][0]["nodes"][0]["message"]
    return given


@pytest.mark.parametrize(
    ("name", "row", "says"),
    [
        ("verl", {**VERL, "score": None}, "score=None"),
        ("verl", {**VERL, "score": "x"}, "could not convert string to float: 'x'"),
        ("verl", {**VERL, "step": None}, "step=None"),
        ("verl", {**VERL, "input": ["a"]}, "neither a text nor a list of messages: ['a']"),
        ("verl", {**VERL, "output": "three \ud83d"}, "output='three \\ud83d'"),
        ("sft", {**SFT, "prompt": None}, "neither a text nor a list of messages: None"),
        ("sft", {"messages": MESSAGE}, "neither a text nor a list of messages"),
        ("sft", {"messages": "three"}, "neither a text nor a list of messages"),
        ("sft", {**SFT, "prompt": MESSAGE}, "neither a text nor a list of messages"),
        ("preferences", {**PAIR, "chosen": None}, "neither a text nor a list of messages: None"),
        ("preferences", {**PAIR, "rejected": 2}, "neither a text nor a list of messages: 2"),
        ("preferences", {"chosen": None, "rejected": None}, "chosen=None"),
        ("prime-rl", without_messages(), "'message' is missing"),
        ("prime-rl", {"id": "e", "traces": [{"id": "t"}]}, "'nodes' is missing"),
        ("trinity-rft", {"eid": {"batch": 1}, **PAIR}, "neither messages nor prompt_text"),
        (
            "trinity-rft",
            {"eid": {"batch": 1}, "prompt_text": "one", "response_text": "two"},
            "'task' is missing",
        ),
    ],
)
def test_a_wrong_row_is_told_with_its_line_and_what_it_holds(
    tmp_path: Path, tokenizer: Path, name: str, row: Any, says: str
) -> None:
    folder = tmp_path / "traces"
    file = rows_of(folder / ("stream.jsonl" if name == "prime-rl" else "x.jsonl"), [row])
    with pytest.raises(InvalidArgumentError) as told:
        require_readable(name, folder if name == "prime-rl" else file, tokenizer=tokenizer)
    assert str(told.value).startswith(f"{file.name}:1: ")
    assert says in str(told.value)
    assert "\n" not in str(told.value)
    assert exit_code_of(told.value) == 2


def test_a_wrong_row_far_down_says_how_to_go_on(tmp_path: Path, tokenizer: Path) -> None:
    url, good = f"sqlite:///{tmp_path}/run.db", [SFT] * (PER_WRITE + 1)
    asked = ["import", "sft", str(tmp_path / "x.jsonl"), "--store", url, "--experiment", "run"]
    asked += ["--tokenizer", str(tokenizer)]
    rows_of(tmp_path / "x.jsonl", [*good, {**SFT, "prompt": None}])
    told = str(CliRunner().invoke(app, asked).exception)
    assert told.startswith(f"x.jsonl:{len(good) + 1}: ")
    assert f"the {PER_WRITE} experiences before it are stored" in told
    assert "import the same again" in told
    rows_of(tmp_path / "x.jsonl", [*good, SFT])
    done = json.loads(CliRunner().invoke(app, [*asked, "--json"]).output)
    assert done == {"written": 2, "duplicates": PER_WRITE, "batches": 1, "late": 0}
    assert trained(url, None) == len(good) + 1


def test_a_uid_of_verl_is_a_group_whatever_it_looks_like(tmp_path: Path, tokenizer: Path) -> None:
    uids = ["a", "b", "a", "c_0_0", "", None]
    path = rows_of(tmp_path / "1.jsonl", [{**VERL, "uid": uid} for uid in uids])
    found = [one.eid for one in read(path, Texts(tokenizer))]
    assert [(one.task, one.run) for one in found] == [
        *[("a", 0), ("b", 0), ("a", 1)],
        *[("c", 0), (2, 0), (2, 1)],
    ]


def test_folders_with_a_dot_in_their_names_are_batches_of_their_own(
    sqlite_url: str, tmp_path: Path, tokenizer: Path
) -> None:
    for folder in ("data.v1", "data.v2"):
        rows_of(tmp_path / folder / "x.jsonl", [{**SFT, "completion": folder}])
        assert imported(sqlite_url, "sft", tmp_path / folder, tokenizer).written == 1
    assert {one.eid.batch for one in _read(sqlite_url)} == {"data.v1", "data.v2"}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("trinity-rft", "is a folder: name the file of the buffer in it"),
        ("verl", "there is nothing to import; verl means rollouts dumped by verl"),
        ("prime-rl", "neither stream nor stream.jsonl is in it, nor in monitors/file/traces"),
        ("preferences", "there is nothing to import; preferences means pairs"),
        ("sft", "there is nothing to import; sft means demonstrations"),
    ],
)
def test_a_folder_that_holds_nothing_of_the_kind_is_refused(
    tmp_path: Path, name: str, says: str
) -> None:
    folder, store = tmp_path / "other", tmp_path / "run.db"
    folder.mkdir()
    asked = ["import", name, str(folder), "--store", str(store)]
    assert says in str(CliRunner().invoke(app, asked).exception)
    assert not store.exists()


def test_a_tokenizer_that_is_not_there_is_looked_for_nowhere_else(tmp_path: Path) -> None:
    path = tmp_path / "1.jsonl"
    path.write_text(json.dumps(VERL))
    with pytest.raises(InvalidArgumentError, match="--tokenizer nowhere: there is no such folder"):
        require_readable("verl", path, tokenizer=Path("nowhere"))
