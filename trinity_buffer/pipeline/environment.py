"""The software, device and settings on which the bits of a gradient step depend.

They are recorded with each commit. A replay restores what can be restored and names the rest.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch

CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""The variable without which torch refuses deterministic products of matrices on a GPU."""

DRIVER_FILE = Path("/proc/driver/nvidia/version")


class Flag(NamedTuple):
    """A setting of torch that changes bits, and that a replay restores."""

    get: Callable[[], Any]
    set: Callable[[Any], None]


def environment_of_run(device: str) -> dict[str, Any]:
    """Return the environment that the bits of a step depend on, as `StepsCommitted` records it.

    Args:
        device: the device that computes the steps.
    """
    transformers = sys.modules.get("transformers")
    environment = {
        "torch": str(torch.__version__),
        "device": device,
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "seed": torch.initial_seed() % (1 << 63),
        **{name: flag.get() for name, flag in flags(device).items()},
        "transformers": getattr(transformers, "__version__", None),
        "only_warns": torch.is_deterministic_algorithms_warn_only_enabled() or None,
        **(_of_gpu(device) if device.startswith("cuda") else {}),
        # The instructions that torch uses, which choose its kernels.
        "processor": None if device.startswith("cuda") else torch.backends.cpu.get_cpu_capability(),
    }
    return {name: value for name, value in environment.items() if value is not None}


def flags(device: str) -> dict[str, Flag]:
    """Return the settings that change bits on a device, by the names under which they are recorded.

    `threads` is one of them; those that make operations deterministic are not.
    """
    settings = {
        "threads": Flag(torch.get_num_threads, torch.set_num_threads),
        "matmul_precision": Flag(_matmul_precision, _set_matmul_precision),
        "attention_backends": Flag(_attention_backends, _set_attention_backends),
    }
    if device.startswith("cuda"):
        matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
        settings |= {
            "matmul_bf16_reduction": _attribute(matmul, "allow_bf16_reduced_precision_reduction"),
            "matmul_fp16_reduction": _attribute(matmul, "allow_fp16_reduced_precision_reduction"),
            "cudnn_tf32": _attribute(cudnn, "allow_tf32"),
        }
    return settings


def settle_cublas() -> None:
    """Choose the workspace of cuBLAS unless it is set; call it before a model is used.

    Torch reads it once, at the first matrix product on a GPU. If it was unset then, deterministic
    products are refused for the rest of the process.
    """
    if torch.version.cuda is not None:  # not `is_available()`, after which no child may use a GPU
        os.environ.setdefault(CUBLAS_WORKSPACE, ":4096:8")


def differences(recorded: Mapping[str, Any], here: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the recorded values that differ here: name -> recorded, here.

    Values that older versions did not record are not compared, nor is the seed: a run that resumes
    takes the random state of its checkpoint.
    """
    return {
        name: [value, here.get(name)]
        for name, value in recorded.items()
        if name != "seed" and here.get(name) != value
    }


def in_words(differing: Mapping[str, list[Any]]) -> str:
    """Return differences as text: ``threads 4 (here 1)``."""
    return ", ".join(f"{name} {then} (here {here})" for name, (then, here) in differing.items())


def _attribute(owner: Any, name: str) -> Flag:
    def get() -> Any:
        with suppress(RuntimeError):  # unreadable after old and new TF32 settings were mixed
            return getattr(owner, name)
        return None

    return Flag(get, lambda value: setattr(owner, name, value))


_PRECISIONS = ("highest", "high", "medium")


def _matmul_precision() -> str:
    """Return the precision of float32 products, by the newer setting where torch has it."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # after mixing both settings, only the new one can be read
        return str(torch.backends.cuda.matmul.fp32_precision)


def _set_matmul_precision(value: str) -> None:
    if value in _PRECISIONS:
        torch.set_float32_matmul_precision(value)
    else:
        torch.backends.cuda.matmul.fp32_precision = value


_BACKENDS = ("cudnn", "flash", "mem_efficient", "math")
"""Of ``scaled_dot_product_attention``, as torch calls them in the names of its functions."""


def _attention_backends() -> str:
    """Return which backends of attention torch may choose from."""
    cuda = torch.backends.cuda  # a CPU heeds these settings too
    return "+".join(name for name in _BACKENDS if getattr(cuda, f"{name}_sdp_enabled")())


def _set_attention_backends(value: str) -> None:
    for name in _BACKENDS:
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(name in value.split("+"))


def _of_gpu(device: str) -> dict[str, Any]:
    return {
        "gpu": torch.cuda.get_device_name(device),
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cublas_workspace": os.environ.get(CUBLAS_WORKSPACE),
        "triton": triton_version(),
    }


@cache
def triton_version() -> str | None:
    """Return the version of Triton, whose kernels compute scores; None: it is not installed."""
    with suppress(metadata.PackageNotFoundError):
        return metadata.version("triton")
    return None


def _driver() -> str | None:
    """Return the version of NVIDIA's driver, which torch does not expose; None: unknown."""
    with suppress(OSError):
        words = DRIVER_FILE.read_text().split("\n", 1)[0].split()
        # NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024
        return next((word for word in words if word[0].isdigit() and "." in word), None)
    return None
