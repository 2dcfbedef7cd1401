"""What Trinity-RFT's two storages have in common: configuration, experiences, collation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from trinity.common import experience as trinity
from trinity.common.config import StorageConfig

from benchmarks.peers.rollouts import PROMPT, Array, Batch, Rollout


def storage(kind: str, path: str, name: str) -> Any:
    """Return the configuration of a storage: ``"sql"`` in this process, ``"queue"`` in Ray's."""
    return StorageConfig(
        name=name,
        storage_type=kind,
        path=path,
        schema_type="experience",
        batch_size=256,
        wrap_in_ray=kind != "sql",
        ray_namespace="peers",
        max_read_timeout=60,
    )


def sql(folder: Path, name: str) -> Any:
    """Return the configuration of an SQLite file in a folder."""
    return storage("sql", f"sqlite:///{folder / name}.db", name)


def experiences(some: Sequence[Rollout], advantages: Array | None) -> list[Any]:
    """Return rollouts as Trinity-RFT has them, with their advantages where these are known."""
    values = [None] * len(some) if advantages is None else advantages.tolist()
    return [_experience(one, value) for one, value in zip(some, values, strict=True)]


def _experience(one: Rollout, advantage: float | None) -> Any:
    mask = torch.from_numpy(one.mask)
    advantages = None if advantage is None else advantage * mask
    return trinity.Experience(
        eid=trinity.EID(batch=0, task=one.task, run=one.run, step=0),
        tokens=torch.from_numpy(one.tokens),
        logprobs=torch.from_numpy(one.logprobs),
        action_mask=mask,
        reward=one.reward,
        prompt_length=PROMPT,
        response_text=one.text,
        info={"model_version": 0, "written_at": one.written_at},
        advantages=advantages,
        returns=None if advantages is None else advantages.clone(),
    )


def batch(some: Sequence[Any]) -> Batch:
    """Return experiences as a trainer gets them."""
    prompt = max(one.prompt_length for one in some)
    answer = max(len(one.tokens) - one.prompt_length for one in some)
    return Batch(
        trinity.gather_token_ids(some, prompt, answer, 0),
        trinity.gather_response_attrs(some, "logprobs", answer),
        trinity.gather_action_masks(some, answer),
        trinity.gather_response_attrs(some, "advantages", answer),
        [one.info["written_at"] for one in some],
    )
