"""The SQLite that this package runs on: that of the wheel `pysqlite3`, otherwise Python's own.

The wheel carries a release without the WAL-reset bug. For Linux on aarch64 there is none: there
Python's own library serves, if it is a fixed release. `sqlite.require_safe_library` refuses it
otherwise.
"""

from __future__ import annotations

try:
    from pysqlite3 import dbapi2
except ModuleNotFoundError:
    from sqlite3 import dbapi2

__all__ = ["dbapi2"]
