"""Lazy imports: names of a package, loaded on first use, and packages that an extra installs."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

from trinity_buffer.errors import InvalidArgumentError

_IMPORT = re.compile(r"^    from (\S+) import (?:\(\s+)?(\w+) as \2\b", re.MULTILINE)


def homes_in(file: str) -> dict[str, str]:
    """Return public name -> the module that defines it, from a package's imports for type checkers.

    Those are under ``if TYPE_CHECKING`` in its ``file``, where no line of Python runs them: so each
    name is written once. ``lazy_loader`` reads a stub file likewise (https://scientific-python.org/specs/spec-0001).
    """
    with open(file, encoding="utf-8") as source:  # noqa: PTH123 - every start would load pathlib
        return {name: home for home, name in _IMPORT.findall(source.read())}


def lazy_exports(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package.

    Args:
        package: its name.
        homes: public name -> the module that defines it.
    """

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)  # found without this function from now on
        return value

    return load, lambda: sorted({*vars(sys.modules[package]), *homes})


def renamed(old: str, new: str) -> ModuleType:
    """Let the module ``new`` be imported as ``old`` too, with a warning, and return that alias."""

    def forwarded(name: str) -> Any:
        # Only names of users: tools ask each module in `sys.modules` for its dunder names.
        if name.startswith("__"):
            raise AttributeError(name)
        message = f"{old} is now {new}; the old name goes with the next release"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return getattr(import_module(new), name)

    alias = sys.modules.setdefault(old, ModuleType(old))
    vars(alias)["__getattr__"] = forwarded
    return alias


TESTED = {
    "transformers": ">=4.56,<5.24",
    "peft": ">=0.17,<0.22",
    "trl": ">=1.16,<1.17",
    "verl": ">=0.9,<0.10",
    "TransferQueue": ">=0.1.11,<0.2",
    "trinity-rft": ">=0.6,<0.7",
}
"""Packages that change what is used of them from release to release -> the tested releases."""


def extra(module: str, name: str) -> Any:
    """Return ``module``, which ``pip install 'trinity-buffer[name]'`` brings.

    Raises:
        InvalidArgumentError: it is not installed, or is another release; the message names the
            extra, and the releases that were tested.
    """
    try:
        return import_module(module)
    except ImportError as error:
        remedy = f"trinity-buffer[{name}]"
        raise InvalidArgumentError(_lacking(module.partition(".")[0], remedy, error)) from error


@contextmanager
def importing(package: str, remedy: str) -> Iterator[None]:
    """Import names of ``package`` inside the context: an adapter's, when it is imported itself.

    Args:
        package: as package indexes call it.
        remedy: what to give to ``pip install``.

    Raises:
        ImportError: it is not installed, or is another release; says which were tested.
    """
    try:
        yield
    except ImportError as error:
        raise ImportError(_lacking(package, remedy, error), name=error.name) from error


def _lacking(package: str, remedy: str, error: ImportError) -> str:
    """Return the command to install a package, and why the installed release is too old."""
    tested = TESTED.get(package, "")
    message = f"this needs {package}{tested}"
    if tested:
        try:  # loaded here: it is slow to import, and each command imports this module
            metadata = import_module("importlib.metadata")
            message += f", and {package} {metadata.version(package)} is installed"
        except ModuleNotFoundError:
            message += ", the releases that were tested"
    return f"{message}: pip install '{remedy}' ({error})"
