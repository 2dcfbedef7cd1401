"""What a trainer keeps of a step: weights, optimizer, random numbers, manifests gone through.

Tensors are safetensors, everything else is JSON: a checkpoint of unknown origin cannot run code.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any, Generic, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from trinity_buffer.errors import CheckpointError, NonFiniteError
from trinity_buffer.pipeline.proof.checkpoint import (
    may_remove,
    read_gone_through,
    read_head,
    write_gone_through,
)
from trinity_buffer.pipeline.proof.gone_through import GoneThrough
from trinity_buffer.trainer.optimizer_state import OptimizerState
from trinity_buffer.trainer.policy import AnyPolicy, Critic, Trainable, all_finite
from trinity_buffer.trainer.random_numbers import random_state, restore_random
from trinity_buffer.trainer.sharded import opened

POLICY_FILE = "policy.safetensors"
OPTIMIZER = "optimizer"
CRITIC_FILE = "critic.safetensors"
CRITIC_OPTIMIZER = "critic_optimizer"
CRITIC_OPTIMIZER_FILE = f"{CRITIC_OPTIMIZER}.safetensors"
STATE_FILE = "state.json"


class OptimizerOf(Protocol):
    """Returns a fresh optimizer for a model."""

    def __call__(self, model: Trainable, *, is_critic: bool = False) -> torch.optim.Optimizer:
        """Return one for the policy, or for the critic."""
        ...


@dataclass(frozen=True, slots=True)
class TrainerState(Generic[AnyPolicy]):
    """A trainer between two gradient steps.

    Attributes:
        step: the last one that the weights went through.
        manifests: of all steps so far, in order, as the trainer itself saw them.
        critic: and its optimizer, where the algorithm uses one.
        coefficients: of the divergences, which may adapt from step to step.
        log_head: of the log, when that step was handed out; it proves the log up to there.
        random: state of torch's random numbers of each rank; empty: of this process, as it is.
    """

    policy: AnyPolicy
    optimizer: torch.optim.Optimizer
    step: int
    manifests: GoneThrough
    critic: tuple[Critic, torch.optim.Optimizer] | None = None
    coefficients: Mapping[str, float] = field(default_factory=dict)
    log_head: str = ""
    random: Sequence[torch.Tensor] = ()


def fresh_folder(root: Path, step: int) -> Path:
    """Return a new, empty folder for a checkpoint of ``step``.

    Never one that is there already: it may be of a process that was killed before its commit, or of
    another one that has taken over meanwhile and committed it.

    Raises:
        CheckpointError: none can be made there.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        for number in count(1):
            folder = root / (f"step-{step:08d}" + (f"-{number}" if number > 1 else ""))
            with suppress(FileExistsError):
                folder.mkdir()
                return folder
    except OSError as error:
        raise CheckpointError(
            f"no checkpoint of step {step} can be written to {root}: {error}; start again with a "
            "folder that can be written: training goes on from the last commit"
        ) from error
    raise AssertionError  # count() does not end


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Say in a sentence why the folder of a checkpoint cannot be written.

    Raises:
        CheckpointError: it goes, or is not here, while it is written; or the disk is full or fails.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        # The folder itself is the last to go: a file that is missing says enough.
        if folder.is_dir() and not isinstance(error, FileNotFoundError):
            raise CheckpointError(
                f"checkpoint {folder} cannot be written: {error}; make room on that disk, or "
                "choose another folder, and start again: training goes on from the last commit"
            ) from error
        raise CheckpointError(
            f"checkpoint {folder} was removed while it was written: a trainer of this name took "
            "over and has gone on; start again to resume from its last commit. Or ranks on several "
            "machines do not share the folder"
        ) from error


def require_finite(step: int, model: Trainable, optimizer: OptimizerState) -> None:
    """Refuse weights, and numbers of an optimizer, that are not finite."""
    finite = {
        "the weights": all_finite([*model.parameters()]),
        "the optimizer": optimizer.is_finite,
    }
    for what, is_finite in finite.items():
        if not is_finite:
            raise NonFiniteError(
                f"no checkpoint of step {step} was written: {what} of a {type(model).__name__} "
                "hold NaN or Inf; lower the learning rate or max_gradient_norm, and go on from the "
                "last checkpoint"
            )


def write_numbers(
    folder: Path, state: TrainerState[Any], kept: OptimizerState, more: Mapping[str, Any]
) -> None:
    """Write what is no tensor."""
    numbers = {
        "step": state.step,
        "optimizer": kept.groups,
        "optimizer_numbers": kept.numbers,
        "coefficients": dict(state.coefficients),
        **more,
    }
    (folder / STATE_FILE).write_text(json.dumps(numbers))
    write_gone_through(folder, state.manifests, state.log_head)


def random_of_ranks(state: TrainerState[Any]) -> dict[str, torch.Tensor]:
    """Return the state of the random numbers of each rank, by its name in a checkpoint."""
    states = state.random or [random_state()]
    return {_random_of(rank): one for rank, one in enumerate(states)}


_RANDOM = "rng"


def _random_of(rank: int) -> str:
    return f"{_RANDOM}.{rank}" if rank else _RANDOM  # one rank alone writes what it always wrote


def _restore_random(tensors: Mapping[str, torch.Tensor], rank: int, device: str) -> None:
    """Go on with the random numbers of ``rank``.

    A rank that there was not begins numbers of its own, which depend on rank 0's alone.
    """
    first, own = tensors[_RANDOM], tensors.get(_random_of(rank))
    if own is not None:
        restore_random(own, device)
        return
    digest = sha256(first.numpy().tobytes() + rank.to_bytes(4, "big")).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "big", signed=True))


def load_checkpoint(
    folder: Path,
    optimizer_of: OptimizerOf,
    policy: AnyPolicy,
    critic: Critic | None = None,
    *,
    rank: int = 0,
    takes_groups: bool = True,
    device: str = "cuda",
) -> TrainerState[AnyPolicy]:
    """Return the state in ``folder`` and restore torch's random numbers of ``rank``.

    Args:
        optimizer_of: returns the optimizer of a model.
        policy: of the kind that was saved; it takes the saved weights.
        critic: likewise, where one was saved.
        takes_groups: the policy's optimizer takes the saved settings, see `OptimizerState.restore`.
        device: on which is computed, see `random_state`.

    Raises:
        CheckpointError: a file is missing or cannot be read.
    """
    with ExitStack() as stack:
        try:
            state = json.loads((folder / STATE_FILE).read_text())
            tensors = stack.enter_context(opened(folder, OPTIMIZER))
            manifests = read_gone_through(folder).after()
            trains_critic = "critic_optimizer" in state
            of_critic = load_file(folder / CRITIC_OPTIMIZER_FILE) if trains_critic else {}
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise CheckpointError(
                f"checkpoint {folder} cannot be read: {error}; resume from an older step"
            ) from error
        policy.restore(folder / policy.file_name)
        optimizer = optimizer_of(policy)
        _restore_random(tensors, rank, device)
        numbers = state.get("optimizer_numbers", {})  # older checkpoints have none
        kept = OptimizerState(tensors.without(_RANDOM), numbers, state["optimizer"])
        kept.restore(optimizer, takes_groups=takes_groups)
    trained = None
    if trains_critic and critic is not None:
        critic.restore(folder / CRITIC_FILE)
        trained = (critic, optimizer_of(critic, is_critic=True))
        kept = OptimizerState(of_critic, {}, state["critic_optimizer"])
        kept.restore(trained[1], takes_groups=False)
    coefficients = state.get("coefficients", {})
    step, head = state["step"], read_head(folder).hex()
    return TrainerState(policy, optimizer, step, manifests, trained, coefficients, head)


def read_step(folder: Path) -> int:
    """Return the gradient step that the weights in ``folder`` went through last.

    Raises:
        CheckpointError: this folder is no checkpoint of a trainer.
    """
    try:
        return int(json.loads((folder / STATE_FILE).read_text())["step"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder} holds no {STATE_FILE} of a trainer: {error}") from error


_NAME = re.compile(r"step-\d+(-\d+)?")


def remove_old(root: Path, *, keep: int, committed: Path) -> None:
    """Delete the checkpoints up to ``committed``, but those of the newest ``keep`` steps.

    One whose policy somebody is loading stays for now.

    Args:
        committed: the one that was committed last; it stays, those that were begun before it for
            the same step go.
    """
    last = _place_of(committed)
    found = (folder for folder in root.glob("step-*") if _NAME.fullmatch(folder.name))
    places = {folder: _place_of(folder) for folder in found}
    # None: who took over meanwhile has gone on, and tidied up to where it is.
    kept = sorted({step for step, _ in places.values() if step <= last[0]})[-keep:]
    for folder, (step, number) in places.items():
        gone = kept and (step < kept[0] or (step == last[0] and number < last[1]))
        # What an explorer is loading goes after a later commit.
        if gone and all(may_remove(path) for path in folder.glob("*")):
            # A process that was fenced may be writing into it still: what is left goes next time.
            shutil.rmtree(folder, ignore_errors=True)


def _place_of(folder: Path) -> tuple[int, int]:
    """Return the step of a checkpoint, and which one of those of that step it is."""
    _, step, *number = folder.name.split("-")
    return int(step), int(number[0]) if number else 1
