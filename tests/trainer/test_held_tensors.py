"""Tensors of which one rank holds all: DTensors, and still no copies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from trinity_buffer.errors import CheckpointError, InvalidArgumentError
from trinity_buffer.pipeline.train.checkpoint import make_durable, written
from trinity_buffer.trainer.models import require_trained
from trinity_buffer.trainer.parallel import (
    HostCopies,
    opened,
    owners_of,
    part_like,
    whole_tensors,
    write_share,
)


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    meeting = f"file://{tmp_path / 'ranks'}"
    torch.distributed.init_process_group("gloo", meeting, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_what_is_copied_stays_when_the_weights_change(mesh: Any) -> None:
    held = {"sharded": distribute_tensor(torch.ones(4), mesh, [Shard(0)]), "plain": torch.ones(4)}
    kept = whole_tensors(held, list(held), HostCopies(copied=True))
    for tensor in held.values():
        tensor.mul_(3)
    assert [one.tolist() for one in kept.values()] == [[1.0] * 4] * 2


def test_a_part_is_laid_out_like_what_is_held(mesh: Any) -> None:
    held = distribute_tensor(torch.zeros(3, 2), mesh, [Shard(0)])
    part: Any = part_like(torch.arange(6.0).view(3, 2), held)
    assert part.placements == held.placements
    assert torch.equal(part.full_tensor(), torch.arange(6.0).view(3, 2))


def test_weights_of_which_only_some_are_in_parts_are_refused(mesh: Any) -> None:
    class Mixed:
        def parameters(self) -> Iterator[torch.nn.Parameter]:
            yield torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
            yield torch.nn.Parameter(torch.ones(4))

        def held(self) -> dict[str, torch.Tensor]:
            return {}

    with pytest.raises(InvalidArgumentError, match="call fully_shard on the model itself"):
        require_trained(Mixed(), None)  # type: ignore[arg-type]  # all that is asked of it


def test_shares_are_of_about_one_size_and_read_as_one(tmp_path: Path) -> None:
    tensors = {f"w{n}": torch.full((n + 1,), float(n)) for n in range(7)}
    owners = owners_of(tensors, 3)
    assert owners == owners_of(dict(reversed(tensors.items())), 3)
    loads = [sum(len(tensors[n]) for n, owner in owners.items() if owner == r) for r in range(3)]
    assert max(loads) - min(loads) <= 1
    for rank in range(3):
        mine = {name: tensors[name] for name, owner in owners.items() if owner == rank}
        write_share(tmp_path, "model", mine, owners, rank, 3)
    with opened(tmp_path, "model") as found:
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_a_share_that_lies_on_another_disk_is_missed(tmp_path: Path) -> None:
    checkpoint = tmp_path / "step-1"
    checkpoint.mkdir()
    own, other = checkpoint / "model-1", checkpoint / "model-2"
    for file in (own, other):
        file.write_bytes(b"weights")
    known = dict(zip((own, other), written([own, other]), strict=True))
    digest = make_durable(checkpoint, dict(known))
    assert digest == make_durable(checkpoint)
    other.unlink()  # this machine never had it
    with pytest.raises(CheckpointError, match="lacks model-2, which another rank wrote"):
        make_durable(checkpoint, dict(known))
    make_durable(own, dict(known))  # what lies elsewhere is no part of this
