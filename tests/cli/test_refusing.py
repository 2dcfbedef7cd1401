"""Wrong words: one sentence that names what and where, exit code 2, and a store as it was."""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import pytest
from pysqlite3 import dbapi2

from tests.cli.calling import Cli
from tests.sample_run import SampleRun, record_sample_run
from trinity_buffer import open_store

DUMP = str(Path(__file__).parents[1] / "integrations" / "dumps" / "trinity.db")
OWN_RUN = 'model = "m"\nrollout = "nowhere_at_all:f"\ntasks = "nowhere_at_all:t"\n'
SECRET = "s3cret"
CLOSED = f"postgresql://me:{SECRET}@127.0.0.1:1/db"

# What is called, and what it says; a configuration file holds the last word of a call that has one.
WRONG: dict[str, tuple[tuple[str, ...], str]] = {
    "no such file": (("explore", "--config", "nowhere.toml"), "nowhere.toml: No such file"),
    "a misspelt key": (
        ("explore", "--config", "a.toml", "groups_per_stp = 3"),
        "a.toml: there is no key 'groups_per_stp'; did you mean 'groups_per_step'?",
    ),
    "a misspelt key of a section": (
        ("train", "--config", "a.toml", "[optimizer]\nlearning_rat = 3"),
        "a.toml: there is no key 'optimizer.learning_rat'; did you mean 'optimizer.learning_rate'?",
    ),
    "a key like no other": (("train", "--set", "q=1"), "there is no key 'q'; there are: algorithm"),
    "a value of another kind": (
        ("explore", "--config", "a.toml", "groups_per_step = 'x'"),
        "groups_per_step='x': it must be an integer, at least 1",
    ),
    "heads that cannot share a width": (
        ("explore", "--set", "model.heads=3"),
        "error: model.width=64 must be a multiple of heads=3",
    ),
    "an experiment that is not there": (
        ("stats", "--experiment", "nobody"),
        "holds no experiment 'nobody' (there: sort)\n",
    ),
    "neither an archive nor a deletion": (("compact", "--keep-steps", "1"), "(--archive FOLDER)"),
    "no TOML": (("explore", "--config", "a.toml", "groups_per_step ="), "a.toml: Invalid value"),
    "no YAML": (("explore", "--config", "a.yaml", "a: [1\nb: }"), "a.yaml: expected ',' or"),
    "YAML under another name": (
        ("explore", "--config", "a.txt", "seed: 3"),
        " (read as TOML; YAML ends with .yaml or .yml)\n",
    ),
    "a key twice": (
        ("explore", "--config", "a.yaml", "seed: 1\noptimizer: {}\nseed: 2"),
        "a.yaml: the key 'seed' is there twice, line 3, column 1",
    ),
    "no table": (("explore", "--config", "a.yaml", "- 1"), "a.yaml: it holds no table"),
    "no equals sign": (("train", "--set", "x"), "write it as section.key=value"),
    "a key of a value": (("train", "--set", "algorithm.x=3"), "'grpo', which has no keys"),
    "an unknown algorithm": (("train", "--set", "algorithm=grop"), "did you mean 'grpo'?"),
    "an unknown loss": (("explore", "--set", "loss.name=pppo"), "no policy_loss_fn 'pppo'"),
    "a name that is no file's": (("explore", "--actor", "a/b"), "--actor 'a/b'"),
    "an unknown strategy": (("annotate", "--strategy", "grop"), "did you mean 'grpo'?"),
    "an unknown argument": (
        ("annotate", "--strategy", "grpo", "--set", "epsilonn=1"),
        "did you mean 'epsilon'?",
    ),
    "an argument of another kind": (
        ("annotate", "--strategy", "grpo", "--name", "x", "--set", "epsilon=abc"),
        "GRPOAddStrategy(epsilon='abc')",
    ),
    "an unknown scoring": (
        ("reannotate", "--strategy", "grpo", "--name", "x", "--rewards", "lenght"),
        "has no scoring 'lenght' (there: length)",
    ),
    "a file for a folder": (
        ("train", "--set", "seed=7", "--checkpoints", "a.toml", "seed = 7"),
        "folder a.toml: File exists",
    ),
    "no step to go back to": (("train", "--resume-from", "99"), "resume_from=99"),
    "no step to go back to with other settings": (
        ("train", "--resume-from", "99", "--set", "max_steps=7"),
        "resume_from=99",
    ),
    "no experiment to go back in": (
        ("train", "--experiment", "other", "--resume-from", "1", "--set", "algorithm=grpo"),
        "--resume-from 1: there is no experiment 'other' to go back in",
    ),
    "no checkpoint": (("replay", "--from-checkpoint", "/nowhere"), "/nowhere holds no state.json"),
    "no archive": (
        ("compact", "--keep-steps", "0", "--archive", "/proc/nowhere"),
        "archive folder /proc/nowhere: No such file",
    ),
    "an unknown task": (
        ("demo", "--task", "sorting"),
        "no task 'sorting' (there are: sort, guess)",
    ),
    "a run without a name": (("demo", "--name", "a/b"), "--name 'a/b'"),
    "a demo without explorers": (("demo", "--explorers", "0"), "--explorers"),
    "a seed of twenty digits": (
        ("demo", "--seed", "99999999999999999999"),
        "error: seed=99999999999999999999: it must be an integer of at most 62 bits",
    ),
    "two keys that contradict each other": (
        ("demo", "--set", "commit_every_steps=9"),
        "error: commit_every_steps=9 with max_staleness=3: explorers would wait",
    ),
    "a demo of distillation where nobody can teach": (
        ("demo", "--algorithm", "on_policy_distill", "--task", "guess"),
        "task 'guess' has no solutions to learn from",
    ),
    "rollouts to distil without a teacher": (
        ("explore", "--set", "algorithm=jsd"),
        "algorithm 'jsd' needs teacher_logprobs",
    ),
    "a mix without an expert": (
        ("train", "--set", "algorithm=mix"),
        "algorithm 'mix' needs an expert's rows",
    ),
    "an expert that is not there": (
        ("explore", "--set", "algorithm=mix", "--set", "expert_experiment=nobody"),
        "expert_experiment='nobody', which is not in this store; it holds sort",
    ),
    "a filter as the only strategy": (
        ("explore", "--set", "strategy=reward_variance"),
        "'reward_variance' only chooses: put a strategy that computes them behind it "
        "(strategy=reward_variance+grpo)",
    ),
    "copies as the only strategy": (
        ("demo", "--set", "strategy=duplicate_informative"),
        "'duplicate_informative' only chooses",
    ),
    "a group of one": (
        ("explore", "--set", "rollouts_per_group=1"),
        "needs several runs of a task, which 'grpo' compares: rollouts_per_group=1; give 2 or more",
    ),
    "recorded data of another schema": (
        ("train", "--set", "algorithm=dpo"),
        "algorithm 'dpo' trains on data of schema 'dpo', these are 'experience'",
    ),
    "a server behind that has no URL": (
        ("record", "--upstream", "nonsense"),
        "'nonsense' is no URL of a server: write http://HOST:PORT/v1",
    ),
    "an expert that is the run itself": (
        ("explore", "--set", "algorithm=mix", "--set", "expert_experiment=sort"),
        "expert_experiment='sort' is the run itself",
    ),
    "a text for the number of a loss": (
        ("explore", "--set", "loss.args={clip_range='0.2'}"),
        "PPOPolicyLossFn(clip_range='0.2'): it must be of the type float | None",
    ),
    "a text for a coefficient": (
        ("train", "--set", "algorithm_args={kl_loss_fn='k2',kl_loss_fn_args={kl_coef='1'}}"),
        "K2Fn(kl_coef='1'): it must be of the type float",
    ),
    "a text for a staleness": (
        (
            *("train", "--set", "algorithm_args.sample_strategy=staleness_control"),
            *("--set", "algorithm_args.sample_strategy_args={max_staleness='x'}"),
        ),
        "(max_staleness='x'): it must be of the type float",
    ),
    "a correction that has nothing to correct": (
        ("demo", "--set", "algorithm_args.importance_correction=token_tis"),
        "importance_correction='token_tis' needs recompute_old_logprob=true",
    ),
    "a correction of a loss that weighs nothing": (
        (
            *("demo", "--algorithm", "sft"),
            *("--set", "algorithm_args.importance_correction=token_tis"),
        ),
        "it weighs advantages, and SFTLossFn reads none",
    ),
    "a clip below 0": (("train", "--set", "loss.args={clip_range=-3}"), "must not be negative"),
    "a horizon of 0": (
        (
            *("train", "--set"),
            "algorithm_args.kl_loss_fn_args={adaptive=true,target_kl=1,horizon=0}",
        ),
        "horizon must be positive, it is 0",
    ),
    "a loss argument that is no number": (
        ("explore", "--set", "loss.args={clip_range=nan}"),
        "loss.args.clip_range=nan: the largest number that can be computed with",
    ),
    "a truth value for a rate": (
        ("train", "--set", "optimizer.learning_rate=true"),
        "optimizer.learning_rate=True: it must be a number above 0",
    ),
    "runs of a group in the wrong place": (
        ("explore", "--set", "algorithm_args.rollouts_per_group=6"),
        "say rollouts_per_group",
    ),
    "a length for tasks that have one": (
        ("explore", "--set", "max_tokens=1"),
        "max_tokens=1 is read by a run of your own alone",
    ),
    "a value of a thousand brackets": (
        ("explore", "--set", f"seed={'[' * 3000}"),
        "nested too deeply",
    ),
    "a file of a thousand brackets": (
        ("explore", "--config", "a.yaml", f"seed: {'[' * 3000}"),
        "a.yaml: it is nested too deeply",
    ),
    "a pace of kills without kills": (
        ("demo", "--chaos-every", "2"),
        "--chaos-every 2 needs --chaos",
    ),
    "two seeds": (("demo", "--seed", "1", "--set", "seed=2"), "--seed 1, and seed=2: give one of"),
    "digits for a model that has a game": (
        ("demo", "--model", "hf", "--digits", "2"),
        "--digits 2: --model hf has a task of its own",
    ),
    "digits for a game of guesses": (
        ("demo", "--task", "guess", "--digits", "5"),
        "--digits 5: the task 'guess' has none: leave it out, or choose --task sort",
    ),
    "a demo of an unknown loss": (("demo", "--set", "loss.name=pppo"), "no policy_loss_fn 'pppo'"),
}


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> SampleRun:
    folder = tmp_path_factory.mktemp("sample")
    return anyio.run(record_sample_run, f"sqlite:///{folder / 'store.db'}", folder / "run")


def content(sample: SampleRun) -> dict[str, list[Any]]:
    """Return every row of the store but leases, which are promises."""
    with closing(dbapi2.connect(sample.url.removeprefix("sqlite:///"))) as connection:
        tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        names = [name for (name,) in tables if name != "lease"]
        return {name: connection.execute(f'SELECT * FROM "{name}"').fetchall() for name in names}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_word_changes_nothing(
    cli: Cli, sample: SampleRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.chdir(tmp_path)
    words, said = WRONG[case]
    file = next((word for word in words if word.startswith("a.")), None)
    if file is not None:
        *words_left, text = words
        Path(file).write_text(text)
        words = tuple(words_left)
    words += () if words[0] == "demo" else ("--store", sample.url)
    words += ("--actor", "e0") if words[0] == "explore" and "--actor" not in words else ()
    before = content(sample)
    ended = cli(*words)
    assert ended.code == 2
    assert said in ended.err
    assert len(ended.err.splitlines()) == 1 or "Usage:" in ended.err
    assert content(sample) == before
    assert not list(tmp_path.glob("runs/*"))


@pytest.mark.parametrize("url", ["new_sqlite_url", "postgres_url"])
@pytest.mark.parametrize(
    "words", [("qq=1",), ("algorithm=jsd",), ("algorithm=mix", "expert_experiment=nobody")]
)
def test_a_run_that_is_refused_leaves_no_store_behind(
    cli: Cli, request: pytest.FixtureRequest, url: str, words: tuple[str, ...]
) -> None:
    store = request.getfixturevalue(url)
    settings = [part for word in words for part in ("--set", word)]
    assert cli("explore", "--store", store, "--actor", "e0", *settings).code == 2
    assert "there is no store to read" in cli("stats", "--store", store).err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("train", "--resume-from", "3", "--set", "seed=7"), "runs: no such directory"),
        (("train", "--experiment", "a\nb", "--set", "seed=7"), "an experiment's name is 'a\\nb'"),
        (("explore", "--actor", "a\nb", "--set", "seed=7"), "--actor is 'a\\nb'"),
        (("explore", "--actor", "e0", "--set", "model=m"), "the run names no rollout"),
        (("explore", "--actor", "e0", "--config", "run.toml"), "rollout = 'nowhere_at_all:f'"),
        (("train", "--config", "wrong.toml"), "there is no key 'qq'"),
        (("train", "--config", "nul.toml"), "nul.toml: store='\\x00': it must be a text"),
        (("import", "trinity-rft", DUMP, "--experiment", "a\nb"), "an experiment's name is"),
        (("import", "trinity-rft", "refused.db"), "reward is inf"),
    ],
)
def test_whoever_is_refused_leaves_no_file_behind(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    place = 'store = "runs/run.db"\n'
    Path("run.toml").write_text(place + OWN_RUN)
    Path("wrong.toml").write_text(f"{place}qq = 1\n")
    Path("nul.toml").write_text('store = "\\u0000"\n')
    shutil.copy(DUMP, "refused.db")
    with closing(dbapi2.connect("refused.db")) as connection, connection:
        tables = connection.execute("SELECT name FROM sqlite_master WHERE name LIKE '%_blob'")
        ((blobs,),) = tables.fetchall()
        connection.execute(f'UPDATE "{blobs.removesuffix("_blob")}" SET reward = 9e999')
    before = sorted(tmp_path.rglob("*"))
    place_too = () if "--config" in words else ("--store", "runs/run.db")
    ended = cli(*words, *place_too)
    assert (ended.code, said in ended.err) == (2, True), ended.err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("words", [("train",), ("explore", "--actor", "e0", "--batches", 1)])
def test_who_makes_a_store_makes_its_folder(
    cli: Cli, tmp_path: Path, words: tuple[object, ...]
) -> None:
    store = tmp_path / "runs" / "run.db"
    assert cli(*words, "--store", store, "--set", "qq=1").code == 2
    assert not store.parent.exists()
    cli(*words, "--store", store, "--set", "seed=7")  # nobody annotates what would be trained
    assert store.exists()


def test_a_demo_makes_the_folder_of_its_store(cli: Cli, tmp_path: Path) -> None:
    store = tmp_path / "runs" / "of mine" / "run.db"
    assert cli("demo", "--store", store, "--set", "qq=1").code == 2
    assert not store.parent.exists()
    ended = cli("demo", "--store", store, "--name", "\n")  # which no experiment can have
    assert "control characters" in ended.err
    assert store.exists()


@pytest.mark.parametrize(
    "command", [("stats",), ("annotate",), ("train", "--checkpoints", "c"), ("migrate",), ("demo",)]
)
def test_a_server_that_is_not_there_is_named_without_its_password(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = cli(*command, "--store", CLOSED)
    assert ended.code == 2
    assert "127.0.0.1:1" in ended.err
    assert len(ended.err.splitlines()) == 1
    assert SECRET not in ended.out + ended.err


def test_a_demo_reads_in_its_file_where_the_run_is(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f'store = "{CLOSED}"')
    assert "127.0.0.1:1" in cli("demo", "--config", file).err
    file.write_text('experiment = "a/b"')
    assert "--name 'a/b'" in cli("demo", "--config", file).err


def test_a_password_that_breaks_the_url_is_not_shown_as_its_host(cli: Cli) -> None:
    ended = cli("stats", "--store", "postgresql://me:un@told@127.0.0.1:1/db")
    assert ended.code == 2
    assert "write @ in a password as %40" in ended.err
    assert "told" not in ended.err


@pytest.mark.parametrize(
    "words",
    [
        ("train", "--checkpoints"),
        ("train", "--follow", "--resume-from", 3, "--checkpoints"),
        ("explore", "--actor", "e0", "--acknowledge"),
    ],
)
def test_a_run_that_is_refused_has_made_no_folder(
    cli: Cli, tmp_path: Path, words: tuple[str, ...]
) -> None:
    refused = cli(*words, tmp_path / "deep" / "folder", "--store", tmp_path / "nowhere.db")
    assert refused.code == 2
    assert not (tmp_path / "deep").exists()


@pytest.mark.parametrize(
    ("words", "lacks"),
    [
        (("train", "--checkpoints"), "there is no folder"),
        (("explore", "--actor", "e0", "--acknowledge"), "names no rollout"),
    ],
)
def test_a_run_without_its_ends_is_refused_before_it_makes_a_folder(
    cli: Cli, tmp_path: Path, words: tuple[str, ...], lacks: str
) -> None:
    made_in_python(tmp_path / "own.db", own={"rollouts_per_group": 2, "model": "nowhere"})
    refused = cli(*words, tmp_path / "deep" / "folder", "--store", tmp_path / "own.db")
    assert (refused.code, refused.out) == (2, "")
    assert lacks in refused.err
    assert not (tmp_path / "deep").exists()


def test_weights_are_not_brought_to_what_is_no_server(cli: Cli, tmp_path: Path) -> None:
    """An experiment that was made in Python may name anything."""
    other = {"server": "http://127.0.0.1:1", "server_type": "sglan"}
    made_in_python(tmp_path / "own.db", number={"server": 5}, dialect=other)
    for name, said in (("number", "server=5"), ("dialect", "server_type='sglan'")):
        refused = cli("sync-weights", "--store", tmp_path / "own.db", "--experiment", name)
        assert (refused.code, refused.out) == (2, "")
        assert said in refused.err


def made_in_python(path: Path, **configs: dict[str, Any]) -> None:
    """Make an experiment of each name, without the commands."""

    async def make() -> None:
        async with open_store(path) as store:
            for name, config in configs.items():
                await store.experiment(name, config=config)

    anyio.run(make)
