"""A key of a file that nothing reads: refused by every command, with the one that was meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.calling import Cli

READERS = [
    ("annotate",),
    ("train",),
    ("replay",),
    ("explore", "--actor", "e0"),
    ("sync-weights", "--server", "http://127.0.0.1:9"),
]


@pytest.mark.parametrize("words", READERS)
@pytest.mark.parametrize(("key", "meant"), [("stor", "store"), ("experimnt", "experiment")])
def test_a_misspelt_place_is_not_taken_for_none(
    cli: Cli,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    key: str,
    meant: str,
) -> None:
    """Or a command would go to the newest of runs/*.db, which is another run."""
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(f'{key} = "mine"\n')
    ended = cli(*words, "--config", "run.toml")
    said = f"configuration run.toml: there is no key {key!r}; did you mean {meant!r}?"
    assert (ended.code, ended.err) == (2, f"error: {said}\n")


@pytest.mark.parametrize(
    ("text", "key", "meant"),
    [
        ("learning_rate = 3e-4", "learning_rate", "optimizer.learning_rate"),
        ("every_steps = 3", "every_steps", "evaluation.every_steps"),
        ("[optimizer]\nmax_steps = 3", "optimizer.max_steps", "max_steps"),
        ("[optimizer]\nlearning_rat = 3", "optimizer.learning_rat", "optimizer.learning_rate"),
    ],
)
def test_a_key_in_the_wrong_section_is_told_where_it_belongs(
    cli: Cli, tmp_path: Path, text: str, key: str, meant: str
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    ended = cli("train", "--store", tmp_path / "run.db", "--config", file)
    assert f"there is no key {key!r}; did you mean {meant!r}?" in ended.err
