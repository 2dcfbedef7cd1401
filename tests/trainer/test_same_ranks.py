"""Ranks that each hold the whole model: they begin alike, and step it as one process would."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import anyio
import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from tests.trainer.data import CONFIG, policy, prepared
from tests.trainer.two_ranks import RankOfTwo
from trinity_buffer import open_replay_stream, open_train_stream
from trinity_buffer.algorithm import build
from trinity_buffer.demo.policy import TransformerCritic, TransformerPolicy
from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.trainer import trainer as trainers
from trinity_buffer.trainer.models import require_same_weights
from trinity_buffer.trainer.parallel import Processes, TorchProcesses
from trinity_buffer.trainer.requirements import stream_options
from trinity_buffer.trainer.trainer import Trainer, TrainerSettings

T = TypeVar("T")


class Averaging(RankOfTwo, TorchProcesses):
    """One of two threads that averages gradients as ranks of a process group do."""


class Wrapped(nn.Module):
    """A model of given weights."""

    def __init__(self, **weights: Tensor) -> None:
        super().__init__()
        for name, weight in weights.items():
            self.register_parameter(name, nn.Parameter(weight))


def of_both(ranks: list[Any], work: Callable[[int, Any], T]) -> list[T]:
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(work, range(2), ranks))


def test_a_weight_that_no_row_reaches_has_no_gradient_and_does_not_decay() -> None:
    models = [Wrapped(both=torch.ones(2), one=torch.ones(3), none=torch.ones(1)) for _ in range(2)]

    def stepped(at: int, rank: Averaging) -> dict[str, Tensor]:
        model: Any = models[at]
        model.both.grad = torch.full((2,), 1.0 + at)
        if at:
            model.one.grad = torch.full((3,), 4.0)
        weights = [*model.parameters()]
        rank.average_gradients(model, weights)
        torch.optim.SGD(weights, lr=0.5, weight_decay=0.5).step()
        return {name: weight.detach() for name, weight in model.named_parameters()}

    wanted = {"both": 1 - 0.5 * (1.5 + 0.5), "one": 1 - 0.5 * (2.0 + 0.5), "none": 1.0}
    for found in of_both(Averaging.pair(), stepped):
        assert {name: set(weight.tolist()) for name, weight in found.items()} == {
            name: {weight} for name, weight in wanted.items()
        }


def test_gradients_of_several_types_are_averaged_each_in_its_own() -> None:
    models = [
        Wrapped(wide=torch.ones(2), narrow=torch.ones(2, dtype=torch.bfloat16)) for _ in range(2)
    ]

    def averaged(at: int, rank: Averaging) -> list[tuple[torch.dtype, list[float]]]:
        weights = [*models[at].parameters()]
        for weight in weights:
            weight.grad = torch.full_like(weight, 1.0 + at)
        model: Any = models[at]  # of which its gradients alone are asked
        rank.average_gradients(model, weights)
        grads = [weight.grad for weight in weights if weight.grad is not None]
        return [(gradient.dtype, gradient.tolist()) for gradient in grads]

    for found in of_both(Averaging.pair(), averaged):
        assert found == [(torch.float32, [1.5, 1.5]), (torch.bfloat16, [1.5, 1.5])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_ranks_with_other_weights_are_refused_on_each(dtype: torch.dtype) -> None:
    of_both(RankOfTwo.pair(), lambda _, rank: require_same_weights(policy(0, dtype), rank))

    def refused(at: int, rank: Processes) -> None:
        with pytest.raises(InvalidArgumentError, match="different weights of a TransformerPolicy"):
            require_same_weights(policy(at, dtype), rank)

    of_both(RankOfTwo.pair(), refused)


class Drawing(TransformerPolicy):
    """A policy whose critic begins with random numbers of torch."""

    @override
    def new_critic(self) -> TransformerCritic:
        critic = super().new_critic()
        nn.init.normal_(critic.head.weight)
        return critic


def test_ranks_begin_with_one_critic_and_random_numbers_of_their_own(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm = build("ppo")
    anyio.run(prepared, sqlite_url, algorithm)
    gathered: list[Any] = []

    class First(Processes):
        world_size = 2

        @override
        def gather(self, value: T) -> list[T]:
            gathered.append(value)
            return [value, value]

    class Second(First):
        rank = 1

    heads, drawn = [], []
    for kind in (First, Second):
        monkeypatch.setattr(trainers, "processes_here", kind)
        # A stream of one process: that of rank 1 would wait for rank 0.
        monkeypatch.setattr(trainers, "require_same_ranks", lambda *_: None)
        with open_train_stream(
            sqlite_url, experiment="run", strategy=None, **stream_options(algorithm)
        ) as stream:
            settings = TrainerSettings(checkpoints=tmp_path, seed=5)
            state = Trainer(stream, Drawing(CONFIG), algorithm, settings).state
        drawn.append(float(torch.rand(())))
        critic: Any = state.critic
        heads.append(critic[0].head.weight)
    assert torch.equal(*heads)
    assert drawn[0] != drawn[1]
    # What each rank says of policy and critic, before the first step.
    assert len(gathered) == 4
    assert gathered[:2] == gathered[2:]


class Slow(TransformerPolicy):
    """Takes its time to be written."""

    @override
    def save(self, path: str | Path) -> None:
        time.sleep(0.3)
        super().save(path)


def test_no_rank_ends_before_the_last_step_is_committed(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next stream of one that did would count as a start anew, and end rank 0 in its commit."""
    algorithm = build("grpo")
    anyio.run(prepared, sqlite_url, algorithm)
    own = threading.local()
    monkeypatch.setattr(trainers, "processes_here", lambda: own.processes)

    def trained(rank: int, processes: Processes) -> list[str]:
        own.processes = processes
        with open_train_stream(
            sqlite_url,
            experiment="run",
            strategy="grpo",
            groups_per_step=2,
            rank=rank,
            world_size=2,
            **stream_options(algorithm),
        ) as stream:
            settings = TrainerSettings(checkpoints=tmp_path, max_steps=2)
            Trainer(stream, Slow(CONFIG), algorithm, settings).run()
            return sorted(file.parent.name for file in tmp_path.glob("step-*/state.json"))

    names = ["step-00000001", "step-00000002"]
    assert of_both(Averaging.pair(), trained) == [names, names]


@pytest.mark.parametrize(("rank", "ranks"), [(3, 1), (1, 1), (-1, 2), (2, 2)])
def test_a_replay_on_a_rank_that_there_is_not_is_refused(
    rank: int, ranks: int, sqlite_url: str
) -> None:
    """Its steps would have no rows."""
    anyio.run(prepared, sqlite_url, build("grpo"))
    with open_train_stream(sqlite_url, experiment="run", strategy="grpo") as stream:
        stream.commit(next(stream))
    with (
        open_replay_stream(sqlite_url, experiment="run", rank=rank, world_size=ranks) as replay,
        pytest.raises(InvalidArgumentError, match=f"rank={rank} of world_size={ranks}: ranks"),
    ):
        next(replay)


def test_a_trainer_of_one_process_takes_no_part_of_a_replay(
    sqlite_url: str, tmp_path: Path
) -> None:
    anyio.run(prepared, sqlite_url, build("grpo"))
    with open_train_stream(sqlite_url, experiment="run", strategy="grpo") as stream:
        stream.commit(next(stream))
    with (
        open_replay_stream(sqlite_url, experiment="run", world_size=2) as replay,
        pytest.raises(InvalidArgumentError, match="its stream was opened as rank 0 of 2"),
    ):
        Trainer(replay, policy(), build("grpo"), TrainerSettings(checkpoints=tmp_path))
