"""Checkpoints: weights, optimizer, random numbers and the manifests that the weights went through.

Tensors are safetensors, everything else is JSON: a checkpoint of unknown origin cannot run code.
One process or several ranks (FSDP2) write it, at once or beside the training. Writing has two
halves. The first takes the tensors, between two steps, and gathers them from the other ranks; the
second writes them, and may run in another thread.
"""

from __future__ import annotations

import json
import logging
import math
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from trinity_buffer.errors import CheckpointError, NonFiniteError
from trinity_buffer.pipeline.history.replay import ReplayStream, StepStream
from trinity_buffer.pipeline.manifest import ManifestChain
from trinity_buffer.pipeline.sync_stream import SyncTrainStream
from trinity_buffer.pipeline.train import checkpoint
from trinity_buffer.trainer import parallel
from trinity_buffer.trainer.policy import AnyPolicy, Critic, Policy, Trainable, all_finite

if TYPE_CHECKING:
    from trinity_buffer.pipeline.train.step import TrainStep

_logger = logging.getLogger(__name__)

T = TypeVar("T")


class OptimizerState(NamedTuple):
    """The state of an optimizer.

    Attributes:
        tensors: by ``PARAMETER.NAME``, for safetensors.
        numbers: the rest of what it keeps of its parameters, by the same names, for JSON.
        groups: its parameter groups, for JSON.
    """

    tensors: Mapping[str, Tensor]
    numbers: dict[str, float | None]
    groups: list[dict[str, Any]]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> OptimizerState:
        """Return the state of ``optimizer``.

        Raises:
            CheckpointError: it keeps what is neither a tensor nor a number.
        """
        state = optimizer.state_dict()
        entries: dict[str, Any] = {}
        for index, of_weight in state["state"].items():
            if not isinstance(index, int) or not isinstance(of_weight, Mapping):
                raise _refusal(optimizer, f"state {index!r}", of_weight)
            entries |= {f"{index}.{name}": value for name, value in of_weight.items()}
        tensors = {k: v.detach().contiguous() for k, v in entries.items() if isinstance(v, Tensor)}
        numbers = {key: value for key, value in entries.items() if key not in tensors}
        for key, value in numbers.items():
            if value is not None and not isinstance(value, int | float):
                raise _refusal(optimizer, f"state {key!r}", value)
        for number, group in enumerate(state["param_groups"]):
            for key, value in group.items():
                try:
                    json.dumps(value)
                except (TypeError, ValueError) as error:
                    place = f"param_groups[{number}][{key!r}]"
                    raise _refusal(optimizer, place, value) from error
        return cls(tensors, numbers, state["param_groups"])

    @property
    def is_finite(self) -> bool:
        """Whether no number of the state is NaN or infinite; one look at a device."""
        plain = all(value is None or math.isfinite(value) for value in self.numbers.values())
        return plain and all_finite([*self.tensors.values()])

    def restore(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        takes_groups: bool = True,
        saved_types: Collection[torch.dtype] = (),
    ) -> None:
        """Put the state into ``optimizer``; of weights that ranks hold in parts, this rank's.

        Args:
            saved_types: of the weights that were saved with it.
            takes_groups: its parameter groups take the saved settings, such as the learning rate;
                a warning names those that were others. False: they keep their own.

        Raises:
            CheckpointError: it is the state of another optimizer, or of other groups of weights.
        """
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        self._require_fitting(optimizer, weights)
        state: dict[int, dict[str, Any]] = {}
        for key, value in (*self.tensors.items(), *self.numbers.items()):
            number, _, name = key.partition(".")
            index = int(number)
            if isinstance(value, Tensor) and value.shape == weights[index].shape:
                value = parallel.part_like(value, weights[index])
            state.setdefault(index, {})[name] = value
        groups, own = self.groups, optimizer.state_dict()["param_groups"]
        if takes_groups:
            self._warn_of_others(optimizer, own)
        else:
            pairs = zip(own, groups, strict=True)
            groups = [{**group, "params": saved["params"]} for group, saved in pairs]
        optimizer.load_state_dict({"state": state, "param_groups": groups})
        # Torch rounds it all to the type of the weight: float32 copies of bfloat16 weights, counts.
        is_own = not type(optimizer).__module__.startswith("torch.")
        for index, saved in state.items():
            weight, kept = weights[index], optimizer.state[weights[index]]
            for name, value in saved.items():
                if not isinstance(value, Tensor) or kept[name].dtype == value.dtype:
                    continue
                # One that has the type of its weight takes that of a weight in another precision.
                follows = value.is_floating_point() and value.dim() == weight.dim()
                is_wider = value.element_size() > weight.element_size()
                if not follows or (is_own and (is_wider or weight.dtype in saved_types)):
                    kept[name] = value.to(kept[name].device)

    def _require_fitting(self, optimizer: torch.optim.Optimizer, weights: Sequence[Tensor]) -> None:
        own = optimizer.param_groups
        sizes = [[len(group["params"]) for group in groups] for groups in (self.groups, own)]
        if sizes[0] != sizes[1]:
            raise _other(optimizer, f"has groups of {sizes[0]} weights, not of {sizes[1]}")
        for saved, group in zip(self.groups, own, strict=True):
            gone, new = saved.keys() - group.keys(), group.keys() - saved.keys()
            if gone and new:  # either alone: another version of torch
                raise _other(optimizer, f"has {', '.join(sorted(gone))}: it is another optimizer")
        for key, value in self.tensors.items():
            weight = weights[int(key.partition(".")[0])]
            pairs = zip(value.shape, weight.shape, strict=False)
            # Adafactor keeps the means of rows and of columns.
            if value.dim() == weight.dim() and not all(own in (size, 1) for own, size in pairs):
                shapes = f"{[*value.shape]}, its weight {[*weight.shape]}"
                raise _other(optimizer, f"has its weights in another order ({key} is {shapes})")

    def _warn_of_others(self, optimizer: torch.optim.Optimizer, own: list[dict[str, Any]]) -> None:
        """Name the settings of ``optimizer`` that those of the checkpoint replace."""
        differing = [
            f"param_groups[{number}][{name!r}] = {value!r} (not {mine!r})"
            for number, (saved, group) in enumerate(zip(self.groups, own, strict=False))
            for name, value in saved.items()
            if name in group
            and name != "params"
            and (mine := json.loads(json.dumps(group[name], default=str))) != value
        ]
        if differing:
            _logger.warning(
                "the settings of the given %s are those of the checkpoint: %s; to change them, "
                "assign to optimizer.param_groups once the Trainer is made",
                type(optimizer).__name__,
                ", ".join(differing),
            )


def _other(optimizer: torch.optim.Optimizer, what: str) -> CheckpointError:
    return CheckpointError(
        f"the optimizer of the checkpoint is not this {type(optimizer).__name__}: it {what}. Give "
        "the Trainer (optimizer=) the one that it was trained with, of the same groups of weights, "
        "or begin with a fresh one: let a trainer of another name (consumer=) load the weights"
    )


def _refusal(optimizer: torch.optim.Optimizer, place: str, value: Any) -> CheckpointError:
    return CheckpointError(
        f"no checkpoint was written: {type(optimizer).__name__} keeps a {type(value).__name__} as "
        f"{place}; a checkpoint holds tensors and numbers of each parameter, and JSON of each group"
    )


def random_state(device: str = "cuda") -> Tensor:
    """Return the state of this process as bytes, one tensor on the processor.

    Args:
        device: on which is computed; of ``cuda``, and of the processor, it is the current GPU.
    """
    state = torch.get_rng_state()
    if not torch.cuda.is_initialized():
        return state
    return torch.cat([state, torch.cuda.get_rng_state(_gpu(device))])


def _gpu(device: str) -> str:
    return device if device.startswith("cuda") else "cuda"


POLICY_FILE = "policy.safetensors"
OPTIMIZER = "optimizer"
CRITIC_FILE = "critic.safetensors"
CRITIC_OPTIMIZER = "critic_optimizer"
CRITIC_OPTIMIZER_FILE = f"{CRITIC_OPTIMIZER}.safetensors"
STATE_FILE = "state.json"


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
    manifests: ManifestChain
    critic: tuple[Critic, torch.optim.Optimizer] | None = None
    coefficients: Mapping[str, float] = field(default_factory=dict)
    log_head: str = ""
    random: Sequence[Tensor] = ()

    @property
    def trained(self) -> list[tuple[Trainable, torch.optim.Optimizer]]:
        """The policy, and the critic where there is one, each with its optimizer."""
        return [(self.policy, self.optimizer), *([] if self.critic is None else [self.critic])]


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


_RANDOM = "rng"


def _random_of(rank: int) -> str:
    return f"{_RANDOM}.{rank}" if rank else _RANDOM  # one rank alone writes what it always wrote


def _restore_random(tensors: Mapping[str, Tensor], rank: int, device: str) -> None:
    """Go on with the random numbers of ``rank``; those of a GPU only where there is one.

    A rank that there was not begins numbers of its own, which depend on rank 0's alone.
    """
    first, own = tensors[_RANDOM], tensors.get(_random_of(rank))
    if own is None:
        digest = sha256(first.numpy().tobytes() + rank.to_bytes(4, "big")).digest()
        torch.manual_seed(int.from_bytes(digest[:8], "big", signed=True))
        return
    size = torch.get_rng_state().numel()
    torch.set_rng_state(own[:size])
    if len(own) > size and torch.cuda.is_available():
        torch.cuda.set_rng_state(own[size:], _gpu(device))


def load_checkpoint(
    folder: Path,
    begun: TrainerState[AnyPolicy],
    *,
    rank: int = 0,
    takes_groups: bool = True,
    device: str = "cuda",
) -> TrainerState[AnyPolicy]:
    """Return the state in ``folder``, and restore torch's random numbers of ``rank``.

    Args:
        begun: of models of the kind that was saved. They take the saved weights, and their
            optimizers what was saved of those.
        takes_groups: the policy's optimizer takes the saved settings, see `OptimizerState.restore`.
        device: on which is computed, see `random_state`.

    Raises:
        CheckpointError: a file is missing or cannot be read.
    """
    with ExitStack() as stack:
        try:
            state = json.loads((folder / STATE_FILE).read_text())
            tensors = stack.enter_context(parallel.opened(folder, OPTIMIZER))
            manifests = checkpoint.read_manifest_chain(folder).after()
            trains_critic = "critic_optimizer" in state
            of_critic = load_file(folder / CRITIC_OPTIMIZER_FILE) if trains_critic else {}
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise CheckpointError(
                f"checkpoint {folder} cannot be read: {error}; resume from an older step"
            ) from error
        begun.policy.restore(folder / begun.policy.file_name)
        _restore_random(tensors, rank, device)
        numbers = state.get("optimizer_numbers", {})  # older checkpoints have none
        saved = OptimizerState(tensors.without(_RANDOM), numbers, state["optimizer"])
        types = _types_in(folder / begun.policy.file_name)
        saved.restore(begun.optimizer, takes_groups=takes_groups, saved_types=types)
    critic = begun.critic if trains_critic else None
    if critic is not None:
        critic[0].restore(folder / CRITIC_FILE)
        saved = OptimizerState(of_critic, {}, state["critic_optimizer"])
        saved.restore(critic[1], takes_groups=False)
    return replace(
        begun,
        step=state["step"],
        manifests=manifests,
        critic=critic,
        coefficients=state.get("coefficients", {}),
        log_head=checkpoint.read_head(folder).hex(),
    )


def _types_in(weights: Path) -> set[torch.dtype]:
    """Return the types of saved weights; none where they are not in safetensors."""
    files = weights.glob("*.safetensors") if weights.is_dir() else [weights]
    with suppress(OSError, SafetensorError), parallel.opened_files(files) as tensors:
        return {tensor.dtype for tensor in tensors.values()}
    return set()


def read_step(folder: Path) -> int:
    """Return the gradient step that the weights in ``folder`` went through last.

    Raises:
        CheckpointError: this folder is no checkpoint of a trainer.
    """
    try:
        return int(json.loads((folder / STATE_FILE).read_text())["step"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder} holds no {STATE_FILE} of a trainer: {error}") from error


_NAME = re.compile(r"step-(\d+)(?:-(\d+))?")
"""Of a checkpoint: its step, and which one of those of that step it is."""


def _places(folders: Iterable[Path]) -> dict[Path, tuple[int, int]]:
    names = [(folder, _NAME.fullmatch(folder.name)) for folder in folders]
    return {folder: (int(name[1]), int(name[2] or 1)) for folder, name in names if name}


def remove_old(
    root: Path,
    *,
    keep: int,
    committed: Path,
    made: Sequence[Path] | None = None,
    uncommitted: Collection[Path] = (),
) -> None:
    """Delete the checkpoints up to ``committed``, but those of the newest ``keep`` steps.

    One whose policy is being loaded stays for now.

    Args:
        committed: the one that was committed last; it stays, those that were begun before it for
            the same step go.
        made: those that may go; None: all under ``root``.
        uncommitted: those that do not count as one of ``keep``.
    """
    places = _places((committed, *(root.glob("step-*") if made is None else made)))
    last = places[committed]
    # None: who took over meanwhile has gone on, and tidied up to where it is.
    counted = {places[folder][0] for folder in places.keys() - uncommitted}
    newest = sorted(step for step in counted if step <= last[0])[-keep:]
    for folder, (step, number) in places.items():
        gone = newest and (step < newest[0] or (step == last[0] and number < last[1]))
        # What an explorer is loading goes after a later commit.
        if gone and all(checkpoint.may_remove(path) for path in folder.glob("*")):
            # A process that was fenced may be writing into it still: what is left goes next time.
            shutil.rmtree(folder, ignore_errors=True)


_FAILURES = (CheckpointError, NonFiniteError, OSError, SafetensorError)


def save_checkpoint(root: Path, state: TrainerState[Any]) -> Path:
    """Write the checkpoint of ``state`` into a fresh folder under ``root`` and return it.

    Raises:
        CheckpointError: the folder was removed meanwhile; the disk is full, or fails; or an
            optimizer keeps what is neither a tensor nor a number. No folder is left.
        NonFiniteError: a weight or a number of an optimizer is NaN or infinite; no folder is left.
    """
    with closing(parallel.HostCopies(copied=False)) as copies:
        pending = begin(root, state, parallel.Processes(), copies)
        pending.finish()
    return pending.folder


def begin(
    root: Path, state: TrainerState[Any], processes: parallel.Processes, copies: parallel.HostCopies
) -> PendingCheckpoint:
    """Take what a checkpoint of ``state`` keeps; every rank that writes calls it.

    Of weights that ranks hold in parts, each rank takes a share, as whole tensors. So one process,
    or any number of ranks, goes on with them, and an inference server reads them.

    Args:
        root: of the folder.
        state: of the trainer.
        processes: those that write: all ranks, or one alone.
        copies: take the tensors; those of the checkpoint before are not read any more.

    Raises:
        CheckpointError: no folder can be made, or an optimizer keeps what no checkpoint holds.
        NonFiniteError: a weight or a number of an optimizer is NaN or infinite.
    """
    policy, rank, ranks = state.policy, processes.rank, processes.world_size
    optimizers = [OptimizerState.of(optimizer) for _, optimizer in state.trained]
    on_each(processes, partial(_require_finite, state, optimizers))
    folder = Path(on_each(processes, partial(_made_folder, root, state, rank))[0])
    copied: Callable[[Any], Any] = deepcopy if copies.copied else lambda model: model
    random = {_random_of(of): drawn for of, drawn in enumerate(state.random or [random_state()])}
    tensors: Mapping[str, Tensor] = {**optimizers[0].tensors, **random}
    shared = [(folder, OPTIMIZER, tensors, parallel.files_of(tensors, ranks))]
    numbers: dict[str, Any] = {
        "step": state.step,
        "optimizer": optimizers[0].groups,
        "optimizer_numbers": optimizers[0].numbers,
        "coefficients": dict(state.coefficients),
    }
    saves: list[Callable[[], object]] = []
    if state.critic is not None:
        shared.append((folder, CRITIC_OPTIMIZER, optimizers[1].tensors, 1))
        saves.append(partial(copied(state.critic[0]).save, folder / CRITIC_FILE))
        numbers["critic_optimizer"] = optimizers[1].groups
    of_policy = folder / policy.file_name
    if hasattr(policy, "held"):
        held = policy.held()
        # Of an adapter, peft and inference servers read one file.
        files = 1 if policy.is_adapted else parallel.files_of(held, ranks)
        shared.insert(0, (of_policy, policy.stem, held, files))
        saves.append(partial(policy.save_config, of_policy))
    else:
        saves.append(partial(copied(policy).save, of_policy))
    saves.append(partial((folder / STATE_FILE).write_text, json.dumps(numbers)))
    saves.append(partial(checkpoint.write_manifest_chain, folder, state.manifests, state.log_head))
    copies.begin()
    shares: list[Callable[[], list[Path]]] = []
    for place, stem, tensors, files in shared:
        owners = parallel.owners_of(tensors, files)
        mine = [name for name, file in owners.items() if file % ranks == rank]
        whole = parallel.whole_tensors(tensors, mine, copies)  # every rank gathers
        write = partial(parallel.write_share, place, stem, whole, owners)
        shares += [partial(write, file, files) for file in range(rank, files, ranks)]
        if place == of_policy:
            # Anything may change the weights next, a callback too. The state of an optimizer
            # changes in its step alone, before which the trainer holds again.
            copies.hold()
    return PendingCheckpoint(folder, processes, shares, saves if rank == 0 else [], copies.wait)


def _require_finite(state: TrainerState[Any], optimizers: Sequence[OptimizerState]) -> None:
    """Refuse weights, and numbers of their optimizers, that are not finite."""
    for (model, _), optimizer in zip(state.trained, optimizers, strict=True):
        lost = None if optimizer.is_finite else "the optimizer"
        lost = lost if all_finite([*model.parameters()]) else "the weights"
        if lost is not None:
            raise NonFiniteError(
                f"no checkpoint of step {state.step} was written: {lost} of a "
                f"{type(model).__name__} hold NaN or Inf; lower the learning rate or "
                "max_gradient_norm, and go on from the last checkpoint"
            )


def _made_folder(root: Path, state: TrainerState[Any], rank: int) -> str:
    """Make a new, empty folder for a checkpoint; of ranks, the first does.

    Never one that is there already: it may be of a process that was killed before its commit, or of
    another one that has taken over meanwhile and committed it.

    Raises:
        CheckpointError: none can be made there.
    """
    if rank:
        return ""
    folder = root
    try:
        root.mkdir(parents=True, exist_ok=True)
        for number in count(1):
            name = f"step-{state.step:08d}" + (f"-{number}" if number > 1 else "")
            folder = root.absolute() / name
            with suppress(FileExistsError):
                folder.mkdir()
                break
    except OSError as error:
        raise CheckpointError(
            f"no checkpoint of step {state.step} can be written to {root}: {error}; start again "
            "with a folder that can be written: training goes on from the last commit"
        ) from error
    if hasattr(state.policy, "held"):
        with writing(folder):
            (folder / state.policy.file_name).mkdir()
    return str(folder)


@dataclass(frozen=True, slots=True)
class PendingCheckpoint:
    """A checkpoint of which everything was taken; `finish` writes it, in any thread.

    Attributes:
        folder: where it will be.
        processes: those that write it.
        shares: write the tensors of this rank, and return their files.
        saves: write all else, on rank 0.
        wait: returns when the tensors are in the processor's memory.
    """

    folder: Path
    processes: parallel.Processes
    shares: Sequence[Callable[[], list[Path]]]
    saves: Sequence[Callable[[], object]]
    wait: Callable[[], None]

    def finish(self) -> dict[Path, str]:
        """Return the files that every rank has written, and their digests; every rank calls it.

        Raises:
            CheckpointError, OSError: a rank could not write; no folder is left.
        """
        written_by: list[dict[str, str]] = []
        try:
            written_by = on_each(self.processes, self._write)
        finally:
            # Every rank has stopped writing, so that nothing comes back into the folder.
            if not written_by and self.processes.rank == 0:
                shutil.rmtree(self.folder, ignore_errors=True)
        return {Path(file): digest for of_rank in written_by for file, digest in of_rank.items()}

    def _write(self) -> dict[str, str]:
        """Write what this rank has to write; return its files of tensors and their digests."""
        self.wait()
        with writing(self.folder):
            shares = checkpoint.side_by_side(_digested, self.shares)
            for save in self.saves:
                save()
        return {str(file): digest for pairs in shares for file, digest in pairs}


def _digested(write: Callable[[], list[Path]]) -> list[tuple[Path, str]]:
    """Write a share; return its files, which are on the disk then, and their digests."""
    files = write()
    return [*zip(files, checkpoint.written(files), strict=True)]


def on_each(processes: parallel.Processes, work: Callable[[], T]) -> list[T]:
    """Return the results of ``work`` by rank; every rank calls it, and all fail if one does.

    Raises:
        CheckpointError: another rank failed; the message names it.
    """
    answer: tuple[Any, str] = (None, "it ended with an error of its own")
    try:
        answer = (work(), "")
    except _FAILURES as error:
        answer = (None, str(error) or repr(error))
        raise
    finally:  # the others wait for it
        answers = processes.gather(answer)
    for rank, (_, reason) in enumerate(answers):
        if reason:
            raise CheckpointError(f"no checkpoint was written, as rank {rank} failed: {reason}")
    return [result for result, _ in answers]


class Commits:
    """Writes the checkpoints of a trainer and commits them, one after the other.

    Args:
        stream: of the trainer.
        processes: its ranks; each calls everything here, in the same order.
        policy: what is trained.
        root: folder under which checkpoints are written.
        keep: how many of the newest committed ones stay; None: all.
        beside: they are written and committed beside the training.
    """

    def __init__(
        self,
        stream: StepStream,
        processes: parallel.Processes,
        policy: Policy,
        root: Path,
        *,
        keep: int | None,
        beside: bool,
    ) -> None:
        self._stream, self._processes, self._file_name = stream, processes, policy.file_name
        self._root, self._keep, self._beside = root, keep, beside
        # A replay may write beside the run that it repeats, whose own checkpoints stay.
        self._made: list[Path] | None = [] if isinstance(stream, ReplayStream) else None
        # Of a process that was killed before its commit, or superseded by a rewind.
        last = 0 if stream.resume is None else stream.resume.step
        places = _places(root.glob("step-*")).items()
        self._uncommitted = [folder for folder, (step, _) in places if step > last]
        self._copies = parallel.HostCopies(copied=beside)
        if isinstance(stream, SyncTrainStream) and stream.resume is None and keep is not None:
            there = min(root.glob(f"step-*/{checkpoint.MANIFESTS_FILE}"), default=None)
            if there is not None:
                _logger.warning(
                    "trainer %r begins with step 1 and removes old checkpoints, and in %s there "
                    "are some already, such as %s: if they are another trainer's, give each a "
                    "folder of its own (checkpoints=), or keep all (keep_checkpoints=None)",
                    stream.options.consumer,
                    root,
                    there.parent.name,
                )
        self._last: Future[None] | None = None
        self._shared = any(map(parallel.is_sharded, policy.parameters()))
        self._writers = parallel.Processes()
        if self._shared:
            # A group of their own, in the processors' memory: what a thread asks in there goes past
            # what the training asks in the default group.
            self._writers = parallel.TorchProcesses(torch.distributed.new_group(backend="gloo"))

    def commit(self, step: TrainStep, state: TrainerState[Any], **beside: Any) -> bool:
        """Commit a step, whose weights ``state`` has; return whether that is done.

        Args:
            step: that is committed.
            state: with its weights.
            beside: what is recorded beside the checkpoint, see `CommitDoor.commit`.

        Raises:
            CheckpointError, NonFiniteError: it cannot be written, or the one before could not.
            LeaseLostError: another process took over.
        """
        self.finish()
        state = replace(state, random=self._processes.gather(random_state(self._stream.device)))
        if self._processes.rank and not self._shared:
            self._stream.commit(step)  # rank 0 writes for all
            return not self._beside
        pending = begin(self._root, state, self._writers, self._copies)
        write = partial(self._write, pending, step, beside)
        if not (self._beside and self._begin(write)):
            write()
        return not self._beside

    def hold(self) -> None:
        """Let what is computed next wait until the states of optimizers are copied, too."""
        self._copies.hold()

    def look(self) -> None:
        """Raise the error of a commit that failed beside the training; do not wait for one."""
        if self._last is not None and self._last.done():
            self.finish()

    def finish(self) -> None:
        """Wait until the last step is committed that was to be.

        Raises:
            CheckpointError, LeaseLostError: it was not.
        """
        last = self._last
        if last is not None:
            wait([last])  # Ctrl-C may end this: `close` then waits for the same one
            self._last = None
            last.result()

    def close(self) -> None:
        """Wait until what is being written is committed, and give back memory."""
        if self._last is not None:
            wait([self._last])
        self._copies.close()

    def _begin(self, work: Callable[[], None]) -> bool:
        """Begin work beside the training, and return whether it is."""
        thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        try:
            self._last = thread.submit(work)
        except RuntimeError:
            # The main thread has ended while we train, or no thread can be started: the caller does
            # the work now.
            return False
        finally:
            thread.shutdown(wait=False)

        def end_wait(done: Future[None]) -> None:
            # A wait for the next step may be for what this commit would have published.
            if isinstance(error := done.exception(), Exception):
                self._stream.fail(error)

        self._last.add_done_callback(end_wait)
        return True

    def _write(self, pending: PendingCheckpoint, step: TrainStep, beside: dict[str, Any]) -> None:
        digests, folder = pending.finish(), pending.folder
        if self._processes.rank:
            self._stream.commit(step)
            return
        policy = folder / self._file_name
        self._stream.commit(step, checkpoint=folder, policy=policy, digests=digests, **beside)
        tidy_up = partial(self._tidy_up, folder)
        if self._beside:
            tidy_up()
        else:
            self._begin(tidy_up)  # to remove gigabytes takes as long as a step

    def _tidy_up(self, committed: Path) -> None:
        # A trainer that took over may have gone back, to a checkpoint that would be removed here.
        if self._keep is not None and self._stream.leads():
            if self._made is not None:
                self._made.append(committed)
            remove_old(
                self._root,
                keep=self._keep,
                committed=committed,
                made=self._made,
                uncommitted=self._uncommitted,
            )
