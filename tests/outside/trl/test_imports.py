"""Data sets that the real package wrote, imported: pairs and demonstrations as TRL takes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl.data_utils import extract_prompt, is_conversational

import trinity_buffer as tb
from trinity_buffer.integrations.imports.formats import import_file

WORDS = ["<e>", "<user>", "<assistant>", "one", "two", "three", "four", "five"]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} <e> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


PAIR = {
    "chosen": [said("user", "one two"), said("assistant", "three")],
    "rejected": [said("user", "one two"), said("assistant", "four five")],
}
SHAPES = {"implicit": PAIR, "explicit": extract_prompt(PAIR)}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    vocabulary = {word: at for at, word in enumerate(WORDS)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<e>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<e>")
    made.chat_template = TEMPLATE
    made.save_pretrained(folder)
    return folder


def written(rows: list[dict[str, Any]], folder: Path, kind: str) -> Path:
    made = Dataset.from_list(rows)
    path = folder / f"set.{kind}"
    if kind == "saved":
        made.save_to_disk(path)
    elif kind == "parquet":
        made.to_parquet(path)
    else:
        made.to_json(path)
    return path


async def imported(url: str, name: str, path: Path, tokenizer: Path) -> list[tb.Experience]:
    async with tb.open_store(url) as store:
        await import_file(store, "run", name, path, tokenizer=tokenizer)
        return [one async for one in (await store.experiment("run")).read()]


@pytest.mark.parametrize("kind", ["saved", "parquet", "jsonl"])
@pytest.mark.parametrize("shape", SHAPES)
def test_their_pairs_are_read(tmp_path: Path, tokenizer: Path, shape: str, kind: str) -> None:
    assert is_conversational(SHAPES[shape])
    path = written([SHAPES[shape]] * 5, tmp_path, kind)
    found = anyio.run(imported, f"sqlite:///{tmp_path}/run.db", "preferences", path, tokenizer)
    assert len(found) == 5
    for one in found:
        texts = [
            " ".join(WORDS[at] for at in ids) for ids in (one.tokens, one.chosen, one.rejected)
        ]
        assert texts == ["<user> one two <e> <assistant>", "three <e>", "four five <e>"]


@pytest.mark.parametrize("kind", ["saved", "parquet", "jsonl"])
def test_their_demonstrations_are_read(tmp_path: Path, tokenizer: Path, kind: str) -> None:
    path = written([{"messages": PAIR["chosen"]}] * 5, tmp_path, kind)
    found = anyio.run(imported, f"sqlite:///{tmp_path}/run.db", "sft", path, tokenizer)
    texts = [" ".join(WORDS[at] for at in one.tokens[one.prompt_length :]) for one in found]
    assert texts == ["three <e>"] * 5
