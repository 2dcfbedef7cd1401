"""Tiny random models of transformers, made here: nothing is downloaded.

A name of transformers is imported when it is first used, which takes three seconds: only a worker
that runs such a test waits for it.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

SHAPE: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}


def qwen2(seed: int = 0, **changes: Any) -> transformers.Qwen2ForCausalLM:
    """Return a model with a head of its own, unless ``tie_word_embeddings=True`` is given."""
    torch.manual_seed(seed)
    shape = SHAPE | {"tie_word_embeddings": False} | changes
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**shape))


def qwen3(seed: int = 0, **changes: Any) -> transformers.Qwen3ForCausalLM:
    """Return a model whose head is its embedding."""
    torch.manual_seed(seed)
    shape = SHAPE | {"tie_word_embeddings": True, "head_dim": 8} | changes
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape))
