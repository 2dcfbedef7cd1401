"""Bytes of unknown origin: only `CodecError` may come of them, in bounded memory and time."""

from __future__ import annotations

import random
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
import torch
from msgspec import structs

from tests.raw_store import decode_experiences, encode_experiences
from trinity_buffer.codec.objects import ObjectPacker, decode_fact, encode_body, unpack_object
from trinity_buffer.codec.segments import decode_segment
from trinity_buffer.errors import CodecError
from trinity_buffer.events import ExperienceColumns, ExperiencesRecorded
from trinity_buffer.experience import EID, FAMILIES, CustomField, Experience
from trinity_buffer.pipeline.encoding import encode_annotations
from trinity_buffer.pipeline.load.columns import block_of

KIND = "ExperiencesRecorded"


Read = Callable[[bytes | bytearray], object]


def samples() -> list[Experience]:
    """Experiences that use every field, so that a mutation can hit any part of the format."""
    turn = Experience(
        eid=EID("e0-7", 1),
        tokens=[1, 2, 3, 4],
        prompt_length=2,
        action_mask=[1, 0],
        logprobs=[-0.5, -0.25],
        reward=1.0,
        token_level_reward=[0, 1],
        advantages=[0.5, 0.0],
        returns=[0.5, 0.0],
        info={"model_version": 3, "t": (1, [2**70]), "n": np.float32(1), "x": torch.zeros(2)},
        metrics={"m": 0.5},
        response_text="c d",
        messages=[{"role": "user", "content": "q"}],
        multi_modal_inputs={"pixels": torch.zeros(2, 3), "bits": torch.zeros(1).bfloat16()},
        routed_experts=[[[1]], [[2]], [[3]]],
        custom_fields=[CustomField("a", "b", torch.bool)],
    )
    pair = Experience(eid=EID("e0-7", "x"), tokens=[1], chosen=[2], rejected=[3, 4])
    return [turn, pair, Experience(eid=EID("e0-7", 2), tokens=torch.arange(3))]


def mutated(blob: bytes, draw: random.Random) -> bytearray:
    """Return ``blob`` with up to three mutations: bytes, a number, a cut, a copy, a type."""
    data = bytearray(blob)
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(data)) if data else 0
        match draw.randrange(6):
            case 0:
                data[at : at + 1] = draw.randbytes(1)
            case 1:
                data[at : at + draw.randint(1, 8)] = draw.randbytes(draw.randint(0, 8))
            case 2:
                data[at : at + 4] = draw.choice([b"\xff" * 4, bytes(4), b"\x7f\xff\xff\xff"])
            case 3:
                del data[at:]
            case 4:
                data[at:at] = data[draw.randrange(len(data)) if data else 0 :][
                    : draw.randint(1, 64)
                ]
            case 5:
                data[at : at + 1] = bytes([draw.choice([0xC0, 0xC1, 0xDD, 0xDF, 0xC9, 0xD9, 0x80])])
    return bytearray(data)


def read_segment(family: str, meta: ExperienceColumns) -> Read:
    def read(blob: bytes | bytearray) -> None:
        for experience in decode_experiences({family: blob}, meta):
            assert experience.eid.batch == "e0-7"

    return read


def read_body(blob: bytes | bytearray) -> None:
    fact = decode_fact(KIND, blob)
    assert isinstance(fact, ExperiencesRecorded)
    decode_experiences({}, fact.columns)


def read_columns(blob: bytes | bytearray) -> None:
    segment = decode_segment(blob)
    for columns in segment.columns.values():
        for column in columns:
            assert len(column.elements) == column.offsets[-1]
            if column.shapes.shape[1] == 1 or column.encoding == "scaled_mask":
                block = block_of(column, np.arange(3), range(3))
                assert block is None or len(block.values()) == len(block.rows)
    for values in segment.objects.values():
        values.values(range(len(values)))


def targets() -> list[tuple[bytes, Read]]:
    given = samples()
    write = encode_experiences(given)
    blobs = {family: b"".join(blob) for family, blob in write.families.items()}
    body = encode_body(
        KIND, {"meta": structs.asdict(write.meta), "segment": b"key", "families": {}, "refused": {}}
    )
    return [
        *((blob, read_segment(family, write.meta)) for family, blob in blobs.items()),
        *((blob, read_columns) for blob in blobs.values()),
        (body, read_body),
        (encode_annotations(given), read_columns),
    ]


def fuzz(mutations: int, seed: int) -> int:
    """Return how many mutations were refused; anything else than a `CodecError` gets out."""
    draw, refused = random.Random(seed), 0
    every = targets()
    for number in range(mutations):
        blob, read = every[number % len(every)]
        damaged = mutated(blob, draw)
        try:
            read(damaged)
        except CodecError:
            refused += 1
    return refused


def test_the_samples_use_every_family_and_can_be_read() -> None:
    assert set(encode_experiences(samples()).families) == set(FAMILIES)
    for blob, read in targets():
        read(bytearray(blob))


@pytest.mark.parametrize("seed", range(4))
def test_a_mutated_blob_is_read_or_refused(seed: int) -> None:
    assert fuzz(2500, seed) > 1000


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 102))
def test_a_hundred_thousand_mutated_blobs_are_read_or_refused(seed: int) -> None:
    assert fuzz(50_000, seed) > 20_000


def test_random_bytes_are_refused() -> None:
    draw = random.Random(0)
    for _ in range(2000):
        blob = draw.randbytes(draw.randrange(60))
        with pytest.raises(CodecError):
            decode_segment(b"\x94\xce" + blob)
        with pytest.raises(CodecError):
            decode_fact(KIND, b"\xc1" + blob)


CLAIMS = [
    b"\x94\xce\xff\xff\xff\xff" + bytes(34),
    b"\x94\xce\x00\x00\x00\x05\xdd\xff\xff\xff\xff\xc6\x00\x00\x00\x00\xc6\x00\x00\x00\x00",
    b"\x94\xce\x00\x00\x00\x00\xc6\xff\xff\xff\xff" + bytes(29),
    b"\xdd\xe8\xd4\xa5\x10" + bytes(35),
    b"\xdf\xe8\xd4\xa5\x10" + bytes(35),
    b"\xc9\xff\xff\xff\xff\x01" + bytes(34),
    b"\xdd\x00\x00\x00\x20" * 8,
]


@pytest.mark.parametrize("blob", CLAIMS)
@pytest.mark.parametrize("decode", [decode_segment, unpack_object])
def test_forty_bytes_that_claim_a_trillion_elements_allocate_nothing(
    blob: bytes, decode: Read
) -> None:
    assert len(blob) <= 40
    tracemalloc.start()
    try:
        with pytest.raises(CodecError):
            decode(blob)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 100_000


def test_a_header_that_claims_a_trillion_rows_allocates_nothing() -> None:
    head = ObjectPacker().pack(
        {
            "v": 1,
            "rows": 10**12,
            "columns": [["x", "int64", "raw", None, 2, b"\xff" * 16, 0, 0]],
            "objects": [["o", 0, 0]],
            "aliases": {},
        },
        "header",
    )
    filler = -(6 + len(head) + 10) % 64
    parts = [b"\x94\xce", len(head).to_bytes(4, "big"), head, b"\xc6", filler.to_bytes(4, "big")]
    blob = b"".join([*parts, bytes(filler), b"\xc6" + bytes(4)])
    tracemalloc.start()
    try:
        with pytest.raises(CodecError, match="'x'"):
            decode_segment(blob)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 100_000


@pytest.mark.parametrize("opening", [b"\x91", b"\x81\x01", b"\xc7\xff\x01", b"\xd4\x01"])
def test_deep_nesting_ends_soon(opening: bytes) -> None:
    blob = opening * 100_000
    begin = time.perf_counter()
    with pytest.raises(CodecError):
        unpack_object(blob)
    assert time.perf_counter() - begin < 5


def test_an_error_about_a_deep_value_can_be_told() -> None:
    """The value in the wrong place is a list in a list in a list: its repr would not end well."""
    deep = b"\x91" * 900 + b"\xc0"
    head = b"\x85\xa1v\x01\xa4rows\x01\xa7columns\x91\x98\xa1x" + deep
    head += b"\xa3raw\xc0\x01\xc4\x00\x00\x00\xa7objects\x90\xa7aliases\x80"
    filler = -(6 + len(head) + 10) % 64
    parts = [b"\x94\xce", len(head).to_bytes(4, "big"), head, b"\xc6", filler.to_bytes(4, "big")]
    with pytest.raises(CodecError, match="its header has another form"):
        decode_segment(b"".join([*parts, bytes(filler), b"\xc6" + bytes(4)]))


def test_the_codec_needs_no_torch() -> None:
    code = "import sys, trinity_buffer.codec; raise SystemExit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
