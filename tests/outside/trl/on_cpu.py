"""TRL's asynchronous trainer on the processor: all of it is TRL's but the kernel of the attention.

That kernel comes from a hub and wants a GPU. What stands here in its place is causal attention over
the packed row as it lies there, so that numbers mean nothing and all else is as ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import trl.experimental.async_grpo.async_grpo_trainer as module
from datasets import Dataset
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl.experimental.async_grpo.packing import TREE_ATTENTION

from tests.outside.trl.test_grpo_trainer import fresh_model, tokenizer


def attention(_: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return what attends to everything before it."""
    heads = query.shape[1] // key.shape[1]
    key, value = (one.repeat_interleave(heads, 1) for one in (key, value))
    found = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    return found.transpose(1, 2).contiguous(), None


def register() -> None:
    """Stand in for `packing.register_tree_attention`."""
    AttentionInterface.register(TREE_ATTENTION, attention)
    AttentionMaskInterface.register(TREE_ATTENTION, lambda **_: None)


class NoTransfer:
    """Brings no weights anywhere: the store has the rollouts."""

    def init_weight_transfer(self) -> None: ...

    def pause(self) -> None: ...

    def send_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        for _ in weights:
            pass

    def resume(self) -> None: ...

    def destroy(self) -> None: ...


def settings(folder: Path, **changes: Any) -> AsyncGRPOConfig:
    """Return arguments of steps of 16 rows, in two micro-batches; every second one is saved."""
    given: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "token_budget": 0,
        "max_steps": 1000,
        "save_steps": 2,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "dtype": "float32",
        "disable_tqdm": True,
        "gradient_checkpointing": False,
    }
    return AsyncGRPOConfig(**given | changes)


def trainer_of(rollouts: Any, args: AsyncGRPOConfig, model: Path, *callbacks: Any) -> Any:
    """Return the trainer, with ``rollouts`` as its worker and its callback."""
    if not model.exists():
        fresh = fresh_model()
        fresh.generation_config.eos_token_id = 1
        fresh.save_pretrained(model)
        tokenizer().save_pretrained(model)
    module.VLLMClient = lambda *_: None
    module.get_peak_flops_per_device = lambda *_: None  # asks for the name of a GPU
    module.register_tree_attention = register
    return AsyncGRPOTrainer(
        str(model),
        reward_funcs=lambda *_, **__: [0.0],
        args=args,
        processing_class=tokenizer(),
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": "x"}]]}),
        rollout_worker=rollouts,
        weight_transfer=NoTransfer(),
        callbacks=[rollouts, *callbacks],
    )
