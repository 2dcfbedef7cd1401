"""The way back to the reference: its behaviour where our default is the published formula."""

from __future__ import annotations

from typing import Any

from trinity_buffer.algorithm.add_strategy.add_strategy import ADD_STRATEGY
from trinity_buffer.algorithm.advantage_fn.advantage_fn import ADVANTAGE_FN
from trinity_buffer.algorithm.arguments import did_you_mean
from trinity_buffer.algorithm.entropy_loss_fn.entropy_loss_fn import ENTROPY_LOSS_FN
from trinity_buffer.algorithm.kl_fn.kl_fn import KL_FN
from trinity_buffer.algorithm.policy_loss_fn.policy_loss_fn import POLICY_LOSS_FN
from trinity_buffer.algorithm.registry import Registry
from trinity_buffer.errors import UnknownNameError

REGISTRIES: dict[str, Registry[Any]] = {
    registry.kind: registry
    for registry in (ADD_STRATEGY, ADVANTAGE_FN, POLICY_LOSS_FN, KL_FN, ENTROPY_LOSS_FN)
}


def reference_kwargs(kind: str, name: str) -> dict[str, Any]:
    """Return the constructor arguments with which ``name`` computes what the reference computes.

    Empty where the defaults already do. They live on the classes, as ``reference_args``.

    Args:
        kind: ``add_strategy``, ``advantage_fn``, ``policy_loss_fn``, ``kl_fn`` or
            ``entropy_loss_fn``.
        name: the registered name.

    Raises:
        UnknownNameError: an unknown kind or name.
    """
    if kind not in REGISTRIES:
        raise UnknownNameError(
            f"no kind {kind!r}{did_you_mean(kind, REGISTRIES)} (there are: {', '.join(REGISTRIES)})"
        )
    return dict(getattr(REGISTRIES[kind].get(name), "reference_args", {}))
