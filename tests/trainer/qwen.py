"""Tiny random models of transformers, made here: nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

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


def qwen2(seed: int = 0, **changes: Any) -> Qwen2ForCausalLM:
    """Return a model with a head of its own, unless ``tie_word_embeddings=True`` is given."""
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(Qwen2Config(**(SHAPE | {"tie_word_embeddings": False} | changes)))


def qwen3(seed: int = 0, **changes: Any) -> Qwen3ForCausalLM:
    """Return a model whose head is its embedding."""
    torch.manual_seed(seed)
    shape = SHAPE | {"tie_word_embeddings": True, "head_dim": 8}
    return Qwen3ForCausalLM(Qwen3Config(**(shape | changes)))
