"""Questions on the command line: what they print, and how they end."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import trinity_buffer as tb
from tests.cli.calling import Cli
from tests.contract import making
from tests.contract.making import opened
from tests.inspect.test_experts import mixed
from tests.sample_run import SampleRun, record_sample_run, rollout
from tests.trainer.data import prepared
from tests.trainer.gradients import train
from trinity_buffer import open_store
from trinity_buffer.algorithm import build
from trinity_buffer.cli.stats import MOST_IN_FULL
from trinity_buffer.identity import FAMILIES
from trinity_buffer.store.url import named


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> SampleRun:
    """A store that no test changes."""
    folder = tmp_path_factory.mktemp("sample")
    return anyio.run(record_sample_run, f"sqlite:///{folder / 'store.db'}", folder / "run")


@pytest.mark.parametrize(
    ("words", "told", "lines"),
    [
        (["steps"], "committed", 3),
        (["blame", 2, "--sort", "abs-advantage"], "its commit names it", 1),
        (["why", "b0/3/0/0/"], "zero_variance", 1),
        (["rejected"], "varied: zero_variance 4", 5),
        (["leases"], "free", 1),
        (["staleness"], "steps 1 to 3: e0 mean 1 (", 3),
        (["groups", "--step", 2, "--sort", "reward"], "trained in step 2", 1),
        (["diff", "grpo", "varied"], "annotated / rejected: zero_variance", 1),
        (["search", "2 AND 3"], "b0/2/3/0/  response_text: 2 and 3", 1),
    ],
    ids=lambda words: words[0] if isinstance(words, list) else "",
)
def test_a_question_is_answered_to_people_and_to_programs(
    cli: Cli, sample: SampleRun, words: list[object], told: str, lines: int
) -> None:
    ended = cli(*words, "--store", sample.url)
    assert (ended.code, ended.err) == (0, ""), "no progress where nobody watches"
    assert told in ended.out
    assert len(cli(*words, "--store", sample.url, "--json").json) == lines


def test_rows_that_were_not_measured_are_not_sorted_by_it(cli: Cli, sample: SampleRun) -> None:
    ended = cli("blame", 2, "--sort", "loss-share", "--store", sample.url)
    assert (ended.code, ended.out) == (2, "")
    assert "trainer 'trainer' measured no rows of step 2" in ended.err


def test_staleness_says_whether_it_grew_and_which_step_is_not_committed(
    cli: Cli, sample: SampleRun
) -> None:
    *_, last = cli("staleness", "--store", sample.url).out.splitlines()
    told = "steps 1 to 3: e0 mean 1 (step 1: 0; step 3: 2), greatest 2, over 12 rows"
    assert last == told
    assert [one["state"] for one in cli("staleness", "--store", sample.url, "--json").json] == [
        *("committed", "committed", "leased")
    ]
    one = cli("staleness", "--after", 2, "--store", sample.url).out.splitlines()
    assert one[-1] == "step 3: e0 mean 2, greatest 2, over 4 rows"
    none = cli("staleness", "--after", 3, "--store", sample.url)
    assert "no row of these steps names its policy version" in none.out


def test_rows_of_a_step_that_are_not_shown_are_counted(cli: Cli, sample: SampleRun) -> None:
    assert "\n3 of 4 rows\n" in cli("blame", 2, "--limit", 3, "--store", sample.url).out
    assert "\n4 rows\n" in cli("blame", 2, "--limit", 4, "--store", sample.url).out


def test_the_numbers_of_a_step_and_of_its_rows_are_numbers_in_json(
    cli: Cli, sample: SampleRun
) -> None:
    (found,) = cli("blame", 2, "--store", sample.url, "--json").json
    (line,) = [
        one for one in cli("steps", "--store", sample.url, "--json").json if one["step"] == 2
    ]
    assert found["line"] == line
    assert [row["slot"] for row in found["rows"]] == list(range(line["rows"]))
    assert found["rows"][0]["measured"] == {}  # this trainer measured nothing


def test_what_was_rejected_can_be_asked_as_it_was(cli: Cli, sample: SampleRun) -> None:
    then = cli("rejected", "--as-of", 10, "--store", sample.url, "--json").json
    assert [one["reason"] for one in then] == ["late"]
    beyond = cli("rejected", "--as-of", 999, "--store", sample.url)
    assert beyond.code == 2
    assert "goes from 1 to" in beyond.err


def test_nothing_and_one_are_told_as_people_say_them(cli: Cli, sample: SampleRun) -> None:
    store = ("--store", sample.url)
    nothing = cli("rejected", "--as-of", 3, *store)
    assert (nothing.code, nothing.out) == (0, "nothing was left out\n")
    assert cli("rejected", "--by", "trainer", *store).out.endswith("\ntrainer left out nothing\n")
    assert "1 group, the newest first" in cli("groups", "--limit", 1, *store).out
    assert " and 1 micro-batch (" in cli("blame", 1, *store).out


def test_numbers_and_events_can_be_asked_as_they_were(cli: Cli, sample: SampleRun) -> None:
    def of(*words: object) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = cli(*words, "--store", sample.url, "--json").json
        return found

    (now,), (then,) = of("stats"), of("stats", "--as-of", 10)
    (one,), (before,) = now["experiments"], then["experiments"]
    assert (before["head"], sum(before["events"].values())) == (10, 10)
    assert before["trainers"] == []
    assert 0 < before["experiences"] <= one["experiences"]
    assert of("stats", "--as-of", one["head"]) == [now]
    last = of("events", "--as-of", 10, "--limit", 3)
    assert [event["position"] for event in last] == [8, 9, 10]
    sealed = of("events", "--as-of", 10, "--kind", "BatchSealed", "--limit", 1)
    assert [event["kind"] for event in sealed] == ["BatchSealed"]
    assert all(event["position"] <= 10 for event in sealed)
    assert of("leases", "--as-of", 10) == []
    (held,) = of("leases", "--as-of", one["head"])
    assert (held["state"], held["owner"], held["leased_step"]) == ("forgotten", None, 3)


def test_a_configuration_can_be_asked_as_it_was(cli: Cli, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'a.db'}"

    async def change() -> None:
        async with tb.open_store(url) as store:
            await store.experiment("run", config={"rollouts_per_group": 2})
            await store.experiment("run", config={"rollouts_per_group": 4})

    anyio.run(change)
    asked = ("stats", "--config", "--store", url)
    for words, runs in (((), 4), (("--as-of", 1), 2), (("--as-of", 2), 4)):
        (found,) = cli(*asked, *words).json
        assert found["rollouts_per_group"] == runs
    assert cli(*asked, "--as-of", 99).code == 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["stats", "--as-of", 999], "goes from 1 to"),
        (["events", "--as-of", 999], "goes from 1 to"),
        (["events", "--as-of", 3, "--follow"], "leave out --follow"),
        (["diff", "sort", "sort", "--as-of", 3], "not two runs"),
        (["diff", "grpo", "varied", "--as-of", 3], "no annotation set 'grpo' (there: none)"),
    ],
)
def test_a_position_that_says_nothing_is_refused(
    cli: Cli, sample: SampleRun, words: list[object], told: str
) -> None:
    ended = cli(*words, "--store", sample.url)
    assert (ended.code, ended.out) == (2, "")
    assert told in ended.err


def test_two_sets_are_compared_as_they_were(cli: Cli, sample: SampleRun) -> None:
    (now,) = cli("diff", "grpo", "varied", "--store", sample.url, "--json").json
    (one,) = cli("stats", "--store", sample.url, "--json").json[0]["experiments"]
    asked = ("diff", "grpo", "varied", "--store", sample.url, "--json", "--as-of")
    assert cli(*asked, one["head"]).json == [now]


def test_where_nothing_differs_that_is_said(cli: Cli, sample: SampleRun) -> None:
    *_, last = cli("diff", "grpo", "grpo", "--store", sample.url).out.splitlines()
    assert last == "no difference in any advantage"
    first, *_ = cli("diff", "sort", "sort", "--store", sample.url).out.splitlines()
    assert first == "no difference in the configuration"


def test_lines_of_steps_that_are_left_out_are_told_of(
    cli: Cli, sample: SampleRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trinity_buffer.cli.inspect.MOST_LINES", 5)
    out = cli("diff", "sort", "sort", "--store", sample.url).out
    assert out.endswith("these are the last 5 of 12 lines: --json has them all\n")


def test_what_was_refused_at_the_door_is_told_without_a_strategy(cli: Cli, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'store.db'}"

    async def make() -> None:
        async with open_store(url) as store:
            writer = (await store.experiment("run", config={})).writer("e0")
            await writer.plan("b", [0], 2)
            await writer.seal("b", 0)
            await writer.write([rollout("b", 0, run, 1.0) for run in range(2)])

    anyio.run(make)
    assert "refused      at the door: late 2\n" in cli("stats", "--store", url).out
    (found,) = cli("stats", "--store", url, "--json").json[0]["experiments"]
    assert (found["refused"], found["guests"]) == ({"late": 2}, {})


def test_stats_of_an_expert_tell_what_others_rejected_of_it(cli: Cli, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'store.db'}"

    async def make() -> None:
        async with open_store(url) as store:
            await mixed(store, steps=1, max_tokens=50)

    anyio.run(make)
    asked = ("stats", "--store", url, "--experiment", "expert")
    assert "rejected     by run/trainer: oversize 1\n" in cli(*asked).out
    (found,) = cli(*asked, "--json").json[0]["experiments"]
    assert found["guests"] == {"run/trainer": {"oversize": 1}}


def test_a_store_without_experiments_says_so(cli: Cli, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'store.db'}"

    async def make() -> None:
        async with open_store(url):
            pass

    anyio.run(make)
    for words in (["steps"], ["groups"], ["why", "b/0/0/0/"], ["steps", "--experiment", "run"]):
        ended = cli(*words, "--store", url)
        assert ended.code == 2
        assert ended.err == (
            f"error: {url} holds no experiment yet: `trinity-buffer explore` and "
            "`store.experiment(NAME, config={})` make one\n"
        )


def test_of_many_experiments_each_is_a_line(cli: Cli, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'many.db'}"

    async def make(count: int) -> None:
        async with tb.open_store(url) as store:
            for number in range(count):
                await store.experiment(f"run-{number:02}", config={})
            one = await store.experiment("run-03")
            await one.writer("e0").write([rollout("b", 0, run, 1.0) for run in range(5)])

    anyio.run(make, MOST_IN_FULL)
    assert cli("stats", "--store", url).out.count("experiment run-") == MOST_IN_FULL
    anyio.run(make, MOST_IN_FULL + 1)
    lines = cli("stats", "--store", url).out.splitlines()
    found = [line.split() for line in lines if line.startswith("run-")]
    assert [words[0] for words in found] == [f"run-{n:02}" for n in range(MOST_IN_FULL + 1)]
    assert [int(words[2]) for words in found] == [5 * (n == 3) for n in range(MOST_IN_FULL + 1)]
    (whole,) = cli("stats", "--store", url, "--json").json
    assert len(whole["experiments"]) == MOST_IN_FULL + 1


def test_rewards_of_a_group_that_differ_are_shown_to_differ(cli: Cli, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'run.db'}"

    async def write() -> None:
        async with opened(url) as experiment:
            some = [making.rollout(run=run, reward=value) for run, value in enumerate((0.5, 0.501))]
            await experiment.writer("e0").write(some)

    anyio.run(write)
    assert "0.5 0.501" in cli("groups", "--store", url).out


def test_groups_are_ordered_before_they_are_cut(cli: Cli, sample: SampleRun) -> None:
    asked = ("groups", "--limit", 1, "--store", sample.url, "--json")
    tasks = {
        order: [(one["batch"], one["task"]) for one in cli(*asked, "--sort", order).json]
        for order in ("newest", "reward")
    }
    assert tasks == {"newest": [("b1", 0)], "reward": [("b0", 3)]}


def test_tokens_stand_one_a_line(cli: Cli, sample: SampleRun) -> None:
    ended = cli("show", "b0/1/2/0/", "--tokens", "--store", sample.url)
    lines = [line for line in ended.out.splitlines() if "  trained  " in line]
    assert len(lines) == 5
    (found,) = cli("show", "b0/1/2/0/", "--tokens", "--store", sample.url, "--json").json
    assert found["tokens"]["advantage"][:4] == [None] * 4
    assert len(found["tokens"]["id"]) == 9


def test_tokens_name_the_step_and_the_trainer_that_measured_them(
    cli: Cli, new_sqlite_url: str, tmp_path: Path
) -> None:
    anyio.run(prepared, new_sqlite_url, build("grpo"))
    options: dict[str, Any] = {"max_steps": 1}
    for name, rate in (("Silent", 0.02), ("a", 0.01), ("b", 0.02)):
        options["record_token_metrics"] = name != "Silent"
        train(
            new_sqlite_url,
            build("grpo"),
            tmp_path / name,
            consumer=name,
            learning_rate=rate,
            **options,
        )
    asked = ("--store", new_sqlite_url, "--experiment", "run")
    (uid, *_) = (row["uid"] for row in cli("blame", 1, *asked, "--json").json[0]["rows"])
    (found,) = cli("show", uid, "--tokens", *asked, "--json").json
    assert found["measured_in"] == "step 1 of a"
    assert (
        "advantages of set grpo, measured in step 1 of a"
        in cli("show", uid, "--tokens", *asked).out
    )


@pytest.mark.parametrize("named", ["of the tokenizer", "of the model, from that of the file"])
def test_tokens_have_texts_where_the_experiment_names_a_tokenizer(
    cli: Cli, new_sqlite_url: str, tmp_path: Path, named: str
) -> None:
    words = {f"<{at}>": at for at in range(98)} | {"\x1b[31mred\n": 98}
    (tmp_path / "model").mkdir()
    Tokenizer(WordLevel(words, unk_token="<0>")).save(str(tmp_path / "model" / "tokenizer.json"))
    config = {"tokenizer": str(tmp_path / "model")}
    if named != "of the tokenizer":  # which is not where the command is called
        config = {"model": "model", "folder": str(tmp_path)}
    given = rollout("b0", 0, 0, 1.0)
    given.tokens[0] = 98

    async def written() -> None:
        async with tb.open_store(new_sqlite_url) as store:
            experiment = await store.experiment("named", config=config)
            await experiment.writer("e0").write([given])

    anyio.run(written)
    texts = ["\x1b[31mred\n", *(f"<{int(one)}>" for one in given.tokens[1:])]
    (found,) = cli("show", "b0/0/0/0/", "--tokens", "--store", new_sqlite_url, "--json").json
    assert found["tokens"]["text"] == texts
    shown = cli("show", "b0/0/0/0/", "--tokens", "--store", new_sqlite_url).out
    assert all(repr(text) in shown for text in texts)
    assert "\x1b" not in shown


def test_a_reason_that_no_rejection_has_is_told_with_those_there_are(
    cli: Cli, sample: SampleRun
) -> None:
    found = cli("rejected", "--reason", "zero", "--store", sample.url)
    assert (found.code, found.err) == (
        0,
        "no rejection has the reason 'zero' (there: 'late', 'zero_variance')\n",
    )
    found = cli("rejected", "--reason", "zero", "--by", "varied", "--store", sample.url, "--json")
    assert (found.json, "(there: 'zero_variance')" in found.err) == ([], True)
    assert not cli("rejected", "--reason", "late", "--store", sample.url).err


@pytest.mark.long
def test_what_was_rejected_is_found_by_its_kind_as_by_its_reason(cli: Cli, store_url: str) -> None:
    some = [rollout("b0", 0, run, 1.0) for run in range(3)]
    some[0].reward = some[1].reward = None
    some[2].logprobs = torch.zeros(1)

    async def written() -> None:
        async with tb.open_store(store_url) as store:
            experiment = await store.experiment("run", config={"rollouts_per_group": 2})
            await experiment.writer("e0", on_invalid="quarantine").write(some)
            await tb.run_strategy(experiment, "grpo")

    anyio.run(written)
    found = {
        reason: {one["by"] for one in cli("rejected", "--store", store_url, "--json", *asked).json}
        for reason in ("invalid", "invalid: reward", "inval", "Invalid", "invali_")
        for asked in [("--reason", reason)]
    }
    assert found.pop("invalid") == {"grpo", "door"}
    assert found.pop("invalid: reward") == {"grpo"}
    assert set(map(len, found.values())) == {0}


@pytest.mark.parametrize("field", FAMILIES["text"])
def test_every_text_of_a_rollout_is_searched(cli: Cli, new_sqlite_url: str, field: str) -> None:
    given = rollout("b0", 0, 0, 1.0)
    setattr(given, field, "a NEEDLE" if field.endswith("_text") else [{"content": "a NEEDLE"}])

    async def written() -> None:
        async with tb.open_store(new_sqlite_url) as store:
            await (await store.experiment("run", config={})).writer("e0").write([given])

    anyio.run(written)
    (found,) = cli("search", "needle", "--store", new_sqlite_url, "--json").json
    assert found["field"].partition("[")[0] == field
    told = " ".join(cli("search", "--help").out.replace("│", " ").split())
    assert field.split("_")[-1].removesuffix("s") in told


def test_help_says_who_writes_what_verify_compares(cli: Cli) -> None:
    told = " ".join(cli("verify", "--help").out.replace("│", " ").split())
    assert "explore --acknowledge" in told
    assert "acknowledgements=PATH" in told


def test_a_follower_begins_with_the_last_events(cli: Cli, new_sqlite_url: str) -> None:
    async def written() -> None:
        async with tb.open_store(new_sqlite_url) as store:
            experiment = await store.experiment("run", config={})
            await experiment.writer("e0").write([rollout("b0", 0, 0, 1.0)])
            await experiment.finish("enough")

    anyio.run(written)
    told = ("events", "--store", new_sqlite_url, "--follow", "--json")
    assert [one["position"] for one in cli(*told, "--limit", 2).json] == [2, 3]
    assert [one["position"] for one in cli(*told, "--limit", 1, "--after", 1).json] == [2, 3]


def test_events_come_with_their_bodies_whole(cli: Cli, sample: SampleRun) -> None:
    (leased, *_) = cli("events", "--kind", "BatchLeased", "--store", sample.url, "--json").json
    assert len(leased["body"]["experiences"]) == 4
    (line, *_) = cli("events", "--kind", "BatchLeased", "--store", sample.url).out.splitlines()[1:]
    assert re.search(r"4 rows, \d groups?, 1 micro-batch$", line.strip())


def test_a_screen_shows_who_is_how_far(cli: Cli, sample: SampleRun) -> None:
    told = cli("top", "--once", "--store", sample.url).out
    assert "last steps" in told
    assert "SegmentsArchived" in told


def test_two_runs_are_compared_step_by_step(cli: Cli, sample: SampleRun, tmp_path: Path) -> None:
    other = anyio.run(
        record_sample_run, f"sqlite:///{tmp_path / 'o.db'}", tmp_path / "run", "other"
    )
    words = ("diff", "sort", "other", "--store", sample.url, "--other-store", other.url)
    (found,) = cli(*words, "--json").json
    assert found["numbers"]["rows"] == [12, 12]
    assert found["config"] == {}
    assert "steps of both" in cli(*words).out


def test_two_runs_of_one_name_are_told_apart_by_their_stores(
    cli: Cli, sample: SampleRun, tmp_path: Path
) -> None:
    other = anyio.run(record_sample_run, f"sqlite:///{tmp_path / 'o.db'}", tmp_path / "run")
    told = cli("diff", "sort", "sort", "--store", sample.url, "--other-store", other.url)
    heading = told.out.split("in numbers\n")[1].splitlines()[0]
    first, second = (f"sort ({named(url)})" for url in (sample.url, other.url))
    assert heading.split("  ")[-1].strip() == second
    assert first in heading
    assert told.err == ""
