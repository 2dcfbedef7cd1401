"""What is exported equals what a plain reader and plain SQL find."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from statistics import fmean
from typing import Any

import anyio
import pytest
import torch
from pyarrow import parquet
from pysqlite3 import dbapi2
from typing_extensions import override

import trinity_buffer as tb
from tests.cli.calling import Cli
from tests.cli.conftest import cli  # noqa: F401 - a fixture
from tests.conftest import Resize
from tests.sample_run import SampleRun, record_sample_run, rollout
from trinity_buffer.algorithm.add_strategy import AddStrategy
from trinity_buffer.errors import UnknownNameError
from trinity_buffer.experience import Experience
from trinity_buffer.inspector.group_views import groups


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> SampleRun:
    """A store that no test changes."""
    folder = tmp_path_factory.mktemp("sample")
    return anyio.run(record_sample_run, f"sqlite:///{folder / 'store.db'}", folder / "run")


def read(sample: SampleRun) -> list[Experience]:
    async def main() -> list[Experience]:
        async with tb.open_store(sample.url, read_only=True) as store:
            found = (await store.experiment(sample.name)).read(include_refused=True)
            return [one async for one in found]

    return anyio.run(main)


def sql(sample: SampleRun, query: str) -> list[tuple[Any, ...]]:
    with closing(dbapi2.connect(sample.url.removeprefix("sqlite:///"))) as connection:
        return list(connection.execute(query).fetchall())


def test_a_table_holds_what_a_reader_reads(sample: SampleRun, resize: Resize) -> None:
    resize(experiences_per_page=5)
    rows = tb.to_arrow(sample.url, "sort", set="grpo").to_pylist()
    plain = read(sample)
    assert [row["uid"] for row in rows] == [one.eid.uid for one in plain]
    for row, one in zip(rows, plain, strict=True):
        assert one.logprobs is not None
        assert row["tokens"] == one.tokens.tolist()
        assert row["logprobs"] == one.logprobs.tolist()
        assert (row["reward"], row["response_text"]) == (one.reward, one.response_text)
        assert (row["info.model_version"], json.loads(row["info"])) == (0, one.info)


def test_a_row_says_what_became_of_it(sample: SampleRun) -> None:
    rows = tb.to_arrow(sample.url, set="varied").to_pylist()
    states = sql(sample, "SELECT count(*) FROM annotation WHERE consumer = 'varied'")
    assert [(sum(row["state"] == "annotated" for row in rows),)] == states
    assert {row["reason"] for row in rows if row["state"] == "rejected"} == {"zero_variance"}
    (late,) = (row for row in rows if row["state"] == "refused")
    assert (late["reason"], late["advantage"], late["advantages"]) == ("late", None, None)
    trained = tb.to_arrow(sample.url, set="grpo").to_pylist()
    steps = sql(sample, "SELECT step, count(*) FROM delivery GROUP BY step")
    counted = {step: sum(row["trained_step"] == step for row in trained) for step, _ in steps}
    assert sorted(counted.items()) == steps
    scored = [row for row in trained if row["advantages"] is not None]
    assert len(scored) == 16
    assert [row["advantage"] for row in scored] == pytest.approx(
        [fmean(row["advantages"]) for row in scored]
    )
    assert any(row["advantage"] for row in scored)


class Scores(AddStrategy):
    """Gives each run advantages of another form."""

    @override
    async def add(self, experiences: list[Experience], step: int) -> tuple[int, dict[str, Any]]:
        for one in experiences:
            assert one.action_mask is not None
            each = torch.arange(4.0)
            half = torch.tensor([0.1, 0.2, 0.4, 1.0], dtype=torch.float16)
            forms = (one.action_mask * 0.5, each * one.action_mask, torch.full((4,), 0.5), half)
            one.advantages = forms[one.eid.run]
        await self.writer.write_async(experiences)
        return len(experiences), {}


def test_advantages_are_one_number_or_one_for_each_token(sqlite_url: str) -> None:
    """As the documents say it; `groups` shows the same mean."""

    async def main() -> list[float | None]:
        async with tb.open_store(sqlite_url) as store:
            experiment = await store.experiment("run", config={"rollouts_per_group": 4})
            mask = [True, False, True, True]
            given = [
                Experience(
                    eid=tb.EID("b", 0, run),
                    tokens=[*range(6)],
                    prompt_length=2,
                    action_mask=mask,
                    reward=1.0,
                )
                for run in range(4)
            ]
            await experiment.writer("e0").write(given)
            await tb.run_strategy(experiment, Scores)
            (found,) = await groups(experiment)
            return [run.advantage for run in found.runs]

    means = anyio.run(main)
    rows = tb.to_arrow(sqlite_url).to_pylist()
    half = rows.pop()
    assert half["advantage"] == means.pop() == fmean(half["advantages"])
    assert [row["advantages"] for row in rows] == [[0.5], [0.0, 0.0, 2.0, 3.0], [0.5] * 4]
    assert [row["advantage"] for row in rows] == means == [0.5, 1.25, 0.5]
    said = " ".join(str(tb.to_arrow.__doc__).split())
    assert "else the mean over all response tokens" in said


def test_a_table_of_what_nobody_annotated_has_no_set(sqlite_url: str) -> None:
    async def write() -> None:
        async with tb.open_store(sqlite_url) as store:
            experiment = await store.experiment("run", config={})
            await experiment.writer("e0").write([rollout("b", 0, 0, 1.0)])

    anyio.run(write)
    (row,) = tb.to_arrow(sqlite_url).to_pylist()
    assert (row["uid"], row["set"], row["state"], row["reason"]) == ("b/0/0/0/", None, None, None)
    with pytest.raises(UnknownNameError) as unknown:
        tb.to_arrow(sqlite_url, set="grpo")
    assert str(unknown.value) == "no annotation set 'grpo' (there: none)"


def test_a_set_that_was_made_later_takes_the_place_of_none_that_is_trained(
    sqlite_url: str,
    cli: Cli,  # noqa: F811
) -> None:
    """Its name comes first; without a trainer, the first one is shown."""

    async def annotate(strategy: str, name: str) -> None:
        async with tb.open_store(sqlite_url) as store:
            experiment = await store.experiment("run", config={"rollouts_per_group": 2})
            await experiment.writer("e0").write(
                [rollout("b", 0, run, 1.0 * run) for run in range(2)]
            )
            await tb.run_strategy(experiment, strategy, name=name)

    def shown(**options: Any) -> set[tuple[Any, ...]]:
        rows = tb.to_arrow(sqlite_url, **options).to_pylist()
        return {(row["set"], row["state"], row["trained_step"]) for row in rows}

    def state(*options: str) -> str:
        (group,) = cli("groups", "--store", sqlite_url, "--json", *options).json
        return str(group["state"])

    anyio.run(annotate, "grpo", "trained")
    anyio.run(annotate, "opmd", "other")
    anyio.run(annotate, "opmd", "a")
    assert shown() == {("a", "annotated", None)}
    for trainer, trained in (("one", "trained"), ("two", "other")):
        with tb.open_train_stream(
            sqlite_url, experiment="run", strategy=trained, consumer=trainer, groups_per_step=1
        ) as stream:
            for step in stream:
                stream.commit(step)
    assert shown() == shown(trainer="one") == shown(step=1) == {("trained", "committed", 1)}
    assert shown(trainer="two") == {("other", "committed", 1)}
    assert shown(set="a") == {("a", "annotated", None)}
    assert state() == state("--step", "1") == "trained in step 1 of one"
    assert state("--step", "1", "--trainer", "two") == "trained in step 1 of two"


def test_a_step_alone_has_the_rows_that_it_was_trained_on(sample: SampleRun) -> None:
    rows = tb.to_arrow(sample.url, step=2).to_pylist()
    assert [row["uid"] for row in rows] == [f"b0/1/{run}/0/" for run in range(4)]
    assert {row["state"] for row in rows} == {"committed"}
    with pytest.raises(UnknownNameError, match="never handed step 9"):
        tb.to_arrow(sample.url, step=9)


@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
def test_a_file_holds_the_table(
    cli: Cli,  # noqa: F811
    sample: SampleRun,
    tmp_path: Path,
    ending: str,
) -> None:
    file = tmp_path / "new" / f"run.{ending}"
    (told,) = cli("export", "-o", file, "--store", sample.url, "--json").json
    assert told["rows"] == 18
    rows = tb.to_arrow(sample.url).to_pylist()
    if ending == "parquet":
        assert parquet.read_table(file).to_pylist() == rows
    else:
        assert [json.loads(line) for line in file.read_text().splitlines()] == rows
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    assert cli("export", "-o", tmp_path / "run.xls", "--store", sample.url).code == 2


async def test_a_table_is_read_in_a_running_loop_too(sqlite_url: str, tmp_path: Path) -> None:
    """As in a notebook, whose cells all run in one."""
    sample = await record_sample_run(sqlite_url, tmp_path)
    rows = tb.to_arrow(sample.url, "sort", set="grpo").to_pylist()
    assert {row["task"] for row in rows} >= {"0", "1"}
