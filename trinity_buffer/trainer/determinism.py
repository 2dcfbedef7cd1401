"""Steps that come out bit for bit again: what torch is asked for, and what it cannot do.

On CUDA, ``torch.use_deterministic_algorithms(True)`` leaves out cuDNN's attention, makes the
backward passes of flash and memory-efficient attention deterministic (with ``warn_only=True`` it
does not), and refuses every operation that has no deterministic form.

How far replayed weights are from the recorded ones, where their bits are not the same.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import torch
import torch.utils.deterministic
from safetensors import SafetensorError
from torch import Tensor, nn

from trinity_buffer.algorithm import Algorithm
from trinity_buffer.errors import CheckpointError, TrainingError
from trinity_buffer.pipeline.history.replay import StepStream
from trinity_buffer.pipeline.train import step as steps
from trinity_buffer.trainer.parallel import Processes, Tensors, opened_files, unwrapped

_logger = logging.getLogger(__name__)

FLASH_ATTENTION = "FLASH_ATTENTION_DETERMINISTIC"
"""The variable that transformers reads whenever it calls the package flash-attn."""

_NO_SUCH_FORM = re.compile(r"(.+) does not have a deterministic implementation")


@contextmanager
def same_bits(
    device: str, *, deterministic: bool, recorded: Mapping[str, Any] | None = None
) -> Iterator[None]:
    """Compute inside the context so that the same again gives the same bits.

    Afterwards all is as it was, but the workspace of cuBLAS: torch reads that once in a process.

    Args:
        device: on which is computed.
        deterministic: ask torch for deterministic algorithms; False leaves torch as it is.
        recorded: in a replay, what the commit of the step says of its environment: threads and
            precision become those, and nothing is asked for that was not asked for then.

    Raises:
        TrainingError: an operation has no deterministic form; names it.
    """
    recorded = recorded or {}
    asked = deterministic and recorded.get("deterministic", True)
    with ExitStack() as stack:
        _restore(stack, device, recorded)
        if not asked:
            yield
            return
        stack.enter_context(_asked)
        if torch.cuda.is_initialized():  # a setting of this thread alone
            _set(stack, import_module("torch._inductor.config"), "deterministic", value=True)
        try:
            yield
        except RuntimeError as error:
            message = _refusal(str(error))
            if message is None:
                raise
            refused = TrainingError(message)
            for note in getattr(error, "__notes__", ()):
                refused.add_note(note)
            raise refused from error


def _restore(stack: ExitStack, device: str, recorded: Mapping[str, Any]) -> None:
    """Set what was recorded; ``stack`` puts back what was there."""
    for name, flag in steps.flags(device).items():
        before = flag.get()
        if before is not None and recorded.get(name, before) != before:
            stack.callback(flag.set, before)
            flag.set(recorded[name])


def _ask(stack: ExitStack) -> None:
    """Ask for deterministic algorithms; ``stack`` puts back what was there."""
    steps.settle_cublas()
    stack.callback(torch.set_deterministic_debug_mode, torch.get_deterministic_debug_mode())
    # What `use_deterministic_algorithms` does, without the second that importing the settings of
    # torch.compile takes: on a CPU they choose nothing by measuring it.
    torch.set_deterministic_debug_mode("error")
    _set(stack, torch.utils.deterministic, "fill_uninitialized_memory", value=False)  # is slow
    _set(stack, torch.backends.cudnn, "deterministic", value=True)
    _set(stack, torch.backends.cudnn, "benchmark", value=False)
    before = os.environ.get(FLASH_ATTENTION)
    put_back: Any = os.environ.pop if before is None else os.environ.__setitem__
    stack.callback(put_back, FLASH_ATTENTION, before)
    os.environ[FLASH_ATTENTION] = "1"


class _Asked:
    """What is asked of torch, whose settings are of the whole process.

    Trainers in several threads ask for the same; the last that ends puts back what was there.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._computing = 0
        self._before = ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if not self._computing:
                with ExitStack() as before:
                    _ask(before)
                    self._before = before.pop_all()
            self._computing += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._computing -= 1
            if not self._computing:
                self._before.close()


_asked = _Asked()


def _set(stack: ExitStack, owner: Any, name: str, *, value: bool) -> None:
    if hasattr(owner, name):  # some are newer than the oldest torch that we take
        stack.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)


def _refusal(message: str) -> str | None:
    """Return the remedy for an error of torch's, if that was a refused operation."""
    costs = (
        "deterministic=False (of TrainerSettings, or in the configuration of the run), after which "
        "a replay gives the same weights only within a tolerance"
    )
    if refused := _NO_SUCH_FORM.search(message):
        return (
            f"torch {torch.__version__} has no deterministic form of {refused[1]}, so that this "
            f"step would not come out the same again: compute it otherwise, or set {costs}"
        )
    if steps.CUBLAS_WORKSPACE in message:
        return (
            "this process multiplied matrices on the GPU before torch was told which workspace "
            "cuBLAS has, so that products are not deterministic in it: set "
            f"{steps.CUBLAS_WORKSPACE}=:4096:8 in its environment before it starts, or set {costs}"
        )
    return None


def attention_of(policy: Any) -> str | None:
    """Return how a model of transformers computes attention; None: it is no such model."""
    model = unwrapped(getattr(policy, "model", policy))
    config = getattr(model, "config", None) if isinstance(model, nn.Module) else None
    attention = getattr(config, "_attn_implementation", None)
    return None if attention is None else str(attention)


def algorithm_settings(algorithm: Algorithm) -> dict[str, str]:
    """Return the parts that decide the loss, each by its name and its plain arguments."""
    settings = {"loss_agg_mode": algorithm.loss_agg_mode, "advantage_fn": "none"}
    for part, choice in algorithm.choices.items():
        # An address in the text of an object would differ by process.
        plain = {n: v for n, v in choice.args.items() if isinstance(v, int | float | str | None)}
        args = (
            "" if choice.name == "none" else ", ".join(f"{n}={plain[n]!r}" for n in sorted(plain))
        )
        settings[part] = f"{choice.name}({args})" if args else choice.name
    return {part: text for part, text in settings.items() if part != "sample_strategy"}


def optimizer_settings(optimizer: Any, resumed_from: Mapping[str, Any]) -> dict[str, Any]:
    """Return the class of an optimizer, and its settings; of several groups each value once.

    Args:
        optimizer: as its user made it.
        resumed_from: the environment of a commit, whose settings it takes.
    """
    settings: dict[str, list[Any]] = {}
    for group in getattr(optimizer, "param_groups", ()):
        # A schedule changes the rate, and keeps the one that it began with.
        passed_over = {"params", "param_names", *(["lr"] if "initial_lr" in group else [])}
        for name in [name for name in group if name not in passed_over]:
            value = [*group[name]] if isinstance(group[name], tuple) else group[name]
            values = settings.setdefault(f"optimizer.{name}", [])
            if value not in values:
                values.append(value)
    found = {name: values[0] if len(values) == 1 else values for name, values in settings.items()}
    taken = {n: value for n, value in resumed_from.items() if n.startswith("optimizer.")}
    return {"optimizer": type(optimizer).__name__, **(taken or found)}


class SameBits:
    """Lets a trainer compute what comes out the same again, and says where that cannot be expected.

    Args:
        stream: of the trainer.
        processes: its ranks.
        deterministic: see `same_bits`.
        settings: of the trainer, that decide the bits.
        optimizer: of the user; None: that of the trainer, whose settings are among these.

    Attributes:
        environment: in which the last step was computed, as commits record it.
        differences: what was recorded otherwise: name -> recorded, here.
    """

    def __init__(
        self,
        stream: StepStream,
        processes: Processes,
        *,
        deterministic: bool,
        settings: Mapping[str, Any],
        optimizer: Any = None,
    ) -> None:
        steps.settle_cublas()  # also for nothing: a trainer that asks may come later
        self._device = stream.device
        self._processes = processes
        self._deterministic = deterministic
        self._resumed_from = {} if stream.resume is None else stream.resume.environment
        self._settings = dict(settings)
        if optimizer is not None:
            self._settings |= optimizer_settings(optimizer, self._resumed_from)
        self.environment: Mapping[str, Any] = {}
        self.differences: dict[str, list[Any]] = {}

    def asked(self, recorded: Mapping[str, Any] | None = None) -> AbstractContextManager[None]:
        """Return the context to compute in; see `same_bits`."""
        return same_bits(self._device, deterministic=self._deterministic, recorded=recorded)

    def compare(self, step: steps.TrainStep, policy: Any) -> None:
        """Note in which environment ``step`` is about to be computed.

        A warning says which settings differ from those of the recorded step, in a replay, or of the
        commit that was resumed from: once, and again when others do.
        """
        own = {"ranks": self._processes.world_size, "attention": attention_of(policy)}
        known = {name: value for name, value in own.items() if value is not None}
        self.environment = steps.environment_of_run(self._device) | known | self._settings
        recorded, self._resumed_from = step.environment or self._resumed_from, {}
        differing = steps.differences(recorded, self.environment)
        new = any(self.differences.get(name) != pair for name, pair in differing.items())
        self.differences |= differing
        if new and not self._processes.rank:
            message = _REPLAYED if step.environment else _RESUMED
            _logger.warning(message, step.step, steps.in_words(differing))


_REPLAYED = "step %s was trained with %s: do not expect the same bits from this replay"
_RESUMED = (
    "step %s: the commit before it was made with %s: from here on, the bits need not be those that "
    "the run would have had there"
)


class LargestDifference(NamedTuple):
    """Of all tensors of two sets of weights.

    Attributes:
        relative: of its elements, as a part of the largest recorded one; infinite where only one
            set has the tensor, or in another shape, or where a difference is no number.
        tensor: in which it is.
    """

    relative: float
    tensor: str


def largest_difference(recorded: Path, replayed: Path) -> LargestDifference:
    """Return the tensor that two sets of weights differ most in.

    Args:
        recorded: a file of safetensors, or a folder of some.
        replayed: likewise.

    Raises:
        CheckpointError: they cannot be read.
    """
    try:
        with _opened(recorded) as theirs, _opened(replayed) as ours:
            names = sorted({*theirs, *ours})
            parts = [LargestDifference(_relative(theirs.get(n), ours.get(n)), n) for n in names]
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"the weights in {recorded} and the replayed ones cannot be compared: {error}"
        ) from error
    if not parts:
        raise CheckpointError(f"the weights in {recorded} and the replayed ones hold no tensor")
    return max(parts, key=lambda part: part.relative)


def _opened(weights: Path) -> AbstractContextManager[Tensors]:
    """Open the files of safetensors in a folder, or the one that is given."""
    files = sorted(weights.glob("*.safetensors")) if weights.is_dir() else [weights]
    if not files:
        raise CheckpointError(f"{weights} holds no safetensors, which weights are compared by")
    return opened_files(files)


def _relative(recorded: Tensor | None, replayed: Tensor | None) -> float:
    if recorded is None or replayed is None:
        return math.inf
    if recorded.shape != replayed.shape or recorded.dtype != replayed.dtype:
        return math.inf
    if torch.equal(recorded, replayed):
        return 0.0
    # Torch promotes no type of 8 bits.
    is_short = recorded.dtype.itemsize <= 2
    exact = torch.float32 if is_short else torch.promote_types(recorded.dtype, torch.float32)
    apart = float((recorded.to(exact) - replayed.to(exact)).abs().max())
    size = float(recorded.to(exact).abs().max())
    part = apart / size if size else math.inf
    return math.inf if math.isnan(part) else part
