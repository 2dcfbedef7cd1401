"""The chain of heads, computed again by a program that knows only ``docs/events.md``."""

from __future__ import annotations

import asyncio
import hashlib
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psycopg

from tests.sample_run import record_sample_run

COLUMNS = "position, recorded_at, kind, actor, body, head"
EVENTS = f"SELECT {COLUMNS} FROM event WHERE experiment = 1 ORDER BY position"


def heads_of(name: str, rows: Sequence[Sequence[Any]]) -> list[bytes]:
    head = hashlib.sha256(b"trinity-buffer log\x00" + name.encode("utf-8")).digest()
    found = []
    for position, recorded_at, kind, actor, body, _ in rows:
        digest = hashlib.sha256(head)
        digest.update(position.to_bytes(8, "big") + recorded_at.to_bytes(8, "big"))
        texts = [kind.encode("utf-8"), actor.encode("utf-8")]
        for text in texts:
            digest.update(len(text).to_bytes(4, "big"))
        digest.update(b"".join(texts) + body)
        head = digest.digest()
        found.append(head)
    return found


def rows_of(url: str) -> list[tuple[Any, ...]]:
    if url.startswith("sqlite"):
        connection = sqlite3.connect(url.removeprefix("sqlite:///"))
        found = connection.execute(EVENTS).fetchall()
        connection.close()
        return found
    with psycopg.connect(url) as server:
        return server.execute(EVENTS).fetchall()


def test_anybody_can_compute_the_heads_of_a_log(store_url: str, tmp_path: Path) -> None:
    asyncio.run(record_sample_run(store_url, tmp_path / "run"))
    rows = rows_of(store_url)
    assert len({row[2] for row in rows}) > 10
    assert heads_of("sort", rows) == [row[-1] for row in rows]


def test_one_changed_byte_changes_every_head_after_it(new_sqlite_url: str, tmp_path: Path) -> None:
    asyncio.run(record_sample_run(new_sqlite_url, tmp_path / "run"))
    rows = rows_of(new_sqlite_url)
    before = heads_of("sort", rows)
    changed = list(rows)
    changed[4] = (*rows[4][:4], rows[4][4][:-1] + bytes([rows[4][4][-1] ^ 1]), None)
    after = heads_of("sort", changed)
    assert after[:4] == before[:4]
    assert not set(after[4:]) & set(before)
    assert not set(heads_of("other", rows)) & set(before)
