"""A row that is wrong is told with its place, and an import goes on after it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tests.explorer.chat_templates import FORMS, tokenizer_of
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
from trinity_buffer.integrations.imports.formats import PER_WRITE, read_verl, require_readable
from trinity_buffer.integrations.imports.rows import Rows, Texts

VERL = {"input": "one two", "output": "three", "score": 1.0, "step": 1}
SFT = DEMONSTRATIONS["texts"]
PAIR = {"prompt": "one", "chosen": "two", "rejected": "three"}
MESSAGE = {"role": "assistant", "content": "three"}
USER, TOOL = {**MESSAGE, "role": "user"}, {**MESSAGE, "role": "tool", "tool_call_id": "c"}
CALL = {"id": "c", "function": {"name": "add", "arguments": "{}"}}
BAD_CALL = {"id": "c", "function": {"name": "add", "arguments": "a=2"}}


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
        ("verl", {**VERL, "step": math.inf}, "step=inf"),
        ("verl", {**VERL, "score": math.nan}, "reward is nan, it must be finite"),
        ("verl", {**VERL, "input": ["a"]}, "neither a text nor a list of messages: ['a']"),
        ("verl", {**VERL, "output": "three \ud83d"}, "output='three \\ud83d'"),
        ("sft", {**SFT, "prompt": None}, "neither a text nor a list of messages: None"),
        ("sft", {"messages": MESSAGE}, "neither a text nor a list of messages"),
        ("sft", {"messages": "three"}, "neither a text nor a list of messages"),
        ("sft", {**SFT, "prompt": MESSAGE}, "neither a text nor a list of messages"),
        ("sft", {"messages": [{**MESSAGE, "tool_calls": [BAD_CALL]}] * 2}, "are no JSON object"),
        ("sft", {"messages": [USER, {**MESSAGE, "tool_calls": [CALL]}]}, "writes no tool calls"),
        (
            "sft",
            {"messages": [USER, {**MESSAGE, "content": None}]},
            "neither content nor tool_calls",
        ),
        ("sft", {"messages": [USER, {"from": "gpt", "value": "two"}]}, "a message of role None"),
        ("sft", {"prompt": [USER], "completion": [MESSAGE, USER, MESSAGE]}, "of role 'user'"),
        ("sft", {"prompt": [USER], "completion": [MESSAGE, TOOL, MESSAGE]}, "of role 'tool'"),
        ("preferences", {"chosen": [USER, MESSAGE, USER], "rejected": [USER]}, "of role 'user'"),
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
    assert str(told.value).startswith(f"{file}:1: ")
    assert says in str(told.value)
    assert "\n" not in str(told.value)
    assert exit_code_of(told.value) == 2


@pytest.mark.parametrize("form", FORMS)
def test_a_call_that_the_template_writes_is_trained(form: str, tmp_path: Path) -> None:
    tokenizer_of(FORMS[form]).save_pretrained(tmp_path)
    texts = Texts(tmp_path)
    spoken = texts.answer([USER], [MESSAGE], {})
    called = texts.answer([USER], [{**MESSAGE, "tool_calls": [{**CALL, "id": "call00001"}]}], {})
    assert len(called) > len(spoken)


@pytest.mark.long
def test_a_wrong_row_far_down_says_how_to_go_on(tmp_path: Path, tokenizer: Path) -> None:
    url, good = f"sqlite:///{tmp_path}/run.db", [SFT] * (PER_WRITE + 1)
    asked = ["import", "sft", str(tmp_path / "x.jsonl"), "--store", url, "--experiment", "run"]
    asked += ["--tokenizer", str(tokenizer)]
    rows_of(tmp_path / "x.jsonl", [*good, {**SFT, "prompt": None}])
    told = str(CliRunner().invoke(app, asked).exception)
    assert told.startswith(f"{tmp_path / 'x.jsonl'}:{len(good) + 1}: ")
    assert f"the {PER_WRITE} experiences before it are stored" in told
    assert "import the same again" in told
    rows_of(tmp_path / "x.jsonl", [*good, SFT])
    done = json.loads(CliRunner().invoke(app, [*asked, "--json"]).output)
    counts = {"written": 2, "duplicates": PER_WRITE, "batches": 1, "late": 0}
    assert done == {**counts, "left_out": []}
    assert trained(url, None) == len(good) + 1


def test_a_uid_of_verl_is_a_group_whatever_it_looks_like(tmp_path: Path, tokenizer: Path) -> None:
    uids = ["a", "b", "a", "c_0_0", "", None]
    path = rows_of(tmp_path / "1.jsonl", [{**VERL, "uid": uid} for uid in uids])
    found = [one.eid for one in read_verl(path, Texts(tokenizer), Rows("experience"))]
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


def imports(*asked: object) -> Result:
    return CliRunner().invoke(app, ["import", *map(str, asked)])


def test_a_last_line_that_is_torn_is_left_out_and_told(tmp_path: Path, tokenizer: Path) -> None:
    path = rows_of(tmp_path / "data" / "1.jsonl", [SFT, SFT])
    path.write_bytes(path.read_bytes() + b'\n{"prompt": "one \xc3')
    rows_of(tmp_path / "data" / "2.jsonl", [SFT])
    done = imports("sft", path.parent, "--store", tmp_path / "run.db", "--tokenizer", tokenizer)
    assert done.exit_code == 0, done.output
    assert "3 experiences in 1 batch written" in done.stdout
    assert "1 row left out" in done.stdout
    assert done.stderr.startswith(f"left out: {path}:3: no JSON in UTF-8 (")
    assert done.stderr.endswith(", it is torn\n")


def test_a_file_of_nothing_but_a_torn_line_is_refused_with_that_line(tmp_path: Path) -> None:
    path = tmp_path / "1.jsonl"
    path.write_text('{"prompt"')
    told = str(imports("sft", path, "--store", tmp_path / "run.db").exception)
    assert f"{path}: there is nothing to import" in told
    assert f"{path}:1: no JSON in UTF-8" in told


def test_bad_lines_are_counted_and_listed_where_they_shall_be_skipped(
    store_url: str, tmp_path: Path, tokenizer: Path
) -> None:
    path = tmp_path / "x.jsonl"
    bad = ["{", "[]", json.dumps({**SFT, "prompt": None}), '{"text": "\\ud83d"}', "\0\0"]
    good = [json.dumps({**SFT, "completion": word}) for word in ("one", "two", "three")]
    lines = [good[0], *bad[:2], "", good[1], *bad[2:], good[2]]
    path.write_text("\n".join(lines) + "\n")
    asked = ("sft", path, "--store", store_url, "--experiment", "run", "--tokenizer", tokenizer)
    assert "--skip-bad-lines leaves such rows out" in str(imports(*asked).exception)
    done = json.loads(imports(*asked, "--skip-bad-lines", "--json").stdout)
    left_out = done.pop("left_out")
    assert done == {"written": 3, "duplicates": 0, "batches": 1, "late": 0}
    assert [row.split(": ")[0] for row in left_out] == [
        f"{path}:{line}" for line in (2, 3, 6, 7, 8)
    ]
    assert [(one.eid.task, one.response_text) for one in _read(store_url)] == [
        *[(0, "one"), (3, "two"), (7, "three")]
    ]
    again = imports(*asked, "--skip-bad-lines")
    assert "3 there already, 5 rows left out" in again.stdout
    assert again.stderr.count("left out: ") == 5


def test_a_row_of_several_experiences_is_left_out_as_a_whole(
    sqlite_url: str, tmp_path: Path
) -> None:
    traces, wrong = tmp_path / "traces", episode(1, "a", 1.0)
    last = wrong["traces"][0]["nodes"][-1]
    wrong["traces"][0]["nodes"].append(  # a third branch
        {**last, "token_ids": [-1] * len(last["token_ids"])}
    )
    rows_of(traces / "stream.jsonl", [episode(1, "a", 0.0), wrong])
    asked = ("prime-rl", traces, "--store", sqlite_url, "--experiment", "run")
    assert "holds negative numbers" in str(imports(*asked).exception)
    assert imports(*asked, "--skip-bad-lines").exit_code == 0
    assert [(one.eid.run, one.eid.step) for one in _read(sqlite_url)] == [(0, 0), (0, 1)]


def test_two_contents_under_one_address_are_told_with_both_lines(
    store_url: str, tmp_path: Path, tokenizer: Path
) -> None:
    given = [{**VERL, "uid": f"a_{number}_0"} for number in range(3)]
    path = rows_of(tmp_path / "x.jsonl", [*given, {**given[1], "score": 0.0}])
    asked = ("verl", path, "--store", store_url, "--experiment", "run", "--tokenizer", tokenizer)
    told = str(imports(*asked).exception)
    assert told.startswith(f"{path}:2 and {path}:4: experience step-1/a/1/0/ comes twice")
    rows_of(path, given)
    assert imports(*asked).exit_code == 0
    rows_of(path, [*given[:2], {**given[2], "score": 0.0}])
    told = str(imports(*asked).exception)
    assert told.startswith(f"{path}:3: experience step-1/a/2/0/ is stored with other content")
