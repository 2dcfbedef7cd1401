"""KL divergences: `KLFn` and its estimators."""

from trinity_buffer.algorithm.kl_fn.kl_fn import *  # noqa: F403 - all that it exports
from trinity_buffer.algorithm.kl_fn.kl_fn import __all__ as __all__
