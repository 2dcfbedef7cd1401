"""Fixtures: a tiny model in a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from trinity_buffer.demo.tiny_model import make_tiny_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random model with its tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_model(folder, width=16, layers=1, heads=2)
    return folder
