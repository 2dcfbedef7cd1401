"""Values that nothing can be made with: refused by their key, before there is a store."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.calling import Cli

# What is called, and what it says; a configuration file holds the last word of a call that has one.
WRONG: dict[str, tuple[tuple[str, ...], str]] = {
    "a rate beyond the floats": (
        ("explore", "--set", "optimizer.learning_rate=1e39"),
        "optimizer.learning_rate=1e+39: it must be a number above 0, at most 1e+20",
    ),
    "a loss argument beyond the floats": (
        ("train", "--set", "loss.args={clip_range=1e300}"),
        "loss.args.clip_range=1e+300: the largest number that can be computed with is 3.4028e+38",
    ),
    "a number beyond the floats in a list": (
        ("explore", "--set", "strategy_args={epsilon=[1,-1e300]}"),
        "strategy_args.epsilon[1]=-1e+300: the largest number that can be computed with",
    ),
    "a range beyond the floats, as a text": (
        ("explore", "--set", "optimizer.value_clip_range='1e300'"),
        "optimizer.value_clip_range='1e300': it must be a number above 0",
    ),
    "a demo without end": (("demo", "--limit", "nan"), "--limit nan: give a number"),
    "kills at no time": (
        ("demo", "--chaos", "--chaos-every", "nan"),
        "--chaos-every nan: give a number",
    ),
    "a task in place of its table": (
        ("demo", "--set", "task=guess"),
        "task='guess': must be a table of digits, name, numbers, turns",
    ),
    "an integer of more than 64 bits": (
        ("demo", "--set", "optimizer.warmup_steps=9223372036854775808"),
        "optimizer.warmup_steps=9223372036854775808: an integer has at most 64 bits",
    ),
    "an integer that Python does not write": (
        ("demo", "--set", f"max_steps=0x1{'0' * 5000}"),
        "max_steps=a number of thousands of digits: an integer has at most 64 bits",
    ),
    "an integer that Python does not read": (("demo", "--set", f"seed={'9' * 5000}"), "seed='99"),
    "a lease without end": (
        ("explore", "--set", "lease_ttl_s=1e300"),
        "lease_ttl_s=1e+300: it must",
    ),
    "more numbers than a policy can know": (
        ("demo", "--task", "guess", "--set", "task.numbers=1000000000000000000000"),
        "task.numbers=1000000000000000000000: it must be an integer from 2 to 10000",
    ),
    "a text for the section of the loss": (
        ("explore", "--config", "a.toml", "--set", "algorithm=rloo", "loss = 'ppo'"),
        "a.toml: loss='ppo': must be a table of ",
    ),
    "a text for the section of the task": (
        ("demo", "--config", "a.toml", "task = 'sort'"),
        "a.toml: task='sort': must be a table of digits, name, ",
    ),
    "a rate in a file that is no number": (
        ("explore", "--config", "a.toml", "optimizer.learning_rate = nan"),
        "a.toml: optimizer.learning_rate=nan: it must be a number above 0, at most 1e+20",
    ),
    "a list of algorithms": (
        ("demo", "--config", "a.toml", "algorithm = ['grpo']"),
        "a.toml: algorithm=['grpo']: it must be a text",
    ),
    "a trainer of another experiment": (
        ("explore", "--set", "trainer=a/b"),
        "trainer=a/b: must be a text without '/'",
    ),
    "a reference of thousands of letters": (
        ("explore", "--config", "a.yaml", f"reference: {'a' * 5000}"),
        "a.yaml: reference='aaa",
    ),
    "a model of thousands of letters": (("train", "--set", f"model={'a' * 5000}"), "no folder /"),
    "a folder that is no text": (
        ("train", "--config", "a.toml", 'folder = "\\u0000"'),
        "a.toml: folder='\\x00': NUL has no place in a text",
    ),
    "a trainer that is no text": (
        ("explore", "--set", 'trainer="a\\u0000b"'),
        "error: trainer='a\\x00b': the name is 'a\\x00b': NUL and surrogates are no text",
    ),
    "a trainer of two lines": (
        ("train", "--set", 'trainer="a\\nb"'),
        "error: trainer='a\\nb': the name is 'a\\nb': control characters have no place in a name",
    ),
    "a tokenizer that is no text": (
        ("train", "--set", 'tokenizer="\\u0000"'),
        "error: tokenizer='\\x00': NUL has no place in a text",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_value_is_refused_before_there_is_a_store(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.chdir(tmp_path)
    words, said = WRONG[case]
    file = next((Path(word) for word in words if word.startswith("a.")), None)
    if file is not None:
        *kept, text = words
        file.write_text(text)
        words = tuple(kept)
    words += ("--actor", "e0") if words[0] == "explore" else ()
    ended = cli(*words, "--store", "runs/run.db")
    assert (ended.code, said in ended.err, len(ended.err.splitlines())) == (2, True, 1), ended.err
    assert not Path("runs").exists()
