"""A small random model of transformers with a tokenizer of bytes, made here: nothing is fetched."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from trinity_buffer.lazy import extra

ROLES = ("system", "user", "assistant", "tool")
END = "<|end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tiny_model(
    folder: Path, *, seed: int = 0, width: int = 64, layers: int = 2, heads: int = 4
) -> None:
    """Write a random model of the shape of Qwen3, with its tokenizer, into ``folder``.

    Its tokens are the 256 bytes, then one for the beginning of each role and one for the end of a
    message. What is there already is replaced.

    Raises:
        InvalidArgumentError: transformers is not installed.
    """
    transformers = extra("transformers", "hf")
    transformers.utils.logging.disable_progress_bar()  # of a file that is written at once
    making = folder.with_name(f"{folder.name}.making")
    shutil.rmtree(making, ignore_errors=True)
    tokenizer = _tokenizer()
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=width // heads,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        transformers.Qwen3ForCausalLM(config).save_pretrained(making)
    tokenizer.save_pretrained(making)
    shutil.rmtree(folder, ignore_errors=True)
    making.rename(folder)


def _tokenizer() -> Any:
    """Return a tokenizer whose token ids are the bytes of a text."""
    tokenizers, transformers = extra("tokenizers", "hf"), extra("transformers", "hf")
    letters = extra("transformers.convert_slow_tokenizer", "hf").bytes_to_unicode()
    vocabulary = {letter: byte for byte, letter in letters.items()}
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    bpe.add_special_tokens([END, *(f"<|{role}|>" for role in ROLES)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END,
        pad_token=END,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
