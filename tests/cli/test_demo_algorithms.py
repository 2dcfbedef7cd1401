"""Every algorithm from the command line: what it needs is made for it, and it trains."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.cli.calling import Cli
from tests.crash.forking import fork_children
from tests.crash.points import VARIABLE
from trinity_buffer import open_store
from trinity_buffer.cli import roles
from trinity_buffer.cli.demo_run import expert_of, teacher_of
from trinity_buffer.cli.run_backends import first_policy
from trinity_buffer.cli.run_config import recorded, resolved
from trinity_buffer.demo.recipes import config_for
from trinity_buffer.pipeline.config import RunConfig

SMALL: dict[str, Any] = {
    "model": {"width": 8, "layers": 1, "heads": 1},
    "groups_per_step": 6,
    "groups_per_batch": 6,
    "max_staleness": None,
    "max_queued_groups": None,
    "evaluation": {"every_steps": 1000, "num_eval_samples": 1},
}


def small(name: str, **more: Any) -> RunConfig:
    return resolved(config_for(name) | SMALL | more)


async def filled(url: str, name: str, config: RunConfig) -> None:
    """Make the experiment ``name``, let one explorer run for four batches, annotate them."""
    async with open_store(url) as store:
        await store.experiment(name, config=recorded(config))
    await roles.explore(url, name, actor="e0", acknowledgements=None, max_batches=4, say=print)
    await roles.annotate(url, name, strategy=None, name=None, args=None, follow=False)


@pytest.mark.parametrize("name", ["cpt", "dpo", "jsd", "mix", "ppo", "topr"])
def test_the_roles_of_an_algorithm_make_and_train_its_data(name: str, tmp_path: Path) -> None:
    url, config = f"sqlite:///{tmp_path / 'run.db'}", small(name, max_steps=2)
    if name == "jsd":
        policy = tmp_path / "teacher.safetensors"
        first_policy(teacher_of(config)).save(policy)
        config = small(name, max_steps=2, teacher=str(policy))
    if name == "mix":
        anyio.run(filled, url, "expert", expert_of(config))
        config = small(name, max_steps=2, expert_experiment="expert")
    anyio.run(filled, url, "run", config)
    said: list[str] = []
    train = partial(roles.train, url, "run", checkpoints=tmp_path, follow=False, say=said.append)
    train(resume_from=None)
    assert [line.split(":")[0] for line in said[1:]] == ["step 1", "step 2", "ends"]
    unknown = [" reward -," in said[1], " staleness -," in said[1]]
    assert unknown == [name in ("cpt", "dpo")] * 2
    said.clear()
    train(resume_from=None)  # nothing, and it says why
    assert said[0].endswith("resumes after step 2")
    assert said[1].startswith("ends: max_steps=2 of run's configuration is reached; to train on, ")
    assert "--set max_steps=N" in said[1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--algorithm", "grop"), "did you mean 'grpo'?"),
        (("--algorithm", "grpo", "--set", "algorithm=opmd"), "give one of the two"),
        (("--algorithm", "sft", "--task", "guess"), "task 'guess' has no solutions"),
        (("--algorithm", "jsd", "--set", "task.name=guess"), "task 'guess' has no solutions"),
        (("--set", "loss.name=topr", "--set", "loss.args.clip_range=1"), "policy_loss_fn 'topr'"),
    ],
)
def test_a_demo_that_cannot_be_is_refused(
    cli: Cli, words: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = cli("demo", *words)
    assert ended.code == 2
    assert said in ended.err
    assert not list(tmp_path.glob("runs/*"))


ONE_OF_A_FAMILY = ("sft", "ppo", "mix", "multi_step_grpo", "jsd")
"""They differ in what they train on; what else differs is tested in one process."""

LITTLE = {
    "task.digits": 1,
    "model.width": 8,
    "groups_per_step": 6,
    "groups_per_batch": 3,
    "max_steps": 4,
    "evaluation.num_eval_samples": 8,
}


@pytest.mark.long
@pytest.mark.parametrize(
    "chosen", [*(f"--algorithm {name}" for name in ONE_OF_A_FAMILY), "--set loss.name=topr"]
)
def test_a_demo_survives_a_kill_and_replays(
    cli: Cli, chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its trainer is killed between its third checkpoint and commit."""
    fork_children(monkeypatch)
    monkeypatch.setenv(VARIABLE, "after-checkpoint:3")
    store = ("--store", tmp_path / "run.db")
    little = [word for key, value in LITTLE.items() for word in ("--set", f"{key}={value}")]
    ended = cli("demo", "--name", "run", *chosen.split(), *store, *little, "--limit", 900)
    assert ended.code == 0, ended
    assert ended.out.splitlines()[-1] == "lost 0, duplicated 0"
    assert "4 gradient steps" in ended.out
    assert "resumes after step 2" in (tmp_path / "run.logs" / "trainer.log").read_text()
    replayed = cli("replay", *store, "--experiment", "run", "--json")
    assert [line["identical"] for line in replayed.json] == [True], replayed
