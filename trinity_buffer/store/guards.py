"""Triggers that keep truth as it is: nothing of the log is changed, deleted or left unchained."""

from __future__ import annotations

from dataclasses import dataclass

_APPEND_ONLY = "the log is append-only"
_ARCHIVE_FIRST = "archive it first (trinity-buffer compact)"
_NOT_ARCHIVED = "NOT EXISTS (SELECT 1 FROM archived WHERE archived.segment = OLD.key)"
_NEWER_SCHEMA = (
    "this store has schema 0002 or newer, which chains its events: "
    "pip install --upgrade trinity-buffer"
)


@dataclass(frozen=True, slots=True)
class Guard:
    """A trigger that makes an operation fail.

    Attributes:
        name: of the trigger, and on PostgreSQL of its function.
        condition: on which rows; empty: on all, and on a statement without rows too.
    """

    name: str
    table: str
    operation: str
    why: str
    condition: str = ""

    @property
    def message(self) -> str:
        """What whoever tries is told."""
        return f"{self.table}: {self.operation} is forbidden, {self.why}"

    def statements(self, dialect: str) -> list[str]:
        """Return the statements that create it on ``dialect``."""
        head = f"CREATE TRIGGER {self.name} BEFORE {self.operation} ON {self.table} "
        if dialect == "sqlite":
            when = f"WHEN {self.condition} " if self.condition else ""
            return [f"{head}{when}BEGIN SELECT RAISE(ABORT, '{self.message}'); END"]
        asks = "SELECT" in self.condition  # PostgreSQL's WHEN takes no query
        body, each = f"RAISE EXCEPTION '{self.message}';", "STATEMENT"
        if self.condition:
            each = "ROW" if asks else f"ROW WHEN ({self.condition})"
        if asks:
            body = f"IF {self.condition} THEN {body} END IF; RETURN OLD;"
        function = f"CREATE FUNCTION {self.name}() RETURNS trigger LANGUAGE plpgsql"
        return [
            f"{function} AS $$ BEGIN {body} END $$",
            f"{head}FOR EACH {each} EXECUTE FUNCTION {self.name}()",
        ]


def _forbids(table: str, operation: str, why: str = _APPEND_ONLY, condition: str = "") -> Guard:
    return Guard(f"{table}_forbids_{operation.lower()}", table, operation, why, condition)


def guards(dialect: str) -> list[Guard]:
    """Return the triggers of a store on ``dialect``.

    A segment may be deleted once an ``archived`` row names it: that row comes with the
    ``SegmentsArchived`` event, in the same transaction. SQLite has no TRUNCATE.
    """
    found = [
        _forbids(table, operation)
        for table in ("experiment", "event")
        for operation in ("UPDATE", "DELETE")
    ]
    found.append(_forbids("segment", "UPDATE"))
    found.append(_forbids("segment", "DELETE", _ARCHIVE_FIRST, _NOT_ARCHIVED))
    # A process of an older version, which opened the store before it was migrated, ends here.
    found.append(Guard("event_needs_head", "event", "INSERT", _NEWER_SCHEMA, "NEW.head IS NULL"))
    if dialect == "postgresql":
        found += [_forbids(table, "TRUNCATE") for table in ("experiment", "event", "segment")]
    return found


def statements(dialect: str) -> list[str]:
    """Return the statements that create all of them, and that store blobs as they are.

    PostgreSQL tries to compress every blob otherwise: 1.5 times the time of a write.
    """
    found = [statement for guard in guards(dialect) for statement in guard.statements(dialect)]
    external = "ALTER TABLE segment ALTER COLUMN data SET STORAGE EXTERNAL"
    return found + ([external] if dialect == "postgresql" else [])
