from __future__ import annotations

from typing import Any

import pytest
import torch

from trinity_buffer.algorithm.annotating import annotate
from trinity_buffer.errors import InvalidArgumentError, InvalidExperienceError
from trinity_buffer.experience import EID, Experience
from trinity_buffer.identity import SCHEMAS
from trinity_buffer.pipeline.encoding import RecordBatch
from trinity_buffer.pipeline.write import batch
from trinity_buffer.pipeline.write.batch import passes, validate

NAN, INF = float("nan"), float("inf")


def rollout(**changed: Any) -> Experience:
    fields = {
        "eid": EID("e0-7", 3, 1),
        "tokens": [1, 2, 3, 4, 5],
        "prompt_length": 2,
        "action_mask": [1, 0, 1],
        "logprobs": [-0.5, -1.0, -0.25],
        "reward": 1.0,
    }
    return Experience(**{**fields, **changed})


def pair(**changed: Any) -> Experience:
    return Experience(
        eid=EID("e0-7", 3, 1), **{"tokens": [1], "chosen": [2], "rejected": [3], **changed}
    )


GOOD = {
    "a rollout": rollout(),
    "a single turn": rollout(action_mask=None),
    "no reward": rollout(reward=None),
    "no log-probs": rollout(logprobs=None),
    "an int as reward": rollout(reward=-3),
    "the least int as reward": rollout(reward=1 - 2**63),
    "a mask of ints": rollout(action_mask=torch.tensor([1, 0, 1])),
    "a mask of floats": rollout(action_mask=torch.tensor([1.0, -0.0, 1.0])),
    "a mask of bfloat16": rollout(action_mask=torch.tensor([1, 0, 1]).bfloat16()),
    "a mask of unsigned ints": rollout(action_mask=torch.tensor([1, 0, 1]).to(torch.uint16)),
    "a mask that selects nothing": rollout(action_mask=[0, 0, 0]),
    "a text as batch and task": rollout(eid=EID("b", "a/b")),
    "a name of 255 characters": rollout(eid=EID("b" * 255, 1)),
    "experts of all tokens": rollout(routed_experts=torch.zeros(5, 2, 1, dtype=torch.uint8)),
    "experts of all but one": rollout(routed_experts=torch.zeros(4, 2, 1, dtype=torch.uint8)),
    "a truncated prompt": rollout(
        prompt_length=5, truncate_status="prompt_truncated", action_mask=[], logprobs=None
    ),
    "bfloat16 log-probs": rollout(logprobs=torch.zeros(3, dtype=torch.bfloat16)),
    "float16 log-probs": rollout(logprobs=torch.full((3,), -6e4).half()),
    "log-probs whose squares overflow": rollout(logprobs=torch.full((3,), -3e38)),
    "a log-prob that wants a gradient": rollout(logprobs=torch.zeros(3, requires_grad=True)),
    "unsigned tokens": rollout(tokens=torch.arange(5).to(torch.uint16)),
}


def passes_as_a_column(experience: Experience, schema: str = "experience") -> bool:
    """What is checked of a whole write at once, where the one stands between two that are right."""
    return passes(RecordBatch([rollout(), experience, rollout(eid=EID("e0-8", "x"))]), schema)


@pytest.mark.parametrize("name", GOOD)
def test_what_is_right_passes_as_a_column(name: str) -> None:
    assert passes_as_a_column(GOOD[name])


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("schema", ["experience", "sft", "cpt"])
def test_what_is_right_passes(name: str, schema: str) -> None:
    validate(GOOD[name], schema)


def test_a_pair_passes_as_a_pair() -> None:
    validate(pair(), "dpo")


def test_a_pair_may_have_log_probs_of_any_length() -> None:
    validate(pair(logprobs=[0.0] * 7), "dpo")


WRONG: Any = EID  # what a type checker would refuse, and a workflow may pass all the same

EIDS: dict[str, tuple[Any, str]] = {
    "a negative run": (EID("b", 1, -1), "eid.run is -1"),
    "a negative step": (EID("b", 1, 0, -1), "eid.step is -1"),
    "a run of 64 bits": (EID("b", 1, 2**31), "eid.run is 2147483648"),
    "a run that is a text": (WRONG("b", 1, "0"), "eid.run is '0'"),
    "a run that is a bool": (EID("b", 1, True), "eid.run is True"),
    "a batch that is a float": (WRONG(1.0, 1), "eid.batch is a float, it must be int or str"),
    "a task that is None": (WRONG("b", None), "eid.task is a NoneType"),
    "a suffix that is an int": (WRONG("b", 1, suffix=1), "eid.suffix is a int, it must be str"),
    "a slash in the batch": (EID("a/b", 1), "eid.batch is 'a/b': it must not contain '/'"),
    "a slash in the suffix": (EID("b", 1, suffix="/"), "eid.suffix is '/'"),
    "a long batch": (EID("b" * 256, 1), "eid.batch has 256 characters, the longest is 255"),
    "a long task": (EID("b", "t" * 256), "eid.task has 256 characters"),
    "a NUL in the task": (EID("b", "a\0"), "eid.task is .*NUL"),
    "a surrogate in the task": (EID("b", "\ud800"), "eid.task is .*surrogates"),
    "a task beyond 64 bits": (EID("b", 2**63), "eid.task is an int of more than 64 bits"),
}


@pytest.mark.parametrize("name", EIDS)
def test_an_address_that_cannot_be_is_refused(name: str) -> None:
    eid, sentence = EIDS[name]
    with pytest.raises(InvalidExperienceError, match=sentence):
        validate(rollout(eid=eid))
    assert not passes_as_a_column(rollout(eid=eid))


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no tokens": ({"tokens": []}, "tokens has no elements"),
    "float tokens": ({"tokens": torch.zeros(5)}, "tokens is torch.float32, it must hold integer"),
    "bool tokens": ({"tokens": torch.zeros(5).bool()}, "tokens is torch.bool"),
    "sparse tokens": (
        {"tokens": torch.ones(5).int().to_sparse()},
        "tokens is .*sparse.*: make it a dense",
    ),
    "a negative token": ({"tokens": [1, 2, 3, 4, -100]}, "tokens holds negative numbers"),
    "no prompt": ({"prompt_length": 0}, "prompt_length is 0, it must be an int from 1 to 4"),
    "a prompt beyond the tokens": ({"prompt_length": 6}, "prompt_length is 6"),
    "no response": ({"prompt_length": 5, "action_mask": []}, "tokens holds 5 tokens of prompt and"),
    "a short mask": ({"action_mask": [1]}, "action_mask has 1 elements, the response has 3"),
    "a long mask": ({"action_mask": [1] * 5}, "action_mask has 5 elements, the response has 3"),
    "a mask in rows": ({"action_mask": [[1, 0, 1]]}, "action_mask has the shape"),
    "a complex mask": ({"action_mask": torch.zeros(3) * 1j}, "action_mask is torch.complex64"),
    "NaN in the mask": (
        {"action_mask": torch.tensor([1, NAN, 1])},
        "action_mask holds nan at token 1",
    ),
    "a mask of 255": (
        {"action_mask": torch.tensor([1, 255, 0], dtype=torch.uint8)},
        "action_mask holds 255 at token 1 of the response, it must be 1 where a token is trained",
    ),
    "a mask of -1": ({"action_mask": torch.tensor([-1, 0, 1])}, "action_mask holds -1 at token 0"),
    "a mask of -1.0": ({"action_mask": torch.tensor([0.0, 1, -1])}, "action_mask holds -1.0 at"),
    "a mask of weights": ({"action_mask": torch.tensor([0.5, 0, 2])}, "action_mask holds 0.5 at"),
    "a weight among bfloat16": (
        {"action_mask": torch.tensor([1, 0, 0.5]).bfloat16()},
        "action_mask holds 0.5 at token 2",
    ),
    "short log-probs": ({"logprobs": [0.0]}, "logprobs has 1 elements, the response has 3"),
    "int log-probs": ({"logprobs": torch.zeros(3).int()}, "logprobs is torch.int32"),
    "NaN in the log-probs": ({"logprobs": [0.0, NAN, 0.0]}, "logprobs holds NaN or Inf"),
    "Inf in the log-probs": ({"logprobs": [0.0, -INF, 0.0]}, "logprobs holds NaN or Inf"),
    "Inf among float16": ({"logprobs": torch.full((3,), -INF).half()}, "logprobs holds NaN or Inf"),
    "NaN among bfloat16": (
        {"logprobs": torch.tensor([0.0, NAN, 0.0]).bfloat16()},
        "logprobs holds NaN",
    ),
    "short token rewards": ({"token_level_reward": [1]}, "token_level_reward has 1 elements"),
    "NaN in token rewards": ({"token_level_reward": [1, NAN, 1]}, "token_level_reward holds NaN"),
    "short teacher log-probs": ({"teacher_logprobs": [1]}, "teacher_logprobs has 1 elements"),
    "NaN advantages": ({"advantages": [NAN] * 3}, "advantages holds NaN"),
    "short advantages": ({"advantages": [1.0]}, "advantages has 1 elements"),
    "NaN returns": ({"returns": [NAN] * 3}, "returns holds NaN"),
    "a NaN reward": ({"reward": NAN}, "reward is nan, it must be finite"),
    "an infinite reward": ({"reward": -INF}, "reward is -inf"),
    "a reward above float32": ({"reward": 1e39}, r"reward is 1e\+39, it must be finite in float32"),
    "a reward below float32": ({"reward": -1e39}, r"reward is -1e\+39, it must be finite in fl"),
    "log-probs below float32": (
        {"logprobs": torch.tensor([0.0, -1e39, 0.0], dtype=torch.float64)},
        r"logprobs holds a number above 3.4e\+38, which is infinite in float32",
    ),
    "token rewards above float32": (
        {"token_level_reward": torch.tensor([0.0, 1e39, 0.0], dtype=torch.float64)},
        "token_level_reward holds a number above",
    ),
    "advantages above float32": (
        {"advantages": torch.tensor([0.0, 1e39, 0.0], dtype=torch.float64)},
        "advantages holds a number above",
    ),
    "a reward that is a text": ({"reward": "1"}, "reward is a str, it must be a number or None"),
    "a reward of 400 digits": ({"reward": 10**400}, "reward is 1000"),
    "too few experts": (
        {"routed_experts": torch.zeros(3, 1, 1, dtype=torch.uint8)},
        "routed_experts has the shape .* must be 4 or 5",
    ),
    "float experts": ({"routed_experts": torch.zeros(4, 1, 1)}, "routed_experts must be a tensor"),
    "experts of no dimension": (
        {"routed_experts": torch.tensor(4)},
        r"routed_experts has the shape \[\]",
    ),
    "a version that is a text": ({"info": {"model_version": "3"}}, "model_version'] is '3'"),
    "a finish reason of ints": ({"info": {"finish_reason": 3}}, "finish_reason'] is a int"),
    "a pair": (
        {"action_mask": None, "chosen": [1], "rejected": [2]},
        "chosen and rejected are given",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_refused_by_its_field(name: str) -> None:
    changed, sentence = BAD[name]
    with pytest.raises(InvalidExperienceError, match=sentence) as caught:
        validate(rollout(**changed))
    assert str(caught.value).startswith("experience e0-7/3/1/0/: ")
    assert not passes_as_a_column(rollout(**changed))


@pytest.mark.parametrize("mask", [[1, -100, 0], [1, 0.5, 0], [1, "0", 0], (1, 2, 0)])
def test_a_list_that_is_no_mask_is_refused_where_it_is_given(mask: Any) -> None:
    with pytest.raises(InvalidExperienceError, match=r"e0-7/3/1/0/: action_mask holds .*, it must"):
        rollout(action_mask=mask)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float32])
def test_a_mask_that_an_older_store_holds_selects_and_does_not_multiply(dtype: torch.dtype) -> None:
    one = rollout(action_mask=torch.tensor([-1, 0, 255]).to(dtype))
    annotate(one, 0.5)
    assert one.advantages is not None
    assert one.advantages.tolist() == [0.5, 0.0, 0.5]


ASSIGNED = {
    "a list as mask": ("action_mask", [1, 0, 1], "action_mask is a list, it must be a tensor"),
    "a prompt length that is a float": (
        "prompt_length",
        2.0,
        "prompt_length is 2.0, it must be an int",
    ),
    "no mask": ("action_mask", None, "action_mask is a NoneType"),
    "a list as advantages": ("advantages", [1.0], "advantages is a list"),
    "a list as experts": ("routed_experts", [1], "routed_experts is a list, it must be a tensor"),
    "a list as picture": ("multi_modal_inputs", {"x": [1]}, r"multi_modal_inputs\['x'\] must be"),
    "a number as name": ("multi_modal_inputs", {1: torch.zeros(1)}, r"multi_modal_inputs\[1\]"),
    "a list as info": ("info", [], "info is a list, it must be a dict"),
    "None as metrics": ("metrics", None, "metrics is a NoneType, it must be a dict"),
}


@pytest.mark.parametrize("name", ASSIGNED)
def test_what_was_assigned_later_is_checked_too(name: str) -> None:
    field, value, sentence = ASSIGNED[name]
    experience = rollout()
    setattr(experience, field, value)
    with pytest.raises(InvalidExperienceError, match=sentence):
        validate(experience)
    assert not passes_as_a_column(experience)


@pytest.mark.parametrize(
    ("experience", "sentence"),
    [
        (rollout(action_mask=None), "chosen is None: the schema dpo needs chosen and rejected"),
        (pair(rejected=None, tokens=[1, 2]), "rejected is None"),
        (pair(action_mask=[1]), "action_mask is given"),
        (pair(chosen=[]), "chosen has no elements"),
        (pair(rejected=[]), "rejected has no elements"),
        (pair(chosen=torch.zeros(2)), "chosen is torch.float32"),
        (pair(tokens=[]), "tokens has no elements"),
        (pair(reward=NAN), "reward is nan"),
    ],
)
def test_what_is_no_pair_is_refused_as_one(experience: Experience, sentence: str) -> None:
    with pytest.raises(InvalidExperienceError, match=sentence):
        validate(experience, "dpo")


def test_an_experience_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "MAX_BYTES", 200)
    validate(rollout(response_text="x" * 100))
    assert passes_as_a_column(rollout(response_text="x" * 100))
    for changed in (
        {"response_text": "x" * 200},
        {"multi_modal_inputs": {"pixels": torch.zeros(100)}},
        {"tokens": torch.arange(50), "logprobs": None, "action_mask": torch.ones(48)},
    ):
        with pytest.raises(InvalidExperienceError, match=r"size is \d+ bytes, the limit is 200"):
            validate(rollout(**changed))
        assert not passes_as_a_column(rollout(**changed))


def test_an_unknown_schema_says_which_there_are() -> None:
    assert not passes_as_a_column(rollout(), "ppo")
    with pytest.raises(InvalidArgumentError, match="schema='ppo': accepted are experience, sft"):
        validate(rollout(), "ppo")


def test_the_schemas_are_those_of_the_contract() -> None:
    assert list(SCHEMAS) == ["experience", "sft", "cpt", "dpo"]
