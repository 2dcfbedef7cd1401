from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from torch import Tensor

from tests.raw_store import decode_experiences, encode_experiences
from trinity_buffer.codec.segments import decode_segment, digests_of_segments, encode_segment
from trinity_buffer.errors import CodecError, InvalidArgumentError
from trinity_buffer.experience import EID, FAMILIES, CustomField, Experience
from trinity_buffer.pipeline.encoding import TORCH_DTYPES, RecordBatch

FIELDS = [field for fields in FAMILIES.values() for field in fields]
TENSORS = ["token_level_reward", "advantages", "returns", "logprobs", "teacher_logprobs"]
TEXTS = st.one_of(st.none(), st.text(st.characters()))
MESSAGES = st.one_of(st.none(), st.lists(st.dictionaries(st.text(), TEXTS, max_size=2), max_size=2))
KEYS = st.one_of(st.integers(), st.text())
Rows = list[Experience]


@st.composite
def tensors(draw: st.DrawFn, names: Any = tuple(TORCH_DTYPES), shape: Any = None) -> Tensor:
    """A tensor of any dtype and shape, filled with any bits."""
    dtype = TORCH_DTYPES[draw(st.sampled_from(names))]
    shape = draw(st.lists(st.integers(0, 3), max_size=3)) if shape is None else shape
    count = int(np.prod(shape)) * dtype.itemsize
    data = random.Random(draw(st.integers(0, 9))).randbytes(count)
    if dtype == torch.bool:
        data = bytes(byte & 1 for byte in data)
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0).byte()
    return flat.view(dtype).reshape(shape)


@st.composite
def experiences(draw: st.DrawFn) -> Experience:
    optional: dict[str, Any] = {name: draw(st.one_of(st.none(), tensors())) for name in TENSORS}
    info: Any = draw(st.dictionaries(KEYS, st.one_of(TEXTS, st.integers(), st.floats(0, 1))))
    if draw(st.booleans()):
        optional["chosen"], optional["rejected"] = draw(tensors()), draw(tensors(("int32",), [2]))
    if draw(st.booleans()):
        optional["action_mask"] = draw(tensors())
    return Experience(
        eid=EID(
            draw(KEYS),
            draw(KEYS),
            draw(st.integers(0, 9)),
            draw(st.integers(0, 9)),
            draw(st.text()),
        ),
        tokens=draw(tensors(shape=[draw(st.integers(2, 5))])),
        reward=draw(st.one_of(st.none(), st.integers(-9, 9), st.floats(allow_nan=False))),
        truncate_status=draw(st.sampled_from([None, "response_truncated"])),
        info=info,
        metrics=draw(st.dictionaries(st.text(), st.floats(allow_nan=False))),
        response_text=draw(TEXTS),
        prompt_text=draw(TEXTS),
        messages=draw(MESSAGES),
        tools=draw(MESSAGES),
        chosen_messages=draw(MESSAGES),
        rejected_messages=draw(MESSAGES),
        multi_modal_inputs=draw(st.one_of(st.none(), st.dictionaries(st.text(), tensors()))),
        routed_experts=draw(st.one_of(st.none(), tensors())),
        custom_fields=draw(st.sampled_from([[], [CustomField("a", "b", torch.bfloat16)]])),
        **optional,
    )


def bits(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tuple(tensor.shape), bytes(tensor.reshape(-1).view(torch.uint8).numpy())


def plain(value: Any) -> Any:
    """A value that can be compared: a tensor by its bits."""
    if isinstance(value, torch.Tensor):
        return bits(value)
    if isinstance(value, dict):
        return [(key, plain(item)) for key, item in value.items()]
    return (type(value), value)


def state(experience: Experience) -> dict[str, Any]:
    known = ("eid", "prompt_length", "reward", "experience_type", "length", "policy_version")
    return {name: plain(getattr(experience, name)) for name in (*known, *FIELDS)}


def content_digest_of(experience: Experience) -> bytes:
    digest: bytes = encode_experiences([experience]).meta.digest[0]
    return digest


def blobs(write: RecordBatch) -> dict[str, bytearray]:
    return {family: bytearray(b"".join(blob)) for family, blob in write.families.items()}


@settings(max_examples=min(40, settings().max_examples))
@given(st.lists(experiences(), max_size=4))
def test_experiences_of_every_dtype_come_back_bit_for_bit(given_experiences: Rows) -> None:
    write = encode_experiences(given_experiences)
    found = decode_experiences(blobs(write), write.meta, loaded=tuple(FAMILIES))
    assert [state(e) for e in found] == [state(e) for e in given_experiences]


@settings(max_examples=min(40, settings().max_examples))
@given(st.lists(experiences(), min_size=1, max_size=4), st.data())
@pytest.mark.long
def test_any_slots_come_back_in_their_order(given_experiences: Rows, data: st.DataObject) -> None:
    slots = data.draw(st.lists(st.sampled_from(range(len(given_experiences)))))
    write = encode_experiences(given_experiences)
    found = decode_experiences(blobs(write), write.meta, slots, loaded=tuple(FAMILIES))
    assert [state(e) for e in found] == [state(given_experiences[slot]) for slot in slots]


@settings(max_examples=min(40, settings().max_examples))
@given(st.lists(experiences(), max_size=3))
def test_what_was_read_has_the_digest_of_what_was_written(given_experiences: Rows) -> None:
    write = encode_experiences(given_experiences)
    found = decode_experiences(blobs(write), write.meta, loaded=tuple(FAMILIES))
    assert encode_experiences(found).meta == write.meta
    assert [content_digest_of(e) for e in given_experiences] == write.meta.digest
    segments = [decode_segment(b"".join(blob)) for blob in write.families.values()]
    assert digests_of_segments(write.meta, segments) == write.meta.digest


def sample(number: int = 0, **changed: Any) -> Experience:
    fields: dict[str, Any] = {
        "eid": EID("e0-7", number),
        "tokens": [1, 2, 3, 4 + number],
        "prompt_length": 2,
        "logprobs": [-0.5, -0.25],
        "reward": 1.0,
        "info": {"model_version": 3, "x": {"b": [1, 2.5], "a": (1, None)}},
        "response_text": "c d",
    }
    return Experience(**{**fields, **changed})


def test_a_single_turn_experience_comes_back_as_one() -> None:
    write = encode_experiences([sample(), sample(action_mask=[1, 0])])
    found = decode_experiences(blobs(write), write.meta)
    assert [e.experience_type for e in found] == ["single_turn", "multi_turn"]


def test_tensors_are_views_of_the_buffer_that_was_given() -> None:
    write = encode_experiences([sample(i) for i in range(3)])
    buffers = blobs(write)
    before = blobs(write)
    experience = decode_experiences(buffers, write.meta)[1]
    for family, field in (("tokens", "tokens"), ("tokens", "logprobs"), ("light", "action_mask")):
        start = np.frombuffer(buffers[family], np.uint8).ctypes.data
        address = getattr(experience, field).data_ptr()
        assert start <= address < start + len(buffers[family]), field
    experience.tokens[0] = 99
    assert decode_experiences(buffers, write.meta)[1].tokens[0] == 99
    assert blobs(write) == before


def test_bytes_are_copied_before_tensors_look_at_them() -> None:
    write = encode_experiences([sample()])
    first, second = (decode_experiences(blobs(write), write.meta)[0] for _ in range(2))
    first.tokens[0] = 99
    assert second.tokens[0] == 1


def test_a_family_without_content_is_not_stored_and_its_fields_are_none_when_asked_for() -> None:
    write = encode_experiences([sample(response_text=None)])
    assert set(write.families) == {"light", "tokens"}
    found = decode_experiences(blobs(write), write.meta, loaded=("light", "tokens", "text"))[0]
    assert found.response_text is None
    with pytest.raises(AttributeError, match="heavy"):
        _ = found.routed_experts


def test_the_metadata_says_what_projections_need() -> None:
    pair = Experience(eid=EID(1, "t"), tokens=[1, 2], chosen=[3, 4], rejected=[5])
    turns = sample(action_mask=[0, 1], info={"finish_reason": "stop"}, reward=2)
    meta = encode_experiences([turns, pair]).meta
    rows = list(zip(*structs.astuple(structs.replace(meta, digest=[None] * 2)), strict=True))
    assert rows == [
        ("e0-7", 0, 0, 0, "", 2, None, 2, 4, 2, 1, "multi_turn", "stop", None),
        (1, "t", 0, 0, "", None, None, 2, 2, 2, 3, "dpo", None, None),
    ]
    assert type(rows[0][5]) is int
    assert [len(digest) for digest in meta.digest] == [16, 16]


def test_nothing_encodes_to_nothing() -> None:
    write = encode_experiences([])
    assert write.families == {}
    assert decode_experiences({}, write.meta) == []


LAZY = {
    "every other column": torch.arange(12).view(3, 4)[:, ::2],
    "transposed": torch.arange(6).view(2, 3).t(),
    "expanded": torch.ones(1).expand(4),
    "one of every other": torch.arange(2, dtype=torch.int16)[::2],
    "one of every other row": torch.arange(2, dtype=torch.int16).view(2, 1)[::2],
    "conjugated": torch.tensor([1 + 2j, 3 - 1j]).conj(),
    "negated": torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
    "negated, dense": torch._neg_view(torch.ones(2)),
}


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", LAZY)
def test_a_lazy_view_is_stored_as_what_it_shows(name: str, count: int) -> None:
    write = encode_experiences([sample(multi_modal_inputs={"x": LAZY[name]})] * count)
    found: Any = decode_experiences(blobs(write), write.meta)[-1]
    assert torch.equal(found.multi_modal_inputs["x"], LAZY[name])


def test_a_gradient_does_not_stop_a_tensor_from_being_stored() -> None:
    write = encode_experiences([sample(logprobs=torch.zeros(2, requires_grad=True))] * 2)
    found: Any = decode_experiences(blobs(write), write.meta)[0]
    assert not found.logprobs.requires_grad


def test_a_tensor_in_info_comes_back_as_a_tensor() -> None:
    info: dict[str, Any] = {
        "value": torch.ones(2, dtype=torch.bfloat16),
        "more": (torch.zeros(()),),
    }
    write = encode_experiences([sample(info=info)])
    found = decode_experiences(blobs(write), write.meta)[0].info
    assert plain(found["value"]) == plain(info["value"])
    assert plain(found["more"][0]) == plain(info["more"][0])
    found["value"][0] = 7


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"info": {"when": object()}}, r"info\['when'\]"),
        ({"messages": [{"role": {1}}]}, r"messages\[0\]\['role'\]"),
        ({"logprobs": torch.eye(2).to_sparse()}, "logprobs is torch.float32, torch.sparse_coo"),
        ({"logprobs": torch.zeros(2, device="meta")}, "logprobs is .* on meta"),
        ({"multi_modal_inputs": {7: torch.zeros(1)}}, "multi_modal_inputs has the keys"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_its_name(changed: Any, sentence: str) -> None:
    with pytest.raises(InvalidArgumentError, match=sentence):
        encode_experiences([sample(**changed)])


GOLDEN = {
    "single_turn": "99e38809bbc4573965e4f096025f3e2a",
    "multi_turn": "53d2c3b761db9846f33c61e85ecd881d",
    "dpo": "20a42735c13a13fc98bbcce1d55ae34b",
}


def golden_experience(kind: str) -> Experience:
    given_fields: dict[str, dict[str, Any]] = {
        "single_turn": {"tokens": [1, 2, 3], "logprobs": [-0.5, -0.25], "reward": 1},
        "multi_turn": {
            "tokens": [1, 2, 3],
            "action_mask": [0, 1],
            "info": {"b": 1, "a": [None, 2.5, "x"], 3: (1, 2)},
            "messages": [{"role": "user", "content": "q"}],
            "multi_modal_inputs": {"pixels": [[0.5, 1.0]]},
        },
        "dpo": {"tokens": [1, 2], "chosen": [3, 4], "rejected": [5], "reward": 0.5},
    }
    return Experience(**given_fields[kind])


@pytest.mark.parametrize("kind", GOLDEN)
def test_the_digest_of_a_known_experience_is_the_known_one(kind: str) -> None:
    """Were it to change, what is written again would be taken for other content."""
    assert content_digest_of(golden_experience(kind)).hex() == GOLDEN[kind]


def test_the_digest_does_not_depend_on_address_metrics_and_the_order_of_keys() -> None:
    one = sample(info={"a": {"x": 1, "y": 2}, "b": 2}, metrics={"m": 1})
    other = sample(eid=EID(9, 9), info={"b": 2, "a": {"y": 2, "x": 1}})
    assert content_digest_of(one) == content_digest_of(other)


def test_the_digest_does_not_depend_on_what_is_written_beside_it() -> None:
    alone = content_digest_of(sample())
    others = [
        Experience(tokens=[1, 2], routed_experts=torch.zeros(2, 2)),
        sample(7, logprobs=None),
        sample(action_mask=[1, 1]),
    ]
    assert encode_experiences([*others, sample()]).meta.digest[-1] == alone


CHANGES: dict[str, Any] = {
    "tokens": torch.tensor([1, 2, 3, 5], dtype=torch.int32),
    "token dtype": {"tokens": torch.tensor([1, 2, 3, 4])},
    "prompt_length": {"prompt_length": 1, "logprobs": [-0.5, -0.25], "action_mask": None},
    "logprobs": [-0.5, -0.125],
    "no logprobs": {"logprobs": None},
    "reward": 0.0,
    "reward type": {"reward": 1},
    "no reward": {"reward": None},
    "token_level_reward": [0, 1],
    "advantages": [0.5, 0.5],
    "returns": [0.5, 0.5],
    "teacher_logprobs": [-0.5, -0.25],
    "action_mask": [1, 0],
    "the same mask, given": {"action_mask": [1, 1]},
    "truncate_status": "response_truncated",
    "info": {"model_version": 4},
    "response_text": "c e",
    "moved text": {"response_text": None, "prompt_text": "c d"},
    "prompt_text": "a",
    "messages": [{"role": "user"}],
    "tools": [{}],
    "chosen_messages": [{}],
    "rejected_messages": [{}],
    "chosen": [1],
    "rejected": [1],
    "multi_modal_inputs": {"pixels": [1.0]},
    "routed_experts": [[1]],
    "custom_fields": [CustomField("a", "b", torch.bool)],
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_digest_tells_any_other_content_apart(name: str) -> None:
    change = CHANGES[name]
    changed = change if " " in name or name == "prompt_length" else {name: change}
    assert content_digest_of(sample(**changed)) != content_digest_of(sample())


def test_every_field_has_its_change() -> None:
    assert set(FIELDS) - {"metrics"} <= set(CHANGES)


def test_text_and_tensors_cannot_be_moved_from_one_field_to_the_next() -> None:
    one = sample(token_level_reward=[0.5, 0.5], advantages=None)
    other = sample(token_level_reward=None, advantages=[0.5, 0.5])
    assert content_digest_of(one) != content_digest_of(other)


def test_an_unknown_kind_of_experience_is_a_codec_error() -> None:
    meta = encode_experiences([sample(), sample(1)]).meta
    with pytest.raises(CodecError, match="unknown kind"):
        decode_experiences({}, structs.replace(meta, kind=["dpo", "pair"]))


@pytest.mark.parametrize("slots", [[2], [-1], [0, 99]])
def test_a_slot_that_is_not_there_is_a_codec_error(slots: list[int]) -> None:
    with pytest.raises(CodecError, match="slots"):
        decode_experiences({}, encode_experiences([sample(), sample(1)]).meta, slots)


@pytest.mark.parametrize(
    ("family", "objects", "rows", "sentence"),
    [
        ("light", {}, 2, "has 2 rows, its event has 1"),
        ("light", {"response_text": ["x"]}, 1, "not belong to it"),
        ("light", {"tokens": ["x"]}, 1, "not belong to it"),
        ("light", {"info": [[1]]}, 1, "info of .* is a list, not a dict"),
        ("light", {"custom_fields": [[["a", "b", ["c"]]]]}, 1, "invalid entry"),
        ("heavy", {"multi_modal_inputs": [["x"]]}, 1, "missing tensors"),
        ("heavy", {"multi_modal_inputs": [[["x"]]]}, 1, "missing tensors"),
        ("weights", {}, 1, r"families \['weights'\] do not exist"),
    ],
)
def test_a_segment_that_does_not_belong_to_its_event_is_a_codec_error(
    family: str, objects: Any, rows: Any, sentence: str
) -> None:
    meta = encode_experiences([sample()]).meta
    with pytest.raises(CodecError, match=sentence):
        decode_experiences({family: encode_segment([], objects, rows)}, meta)
