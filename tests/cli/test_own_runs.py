"""One's own model and rollouts through the command line, from the folder that `init` writes."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import anyio
import pytest

from tests.cli.calling import Cli
from tests.crash.forking import said_by
from tests.explorer.vllm_dialect import VLLM, served
from trinity_buffer import open_store
from trinity_buffer.cli.main import run_command

SMALL = {
    "groups_per_batch = 8": "groups_per_batch = 2",
    "rollouts_per_group = 16": "rollouts_per_group = 4",
    "groups_per_step = 16": "groups_per_step = 2",
    "max_staleness = 3": "",
    "max_steps = 300": "max_staleness = 100\nmax_steps = 6",
    "epochs = 100": "epochs = 1",
    "every_steps = 10": "every_steps = 2",
}


@pytest.fixture
def own(cli: Cli, tmp_path: Path) -> Path:
    """The file of a run that `init` has written, with smaller numbers in it."""
    folder = tmp_path / "own"
    assert cli("init", folder).code == 0
    file = folder / "run.toml"
    for before, after in SMALL.items():
        assert before in file.read_text()
        file.write_text(file.read_text().replace(before, after))
    return file


@pytest.mark.long
def test_what_init_writes_is_explored_trained_and_replayed(own: Path, cli: Cli) -> None:
    explored = cli("explore", "--config", own, "--actor", "e0", "--batches", 2)
    assert explored.code == 0, explored.err
    assert "epoch0-1: 8 rollouts" in explored.out
    assert "16 annotated" in cli("annotate", "--config", own).out
    trained = cli("train", "--config", own)
    assert "step 2: " in trained.out, trained.err
    assert '"accuracy": ' in trained.out
    replayed = cli("replay", "--config", own, "--json")
    assert replayed.json[0]["identical"] is True
    assert (own.parent / "runs" / "own.db").exists()  # from the folder of the file, not from here


@pytest.mark.parametrize("words", [("explore", "--actor", "e0"), ("train",)])
def test_a_critic_is_refused_before_the_first_rollout(
    own: Path, cli: Cli, words: tuple[str, ...]
) -> None:
    ended = cli(*words, "--config", own, "--set", "algorithm=ppo")
    assert "algorithm=ppo trains a critic, and a model of transformers has none" in ended.err
    assert not (own.parent / "runs").exists()


@pytest.mark.parametrize("key", ["reference", "teacher"])
def test_another_model_must_be_there_too(own: Path, cli: Cli, key: str) -> None:
    """It is a folder seen from that of the file; rollouts may come from elsewhere."""
    text = own.read_text()
    own.write_text(f'{key} = "nowhere"\n{text}')
    refused = cli("explore", "--config", own, "--actor", "e0", "--batches", 1)
    assert refused.code == 2
    assert f"{key} = 'nowhere': there is no such folder; it must hold a causal" in refused.err
    recorded = [line for line in text.splitlines() if not line.startswith(("rollout", "tasks"))]
    own.write_text("\n".join([f'{key} = "model"', *recorded]))
    nothing = cli("explore", "--config", own, "--actor", "e0", "--batches", 1)
    assert "the run names no rollout, so there is nothing to explore" in nothing.err


@pytest.mark.long
@pytest.mark.parametrize("key", ["model", "reference"])
def test_a_damaged_file_of_weights_is_one_sentence(own: Path, cli: Cli, key: str) -> None:
    if key == "reference":
        shutil.copytree(own.parent / "model", own.parent / "reference")
        diverging = own.read_text().replace('kl_loss_fn = "none"', 'kl_loss_fn = "k2"')
        own.write_text(f'reference = "reference"\n{diverging}')
    assert cli("explore", "--config", own, "--actor", "e0", "--batches", 1).code == 0
    cli("annotate", "--config", own)
    os.truncate(own.parent / key / "model.safetensors", 1000)
    told = f"{key}': AutoModelForCausalLM finds nothing to load there (Error while deserializing"
    refused = cli("train", "--config", own)
    assert refused.code == 2
    assert told in refused.err
    if key == "model":
        refused = cli("explore", "--config", own, "--actor", "e1", "--batches", 1)
        assert (refused.code, told in refused.err) == (2, True)


NUMBERLESS = """
async def nothing(model):
    pass

async def several(model):
    return [1]

async def unknown(model):
    return float("nan")

async def endless(model):
    return -float("inf")

async def large(model):
    return 10**400
"""


@pytest.mark.parametrize(
    ("name", "returned"),
    [
        ("nothing", "None"),
        ("several", "a value of type list"),
        ("unknown", "nan"),
        ("endless", "-inf"),
        ("large", "a value of type int"),
    ],
)
def test_an_evaluate_that_returns_no_number_is_told_what_to_return(
    own: Path, cli: Cli, name: str, returned: str
) -> None:
    (own.parent / "numberless.py").write_text(NUMBERLESS)
    own.write_text(own.read_text().replace('"rollout:evaluate"', f'"numberless:{name}"'))
    cli("explore", "--config", own, "--actor", "e0", "--batches", 2)
    cli("annotate", "--config", own)
    trained = cli("train", "--config", own)
    assert trained.code == 2
    told = f"'numberless:{name}': it returned {returned}, it must return the accuracy, one finite"
    assert told in trained.err


@pytest.mark.long
def test_a_server_is_explored_and_takes_what_was_trained(own: Path, cli: Cli) -> None:
    store = own.parent / "runs" / "own.db"
    vllm = VLLM(own.parent / "model")
    with served(vllm.app()) as url:
        own.write_text(own.read_text().replace("# server = ", f'server = "{url}/v1"  # '))
        at = ("--config", own)
        explored = cli("explore", *at, "--actor", "e0", "--batches", 1)
        assert "rollouts, reward " in explored.out
        assert "None" not in explored.out  # whose weights may change within a batch
        assert "nothing was pushed" in cli("sync-weights", *at).out
        cli("annotate", *at)
        assert cli("train", *at).code == 0
        synced = cli("sync-weights", *at)
        assert f"{url}: policy 1, checksum " in synced.out, synced.err
        assert cli("explore", *at, "--actor", "e0", "--batches", 1).code == 0
        refused = cli("sync-weights", *at, "--mode", "hurry")
    assert vllm.said == ["pause?mode=wait", "collective_rpc", "update_weight_version", "resume"]
    assert refused.code == 2
    assert "'wait', 'keep', 'abort'" in refused.err

    async def versions() -> set[int | None]:
        async with open_store(f"sqlite:///{store}", read_only=True) as opened:
            experiment = await opened.experiment("own")
            return {one.policy_version async for one in experiment.read()}

    assert anyio.run(versions) == {0, 1}


def test_init_replaces_nothing(own: Path, cli: Cli) -> None:
    again = cli("init", own.parent)
    assert again.code == 2
    assert "run.toml, rollout.py, README.md, model already" in again.err


def test_without_transformers_the_extra_is_named(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    ended = cli("init", tmp_path / "own")
    assert ended.code == 2
    assert "pip install 'trinity-buffer[hf]'" in ended.err


def written(folder: Path, **keys: str) -> Path:
    """Write a file of a run whose rollouts are in a module of its own, and return it."""
    keys = {"model": "model", "tasks": "numbers_of:tasks", "store": "own.db", **keys}
    file = folder / "own.toml"
    file.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items()))
    return file


BROKEN = """
tasks = [1, 2]

async def divides(task, model):
    return task / 0

async def reads(task, model):
    return open("nowhere").read()

def plain(task, model):
    return []
"""


@pytest.mark.parametrize(
    ("rollout", "code", "said"),
    [
        ("numbers_of:divides", 1, "failed: ZeroDivisionError: division by zero ({}, line 5)"),
        (
            "numbers_of:reads",
            1,
            "rollout 'numbers_of:reads' failed: FileNotFoundError: [Errno 2] No ",
        ),
        ("numbers_of:plain", 2, "it must be an async function of a task and a model"),
        ("numbers_of:nothing", 2, "has no attribute 'nothing'"),
        ("not_there:rollout", 2, "No module named 'not_there'"),
    ],
)
def test_a_rollout_that_does_not_work_is_told_in_a_sentence(
    own: Path, cli: Cli, rollout: str, code: int, said: str
) -> None:
    module = own.parent / "numbers_of.py"
    module.write_text(BROKEN)
    file, once = written(own.parent, rollout=rollout), "explorer.attempts=1"
    ended = cli("explore", "--config", file, "--actor", "e0", "--set", once)
    assert ended.code == code
    assert said.format(module) in ended.err
    assert len(ended.err.splitlines()) == 1


TASKS = """
number = 5
text = "abc"
octets = b"abc"
nothing = None

async def slow():
    return [1]

async def one_by_one():
    yield 1

def gives_nothing():
    pass

def gives_text():
    return "abc"

def stops():
    yield 1 / 0

async def rollout(task, model):
    return []
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("number", "it is a value of type int, it must be a list of tasks, or a plain function"),
        ("text", "it is a value of type str, it must be"),
        ("octets", "it is a value of type bytes, it must be"),
        ("nothing", "it is None, it must be"),
        ("slow", "it is an async function, it must be"),
        ("one_by_one", "it is an async function, it must be"),
    ],
)
def test_tasks_that_are_no_list_are_refused_before_anything_is_recorded(
    own: Path, cli: Cli, name: str, said: str
) -> None:
    (own.parent / "tasks_of.py").write_text(TASKS)
    file = written(own.parent, rollout="tasks_of:rollout", tasks=f"tasks_of:{name}")
    ended = cli("explore", "--config", file, "--actor", "e0")
    assert (ended.code, len(ended.err.splitlines())) == (2, 1), ended.err
    assert f"tasks = 'tasks_of:{name}': {said}" in ended.err
    assert not (own.parent / "own.db").exists()


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("gives_nothing", 2, "tasks = 'tasks_of:gives_nothing': it returned None, it must be"),
        ("gives_text", 2, "it returned a value of type str, it must be"),
        ("stops", 1, "tasks 'tasks_of:stops' failed: ZeroDivisionError: division by zero ("),
    ],
)
def test_a_function_that_returns_no_tasks_is_told_in_a_sentence(
    own: Path, cli: Cli, name: str, code: int, said: str
) -> None:
    (own.parent / "tasks_of.py").write_text(TASKS)
    file = written(own.parent, rollout="tasks_of:rollout", tasks=f"tasks_of:{name}")
    ended = cli("explore", "--config", file, "--actor", "e0")
    assert (ended.code, len(ended.err.splitlines())) == (code, 1), ended.err
    assert said in ended.err


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("evaluate=null", "evaluation.target_accuracy=0.95 needs evaluate=MODULE:FUNCTION"),
        ("teacher=model", "teacher='model': algorithm 'grpo' distils nothing"),
        ("reference=model", "reference='model': algorithm 'grpo' measures no divergence"),
    ],
)
def test_what_would_do_nothing_is_refused(
    own: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, word: str, said: str
) -> None:
    monkeypatch.chdir(own.parent)
    for words in (("train",), ("explore", "--actor", "e0", "--batches", 1)):
        ended = cli(*words, "--config", own, "--set", word)
        assert (ended.code, said in ended.err) == (2, True), ended.err
    assert not (own.parent / "own.db").exists()


@pytest.mark.parametrize("key", ["model", "reference", "teacher"])
def test_a_trainer_looks_at_its_models_before_it_records(own: Path, cli: Cli, key: str) -> None:
    file = written(own.parent, rollout="a:b", **{key: "nowhere"})
    trained = cli("train", "--config", file)
    assert trained.code == 2
    assert f"{key} = 'nowhere': there is no" in trained.err
    assert not (own.parent / "own.db").exists()


def test_a_model_that_is_not_there_is_named(own: Path, cli: Cli, tmp_path: Path) -> None:
    (own.parent / "numbers_of.py").write_text(BROKEN)
    empty = tmp_path / "empty"
    empty.mkdir()
    file = written(own.parent, rollout="numbers_of:divides", model=str(empty))
    ended = cli("explore", "--config", file, "--actor", "e0")
    assert ended.code == 2
    assert f"model {str(empty)!r}: " in ended.err


@pytest.mark.parametrize("command", ["explore", "train"])
def test_a_folder_of_a_model_that_is_not_there_is_looked_for_nowhere_else(
    own: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    asked: list[str] = []
    explore = ("explore", "--config", own, "--actor", "e0", "--batches", 1)
    if command == "train":
        cli(*explore)
        cli("annotate", "--config", own)
    for kind in ("AutoModelForCausalLM", "AutoTokenizer"):
        monkeypatch.setattr(f"transformers.{kind}.from_pretrained", asked.append)
    own.write_text(own.read_text().replace('model = "model" ', 'model = "modell" '))
    ended = cli(*(explore if command == "explore" else ("train", "--config", own)))
    assert ended.code == 2
    assert f"model = 'modell': there is no folder {own.parent / 'modell'}; it must" in ended.err
    assert asked == []


def test_a_model_without_its_tokenizer_is_told_to_bring_it(own: Path, cli: Cli) -> None:
    for file in (own.parent / "model").glob("tokenizer*"):
        file.unlink()
    ended = cli("explore", "--config", own, "--actor", "e0")
    assert ended.code == 2
    assert f"model {str(own.parent / 'model')!r}: its tokenizer knows no tokens" in ended.err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('model = "m"', "the run names no rollout, so there is nothing to explore"),
        ('rollout = "a:b"', "rollout='a:b' needs tasks, and a model of your own"),
        ('model = "m"\nrollout = "a:b"', "rollout='a:b' needs tasks, and a model of your own"),
    ],
)
def test_half_a_run_is_refused(tmp_path: Path, cli: Cli, line: str, said: str) -> None:
    file = tmp_path / "half.toml"
    file.write_text(f'{line}\nstore = "half.db"\n')
    ended = cli("explore", "--config", file, "--actor", "e0")
    assert ended.code == 2
    assert said in ended.err


@pytest.mark.parametrize("command", [("explore", "--actor", "e0"), ("train",), ("replay",)])
def test_an_experiment_made_in_python_is_not_taken_for_a_demo(
    command: tuple[str, ...], tmp_path: Path, cli: Cli
) -> None:
    url = f"sqlite:///{tmp_path / 'python.db'}"

    async def make() -> None:
        async with open_store(url) as store:
            await store.experiment("mine", config={"rollouts_per_group": 4})

    anyio.run(make)
    ended = cli(*command, "--store", url)
    assert ended.code == 2
    assert "'mine' names no model: it was made in Python" in ended.err
    needs = "model, rollout and tasks" if command[0] == "explore" else 'model = "FOLDER"'
    assert f"give --config FILE with {needs}" in ended.err
    if command[0] != "replay":
        assert "names no model" in cli(*command, "--store", url, "--set", "seed=3").err


def run(folder: Path, *words: str, crash_at: str | None = None) -> str:
    """Run a command in a process of its own, to its end or its crash; return what it said."""
    (said,) = said_by(live, [(str(folder), *words)], folder, crash_at)
    code, _, rest = said.partition(": ")
    assert code == ("-9" if crash_at else "0"), rest
    return rest


def live(folder: str, *words: str) -> None:
    os.chdir(folder)
    sys.argv = ["trinity-buffer", *words]
    run_command()


@pytest.mark.long
def test_killed_and_started_again_it_ends_at_the_same_bits(own: Path) -> None:
    folder, at = own.parent, ("--config", "run.toml")
    explore = ("explore", *at, "--actor", "e0")
    run(folder, *explore, "--batches", "6", crash_at="after-append:3")
    run(folder, *explore, "--batches", "6")
    run(folder, "annotate", *at, crash_at="inside-annotate:1")
    run(folder, "annotate", *at)
    run(folder, "train", *at, crash_at="after-checkpoint:3")
    assert "resumes after step 2" in run(folder, "train", *at)
    said = run(folder, "replay", *at, "--json").splitlines()
    (replayed,) = (json.loads(line) for line in said if line.startswith("{"))
    assert (replayed["identical"], replayed["last"]) == (True, 6)
    run(folder, "verify", "--store", "runs/own.db")


def test_a_demo_of_answers_that_nobody_knows_is_refused(cli: Cli, tmp_path: Path) -> None:
    ended = cli("demo", "--model", "hf", "--algorithm", "sft", "--store", tmp_path / "x.db")
    assert ended.code == 2
    assert "needs the answers of the tasks" in ended.err
    assert not list(tmp_path.iterdir())
