"""Strategies, losses and advantages of one's own that do not work: a sentence with their line."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.cli.calling import Cli
from tests.cli.test_two_runs import SETS

MODULE = """
from trinity_buffer.algorithm.add_strategy import AddStrategy
from trinity_buffer.algorithm.entropy_loss_fn import EntropyLossFn
from trinity_buffer.algorithm.kl_fn import KLFn
from trinity_buffer.algorithm.policy_loss_fn import PPOPolicyLossFn

class Divides(AddStrategy):
    async def add(self, experiences, step):
        return 1 / 0, {}  # divides

class Nothing(AddStrategy):
    async def add(self, experiences, step):
        return None

class Reads(AddStrategy):
    async def add(self, experiences, step):
        return open("/nowhere/at/all")  # reads

class Raises(PPOPolicyLossFn):
    def __call__(self, *args, **kwargs):
        return kwargs["nothing"]  # raises

class NoLoss(PPOPolicyLossFn):
    def __call__(self, *args, **kwargs):
        return None

class Vector(PPOPolicyLossFn):
    def __call__(self, logprob, *args, **kwargs):
        return logprob, {}

class NaN(PPOPolicyLossFn):
    def __call__(self, logprob, *args, **kwargs):
        return logprob.sum() * float("nan"), {}

class Entropy(EntropyLossFn):
    def __call__(self, *args, **kwargs):
        raise ValueError("two\\nlines")  # entropy

class Foreign:
    pass
"""


def line_of(text: str) -> int:
    return next(n for n, line in enumerate(MODULE.splitlines(), 1) if text in line)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the modules are, and a store."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "mine_own.py").write_text(MODULE)
    (folder / "broken_own.py").write_text("x = 1\ny = x / 0\n")
    (folder / "lacking_own.py").write_text("\nimport nowhere_at_all\n")
    return folder


@pytest.fixture
def mine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The module, importable as ``mine_own``."""
    monkeypatch.syspath_prepend(folder)
    return folder / "mine_own.py"


@pytest.fixture
def store(folder: Path, tmp_path: Path, cli: Cli) -> Path:
    """A store with a step to train."""
    annotated = folder / "store.db"
    if not annotated.exists():
        place = ("--store", annotated)
        assert cli("explore", *place, "--actor", "e0", "--batches", 1, *SETS).code == 0
        assert cli("annotate", *place).code == 0
    shutil.copy(annotated, tmp_path / "store.db")
    return tmp_path / "store.db"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Divides", "failed: ZeroDivisionError: division by zero ({}, line {})"),
        ("Reads", "failed: FileNotFoundError: "),
        ("Nothing", "({}, line {}) returned something unusable: TypeError: `add` returned None"),
    ],
)
def test_a_strategy_of_ones_own_that_fails_is_a_sentence(
    mine: Path, store: Path, cli: Cli, name: str, said: str
) -> None:
    line = line_of(f"# {name.lower()}") if name != "Nothing" else line_of("class Nothing")
    ended = cli("annotate", "--store", store, "--strategy", f"mine_own.{name}")
    assert ended.code == 1
    assert ended.err.startswith(f"error: strategy 'mine_own.{name}' ")
    assert said.format(mine, line) in ended.err
    assert f"{mine}, line {line}" in ended.err
    assert len(ended.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("key", "name", "said"),
    [
        ("loss.name", "Raises", "failed: KeyError: 'nothing' ({}, line {})"),
        ("loss.name", "NoLoss", "({}, line {}) returned something unusable: TypeError: "),
        ("loss.name", "Vector", "({}, line {}) returned something unusable: TypeError: "),
        ("loss.name", "NaN", "is your own ({}, line {})"),
        (
            "algorithm_args.entropy_loss_fn",
            "Entropy",
            "failed: ValueError: two lines ({}, line {})",
        ),
    ],
)
def test_a_loss_of_ones_own_that_fails_is_a_sentence(
    mine: Path, store: Path, cli: Cli, key: str, name: str, said: str
) -> None:
    marks = {"Raises": "# raises", "Entropy": "# entropy"}
    line = line_of(marks.get(name, f"class {name}("))
    sets = ("--set", f"{key}=mine_own.{name}", "--set", "max_skipped_steps=1")
    ended = cli("train", "--store", store, *sets)
    assert ended.code == 1
    assert f"'mine_own.{name}'" in ended.err
    assert said.format(mine, line) in ended.err
    assert len(ended.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("broken_own.Loss", "ZeroDivisionError: division by zero ({}/broken_own.py, line 2)"),
        ("lacking_own.Loss", "No module named 'nowhere_at_all' ({}/lacking_own.py, line 2)"),
        ("nowhere_own.Loss", "No module named 'nowhere_own'\n"),
        (
            "mine_own.Foreign",
            "policy_loss_fn 'mine_own.Foreign': <class 'mine_own.Foreign'> is no",
        ),
    ],
)
def test_a_part_that_is_none_is_refused_before_anything_is_recorded(
    mine: Path, store: Path, cli: Cli, path: str, said: str
) -> None:
    before = cli("stats", "--store", store, "--json").out
    refused = cli("train", "--store", store, "--set", f"loss.name={path}")
    assert refused.code == 2
    assert said.format(mine.parent) in refused.err
    assert len(refused.err.splitlines()) == 1
    assert cli("stats", "--store", store, "--json").out == before


def test_several_strategies_are_named_as_a_configuration_names_them(store: Path, cli: Cli) -> None:
    named = ("--strategy", "reward_variance+grpo", "--set", "grpo.epsilon=0.5")
    assert cli("annotate", "--store", store, *named).code == 0
    assert cli("reannotate", "--store", store, *named, "--name", "both").code == 0
    unknown = cli("annotate", "--store", store, "--strategy", "grpo+grop")
    assert unknown.code == 2
    assert "no add_strategy 'grop'; did you mean 'grpo'?" in unknown.err
    own = cli("annotate", "--store", store, "--strategy", "signed")
    assert "no add_strategy 'signed'; one of your own is named as module:Class (there" in own.err
