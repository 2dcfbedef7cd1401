"""Each import goes into training, and what is no such file is told with its place.

The files of Trinity-RFT in `dumps` are by the real package, 0.6.0 (`tests/outside/trinity-rft`).
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import pyarrow as pa
import pytest
import torch
from pyarrow import ipc, parquet
from safetensors.torch import load, save
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Metaspace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

import trinity_buffer as tb
from tests.integrations.conftest import WORDS
from tests.raw_store import dbapi2
from trinity_buffer.cli.main import app
from trinity_buffer.errors import ConflictingExperienceError, InvalidArgumentError
from trinity_buffer.integrations.imports import formats
from trinity_buffer.integrations.imports.formats import (
    FORMATS,
    Imported,
    import_file,
    plain,
    require_readable,
)
from trinity_buffer.integrations.imports.rows import Rows, Texts

DUMPS = Path(__file__).with_name("dumps")
PAIRS: dict[str, dict[str, Any]] = {
    "texts": {"prompt": "one two", "chosen": "three", "rejected": "four five"},
    "messages": {
        "prompt": [{"role": "user", "content": "one two"}],
        "chosen": [{"role": "assistant", "content": "three"}],
        "rejected": [{"role": "assistant", "content": "four five"}],
    },
    "no prompt": {
        "chosen": [
            {"role": "user", "content": "one two"},
            {"role": "assistant", "content": "three"},
        ],
        "rejected": [
            {"role": "user", "content": "one two"},
            {"role": "assistant", "content": "four five"},
        ],
    },
}
DEMONSTRATIONS: dict[str, dict[str, Any]] = {
    "texts": {"prompt": "one two", "completion": "three"},
    "messages": {"messages": PAIRS["no prompt"]["chosen"]},
}


def imported(url: str, name: str, path: Path, tokenizer: Path | None = None) -> Imported:
    async def main() -> Imported:
        async with tb.open_store(url) as store:
            return await import_file(store, "run", name, path, tokenizer=tokenizer)

    return anyio.run(main)


def rows_of(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Return ``path``, written as its name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(list(rows)), path)
    elif path.suffix == ".arrow":
        table = pa.Table.from_pylist(list(rows))
        with ipc.new_stream(path, table.schema) as file:
            file.write_table(table)
    else:
        lines = [json.dumps(row) for row in rows]
        path.write_text("\n".join(lines) if path.suffix == ".jsonl" else f"[{','.join(lines)}]")
    return path


def words(ids: torch.Tensor) -> str:
    return " ".join(WORDS[int(one)] for one in ids)


async def annotated(url: str) -> list[tb.Experience]:
    async with tb.open_store(url) as store:
        experiment = await store.experiment("run")
        await tb.run_strategy(experiment, "grpo")
        return [one async for one in experiment.read()]


def trained(url: str, strategy: str | None) -> int:
    """Train on everything that is stored; return how many rows that were."""
    count = 0
    with tb.open_train_stream(
        url, experiment="run", strategy=strategy, groups_per_step=1
    ) as stream:
        for step in stream:
            assert all(batch["action_mask"].any() for batch in step.microbatches)
            count += len(step.manifest.experiences)
            stream.commit(step)
    return count


def test_a_buffer_of_trinity_is_trained_as_it_was_recorded(sqlite_url: str) -> None:
    assert imported(sqlite_url, "trinity-rft", DUMPS / "trinity.db").written == 8
    again = imported(sqlite_url, "trinity-rft", DUMPS / "trinity.db")
    assert (again.written, again.duplicates, again.batches) == (0, 8, 2)
    given = list(formats.read_trinity(DUMPS / "trinity.db", Texts(None), Rows("experience")))
    found = anyio.run(annotated, sqlite_url)
    for one, other in zip(given, found, strict=True):
        assert one.eid == other.eid
        assert torch.equal(one.tokens, other.tokens)
        assert one.logprobs is not None
        assert other.logprobs is not None
        assert torch.equal(one.logprobs, other.logprobs)
        assert (one.reward, one.info, one.custom_fields) == (
            other.reward,
            other.info,
            other.custom_fields,
        )
    assert given[0].info["big"] == 2**40
    assert trained(sqlite_url, "grpo") == 8


def test_texts_of_trinity_are_tokenised(sqlite_url: str, tokenizer: Path) -> None:
    assert imported(sqlite_url, "trinity-rft", DUMPS / "trinity.jsonl", tokenizer).written == 8
    found = anyio.run(annotated, sqlite_url)
    assert words(found[0].tokens) == "one two three four four <e>"
    assert [one.prompt_length for one in found] == [3] * 8
    assert trained(sqlite_url, "grpo") == 8


def test_a_text_of_trinity_that_was_cut_off_has_no_end(
    sqlite_url: str, tmp_path: Path, tokenizer: Path
) -> None:
    row = {"eid": {"batch": "b", "task": 1, "run": 0, "step": 0}, "reward": 1.0}
    row |= {"prompt_text": "one two", "response_text": "three"}
    row["truncate_status"] = "response_truncated"
    path = rows_of(tmp_path / "x.jsonl", [row])
    assert imported(sqlite_url, "trinity-rft", path, tokenizer).written == 1
    (found,) = _read(sqlite_url)
    assert words(found.tokens) == "one two three"


@pytest.mark.parametrize("text", ["one two", "<user> one two"], ids=["without", "with"])
def test_a_prompt_in_plain_text_begins_as_where_it_is_generated_from(
    sqlite_url: str, tmp_path: Path, tokenizer: Path, text: str
) -> None:
    """Llama's begins with a token of its own, where the text does not begin with it already."""
    folder = shutil.copytree(tokenizer, tmp_path / "tokenizer")
    special = [("<user>", 1), ("<e>", 0)]
    begins = TemplateProcessing(single="<user> $A <e>", special_tokens=special)
    for name, more in {
        "tokenizer.json": {"post_processor": json.loads(begins.__getstate__())},
        "tokenizer_config.json": {"bos_token": "<user>"},
    }.items():
        held = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**held, **more}))
    path = rows_of(tmp_path / "x.jsonl", [{"prompt": text, "completion": "three"}])
    assert imported(sqlite_url, "sft", path, folder).written == 1
    (found,) = _read(sqlite_url)
    assert words(found.tokens) == "<user> one two three <e>"
    assert found.prompt_length == 3


def test_an_answer_that_holds_its_end_has_no_second_one(tokenizer: Path) -> None:
    texts = Texts(tokenizer)
    for said in ("three", "three <e>"):
        assert words(torch.tensor(texts.turn("one", said, {})["tokens"])) == "one three <e>"


def test_an_answer_in_plain_text_begins_with_no_blank_of_the_tokenizers(tmp_path: Path) -> None:
    """Llama 2's writes one before each text, which stands behind a prompt here."""
    vocabulary = {token: at for at, token in enumerate(["<e>", "▁", "a", "b", ":", "▁a", "▁b"])}
    inner = Tokenizer(BPE(vocabulary, [("▁", "a"), ("▁", "b")], unk_token="<e>"))
    inner.pre_tokenizer = Metaspace(prepend_scheme="first")
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<e>").save_pretrained(tmp_path)
    texts = Texts(tmp_path)
    assert texts.turn("a:", "b", {})["tokens"] == [5, 4, 3, 0]
    assert texts.turn("a:", " b", {})["tokens"] == [5, 4, 6, 0]


def test_an_answer_in_a_dump_of_verl_has_no_end_that_may_not_have_been_said(
    sqlite_url: str, tmp_path: Path, tokenizer: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Dumps hold no special tokens: an empty answer is known to have been one."""
    row = {"input": "one two", "score": 1.0, "step": 1}
    path = rows_of(tmp_path / "1.jsonl", [{**row, "output": said} for said in ("three", "")])
    assert imported(sqlite_url, "verl", path, tokenizer).written == 2
    assert [words(one.tokens) for one in _read(sqlite_url)] == ["one two three", "one two <e>"]
    (said,) = caplog.messages
    assert said.startswith(f"{path}: verl leaves special tokens out of its dumps")


def test_an_import_that_an_older_version_made_otherwise_goes_into_another_experiment(
    sqlite_url: str, tmp_path: Path, tokenizer: Path
) -> None:
    row = {"input": "one two", "score": 1.0, "step": 1}
    path = rows_of(tmp_path / "1.jsonl", [{**row, "output": "three <e>"}])
    imported(sqlite_url, "verl", path, tokenizer)
    rows_of(path, [{**row, "output": "three"}])
    with pytest.raises(ConflictingExperienceError, match=r"1\.jsonl.* version .*--experiment NAME"):
        imported(sqlite_url, "verl", path, tokenizer)


@pytest.mark.parametrize("named", [True, False], ids=["named", "by their input"])
def test_rollouts_of_verl_keep_their_groups(
    sqlite_url: str, tmp_path: Path, tokenizer: Path, named: bool
) -> None:
    for step in (2, 10):
        rows = [
            {
                "input": f"one {word}",
                "output": "three",
                "score": float(run),
                "step": step,
                "gts": "4",
                **({"uid": f"{word}_{run}_0"} if named else {}),
            }
            for word in ("two", "four")
            for run in range(2)
        ]
        rows_of(tmp_path / "dumps" / f"{step}.jsonl", rows)
    assert imported(sqlite_url, "verl", tmp_path / "dumps", tokenizer).written == 8
    found = anyio.run(annotated, sqlite_url)
    assert [one.info["model_version"] for one in found] == [1] * 4 + [9] * 4
    assert {one.info["gts"] for one in found} == {"4"}
    assert [one.eid.run for one in found] == [0, 1] * 4
    assert len({(one.eid.batch, one.eid.task) for one in found}) == 4
    assert trained(sqlite_url, "grpo") == 8


def episode(step: int, group: str, reward: float) -> dict[str, Any]:
    """Return what a line of prime-rl's stream holds: a question, an answer, and another answer."""
    nodes: list[dict[str, Any]] = [
        {"parent": None, "message": {"role": "user", "content": "?"}, "mask": [False] * 3},
        {"parent": 0, "message": {"role": "assistant", "content": "a"}, "mask": [False, True]},
        {"parent": 0, "message": {"role": "assistant", "content": "b"}, "mask": [True, True]},
    ]
    for at, node in enumerate(nodes):
        mask = node["mask"]
        node["token_ids"] = [10 * at + n for n in range(len(mask))]
        node["logprobs"] = [-0.5] * sum(mask)
    work = {"type": "train", "step": step, "policy": {"start": step - 1, "end": step}}
    rewards = {"right": {"score": reward, "weight": 2.0}, "absent": None}
    trace = {"id": f"{step}-{group}-{reward}", "nodes": nodes, "rewards": rewards}
    run = {"type": "train", "id": "r", "work": work}
    return {"id": f"e{reward}", "group": {"id": group}, "run": run, "traces": [trace]}


def test_episodes_of_prime_rl_are_trained(sqlite_url: str, tmp_path: Path) -> None:
    traces = tmp_path / "monitors" / "file" / "traces"
    given = [episode(3, group, float(n)) for group in "ab" for n in range(2)]
    looked_at = episode(3, "c", 0.0)
    looked_at["run"]["work"]["type"] = "eval"
    rows_of(traces / "stream" / "0.jsonl", [*given, looked_at])
    stream = {"index": 1, "advantages": [None, None, None, 0.25, -0.25]}
    update = {"trace_id": "3-a-1.0", "branches": [stream]}
    rows_of(traces / "annotations" / "orchestrator.jsonl", [update])
    rows_of(traces / "annotations" / "orchestrator.index.jsonl", [{"offset": 0}])
    assert imported(sqlite_url, "prime-rl", tmp_path).written == 8
    found = {one.eid.uid: one for one in anyio.run(annotated, sqlite_url)}
    one = found["step-3/a/1/1/"]
    assert one.tokens.tolist() == [0, 1, 2, 20, 21]
    assert (one.prompt_length, one.reward, one.info["model_version"]) == (3, 2.0, 2)
    assert one.advantages is not None
    assert one.advantages.tolist() == [0.25, -0.25]
    other = found["step-3/b/0/0/"]
    assert other.logprobs is not None
    assert (other.prompt_length, other.logprobs.tolist()) == (4, [-0.5])
    assert trained(sqlite_url, "grpo") == 8


def test_what_branches_share_is_trained_once_and_nothing_of_a_failed_trace(
    sqlite_url: str, tmp_path: Path
) -> None:
    given = episode(3, "a", 1.0)
    (trace,) = given["traces"]
    answers = trace["nodes"][1:]
    answers[1]["parent"] = 1
    trace["nodes"].append({**answers[1], "token_ids": [30, 31]})
    given["traces"].append({**trace, "ok": False, "errors": [{"type": "SandboxError"}]})
    rows_of(tmp_path / "stream" / "0.jsonl", [given])
    assert imported(sqlite_url, "prime-rl", tmp_path).written == 2
    one, other = _read(sqlite_url)
    assert one.tokens.tolist() == [0, 1, 2, 10, 11, 20, 21]
    assert one.action_mask is not None
    assert (one.prompt_length, one.action_mask.tolist()) == (4, [True] * 3)
    assert other.tokens.tolist() == [0, 1, 2, 10, 11, 30, 31]
    assert other.logprobs is not None
    assert (other.prompt_length, other.logprobs.tolist()) == (5, [-0.5, -0.5])


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_compaction_is_trained_only_if_its_agent_went_on_with_it(
    sqlite_url: str, tmp_path: Path, *, goes_on: bool
) -> None:
    given = episode(3, "a", 1.0)
    _, tried, other = given["traces"][0]["nodes"]
    tried["semantic_parents"] = [{"node": 0, "type": "compaction_attempt"}]
    if goes_on:
        other["semantic_parents"] = [{"node": 1, "type": "compaction"}]
    rows_of(tmp_path / "stream" / "0.jsonl", [given])
    assert imported(sqlite_url, "prime-rl", tmp_path).written == 1 + goes_on


def test_the_sampling_of_prime_rls_calls_is_that_of_their_tokens(
    sqlite_url: str, tmp_path: Path
) -> None:
    given = episode(3, "a", 1.0)
    hot = {"temperature": 0.7, "top_p": 1.0, "max_tokens": 9, "extra_body": {"min_p": 0.1}}
    given["traces"][0]["calls"] = [
        {"node": None, "sampling": {"temperature": 0.1}},
        {"node": 1, "sampling": {"temperature": 1.0, "logprobs": True}},
        {"node": 2, "sampling": hot},
    ]
    rows_of(tmp_path / "stream" / "0.jsonl", [given])
    assert imported(sqlite_url, "prime-rl", tmp_path).written == 2
    neutral, bent = (one.info.get("sampling_segments") for one in _read(sqlite_url))
    assert neutral is None
    assert bent == [{"begin": 3, "end": 5, "temperature": 0.7, "min_p": 0.1}]


def test_log_probs_that_prime_rl_lacks_are_not_zeros(sqlite_url: str, tmp_path: Path) -> None:
    given = episode(3, "a", 1.0)
    nodes = given["traces"][0]["nodes"]
    nodes[1]["logprobs"] = []
    rows_of(tmp_path / "stream" / "0.jsonl", [given])
    assert imported(sqlite_url, "prime-rl", tmp_path).written == 2
    assert [one.logprobs is None for one in _read(sqlite_url)] == [True, False]
    nodes[2]["logprobs"] = [-0.5]
    rows_of(tmp_path / "stream" / "0.jsonl", [given])
    with pytest.raises(InvalidArgumentError, match=r"2 sampled tokens and 1 log-probs"):
        imported(sqlite_url, "prime-rl", tmp_path)


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet", "saved/data-0.arrow"])
def test_pairs_are_trained(
    sqlite_url: str, tmp_path: Path, tokenizer: Path, kind: str, suffix: str
) -> None:
    path = rows_of(tmp_path / f"pairs{suffix}", [PAIRS[kind]] * 3)
    place = path.parent if path.suffix == ".arrow" else path
    assert imported(sqlite_url, "preferences", place, tokenizer).written == 3
    (first, *_) = (one for one in _read(sqlite_url))
    assert first.chosen is not None
    assert first.rejected is not None
    assert (words(first.chosen), words(first.rejected)) == ("three <e>", "four five <e>")
    whole = "one two" if kind == "texts" else "<user> one two <e> <assistant>"
    assert words(first.tokens) == whole
    assert trained(sqlite_url, None) == 3


@pytest.mark.parametrize("kind", DEMONSTRATIONS)
def test_demonstrations_are_trained(
    sqlite_url: str, tmp_path: Path, tokenizer: Path, kind: str
) -> None:
    path = rows_of(tmp_path / "sft.jsonl", [DEMONSTRATIONS[kind]] * 3)
    assert imported(sqlite_url, "sft", path, tokenizer).written == 3
    (first, *_) = (one for one in _read(sqlite_url))
    assert words(first.tokens[first.prompt_length :]) == "three <e>"
    assert trained(sqlite_url, None) == 3


TOOLS = [{"type": "function", "function": {"name": "three"}}]
CALLED = {
    "sft": {"messages": PAIRS["no prompt"]["chosen"]},
    "preferences": PAIRS["messages"],
    "trinity-rft": {
        "eid": {"batch": "b", "task": 1, "run": 0, "step": 0},
        "messages": PAIRS["no prompt"]["chosen"],
        "reward": 1.0,
    },
}
"""Format -> a row of messages."""


@pytest.mark.parametrize("name", CALLED)
@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)], ids=["list", "text"])
def test_tools_and_arguments_reach_the_chat_template(
    name: str, tools: Any, sqlite_url: str, tmp_path: Path, tokenizer: Path
) -> None:
    row = {**CALLED[name], "tools": tools, "chat_template_kwargs": {"word": "five"}}
    assert imported(sqlite_url, name, rows_of(tmp_path / "x.jsonl", [row]), tokenizer).written == 1
    (found,) = _read(sqlite_url)
    assert words(found.tokens).startswith("three five <user> one two <e> <assistant>")
    assert found.tools == TOOLS


@pytest.mark.parametrize("suffix", [".parquet", "saved/data-0.arrow"])
def test_keys_of_other_rows_reach_no_chat_template(
    suffix: str, sqlite_url: str, tmp_path: Path, tokenizer: Path
) -> None:
    """A table has one type for all rows, and null for the keys that a row lacks."""
    row = {**DEMONSTRATIONS["messages"], "tools": TOOLS}
    strict = [{"type": "function", "function": {"name": "three", "strict": True}}]
    other = {**DEMONSTRATIONS["messages"], "tools": strict}
    path = rows_of(tmp_path / f"x{suffix}", [row, other])
    imported(sqlite_url, "sft", path.parent if suffix != ".parquet" else path, tokenizer)
    first, second = _read(sqlite_url)
    assert first.tools == TOOLS  # what the template is given
    assert second.tools == strict


@pytest.mark.parametrize("name", CALLED)
@pytest.mark.parametrize("column", ["image", "images", "videos", "audio"])
def test_a_row_with_pictures_is_refused_by_file_and_line(
    name: str, column: str, sqlite_url: str, tmp_path: Path, tokenizer: Path
) -> None:
    row = {**CALLED[name], column: ["a.png"]}
    path = rows_of(tmp_path / "x.jsonl", [{**CALLED[name], column: []}, row])
    with pytest.raises(InvalidArgumentError, match=rf"x\.jsonl:2: .*it has {column}, and texts"):
        imported(sqlite_url, name, path, tokenizer)


@pytest.mark.parametrize("name", CALLED)
def test_a_content_part_that_is_no_text_is_refused_by_file_and_line(
    name: str, sqlite_url: str, tmp_path: Path, tokenizer: Path
) -> None:
    def with_parts(*parts: Any) -> dict[str, Any]:
        row: dict[str, Any] = json.loads(json.dumps(CALLED[name]))
        for place in ("messages", "prompt"):
            for message in row.get(place, ())[:1]:
                message["content"] = list(parts)
        return row

    text = {"type": "text", "text": "one two"}
    path = rows_of(tmp_path / "x.jsonl", [with_parts(text)])
    assert imported(sqlite_url, name, path, tokenizer).written == 1
    (found,) = _read(sqlite_url)
    assert words(found.tokens).startswith("<user> one two <e> <assistant>")
    path = rows_of(tmp_path / "x.jsonl", [with_parts(text, {"type": "image"})])
    with pytest.raises(
        InvalidArgumentError, match=r"x\.jsonl:1: .*holds a part 'image', which is no"
    ):
        imported(sqlite_url, name, path, tokenizer)


def test_an_episode_of_prime_rl_with_pictures_is_refused(sqlite_url: str, tmp_path: Path) -> None:
    seen = episode(3, "a", 1.0)
    part = {"type": "image_url", "image_url": {"url": "x"}}
    seen["traces"][0]["nodes"][0]["message"]["content"] = [part]
    rows_of(tmp_path / "stream" / "0.jsonl", [seen])
    with pytest.raises(InvalidArgumentError, match=r"0\.jsonl:1: .*holds a part 'image_url'"):
        imported(sqlite_url, "prime-rl", tmp_path)


def _read(url: str) -> list[tb.Experience]:
    async def main() -> list[tb.Experience]:
        async with tb.open_store(url, read_only=True) as store:
            return [one async for one in (await store.experiment("run")).read()]

    return anyio.run(main)


@pytest.mark.parametrize(
    ("name", "row", "says"),
    [
        ("preferences", {"chosen": "a"}, "x.jsonl:1: .*a pair has chosen and rejected"),
        ("preferences", {"chosen": "ab", "rejected": "ac"}, "there is no prompt"),
        ("sft", {"text": "a"}, "x.jsonl:1: .*a demonstration has messages"),
        ("verl", {"input": "a"}, "x.jsonl:1: .*this row lacks output, score, step, which"),
        ("trinity-rft", {"a": 1}, "x.jsonl:1: .*an experience of Trinity-RFT has an eid"),
        ("sft", DEMONSTRATIONS["texts"], "give --tokenizer FOLDER$"),
        ("sft", DEMONSTRATIONS["messages"], "give --tokenizer FOLDER$"),
        ("sft", [], "x.jsonl:1: a row must be a JSON object"),
    ],
)
def test_what_cannot_be_imported_is_told(
    sqlite_url: str, tmp_path: Path, name: str, row: Any, says: str
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps(row))
    with pytest.raises(InvalidArgumentError, match=says):
        imported(sqlite_url, name, path)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("x.json", b'{"a": 1}\n{"a"\n', "x.json:2: no JSON"),
        ("x.json", b'[{"a": 1},\n{"a"', "x.json:2: no JSON (Expecting ':' delimiter: column 5)"),
        ("x.jsonl", b'"\xff"\n', "x.jsonl:1: no JSON in UTF-8 ('utf-8' codec"),
        ("x.jsonl", '{"a": 1}\n'.encode("utf-16"), "x.jsonl:1: no JSON in UTF-8 ('utf-8' codec"),
        ("x.jsonl", b"[" * 100_000 + b"\n", "x.jsonl:1: no JSON in UTF-8 ("),
        ("x.jsonl", b"[]\n", "x.jsonl:1: a row must be a JSON object; --skip-bad-lines"),
        ("x.parquet", b"nothing", "x.parquet: it cannot be read ("),
        ("x.arrow", b"nothing", "x.arrow: it cannot be read ("),
    ],
)
def test_what_cannot_be_read_is_told(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InvalidArgumentError, match=re.escape(says).replace(r"\.\*", ".*")):
        list(Rows("sft").of(path))


def test_a_file_that_is_nested_too_deeply_is_told(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("[" * 100_000)
    with pytest.raises(InvalidArgumentError, match=r"x\.json: it cannot be read"):
        list(Rows("sft").of(tmp_path / "x.json"))


def test_one_split_of_a_saved_data_set_is_imported(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    for split in ("train", "test"):
        rows_of(tmp_path / split / "data-0.arrow", [{"a": split}])
    with pytest.raises(InvalidArgumentError, match="the splits train, test: name one of them"):
        list(Rows("sft").of(tmp_path))
    # Of a `map` over what was loaded from there.
    rows_of(tmp_path / "train" / "cache-0123456789abcdef.arrow", [{"a": "mapped"}])
    assert [row.held for row in Rows("sft").of(tmp_path / "train")] == [{"a": "train"}]
    for damaged in ("{", '{"splits": 3}', "{}", "[]"):
        (tmp_path / "dataset_dict.json").write_text(damaged)
        with pytest.raises(InvalidArgumentError, match=r"dataset_dict\.json: it cannot be read"):
            list(Rows("sft").of(tmp_path))
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train"]}')
    shutil.rmtree(tmp_path / "test")
    assert [row.held for row in Rows("sft").of(tmp_path)] == [{"a": "train"}]


@pytest.mark.parametrize(
    "test", ["test-00000-of-00001.parquet", "validation/0.parquet", "a-test.arrow"]
)
def test_a_folder_with_files_to_test_on_is_refused(tmp_path: Path, test: str) -> None:
    for name in ("train_a-0-of-2.parquet", "train_a-1-of-2.parquet", test):
        rows_of(tmp_path / "data" / name, [{"a": name}])
    with pytest.raises(InvalidArgumentError, match=r"the splits \w+, \w+: name a file"):
        list(Rows("sft").of(tmp_path))
    (tmp_path / "data" / test).unlink()
    assert len(list(Rows("sft").of(tmp_path))) == 2


def test_a_folder_with_files_that_are_packed_is_refused(tmp_path: Path) -> None:
    rows_of(tmp_path / "0.jsonl", [{"a": 0}])
    (tmp_path / "1.jsonl.gz").write_bytes(b"\x1f\x8b")
    with pytest.raises(InvalidArgumentError, match=r"1\.jsonl\.gz is packed: unpack it"):
        list(Rows("sft").of(tmp_path))
    rows_of(tmp_path / "1.jsonl", [{"a": 1}])  # as `zstd -d` and `gunzip -k` do
    assert [row.held["a"] for row in Rows("sft").of(tmp_path)] == [0, 1]


def test_rows_of_a_file_without_lines_are_counted(tmp_path: Path) -> None:
    path = rows_of(tmp_path / "x.json", [{"a": 1}, {"a": 2}])
    found = list(Rows("sft").of(path))
    assert found == [(0, f"{path}, row 1", {"a": 1}), (1, f"{path}, row 2", {"a": 2})]


@pytest.mark.parametrize("name", ["x.jsonl", "x.json"])
def test_blank_lines_and_a_mark_of_the_byte_order_are_passed_over(
    tmp_path: Path, name: str
) -> None:
    path = tmp_path / name
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\r\n \t\n{"a": 2}')
    found = list(Rows("sft").of(path))
    assert found == [(0, f"{path}:1", {"a": 1}), (1, f"{path}:4", {"a": 2})]


def test_a_mark_of_the_byte_order_before_a_list_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(b'\xef\xbb\xbf[{"a": 1}]')
    assert [row.held for row in Rows("sft").of(tmp_path / "x.json")] == [{"a": 1}]


def test_pairs_of_trinity_are_told_where_they_belong(tmp_path: Path) -> None:
    lines, file = tmp_path / "pairs.jsonl", tmp_path / "pairs.db"
    row = {"eid": {"batch": 1, "task": 1, "run": 1, "step": 0}, **PAIRS["texts"]}
    lines.write_text(json.dumps(row))
    shutil.copy(DUMPS / "trinity.db", file)
    with closing(dbapi2.connect(file)) as connection, connection:
        connection.create_function("paired", 1, _paired)
        names = connection.execute("SELECT name FROM sqlite_master WHERE name LIKE '%_blob'")
        for (name,) in names.fetchall():
            connection.execute(f'UPDATE "{name}" SET experience_bytes = paired(experience_bytes)')
    for path in (lines, file):
        with pytest.raises(InvalidArgumentError, match=r"chosen and rejected.*`preferences`"):
            require_readable("trinity-rft", path)
    del row["eid"]
    lines.write_text(json.dumps(row))
    with pytest.raises(InvalidArgumentError, match="--tokenizer"):  # it has what is asked for
        require_readable("preferences", lines)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ('UPDATE "{}" SET experience_bytes = cut(experience_bytes)', "this row cannot be imported"),
        ("UPDATE sqlite_master SET name = name || CAST(x'e4' AS TEXT) WHERE name = '{}'", "utf-8"),
    ],
)
def test_a_damaged_buffer_of_trinity_is_told(tmp_path: Path, change: str, says: str) -> None:
    file = tmp_path / "buffer.db"
    shutil.copy(DUMPS / "trinity.db", file)
    with closing(dbapi2.connect(file)) as connection, connection:
        connection.create_function("cut", 1, lambda blob: blob[:-1])
        connection.execute("PRAGMA writable_schema = ON")
        names = connection.execute("SELECT name FROM sqlite_master WHERE name LIKE '%_blob'")
        for (name,) in names.fetchall():
            connection.execute(change.format(name))
    with pytest.raises(InvalidArgumentError, match=says):
        require_readable("trinity-rft", file)


def test_what_an_import_does_not_need_of_a_buffer_may_be_damaged(tmp_path: Path) -> None:
    file = tmp_path / "buffer.db"
    shutil.copy(DUMPS / "trinity.db", file)
    with closing(dbapi2.connect(file)) as connection, connection:
        names = connection.execute("SELECT name FROM sqlite_master WHERE name LIKE '%_blob'")
        for table in [name.removesuffix("_blob") for (name,) in names.fetchall()]:
            connection.execute(f'ALTER TABLE "{table}" ADD COLUMN note TEXT')
            connection.execute(f"""UPDATE "{table}" SET note = CAST(x'e4' AS TEXT)""")
    require_readable("trinity-rft", file)


def _paired(blob: bytes) -> bytes:
    """Return an experience of Trinity-RFT that is a pair."""
    _, told, _ = formats.HEADER.unpack_from(blob, len(formats.MAGIC))
    start = len(formats.MAGIC) + formats.HEADER.size + told
    tensors = {**load(blob[start:]), **{f"0:{k}": torch.ones(2) for k in ("chosen", "rejected")}}
    return blob[:start] + save(tensors)


def test_a_pickle_that_calls_something_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"os\.system is no plain data"):
        plain(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(InvalidArgumentError, match="cannot be read"):
        plain(b"\x80\x05}\x94")


def test_the_help_names_every_format() -> None:
    told = " ".join(CliRunner().invoke(app, ["import", "--help"]).output.split())
    assert f"One of {', '.join(FORMATS)}." in told


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("text", [None, "[]"])
def test_what_cannot_be_imported_leaves_no_store_behind(
    tmp_path: Path, name: str, text: str | None
) -> None:
    path, store = tmp_path / "x.jsonl", tmp_path / "run.db"
    if text is not None:
        path.write_text(text)
    asked = ["import", name, str(path), "--store", str(store)]
    assert isinstance(CliRunner().invoke(app, asked).exception, InvalidArgumentError)
    assert not store.exists()


def test_a_bad_line_behind_a_good_one_leaves_no_store_behind(
    tmp_path: Path, tokenizer: Path
) -> None:
    path, store = rows_of(tmp_path / "x.jsonl", [DEMONSTRATIONS["texts"]]), tmp_path / "run.db"
    path.write_text(path.read_text() + "\n[]\n")
    asked = ["import", "sft", str(path), "--store", str(store), "--tokenizer", str(tokenizer)]
    error = CliRunner().invoke(app, asked).exception
    assert isinstance(error, InvalidArgumentError)
    assert "x.jsonl:2: a row must be a JSON object" in str(error)
    assert not list(tmp_path.glob("run.db*"))


def test_the_command_says_what_it_took(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/run.db"
    asked = ["import", "trinity-rft", str(DUMPS / "trinity.db"), "--store", url]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    assert "8 experiences in 2 batches" in done.output
    told = json.loads(CliRunner().invoke(app, [*asked, "--json"]).output)
    assert told == {"written": 0, "duplicates": 8, "batches": 2, "late": 0, "left_out": []}


def test_rows_that_a_sealed_import_gains_are_told(tmp_path: Path) -> None:
    traces = tmp_path / "run" / "monitors" / "file" / "traces"
    asked = ["import", "prime-rl", str(tmp_path / "run"), "--store", str(tmp_path / "run.db")]
    given = [episode(3, "a", float(n)) for n in range(3)]
    rows_of(traces / "stream" / "0.jsonl", given[:2])
    assert CliRunner().invoke(app, asked).exit_code == 0
    rows_of(traces / "stream" / "0.jsonl", given)
    grown = CliRunner().invoke(app, asked)
    assert grown.exit_code == 1
    assert "2 of them are of batches that an earlier import sealed" in grown.stderr
    assert "an --experiment of its own" in grown.stderr


@pytest.mark.parametrize(("name", "rows"), [("sft", DEMONSTRATIONS), ("preferences", PAIRS)])
def test_columns_that_are_not_imported_are_named(
    sqlite_url: str,
    tmp_path: Path,
    tokenizer: Path,
    caplog: pytest.LogCaptureFixture,
    name: str,
    rows: Mapping[str, Any],
) -> None:
    row = rows["texts"] | {"tools": None, "images": None, "source": None}
    path = rows_of(tmp_path / "rows.jsonl", [row, row | {"weight": 0.5, "source": "web"}])
    assert imported(sqlite_url, name, path, tokenizer).written == 2
    (said,) = caplog.messages
    columns = ", ".join(FORMATS[name].columns)
    assert said == f"{path}: the columns source, weight are not imported: {name} reads {columns}"
