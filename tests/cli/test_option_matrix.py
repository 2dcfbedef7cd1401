"""Whatever the command line offers trains four steps, or is refused before a rollout is made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
import typer
from pysqlite3 import dbapi2

from tests.cli.calling import Cli
from tests.crash.forking import fork_children
from trinity_buffer import open_store
from trinity_buffer.algorithm import (
    ADD_STRATEGY,
    ADVANTAGE_FN,
    ALGORITHM_TYPE,
    ENTROPY_LOSS_FN,
    KL_FN,
    POLICY_LOSS_FN,
    SAMPLE_STRATEGY,
)
from trinity_buffer.algorithm.arguments import Registry
from trinity_buffer.cli import roles, run
from trinity_buffer.cli.main import COMMANDS
from trinity_buffer.cli.run_config import overridden, recorded, resolved
from trinity_buffer.errors import UnknownStoreError
from trinity_buffer.options import Options, option_types, section_of
from trinity_buffer.pipeline.config import RunConfig

STEPS = 4
SMALL = {
    "task.digits": 2,
    "model.width": 8,
    "model.layers": 1,
    "model.heads": 1,
    "groups_per_step": 2,
    "groups_per_batch": 2,
    "rollouts_per_group": 4,
    "max_steps": STEPS,
    "evaluation.every_steps": 1000,
    "evaluation.num_eval_samples": 1,
}

TRAINS = ""
"""In place of what a refusal says."""

_OVERLONG = "strategy_args.overlong_penalty={max_length=8,cache_length=2}"

# Key -> what is set, with what else -> what the refusal says.
KEYS: dict[str, dict[str, str]] = {
    "task.name": {"sort": TRAINS, "guess": TRAINS, "chess": "task.name='chess'"},
    "task.digits": {"1": TRAINS, "12": TRAINS, "0": "task.digits=0"},
    "task.numbers": {"2 task.name=guess": TRAINS, "99 task.name=guess": TRAINS, "1": "numbers=1"},
    "task.turns": {"1 task.name=guess": TRAINS, "9 task.name=guess": TRAINS, "0": "turns=0"},
    "model.width": {"8": TRAINS, "128": TRAINS, "7": "width=7", "9 model.heads=2": "heads"},
    "model.layers": {"1": TRAINS, "4": TRAINS, "0": "layers=0"},
    "model.heads": {"1": TRAINS, "4": TRAINS, "8": TRAINS, "3": "heads", "0": "heads=0"},
    "optimizer.learning_rate": {
        "1e-30": TRAINS,
        "0": "rate=0",
        "inf": "rate=inf",
        "nan": "rate=nan",
    },
    "optimizer.warmup_steps": {"0": TRAINS, "1000000000": TRAINS, "-1": "warmup_steps=-1"},
    "optimizer.decay_steps": {"1": TRAINS, "1000000000": TRAINS, "0": "decay_steps=0"},
    "optimizer.min_lr_ratio": {"0": TRAINS, "1": TRAINS, "1.5": "min_lr_ratio=1.5"},
    "optimizer.betas": {"[0,0]": TRAINS, "[1,1]": "betas", "[0.9,-1]": "betas", "[0.9]": "betas"},
    "optimizer.weight_decay": {"0": TRAINS, "10": TRAINS, "-1": "weight_decay=-1"},
    "optimizer.max_gradient_norm": {"1e-30": TRAINS, "1e30": TRAINS, "0": "norm=0"},
    "optimizer.entropy_coef": {"0": TRAINS, "10": TRAINS, "null": TRAINS, "-1": "coef=-1"},
    "optimizer.critic_learning_rate": {"1e-30 algorithm=ppo": TRAINS, "0": "rate=0"},
    "optimizer.value_clip_range": {"1e-30 algorithm=ppo": TRAINS, "0": "range=0"},
    "loss.name": {"null": TRAINS, "pppo": "no policy_loss_fn 'pppo'"},
    "loss.args": {"{}": TRAINS, "{clip_rang=1}": "clip_range", "3": "loss.args=3"},
    "evaluation.every_steps": {"1": TRAINS, "0": "every_steps=0"},
    "evaluation.num_eval_samples": {"1": TRAINS, "0": "samples=0"},
    "evaluation.target_accuracy": {"2.0": TRAINS, "null": TRAINS, "'x'": "target_accuracy"},
    "seed": {
        f"{(1 << 62) - 1}": TRAINS,
        f"{1 - (1 << 62)}": TRAINS,
        f"{1 << 62}": "seed",
        "99999999999999999999": "seed=99999999999999999999",
    },
    "algorithm": {"grop": "did you mean 'grpo'"},
    "algorithm_args": {"{}": TRAINS, "{policy_los_fn='ppo'}": "policy_loss_fn"},
    "strategy": {
        "null": TRAINS,
        "grop": "did you mean 'grpo'",
        "grpo+grpo": "twice",
        "best_of_group+grpo": TRAINS,
        "duplicate_informative+grpo": TRAINS,
        "outcome_gate+grpo task.digits=1": TRAINS,
        "reward_variance+grpo": TRAINS,
        f"overlong_penalty+grpo {_OVERLONG}": TRAINS,
    },
    "strategy_args": {"{epsilon=1}": TRAINS, "{epsilonn=1}": "epsilon"},
    "reference": {"null": TRAINS, "nowhere algorithm=ppo": "reference=nowhere"},
    "teacher": {"null": TRAINS, "nowhere": "teacher=nowhere"},
    "expert_experiment": {"null": TRAINS, "nobody": "expert_experiment='nobody'"},
    "recompute_old_logprob": {"true": TRAINS, "false": TRAINS, "3": "recompute_old_logprob=3"},
    "record_row_metrics": {"true": TRAINS, "false": TRAINS, "3": "record_row_metrics=3"},
    "record_token_metrics": {
        "true": TRAINS,
        "true record_row_metrics=false": TRAINS,
        "3": "record_token_metrics=3",
    },
    "device": {"cpu": TRAINS, "gpu": "device='gpu': it must be cpu, cuda"},
    "deterministic": {"true": TRAINS, "false": TRAINS, "3": "deterministic=3"},
    "trainer": {"t": TRAINS, "grpo": "trainer='grpo'", "''": "trainer=''", "a/b": "without '/'"},
    "groups_per_batch": {"1": TRAINS, "50": TRAINS, "0": "groups_per_batch=0"},
    "rollouts_per_group": {"2": TRAINS, "30": TRAINS, "1": "2 or more", "0": "group=0"},
    "group_timeout_s": {
        "1e-3": TRAINS,
        "1e9": TRAINS,
        "0": "group_timeout_s=0",
        "nan": "group_timeout_s=nan",
    },
    "idle_s": {"1e-3": TRAINS, "null": TRAINS, "0": "idle_s=0", "nan": "idle_s=nan"},
    "on_incomplete_group": {"keep": TRAINS, "reject": TRAINS, "maybe": "group='maybe'"},
    "groups_per_step": {"1": TRAINS, "9": TRAINS, "0": "groups_per_step=0"},
    "max_queued_groups": {"1": TRAINS, "null": TRAINS, "0": "max_queued_groups=0"},
    "max_staleness": {"0": TRAINS, "null": TRAINS, "-1": "max_staleness=-1"},
    "commit_every_steps": {"2": TRAINS, "3": "commit at least every 2", "0": "steps=0"},
    "async_checkpoints": {
        "true": TRAINS,
        "false": TRAINS,
        "null": TRAINS,
        "3": "async_checkpoints=3",
    },
    "max_steps": {"4": TRAINS, "0": "max_steps=0"},
    "max_skipped_steps": {"1": TRAINS, "0": "max_skipped_steps=0"},
    "max_rejected_steps": {"1": TRAINS, "0": "max_rejected_steps=0"},
    "lease_ttl_s": {"0.5": TRAINS, "1e6": TRAINS, "0": "lease_ttl_s=0", "inf": "lease_ttl_s=inf"},
    "stalled_after_s": {
        "600": TRAINS,
        "null": TRAINS,
        "0": "stalled_after_s=0",
        "nan": "stalled_after_s=nan",
    },
    "tokens_per_microbatch": {"1": TRAINS, "1000000": TRAINS, "0": "microbatch=0"},
    "max_tokens": {"null": TRAINS, "0": "max_tokens=0", "1": "run of your own alone"},
    "rollout": {"null": TRAINS, "nowhere:f": "rollout", "x": "rollout"},
    "tasks": {"null": TRAINS, "nowhere:f": "tasks"},
    "evaluate": {"null": TRAINS, "nowhere:f": "evaluate"},
    "server": {"null": TRAINS, "http://127.0.0.1:1": "server"},
    "server_type": {"vllm": TRAINS, "sglang": "run of your own alone", "grpc": "server_type"},
    "folder": {"null": TRAINS},
    "tokenizer": {"null": TRAINS, "runs/nowhere": TRAINS},
    "explorer.epochs": {"1": TRAINS, "0": "epochs=0"},
    "explorer.concurrency": {"1": "run of your own alone", "0": "concurrency=0"},
    "explorer.timeout_s": {"null": TRAINS, "0": "timeout_s=0", "inf": "timeout_s=inf"},
    "explorer.attempts": {"1": "run of your own alone", "0": "attempts=0"},
    "explorer.on_failure": {"leave_out": "run of your own alone", "ignore": "on_failure='ignore'"},
    "explorer.max_tokens": {"1": "run of your own alone", "0": "max_tokens=0"},
    "layout": {"padded": TRAINS, "packed": TRAINS, "ragged": "layout='ragged'"},
}

# Command -> options -> what the refusal says. The first option of each is the one that is tried.
OPTIONS: dict[str, dict[str, str]] = {
    "demo": {
        "--store runs/of/mine/other.db": TRAINS,
        "--store postgresql://nobody@127.0.0.1:1/x": "127.0.0.1:1",
        "--name é": TRAINS,
        "--name a/b": "--name 'a/b'",
        "--algorithm grop": "did you mean 'grpo'",
        "--task chess": "no task 'chess'",
        "--digits 0": "digits=0",
        "--model gpt": "--model",
        "--explorers 0": "--explorers",
        "--chaos --chaos-every 0": "--chaos-every",
        "--limit -1": "--limit",
        "--seed 4611686018427387904": "seed=4611686018427387904",
        "--config nowhere.toml": "nowhere.toml: No such file",
        "--set x": "write it as section.key=value",
    },
    "explore": {
        "--actor é": TRAINS,
        "--actor a/b": "--actor 'a/b'",
        "--store nowhere/x.db": "nowhere",
        "--experiment other": "other",
        "--config nowhere.toml": "nowhere.toml: No such file",
        "--set x": "write it as section.key=value",
        "--acknowledge acks": TRAINS,
        "--acknowledge store.db": "store.db",
        "--batches 1": TRAINS,
        "--take-over": TRAINS,
        "--batches 0": "--batches",
    },
    "annotate": {
        "--store nowhere.db": "nowhere.db",
        "--experiment other": "other",
        "--config nowhere.toml": "nowhere.toml: No such file",
        "--strategy opmd": TRAINS,
        "--strategy grop": "did you mean 'grpo'",
        "--name é": TRAINS,
        "--name trainer": "trainer",
        "--set epsilon=1e-30 --name other": TRAINS,
        "--set epsilonn=1": "did you mean 'epsilon'",
        "--follow --experiment run --set x": "write it as section.key=value",
        "--json": TRAINS,
    },
    "train": {
        "--store nowhere.db": "nowhere.db",
        "--experiment other": "other",
        "--config nowhere.toml": "nowhere.toml: No such file",
        "--set x": "write it as section.key=value",
        "--checkpoints é": TRAINS,
        "--checkpoints store.db": "store.db",
        "--resume-from 0": TRAINS,
        "--resume-from 9": "resume_from=9",
        "--resume-from -1": "resume_from=-1",
        "--drop-damaged-rows": TRAINS,
        "--drop x": "'x' is not a uid",
        "--keep-checkpoints 1": TRAINS,
        "--keep-checkpoints all": TRAINS,
        "--keep-checkpoints 0": "--keep-checkpoints 0",
        "--follow": TRAINS,
    },
}

NAMED: dict[str, Registry[Any]] = {
    "algorithm": ALGORITHM_TYPE,
    "strategy": ADD_STRATEGY,
    "loss.name": POLICY_LOSS_FN,
    "algorithm_args.advantage_fn": ADVANTAGE_FN,
    "algorithm_args.kl_loss_fn": KL_FN,
    "algorithm_args.kl_penalty_fn": KL_FN,
    "algorithm_args.entropy_loss_fn": ENTROPY_LOSS_FN,
    "algorithm_args.sample_strategy": SAMPLE_STRATEGY,
}
"""Which key takes the names of which registry."""

_STORED = ("asymre", "gigpo", "grpo", "opmd", "rec", "reinforce", "step_wise_grpo")

_FILTERS = (
    *("best_of_group", "dapo_dynamic_sampling", "duplicate_informative", "outcome_gate"),
    "reward_variance",
)

REFUSED = {
    " ".join(f"strategy={name}" for name in _FILTERS): "only chooses",
    "strategy=overlong_penalty": "needs max_length",
    " ".join(
        f"algorithm_args.kl_penalty_fn={name}" for name in KL_FN.names() if name != "none"
    ): "lowers rewards in the trainer",
    " ".join(f"algorithm_args.advantage_fn={name}" for name in _STORED): "name it as add_strategy",
    "algorithm_args.advantage_fn=jsd": "needs teacher_logprobs",
    "algorithm_args.advantage_fn=on_policy_distill": "needs teacher_logprobs",
    "algorithm_args.advantage_fn=ppo": "needs values of a critic",
    "algorithm_args.advantage_fn=remax": "needs reward_baselines",
    "algorithm_args.entropy_loss_fn=mix": "needs an expert's rows for the entropy",
    "algorithm_args.sample_strategy=mix": "needs an expert's rows",
    "algorithm=jsd algorithm=on_policy_distill": "needs teacher_logprobs",
    "algorithm=mix algorithm=mix_chord": "needs an expert's rows",
    "loss.name=dpo": "needs pairs for the loss 'dpo'",
    "loss.name=mix loss.name=mix_chord": "needs an expert's rows for the loss",
}
"""Which of them cannot be trained like this, and what is said."""


def keys_of(options: type[Options], prefix: str = "") -> Iterator[str]:
    for name, kind in option_types(options).items():
        section = section_of(kind)
        if section is not None:
            yield from keys_of(section, f"{prefix}{name}.")
        else:
            yield prefix + name


def test_every_key_of_the_configuration_is_tried() -> None:
    assert set(KEYS) == set(keys_of(RunConfig))


@pytest.mark.parametrize("command", OPTIONS)
def test_every_option_of_a_command_is_tried(command: str) -> None:
    function = COMMANDS[command].partition(":")[2]
    made = typer.Typer(add_completion=False)
    made.command()(getattr(run, function))
    options = {one.opts[0] for one in typer.main.get_command(made).params}
    tried = {word for words in OPTIONS[command] for word in words.split() if word[:2] == "--"}
    assert tried == options


async def stored(url: str) -> tuple[int, int]:
    """Return how many rollouts and how many committed steps a store holds."""
    try:
        async with open_store(url, read_only=True) as store:
            if "run" not in await store.experiments():
                return 0, 0
            experiment = await store.experiment("run")
            rollouts = [0 async for _ in experiment.events(kinds=("ExperiencesRecorded",))]
            commits = [e async for e in experiment.events(kinds=("StepsCommitted",))]
            return len(rollouts), sum(len(e.body["steps"]) for e in commits)
    except UnknownStoreError:
        return 0, 0


async def run_to_the_end(url: str, checkpoints: Path) -> None:
    """Let the three roles of a demo do their work, in this process."""
    quiet: dict[str, Any] = {"say": lambda _: None}
    explore = partial(
        roles.explore, url, "run", actor="e0", acknowledgements=None, max_batches=None, **quiet
    )
    annotate = partial(roles.annotate, url, "run", strategy=None, name=None, args=None, follow=True)
    train = partial(
        roles.train, url, "run", checkpoints=checkpoints, follow=True, resume_from=None, **quiet
    )
    with anyio.fail_after(120):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(explore)
            tasks.start_soon(annotate)
            await anyio.to_thread.run_sync(train, abandon_on_cancel=True)


def trains_or_is_refused(cli: Cli, folder: Path, chosen: str, said: str) -> None:
    url = f"sqlite:///{folder / 'run.db'}"
    words = words_of(SMALL) + [word for one in chosen.split() for word in ("--set", one)]
    ended = cli(
        "explore", "--store", url, "--experiment", "run", "--actor", "e0", "--batches", 1, *words
    )
    if said:
        assert (ended.code, len(ended.err.splitlines())) == (2, 1), ended
        assert said in ended.err
        assert anyio.run(stored, url) == (0, 0)
        return
    assert ended.code == 0, ended
    anyio.run(run_to_the_end, url, folder / "c")
    assert anyio.run(stored, url)[1] == STEPS


@pytest.mark.long
@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in KEYS.items() for value in values]
)
def test_every_key_at_its_ends(cli: Cli, tmp_path: Path, key: str, value: str) -> None:
    trains_or_is_refused(cli, tmp_path, f"{key}={value}", KEYS[key][value])


@pytest.mark.long
@pytest.mark.parametrize(
    "chosen", [f"{key}={name}" for key, registry in NAMED.items() for name in registry.names()]
)
def test_every_registered_name(cli: Cli, tmp_path: Path, chosen: str) -> None:
    said = next((said for names, said in REFUSED.items() if chosen in names.split()), TRAINS)
    trains_or_is_refused(cli, tmp_path, chosen, said)


def words_of(values: Mapping[str, object]) -> list[str]:
    return [word for key, value in values.items() for word in ("--set", f"{key}={value}")]


@pytest.mark.long
@pytest.mark.parametrize("words", OPTIONS["demo"])
def test_every_option_of_the_demo(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    fork_children(monkeypatch)
    small = {key: value for key, value in SMALL.items() if key not in words.replace("--", "task.")}
    limit = () if "--limit" in words else ("--limit", "300")
    ended = cli("demo", *words_of(small), *limit, *words.split())
    said = OPTIONS["demo"][words]
    if said:
        assert ended.code == 2
        assert said in ended.err
        assert not list(tmp_path.rglob("*.db"))
    else:
        assert ended.code == 0, ended
        assert f"{STEPS} gradient steps" in ended.out


@pytest.fixture(scope="module")
def annotated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store with what four steps take."""
    path = tmp_path_factory.mktemp("annotated") / "store.db"
    values = overridden({}, [f"{key}={value}" for key, value in SMALL.items()])
    unbounded = {"max_staleness": None, "max_queued_groups": None}

    async def fill() -> None:
        url = f"sqlite:///{path}"
        async with open_store(url) as store:
            await store.experiment("run", config=recorded(resolved(values | unbounded)))
        quiet: dict[str, Any] = {"acknowledgements": None, "say": lambda _: None}
        await roles.explore(url, "run", actor="e0", max_batches=STEPS, **quiet)
        await roles.annotate(url, "run", strategy=None, name=None, args=None, follow=False)

    anyio.run(fill)
    return path


@pytest.mark.long
@pytest.mark.parametrize(
    ("command", "words"),
    [
        (command, words)
        for command in ("explore", "annotate", "train")
        for words in OPTIONS[command]
    ],
)
def test_every_option_of_a_role(
    cli: Cli,
    annotated: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    with closing(dbapi2.connect(annotated)) as source, closing(dbapi2.connect("store.db")) as copy:
        source.backup(copy)
    chosen = words.split()
    if "--store" not in chosen:
        chosen += ["--store", "store.db"]
    if command == "explore":
        chosen += [] if "--actor" in chosen else ["--actor", "e1"]
        chosen += [] if "--batches" in chosen else ["--batches", "1"]
    ended = cli(command, *chosen)
    said = OPTIONS[command][words]
    if said:
        assert ended.code == 2, ended
        assert said in ended.err
        assert len(ended.err.splitlines()) == 1 or "Usage:" in ended.err
        assert anyio.run(stored, "sqlite:///store.db") == (STEPS, 0)
    else:
        assert ended.code == 0, ended
        trained = STEPS if command == "train" else 0
        assert anyio.run(stored, "sqlite:///store.db")[1] == trained
