"""Registries of algorithms that forget what a test has registered."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

from trinity_buffer.algorithm import Registry


@contextmanager
def restored(registry: Registry[Any]) -> Iterator[None]:
    """Forget at the end what was registered meanwhile."""
    before = {name: copy(value) for name, value in vars(registry).items()}
    try:
        yield
    finally:
        vars(registry).update(before)
