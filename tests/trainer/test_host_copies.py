"""Copies for a checkpoint from a GPU: one whose streams run as late as they may, on a processor."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
import torch
from safetensors.torch import save_file
from typing_extensions import override

import trinity_buffer as tb
from tests.trainer.data import prepared
from tests.trainer.qwen import qwen3
from trinity_buffer.algorithm import build
from trinity_buffer.trainer import parallel
from trinity_buffer.trainer.checkpoint import PendingCheckpoint
from trinity_buffer.trainer.parallel import Gpus, HostCopies
from trinity_buffer.trainer.trainer import is_beside


class LateStream:
    """Work that is done when somebody waits for it, and no earlier."""

    def __init__(self) -> None:
        self.work: list[Callable[[], object]] = []
        self.done = 0
        self.lock = threading.RLock()

    def add(self, work: Callable[[], object]) -> None:
        self.work.append(work)

    def run(self, up_to: int) -> None:
        with self.lock:  # who writes waits in a thread of its own
            while self.done < up_to:
                self.done += 1
                self.work[self.done - 1]()

    def synchronize(self) -> None:
        self.run(len(self.work))

    def wait_stream(self, other: LateStream) -> None:
        up_to = len(other.work)
        self.add(lambda: other.run(up_to))


class LateGpu(Gpus):
    """Holds every tensor of floats, and copies it late; other tensors are the processor's."""

    def __init__(self, *, pinned: int = 1 << 62) -> None:
        self.compute = LateStream()
        self.streams: list[LateStream] = []
        self.pinned_left = pinned
        self.blocks: list[int] = []
        self.released = 0

    @override
    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.is_floating_point()

    @override
    def pinned(self, size: int) -> torch.Tensor:
        if size > self.pinned_left:
            raise RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA")
        self.pinned_left -= size
        self.blocks.append(size)
        return torch.full((size,), 255, dtype=torch.uint8)

    @override
    def release(self) -> None:
        self.released += 1

    @override
    def new_stream(self, device: torch.device) -> LateStream:
        assert device == torch.device("cpu")
        self.streams.append(LateStream())
        return self.streams[-1]

    @override
    def current_stream(self, device: torch.device) -> LateStream:
        assert device == torch.device("cpu")
        return self.compute

    @override
    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], stream: LateStream) -> None:
        for source, target in pairs:
            stream.add(partial(target.copy_, source))


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "SMALLEST_BLOCK", 1 << 10)
    monkeypatch.setattr(parallel, "LARGEST_BLOCK", 1 << 12)


def test_what_was_computed_before_is_copied_and_what_comes_after_waits() -> None:
    gpu, weight = LateGpu(), torch.zeros(3)
    copies = HostCopies(copied=True, gpu=gpu)
    copies.begin()
    gpu.compute.add(lambda: weight.fill_(1.0))  # a step of the optimizer that runs still
    (taken,) = copies.take([weight])
    copies.hold()
    gpu.compute.add(lambda: weight.fill_(2.0))  # the next one
    gpu.compute.synchronize()
    copies.wait()
    assert taken.tolist() == [1.0] * 3
    assert weight.tolist() == [2.0] * 3


def test_what_is_being_computed_is_copied_when_it_is_done() -> None:
    gpu, weight = LateGpu(), torch.zeros(3)
    copies = HostCopies(copied=False, gpu=gpu)
    copies.begin()
    gpu.compute.add(lambda: weight.fill_(1.0))
    (taken,) = copies.take([weight])
    copies.wait()  # nobody waited for the computing
    assert taken.tolist() == [1.0] * 3


def test_without_the_wait_the_next_step_would_be_copied() -> None:
    """So that the test before this one can fail."""
    gpu, weight = LateGpu(), torch.zeros(3)
    copies = HostCopies(copied=True, gpu=gpu)
    copies.begin()
    (taken,) = copies.take([weight])
    gpu.compute.add(lambda: weight.fill_(2.0))
    gpu.compute.synchronize()
    copies.wait()
    assert taken.tolist() == [2.0] * 3


def test_many_copies_are_under_way_at_once() -> None:
    gpu = LateGpu()
    copies = HostCopies(copied=False, gpu=gpu)
    copies.begin()
    taken = copies.take([torch.full((5,), float(number)) for number in range(40)])
    assert [stream.done for stream in gpu.streams] == [0]
    copies.wait()
    assert [one[0].item() for one in taken] == [float(number) for number in range(40)]


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]


def tensors_of(seed: int) -> dict[str, torch.Tensor]:
    """Return tensors of all kinds and shapes, some of them in another order in memory."""
    torch.manual_seed(seed)
    shapes = [(), (0,), (1,), (3, 0, 2), (7,), (5, 3), (2, 3, 5), (41, 17)]
    found = {}
    for number, dtype in enumerate(DTYPES * 3):
        shape = shapes[int(torch.randint(len(shapes), ()))]
        values = torch.randn(shape, dtype=torch.float64) * 9
        tensor = (values > 0) if dtype is torch.bool else values.to(torch.float32).to(dtype)
        found[f"{number}.{dtype}"] = tensor.t() if tensor.dim() == 2 else tensor
    return found


class TakesAll(LateGpu):
    @override
    def holds(self, tensor: torch.Tensor) -> bool:
        return True


@pytest.mark.parametrize("seed", range(3))
def test_a_file_of_copies_has_the_bytes_of_one_of_the_tensors_themselves(
    seed: int, tmp_path: Path
) -> None:
    tensors = tensors_of(seed)
    copies = HostCopies(copied=True, gpu=TakesAll())
    for again in range(2):
        copies.begin()
        taken = dict(zip(tensors, copies.take([*tensors.values()]), strict=True))
        copies.wait()
        save_file(taken, tmp_path / f"taken-{again}")
    plain = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(plain, tmp_path / "plain")
    wanted = (tmp_path / "plain").read_bytes()
    assert [(tmp_path / f"taken-{again}").read_bytes() for again in range(2)] == [wanted, wanted]


def test_memory_is_used_again_for_the_next_checkpoint_and_given_back_at_the_end() -> None:
    gpu = LateGpu()
    copies = HostCopies(copied=True, gpu=gpu)
    tensors = [torch.rand(size) for size in (10, 3000, 1, 200, 7, 100)]
    places = []
    for _ in range(3):
        copies.begin()
        places.append([taken.data_ptr() for taken in copies.take(tensors)])
        copies.wait()
    assert places[0] == places[1] == places[2]
    assert len(set(places[0])) == len(tensors)
    assert gpu.blocks == [1 << 10, 1 << 14]  # powers of 2, as torch allocates; the last as needed
    copies.close()
    copies.close()
    assert gpu.released == 1


def test_memory_that_cannot_be_page_locked_is_taken_as_it_is_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gpu = LateGpu(pinned=1 << 10)
    copies = HostCopies(copied=True, gpu=gpu)
    copies.begin()
    tensors = [torch.rand(size) for size in (10, 3000, 9000)]
    taken = copies.take(tensors)
    copies.wait()
    assert all(torch.equal(one, other) for one, other in zip(taken, tensors, strict=True))
    (record,) = caplog.records
    assert record.getMessage().endswith("holds the training up: CUDA error: out of memory")


@pytest.mark.parametrize("copied", [True, False])
def test_on_a_processor_a_tensor_is_copied_only_if_it_may_change(*, copied: bool) -> None:
    copies, weight = HostCopies(copied=copied), torch.ones(2)
    copies.begin()
    (taken,) = copies.take([weight])
    copies.hold()
    weight.fill_(2.0)
    copies.wait()
    assert taken.tolist() == ([1.0, 1.0] if copied else [2.0, 2.0])
    copies.close()


def files_below(folder: Path) -> dict[str, bytes]:
    """Return the weights and what the optimizer keeps, of each checkpoint."""
    files = sorted(folder.rglob("*.safetensors"))
    assert len(files) == 3 * 2
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


@torch.no_grad()
def shrink(weights: Sequence[torch.Tensor], _: tb.StepReport) -> None:
    for weight in weights:
        weight.mul_(0.9)


def test_what_is_computed_after_a_commit_waits_for_the_copies(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A report changes the weights, too."""
    anyio.run(prepared, sqlite_url, build("grpo"))
    gpus: list[LateGpu] = []
    may, finish = threading.Event(), PendingCheckpoint.finish

    class LateCopies(HostCopies):
        def __init__(self, *, copied: bool) -> None:
            gpus.append(LateGpu())
            super().__init__(copied=copied, gpu=gpus[-1])

        @override
        def hold(self) -> None:
            super().hold()
            gpus[-1].compute.synchronize()  # what is computed here is computed at once

    def late(pending: PendingCheckpoint) -> dict[Path, str]:
        assert may.wait(60)
        return finish(pending)

    def measure(step: int) -> dict[str, float]:
        if step == 2:  # it is trained
            may.set()
        return {}

    monkeypatch.setattr(parallel, "HostCopies", LateCopies)
    monkeypatch.setattr(PendingCheckpoint, "finish", late)
    for name in ("beside", "at once"):
        with tb.open_train_stream(
            sqlite_url, experiment="run", strategy="grpo", consumer=name, groups_per_step=2
        ) as stream:
            settings = tb.TrainerSettings(
                checkpoints=tmp_path / name,
                async_checkpoints=name == "beside",
                keep_checkpoints=None,
            )
            model = qwen3()
            weights = list(model.parameters())
            report = partial(shrink, weights)
            tb.Trainer(stream, model, build("grpo"), settings).run(report, measure=measure)
    assert files_below(tmp_path / "beside") == files_below(tmp_path / "at once")
    assert [gpu.released for gpu in gpus] == [1, 1]


@pytest.mark.parametrize(
    ("device", "has_parts", "asked", "wanted"),
    [
        ("cuda", True, None, True),
        ("cpu", True, None, False),
        ("cuda", False, None, False),  # a copy of it would lie on the GPU
        ("cpu", True, True, True),
        ("cuda", False, True, True),
        ("cuda", True, False, False),
    ],
)
def test_checkpoints_of_a_model_on_a_gpu_are_written_beside_the_training_unless_told_otherwise(
    *, device: str, has_parts: bool, asked: bool | None, wanted: bool
) -> None:
    policy: Any = SimpleNamespace(
        parameters=lambda: iter([SimpleNamespace(device=torch.device(device))])
    )
    if has_parts:
        policy.held = dict
    settings = tb.TrainerSettings(checkpoints=Path(), async_checkpoints=asked)
    assert is_beside(settings, policy) is wanted
