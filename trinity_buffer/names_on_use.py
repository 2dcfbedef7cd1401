"""Names of a package that are found on first use: asking for one loads no module of another."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

from typing_extensions import override


def names_on_use(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package.

    Args:
        package: its name.
        homes: public name -> the module that defines it.
    """

    def found(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return found, lambda: sorted({*vars(sys.modules[package]), *homes})


def renamed(old: str, new: str) -> ModuleType:
    """Let the module ``new`` be imported as ``old`` too, with a warning, and return that alias."""

    class Alias(ModuleType):
        @override
        def __getattr__(self, name: str) -> Any:
            # Only names of users: tools ask each module in `sys.modules` for its dunder names.
            if name.startswith("__"):
                raise AttributeError(name)
            message = f"{old} is now {new}; the old name goes with the next release"
            warnings.warn(message, DeprecationWarning, stacklevel=2)
            return getattr(import_module(new), name)

    return sys.modules.setdefault(old, Alias(old))
