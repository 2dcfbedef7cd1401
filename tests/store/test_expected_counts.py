"""What `verify` expects of counters costs each event the same, however many batches there are."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest
from typing_extensions import override

from tests.sample_run import rollout
from trinity_buffer.events import ExperiencesRecorded
from trinity_buffer.pipeline.encoding import encode_experiences
from trinity_buffer.rollout_events import ExperienceColumns
from trinity_buffer.store.auditing.expected_counts import ExpectedCounts


class LookedUp(dict[str, dict[str, Any] | None]):
    """Batches in which each is looked up; going through them all is an error."""

    @override
    def __iter__(self) -> NoReturn:
        raise AssertionError("somebody goes through all batches")

    @override
    def keys(self) -> NoReturn:
        raise AssertionError("somebody goes through all batches")


@pytest.mark.parametrize("planned", [False, True])
def test_an_event_is_counted_without_a_look_at_the_other_batches(planned: bool) -> None:
    encoded = encode_experiences([rollout("e0-0", 0, run, 1.0) for run in range(2)])
    columns = ExperienceColumns(**encoded.meta)
    fact = ExperiencesRecorded(segment=b"k", families={}, columns=columns, refused={})
    row = {"rollouts_per_group": 2, "sealed_at": None, "stored_rollouts": None}
    counts = ExpectedCounts()
    counts.recorded(fact, LookedUp({"e0-0": row} if planned else {"other": row}))
    assert [row["number"] for row in counts.rows() if row["key"] == "recorded"] == [2]
