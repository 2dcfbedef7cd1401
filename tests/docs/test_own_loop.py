"""The loop that the page about training prints resumes, and explorers follow its weights."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

import trinity_buffer as tb
from trinity_buffer.algorithm import build
from trinity_buffer.demo.tiny_model import make_tiny_model
from trinity_buffer.explorer.local_model import load_causal_lm

PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
(LOOP,) = re.findall(
    r"^```python\n(from pathlib import Path\n\nimport torch, trinity.*?)^```",
    PAGE,
    re.DOTALL | re.MULTILINE,
)

(LOSS,) = re.findall(r"`loss, metrics = (build\(.*batch\))`", PAGE)

Loss = Callable[[torch.nn.Module, Any], torch.Tensor]


def loss_of(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    scores = tb.token_scores(model, batch).logprob
    loss: torch.Tensor = -(scores * batch["advantages"] * batch["action_mask"]).sum()
    return loss


def train(loss: Loss, url: str, folder: Path, start: Path, **options: int) -> None:
    """Run the printed loop."""
    names: dict[str, Any] = {"my_loss": loss}
    exec(LOOP, names)
    names["train"](start, url, folder, **options)


async def fill(url: str) -> None:
    said: dict[str, Any] = {"tokens": [5, 7, 9, 2], "prompt_length": 2, "logprobs": [-0.1, -0.2]}
    async with tb.open_store(url) as store:
        experiment = await store.experiment("sort", config={"rollouts_per_group": 4})
        eids = [tb.EID("b", task, run) for task in range(8) for run in range(4)]
        rollouts = [tb.Experience(eid=eid, reward=float(eid.run % 2), **said) for eid in eids]
        await experiment.writer("e0").write(rollouts)
        await tb.run_strategy(experiment, "grpo")


def weights(url: str) -> tuple[int, Any]:
    """Return the version that explorers are offered, and what they generate with then."""

    async def newest() -> tuple[int, str]:
        async with tb.open_store(url) as store:
            policy = await (await store.experiment("sort")).newest_policy()
            assert policy is not None
            return policy.version, policy.uri

    version, uri = anyio.run(newest)
    return version, load_causal_lm(uri).state_dict()


@pytest.mark.long
def test_the_loop_of_the_page_goes_on_from_what_it_saved_and_explorers_follow(
    tmp_path: Path,
) -> None:
    make_tiny_model(start := tmp_path / "start", width=16, layers=1, heads=2)
    urls = [f"sqlite:///{tmp_path}/{name}.db" for name in ("whole", "killed")]
    for url in urls:
        anyio.run(fill, url)
    train(loss_of, urls[0], tmp_path / "whole", start)
    steps: list[int] = []

    def dying(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        steps.append(1)
        if len(steps) == 3:  # the third step is not saved
            raise KeyboardInterrupt
        return loss_of(model, batch)

    killed = tmp_path / "killed"
    with pytest.raises(KeyboardInterrupt):
        train(dying, urls[1], killed, start)
    assert weights(urls[1])[0] == 2
    train(loss_of, urls[1], killed, start)
    assert sorted(path.name for path in killed.glob("step-*")) == [
        f"step-{n}" for n in (1, 2, 3, 4)
    ]
    (version, again), (_, whole) = weights(urls[1]), weights(urls[0])
    assert version == 4
    assert all(torch.equal(again[name], weight) for name, weight in whole.items())


@pytest.mark.parametrize(("save_every", "saved"), [(2, (2, 4)), (3, (3, 4))])
def test_the_loop_of_the_page_commits_its_last_step(
    save_every: int, saved: tuple[int, ...], tmp_path: Path, sqlite_url: str
) -> None:
    make_tiny_model(start := tmp_path / "start", width=16, layers=1, heads=2)
    anyio.run(fill, sqlite_url)
    for _ in range(2):  # again: nothing is left
        train(loss_of, sqlite_url, tmp_path / "made", start, save_every=save_every)
    assert sorted((tmp_path / "made").iterdir()) == [tmp_path / "made" / f"step-{n}" for n in saved]
    assert weights(sqlite_url)[0] == saved[-1]


async def fill_unevenly(url: str) -> None:
    async with tb.open_store(url) as store:
        experiment = await store.experiment("sort", config={"rollouts_per_group": 4})
        rows = [
            tb.Experience(
                eid=tb.EID("b", task, run),
                tokens=range(3, 6 + run + 3 * task),
                prompt_length=2,
                logprobs=[-0.1] * (1 + run + 3 * task),
                reward=float(run == 0),
            )
            for task in range(2)
            for run in range(4)
        ]
        await experiment.writer("e0").write(rows)
        await tb.run_strategy(experiment, "grpo")


def test_the_loss_of_the_page_has_one_gradient_however_a_step_is_cut(
    tmp_path: Path, sqlite_url: str
) -> None:
    make_tiny_model(tmp_path, width=16, layers=1, heads=2)
    model = load_causal_lm(tmp_path)
    anyio.run(fill_unevenly, sqlite_url)
    made: list[tuple[int, torch.Tensor]] = []
    for layout in ("padded", "packed"):
        for tokens in (None, 20):
            with tb.open_train_stream(
                sqlite_url,
                experiment="sort",
                strategy="grpo",
                consumer=f"{layout}-{tokens}",
                groups_per_step=2,
                layout=layout,
                tokens_per_microbatch=tokens,
            ) as stream:
                step = next(stream)
                for batch in step.microbatches:
                    names = {"build": build, "tb": tb, "model": model, "batch": batch}
                    eval(LOSS, names)[0].backward()
            gradient = torch.cat([one.grad.flatten() for one in model.parameters()])
            made.append((len(step.microbatches), gradient))
            model.zero_grad()
    (pieces, whole), *others = made
    assert pieces == 1
    assert [count > 1 for count, _ in others] == [True, False, True]
    for _, gradient in others:
        assert (gradient - whole).abs().max() <= 1e-4 * whole.abs().max()
