"""Packages that an extra brings: imported when they are used, and named where they are missing."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from trinity_buffer.errors import InvalidArgumentError


def extra(module: str, name: str) -> Any:
    """Return ``module``, which ``pip install 'trinity-buffer[name]'`` brings.

    Raises:
        InvalidArgumentError: it is not installed; the message names the extra.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise InvalidArgumentError(
            f"this needs {module.partition('.')[0]}: pip install 'trinity-buffer[{name}]' ({error})"
        ) from error
