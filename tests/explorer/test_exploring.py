"""`tb.explore`: one task list, anybody's rollouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import trinity_buffer as tb
from tests.handles import Experiment
from trinity_buffer.errors import ConflictingPlanError, InvalidArgumentError
from trinity_buffer.explorer.explore import BatchReport
from trinity_buffer.identity import Key

TASKS = ("ant", "bee", "cat", "dog", "eel")
SMALL: dict[str, Any] = {"groups_per_batch": 2, "rollouts_per_group": 2, "retry_delay_s": 0.0}


def experience(reward: float = 1.0) -> tb.Experience:
    return tb.Experience(tokens=[1, 2, 3], prompt_length=1, logprobs=[-0.5, -0.25], reward=reward)


async def answer(task: str, model: object) -> list[tb.Experience]:
    return [experience()]


@dataclass
class Rollouts:
    """Counts its calls by task; the first ones of a task raise what is in store for it."""

    failures: dict[str, list[Exception]] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)

    async def __call__(self, task: str, model: object) -> list[tb.Experience]:
        self.calls[task] += 1
        await anyio.lowlevel.checkpoint()
        if self.failures.get(task):
            raise self.failures[task].pop(0)
        return [experience()]


async def planned(experiment: Experiment) -> list[tuple[str, str, tuple[Any, ...]]]:
    """Return (batch, actor, tasks) of all plans, in the order of the log."""
    return [
        (event.body["batch"], event.actor, tuple(event.body["tasks"]))
        async for event in experiment.events(kinds=("BatchPlanned",))
    ]


async def sealed(experiment: Experiment) -> dict[str, int]:
    events = experiment.events(kinds=("BatchSealed",))
    return {event.body["batch"]: event.body["expected"] async for event in events}


async def runs(experiment: Experiment) -> Counter[str]:
    return Counter([one.eid.rid async for one in experiment.read(include_refused=True)])


def all_runs(epochs: int = 1) -> Counter[str]:
    return Counter(
        f"epoch{epoch}-{task // 2}/{task}/{run}"
        for epoch in range(epochs)
        for task in range(len(TASKS))
        for run in range(2)
    )


async def test_every_task_of_every_epoch_is_planned_made_and_sealed_once(store_url: str) -> None:
    async with tb.open_store(store_url) as store:
        experiment = await store.experiment("run", config={})
        reports: list[BatchReport] = []
        for _ in range(2):  # the second time there is nothing left to do
            await tb.explore(
                experiment,
                actor="e0",
                tasks=TASKS,
                rollout=answer,
                model=None,
                epochs=2,
                report=reports.append,
                **SMALL,
            )
        assert await runs(experiment) == all_runs(epochs=2)
        assert await sealed(experiment) == {
            f"epoch{epoch}-{number}": runs
            for epoch in range(2)
            for number, runs in enumerate([4, 4, 2])
        }
        assert sorted(report.rollouts for report in reports) == [2, 2, 4, 4, 4, 4]


async def test_two_actors_share_one_list(store_url: str) -> None:
    both_began, begun = anyio.Event(), set()

    async def act(actor: str) -> None:
        async def rollout(task: str, model: object) -> list[tb.Experience]:
            begun.add(actor)
            if len(begun) == 2:
                both_began.set()
            await both_began.wait()  # neither takes the whole list before the other came
            return [experience()]

        async with tb.open_store(store_url) as store:
            experiment = await store.experiment("run")
            await tb.explore(
                experiment, actor=actor, tasks=TASKS, rollout=rollout, model=None, epochs=4,
                concurrency=1, **SMALL,
            )  # fmt: skip

    async with tb.open_store(store_url) as store:
        experiment = await store.experiment("run", config={})
        with anyio.fail_after(60):
            async with anyio.create_task_group() as group:
                group.start_soon(act, "e0")
                group.start_soon(act, "e1")
        plans = await planned(experiment)
        assert len(plans) == len({batch for batch, _, _ in plans}) == 12
        assert {actor for _, actor, _ in plans} == {"e0", "e1"}
        assert await runs(experiment) == all_runs(epochs=4)
        assert len(await sealed(experiment)) == 12


async def test_an_error_that_no_attempt_mends_ends_it_and_only_the_missing_is_made_again(
    sqlite_url: str,
) -> None:
    rollout = Rollouts({"cat": [ZeroDivisionError("a bug")]})
    async with tb.open_store(sqlite_url) as store:
        experiment = await store.experiment("run", config={})

        async def explore() -> None:
            await tb.explore(
                experiment, actor="e0", tasks=TASKS, rollout=rollout, model=None, concurrency=1,
                **SMALL,
            )  # fmt: skip

        with pytest.raises(ZeroDivisionError, match="a bug") as caught:
            await explore()
        assert caught.value.__notes__ == ["in the rollout epoch0-1/2/0"]
        await explore()
        assert await runs(experiment) == all_runs()
        assert rollout.calls == Counter(dict.fromkeys(TASKS, 2)) + Counter(["cat"])


async def test_an_error_of_the_filter_is_tried_again(sqlite_url: str) -> None:
    rollout = Rollouts({"bee": [ConnectionError("gone"), TimeoutError("slow")]})
    async with tb.open_store(sqlite_url) as store:
        experiment = await store.experiment("run", config={})
        await tb.explore(
            experiment, actor="e0", tasks=TASKS, rollout=rollout, model=None, attempts=3, **SMALL
        )
        assert rollout.calls["bee"] == 4
        assert await runs(experiment) == all_runs()


async def test_the_last_attempt_decides(sqlite_url: str) -> None:
    rollout = Rollouts({"bee": [ConnectionError("gone"), ConnectionError("gone")]})
    async with tb.open_store(sqlite_url) as store:
        experiment = await store.experiment("run", config={})
        with pytest.raises(ConnectionError, match="gone") as caught:
            await tb.explore(
                experiment, actor="e0", tasks=TASKS, rollout=rollout, model=None, attempts=2,
                concurrency=1, **SMALL,
            )  # fmt: skip
        assert caught.value.__notes__ == ["in the rollout epoch0-0/1/0"]


async def test_a_rollout_that_takes_too_long_names_the_limit(sqlite_url: str) -> None:
    async def rollout(task: str, model: object) -> list[tb.Experience]:
        await anyio.sleep_forever()
        raise AssertionError

    async with tb.open_store(sqlite_url) as store:
        experiment = await store.experiment("run", config={})
        with pytest.raises(TimeoutError, match=r"timeout_s=0\.05.*attempts=2"):
            await tb.explore(
                experiment, actor="e0", tasks=TASKS, rollout=rollout, model=None, timeout_s=0.05,
                attempts=2, **SMALL,
            )  # fmt: skip


async def test_what_times_out_or_comes_to_nothing_is_left_out_and_said(sqlite_url: str) -> None:
    async def rollout(task: str, model: object) -> list[tb.Experience]:
        if task == "bee":
            await anyio.sleep_forever()
        return [] if task == "cat" else [experience()]

    reports: list[BatchReport] = []
    async with tb.open_store(sqlite_url) as store:
        experiment = await store.experiment("run", config={})
        await tb.explore(
            experiment, actor="e0", tasks=TASKS, rollout=rollout, model=None, timeout_s=0.2,
            attempts=1, on_failure="leave_out", report=reports.append, **SMALL,
        )  # fmt: skip
        assert await sealed(experiment) == {"epoch0-0": 2, "epoch0-1": 2, "epoch0-2": 2}
        assert {report.batch: report.left_out for report in reports} == {
            "epoch0-0": 2,
            "epoch0-1": 2,
            "epoch0-2": 0,
        }
        writer = experiment.writer("anybody")
        assert await writer.missing("epoch0-0") == [(1, 0), (1, 1)]


async def test_what_comes_after_its_batch_was_sealed_is_counted_apart_and_warned_of(
    store_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def rollout(task: str, model: object) -> list[tb.Experience]:
        if task == "bee":
            await by_hand.seal("epoch0-0", 2)
        return [experience()]

    reports: list[BatchReport] = []
    async with tb.open_store(store_url) as store:
        experiment = await store.experiment("run", config={})
        by_hand = experiment.writer("anybody")
        await tb.explore(
            experiment, actor="e0", tasks=TASKS, rollout=rollout, model=None, concurrency=1,
            report=reports.append, **SMALL,
        )  # fmt: skip
    numbers = {each.batch: (each.experiences, each.late) for each in reports}
    assert numbers == {"epoch0-0": (2, 2), "epoch0-1": (4, 0), "epoch0-2": (2, 0)}
    (warning,) = caplog.messages
    assert "'e0': 2 experiences of batch 'epoch0-0' are refused as late" in warning
    assert "group_timeout_s" in warning


async def test_no_more_rollouts_than_asked_for_run_at_once(sqlite_url: str) -> None:
    running, most, all_there = 0, 0, anyio.Event()

    async def rollout(task: str, model: object) -> list[tb.Experience]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 3:
            all_there.set()
        await all_there.wait()  # batches of four: the slots are filled across their borders
        running -= 1
        return [experience()]

    async with tb.open_store(sqlite_url) as store:
        experiment = await store.experiment("run", config={})
        with anyio.fail_after(60):
            await tb.explore(
                experiment, actor="e0", tasks=TASKS, rollout=rollout, model=None, concurrency=3,
                **SMALL,
            )  # fmt: skip
    assert most == 3


@dataclass
class Named:
    """A model that is its weights."""

    uri: str

    def load(self, uri: str) -> Named:
        return Named(uri)


async def test_a_run_is_made_and_noted_with_the_weights_it_began_with(sqlite_url: str) -> None:
    used: list[str] = []
    async with tb.open_store(sqlite_url) as store:
        experiment = await store.experiment(
            "run", config={"max_staleness": 0, "groups_per_step": 9}
        )

        async def rollout(task: str, model: Named) -> Sequence[tb.Experience]:
            used.append(model.uri)
            if len(used) == 1:
                # With max_staleness=0 nothing more is planned until these weights are loaded.
                await experiment.publish_policy(1, "second")
            assert model.uri == used[-1]
            made = [experience(0.0), experience(1.0)]
            made[1].policy_version = None  # as a Completion of a LocalModel says
            return made

        with anyio.fail_after(60):
            await tb.explore(
                experiment, actor="e0", tasks=TASKS[:2], rollout=rollout, model=Named("first"),
                groups_per_batch=1, rollouts_per_group=1, concurrency=1,
            )  # fmt: skip
        stored = {one.eid.uid: one.policy_version async for one in experiment.read()}
    assert used == ["first", "second"]
    assert stored == {
        "epoch0-0/0/0/0/": 0,
        "epoch0-0/0/0/1/": 0,
        "epoch0-1/1/0/0/": 1,
        "epoch0-1/1/0/1/": 1,
    }


@pytest.mark.parametrize(("tasks", "size"), [({"ant": 0, "fox": 0}, 2), ({"ant": 0, "bee": 0}, 1)])
async def test_another_list_or_another_cut_is_refused(
    tasks: dict[Key, int], size: int, sqlite_url: str
) -> None:
    async with tb.open_store(sqlite_url) as store:
        experiment = await store.experiment("run", config={"rollouts_per_group": 1})
        first = {"ant": 0, "bee": 0}
        common: dict[str, Any] = {"rollout": answer, "model": None}
        await tb.explore(experiment, actor="e0", tasks=first, groups_per_batch=2, **common)
        planned = r"'epoch0-0' is planned with 2 tasks × 1 .* where `explore` plans, another exp"
        with pytest.raises(ConflictingPlanError, match=planned):
            await tb.explore(experiment, actor="e1", tasks=tasks, groups_per_batch=size, **common)


@pytest.mark.parametrize("made", ["not the last", "all"])
async def test_another_list_of_the_same_length_is_refused(made: str, store_url: str) -> None:
    other = ("ant", "bee", "cat", "dog", "fox")
    async with tb.open_store(store_url) as store:
        experiment = await store.experiment("run", config={})
        common: dict[str, Any] = {"rollout": answer, "model": None, **SMALL}
        if made == "all":
            await tb.explore(experiment, actor="e0", tasks=TASKS, **common)
        else:
            failing = Rollouts({"eel": [ValueError()]})
            with pytest.raises(ValueError):  # noqa: PT011 - it ends in the last batch
                await tb.explore(
                    experiment, actor="e0", tasks=TASKS, **common | {"rollout": failing}
                )
        with pytest.raises(ConflictingPlanError, match="'epoch0-2' was planned for other tasks at"):
            await tb.explore(experiment, actor="e0", tasks=other, **common)
        await tb.explore(experiment, actor="e0", tasks=list(TASKS), **common)
        await tb.explore(experiment, actor="e0", tasks=dict(enumerate(other)), **common)
        assert await runs(experiment) == all_runs()


async def test_tasks_that_json_cannot_say_are_not_compared(sqlite_url: str) -> None:
    async def make(task: object, model: object) -> list[tb.Experience]:
        return [experience()]

    async with tb.open_store(sqlite_url) as store:
        experiment = await store.experiment("run", config={})
        for actor in ("e0", "e1"):
            await tb.explore(
                experiment, actor=actor, tasks=[object()], rollout=make, model=None, **SMALL
            )
        assert "contents" not in [
            key async for event in experiment.events(kinds=("BatchPlanned",)) for key in event.body
        ]


@pytest.mark.parametrize(
    ("options", "message"),
    [({"concurrency": 0}, "concurrency=0"), ({"on_failure": "ignore"}, "'leave_out'")],
)
async def test_what_cannot_be_is_refused(
    options: dict[str, Any], message: str, sqlite_url: str
) -> None:
    async with tb.open_store(sqlite_url) as store:
        experiment = await store.experiment("run", config={})
        with pytest.raises(InvalidArgumentError, match=message):
            await tb.explore(
                experiment, actor="e0", tasks=TASKS, rollout=answer, model=None, **options
            )
        asked: dict[str, Any] = {"actor": "e0", "rollout": answer}
        for asked["tasks"] in ([], None):
            with pytest.raises(InvalidArgumentError, match="tasks is empty"):
                await tb.explore(experiment, model=None, **asked)
        with pytest.raises(InvalidArgumentError, match="tasks is 'abc', a text: give a list"):
            await tb.explore(experiment, actor="e0", tasks="abc", rollout=answer, model=None)


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        (None, "None"),
        ("", "a value of type str"),
        ({"tokens": [1]}, "a value of type dict"),
        (experience(), "a value of type Experience"),
        ([{"tokens": [1]}], "a value of type list that holds a value of type dict"),
        ((experience(), 1.0), "a value of type tuple that holds a value of type float"),
    ],
)
@pytest.mark.parametrize("is_async", [True, False])
async def test_a_rollout_that_returns_something_else_is_told_what_to_return(
    returned: Any, told: str, is_async: bool, sqlite_url: str
) -> None:
    async def attempt(task: str, model: object) -> Any:
        return returned

    async with tb.open_store(sqlite_url) as store:
        experiment = await store.experiment("run", config={})
        with pytest.raises(InvalidArgumentError) as caught:
            await tb.explore(
                experiment,
                actor="e0",
                tasks=TASKS,
                rollout=attempt if is_async else lambda task, model: returned,
                model=None,
                concurrency=1,
                **SMALL,
            )
    words = told if is_async else f"{told.partition(' that')[0]} without being awaited: write it as"
    assert str(caught.value).startswith(f"rollout epoch0-0/0/0 returned {words}")
    assert "a list of Experience" in str(caught.value)


@pytest.mark.parametrize(("version", "is_warned"), [(2, False), (9, True)])
async def test_a_version_that_was_never_published_is_warned_of_once(
    sqlite_url: str, caplog: pytest.LogCaptureFixture, version: int, is_warned: bool
) -> None:
    async def rollout(task: str, model: object) -> list[tb.Experience]:
        made = experience()
        made.info = {"model_version": version}
        return [made]

    async with tb.open_store(sqlite_url) as store:
        experiment = await store.experiment("run", config={})
        await experiment.publish_policy(2, "somewhere")
        options: dict[str, Any] = {"actor": "e0", "tasks": TASKS, "rollout": rollout, "model": None}
        await tb.explore(experiment, **options, **SMALL)
    said = [line for line in caplog.messages if "model_version=9" in line]
    assert len(said) == is_warned
    assert all("the newest policy that is published is 2" in line for line in said)


async def test_a_run_that_outlives_a_rewind_of_the_trainer_is_not_warned_of(
    sqlite_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loaded: list[str] = []

    class Model:
        def load(self, uri: str) -> Model:
            loaded.append(Path(uri).name)
            return self

    async with tb.open_store(sqlite_url) as store:
        experiment = await store.experiment("run", config={"rollouts_per_group": 1})
        given = [experience() for _ in range(5)]
        for number, one in enumerate(given):
            one.eid = tb.EID("given", number)
        await experiment.writer("e0").write(given)

        async def train(up_to: int, name: str, **options: Any) -> None:
            stream = experiment.train_stream(strategy=None, groups_per_step=1, **options)
            async with stream as steps:
                async for step in steps:
                    path = tmp_path / f"{name}{step.step}"
                    path.write_text(name)
                    await steps.commit(step, checkpoint=path)
                    if step.step == up_to:
                        return

        async def rollout(task: str, model: Model) -> list[tb.Experience]:
            await train(2, "second", resume_from=1)
            with anyio.fail_after(60):
                while loaded[-1] != "second2":
                    await anyio.sleep(0.01)
            return [experience()]

        await train(3, "first")
        options: dict[str, Any] = {"actor": "e1", "tasks": ["ant"], "rollout": rollout}
        await tb.explore(experiment, **options, model=Model(), rollouts_per_group=1)
        versions = [one.policy_version async for one in experiment.read(batch="epoch0-0")]
    assert versions == [3]
    assert "model_version" not in caplog.text


async def test_tasks_may_be_an_array(sqlite_url: str) -> None:
    async with tb.open_store(sqlite_url) as store:
        experiment = await store.experiment("run", config={})
        options: dict[str, Any] = {"actor": "e0", "rollout": answer, "model": None}
        options["tasks"] = np.array([7, 8])
        await tb.explore(experiment, **options, **SMALL)
        assert len(await runs(experiment)) == 4
        options["tasks"] = np.array([])
        with pytest.raises(InvalidArgumentError, match="tasks is empty"):
            await tb.explore(experiment, **options, **SMALL)


async def test_a_misspelt_option_is_named(sqlite_url: str) -> None:
    async with tb.open_store(sqlite_url) as store:
        experiment = await store.experiment("run", config={})
        options: dict[str, Any] = {"actor": "e0", "tasks": TASKS, "rollout": answer, "model": None}
        with pytest.raises(InvalidArgumentError, match="'epoch'; did you mean 'epochs'"):
            await tb.explore(experiment, **options, epoch=2)
