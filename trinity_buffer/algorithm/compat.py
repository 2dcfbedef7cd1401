"""The way back to the reference: its behaviour where our default is the published formula."""

from __future__ import annotations

from typing import Any

from trinity_buffer.algorithm.arguments import did_you_mean
from trinity_buffer.algorithm.building import REGISTRY_OF
from trinity_buffer.errors import UnknownNameError

REGISTRIES = {registry.kind: registry for registry in REGISTRY_OF.values()}


def reference_kwargs(kind: str, name: str) -> dict[str, Any]:
    """Return the constructor arguments with which ``name`` computes what the reference computes.

    Empty where the defaults already do. They live on the classes, as ``reference_args``.

    Args:
        kind: of a registry, such as ``add_strategy``, ``advantage_fn`` or ``policy_loss_fn``.
        name: the registered name.

    Raises:
        UnknownNameError: an unknown kind or name.
    """
    if kind not in REGISTRIES:
        raise UnknownNameError(
            f"no kind {kind!r}{did_you_mean(kind, REGISTRIES)} (there are: {', '.join(REGISTRIES)})"
        )
    return dict(getattr(REGISTRIES[kind].get(name), "reference_args", {}))
