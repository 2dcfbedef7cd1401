"""From one revision of the schema to another, in one transaction."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import Connection

from trinity_buffer.store.transaction import Transaction

_PACKAGE = Path(__file__).parents[1]


def folder() -> Path:
    """Return where the migrations lie: in the package of a wheel, beside it in a checkout."""
    inside = _PACKAGE / "_migrations"
    return inside if inside.is_dir() else _PACKAGE.parent / "migrations"


def config(connection: Connection | None = None) -> Config:
    """Return alembic's configuration, for a connection with an open transaction."""
    settings = Config()
    settings.set_main_option("script_location", str(folder()).replace("%", "%%"))
    settings.attributes["connection"] = connection
    return settings


def revisions() -> list[str]:
    """Return all revisions, the oldest first."""
    scripts = ScriptDirectory.from_config(config()).walk_revisions()
    return [script.revision for script in scripts][::-1]


def upgrade(tx: Transaction, revision: str = "head") -> None:
    """Bring an older (or empty) database up to ``revision``."""
    command.upgrade(config(tx.connection), revision)


def downgrade(tx: Transaction, revision: str) -> None:
    """Bring a database back to ``revision``; what only newer ones have is gone."""
    command.downgrade(config(tx.connection), revision)
