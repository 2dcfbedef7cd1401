"""What a strategy writes is kept as it was written, and only that."""

from __future__ import annotations

import pytest

from tests.contract.making import group
from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.writer import StagedWriter


async def test_a_write_is_a_group_that_later_changes_of_the_list_leave_alone() -> None:
    writer, some = StagedWriter(), group(task=1)
    receipt = await writer.write_async(some)
    kept = list(some)
    some.clear()
    assert writer.groups == [kept]
    assert (receipt.written, receipt.duplicates, receipt.position) == (len(kept), 0, 0)
    assert receipt.uids == tuple(one.eid.uid for one in kept)


async def test_a_write_of_nothing_is_no_group() -> None:
    writer = StagedWriter()
    assert (await writer.write([])).uids == ()
    assert writer.groups == []


def test_rejections_add_up_in_their_order() -> None:
    writer, (first, second, *_) = StagedWriter(), group(task=1)
    writer.reject([first], "stale")
    writer.reject([second], "late")
    writer.reject([], "filtered")
    assert writer.rejections == [(first, "stale"), (second, "late")]


async def test_a_writer_without_plans_says_so() -> None:
    writer = StagedWriter()
    with pytest.raises(InvalidArgumentError, match="takes experiences, not plans"):
        await writer.plan("b", [1], 2)
    with pytest.raises(InvalidArgumentError, match="takes experiences, not plans"):
        await writer.missing("b")
    with pytest.raises(InvalidArgumentError, match="takes experiences, not plans"):
        await writer.seal("b", 1)
