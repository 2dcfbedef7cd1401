"""What the ids of tokens stand for, where the experiment says whose they are."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

from trinity_buffer.inspect.source import Source
from trinity_buffer.store import queries

NAMES = ("tokenizer", "model")
"""Keys of a configuration that may name a folder with a ``tokenizer.json``, the first one first."""


async def token_texts(source: Source, ids: Iterable[Any]) -> list[str] | None:
    """Return the text of each token, special ones included.

    None where the experiment's configuration names no folder with a ``tokenizer.json`` that is on
    this machine, seen from its ``folder``, or where the package ``tokenizers`` (extra ``hf``) is
    not installed.
    """
    config = await source.read(queries.config_of, source.key)
    tokenizer = None if config is None else _named(config[0])
    if tokenizer is None:
        return None
    return [_text(tokenizer, int(one)) for one in ids]


def _named(config: Any) -> Any:
    folder = Path(config.get("folder") or ".")
    for name in NAMES:
        value = config.get(name)
        file = folder / value / "tokenizer.json" if isinstance(value, str) else None
        if file is not None and file.is_file():
            return _loaded(str(file), file.stat().st_mtime_ns)
    return None


@lru_cache(maxsize=4)
def _loaded(file: str, _: int) -> Any:
    try:
        tokenizers = import_module("tokenizers")
    except ModuleNotFoundError:
        return None
    return tokenizers.Tokenizer.from_file(file)


def _text(tokenizer: Any, token: int) -> str:
    """Return the text of one token; the name in the vocabulary where it is part of a character."""
    text = tokenizer.decode([token], skip_special_tokens=False)
    whole = text and "\ufffd" not in text
    return str(text if whole else tokenizer.id_to_token(token) or f"<{token}>")
