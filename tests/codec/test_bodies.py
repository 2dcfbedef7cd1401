from __future__ import annotations

import subprocess
import sys
from datetime import date
from decimal import Decimal
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity_buffer import events
from trinity_buffer.codec.objects import (
    decode_body,
    decode_fact,
    encode_body,
    new_event,
    unpack_object,
)
from trinity_buffer.errors import CodecError, CodecVersionError, InvalidArgumentError


@given(st.dictionaries(st.text(min_size=2), st.lists(st.integers())))
def test_a_body_comes_back(body: dict[str, list[int]]) -> None:
    assert decode_body("BatchPlanned", encode_body("BatchPlanned", body)) == body


def test_the_version_is_in_every_body_and_not_in_the_result() -> None:
    blob = encode_body("BatchSealed", {"batch": "e0-7"})
    assert unpack_object(blob) == {"v": 1, "batch": "e0-7"}
    assert decode_body("BatchSealed", blob) == {"batch": "e0-7"}


def test_a_body_may_not_use_the_key_of_its_version() -> None:
    with pytest.raises(InvalidArgumentError, match="'v'"):
        encode_body("BatchSealed", {"v": 2})


def test_a_value_that_cannot_be_stored_is_named_with_its_event() -> None:
    with pytest.raises(InvalidArgumentError, match=r"the body of BatchSealed\['by'\]"):
        encode_body("BatchSealed", {"by": object()})


@pytest.mark.parametrize("value", [(1, 2), {"betas": [(0.9, 0.99)]}, {1: 2}, {"a": 2**70}])
def test_values_of_users_come_back_with_their_types(value: object) -> None:
    fact = events.ExperimentCreated(config={"extra": value})
    back = decode_fact("ExperimentCreated", new_event(fact).encoded)
    assert repr(back) == repr(fact)


@pytest.mark.parametrize("value", [{1}, date(2026, 1, 1), Decimal(1), {1.5: 1}, {None: 1}])
def test_what_would_come_back_as_something_else_is_refused(value: object) -> None:
    with pytest.raises(InvalidArgumentError, match=r"ExperimentCreated\['config'\]\['extra'\]"):
        new_event(events.ExperimentCreated(config={"extra": value}))


def test_a_reward_of_numpy_that_an_older_version_wrote_is_read() -> None:
    names = events.ExperienceColumns.__struct_fields__
    row = ["b", 0, 0, 0, "", np.float64(0.5), 0, 1, 2, 1, 1, "dpo", None, b"d"]
    values: dict[str, Any] = {name: [value] for name, value in zip(names, row, strict=True)}
    columns = events.ExperienceColumns(**values)
    fact = events.ExperiencesRecorded(segment=b"k", families={}, columns=columns, refused={})
    back = decode_fact("ExperiencesRecorded", new_event(fact).encoded)
    assert repr(back) == repr(fact)  # its digest is of this type


def renamed(monkeypatch: pytest.MonkeyPatch, *, version: int) -> None:
    """Let there be a kind of event whose bodies are of ``version`` today."""
    kind = msgspec.defstruct("Renamed", [], bases=(events.EventBody,), tag=version)
    monkeypatch.setattr(events, "KINDS", {**events.KINDS, "Renamed": kind})


def test_an_old_body_climbs_all_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    old = encode_body("Renamed", {"name": "sort"})
    renamed(monkeypatch, version=3)
    monkeypatch.setitem(events.UPCASTERS, ("Renamed", 1), lambda b: {**b, "from": None})
    monkeypatch.setitem(events.UPCASTERS, ("Renamed", 2), lambda b: {"to": b["name"], **b})
    assert decode_body("Renamed", old) == {"to": "sort", "name": "sort", "from": None}
    new = encode_body("Renamed", {"to": "count"})
    assert decode_body("Renamed", new) == {"to": "count"}


def test_a_damaged_old_body_is_a_codec_error(monkeypatch: pytest.MonkeyPatch) -> None:
    old = encode_body("Renamed", {})
    renamed(monkeypatch, version=2)
    monkeypatch.setitem(events.UPCASTERS, ("Renamed", 1), lambda b: {"to": b["name"]})
    with pytest.raises(
        CodecError, match="event Renamed of version 1 cannot be brought to version 2"
    ):
        decode_body("Renamed", old)


def test_a_newer_body_says_upgrade(monkeypatch: pytest.MonkeyPatch) -> None:
    renamed(monkeypatch, version=2)
    new = encode_body("Renamed", {})
    monkeypatch.undo()
    with pytest.raises(CodecVersionError, match=r"Renamed has version 2.*upgrade trinity-buffer"):
        decode_body("Renamed", new)


@pytest.mark.parametrize(
    "blob", [b"", b"\x90", b"\x80", b"\x81\xa1v\xa1x", b"\x81\xa1v\x00", b"\x81\xa1v\xc3"]
)
def test_what_is_no_body_is_a_codec_error(blob: bytes) -> None:
    with pytest.raises(CodecError):
        decode_body("BatchSealed", blob)


AT_ONCE = """
import sys, threading
from trinity_buffer.codec import objects
from trinity_buffer.events import ExperienceColumns, ExperiencesRecorded, kind_of

columns = ExperienceColumns(**{name: [] for name in ExperienceColumns.__struct_fields__})
fact = ExperiencesRecorded(segment=b"k" * 16, families={}, columns=columns, refused={})
body = objects.new_event(fact).encoded
halfway, ended = threading.Event(), threading.Event()
looks = []

def pause(frame, event, _):
    # msgspec looks at the event first, and within it at its columns.
    if event == "call" and frame.f_code.co_name == "get_class_annotations":
        looks.append(frame)
        if len(looks) == 2:
            halfway.set()
            ended.wait(0.5)

def first():
    sys.setprofile(pause)
    objects.decode_fact(kind_of(fact), body)

def second():
    halfway.wait()
    objects.decode_fact(kind_of(fact), body)
    ended.set()

threads = [threading.Thread(target=run) for run in (first, second)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert len(looks) >= 2, looks
"""


def test_two_threads_may_decode_the_first_event_of_a_kind_at_once() -> None:
    subprocess.run([sys.executable, "-c", AT_ONCE], check=True)


BEFORE = """
import sys
from trinity_buffer.codec.segments import decode_segment, encode_segment

looks = []

def look(frame, event, _):
    if event == "call" and frame.f_code.co_name == "get_class_annotations":
        looks.append(frame)

blob = encode_segment([], {}, 0)
sys.setprofile(look)
decode_segment(blob)
assert not looks
"""


def test_the_header_of_a_segment_is_known_before_any_thread_decodes_one() -> None:
    subprocess.run([sys.executable, "-c", BEFORE], check=True)
