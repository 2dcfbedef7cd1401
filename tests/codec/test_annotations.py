from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from trinity_buffer.codec.segments import ANNOTATED, decode_segment
from trinity_buffer.experience import EID, Experience
from trinity_buffer.pipeline.encoding import encode_annotations, tensors_of


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


def round_trip(given_experiences: list[Experience]) -> list[dict[str, Tensor]]:
    """Return what is stored of each row: one number stands for its product with the mask."""
    segment = decode_segment(bytearray(encode_annotations(given_experiences)))
    found: list[dict[str, Tensor]] = [{} for _ in given_experiences]
    for field in ANNOTATED:
        for column in segment.columns.get(field, ()):
            for row, tensor in zip(column.places, tensors_of(column), strict=True):
                mask: Any = given_experiences[row].action_mask
                is_scaled = column.encoding == "scaled_mask"
                found[row][field] = tensor * mask.to(tensor.dtype) if is_scaled else tensor
    return found


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


@given(st.lists(annotated(), max_size=5))
def test_annotations_come_back_bit_for_bit(given_experiences: list[Experience]) -> None:
    for found, experience in zip(round_trip(given_experiences), given_experiences, strict=True):
        assert_same(found, experience)


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


def test_none_stays_none_and_pairs_need_no_mask() -> None:
    pair = Experience(tokens=[1], chosen=[2], rejected=[3])
    assert round_trip([pair]) == [{}]
