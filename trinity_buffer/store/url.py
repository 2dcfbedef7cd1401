"""The address of a store, a URL or the path of a SQLite file, and errors where none is there."""

from __future__ import annotations

import math
import re
from os import PathLike, fspath
from pathlib import Path

from sqlalchemy import make_url
from sqlalchemy.engine import URL
from sqlalchemy.exc import ArgumentError

from trinity_buffer.errors import InvalidArgumentError, UnknownStoreError
from trinity_buffer.identity import closest

RECONNECT_S = 120.0
"""For how long calls wait for a server that is away, unless the URL says otherwise."""

StoreURL = str | PathLike[str]
"""A URL, or the path of a SQLite file; ``~`` is the user's folder in both."""


def parse_url(url: StoreURL) -> URL:
    """Return the parsed URL of a store; a bare path is a SQLite file.

    Raises:
        InvalidArgumentError: neither sqlite nor postgresql, or one without a place; or a folder in
            place of a file.
    """
    address = fspath(url)
    if address in ("postgresql", "postgres", "sqlite"):
        raise InvalidArgumentError(f"{address!r} names no store; {_ACCEPTED}")
    several = _SEVERAL_HOSTS.fullmatch(address)
    if several is not None:  # they move behind the ``?``, one by one
        hosts = [host if ":" in host else f"{host}:5432" for host in several["hosts"].split(",")]
        query = "&".join([*(f"host={host}" for host in hosts), *filter(None, [several["query"]])])
        address = f"{several['before']}{several['path'] or '/'}?{query}"
    try:
        parsed = make_url(address) if "://" in address else URL.create("sqlite", database=address)
    except (ArgumentError, ValueError) as error:  # the latter for a port that is no number
        raise InvalidArgumentError(f"the store's URL cannot be read; {_ACCEPTED}") from error
    backend, database = parsed.get_backend_name(), parsed.database or ""
    if backend == "postgresql":
        if address.partition("://")[2].count("@") > 1:  # or the rest of a password would be shown
            raise InvalidArgumentError(
                "the store's URL cannot be read; write @ in a password as %40"
            )
        return _of_server(parsed)
    if backend != "sqlite":
        raise InvalidArgumentError(f"a store cannot live in {backend!r}; {_ACCEPTED}")
    if database in ("", ":memory:"):
        raise InvalidArgumentError(
            "a store in memory is lost with its process; name a file: sqlite:///runs/a.db"
        )
    path = str(Path(database).expanduser())
    if database.endswith("/"):
        raise InvalidArgumentError(
            f"{database} names a directory; name a file in it, such as {path}/run.db"
        )
    return parsed.set(drivername="sqlite", database=path)


_SEVERAL_HOSTS = re.compile(
    r"(?P<before>postgresql[^:]*://(?:[^/@?]*@)?)(?P<hosts>[^/?@]*,[^/?@]*)"
    r"(?P<path>/[^?]*)?(?:\?(?P<query>.*))?"
)


def _of_server(parsed: URL) -> URL:
    """Return the URL of a server with our driver, whose options behind the ``?`` are checked."""
    query = {"sslmode" if key == "ssl" else key: value for key, value in parsed.query.items()}
    for key in query.keys() - _POSTGRESQL_QUERY:
        raise InvalidArgumentError(
            f"the store's URL has {key}=: accepted behind the ? are "
            f"{', '.join(sorted(_POSTGRESQL_QUERY))}"
        )
    url = parsed.set(drivername="postgresql+psycopg", query=query)
    reconnect_s_of(url)
    if (wanted := query.get("target_session_attrs", "any")) not in _SESSIONS:
        raise InvalidArgumentError(
            f"the store's URL has target_session_attrs={wanted}: accepted are "
            f"{', '.join(_SESSIONS)}"
        )
    return url


def reconnect_s_of(url: URL) -> float:
    """Return for how many seconds calls wait for a server that is away.

    Raises:
        InvalidArgumentError: the URL has another value than a number of seconds.
    """
    text = str(url.query.get("reconnect_s", RECONNECT_S))
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        raise InvalidArgumentError(
            f"the store's URL has reconnect_s={text}: it must be a number of seconds, 0 or more"
        )
    return seconds


def named(url: StoreURL) -> str:
    """Return the URL of a store without its password, for messages."""
    parsed = parse_url(url)
    return parsed.set(drivername=parsed.get_backend_name()).render_as_string(hide_password=True)


def nothing_at(path: Path, *, read_only: bool = True) -> UnknownStoreError:
    """Return the error of a missing file, with similar names beside ``path``.

    Args:
        path: of a file that is not there.
        read_only: False for a trainer, which comes after an explorer.
    """
    meant = closest(path.name, sorted(file.name for file in path.parent.glob("*.db")))
    there = "" if read_only else WRITE_FIRST
    if meant is not None:
        there = f" (did you mean {path.with_name(meant)}?)"
    if not path.parent.is_dir():
        there = ", nor is there its folder"
    return UnknownStoreError(f"{path}: there is no store to read{there}")


WRITE_FIRST = ": start the explorer first, or wait until it has written"
_POSTGRESQL_QUERY = frozenset({"host", "port", "sslmode", "reconnect_s", "target_session_attrs"})
_SESSIONS = ("any", "primary", "standby", "read-write", "read-only")
_ACCEPTED = "accepted are sqlite:///path/to/file.db and postgresql://user@host/database"
