"""A fact becomes the bytes that it always was, and comes back."""

from __future__ import annotations

import gzip
import re
from contextlib import closing
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pysqlite3 import dbapi2

from tests.migration.kept import STORES
from trinity_buffer.codec.objects import decode_fact, encode_body, new_event
from trinity_buffer.errors import CodecError
from trinity_buffer.events import (
    KINDS,
    BatchSealed,
    ExperienceColumns,
    ExperiencesRejected,
    Fact,
    UnknownEvent,
    body_of,
)

PAGE = (Path(__file__).parents[1] / "docs" / "events.md").read_text()


def decoded(kind: str, body: dict[str, Any]) -> Fact:
    return decode_fact(kind, encode_body(kind, body))


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, bytes]]:
    """Return kind and body of every event of the kept stores of each revision."""
    folder, bodies = tmp_path_factory.mktemp("kept"), []
    for packed in sorted(STORES.glob("0*.db.gz")):
        file = folder / packed.stem
        file.write_bytes(gzip.decompress(packed.read_bytes()))
        with closing(dbapi2.connect(str(file))) as connection:
            bodies += connection.execute("SELECT kind, body FROM event").fetchall()
    return bodies


def test_the_bytes_of_older_revisions_are_those_of_today(stored: list[tuple[str, bytes]]) -> None:
    kinds = set()
    for kind, blob in stored:
        fact = decode_fact(kind, blob)
        assert type(fact).__name__ == kind
        assert not isinstance(fact, UnknownEvent)
        assert new_event(fact).encoded == blob, kind
        kinds.add(kind)
    assert len(kinds) >= 10


def test_an_optional_field_is_left_out_where_it_says_nothing() -> None:
    of_trainer = ExperiencesRejected(
        consumer="t", by="trainer", experiences=[1], reasons=["stale"], planned_groups=1
    )
    assert list(body_of(of_trainer)) == [
        "consumer", "by", "experiences", "reasons", "planned_groups",
    ]  # fmt: skip
    assert decoded("ExperiencesRejected", body_of(of_trainer)) == of_trainer


def test_a_cursor_at_zero_is_said() -> None:
    first = ExperiencesRejected(
        consumer="s", seen=0, calls=0, after=0, by="strategy", experiences=[], reasons=[],
        planned_groups=0,
    )  # fmt: skip
    assert body_of(first)["after"] == 0


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_body_without_a_field_is_damaged(kind: str) -> None:
    with pytest.raises(CodecError, match=f"{kind} is damaged: .* missing required field"):
        decoded(kind, {})


COLUMNS: dict[str, list[Any]] = {name: [] for name in get_type_hints(ExperienceColumns)}


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        ({name: [] for name in COLUMNS if name != "digest"}, "missing required field `digest`"),
        ({**COLUMNS, "run": [0]}, "columns differ in length"),
        ({name: ["x"] for name in COLUMNS}, "Expected `int`, got `str` - at `$.meta.run[0]`"),
        ({**COLUMNS, "reward": None}, "Expected `array`, got `null` - at `$.meta.reward`"),
    ],
)
def test_columns_that_are_missing_or_uneven_or_of_another_type_are_damaged(
    columns: dict[str, list[Any]], why: str
) -> None:
    body = {"segment": b"", "families": {}, "meta": columns, "refused": {}}
    with pytest.raises(CodecError, match=re.escape(why)):
        decoded("ExperiencesRecorded", body)


def test_a_column_that_is_not_known_is_passed_over() -> None:
    body = {"segment": b"", "families": {}, "meta": {**COLUMNS, "later": []}, "refused": {}}
    fact = decoded("ExperiencesRecorded", body)
    assert body_of(fact) == {**body, "meta": COLUMNS}


def test_a_value_of_another_type_is_damaged() -> None:
    with pytest.raises(
        CodecError, match=r"BatchSealed is damaged: Expected `int`, got `str` - at `\$.expected`"
    ):
        decoded("BatchSealed", {"batch": "b", "expected": "2"})


@given(st.dictionaries(st.text(min_size=1).filter(lambda key: key != "v"), st.integers()))
def test_an_unknown_kind_is_passed_over_whole(body: dict[str, int]) -> None:
    assert decoded("SomethingNew", body) == UnknownEvent(kind="SomethingNew", body=body)


def test_a_key_that_is_not_known_is_passed_over() -> None:
    body = {"batch": "b", "expected": 2, "later": 1}
    assert decoded("BatchSealed", body) == BatchSealed(batch="b", expected=2)


def test_the_page_has_a_row_for_each_kind_and_no_other() -> None:
    assert set(re.findall(r"^\| `([A-Z]\w+)` \|", PAGE, re.MULTILINE)) == set(KINDS)
