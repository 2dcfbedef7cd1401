from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from trinity_buffer.codec.segments import decode_segment
from trinity_buffer.errors import CodecError
from trinity_buffer.experience import EID, Experience
from trinity_buffer.pipeline.annotations import (
    decode_annotations,
    encode_annotations,
)


def bits(tensor: Tensor | None) -> tuple[torch.dtype, bytes] | None:
    return None if tensor is None else (tensor.dtype, bytes(tensor.view(torch.uint8).numpy()))


def scalars(blob: bytes, field: str = "advantages") -> list[float] | None:
    columns = decode_segment(blob).columns.get(field, [])
    if [(column.rows, column.encoding) for column in columns] != [(None, "scaled_mask")]:
        return None
    return list(map(float, columns[0].elements))


def scored(
    score: float | None,
    mask: Sequence[float] = (1, 0, 1),
    dtype: torch.dtype = torch.float32,
    mask_dtype: torch.dtype = torch.bool,
) -> Experience:
    weights = torch.tensor(mask).to(mask_dtype)
    e = Experience(eid=EID(), tokens=[1] * (len(mask) + 1), action_mask=weights)
    if score is not None:
        e.advantages = weights.to(dtype) * score
        e.returns = e.advantages.clone()
    return e


def round_trip(given_experiences: list[Experience], slots: list[int] | None = None) -> list[Any]:
    chosen = range(len(given_experiences)) if slots is None else slots
    masks = [given_experiences[slot].action_mask for slot in chosen]
    return decode_annotations(bytearray(encode_annotations(given_experiences)), slots, masks)


def assert_same(found: Any, experience: Experience) -> None:
    for field in ("advantages", "returns", "token_level_reward"):
        assert bits(found.get(field)) == bits(getattr(experience, field)), field


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32]
VALUES = st.floats(-1e4, 1e4, width=32)


@st.composite
def annotated(draw: st.DrawFn) -> Experience:
    """Experiences that are scaled masks, or nearly, or not at all."""
    mask = draw(st.lists(st.sampled_from([0, 1]), max_size=4))
    dtype, mask_dtype = draw(st.sampled_from(DTYPES)), draw(st.sampled_from([torch.bool, *DTYPES]))
    e = scored(draw(st.one_of(st.none(), VALUES)), mask, dtype, mask_dtype)
    for field in ("advantages", "returns", "token_level_reward"):
        if draw(st.integers(0, 3)) == 0:
            values = [draw(st.one_of(VALUES, st.just(-0.0), st.just(float("nan")))) for _ in mask]
            setattr(e, field, torch.tensor(values, dtype=torch.float64).to(torch.float32))
    return e


@given(st.lists(annotated(), max_size=5), st.data())
def test_annotations_come_back_bit_for_bit(
    given_experiences: list[Experience], data: st.DataObject
) -> None:
    rows = list(range(len(given_experiences)))
    some = st.lists(st.sampled_from(rows), max_size=5) if rows else st.just([])
    slots = data.draw(st.one_of(st.none(), some))
    found = round_trip(given_experiences, slots)
    order = range(len(given_experiences)) if slots is None else slots
    for slot, annotation in zip(order, found, strict=True):
        assert_same(annotation, given_experiences[slot])


def test_a_scaled_mask_is_one_number_and_equal_returns_are_none() -> None:
    given_experiences = [scored(i - 2.5, mask=[0] + [1] * 999) for i in range(8)]
    blob = encode_annotations(given_experiences)
    assert len(blob) < 500
    segment = decode_segment(blob)
    assert segment.aliases == {"returns": "advantages"}
    assert [c.encoding for c in segment.columns["advantages"]] == ["scaled_mask"]
    for field in ("advantages", "returns"):
        assert scalars(blob, field) == [i - 2.5 for i in range(8)]


def test_a_negative_score_keeps_the_sign_of_its_zeros() -> None:
    e = scored(-1.0)
    assert e.advantages is not None
    assert torch.signbit(e.advantages).all()
    assert_same(round_trip([e])[0], e)


def test_a_zero_of_the_other_sign_is_stored_in_full() -> None:
    e = scored(-1.0)
    e.advantages = torch.tensor([-1.0, 0.0, -1.0])
    assert scalars(encode_annotations([e])) is None
    assert_same(round_trip([e])[0], e)


def test_a_mask_of_weights_scales_too() -> None:
    e = scored(3.0, mask=(0.0, 0.5, 2.0), mask_dtype=torch.float32)
    assert scalars(encode_annotations([e])) == [3.0]


def test_a_mask_that_selects_nothing_is_a_multiple_of_zero() -> None:
    e = scored(3.0, mask=(0, 0))
    assert scalars(encode_annotations([e])) == [0.0]
    assert_same(round_trip([e])[0], e)


@pytest.mark.parametrize("other", [scored(None), "differs"])
def test_there_are_no_scalars_where_one_row_has_none(other: Any) -> None:
    if other == "differs":
        other = scored(1.0)
        other.advantages = torch.tensor([1.0, 0.0, 2.0])
    blob = encode_annotations([scored(1.0), other])
    assert scalars(blob) is None
    assert scalars(blob, "token_level_reward") is None


def test_returns_that_are_not_advantages_are_stored_apart() -> None:
    e = scored(1.0)
    e.returns = torch.tensor([0.5, 0.25, 0.125])
    found = round_trip([e])[0]
    assert found["advantages"].tolist() == [1.0, 0.0, 1.0]
    assert found["returns"].tolist() == [0.5, 0.25, 0.125]


def test_equal_returns_have_memory_of_their_own_when_they_come_back() -> None:
    for e in (scored(1.0), scored(1.0)):
        e.advantages = e.returns = torch.tensor([1.0, 2.0, 3.0])
        found = round_trip([e])[0]
        found["returns"][0] = 9.0
        assert found["advantages"][0] == 1.0


def test_none_stays_none_and_pairs_need_no_mask() -> None:
    pair = Experience(tokens=[1], chosen=[2], rejected=[3])
    assert decode_annotations(encode_annotations([pair]), None, [None]) == [
        {"advantages": None, "returns": None}
    ]


def test_a_scaled_mask_without_its_mask_is_a_codec_error() -> None:
    with pytest.raises(CodecError, match="advantages is stored as a multiple"):
        decode_annotations(encode_annotations([scored(1.0)]), None, [None])


@pytest.mark.parametrize(("slots", "masks"), [([1], 1), ([0], 2), (None, 0)])
def test_slots_and_masks_that_do_not_fit_are_a_codec_error(slots: Any, masks: Any) -> None:
    e = scored(1.0)
    with pytest.raises(CodecError, match="slots"):
        decode_annotations(encode_annotations([e]), slots, [e.action_mask] * masks)
