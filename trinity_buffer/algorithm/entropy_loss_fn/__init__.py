"""Entropy bonuses: `EntropyLossFn` and its kinds."""

from trinity_buffer.algorithm.entropy_loss_fn.entropy_loss_fn import *  # noqa: F403 - as there
from trinity_buffer.algorithm.entropy_loss_fn.entropy_loss_fn import __all__ as __all__
