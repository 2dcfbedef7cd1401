"""A tokenizer of a few words, with a chat template."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

WORDS = ["<e>", "<user>", "<assistant>", *["one", "two", "three", "four", "five"]]
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
    "{% if word %}{{ word }} {% endif %}"
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} <e> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    inner = Tokenizer(WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="<e>"))
    inner.pre_tokenizer = WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<e>")
    made.chat_template = TEMPLATE
    made.save_pretrained(folder)
    return folder
