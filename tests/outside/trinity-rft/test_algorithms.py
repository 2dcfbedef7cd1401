"""Trinity's own algorithm code on our names, and our losses under Trinity's own policy loss."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import trinity.algorithm
from tensordict import TensorDict
from trinity.common.config import AlgorithmConfig

from trinity_buffer.algorithm import ENTROPY_LOSS_FN, KL_FN, POLICY_LOSS_FN

THEIRS = Path(trinity.algorithm.__file__).parent
FILES = sorted(THEIRS.rglob("*.py"))
ROWS, WIDTH = 4, 5
RENAMED = {
    r"\btrinity\.algorithm\b": "trinity_buffer.algorithm",
    r"\btrinity\.common\.experience\b": "trinity_buffer",
}


def renamed(file: Path, folder: Path) -> Any:
    """Return the module of ``file`` with our names in place of Trinity's."""
    text = file.read_text()
    for theirs, ours in RENAMED.items():
        text = re.sub(theirs, ours, text)
    name = "renamed_" + "_".join(file.relative_to(THEIRS.parent).with_suffix("").parts)
    copy = folder / f"{name}.py"
    copy.write_text(text)
    spec = importlib.util.spec_from_file_location(name, copy)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_there_are_the_files_that_we_claim() -> None:
    assert len(FILES) == 44


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(THEIRS).as_posix())
def test_a_file_of_trinitys_algorithms_runs_on_our_names(file: Path, tmp_path: Path) -> None:
    renamed(file, tmp_path)


@pytest.mark.parametrize("name", POLICY_LOSS_FN.names())
def test_our_loss_runs_under_trinitys_policy_loss(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = renamed(THEIRS.parent / "trainer" / "verl" / "losses.py", tmp_path)
    monkeypatch.setattr(module, "no_padding_2_padding", lambda values, _: values)
    args = POLICY_LOSS_FN.get(name).default_args()
    if name in ("mix", "mix_chord"):
        args |= {"train_batch_size_usual": 2, "train_batch_size_expert": 2}
    config = AlgorithmConfig(
        policy_loss_fn=name,
        policy_loss_fn_args=args,
        kl_loss_fn="k2",
        kl_loss_fn_args=KL_FN.get("k2").default_args(),
        loss_agg_mode="token-mean",
        entropy_loss_fn="mix" if name.startswith("mix") else "default",
        entropy_loss_fn_args=ENTROPY_LOSS_FN.get("default").default_args(),
    )
    draw = torch.Generator().manual_seed(0)
    batch = {
        key: -torch.rand(ROWS, WIDTH, generator=draw)
        for key in ("old_log_probs", "ref_log_prob", "advantages", "returns", "values")
    }
    batch["response_mask"] = torch.ones(ROWS, WIDTH, dtype=torch.long)
    batch["expert_mask"] = torch.tensor([False, False, True, True])
    batch["step"] = torch.ones(ROWS, dtype=torch.int32)
    logprob = -torch.rand(ROWS, WIDTH, generator=draw)
    logprob.requires_grad_()
    loss_of = module.build_trinity_loss(config)
    found, metrics = loss_of(
        {"log_probs": logprob, "entropy": torch.rand(ROWS, WIDTH, generator=draw)},
        Padded(batch, batch_size=ROWS),
    )
    found.backward()
    assert logprob.grad is not None
    assert bool(logprob.grad.isfinite().all())
    assert all(isinstance(value, float) for value in metrics.values())
    assert {"actor/kl_loss", "actor/entropy_loss", "final_loss"} <= metrics.keys()


class Padded(TensorDict):  # type: ignore[misc]
    """Tensors that are padded already: verl's nested ones need a GPU's kernels."""

    def to_padded_tensor(self, *_: object, **__: object) -> TensorDict:
        return self
