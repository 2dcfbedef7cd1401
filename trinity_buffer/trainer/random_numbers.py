"""The state of torch's random numbers: the processor's, and behind it that of the GPU in use."""

from __future__ import annotations

import torch
from torch import Tensor


def random_state() -> Tensor:
    """Return the state of this process as bytes, one tensor on the processor."""
    state = torch.get_rng_state()
    if not torch.cuda.is_initialized():
        return state
    return torch.cat([state, torch.cuda.get_rng_state()])


def restore_random(state: Tensor) -> None:
    """Go on with the random numbers of ``state``; those of a GPU only where there is one."""
    size = torch.get_rng_state().numel()
    torch.set_rng_state(state[:size])
    of_gpu = state[size:]
    if len(of_gpu) and torch.cuda.is_available():
        torch.cuda.set_rng_state(of_gpu)
