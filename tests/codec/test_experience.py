from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from tests.raw_store import decode_experiences, encode_experiences
from trinity_buffer.errors import InvalidArgumentError, InvalidExperienceError
from trinity_buffer.experience import EID, Experience, group_by, split_dpo_experience


def stored(*families: str) -> Experience:
    """One experience, read back with some families only."""
    given = Experience(
        eid=EID("e0", 7),
        tokens=[1, 2, 3],
        logprobs=[-1.0, -2.0],
        info={"model_version": 3, "finish_reason": "stop"},
        response_text="b c",
    )
    write = encode_experiences([given])
    return decode_experiences(
        {name: b"".join(write.families[name]) for name in families}, write.meta
    )[0]


def test_lists_become_tensors_of_the_reference_dtypes() -> None:
    e: Any = Experience(
        tokens=[1, 2, 3],
        logprobs=[-1, -2],
        action_mask=[1, 0],
        token_level_reward=[0, 1],
        routed_experts=[[[1]], [[2]]],
        multi_modal_inputs={"pixels": [[0.5]]},
    )
    dtypes = [e.tokens.dtype, e.logprobs.dtype, e.action_mask.dtype, e.token_level_reward.dtype]
    assert dtypes == [torch.int32, torch.float32, torch.bool, torch.float32]
    assert e.routed_experts.dtype == torch.uint8
    assert e.multi_modal_inputs["pixels"].dtype == torch.float32


def test_a_tensor_is_kept_as_it_is() -> None:
    tokens, mask = torch.tensor([1, 2, 3]), torch.tensor([1.0, 0.5], dtype=torch.float64)
    e = Experience(tokens=tokens, action_mask=mask)
    assert e.tokens is tokens
    assert e.action_mask is mask


def test_an_array_keeps_its_dtype() -> None:
    assert Experience(tokens=np.arange(3, dtype=np.int16)).tokens.dtype == torch.int16


@pytest.mark.parametrize(
    ("given", "kind", "mask"),
    [
        ({"tokens": [1, 2, 3]}, "single_turn", [True, True]),
        ({"tokens": [1, 2, 3], "prompt_length": 2}, "single_turn", [True]),
        ({"tokens": [1, 2, 3], "action_mask": [0, 1]}, "multi_turn", [False, True]),
        ({"tokens": [1, 2], "chosen": [3], "rejected": [4, 5]}, "dpo", None),
        ({"tokens": [1, 2], "chosen": [3]}, "single_turn", [True]),
        ({"tokens": [1], "chosen": [3], "rejected": [4], "action_mask": [1]}, "multi_turn", [True]),
        (
            {"tokens": [1, 2], "prompt_length": 2, "truncate_status": "prompt_truncated"},
            "single_turn",
            [],
        ),
        (
            {"tokens": [1], "truncate_status": "prompt_truncated", "logprobs": [-1, -2]},
            "single_turn",
            [False, False],
        ),
        ({"tokens": [1, 2], "prompt_length": 0, "action_mask": [1] * 9}, "multi_turn", [True] * 9),
    ],
)
def test_the_type_follows_from_what_is_given(given: dict[str, Any], kind: str, mask: Any) -> None:
    e = Experience(**given)
    assert e.experience_type == kind
    assert (None if e.action_mask is None else e.action_mask.tolist()) == mask


def test_the_prompt_of_a_pair_is_all_of_its_tokens() -> None:
    assert Experience(tokens=[1, 2], chosen=[3], rejected=[4], prompt_length=9).prompt_length == 2


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"tokens": [1, 2], "prompt_length": 0}, "b/t/1/2/: prompt_length is 0"),
        ({"tokens": [1, 2], "prompt_length": 2}, "b/t/1/2/: tokens has 2 elements and prompt_len"),
        ({"tokens": [[1], [2, 3]]}, "b/t/1/2/: tokens cannot be made a tensor"),
        ({"tokens": [1, 2], "logprobs": ["x"]}, "b/t/1/2/: logprobs cannot be made a tensor"),
    ],
)
def test_what_cannot_be_is_refused_by_the_name_of_the_field(
    given: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InvalidExperienceError, match=sentence):
        Experience(eid=EID("b", "t", 1, 2), **given)


@pytest.mark.parametrize("reward", [2, 0.5, True, None])
def test_a_reward_stays_what_it_is(reward: float) -> None:
    assert Experience(tokens=[1, 2], reward=reward).reward is reward


@pytest.mark.parametrize("reward", [torch.tensor(0.5), np.float32(0.5)])
def test_the_reward_of_a_tensor_is_a_python_number(reward: Any) -> None:
    found = Experience(tokens=[1, 2], reward=reward).reward
    assert type(found) is float
    assert found == 0.5


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"reward": torch.tensor([0.5, 1])}, "reward has the shape [2], it must be one number"),
        ({"tokens": None}, "tokens is None: give a list of token ids, or a tensor"),
        ({"tokens": [1.5, 2, 3]}, "tokens is float64, it must hold integer token ids"),
        ({"tokens": [True, False]}, "tokens is bool, it must hold integer token ids"),
        ({"tokens": [1, 1 << 40]}, "tokens cannot be made a tensor (value cannot be"),
        ({"tokens": [1, "2"]}, "tokens cannot be made a tensor ("),
        ({"tokens": [[1], [2, 3]]}, "tokens cannot be made a tensor ("),
        ({"chosen": [0.5], "rejected": [1]}, "chosen is float64, it must hold integer token ids"),
        ({"prompt_length": 2.5}, "prompt_length is 2.5, it must be an int"),
        ({"prompt_length": "2"}, "prompt_length is '2', it must be an int"),
    ],
)
def test_a_field_that_cannot_be_right_is_named(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidExperienceError) as refused:
        Experience(**{"eid": EID("b", "t"), "tokens": [1, 2, 3], **fields})
    assert str(refused.value).startswith(f"experience b/t/0/0/: {said}")
    assert refused.value.field in fields


@pytest.mark.parametrize(
    "tokens", [range(1, 4), (1, 2, 3), [np.int64(1), 2, 3], [torch.tensor(1), 2, 3]]
)
def test_a_list_of_token_ids_becomes_int32(tokens: Any) -> None:
    found = Experience(tokens=tokens).tokens
    assert (found.dtype, found.tolist()) == (torch.int32, [1, 2, 3])


def test_an_eid_may_be_given_as_a_mapping() -> None:
    e = Experience(
        eid={"batch": 1, "task": "x", "run": 2, "step": 3, "suffix": "a1"}, tokens=[1, 2]
    )
    assert e.eid == EID(1, "x", 2, 3, "a1")


@pytest.mark.parametrize("eid", [("b1", 1, 0), "b1/1/0/0/", 7])
def test_an_eid_of_another_kind_is_refused(eid: Any) -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"Experience\(eid=.*must be an EID, such as EID\("
    ):
        Experience(eid=eid, tokens=[1, 2])


def test_the_policy_version_is_the_model_version_of_info() -> None:
    e = Experience(tokens=[1, 2])
    assert e.policy_version is None
    e.policy_version = 7
    assert e.info == {"model_version": 7}
    assert e.policy_version == 7


def test_the_finish_reason_is_told_by_info_first() -> None:
    e = Experience(tokens=[1, 2], truncate_status="response_truncated")
    assert e.finish_reason == "response_truncated"
    e.info["finish_reason"] = "stop"
    assert e.finish_reason == "stop"


@pytest.mark.parametrize("family", ["light", "tokens", "text"])
def test_what_is_always_known_does_not_depend_on_the_families(family: str) -> None:
    e = stored(family)
    assert (e.length, e.response_length, e.prompt_length, e.reward) == (3, 2, 1, None)
    assert (e.policy_version, e.finish_reason, e.experience_type) == (3, "stop", "single_turn")


@pytest.mark.parametrize(
    ("loaded", "field", "family"),
    [("light", "tokens", "tokens"), ("tokens", "info", "light"), ("light", "messages", "text")],
)
def test_a_field_that_was_not_loaded_says_which_family_to_name(
    loaded: Any, field: str, family: str
) -> None:
    sentence = rf"{field} of e0/7/0/0/ was not loaded: .*families=\('{loaded}',\).*'{family}'"
    with pytest.raises(AttributeError, match=sentence):
        getattr(stored(loaded), field)


def test_a_field_that_does_not_exist_is_an_ordinary_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'token'"):
        _ = Experience(tokens=[1, 2]).token


def test_a_deep_copy_of_a_view_copies_the_view_alone() -> None:
    many = [Experience(eid=EID(0, i), tokens=list(range(2000))) for i in range(9)]
    write = encode_experiences(many)
    blobs = {family: b"".join(blob) for family, blob in write.families.items()}
    one = decode_experiences(blobs, write.meta)[3]
    made = copy.deepcopy(one)
    assert torch.equal(made.tokens, one.tokens)
    assert made.tokens.untyped_storage().nbytes() == one.tokens.nbytes
    made.info["x"] = 1
    assert one.info == {}


def test_groups_keep_the_order_of_first_appearance() -> None:
    def at(task: int, run: int, step: int) -> Experience:
        return Experience(eid=EID("b", task, run, step), tokens=[1, 2])

    given = [at(2, 0, 0), at(1, 0, 0), at(2, 1, 0), at(2, 0, 1)]
    shown = {
        by: {key: [given.index(e) for e in some] for key, some in group_by(given, by).items()}
        for by in ("task", "run", "step")
    }
    assert shown == {
        "task": {"b/2": [0, 2, 3], "b/1": [1]},
        "run": {"b/2/0": [0, 3], "b/1/0": [1], "b/2/1": [2]},
        "step": {"b/2/0": [0, 2], "b/1/0": [1], "b/2/1": [3]},
    }
    assert [list(group_by(given, by)) for by in ("task", "run")] == [
        ["b/2", "b/1"],
        ["b/2/0", "b/1/0", "b/2/1"],
    ]


def test_grouping_by_something_else_is_refused() -> None:
    with pytest.raises(ValueError, match="Unknown id_type: 'suffix'"):
        group_by([], "suffix")  # type: ignore[arg-type]  # that is the point


def test_a_pair_splits_into_two_single_turns() -> None:
    pair = Experience(eid=EID(1, 2, 3), tokens=[1, 2, 3], chosen=[4, 5], rejected=[6], reward=0.5)
    chosen, rejected = split_dpo_experience(pair)
    assert (chosen.tokens.tolist(), rejected.tokens.tolist()) == ([1, 2, 3, 4, 5], [1, 2, 3, 6])
    assert chosen.action_mask is not None
    assert chosen.action_mask.tolist() == [True, True]
    assert {e.prompt_length for e in (chosen, rejected)} == {3}
    assert {e.reward for e in (chosen, rejected)} == {0.5}
    assert chosen.eid.rid == rejected.eid.rid == pair.eid.rid
    assert chosen.eid != rejected.eid


def test_what_people_read_holds_no_tensors() -> None:
    shown = stored("light", "tokens", "text").to_dict()
    assert shown["type"] == "single_turn"
    assert shown["response_text"] == "b c"
    assert not any(isinstance(value, torch.Tensor) for value in shown.values())
