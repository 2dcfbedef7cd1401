"""Questions on the command line: what they print, and how they end."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import trinity_buffer as tb
from tests.cli.calling import Cli
from tests.stories import Story, rollout, tell


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    """A store that no test changes."""
    folder = tmp_path_factory.mktemp("story")
    return anyio.run(tell, f"sqlite:///{folder / 'store.db'}", folder / "run")


@pytest.mark.parametrize(
    ("words", "told", "lines"),
    [
        (["steps"], "committed", 3),
        (["blame", 2, "--sort", "loss-share"], "its commit names it", 1),
        (["why", "b0/3/0/0/"], "zero_variance", 1),
        (["rejected"], "varied: zero_variance 4", 5),
        (["leases"], "free", 1),
        (["staleness"], "e0: mean 1, greatest 2", 3),
        (["groups", "--step", 2, "--sort", "reward"], "trained in step 2", 1),
        (["diff", "grpo", "varied"], "annotated / rejected: zero_variance", 1),
        (["search", "2 AND 3"], "b0/2/3/0/  response_text: 2 and 3", 1),
    ],
    ids=lambda words: words[0] if isinstance(words, list) else "",
)
def test_a_question_is_answered_to_people_and_to_programs(
    cli: Cli, story: Story, words: list[object], told: str, lines: int
) -> None:
    ended = cli(*words, "--store", story.url)
    assert (ended.code, ended.err.partition(":")[0]) in {(0, ""), (0, words[0])}  # progress
    assert told in ended.out
    assert len(cli(*words, "--store", story.url, "--json").json) == lines


def test_what_was_rejected_can_be_asked_as_it_was(cli: Cli, story: Story) -> None:
    then = cli("rejected", "--as-of", 10, "--store", story.url, "--json").json
    assert [one["reason"] for one in then] == ["late"]
    beyond = cli("rejected", "--as-of", 999, "--store", story.url)
    assert beyond.code == 2
    assert "goes from 1 to" in beyond.err


def test_tokens_stand_one_a_line(cli: Cli, story: Story) -> None:
    ended = cli("show", "b0/1/2/0/", "--tokens", "--store", story.url)
    lines = [line for line in ended.out.splitlines() if "  trained  " in line]
    assert len(lines) == 5
    (found,) = cli("show", "b0/1/2/0/", "--tokens", "--store", story.url, "--json").json
    assert found["tokens"]["advantage"][:4] == [None] * 4
    assert len(found["tokens"]["id"]) == 9


def test_tokens_have_texts_where_the_experiment_names_a_tokenizer(
    cli: Cli, sqlite_url: str, tmp_path: Path
) -> None:
    words = {f"<{at}>": at for at in range(98)} | {"\x1b[31mred\n": 98}
    Tokenizer(WordLevel(words, unk_token="<0>")).save(str(tmp_path / "tokenizer.json"))
    given = rollout("b0", 0, 0, 1.0)
    given.tokens[0] = 98

    async def written() -> None:
        async with tb.open_store(sqlite_url) as store:
            experiment = await store.experiment("named", config={"tokenizer": str(tmp_path)})
            await experiment.writer("e0").write([given])

    anyio.run(written)
    texts = ["\x1b[31mred\n", *(f"<{int(one)}>" for one in given.tokens[1:])]
    (found,) = cli("show", "b0/0/0/0/", "--tokens", "--store", sqlite_url, "--json").json
    assert found["tokens"]["text"] == texts
    shown = cli("show", "b0/0/0/0/", "--tokens", "--store", sqlite_url).out
    assert all(repr(text) in shown for text in texts)
    assert "\x1b" not in shown


def test_events_come_with_their_bodies_whole(cli: Cli, story: Story) -> None:
    (leased, *_) = cli("events", "--kind", "BatchLeased", "--store", story.url, "--json").json
    assert len(leased["body"]["experiences"]) == 4


def test_a_screen_shows_who_is_how_far(cli: Cli, story: Story) -> None:
    told = cli("top", "--once", "--store", story.url).out
    assert "last steps" in told
    assert "SegmentsArchived" in told


def test_two_runs_are_compared_step_by_step(cli: Cli, story: Story, tmp_path: Path) -> None:
    other = anyio.run(tell, f"sqlite:///{tmp_path / 'o.db'}", tmp_path / "run", "other")
    words = ("diff", "sort", "other", "--store", story.url, "--other-store", other.url)
    (found,) = cli(*words, "--json").json
    assert found["numbers"]["rows"] == [12, 12]
    assert found["config"] == {}
    assert "steps of both" in cli(*words).out
