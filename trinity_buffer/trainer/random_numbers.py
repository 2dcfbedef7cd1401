"""The state of torch's random numbers: the processor's, and behind it that of a GPU."""

from __future__ import annotations

import torch
from torch import Tensor


def random_state(device: str = "cuda") -> Tensor:
    """Return the state of this process as bytes, one tensor on the processor.

    Args:
        device: on which is computed; of ``cuda``, and of the processor, it is the current GPU.
    """
    state = torch.get_rng_state()
    if not torch.cuda.is_initialized():
        return state
    return torch.cat([state, torch.cuda.get_rng_state(_gpu(device))])


def restore_random(state: Tensor, device: str = "cuda") -> None:
    """Go on with the random numbers of ``state``; those of a GPU only where there is one.

    Args:
        device: see `random_state`.
    """
    size = torch.get_rng_state().numel()
    torch.set_rng_state(state[:size])
    of_gpu = state[size:]
    if len(of_gpu) and torch.cuda.is_available():
        torch.cuda.set_rng_state(of_gpu, _gpu(device))


def _gpu(device: str) -> str:
    return device if device.startswith("cuda") else "cuda"
