"""Keeps a store of the schema as it is now, for every later version to migrate.

python -m tests.migration.kept    # once for each revision, when it is released; then never again
"""

from __future__ import annotations

import asyncio
import gzip
import tempfile
from contextlib import closing
from pathlib import Path

from pysqlite3 import dbapi2

from tests.sample_run import record_sample_run
from tests.whole_stores import SCHEMA_REVISION

STORES = Path(__file__).parent / "stores"


def kept(revision: str) -> Path:
    """Return where the store of a revision is kept."""
    return STORES / f"{revision}.db.gz"


def main() -> None:
    """Record the sample run of the tests into a store, and keep it."""
    path = kept(SCHEMA_REVISION)
    if path.exists():
        raise SystemExit(f"{path} is there: a store that was kept is never made anew")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "store.db"
        asyncio.run(record_sample_run(f"sqlite:///{file}", Path(folder) / "run"))
        with closing(dbapi2.connect(str(file))) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            connection.execute("VACUUM")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(gzip.compress(file.read_bytes(), mtime=0))


if __name__ == "__main__":
    main()
