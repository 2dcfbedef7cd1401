"""What a replay must restore, or name as different: where gradients were computed."""

from __future__ import annotations

from typing import Any

import torch


def environment_of_run(device: str) -> dict[str, Any]:
    """Return torch's version, device, threads, flags and seed, as `StepsCommitted` has them."""
    return {
        "torch": torch.__version__,
        "device": device,
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "seed": torch.initial_seed() % (1 << 63),
    }
