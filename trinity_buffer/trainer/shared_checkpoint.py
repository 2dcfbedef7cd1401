"""Writing a checkpoint: by one process or by several ranks (FSDP2), at once or beside the training.

Writing has two halves. The first takes what is to be kept, while nobody trains, and asks the other
ranks; the second writes it, asks nobody, and may be another thread's.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from torch import Tensor

from trinity_buffer.errors import CheckpointError, NonFiniteError
from trinity_buffer.pipeline.proof.checkpoint import written
from trinity_buffer.pipeline.proof.file_digest import side_by_side
from trinity_buffer.trainer.checkpoint_folder import (
    CRITIC_FILE,
    CRITIC_OPTIMIZER,
    OPTIMIZER,
    TrainerState,
    fresh_folder,
    random_of_ranks,
    require_finite,
    write_numbers,
    writing,
)
from trinity_buffer.trainer.host_copies import HostCopies
from trinity_buffer.trainer.optimizer_state import OptimizerState
from trinity_buffer.trainer.parallel import OneProcess, Processes, gather_texts, is_sharded
from trinity_buffer.trainer.policy import Policy, Trainable
from trinity_buffer.trainer.sharded import owners_of, whole_tensors, write_share

_FAILURES = (CheckpointError, NonFiniteError, OSError, SafetensorError)


class Saved(NamedTuple):
    """A checkpoint that was written.

    Attributes:
        folder: where it is.
        digests: file -> what `written` returned, of those that are on the disk already.
    """

    folder: Path
    digests: Mapping[Path, str]


class Begun(NamedTuple):
    """A checkpoint of which everything was taken.

    Attributes:
        folder: where it will be.
        processes: who writes it.
        write: writes what this rank has to write, and says as JSON what `written` returned of it.
    """

    folder: Path
    processes: Processes
    write: Callable[[], str]


def is_shared(policy: Policy) -> bool:
    """Return whether ranks hold the weights of ``policy`` in parts."""
    return any(map(is_sharded, policy.parameters()))


def save_checkpoint(root: Path, state: TrainerState[Any]) -> Path:
    """Write the checkpoint of ``state`` into a fresh folder under ``root`` and return it.

    Raises:
        CheckpointError: somebody removed the folder meanwhile; the disk is full, or fails; or an
            optimizer keeps what is neither a tensor nor a number. No folder is left.
        NonFiniteError: a weight or a number of an optimizer is NaN or infinite; no folder is left.
    """
    copies = HostCopies(copied=False)
    try:
        begun = begin(root, state, OneProcess(), copies)
        return end(begun, begun.write).folder
    finally:
        copies.close()


def begin(root: Path, state: TrainerState[Any], processes: Processes, copies: HostCopies) -> Begun:
    """Take what a checkpoint of ``state`` keeps; every rank that writes calls it.

    Of weights that ranks hold in parts, each rank takes a share, as whole tensors. So one process,
    or any number of ranks, goes on with them, and an inference server reads them.

    Args:
        root: of the folder.
        state: of the trainer.
        processes: who writes: all ranks, or one alone.
        copies: take the tensors; those of the checkpoint before are not read any more.

    Raises:
        CheckpointError: no folder can be made, or an optimizer keeps what no checkpoint holds.
        NonFiniteError: a weight or a number of an optimizer is NaN or infinite.
    """
    trained: list[tuple[Trainable, OptimizerState]]
    trained = [(state.policy, OptimizerState.of(state.optimizer))]
    if state.critic is not None:
        trained.append((state.critic[0], OptimizerState.of(state.critic[1])))

    def look() -> str:
        for model, kept in trained:
            require_finite(state.step, model, kept)
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
    copies.begin()
    shares, saves = _taken(folder, state, [kept for _, kept in trained], processes, copies)
    # What is written later keeps no tensor of a GPU alive.
    numbers = [kept._replace(tensors={}) for _, kept in trained]
    return Begun(
        folder,
        processes,
        _Writing(folder, state, numbers, shares, saves, processes.rank, copies.wait),
    )


def _taken(
    folder: Path,
    state: TrainerState[Any],
    kept: Sequence[OptimizerState],
    processes: Processes,
    copies: HostCopies,
) -> tuple[list[_Share], dict[str, Callable[[Path], None]]]:
    """Return the tensors that this rank writes, and name -> what writes the file or folder."""
    policy, among = state.policy, processes.world_size
    share = partial(_share, rank=processes.rank, copies=copies)
    shares = [share(folder, OPTIMIZER, kept[0].tensors, among)]
    saves: dict[str, Callable[[Path], None]] = {}
    if state.critic is not None:
        shares.append(share(folder, CRITIC_OPTIMIZER, kept[1].tensors, 1))
        critic = state.critic[0]
        saves[CRITIC_FILE] = (deepcopy(critic) if copies.copied else critic).save
    if hasattr(policy, "held"):
        # Of an adapter, peft and inference servers read one file.
        among = 1 if policy.is_adapted else among
        shares.append(share(folder / policy.file_name, policy.stem, policy.held(), among))
        saves[policy.file_name] = policy.save_config
    else:
        saves[policy.file_name] = (deepcopy(policy) if copies.copied else policy).save
    return shares, saves


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
    place: Path,
    stem: str,
    tensors: Mapping[str, Tensor],
    among: int,
    *,
    rank: int,
    copies: HostCopies,
) -> _Share:
    """Return the share of ``rank``; every rank gathers with it."""
    owners = owners_of(tensors, among)
    mine = [name for name, owner in owners.items() if owner == rank]
    return _Share(place, stem, among, owners, whole_tensors(tensors, mine, copies))


@dataclass(frozen=True, slots=True)
class _Writing:
    """What one rank has to write; called, it does.

    Attributes:
        kept: what optimizers keep that is no tensor: the policy's, and a critic's.
        saves: name -> writes a model, or all of it but its weights.
        wait: returns when the tensors are in the processor's memory.
    """

    folder: Path
    state: TrainerState[Any]
    kept: Sequence[OptimizerState]
    shares: Sequence[_Share]
    saves: Mapping[str, Callable[[Path], None]]
    rank: int
    wait: Callable[[], None]

    def __call__(self) -> str:
        self.wait()
        with writing(self.folder):
            return self._written()

    def _written(self) -> str:
        shares = [share for share in self.shares if self.rank < share.among]
        files = [file for some in side_by_side(self._write, shares) for file in some]
        if self.rank == 0:
            for name, save in self.saves.items():
                save(self.folder / name)
            trains_critic = self.state.critic is not None
            of_critic = {"critic_optimizer": self.kept[1].groups} if trains_critic else {}
            write_numbers(self.folder, self.state, self.kept[0], of_critic)
        return json.dumps(dict(files))

    def _write(self, share: _Share) -> list[tuple[str, str]]:
        """Write a share; return its files, which are on the disk then, and what they hold."""
        owners, mine = dict(share.owners), dict(share.mine)
        if share.stem == OPTIMIZER:
            random = random_of_ranks(self.state)
            owners |= dict.fromkeys(random, 0)
            mine |= random if self.rank == 0 else {}
        files = write_share(share.place, share.stem, mine, owners, self.rank, share.among)
        return [(str(file), written(file)) for file in files]


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
