"""The loop that the page about training prints resumes with the weights of an undisturbed one."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

import trinity_buffer as tb

PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
(LOOP,) = re.findall(
    r"^```python\n(import torch, trinity_buffer.*?)^```", PAGE, re.DOTALL | re.MULTILINE
)

Loss = Callable[[torch.nn.Module, Any], torch.Tensor]


def loss_of(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    scores = model(batch["input_ids"]).squeeze(-1)
    loss: torch.Tensor = (scores * batch["advantages"] * batch["action_mask"]).sum()
    return loss


def train(loss: Loss, url: str, folder: Path) -> dict[str, torch.Tensor]:
    """Run the printed loop in a fresh model; return its weights."""
    names: dict[str, Any] = {"my_loss": loss, "Path": Path}
    exec(LOOP, names)
    torch.manual_seed(0)
    model = torch.nn.Embedding(16, 1)
    names["train"](model, url, folder)
    return model.state_dict()


async def fill(url: str) -> None:
    said: dict[str, Any] = {"tokens": [5, 7, 9, 2], "prompt_length": 2, "logprobs": [-0.1, -0.2]}
    async with tb.open_store(url) as store:
        experiment = await store.experiment("sort", config={"rollouts_per_group": 4})
        eids = [tb.EID("b", task, run) for task in range(8) for run in range(4)]
        rollouts = [tb.Experience(eid=eid, reward=float(eid.run % 2), **said) for eid in eids]
        await experiment.writer("e0").write(rollouts)
        await tb.run_strategy(experiment, "grpo")


def test_the_loop_of_the_page_goes_on_from_what_it_saved(tmp_path: Path) -> None:
    urls = [f"sqlite:///{tmp_path}/{name}.db" for name in ("whole", "killed")]
    for url in urls:
        anyio.run(fill, url)
    (tmp_path / "whole").mkdir()
    whole = train(loss_of, urls[0], tmp_path / "whole")
    steps: list[int] = []

    def dying(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        steps.append(1)
        if len(steps) == 4:  # the third step is trained, and not saved
            raise KeyboardInterrupt
        return loss_of(model, batch)

    with pytest.raises(KeyboardInterrupt):
        train(dying, urls[1], tmp_path)
    again = train(loss_of, urls[1], tmp_path)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-2.pt", "step-4.pt"]
    assert all(torch.equal(again[name], whole[name]) for name in whole)
