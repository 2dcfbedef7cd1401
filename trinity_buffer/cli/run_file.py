"""The file of a run as it is written: parsed, and where it says that the run is."""

from __future__ import annotations

import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

from trinity_buffer.errors import InvalidArgumentError

YAML = (".yaml", ".yml")
"""Endings of YAML files; any other file is TOML."""

PLACES = ("store", "experiment")
"""Keys that say where a run is, which is no part of its configuration."""

OWN = frozenset({"tokenizer", "rollout", "tasks", "evaluate", "folder"})
"""Keys that name what is one's own, beside ``model``, which may be a section of the demo's."""


def parsed(path: Path) -> dict[str, Any]:
    """Return the table in a TOML or YAML file.

    Raises:
        InvalidArgumentError: it is not there, or cannot be read.
    """
    try:
        text = path.read_text("utf-8-sig")
        found = _yaml(text) if path.suffix in YAML else tomllib.loads(text)
    except OSError as error:
        raise InvalidArgumentError(f"configuration {path}: {error.strerror}") from error
    except RecursionError as error:
        raise InvalidArgumentError(f"configuration {path}: it is nested too deeply") from error
    except ValueError as error:
        known = path.suffix in (".toml", *YAML)
        read_as = "" if known else f" (read as TOML; YAML ends with {' or '.join(YAML)})"
        raise InvalidArgumentError(f"configuration {path}: {error}{read_as}") from error
    if not isinstance(found, dict):
        raise InvalidArgumentError(f"configuration {path}: it holds no table")
    return found


def _yaml(text: str) -> Any:
    import yaml  # noqa: PLC0415 - only who has such a file needs it

    try:
        return yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:  # its text quotes the file, and that a password
        mark = error.problem_mark
        place = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
        raise ValueError(f"{error.problem}{place}") from None
    except yaml.YAMLError as error:
        raise ValueError("it holds a character that YAML does not allow") from error


def place_of(path: Path, key: str, named: str) -> Path:
    """Return the file or folder that a key of the file ``path`` names, seen from its folder.

    Raises:
        InvalidArgumentError: the text can be no path.
    """
    try:
        place = (path.parent / named).resolve()
        with suppress(FileNotFoundError):
            place.lstat()
    except (OSError, ValueError, RuntimeError) as error:  # the last of links in a circle
        wrong = error.strerror if isinstance(error, OSError) else error
        raise InvalidArgumentError(
            f"configuration {path}: {key}={named!r:.100}: {wrong}"
        ) from error
    else:
        return place


def is_folder(path: Path) -> bool:
    """Return whether there is such a folder; a text that can be no path names none."""
    try:
        return path.is_dir()
    except OSError:
        return False


def store_in(path: Path) -> str | None:
    """Return the store that a file names: a URL, or a path from the folder of the file."""
    store = _text(path, "store")
    if store is None or "://" in store:
        return store
    return str(path.parent / Path(store).expanduser())


def experiment_in(path: Path) -> str | None:
    """Return the experiment that a file names."""
    return _text(path, "experiment")


def _text(path: Path, key: str) -> str | None:
    found = parsed(path).get(key)
    if found is not None and not (isinstance(found, str) and found and "\0" not in found):
        raise InvalidArgumentError(
            f"configuration {path}: {key}={found!r}: it must be a text, without NUL"
        )
    return found
