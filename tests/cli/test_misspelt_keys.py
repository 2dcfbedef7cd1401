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


def test_all_unknown_keys_are_named_at_once(cli: Cli, tmp_path: Path) -> None:
    file, store = tmp_path / "run.toml", tmp_path / "run.db"
    keys = ("groups_per_btach = 2", "max_stalenes = 1", "qq = 1", "zzz = 2", "task = 3")
    file.write_text("\n".join([*keys, "[optimizer]", "lr = 1", "learning_rat = 1"]))
    ended = cli("train", "--store", store, "--config", file)
    assert ended.err.startswith(
        f"error: configuration {file}: there is no key 'groups_per_btach'; did you mean "
        "'groups_per_batch'? Nor 'max_stalenes'; did you mean 'max_staleness'? Nor 'qq', 'zzz'; "
        "there are: algorithm, "
    )
    assert "Nor 'optimizer.learning_rat'; did you mean 'optimizer.learning_rate'?" in ended.err
    assert ended.err.endswith(" task=3: must be a table of digits, name, numbers, turns\n")
    ended = cli("train", "--store", store, "--set", "max_stalenes=1", "--set", "groups_per_btach=1")
    assert "no key 'max_stalenes'" in ended.err
    assert "Nor 'groups_per_btach'" in ended.err


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
