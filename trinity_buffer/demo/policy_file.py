"""The file of a policy: whole or not there, and as true as its bytes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from trinity_buffer.errors import CheckpointError
from trinity_buffer.trainer.policy import all_finite

_METADATA_KEY = "trinity_buffer_policy"


def write_policy(
    path: str | Path,
    config: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    metadata: Mapping[str, Any],
) -> None:
    """Write the weights to the safetensors file ``path``, whole or not at all, durably.

    The bytes depend on the weights, the config and ``metadata`` alone. The data is on the disk, and
    so is its name, when this returns.
    """
    # One key: safetensors writes several in an order that changes from run to run.
    header = {"config": dict(config), "metadata": dict(metadata)}
    tensors = {name: t.detach().cpu().contiguous() for name, t in weights.items()}
    data = save(tensors, metadata={_METADATA_KEY: json.dumps(header, sort_keys=True)})
    _write_durably(Path(path), data)


def read_policy(path: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return config and weights, on the CPU.

    Raises:
        CheckpointError: there is no such file, it is not a policy, or its weights are not finite.
    """
    header, tensors = _read(path, with_tensors=True)
    if not all_finite(tensors.values()):
        raise CheckpointError(
            f"{path}: the weights hold NaN or Inf, nothing can be sampled from them; publish an "
            "older checkpoint"
        )
    return header["config"], tensors


def policy_metadata(path: str | Path) -> dict[str, Any]:
    """Return the ``metadata`` that was written, without reading the weights.

    Raises:
        CheckpointError: there is no such file, or it is not a policy.
    """
    return dict(_read(path, with_tensors=False)[0]["metadata"])


def _read(path: str | Path, *, with_tensors: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {})[_METADATA_KEY])
            header = {"config": dict(header["config"]), "metadata": dict(header["metadata"])}
            names = file.keys() if with_tensors else ()
            return header, {name: file.get_tensor(name) for name in names}
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: there is no such policy file") from error
    except (SafetensorError, KeyError, OSError, ValueError, TypeError, RuntimeError) as error:
        raise CheckpointError(
            f"{path}: not a policy that save_policy wrote ({error}); publish it again"
        ) from error


def _write_durably(path: Path, data: bytes) -> None:
    """Write a temporary file beside ``path``, sync it, give it its name, sync the folder."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
