"""Writing a checkpoint while another trainer tidies up."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.data import policy
from tests.trainer.qwen import qwen3
from tests.whole_stores import digest_of
from trinity_buffer.demo.policy import TransformerPolicy
from trinity_buffer.errors import CheckpointError
from trinity_buffer.pipeline.manifest import ManifestChain
from trinity_buffer.pipeline.train.checkpoint import being_read, make_durable
from trinity_buffer.trainer import checkpoint, parallel
from trinity_buffer.trainer.causal_lm import CausalLM
from trinity_buffer.trainer.checkpoint import (
    POLICY_FILE,
    TrainerState,
    load_checkpoint,
    random_state,
    remove_old,
    save_checkpoint,
)
from trinity_buffer.trainer.policy import all_finite
from trinity_buffer.trainer.trainer import TrainerSettings


def state() -> TrainerState[TransformerPolicy]:
    """Return a trainer after one step."""
    model = policy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return TrainerState(model, optimizer, step=7, manifests=ManifestChain().after(bytes(16)))


WRITES = [(TransformerPolicy, "save"), (parallel, "save_file"), (checkpoint, "_random_of")]


@pytest.mark.parametrize(("owner", "write"), WRITES)
def test_a_folder_that_goes_while_it_is_written_is_named(
    owner: Any, write: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original: Any = vars(owner)[write]

    def removed_before(*arguments: Any, **options: Any) -> Any:
        shutil.rmtree(tmp_path / "step-00000007")  # as `remove_old` of who took over does
        return original(*arguments, **options)

    monkeypatch.setattr(owner, write, removed_before)
    with pytest.raises(CheckpointError, match=r"step-00000007 was removed while it was written"):
        save_checkpoint(tmp_path, state())
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_goes_before_its_folder_does_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: Any) -> None:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(TransformerPolicy, "save", gone)
    with pytest.raises(CheckpointError, match="was removed while it was written"):
        save_checkpoint(tmp_path, state())


def test_what_fails_for_another_reason_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(parallel, "save_file", full)
    with pytest.raises(CheckpointError, match=r"step-00000007 cannot be written: .*No space left"):
        save_checkpoint(tmp_path, state())


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Let each write that makes a file larger fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", [0, 100, 5000])
def test_a_checkpoint_for_which_there_is_no_room_is_named_and_removed(
    size: int, tmp_path: Path
) -> None:
    with (
        files_of_at_most(size),
        pytest.raises(CheckpointError, match=r"step-00000007 cannot be written: .*; make room"),
    ):
        save_checkpoint(tmp_path, state())
    assert list(tmp_path.iterdir()) == []
    load_checkpoint(save_checkpoint(tmp_path, state()), state())


def test_a_place_where_no_checkpoint_can_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"step 7 can be written to .*/file/c: .*Not a direc"):
        save_checkpoint(tmp_path / "file" / "c", state())


def test_a_disk_that_fails_under_a_checkpoint_is_named(tmp_path: Path) -> None:
    """The memory of a process, read from its first page on, is a real input/output error."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "weights").symlink_to("/proc/self/mem")
    with pytest.raises(CheckpointError, match=r"checkpoint .* cannot be read.*Input/output error"):
        digest_of(folder)
    with pytest.raises(CheckpointError, match=r"nothing was committed: look after the disk"):
        make_durable(folder)


def test_a_resumed_trainer_draws_the_random_numbers_that_it_would_have_drawn(
    tmp_path: Path,
) -> None:
    folder = save_checkpoint(tmp_path, state())
    drawn = torch.rand(3)
    load_checkpoint(folder, state())
    assert torch.equal(torch.rand(3), drawn)


def test_weights_of_8_bits_are_taken_from_a_checkpoint_unless_they_are_not_finite() -> None:
    eight = torch.ones(2).to(torch.float8_e4m3fn)
    assert all_finite([eight, torch.ones(2)])
    assert not all_finite([eight, torch.tensor([1, torch.nan]).to(eight.dtype)])


def test_a_large_complex_number_is_finite_unless_a_part_of_it_is_not() -> None:
    assert all_finite([torch.tensor([3e38 + 3e38j])])
    assert not all_finite([torch.tensor([complex(1, float("inf"))])])


def test_a_folder_that_is_there_is_never_written_into(tmp_path: Path) -> None:
    first, second = save_checkpoint(tmp_path, state()), save_checkpoint(tmp_path, state())
    assert (first.name, second.name) == ("step-00000007", "step-00000007-2")
    assert load_checkpoint(second, replace(state(), step=0)).step == 7


class Counting(torch.optim.SGD):
    """An optimizer that keeps more than tensors of each parameter."""

    def __init__(self, parameters: Any, **kept: Any) -> None:
        super().__init__(parameters, lr=0.1)
        for one in self.param_groups[0]["params"]:
            self.state[one] = {"moment": torch.ones_like(one), **deepcopy(kept)}


def test_plain_numbers_of_an_optimizer_are_saved_and_restored(tmp_path: Path) -> None:
    kept = {"steps": 3, "scale": 0.1, "is_warm": True, "last": None}
    begun = state()
    folder = save_checkpoint(
        tmp_path, replace(begun, optimizer=Counting(begun.policy.parameters(), **kept))
    )
    fresh = state()
    fresh = replace(fresh, optimizer=Counting(fresh.policy.parameters(), steps=0))
    found = load_checkpoint(folder, fresh).optimizer.state_dict()["state"]
    for index, entries in found.items():
        assert bool((entries.pop("moment") == 1).all())
        assert entries == kept, index
        assert entries["is_warm"] is True


def test_what_an_optimizer_keeps_of_a_bfloat16_weight_has_its_own_type_again(
    tmp_path: Path,
) -> None:
    """Torch would round a float32 copy of a weight, and a count above 256, to bfloat16."""
    kept = {"master": torch.tensor(1.0 + 2**-20), "count": torch.tensor(1001)}
    begun, fresh = state(), state()
    for one in (begun, fresh):
        one.policy.to(torch.bfloat16)
    folder = save_checkpoint(
        tmp_path, replace(begun, optimizer=Counting(begun.policy.parameters(), **kept))
    )
    given = replace(fresh, optimizer=Counting(fresh.policy.parameters()))
    state_of = load_checkpoint(folder, given).optimizer.state
    assert len(state_of) == len([*fresh.policy.parameters()])
    for weight, entries in state_of.items():
        assert entries["moment"].dtype == weight.dtype == torch.bfloat16
        for name, value in kept.items():
            assert entries[name].dtype == value.dtype
            assert torch.equal(entries[name], value)


def test_what_an_optimizer_keeps_in_fewer_bits_than_its_weight_has_has_them_again(
    tmp_path: Path,
) -> None:
    begun, fresh = (
        replace(s, optimizer=Counting(s.policy.parameters())) for s in (state(), state())
    )
    for entries in begun.optimizer.state.values():
        entries["moment"] = entries["moment"].bfloat16()
    resumed = load_checkpoint(save_checkpoint(tmp_path, begun), fresh)
    moments = [entries["moment"] for entries in resumed.optimizer.state.values()]
    assert {moment.dtype for moment in moments} == {torch.bfloat16}


class OwnAdamW(torch.optim.AdamW):
    """Not torch's, as far as a checkpoint can tell."""


@pytest.mark.parametrize(
    ("kind", "before", "then"),
    [
        (torch.optim.AdamW, torch.bfloat16, torch.float32),
        (torch.optim.AdamW, torch.float32, torch.bfloat16),
        (torch.optim.NAdam, torch.bfloat16, torch.bfloat16),
        (torch.optim.Adafactor, torch.bfloat16, torch.float32),
        (OwnAdamW, torch.bfloat16, torch.float32),
    ],
)
def test_a_restart_in_another_precision_goes_on(
    kind: type[torch.optim.Optimizer], before: torch.dtype, then: torch.dtype, tmp_path: Path
) -> None:
    """What has the type of its weight takes that of the new one; a product of its own does not."""

    def stepped(one: TrainerState[TransformerPolicy]) -> None:
        for weight in one.policy.parameters():
            weight.grad = torch.ones_like(weight)
        one.optimizer.step()

    begun, fresh = state(), state()
    begun.policy.to(before)
    fresh.policy.to(then)
    begun, fresh = (replace(s, optimizer=kind(s.policy.parameters())) for s in (begun, fresh))  # type: ignore[call-arg]
    stepped(begun)
    resumed = load_checkpoint(save_checkpoint(tmp_path, begun), fresh)
    stepped(resumed)
    for weight, entries in resumed.optimizer.state.items():
        for value in entries.values():
            assert value.dtype == (then if value.dim() == weight.dim() else torch.float32)


@pytest.mark.parametrize(
    ("kept", "says"),
    [
        ({"seen": {1, 2}}, r"Counting keeps a set as state '0\.seen'"),
        ({"name": "warm"}, r"Counting keeps a str as state '0\.name'"),
    ],
)
def test_what_a_checkpoint_cannot_hold_of_an_optimizer_is_named(
    kept: dict[str, Any], says: str, tmp_path: Path
) -> None:
    begun = state()
    with pytest.raises(CheckpointError, match=says):
        save_checkpoint(
            tmp_path, replace(begun, optimizer=Counting(begun.policy.parameters(), **kept))
        )
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_among_the_settings_of_an_optimizer_is_named(tmp_path: Path) -> None:
    begun = state()
    optimizer = torch.optim.AdamW(begun.policy.parameters(), lr=torch.tensor(0.1))
    with pytest.raises(CheckpointError, match=r"a Tensor as param_groups\[0\]\['lr'\]"):
        save_checkpoint(tmp_path, replace(begun, optimizer=optimizer))


def folders(root: Path, *names: str) -> list[str]:
    """Make folders of checkpoints; return the names of all that are there."""
    for name in names:
        (root / name).mkdir()
    return sorted(path.name for path in root.iterdir())


def test_the_newest_steps_stay_and_what_was_begun_before_the_commit_goes(tmp_path: Path) -> None:
    folders(tmp_path, "step-00000003", "step-00000004", "step-00000005", "step-00000005-2")
    folders(tmp_path, "step-00000005-3", "step-00000006")
    remove_old(tmp_path, keep=2, committed=tmp_path / "step-00000005-2")
    # Neither what is begun later for the same step, nor what is above it, is of this process.
    left = ["step-00000004", "step-00000005-2", "step-00000005-3", "step-00000006"]
    assert folders(tmp_path) == left


def test_what_an_explorer_is_loading_goes_after_a_later_commit(tmp_path: Path) -> None:
    folders(tmp_path, "step-00000003", "step-00000004", "step-00000005")
    read = tmp_path / "step-00000003" / POLICY_FILE
    read.write_text("weights")
    with being_read(read):
        remove_old(tmp_path, keep=1, committed=tmp_path / "step-00000005")
        assert folders(tmp_path) == ["step-00000003", "step-00000005"]
    remove_old(tmp_path, keep=1, committed=tmp_path / "step-00000005")
    assert folders(tmp_path) == ["step-00000005"]


def test_who_was_taken_over_behind_its_commit_removes_nothing(tmp_path: Path) -> None:
    folders(tmp_path, "step-00000008", "step-00000009")
    remove_old(tmp_path, keep=2, committed=tmp_path / "step-00000007")
    assert folders(tmp_path) == ["step-00000008", "step-00000009"]


def test_a_checkpoint_that_goes_while_it_is_written_through_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_checkpoint(tmp_path, state())
    fsync = os.fsync

    def then_gone(descriptor: int) -> None:
        fsync(descriptor)
        shutil.rmtree(folder, ignore_errors=True)

    monkeypatch.setattr(os, "fsync", then_gone)
    with pytest.raises(CheckpointError, match=r"step-00000007 is being removed while it is read"):
        make_durable(folder)


def test_each_rank_goes_on_with_its_own_random_numbers(tmp_path: Path) -> None:
    random, wanted = [], []
    for seed in (1, 2):
        torch.manual_seed(seed)
        random.append(torch.get_rng_state())
        wanted.append(torch.rand(3).tolist())
    folder = save_checkpoint(tmp_path, replace(state(), random=random))
    drawn = []
    for rank in (0, 1, 2, 2, 3):
        load_checkpoint(folder, state(), rank=rank)
        drawn.append(torch.rand(3).tolist())
    assert drawn[:2] == wanted
    assert drawn[2] == drawn[3]  # a rank that there was not
    assert len({tuple(one) for one in drawn}) == 4


def test_the_random_numbers_of_a_gpu_are_kept_behind_those_of_the_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_gpu = torch.arange(16, dtype=torch.uint8)
    restored: list[tuple[torch.Tensor, str]] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda _: of_gpu)
    folder = save_checkpoint(tmp_path, state())
    wanted = torch.rand(3)
    monkeypatch.undo()
    load_checkpoint(folder, state())  # where there is none, nothing is lost
    assert torch.equal(torch.rand(3), wanted)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda *both: restored.append(both))
    load_checkpoint(folder, state(), device="cuda:1")
    assert torch.equal(torch.rand(3), wanted)
    ((numbers, device),) = restored
    assert (numbers.tolist(), device) == (of_gpu.tolist(), "cuda:1")


def test_the_random_numbers_that_are_kept_are_those_of_the_device_that_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def get(device: str) -> torch.Tensor:
        asked.append(device)
        return torch.zeros(16, dtype=torch.uint8)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", get)
    for device in ("cuda:1", "cuda", "cpu"):
        random_state(device)
    assert asked == ["cuda:1", "cuda", "cuda"]


def test_a_large_checkpoint_is_written_in_several_files_and_read_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the trainer, and by transformers as it reads any large model."""
    model = CausalLM(qwen3())
    of_model = TrainerSettings(checkpoints=tmp_path).optimizer_of
    optimizer = of_model(model)
    for weight in model.parameters():
        weight.grad = torch.rand_like(weight)
    optimizer.step()
    saved = TrainerState(model, optimizer, step=7, manifests=ManifestChain())
    monkeypatch.setattr(parallel, "FILE_BYTES", 1 << 13)
    folder = save_checkpoint(tmp_path, saved)
    assert len([*folder.glob("optimizer-*.safetensors")]) > 1
    assert len([*folder.glob("policy/model-*.safetensors")]) > 1
    other = CausalLM(qwen3(1))
    fresh = TrainerState(other, of_model(other), step=0, manifests=ManifestChain())
    loaded = load_checkpoint(folder, fresh)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        wanted, restored = optimizer.state[mine], loaded.optimizer.state[theirs]
        assert all(torch.equal(wanted[name], restored[name]) for name in wanted)
    read = type(model.model).from_pretrained(folder / "policy").state_dict()
    assert all(torch.equal(read[name], own) for name, own in model.model.state_dict().items())
