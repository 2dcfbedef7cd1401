"""Keeps the groups that teach something, and repeats them until the batch is as large as it was."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY
from typing import Any, ClassVar, Literal

from typing_extensions import override

from trinity_buffer.algorithm.add_strategy.add_strategy import (
    ADD_STRATEGY,
    RewardVarianceAddStrategy,
)
from trinity_buffer.algorithm.arguments import configured
from trinity_buffer.algorithm.copies import copy_experience, copy_group
from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.experience import Experience

Group = list[Experience]


@ADD_STRATEGY.register_module("duplicate_informative")
@configured
class DuplicateInformativeAddStrategy(RewardVarianceAddStrategy):
    """Replaces uninformative groups by copies of informative ones (POLARIS, https://hkunlp.github.io/blog/2025/Polaris).

    Copies are whole groups, as evenly many of each as possible; each is a group of its own, under a
    task id that the batch does not have. Their ``info["copy_of"]`` names the original. No
    advantages are set.

    Args:
        writer: where the kept groups and their copies go.
        variance_threshold: groups with a population variance at or below it, and groups of one, are
            rejected.
        exact_size: cut the last copy, so that exactly as many experiences are written as came in;
            by default the last copy stays whole and the number may exceed that by less than one
            group.
        copy_ids: ``"fresh"``: ``task~c1`` and so on, with suffix ``c1``; ``"offset"``: the task
            plus a multiple of the number of groups, as the reference does, which collides where ids
            have gaps and fails for texts.
        seed: of the order in which groups are repeated; None draws from the global generator, as
            the reference does.
        rng: a generator in place of ``seed``.
        kwargs: the options of `RewardVarianceAddStrategy`.
    """

    unit: ClassVar[Literal["group", "batch"]] = "batch"
    reference_args = dict(RewardVarianceAddStrategy.reference_args, copy_ids="offset", seed=None)

    _: KW_ONLY
    exact_size: bool = False
    copy_ids: Literal["fresh", "offset"] = "fresh"
    seed: int | None = 0
    rng: random.Random | None = None

    @override
    async def add(self, experiences: list[Experience], step: int) -> tuple[int, dict[str, Any]]:
        """Write the informative groups, then their copies, a write each."""
        groups, informative, metrics = self.choose(experiences)
        written = [*informative, *self._copies(informative, groups, len(experiences))]
        if groups:
            metrics["copied_groups"] = len(written) - len(informative)
        return await self._write_groups(written), metrics

    def _copies(
        self, informative: Sequence[Group], groups: Sequence[Group], target: int
    ) -> Iterator[Group]:
        """Yield copies of ``kept`` until ``target`` experiences are written."""
        # Counted in experiences: groups may differ in size.
        written = sum(len(group) for group in informative)
        taken = {group[0].eid.tid for group in groups}
        draw: Any = self.rng or random
        if self.rng is None and self.seed is not None and groups:
            # Seeded by the batch: a restarted consumer must draw what the first one drew.
            draw = random.Random(f"{self.seed}/{groups[0][0].eid.tid}")
        queue: list[Group] = []
        turn = 0
        while informative and written < target:
            if not queue:
                # Each group once per turn: first from the end, then in random order.
                queue, turn = list(informative), turn + 1
                if turn > 1:
                    draw.shuffle(queue)
            source = queue.pop()
            # Cut only if asked to: statistics of a part of a group are others.
            room = target - written if self.exact_size else len(source)
            copied = self._copy(source[:room], turn, taken, len(groups))
            written += len(copied)
            yield copied

    def _copy(self, group: Group, turn: int, taken: set[str], num_groups: int) -> Group:
        """Return copies of ``group`` as a group of its own, under an id not in ``taken``."""
        if self.copy_ids == "fresh":
            return copy_group(group, taken, turn)
        task = group[0].eid.task
        if not isinstance(task, int):
            raise InvalidArgumentError(
                f"copy_ids='offset' needs whole numbers as task ids, not {task!r}; use "
                "copy_ids='fresh'"
            )
        task += turn * num_groups
        return [copy_experience(e, task=task, suffix=e.eid.suffix) for e in group]
