"""Errors in code of the user's own: which line one came from, and the sentence about it."""

from __future__ import annotations

import inspect
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from trinity_buffer import errors

OURS = Path(__file__).parent
_INSTALLED = tuple(
    Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_OF_WHAT_IT_GAVE = (TypeError, ValueError, AttributeError, LookupError, AssertionError)
"""Errors of our own code on a value that it cannot use; torch raises a plain RuntimeError."""


def is_own(cls: object) -> bool:
    """Return whether a class is not of this package."""
    return str(getattr(cls, "__module__", "")).partition(".")[0] != OURS.name


def look_in(folder: str | Path | None = None) -> str:
    """Add a folder, by default the current one, to the import path, and return it."""
    path = str(Path(folder or ".").resolve())
    if path not in sys.path:
        sys.path.insert(0, path)
    return path


def failed(what: str, error: BaseException, parts: Iterable[object] = ()) -> errors.TrainingError:
    """Return an error that names what failed, how, and the line of the user's file."""
    message = f"{what} failed: {describe_error(error)}"
    line = own_line(error, parts)
    failure = errors.TrainingError(message if line is None else f"{message} ({line})")
    for note in getattr(error, "__notes__", ()):
        failure.add_note(note)
    return failure


def describe_error(error: BaseException) -> str:
    """Return the kind of an error and its message, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")


def kind_of(value: object) -> str:
    """Describe the type of a value that the user's code returned."""
    return "None" if value is None else f"a value of type {type(value).__name__}"


def own_line(error: BaseException, parts: Iterable[object] = ()) -> str | None:
    """Return the last line of the user's code that ``error`` passed, or None.

    Args:
        error: the error that was caught.
        parts: classes that are known to be the user's, wherever they are installed.
    """
    files = {_source_location(part)[0] for part in parts}
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [f for f in frames if f.filename in files or _is_theirs(f.filename)]
    return f"{theirs[-1].filename}, line {theirs[-1].lineno}" if theirs else None


@contextmanager
def own_code(parts: Mapping[str, object] | None = None) -> Iterator[None]:
    """Turn errors of the user's own code into one sentence; errors of ours pass unchanged.

    Args:
        parts: the user's own classes by name: if no line of theirs raised, the value that they
            returned is blamed.

    Raises:
        TrainingError: in place of an error of the user's code.
    """
    own = {name: part for name, part in (parts or {}).items() if is_own(part)}
    what = " and ".join(own) or "code of your own"
    places = ", ".join("{}, line {}".format(*_source_location(part)) for part in own.values())
    try:
        yield
    except (errors.InvalidArgumentError, errors.NonFiniteError) as error:
        if own:
            error.add_note(f"{what} is your own ({places})")
        raise
    except errors.TrinityBufferError:
        raise
    except Exception as error:
        if own_line(error, own.values()) is not None:
            raise failed(what, error, own.values()) from error
        if own and (isinstance(error, _OF_WHAT_IT_GAVE) or type(error) is RuntimeError):
            raise errors.TrainingError(
                f"{what} ({places}) returned something unusable: {describe_error(error)}"
            ) from error
        raise


def _is_theirs(file: str) -> bool:
    """Return whether a file is neither ours nor an installed package's.

    Compiled code names files that do not exist.
    """
    path = Path(file)
    return not {OURS, *_INSTALLED} & set(path.parents) and path.is_file()


def _source_location(part: object) -> tuple[str, int]:
    """Return file and line of a class, or its module and 0 without a source."""
    try:
        file = inspect.getsourcefile(part)  # type: ignore[arg-type]  # a class, or what has no file
        return str(file), inspect.getsourcelines(part)[1]  # type: ignore[arg-type]  # likewise
    except (OSError, TypeError):
        return str(getattr(part, "__module__", part)), 0
