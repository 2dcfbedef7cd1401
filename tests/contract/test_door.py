"""What is accepted can be read back; what cannot is refused with its name, and stops nobody."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch

from tests.codec.test_validation import BAD
from tests.codec.test_validation import rollout as of_five_tokens
from tests.contract.making import group, kinds, opened, rollout
from tests.handles import Experiment
from tests.pipeline.planting import unguarded, write_body
from tests.raw_store import append, record_unchecked, rows, sql
from trinity_buffer import open_store, run_strategy, verify
from trinity_buffer.errors import (
    ConflictError,
    DamagedSegmentError,
    InvalidArgumentError,
    InvalidExperienceError,
    UnknownExperimentError,
)
from trinity_buffer.events import ConfigurationChanged
from trinity_buffer.experience import EID, CustomField, Experience
from trinity_buffer.identity import problem_of_name
from trinity_buffer.inspector.doctor import examine

NAMELESS = [
    "a\nb",
    "a\x00b",
    "\ud800",
    "a\x1b[2Jb",
    "a\x85b",
    "a\u2028b",
    "\u202eab",
    "",
    "n" * 256,
]
"""What cannot be the name of anything."""


def changed(**fields: Any) -> Experience:
    made = rollout(run=4)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def nested(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    with warnings.catch_warnings(action="ignore"):  # its interface may change, says torch
        return torch.nested.nested_tensor([torch.ones(4, dtype=dtype)] * 2)


UNREADABLE: dict[str, Callable[[], Experience]] = {
    "experience_type is 'chat', it must be": lambda: changed(experience_type="chat"),
    "experience_type is 'None'": lambda: changed(experience_type=None),
    "prompt_length is an int of more than 32": lambda: changed(prompt_length=1 << 70),
    "prompt_length is an int of more": lambda: changed(prompt_length=-(1 << 32)),
    "messages is a tuple": lambda: changed(messages=({"role": "user"},)),
    "tools is a str": lambda: changed(tools="x"),
    "chosen_messages is a int": lambda: changed(chosen_messages=5),
    "rejected_messages is a dict": lambda: changed(rejected_messages={}),
    "response_text is a int": lambda: changed(response_text=5),
    "prompt_text is a bytes": lambda: changed(prompt_text=b"x"),
    "metrics is a list": lambda: changed(metrics=[1.0]),
    "custom_fields has .'a', 'b'": lambda: changed(custom_fields=[("a", "b", torch.int32)]),
    "it is no CustomField": lambda: changed(
        custom_fields=[CustomField("a", 5, torch.int32)]  # type: ignore[arg-type]
    ),
    "size is": lambda: changed(info={"image": b"x" * (65 << 20)}),
    "info.*object": lambda: changed(info={"a": object()}),
    "tokens is .* meta": lambda: changed(tokens=torch.zeros(8, dtype=torch.int32, device="meta")),
    "logprobs is .* meta": lambda: changed(logprobs=torch.zeros(5, device="meta")),
    "routed_experts is .* meta": lambda: changed(
        routed_experts=torch.zeros(8, 1, 1, dtype=torch.uint8, device="meta")
    ),
    "routed_experts has 65 dimensions": lambda: changed(
        routed_experts=torch.zeros([8] + 64 * [1], dtype=torch.uint8)
    ),
    "multi_modal_inputs.*sparse": lambda: changed(
        multi_modal_inputs={"pixels": torch.eye(3).to_sparse()}
    ),
    "tokens is a nested tensor": lambda: changed(tokens=nested(torch.int32)),
    "logprobs is a nested tensor": lambda: changed(logprobs=nested()),
    "routed_experts is a nested tensor": lambda: changed(routed_experts=nested(torch.uint8)),
    "multi_modal_inputs.* is a nested tensor": lambda: changed(
        multi_modal_inputs={"pixels": nested()}
    ),
    "a tensor is a nested one": lambda: changed(info={"pixels": nested()}),
    "info.'pixels'.: a tensor is .*sparse": lambda: changed(
        info={"pixels": torch.eye(3).to_sparse()}
    ),
    "eid was never given": lambda: changed(eid=EID()),
    "eid.task is 'a.nb': control": lambda: changed(eid=EID("b", "a\nb")),
    "eid.batch is .*: control": lambda: changed(eid=EID("a\x1b]52;c;eA==\x07", "t")),
    "eid.suffix is .*: control": lambda: changed(eid=EID("b", "t", suffix="\x9b")),
}


@pytest.mark.parametrize("problem", UNREADABLE)
async def test_what_cannot_be_read_back_is_refused_with_its_name(
    sqlite_url: str, problem: str
) -> None:
    async with opened(sqlite_url) as experiment:
        with pytest.raises(InvalidExperienceError, match=problem):
            await experiment.writer("e0").write([*group(), UNREADABLE[problem]()])
        assert await kinds(experiment) == ["ExperimentCreated"]


class Score(float):
    """A float with more to it."""


@pytest.mark.parametrize(
    ("reward", "plain"),
    [
        (np.float64(0.5), 0.5),
        (np.float32(0.5), 0.5),
        (np.int64(1), 1),
        (np.True_, True),
        (False, False),
        (Score(0.5), 0.5),
    ],
)
async def test_a_reward_that_is_assigned_may_be_of_any_type_of_numbers(
    store_url: str, reward: Any, plain: float
) -> None:
    async with opened(store_url) as experiment:
        await experiment.writer("e0").write([*group(), changed(reward=reward)])
        again = await experiment.writer("e0").write([changed(reward=plain)])
        read = [experience.reward async for experience in experiment.read(run=4)]
        assert (again.duplicates, read, type(read[0])) == (1, [plain], type(plain))
        assert (await verify(experiment)).ok


async def test_a_reason_to_finish_may_be_a_member_of_an_enum(sqlite_url: str) -> None:
    class Reason(str, Enum):  # noqa: UP042 - of a StrEnum, str() is the value
        LENGTH = "length"

    async with opened(sqlite_url) as experiment:
        await experiment.writer("e0").write([changed(info={"finish_reason": Reason.LENGTH})])
        read = [one async for one in experiment.read(families=("tokens",))]
        assert read[0].finish_reason == "length"
        assert (await verify(experiment)).ok


@pytest.mark.parametrize("problem", [one for one in UNREADABLE if not one.startswith("eid")])
async def test_quarantine_keeps_what_can_be_read_back(sqlite_url: str, problem: str) -> None:
    bad = UNREADABLE[problem]()
    bad.eid = EID("b", 0, 4)
    async with opened(sqlite_url) as experiment:
        writer = experiment.writer("e0", on_invalid="quarantine")
        receipt = await writer.write([*group(), bad])
        assert (receipt.written, receipt.rejected) == (5, 1)
        assert (await writer.write([*group(), bad])).duplicates == 5
        found = [one async for one in experiment.read(include_refused=True)]
    assert [one.damaged for one in found] == [None] * 5
    assert found[-1].eid == bad.eid
    if problem != "size is":
        assert bad.eid.uid in found[-1].info["invalid"]


@pytest.mark.parametrize("problem", BAD)
async def test_what_is_refused_by_its_field_is_quarantined(sqlite_url: str, problem: str) -> None:
    fields, _ = BAD[problem]
    bad = of_five_tokens(**fields, eid=EID("b", 0, 4))
    async with opened(sqlite_url) as experiment:
        writer = experiment.writer("e0", on_invalid="quarantine")
        receipt = await writer.write([*group(), bad])
        assert (receipt.written, receipt.rejected) == (5, 1)
        assert (await writer.write([*group(), bad])).duplicates == 5


async def test_an_address_that_cannot_be_named_is_refused_in_quarantine_too(
    sqlite_url: str,
) -> None:
    async with opened(sqlite_url) as experiment:
        with pytest.raises(InvalidExperienceError, match="eid was never given"):
            await experiment.writer("e0", on_invalid="quarantine").write([changed(eid=EID())])


def test_rows_of_a_batch_are_refused_where_they_become_one_experience() -> None:
    with pytest.raises(InvalidExperienceError, match=r"b/t/0/0/: tokens has the shape \[1, 3\]"):
        Experience(eid=EID("b", "t"), tokens=[[1, 2, 3]], prompt_length=1)


@pytest.mark.parametrize("name", NAMELESS)
async def test_no_name_holds_what_a_line_or_a_terminal_or_a_database_cannot(
    store_url: str, name: str
) -> None:
    async with open_store(store_url) as store:
        with pytest.raises(InvalidArgumentError, match="an experiment's name"):
            await store.experiment(name, config={})
        assert await store.experiments() == []
        experiment = await store.experiment("run", config={})
        with pytest.raises(InvalidArgumentError, match="an actor's name"):
            await experiment.writer(name).write(group())
        with pytest.raises(InvalidArgumentError, match="an actor's name"):
            await experiment.writer(name).plan("b", [1], 4)
        with pytest.raises(InvalidArgumentError, match="an actor's name"):
            await experiment.finish("enough", actor=name)
        with pytest.raises(InvalidArgumentError):
            await experiment.writer("e0").plan("b", [name] if name else [], 4)
        assert await kinds(experiment) == ["ExperimentCreated"]


async def test_a_bad_actor_takes_no_other_call_with_it(store_url: str) -> None:
    async with opened(store_url) as experiment, anyio.create_task_group() as tasks:
        tasks.start_soon(experiment.writer("e0").write, group(task=1))
        with pytest.raises(InvalidArgumentError, match="an actor's name"):
            await experiment.writer("e\n1").write(group(task=2))


@pytest.mark.parametrize("name", ["ünï", "任务 7", "a b", "👩‍🚀", "مهمة", "a/b"])
def test_names_of_all_languages_are_names(name: str) -> None:
    assert problem_of_name(name) is None


@pytest.mark.parametrize("version", [-1, 1.5, True, "3", None, 1 << 63])
async def test_a_policy_version_is_a_number_of_steps(store_url: str, version: Any) -> None:
    async with opened(store_url) as experiment:
        with pytest.raises(InvalidArgumentError, match="policy version"):
            await experiment.publish_policy(version, "weights")
        assert await experiment.newest_policy() is None


@pytest.mark.parametrize("uri", ["", "a\x00b", "a\nb", 5, None, "u" * 5000])
async def test_a_policy_lies_somewhere(store_url: str, uri: Any) -> None:
    async with opened(store_url) as experiment:
        with pytest.raises(InvalidArgumentError, match="policy 1: uri"):
            await experiment.publish_policy(1, uri)


async def test_an_older_policy_is_no_news_unless_the_trainer_went_back(
    store_url: str, tmp_path: Path
) -> None:
    async with opened(store_url, rollouts_per_group=4) as experiment:
        await experiment.writer("e0").write([*group(task=1), *group(task=2)])
        await run_strategy(experiment, "grpo")
        weights = tmp_path / "weights"
        weights.write_text("weights")
        async with experiment.train_stream(strategy="grpo") as stream:
            async for step in stream:
                await stream.commit(step, checkpoint=weights)
                await experiment.publish_policy(step.step, "weights")
        with pytest.raises(ConflictError, match=r"policy 2 is published .*resume_from="):
            await experiment.publish_policy(1, "weights")
        async with experiment.train_stream(strategy="grpo", resume_from=1):
            await experiment.publish_policy(1, "weights")
        found = await experiment.newest_policy()
    assert found is not None
    assert found.version == 1


async def test_a_key_that_nothing_reads_is_refused_with_the_one_that_was_meant(
    store_url: str,
) -> None:
    async with open_store(store_url) as store:
        with pytest.raises(InvalidArgumentError, match="did you mean 'rollouts_per_group'"):
            await store.experiment("run", config={"rollout_per_group": 4})
        with pytest.raises(InvalidArgumentError, match="under 'extra'"):
            await store.experiment("run", config={"zzz": 4})
        assert await store.experiments() == []
        own = {"rollout_per_group": 4}
        experiment = await store.experiment("run", config={"extra": own})
        assert experiment.config["extra"] == own


async def test_a_trainer_that_could_never_be_opened_is_not_configured(store_url: str) -> None:
    async with open_store(store_url) as store:
        with pytest.raises(InvalidArgumentError, match=r"trainer='a/b': .* without a slash"):
            await store.experiment("run", config={"trainer": "a/b"})
        assert await store.experiments() == []


async def test_a_stored_trainer_that_is_refused_today_is_looked_at_and_replaced(
    store_url: str,
) -> None:
    async with open_store(store_url) as store:
        experiment = await store.experiment("run", config={})
        old = {**experiment.config, "trainer": "a/b"}
        changed = ConfigurationChanged(changes={"trainer": [None, "a/b"]}, config=old)
        await append(experiment, changed)
    async with open_store(store_url) as store:
        experiment = await store.experiment("run")
        assert not (await examine(store)).stuck
        again = await store.experiment("run", config={"trainer": "c"})
        assert again.config["trainer"] == "c"


async def test_a_stored_configuration_with_other_keys_still_opens(store_url: str) -> None:
    old = {"schema": "experience", "colour": "red"}
    async with open_store(store_url) as store:
        experiment = await store.experiment("run", config={"seed": 1})
        changed = ConfigurationChanged(changes={"colour": [None, "red"]}, config=old)
        await append(experiment, changed)
    async with open_store(store_url) as store:
        experiment = await store.experiment("run")
        assert experiment.config["colour"] == "red"
        again = await store.experiment("run", config={**experiment.config, "seed": 2})
        assert (again.config["colour"], again.config["seed"]) == ("red", 2)


async def test_what_an_experiment_is_cannot_be_changed_later(store_url: str) -> None:
    async with open_store(store_url) as store:
        with pytest.raises(UnknownExperimentError) as unknown:
            await store.experiment("run")
        await store.experiment("run", config={}, schema="sft")
        with pytest.raises(InvalidArgumentError) as other:
            await store.experiment("run", config={}, schema="dpo")
    assert str(unknown.value) == (
        f"{store.url} holds no experiment 'run' (there: none); pass config={{}} to create it"
    )
    assert str(other.value) == (
        "experiment 'run' has schema='sft', which cannot become 'dpo'; create another experiment"
    )


@pytest.mark.parametrize(
    ("key", "value", "must"),
    [
        ("groups_per_step", 0, "an integer, at least 1"),
        ("groups_per_batch", 2.5, "an integer, at least 1"),
        ("rollouts_per_group", True, "an integer, from 1 to 1048576"),
        ("max_queued_groups", -1, "an integer, at least 1, or None"),
        ("max_rejected_steps", "x", "an integer, at least 1"),
        ("max_staleness", -1, "an integer, at least 0, or None"),
        ("trainer", 5, "a text"),
        ("lease_ttl_s", 0, "a number of seconds above 0, at most 1e+09"),
        ("lease_ttl_s", "x", "a number of seconds above 0, at most 1e+09"),
    ],
)
async def test_a_value_that_nothing_can_be_made_with_is_refused(
    sqlite_url: str, key: str, value: object, must: str
) -> None:
    told = f"experiment 'run': {key}={value!r}: it must be {must}"
    async with open_store(sqlite_url) as store:
        with pytest.raises(InvalidArgumentError, match=f"^{re.escape(told)}$"):
            await store.experiment("run", config={key: value})
        await store.experiment("run", config={key: None, "max_staleness": 0})
        with pytest.raises(InvalidArgumentError, match=re.escape(told)):
            await store.experiment("run", config={key: value})


async def decided(experiment: Experiment, strategy: str = "grpo") -> list[tuple[str, str | None]]:
    """Return uid -> why it was rejected by a strategy, of each that is decided."""
    await run_strategy(experiment, strategy, rollouts_per_group=4)
    reasons = {row["address"]: row["reason"] for row in await rows(experiment, "rejection")}
    return [(one.eid.uid, reasons.get(one.address or 0)) async for one in experiment.read()]


async def test_a_row_that_is_no_experience_is_damaged_and_stops_nobody(
    store_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    some = group("old")
    some[1].metrics = [1.0]  # type: ignore[assignment]
    async with opened(store_url) as experiment:
        await record_unchecked(experiment, some)
        await experiment.writer("e0").write(group("new"))
        found = [one async for one in experiment.read()]
        assert [one.eid for one in found] == [one.eid for one in (*some, *group("new"))]
        assert [one.damaged is None for one in found] == [True, False, *[True] * 6]
        assert (found[1].reward, found[1].length) == (some[1].reward, 8)
        with pytest.raises(DamagedSegmentError, match="old/0/1/0/: metrics"):
            found[1].tokens  # noqa: B018
        assert "old/0/1/0/ cannot be read" in caplog.text
        assert [reason for _, reason in await decided(experiment)] == [None, "damaged", *[None] * 6]


@pytest.mark.parametrize("body", [b"\xc1", b"", b"\x80"])
async def test_a_damaged_event_takes_only_its_own_rows_with_it(store_url: str, body: bytes) -> None:
    async with opened(store_url) as experiment:
        await experiment.writer("e0").write(group("old"))
        await experiment.writer("e0").write(group("new"))
    await write_body(store_url, 2, body)
    async with opened(store_url) as experiment:
        assert [reason for _, reason in await decided(experiment)] == [
            *["damaged"] * 4,
            *[None] * 4,
        ]
        report = await verify(experiment)
        assert any("position 2" in str(problem) for problem in report.problems)


async def lose_a_segment(url: str) -> None:
    """Write two groups, of which one loses its tensors."""
    async with opened(url) as experiment:
        await experiment.writer("e0").write(group("old"))
        first = (await rows(experiment, "experience"))[0]["segment"]
        await experiment.writer("e0").write(group("new"))
    await unguarded(url, sql("DELETE FROM segment WHERE key = :key", key=first))


async def test_a_segment_that_is_gone_takes_only_its_own_rows_with_it(store_url: str) -> None:
    await lose_a_segment(store_url)
    async with opened(store_url) as experiment:
        assert [reason for _, reason in await decided(experiment, "step_wise_grpo")] == [
            *["damaged"] * 4,
            *[None] * 4,
        ]


async def test_a_segment_that_is_gone_and_was_not_needed_for_a_score_stops_no_trainer(
    store_url: str,
) -> None:
    await lose_a_segment(store_url)
    async with opened(store_url) as experiment:
        assert [reason for _, reason in await decided(experiment)] == [None] * 8
        async with experiment.train_stream(strategy="grpo", groups_per_step=1) as stream:
            served = [one async for step in stream for one in step.manifest.experiences]
        reasons = {row["reason"] for row in await rows(experiment, "rejection")}
        assert (len(served), reasons) == (4, {"damaged"})


async def test_a_question_with_a_number_that_no_store_holds_is_refused(store_url: str) -> None:
    async with opened(store_url) as experiment:
        await experiment.writer("e0").write(group())
        for question in (
            experiment.read(run=10**20),
            experiment.read(policy_version=10**20),
            experiment.events(10**20),
        ):
            with pytest.raises(InvalidArgumentError, match="larger than a store can hold"):
                await anext(question)
