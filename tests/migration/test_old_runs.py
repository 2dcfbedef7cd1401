"""A run that was trained before the log had heads is replayed as it was trained then.

Its store is ``trained-before-heads.db.gz``: the first version trained twelve steps of it; after a
migration another one trained twelve more. Whether the weights are those of that machine depends on
the processor, so they are compared with what the first version's formula gives here.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad
from typer.testing import CliRunner

from tests.migration.kept import STORES
from trinity_buffer.cli.main import app
from trinity_buffer.demo.policy import PolicyConfig, TransformerPolicy
from trinity_buffer.trainer.policy import TokenScores

OLD, EVERY = 12, 24


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "run.db"
    path.write_bytes(gzip.decompress((STORES / "trained-before-heads.db.gz").read_bytes()))
    return path


def replayed(store: Path, steps: str) -> str:
    done = CliRunner().invoke(
        app, ["replay", "--store", str(store), "--steps", steps, "--json"], catch_exceptions=False
    )
    digest: str = json.loads(done.stdout)["digest"]
    return digest


def formula(policy: TransformerPolicy, microbatch: Mapping[str, Any]) -> TokenScores:
    """Return the scores of padded rows as the first version computed them."""
    ids, there = microbatch["input_ids"], microbatch["attention_mask"]
    every = torch.log_softmax(policy.forward(ids).float()[:, :-1], -1)
    logprob = every.gather(-1, ids[:, 1:].long().unsqueeze(-1)).squeeze(-1)
    entropy = -(every.exp() * every).sum(-1)
    return TokenScores(*(pad(x, (1, 0)).where(there, 0.0) for x in (logprob, entropy)))


def test_an_old_run_is_replayed_from_the_logits_of_whole_micro_batches(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = replayed(store, f"1:{OLD}")
    with monkeypatch.context() as patched:
        patched.setattr(TransformerPolicy, "scores", formula)
        assert replayed(store, f"1:{OLD}") == found


def test_only_the_steps_from_before_the_heads_are(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    scores = TransformerPolicy.scores

    def noted(policy: TransformerPolicy, microbatch: Mapping[str, Any]) -> TokenScores:
        seen.append(policy.whole_logits)
        return scores(policy, microbatch)

    monkeypatch.setattr(TransformerPolicy, "scores", noted)
    replayed(store, f"1:{EVERY}")
    assert seen == sorted(seen, reverse=True)
    assert sum(seen) * EVERY == len(seen) * OLD


def _microbatches() -> list[dict[str, Tensor | int]]:
    ids = torch.tensor([[1, 4, 2, 3], [5, 3, 0, 0]])
    there = ids > 0
    limits = torch.tensor([0, 4, 6])
    return [
        {"input_ids": ids, "attention_mask": there},
        {"input_ids": ids[there], "cu_seqlens": limits, "max_seqlen": 4},
    ]


@pytest.mark.parametrize("layout", [0, 1], ids=["padded", "packed"])
def test_whole_logits_say_the_same_up_to_rounding(layout: int) -> None:
    microbatch = _microbatches()[layout]
    policy = TransformerPolicy(PolicyConfig(vocab_size=8, width=8, layers=1, heads=2), seed=3)
    sliced = (*policy.scores(microbatch), policy.entropy_changes(microbatch))
    policy.whole_logits = True
    whole = (*policy.scores(microbatch), policy.entropy_changes(microbatch))
    for one, other in zip(sliced, whole, strict=True):
        torch.testing.assert_close(one, other)
