from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from tests.algorithm.strategies.rollouts import PlainWriter, group, rejected, rollout, written
from trinity_buffer.algorithm.add_strategy import DuplicateInformativeAddStrategy, original_uid
from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.experience import Experience
from trinity_buffer.writer import StagedWriter


def batch(num_informative: int, num_equal: int, size: int = 3) -> list[Experience]:
    """Return so many groups of each kind, with task ids that have gaps."""
    informative = [group([0.0, 1.0, 2.0][:size], task=7 * t) for t in range(num_informative)]
    equal = [group([1.0] * size, task=7 * t + 1) for t in range(num_equal)]
    return [e for some in informative + equal for e in some]


async def duplicated(exps: list[Experience], **arguments: Any) -> StagedWriter:
    writer = StagedWriter()
    await DuplicateInformativeAddStrategy(writer, **arguments).add(exps, 0)
    return writer


async def test_the_batch_is_filled_up_with_whole_copies_evenly() -> None:
    exps = batch(2, 5)
    writer = await duplicated(exps)
    sources = Counter(original_uid(e) or e.eid.uid for e in written(writer))
    assert len(written(writer)) == len(exps) == sum(sources.values())
    assert set(sources.values()) == {3, 4}
    assert all(len(some) == 3 for some in writer.groups)
    assert [reason for _, reason in rejected(writer)] == ["zero_variance"] * 15


async def test_every_uid_is_fresh_and_every_copy_names_its_original() -> None:
    writer = await duplicated(batch(2, 3))
    originals = {e.eid.uid for e in written(writer) if original_uid(e) is None}
    assert len({e.eid.uid for e in written(writer)}) == len(written(writer))
    copies = [e for e in written(writer) if original_uid(e) is not None]
    assert {original_uid(e) for e in copies} <= originals
    assert all(e.eid.suffix.startswith("c") and e.eid.batch == "b" for e in copies)
    assert len({e.eid.tid for e in copies}) == 3


async def test_a_copy_shares_the_tensors_and_keeps_an_info_of_its_own() -> None:
    exps = batch(1, 1)
    exps[0].info["prompt"] = "p"
    writer = await duplicated(exps)
    original, copy = writer.groups[0][0], writer.groups[1][0]
    assert copy.tokens is original.tokens
    assert copy.info == {"prompt": "p", "copy_of": original.eid.uid}
    assert "copy_of" not in original.info


async def test_text_ids_and_ids_that_look_like_copies_do_not_collide() -> None:
    exps = [*group([0.0, 1.0], "a"), *group([0.0, 1.0], "a~c1"), *group([1.0] * 8, "x")]
    writer = await duplicated(exps)
    assert len({e.eid.uid for e in written(writer)}) == len(written(writer)) == 12


async def test_a_last_copy_stays_whole_unless_the_size_is_to_be_exact() -> None:
    exps = [*group([0.0, 1.0, 2.0], "a"), *group([1.0, 1.0], "x")]
    assert len(written(await duplicated(exps))) == 6
    assert len(written(await duplicated(exps, exact_size=True))) == 5


async def test_the_same_batch_draws_the_same_copies_in_every_process() -> None:
    exps = batch(4, 9)
    first, second = await duplicated(exps), await duplicated(exps)
    assert [e.eid.uid for e in written(first)] == [e.eid.uid for e in written(second)]
    other = await duplicated(exps, seed=1)
    assert [e.eid.uid for e in written(first)] != [e.eid.uid for e in written(other)]


async def test_a_generator_of_ones_own_decides_the_order() -> None:
    exps = batch(4, 9)
    first = await duplicated(exps, rng=random.Random(3))
    second = await duplicated(exps, rng=random.Random(3))
    assert [e.eid.uid for e in written(first)] == [e.eid.uid for e in written(second)]


async def test_a_batch_without_anything_to_teach_is_left_empty() -> None:
    writer = await duplicated(batch(0, 3))
    assert written(writer) == []
    assert len(writer.rejections) == 9


async def test_the_references_ids_are_there_on_request_and_refuse_texts() -> None:
    exps = [*group([0.0, 1.0], 0), *group([1.0, 1.0], 1)]
    writer = await duplicated(exps, copy_ids="offset")
    assert [e.eid.task for e in written(writer)] == [0, 0, 2, 2]
    texts = [*group([0.0, 1.0], "a"), rollout("b")]
    with pytest.raises(InvalidArgumentError, match="'a'; use copy_ids='fresh'"):
        await DuplicateInformativeAddStrategy(PlainWriter(), copy_ids="offset").add(texts, 0)
