"""Every list that a question answers with equals a plain SQL computation."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from pysqlite3 import dbapi2

import trinity_buffer as tb
from tests.conftest import Resize
from tests.sample_run import SampleRun, record_sample_run, rollout
from trinity_buffer import inspector, open_store
from trinity_buffer.errors import DamagedSegmentError, InvalidArgumentError, UnknownNameError
from trinity_buffer.inspector.source import Source, as_of, now
from trinity_buffer.inspector.step_lines import ROW_ORDERS
from trinity_buffer.inspector.table import record_batches

SLOTS = 1 << 20


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> SampleRun:
    """A store that no test changes."""
    folder = tmp_path_factory.mktemp("sample")
    return anyio.run(record_sample_run, f"sqlite:///{folder / 'store.db'}", folder / "run")


async def asked(
    sample: SampleRun, question: Callable[[Source], Any], position: int | None = None
) -> Any:
    async with (
        open_store(sample.url, read_only=True) as store,
        as_of(await store.experiment(sample.name), position) as source,
    ):
        return await question(source)


def sql(sample: SampleRun, query: str) -> list[tuple[Any, ...]]:
    with closing(dbapi2.connect(sample.url.removeprefix("sqlite:///"))) as connection:
        return list(connection.execute(query).fetchall())


async def test_steps_are_the_rows_of_their_deliveries(sample: SampleRun) -> None:
    found = await asked(sample, inspector.steps)
    plain = sql(
        sample,
        "SELECT d.step, count(*), sum(e.length), avg(e.reward), avg(d.step - 1 - e.policy_version)"
        " FROM delivery d JOIN annotation a ON a.address = d.address AND a.consumer = 'grpo'"
        " JOIN experience e ON e.address = a.experience GROUP BY d.step ORDER BY d.step",
    )
    assert [(s.step, s.rows, s.tokens, s.reward, s.staleness) for s in found] == plain
    assert [s.state for s in found] == ["committed", "committed", "leased"]
    assert [
        s.step for s in await asked(sample, lambda s: inspector.steps(s, after=1, limit=1))
    ] == [2]


async def test_blame_names_every_row_of_a_step_in_order(sample: SampleRun) -> None:
    found = await asked(sample, lambda source: inspector.blame(source, 2))
    plain = sql(
        sample,
        "SELECT e.batch || '/' || e.task || '/' || e.run || '/' || e.step || '/' || e.suffix,"
        " e.reward FROM delivery d JOIN annotation a ON a.address = d.address AND"
        " a.consumer = 'grpo' JOIN experience e ON e.address = a.experience"
        " WHERE d.step = 2 ORDER BY e.address",
    )
    assert sorted((row.uid, row.reward) for row in found.rows) == plain
    assert [row.slot for row in found.rows] == list(range(4))
    assert {row.actor for row in found.rows} == {"e0"}
    assert found.digest == sample.manifests[1].hex()
    assert found.proven is True
    with pytest.raises(UnknownNameError, match="never handed step 9"):
        await asked(sample, lambda source: inspector.blame(source, 9))
    with pytest.raises(UnknownNameError, match="there: trainer"):
        await asked(sample, lambda source: inspector.blame(source, 1, trainer="nobody"))


async def test_the_advantage_of_a_row_is_what_its_tokens_have(sample: SampleRun) -> None:
    found = await asked(sample, lambda source: inspector.blame(source, 1))
    for row in found.rows:
        table = await asked(sample, partial(inspector.tokens, uid=row.uid))
        trained = table.columns["advantage"][table.mask]
        assert trained.tolist() == pytest.approx([row.advantage] * row.trained_tokens)
        assert len(table.ids) == row.length


@pytest.mark.parametrize(
    ("uid", "asked_for", "found"),
    [
        ("b0/1/2/0/", None, "grpo"),
        ("b0/1/2/0/", "grpo", "grpo"),
        ("b0/1/2/0/", "varied", "varied"),
        ("b0/3/0/0/", "grpo", "grpo"),
        ("b0/3/0/0/", "varied", None),  # which rejected it
        ("b1/0/1/0/", None, None),  # waits in both
    ],
)
async def test_advantages_are_of_the_set_that_is_asked_for(
    sample: SampleRun, uid: str, asked_for: str | None, found: str | None
) -> None:
    table = await asked(sample, partial(inspector.tokens, uid=uid, annotation_set=asked_for))
    assert table.annotation_set == found
    assert ("advantage" in table.columns) is (found is not None)


async def test_advantages_are_of_the_set_that_was_trained(tmp_path: Path) -> None:
    own = await record_sample_run(f"sqlite:///{tmp_path / 'store.db'}", tmp_path / "run")
    options = {"consumer": "other", "strategy": "varied", "groups_per_step": 1}
    async with open_store(own.url) as store:
        experiment = await store.experiment(own.name)
        async with experiment.train_stream(**options) as stream:
            for _ in range(3):
                await stream.commit(await anext(stream))
    for uid, trained in [("b0/2/1/0/", "varied"), ("b0/1/2/0/", "grpo"), ("b0/3/0/0/", "grpo")]:
        assert (await asked(own, partial(inspector.tokens, uid=uid))).annotation_set == trained


async def test_one_question_with_one_answer_is_a_single_turn(tmp_path: Path) -> None:
    answers = [{"role": "user"}, {"role": "assistant"}]
    masks = [[1, 1, 1], [1, 0, 1], [1, 1, 1], None]
    talks = [answers, answers, [*answers, *answers], None]
    async with open_store(f"sqlite:///{tmp_path / 'store.db'}") as store:
        experiment = await store.experiment("run", config={})
        made = [
            tb.Experience(
                eid=tb.EID("b", 0, run),
                tokens=[1, 2, 3, 4],
                prompt_length=1,
                action_mask=mask,
                logprobs=[-0.5] * 3,
                messages=talk,
            )
            for run, (mask, talk) in enumerate(zip(masks, talks, strict=True))
        ]
        await experiment.writer("e0").write(made)
        kinds = [(await inspector.show(experiment, one.eid.uid)).kind for one in made]
    assert kinds == ["single_turn", "multi_turn", "multi_turn", "single_turn"]


@pytest.mark.parametrize(
    ("uid", "verdict", "told"),
    [
        ("b0/1/2/0/", "trained in step 2 of trainer", "step 2 committed"),
        (
            "b0/1/2/0/",
            "trained in step 2 of trainer (set grpo); annotated (set varied, which no trainer "
            "reads)",
            "set varied: no trainer reads it",
        ),
        ("b0/3/0/0/", "never trained: ready (set grpo); rejected: zero_variance", "rejected"),
        ("b1/0/1/0/", "never trained: waiting", "1 of 4 runs (missing: 0, 2, 3); the batch is not"),
        ("b1/0/0/0/", "planned, and never stored", "no explorer wrote run 0"),
        ("b0/0/0/0/a1", "refused at the door, late", "refused at the door: late"),
    ],
)
async def test_why_names_the_event_that_decided(
    sample: SampleRun, uid: str, verdict: str, told: str
) -> None:
    found = await asked(sample, lambda source: inspector.why(source, uid))
    assert verdict in found.verdict
    assert told in " | ".join(reason.what for reason in found.reasons)
    assert found.trained is ("trained in" in verdict)
    positions = [r.position for r in found.reasons if r.position is not None]
    actors = dict(sql(sample, "SELECT position, actor FROM event"))
    assert positions == sorted(positions)
    assert all(r.actor == actors[r.position] for r in found.reasons if r.position is not None)


@pytest.mark.parametrize(
    ("uid", "said"),
    [
        ("b9/0/0/0/", "neither holds nor planned"),
        ("b0/1/2/5/", "of run 2 of task 1 it holds b0/1/2/0/"),
        ("b0/0/0/5/", "it holds b0/0/0/0/, b0/0/0/0/a1"),
        ("b0/1/4/0/", "batch 'b0' was planned with runs 0 to 3 of each task"),
    ],
)
async def test_why_of_what_nobody_planned_is_refused(
    sample: SampleRun, uid: str, said: str
) -> None:
    with pytest.raises(UnknownNameError, match=re.escape(said)):
        await asked(sample, lambda source: inspector.why(source, uid))


async def test_nobody_waits_for_a_trainer_of_what_is_finished(tmp_path: Path) -> None:
    own = await record_sample_run(f"sqlite:///{tmp_path / 'store.db'}", tmp_path / "run")
    before = await asked(own, lambda source: inspector.why(source, "b0/3/0/0/"))
    async with open_store(own.url) as store:
        await (await store.experiment(own.name)).finish("enough")
    after = await asked(own, lambda source: inspector.why(source, "b0/3/0/0/"))
    assert "the experiment is finished: none will, unless" in after.reasons[-1].what
    assert before.reasons[-1].what == "set grpo: ready, and no trainer has taken it"


async def test_a_rewind_and_the_commit_before_it_decided_too(tmp_path: Path) -> None:
    own = await record_sample_run(f"sqlite:///{tmp_path / 'store.db'}", tmp_path / "run")
    options = {"strategy": "grpo", "groups_per_step": 1, "resume_from": 0}
    async with open_store(own.url) as store:
        experiment = await store.experiment(own.name)
        for last in (2, 1):
            async with experiment.train_stream(**options) as stream:
                async for step in stream:
                    await stream.commit(step)
                    if step.step == last:
                        break
    recorded = sql(own, "SELECT position, kind, recorded_at FROM event ORDER BY position")
    kinds = ("BatchLeased", "StepsCommitted", "TrainerRewound")
    leases, commits, rewinds = (
        [position for position, kind, _ in recorded if kind == wanted] for wanted in kinds
    )
    why = await asked(own, lambda source: inspector.why(source, "b0/1/2/0/"))
    assert [
        (reason.position, reason.what.removeprefix("trainer trainer: "))
        for reason in why.reasons
        if reason.what.startswith("trainer")
    ] == [
        (leases[1], "handed out in step 2"),
        (commits[1], "step 2 committed"),
        (rewinds[0], "rewound from step 2 to step 0"),
        (commits[3], "step 2 committed"),
        (rewinds[1], "rewound from step 2 to step 0"),
        (None, "step 2 is not committed"),
    ]
    then = await asked(own, lambda source: inspector.why(source, "b0/1/2/0/"), rewinds[0] - 1)
    assert [reason.what for reason in then.reasons if "rewound" in reason.what] == []
    # The step took from its last hand-out on, and not from the first.
    times = {position: microseconds for position, _, microseconds in recorded}
    (first, *_) = await asked(own, inspector.steps)
    assert first.seconds == pytest.approx((times[commits[4]] - times[rewinds[1]]) / 1e6, abs=1e-6)


@pytest.mark.parametrize(("order", "last"), [("reward", {"0", "2"}), ("staleness", {"3"})])
async def test_rows_without_a_number_come_last(store_url: str, order: str, last: set[str]) -> None:
    async with open_store(store_url) as store:
        run = await store.experiment("run", config={"rollouts_per_group": 2})
        some = [rollout("b", 0, at // 2, 0.0) for at in range(4)]
        for at, row in enumerate(some):
            row.eid, row.reward = replace(row.eid, step=at), (None, -2.0, None, -1.0)[at]
            row.info = {"model_version": 3} if at < 3 else {}
        await run.writer("e0").write(some)
        await tb.run_strategy(run, "step_wise_grpo")
        async with run.train_stream(strategy="step_wise_grpo") as stream:
            async for step in stream:
                await stream.commit(step, checkpoint=None)
        rows = (await inspector.blame(now(run), 1)).rows
    ordered = [row.uid.split("/")[3] for row in sorted(rows, key=ROW_ORDERS[order])]
    assert {*ordered[-len(last) :]} == last
    assert order != "reward" or ordered[:2] == ["3", "1"]


async def test_why_says_that_a_step_changed_no_weights(store_url: str) -> None:
    async with open_store(store_url) as store:
        run = await store.experiment("run", config={"rollouts_per_group": 1})
        await run.writer("e0").write([rollout("b", task, 0, 1.0) for task in (0, 1)])
        await tb.run_strategy(run, "grpo")
        async with run.train_stream(strategy="grpo") as stream:
            taken = [step async for step in stream]
            await stream.commit(taken[-1], checkpoint=None, skipped={1: []})
        lives = [await inspector.why(now(run), f"b/{task}/0/0/") for task in (0, 1)]
        told = [life.reasons for life in lives]
        lines = await inspector.steps(now(run))
        blamed = [(await inspector.blame(now(run), step)).line.state for step in (1, 2)]
        groups = await inspector.groups(now(run))
        shown = [await inspector.show(now(run), f"b/{task}/0/0/") for task in (0, 1)]
        batches = [batch async for batch in record_batches(now(run), None, None, None)]
    exported = [(row["state"], row["reason"]) for row in batches[0].to_pylist()]
    assert [line.state for line in lines] == blamed == ["skipped", "committed"]
    assert [group.state for group in groups] == [
        "trained in step 2 of trainer",
        "skipped (non_finite) in step 1 of trainer",
    ]
    assert [view.sets[0].steps[0].state for view in shown] == ["skipped", "trained"]
    assert exported == [("skipped", "non_finite"), ("committed", None)]
    assert [(life.trained, life.verdict) for life in lives] == [
        (False, "never trained: skipped (non_finite) in step 1 of trainer (set grpo)"),
        (True, "trained in step 2 of trainer (set grpo)"),
    ]
    assert [reasons[-1].what.partition(" committed")[2] for reasons in told] == [
        ", and skipped (non_finite): it changed no weights",
        "",
    ]


async def test_a_pair_has_the_tokens_of_both_its_rows(store_url: str) -> None:
    pairs = [
        tb.Experience(eid=tb.EID("p", task), tokens=[1, 2, 3], chosen=[4, 5], rejected=[6])
        for task in range(2)
    ]
    async with open_store(store_url) as store:
        run = await store.experiment("run", config={"schema": "dpo"})
        await run.writer("e0").write(pairs)
        async with run.train_stream(strategy=None, groups_per_step=2) as stream:
            step = await anext(stream)
            computed = int(step.microbatches[0]["attention_mask"].sum())
            await stream.commit(step, checkpoint=None)
        (line,) = await inspector.steps(now(run))
        rows = (await inspector.blame(now(run), 1)).rows
        (event,) = [one async for one in inspector.event_lines(run, kinds=["ExperiencesRecorded"])]
        groups = await inspector.groups(now(run))
        reasons = (await inspector.why(now(run), "p/0/0/0/")).reasons
    assert (line.tokens, line.trained_tokens) == (computed, 6) == (18, 6)
    assert [row.length for row in rows] == [of.runs[0].length for of in groups] == [9, 9]
    assert event.summary.endswith(", 18 tokens")
    assert "recorded, 9 tokens, no reward" in [reason.what for reason in reasons]


async def test_a_prompt_that_was_cut_has_its_tokens_once(store_url: str) -> None:
    cut = tb.Experience(
        eid=tb.EID("p", 0),
        tokens=[1, 2, 3],
        prompt_length=3,
        logprobs=[],
        reward=0.0,
        truncate_status="prompt_truncated",
    )
    whole = tb.Experience(
        eid=tb.EID("p", 0, 1), tokens=[1, 2, 3, 4], prompt_length=3, logprobs=[-1.0], reward=1.0
    )
    async with open_store(store_url) as store:
        run = await store.experiment("run", config={"rollouts_per_group": 2})
        await run.writer("e0").write([cut, whole])
        await tb.run_strategy(run, "grpo")
        async with run.train_stream(strategy="grpo", groups_per_step=1) as stream:
            step = await anext(stream)
            computed = int(step.microbatches[0]["attention_mask"].sum())
            await stream.commit(step, checkpoint=None)
        (line,) = await inspector.steps(now(run))
        reasons = (await inspector.why(now(run), "p/0/0/0/")).reasons
    assert line.tokens == computed == 7
    assert any(reason.what.startswith("recorded, 3 tokens") for reason in reasons)


async def test_the_line_of_an_event_takes_each_run_once(sqlite_url: str) -> None:
    rewards = {(0, 2): None, (0, 0): 0.5, (0, 1): 1.5, (0, 3): 1.0, (1, 0): 0.0, (2, 0): None}
    async with open_store(sqlite_url) as store:
        run = await store.experiment("run", config={})
        writer = run.writer("e0", on_invalid="quarantine")
        rows = [rollout("b", 0, of, 0.0) for of, _ in [*rewards, (3, 0)]]
        for row, ((of, step), reward) in zip(rows, rewards.items(), strict=False):
            row.eid, row.reward = replace(row.eid, run=of, step=step), reward
        rows[-1].reward, rows[-1].logprobs = 9.0, rows[-1].tokens  # refused
        await writer.write(rows)
        (line,) = [one async for one in inspector.event_lines(run, kinds=["ExperiencesRecorded"])]
    assert line.summary.startswith("7 of batch b, mean reward 0.500, ")  # 1 and 0


async def test_groups_show_the_rewards_that_their_set_compared(store_url: str) -> None:
    async with open_store(store_url) as store:
        run = await store.experiment("run", config={"rollouts_per_group": 3})
        await run.writer("e0").write([rollout("b", 0, at, float(at)) for at in range(3)])
        await tb.assign_rewards(
            run, "judge", lambda e: None if e.eid.run == 2 else -4.0 * e.eid.run
        )
        await tb.run_strategy(run, "grpo")
        await tb.run_strategy(run, "grpo", name="judged", rewards="judge")
        (own,) = await inspector.groups(now(run), annotation_set="grpo")
        (judged,) = await inspector.groups(now(run), annotation_set="judged")
        async with run.train_stream(strategy="judged") as stream:
            taken = [step async for step in stream]
        (line,) = await inspector.steps(now(run))
        blamed = (await inspector.blame(now(run), len(taken))).rows
        tables = record_batches(now(run), "judged", None, None)
        exported = [reward async for table in tables for reward in table["reward"].to_pylist()]
    assert exported == [0.0, -4.0, None]
    assert line.reward == -2.0
    assert [(row.reward, row.run_reward) for row in blamed] == [(0.0, 0.0), (-4.0, -4.0)]
    assert (own.mean, [one.reward for one in own.runs]) == (1.0, [0.0, 1.0, 2.0])
    assert (judged.mean, [one.reward for one in judged.runs]) == (-2.0, [0.0, -4.0, None])
    assert judged.deviation == pytest.approx(8**0.5)


async def test_rejections_are_those_of_the_tables(sample: SampleRun) -> None:
    found = await asked(sample, inspector.rejections)
    plain = sql(sample, "SELECT consumer, reason, position FROM rejection")
    door = sql(
        sample, f"SELECT 'door', refused, address / {SLOTS} FROM experience WHERE refused > ''"
    )
    assert sorted((r.by, r.reason, r.position) for r in found) == sorted(plain + door)
    late = await asked(sample, lambda source: inspector.rejections(source, by="door"))
    assert [one.uid for one in late] == ["b0/0/0/0/a1"]
    assert await asked(sample, inspector.rejection_counts) == {
        "varied": {"zero_variance": 4},
        "door": {"late": 1},
    }
    with pytest.raises(UnknownNameError, match="door"):
        await asked(sample, lambda source: inspector.rejections(source, by="nobody"))


@pytest.mark.parametrize("limit", [1, 2, 3])
async def test_what_was_rejected_last_is_shown_first(store_url: str, limit: int) -> None:
    async with open_store(store_url) as store:
        run = await store.experiment("run", config={})
        writer = run.writer("e0")
        for batch, runs in (("slow", 1), ("quick", 2)):
            await writer.plan(batch, [0, 1], 2)
            await writer.write([rollout(batch, t, r, 1.0) for t in (0, 1) for r in range(runs)])
        await tb.run_strategy(run, ["reward_variance", "grpo"], name="varied")
        await writer.seal("slow", 2)  # what was recorded first is decided last
        await tb.run_strategy(run, ["reward_variance", "grpo"], name="varied")
        seen, before = list[str](), None
        while page := await inspector.rejections(now(run), by="varied", limit=limit, before=before):
            last = [row.address.split(":") for row in page if row.position == page[-1].position]
            before = min(int(position) * SLOTS + int(slot) for position, slot in last)
            seen += [row.uid for row in page]
        slow = {"slow/0/0/0/", "slow/1/0/0/"}
        assert {*seen[:2]} == slow
        assert sorted(seen) == sorted({*seen})
        assert {*seen[2:]} == {f"quick/{task}/{of}/0/" for task in (0, 1) for of in (0, 1)}
        newest = await inspector.rejections(now(run), limit=limit)
        assert newest == await inspector.rejections(now(run), by="varied", limit=limit)


async def test_staleness_is_the_step_less_one_less_the_version(sample: SampleRun) -> None:
    found = await asked(sample, inspector.staleness)
    assert [(s.step, s.actor, s.rows, s.mean, s.greatest) for s in found] == [
        (1, "e0", 4, 0.0, 0),
        (2, "e0", 4, 1.0, 1),
        (3, "e0", 4, 2.0, 2),
    ]


async def test_leases_say_who_is_how_far(sample: SampleRun) -> None:
    (found,) = await asked(sample, inspector.leases)
    assert (found.trainer, found.state, found.leased_step, found.committed_step) == (
        *("trainer", "free"),
        *sql(sample, "SELECT leased_step, committed_step FROM consumer WHERE kind = 'trainer'")[0],
    )


async def test_groups_are_ordered_by_what_is_asked(sample: SampleRun) -> None:
    found = await asked(sample, inspector.groups)
    newest = [(group.batch, group.task) for group in found]
    assert newest == [("b1", 0), ("b0", 0), ("b0", 3), ("b0", 2), ("b0", 1)]  # b0/0: what came late
    by_reward = await asked(sample, partial(inspector.groups, order="reward"))
    assert [group.mean for group in by_reward] == [1.0, 0.5, 0.5, 0.5, 0.5]
    by_deviation = await asked(sample, partial(inspector.groups, order="deviation"))
    assert [group.deviation is None for group in by_deviation] == [*[False] * 4, True]


@pytest.mark.long
@pytest.mark.parametrize("per_page", [1, 2, 256])
async def test_groups_are_ordered_before_they_are_cut(
    sample: SampleRun, resize: Resize, per_page: int
) -> None:
    resize(groups_per_page=per_page)
    named = [("b0", str(task)) for task in (1, 3, 2)]
    for kept in ({}, {"batch": "b0"}, {"named": named}):
        for order in ("newest", "reward", "deviation", "abs-advantage"):
            whole = await asked(sample, partial(inspector.groups, order=order, **kept))
            for limit in range(1, len(whole) + 1):
                first = await asked(
                    sample, partial(inspector.groups, order=order, limit=limit, **kept)
                )
                assert first == whole[:limit]
        (best,) = await asked(sample, partial(inspector.groups, order="reward", limit=1, **kept))
        assert best.task == 3
    newest = await asked(sample, partial(inspector.groups, named=named))
    assert [group.task for group in newest] == [3, 2, 1]


async def test_sets_differ_where_their_rows_do(sample: SampleRun) -> None:
    found = await asked(sample, lambda s: inspector.compare_sets(s, "grpo", "varied"))
    assert found.experiences == len(sql(sample, "SELECT 1 FROM experience WHERE refused IS NULL"))
    both = "SELECT 1 FROM annotation a JOIN annotation b ON a.experience = b.experience"
    both += " WHERE a.consumer = 'grpo' AND b.consumer = 'varied'"
    assert (found.both, found.equal, found.opposite) == (len(sql(sample, both)), 12, 0)
    assert found.states["annotated / rejected: zero_variance"] == 4
    assert {row.uid.split("/")[1] for row in found.rows} == {"3"}  # which one of the two rejects
    with pytest.raises(UnknownNameError, match="there: grpo, varied"):
        await asked(sample, lambda s: inspector.compare_sets(s, "grpo", "nonsense"))


async def test_a_run_does_not_differ_from_itself(sample: SampleRun) -> None:
    found = await asked(sample, lambda s: inspector.compare_runs(s, s))
    assert found.config == {}
    assert found.numbers["rows"] == [12, 12]
    assert sorted(found.steps) == [1, 2, 3]


async def test_all_steps_of_two_runs_count_however_long_they_are(
    sample: SampleRun, resize: Resize
) -> None:
    whole = await asked(sample, lambda s: inspector.compare_runs(s, s))
    resize(events_per_page=2)
    told: list[tuple[str, int, int]] = []

    def progress(*reached: Any) -> None:
        told.append(reached)

    paged = await asked(sample, lambda s: inspector.compare_runs(s, s, progress=progress))
    assert (paged, told) == (whole, 2 * [("diff", 2, 3), ("diff", 3, 3)])
    last = await asked(sample, lambda s: inspector.compare_runs(s, s, limit=1))
    assert (last.numbers["steps"], list(last.steps)) == ([1, 1], [3])


@pytest.mark.parametrize(
    ("statement", "question"),
    [
        ("DELETE FROM step WHERE step = 2", lambda s: inspector.show(s, "b0/1/2/0/")),
        (
            "UPDATE event SET kind = 'Strange' WHERE position = (SELECT min(position) FROM event "
            "WHERE kind = 'ExperiencesRecorded')",
            lambda s: searched(s, "1 AND 2"),
        ),
    ],
    ids=["show without its step", "search without an event"],
)
async def test_a_question_goes_on_where_what_it_shows_beside_is_damaged(
    sample: SampleRun, tmp_path: Path, statement: str, question: Callable[[Source], Any]
) -> None:
    shutil.copy(sample.url.removeprefix("sqlite:///"), tmp_path / "store.db")
    with closing(dbapi2.connect(str(tmp_path / "store.db"))) as connection:
        for (guard,) in connection.execute(
            "SELECT name FROM sqlite_master WHERE type = 'trigger'"
        ).fetchall():
            connection.execute(f"DROP TRIGGER {guard}")
        connection.execute(statement)
        connection.commit()
    damaged = replace(sample, url=f"sqlite:///{tmp_path / 'store.db'}")
    async with open_store(damaged.url, read_only=True) as store:
        assert await question(now(await store.experiment(sample.name))) is not None


async def searched(source: Source, words: str) -> list[inspector.Match]:
    matches = []
    try:
        async for match in inspector.search(source, words):
            matches.append(match)
    except DamagedSegmentError as error:
        assert "the event at position 3 records no rows" in str(error)  # noqa: PT017 - at the end
    return matches


async def test_search_finds_every_text_once(sample: SampleRun) -> None:
    async def question(source: Source) -> list[inspector.Match]:
        return [one async for one in inspector.search(source, "1 AND 2")]

    (found,) = await asked(sample, question)
    assert (found.uid, found.field, found.excerpt) == ("b0/1/2/0/", "response_text", "1 and 2")


async def test_an_excerpt_holds_what_was_found_behind_letters_that_fold_to_more(
    tmp_path: Path,
) -> None:
    texts = [letter * 100 + "Needle" + "ß" * 100 for letter in "ßİﬃa"]
    async with open_store(f"sqlite:///{tmp_path / 'store.db'}") as store:
        experiment = await store.experiment("run", config={})
        made = [rollout("b", task, 0, 1.0) for task in range(5)]
        for one, text in zip(made, [*texts, "Straße"], strict=True):
            one.response_text = text
        await experiment.writer("e0").write(made)
        found = [one async for one in inspector.search(now(experiment), "nEEDLE")]
        (other,) = [one async for one in inspector.search(now(experiment), "SSE")]
    assert [one.excerpt for one in found] == [text[60:146] for text in texts]
    assert other.excerpt == "Straße"


async def test_an_older_position_shows_what_was_known_then(sample: SampleRun) -> None:
    ((committed,),) = sql(sample, "SELECT min(position) FROM event WHERE kind = 'StepsCommitted'")
    before = await asked(sample, inspector.steps, committed - 1)
    assert {line.state for line in before} == {"leased"}
    then = await asked(sample, lambda source: inspector.why(source, "b0/0/1/0/"), 5)
    assert then.verdict == "never trained: no strategy has run"
    assert max(reason.position or 0 for reason in then.reasons) <= 5
    with pytest.raises(InvalidArgumentError, match="goes from 1 to"):
        await asked(sample, inspector.steps, 10_000)


@pytest.mark.long
async def test_a_server_answers_as_a_file_does(
    sample: SampleRun, postgres_url: str, tmp_path: Path
) -> None:
    other = await record_sample_run(postgres_url, tmp_path / "run")
    for question in (
        lambda source: inspector.why(source, "b0/1/2/0/"),
        inspector.rejections,
        inspector.staleness,
        lambda source: inspector.blame(source, 2),
        partial(inspector.groups, batch="b0", order="reward"),
    ):
        one, two = await asked(sample, question), await asked(other, question)
        assert untimed(one) == untimed(two)
    with pytest.raises(UnknownNameError, match="no trainer"):
        await asked(other, inspector.steps, 11)


def untimed(answer: Any) -> str:
    """Return an answer as a text without times, paths and the order of concurrent events."""
    return re.sub(
        r"(recorded_at|seconds|checkpoint|position|\w+_at)=[^,)]*|digest='[0-9a-f]*'",
        "",
        repr(answer),
    )
