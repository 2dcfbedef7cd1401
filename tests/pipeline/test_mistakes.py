"""Beginners' mistakes: each ends in one sentence with the remedy, or speaks while it waits."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import anyio
import pytest
import torch
from typing_extensions import override

import trinity_buffer as tb
from tests.contract.making import group, living, opened, rollout
from tests.handles import Experiment
from trinity_buffer.algorithm import AddStrategy, build
from trinity_buffer.errors import TrinityBufferError

SPEAKS_WITHIN_S = 6.0


@dataclass
class Scene:
    """A store with one annotated group, of which nothing is trained yet."""

    url: str
    experiment: Experiment


Act = Callable[[Scene], Coroutine[Any, Any, Any]]
MISTAKES: dict[str, tuple[Act, str, bool]] = {}


def mistake(expected: str, *, waits: bool = False) -> Callable[[Act], Act]:
    """Note what somebody does, and what is said of it: in an error, or in a line of the log."""

    def note(act: Act) -> Act:
        name = getattr(act, "__name__", "").replace("_", " ").strip()
        assert name not in MISTAKES
        MISTAKES[name] = (act, expected, waits)
        return act

    return note


async def first_step(scene: Scene, **options: Any) -> Any:
    async with scene.experiment.train_stream(**{"strategy": "grpo"} | options) as stream:
        return await anext(stream)


async def annotate(scene: Scene, **options: Any) -> Any:
    return await tb.run_strategy(scene.experiment, "grpo", **options)


# -- names


@mistake(r"no annotation set 'grp' \(there: grpo; did you mean 'grpo'\?\).*annotate --name grp")
async def _a_set_that_is_not_there(scene: Scene) -> None:
    await first_step(scene, strategy="grp")


@mistake(r"trainer 'trainer' waits: .*did you mean 'grpo'", waits=True)
async def _waits_for_a_set_that_is_not_there(scene: Scene) -> None:
    await first_step(scene, strategy="grp", follow=True)


@mistake(r"no add_strategy 'grop'.*did you mean 'grpo'")
async def _a_strategy_that_is_not_there(scene: Scene) -> None:
    await tb.run_strategy(scene.experiment, "grop")


@mistake(r"takes no argument 'epsilonn'; did you mean 'epsilon'")
async def _an_argument_that_the_strategy_has_not(scene: Scene) -> None:
    await tb.run_strategy(scene.experiment, "grpo", {"epsilonn": 1e-6}, name="x")


@mistake(r"takes no argument 'group_per_step'; did you mean 'groups_per_step'")
async def _an_option_that_the_stream_has_not(scene: Scene) -> None:
    await first_step(scene, group_per_step=4)


@mistake(r"takes no argument 'trainer'; did you mean 'consumer'")
async def _the_trainer_of_a_stream(scene: Scene) -> None:
    await first_step(scene, trainer="loop")


@mistake(r"a train stream needs strategy=: the name of an annotation set, or None")
async def _no_set_at_all(scene: Scene) -> None:
    async with scene.experiment.train_stream():
        pass


@mistake(r"a train stream needs experiment=, its name: .* holds run")
async def _no_experiment_at_all(scene: Scene) -> None:
    def open_without() -> None:
        with tb.open_train_stream(scene.url, strategy="grpo"):  # type: ignore[call-arg]
            pass

    await anyio.to_thread.run_sync(open_without)


@mistake(r"TrainerSettings takes no argument 'lr' \(accepted: .*learning_rate")
async def _a_setting_of_the_trainer_that_there_is_not(scene: Scene) -> None:
    tb.TrainerSettings(checkpoints=Path("checkpoints"), lr=1e-3)  # type: ignore[call-arg]


@mistake(r"device='gpu': torch knows no such device; give cpu, cuda, or one GPU, such as cuda:1")
async def _a_device_that_there_is_not(scene: Scene) -> None:
    await first_step(scene, device="gpu")


@mistake(r"device='cuda': torch .* sees no such GPU on this machine; give device='cpu'")
async def _a_gpu_that_there_is_not(scene: Scene) -> None:
    with patch("torch.cuda.device_count", return_value=0):
        await first_step(scene, device="cuda")


@mistake(r"run_strategy takes no argument 'group_timeout'; did you mean 'group_timeout_s'.* name, ")
async def _a_grouping_rule_that_there_is_not(scene: Scene) -> None:
    await annotate(scene, name="x", group_timeout=4)


@mistake(r"holds no experiment 'rum' \(there: run\)")
async def _an_experiment_that_is_not_there(scene: Scene) -> None:
    async with tb.open_store(scene.url) as store:
        await store.experiment("rum")


@mistake(r"annotation set 'grpo' of experiment 'run' was made with .*name=")
async def _another_configuration_under_a_taken_name(scene: Scene) -> None:
    await tb.run_strategy(scene.experiment, "grpo", {"epsilon": 0.5})


@mistake(r"consumer 'grpo' is a strategy .*consumer=")
async def _a_trainer_with_the_name_of_a_strategy(scene: Scene) -> None:
    await first_step(scene, consumer="grpo")


# -- places


def _stream(url: str) -> None:
    try:
        with tb.open_train_stream(url, experiment="run", strategy="grpo"):
            pass
    finally:
        assert not Path(url.removeprefix("sqlite:///")).exists()


@mistake(r"stor\.db: there is no store to read \(did you mean .*store\.db\?\)")
async def _a_mistyped_path(scene: Scene) -> None:
    wrong = scene.url.replace("store.db", "stor.db")
    if "sqlite" not in scene.url:
        pytest.skip("a server has no paths")
    await anyio.to_thread.run_sync(_stream, wrong)


@mistake(r"/nowhere/at/all: no such directory; create it first \(mkdir -p ")
async def _a_folder_that_is_not_there(scene: Scene) -> None:
    async with tb.open_store("sqlite:////nowhere/at/all/run.db"):
        pass


@mistake(r"cannot live in 'mysql'; accepted are sqlite:///.* and postgresql://")
async def _a_database_that_nobody_supports(scene: Scene) -> None:
    async with tb.open_store("mysql://localhost/run"):
        pass


@mistake(r"in memory is lost with its process; name a file")
async def _a_store_in_memory(scene: Scene) -> None:
    async with tb.open_store("sqlite://"):
        pass


@mistake(r"is open read-only; open it without read_only to write")
async def _a_write_to_what_was_opened_to_read(scene: Scene) -> None:
    async with tb.open_store(scene.url, read_only=True) as store:
        await (await store.experiment("run")).writer("e0").write([rollout("c")])


@mistake(r"this needs psycopg: pip install 'trinity-buffer\[postgresql\]'")
async def _an_extra_that_is_not_installed(scene: Scene) -> None:
    with patch.dict(sys.modules, {"psycopg": None}):
        async with tb.open_store("postgresql://localhost/run"):
            pass


# -- what is lacking


@mistake(r"no process annotates set 'grpo': 4 experiences unseen", waits=True)
async def _nobody_annotates(scene: Scene) -> None:
    await scene.experiment.writer("e0").write(group("later"))
    async with scene.experiment.train_stream(strategy="grpo", follow=True) as stream:
        await stream.commit(await anext(stream))
        await anext(stream)


@mistake(r"1 group of batch unsealed lacks a number of runs \(plan the batch, seal it", waits=True)
async def _no_seal_and_no_plan(scene: Scene) -> None:
    await scene.experiment.writer("e0").write(group("unsealed"))
    await annotate(scene, name="other", follow=True, rollouts_per_group=None)


@mistake(
    r"strategy 'grpo' waits: 1 group of batch b1 lacks 1 run, no seal; explorer 'e1' is", waits=True
)
async def _a_run_that_was_never_written(scene: Scene) -> None:
    writer = scene.experiment.writer("e1")
    await writer.plan("b1", [0], 2)
    await writer.write([rollout("b1")])
    await annotate(scene, follow=True)


@mistake(r"strategy 'bare' rejected 2 of 6 experiences: invalid: reward 2", waits=True)
async def _no_rewards(scene: Scene) -> None:
    some = [rollout("bare", run=run, reward=None) for run in range(2)]
    await scene.experiment.writer("e0").write(some)
    await scene.experiment.writer("e0").seal("bare", 2)
    await annotate(scene, name="bare", rollouts_per_group=2)


@mistake(r"PPOPolicyLossFn needs the tensor 'old_logprob'.*no row .*recompute_old_logprob=True")
async def _no_log_probabilities(scene: Scene) -> None:
    some = group("bare")
    for one in some:
        one.logprobs = None
    await scene.experiment.writer("e0").write(some)
    await annotate(scene)
    async with scene.experiment.train_stream(strategy="grpo") as stream:
        await stream.commit(await anext(stream))
        (microbatch,) = (await anext(stream)).microbatches
    logprob = torch.zeros_like(microbatch["action_mask"], dtype=torch.float32)
    build("grpo", kl_loss_fn="none", entropy_loss_fn="none").loss(logprob, microbatch)


@mistake(r"batch 'b2': policy_version=0 is 5 behind the published 5.*load the weights of version 5")
async def _weights_that_are_too_old(scene: Scene) -> None:
    await scene.experiment.publish_policy(5, "weights-5")
    async with opened(scene.url, max_staleness=1) as experiment:
        await experiment.writer("e0").plan("b2", [0], 1, policy_version=0)


@mistake(r"explorer 'e0' waits to plan batch 'b4'.*no process trains as 'trainer'", waits=True)
async def _nobody_trains(scene: Scene) -> None:
    async with opened(scene.url, max_queued_groups=1) as experiment:
        await experiment.writer("e0").plan("b3", [0], 1)
        await experiment.writer("e0").plan("b4", [0], 1)


@mistake(
    r"trainer 'trainer' ended without a step: of the 4 rows of set 'grpo' 4 are in committed",
    waits=True,
)
async def _the_same_again(scene: Scene) -> None:
    for _ in range(2):
        async with scene.experiment.train_stream(strategy="grpo") as stream:
            async for step in stream:
                await stream.commit(step)


class Uninitialised(AddStrategy):
    """Has a constructor of its own."""

    def __init__(self, writer: tb.BufferWriter) -> None:
        self.scale = 2.0

    @override
    async def add(self, experiences: list[tb.Experience], step: int) -> tuple[int, dict[str, Any]]:
        """Write all."""
        await self.writer.write(experiences)
        return len(experiences), {}


@mistake(r"Uninitialised has no writer: call super\(\).__init__\(writer\) in its __init__")
async def _a_strategy_that_does_not_call_its_base(scene: Scene) -> None:
    await tb.run_strategy(scene.experiment, Uninitialised)


@mistake(r"metrics=\{'losses': tensor.*: each must be a number, such as float\(loss\)")
async def _losses_as_a_metric(scene: Scene) -> None:
    async with scene.experiment.train_stream(strategy="grpo") as stream:
        metrics: Any = {"losses": torch.ones(2)}
        await stream.commit(await anext(stream), metrics=metrics)


# -- several at once


@mistake(r"trainer 'trainer' is held by pid \d+ on host .*, renewed \d+ s ago", waits=True)
async def _two_trainers_of_one_name(scene: Scene) -> None:
    async with scene.experiment.train_stream(strategy="grpo"), opened(scene.url) as other:
        await first_step(Scene(scene.url, other))


@mistake(r"trainer 'trainer' is at work in pid \d+ on host .*choose another consumer name")
async def _two_trainers_that_do_not_wait(scene: Scene) -> None:
    async with scene.experiment.train_stream(strategy="grpo"), opened(scene.url) as other:
        await first_step(Scene(scene.url, other), wait_for_lease=False)


@mistake(r"rank 0 of trainer 'trainer' waits for rank 1 of 2 to open the stream", waits=True)
async def _a_rank_that_was_never_started(scene: Scene) -> None:
    await first_step(scene, world_size=2, groups_per_step=2)


@mistake(r"rank=2 of world_size=2: ranks count from 0")
async def _a_rank_that_there_is_not(scene: Scene) -> None:
    await first_step(scene, rank=2, world_size=2, groups_per_step=2)


async def explore(experiment: Experiment) -> None:
    async def attempt(task: str, model: None) -> list[tb.Experience]:
        return []

    await tb.explore(experiment, actor="e0", tasks=["a"], rollout=attempt, model=None)


@mistake(
    r"another process explores as 'e0' too \(pid \d+ on host .*\): give each process an actor name",
    waits=True,
)
async def _two_explorers_of_one_name(scene: Scene) -> None:
    async with living(scene.experiment, "e0"):
        await explore(scene.experiment)


# -- how it is used


@mistake(r"is closed: use it inside its `with` block")
async def _a_store_that_is_closed(scene: Scene) -> None:
    async with opened(scene.url) as experiment:
        pass
    await experiment.writer("e0").write([rollout("c")])


@mistake(r"was opened in another event loop: open it in each loop that uses it")
async def _another_event_loop(scene: Scene) -> None:
    await anyio.to_thread.run_sync(asyncio.run, scene.experiment.is_finished())


@mistake(r"was opened by process \d+ and forked into \d+: start the child with spawn")
async def _a_fork_after_the_store_was_opened(scene: Scene) -> None:
    with patch("os.getpid", return_value=1):  # as a child would see it
        await scene.experiment.is_finished()


def _without_asyncio(url: str) -> None:
    tb.open_store(url).__aenter__().send(None)


@mistake(r"needs an event loop of asyncio, and none runs here \(trio is not supported\)")
async def _trio(scene: Scene) -> None:
    await anyio.to_thread.run_sync(_without_asyncio, scene.url)


# -- what was written


@mistake(r"there is no key 'rollout_per_group'; did you mean 'rollouts_per_group'\?")
async def _a_key_of_the_configuration_that_nobody_reads(scene: Scene) -> None:
    async with opened(scene.url, rollout_per_group=4):
        pass


@mistake(
    r"'max_stalenes'; did you mean 'max_staleness'\? Nor 'qq'; there are: algorithm, .*\. Keep what"
)
async def _several_keys_that_nobody_reads(scene: Scene) -> None:
    async with opened(scene.url, max_stalenes=2, qq=1):
        pass


@mistake(r"there is no key 'optimizer\.learning_rat'; did you mean 'optimizer\.learning_rate'\?")
async def _a_key_of_a_section_that_nobody_reads(scene: Scene) -> None:
    async with opened(scene.url, optimizer={"learning_rat": 1}):
        pass


@mistake(r"tokens has the shape \[1, 3\]: make an Experience of each row")
async def _a_batch_of_tokens(scene: Scene) -> None:
    tb.Experience(eid=tb.EID("c", 0, 0), tokens=[[1, 2, 3]], prompt_length=1)


@mistake(r"experience b/0/0/0/: reward is nan")
async def _a_reward_that_is_no_number(scene: Scene) -> None:
    await scene.experiment.writer("e0").write([rollout(reward=float("nan"))])


@mistake(r"b/0/0/0/.*stored with other content.*each explorer an actor name of its own")
async def _two_contents_under_one_name(scene: Scene) -> None:
    await scene.experiment.writer("e0").write([rollout(reward=0.25)])


@mistake(r"batch 'b' holds 4 experiences, this seal says 3.*missing\(batch\) names")
async def _a_seal_that_counts_wrong(scene: Scene) -> None:
    await scene.experiment.writer("e0").seal("b", 3)


@mistake(r"commit of step \d+: .*was not delivered by this stream")
async def _a_commit_of_a_step_of_another_stream(scene: Scene) -> None:
    step = await first_step(scene)
    async with scene.experiment.train_stream(strategy="grpo") as stream:
        await stream.commit(step)


@pytest.mark.parametrize("name", MISTAKES)
async def test_a_mistake_is_answered(
    name: str, sqlite_url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    act, expected, waits = MISTAKES[name]
    monkeypatch.setenv("TRINITY_BUFFER_WAIT_REPORT_S", "0.02")
    async with opened(sqlite_url, rollouts_per_group=4) as experiment:
        await experiment.writer("e0").write(group())
        await tb.run_strategy(experiment, "grpo")
        caplog.clear()
        scene = Scene(sqlite_url, experiment)
        if waits:
            await _speaks(lambda: act(scene), caplog, expected)
            return
        with pytest.raises(TrinityBufferError) as failure, anyio.fail_after(SPEAKS_WITHIN_S):
            await act(scene)
        assert re.search(expected, str(failure.value), re.DOTALL), failure.value
        assert "\n" not in str(failure.value)


async def _speaks(
    act: Callable[[], Coroutine[Any, Any, Any]], caplog: pytest.LogCaptureFixture, expected: str
) -> None:
    def said() -> bool:
        return any(re.search(expected, record.getMessage()) for record in caplog.records)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(act)
        with anyio.move_on_after(SPEAKS_WITHIN_S):
            while not said():
                await anyio.sleep(0.001)
        assert said(), caplog.text
        tasks.cancel_scope.cancel()


def test_the_page_of_mistakes_shows_each_and_what_is_said() -> None:
    lines = (Path(__file__).parents[2] / "docs" / "proofs" / "mistakes.md").read_text().splitlines()
    rows = dict(line[2:].split(" | ")[:2] for line in lines if line.startswith("| "))
    assert rows.keys() - {"mistake"} == MISTAKES.keys()
    assert [
        name for name, (_, said, _) in MISTAKES.items() if not re.search(said, rows[name])
    ] == []
