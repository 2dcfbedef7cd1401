"""Checkpoints that several ranks write (FSDP2), or that are written beside the training.

Writing has two halves. The first takes what is to be kept, while nobody trains, and asks the other
ranks; the second writes it, asks nobody, and may be another thread's.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from torch import Tensor

from trinity_buffer.errors import CheckpointError, NonFiniteError
from trinity_buffer.pipeline.proof.checkpoint import written
from trinity_buffer.trainer.checkpoint_folder import (
    OPTIMIZER,
    TrainerState,
    fresh_folder,
    random_of_ranks,
    require_finite,
    write_critic,
    write_numbers,
    writing,
)
from trinity_buffer.trainer.optimizer_state import OptimizerState
from trinity_buffer.trainer.parallel import Processes, gather_texts, is_sharded
from trinity_buffer.trainer.policy import Policy
from trinity_buffer.trainer.sharded import owners_of, whole_tensors, write_share

_FAILURES = (CheckpointError, NonFiniteError, OSError, SafetensorError)


class Saved(NamedTuple):
    """A checkpoint that was written.

    Attributes:
        folder: where it is.
        digests: file -> sha256, of those that are on the disk already.
    """

    folder: Path
    digests: Mapping[Path, str]


class Begun(NamedTuple):
    """A checkpoint of which everything was taken.

    Attributes:
        folder: where it will be.
        processes: who writes it.
        write: writes what this rank has to write, and says file -> sha256 as JSON.
    """

    folder: Path
    processes: Processes
    write: Callable[[], str]


def is_shared(policy: Policy) -> bool:
    """Return whether ranks hold the weights of ``policy`` in parts."""
    return any(map(is_sharded, policy.parameters()))


def begin(root: Path, state: TrainerState[Any], processes: Processes, *, copied: bool) -> Begun:
    """Take what a checkpoint of ``state`` keeps; every rank that writes calls it.

    Of weights that ranks hold in parts, each rank takes a share, as whole tensors. So one process,
    or any number of ranks, goes on with them, and an inference server reads them.

    Args:
        root: of the folder.
        state: of the trainer.
        processes: who writes: all ranks, or one alone.
        copied: the weights may change before all is written.

    Raises:
        CheckpointError: no folder can be made.
        NonFiniteError: a weight or a number of an optimizer is NaN or infinite.
    """
    kept = OptimizerState.of(state.optimizer)

    def look() -> str:
        require_finite(state.step, state.policy, kept)
        return ""

    def make() -> str:
        if processes.rank:
            return ""
        folder = fresh_folder(root, state.step).absolute()
        if hasattr(state.policy, "held"):
            with writing(folder):
                (folder / state.policy.file_name).mkdir()
        return str(folder)

    on_each(processes, look)
    folder = Path(on_each(processes, make)[0])
    policy, among = state.policy, processes.world_size
    shares = [_share(folder, OPTIMIZER, kept.tensors, among, processes.rank, copied=copied)]
    if hasattr(policy, "held"):
        # Of an adapter, peft and inference servers read one file.
        among = 1 if policy.is_adapted else among
        place = folder / policy.file_name
        shares += [_share(place, policy.stem, policy.held(), among, processes.rank, copied=copied)]
        save = policy.save_config
    else:
        save = (deepcopy(policy) if copied else policy).save
    if copied:
        state = replace(state, critic=deepcopy(state.critic))
    return Begun(folder, processes, _Writing(folder, state, kept, shares, save, processes.rank))


def end(begun: Begun, write: Callable[[], str]) -> Saved:
    """Return the checkpoint when every rank has written its files; every rank that writes calls it.

    Args:
        begun: what was begun.
        write: returns what its ``write`` returned, which may have been called elsewhere.

    Raises:
        CheckpointError, OSError: a rank could not write; no folder is left.
    """
    told: list[str] = []
    try:
        told = on_each(begun.processes, write)
    finally:
        if not told and begun.processes.rank == 0:  # nobody writes any more
            shutil.rmtree(begun.folder, ignore_errors=True)
    digests = {file: digest for text in told for file, digest in json.loads(text).items()}
    return Saved(begun.folder, {Path(file): digest for file, digest in digests.items()})


@dataclass(frozen=True, slots=True)
class _Share:
    """What one rank writes of tensors that ranks share.

    Attributes:
        place: folder of the files.
        stem: how their names begin.
        among: how many ranks share them.
        owners: name of a tensor -> rank.
        mine: the tensors of this rank, whole.
    """

    place: Path
    stem: str
    among: int
    owners: Mapping[str, int]
    mine: Mapping[str, Tensor]


def _share(
    place: Path, stem: str, tensors: Mapping[str, Tensor], among: int, rank: int, *, copied: bool
) -> _Share:
    """Return the share of ``rank``; every rank gathers with it."""
    owners = owners_of(tensors, among)
    mine = [name for name, owner in owners.items() if owner == rank]
    return _Share(place, stem, among, owners, whole_tensors(tensors, mine, copied=copied))


@dataclass(frozen=True, slots=True)
class _Writing:
    """What one rank has to write; called, it does.

    Attributes:
        save: writes a policy, or all of it but its weights.
    """

    folder: Path
    state: TrainerState[Any]
    kept: OptimizerState
    shares: list[_Share]
    save: Callable[[Path], None]
    rank: int

    def __call__(self) -> str:
        with writing(self.folder):
            return self._written()

    def _written(self) -> str:
        files: list[Path] = []
        for share in self.shares:
            owners, mine = dict(share.owners), dict(share.mine)
            if share.stem == OPTIMIZER:
                random = random_of_ranks(self.state)
                owners |= dict.fromkeys(random, 0)
                mine |= random if self.rank == 0 else {}
            if self.rank < share.among:
                files += write_share(share.place, share.stem, mine, owners, self.rank, share.among)
        if self.rank == 0:
            self.save(self.folder / self.state.policy.file_name)
            write_numbers(self.folder, self.state, self.kept, write_critic(self.folder, self.state))
        return json.dumps({str(file): written(file) for file in files})


def on_each(processes: Processes, work: Callable[[], str]) -> list[str]:
    """Return what ``work`` returned on each rank; every rank calls it, and fails where one does.

    Raises:
        CheckpointError: another rank failed; the message names it.
    """
    done, reason = "", "it ended with an error of its own"
    try:
        done = work()
        reason = ""
    except _FAILURES as error:
        reason = str(error)
        raise
    finally:  # the others wait for it
        told = gather_texts(processes, json.dumps([done, reason]))
    found = []
    for rank, one in enumerate(told):
        text, why = json.loads(one)
        if why:
            raise CheckpointError(f"no checkpoint was written, as rank {rank} failed: {why}")
        found.append(text)
    return found
