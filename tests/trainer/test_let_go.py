"""A trainer that commits every few steps holds the tensors of one."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

from tests.handles import SyncTrainStream, TrainStep
from tests.trainer.data import policy, prepared
from trinity_buffer import open_train_stream
from trinity_buffer.algorithm import build
from trinity_buffer.trainer.trainer import Trainer, TrainerSettings


def test_what_was_trained_and_is_not_committed_holds_no_tensors(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[weakref.ref[torch.Tensor]] = []
    held = []

    def noted(self: SyncTrainStream) -> TrainStep:
        step = following(self)
        (microbatch,) = step.microbatches
        seen.append(weakref.ref(microbatch["input_ids"]))
        return step

    def measure(_: int) -> dict[str, float]:
        held.append(sum(one() is not None for one in seen))
        return {}

    following = SyncTrainStream.__next__
    monkeypatch.setattr(SyncTrainStream, "__next__", noted)
    anyio.run(prepared, sqlite_url, build("ppo"))
    options: dict[str, Any] = {"strategy": None, "groups_per_step": 1, "max_tokens": 24}
    with open_train_stream(sqlite_url, experiment="run", consumer="t", **options) as stream:
        settings = TrainerSettings(checkpoints=tmp_path, max_steps=3, commit_every_steps=3)
        Trainer(stream, policy(), build("ppo"), settings).run(measure=measure)
    assert held == [1, 1, 1]
