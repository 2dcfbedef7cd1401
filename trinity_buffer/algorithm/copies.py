"""Copies of experiences: annotation rows that point to their original, never copied tensors."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import replace

from trinity_buffer.experience import Experience
from trinity_buffer.identity import Key

COPY_OF = "copy_of"
"""Key of ``info`` under which a copy names the uid of its original.

The consumer stores what was computed for a copy beside the original's bytes; only the annotation is
new.
"""


def original_uid(experience: Experience) -> str | None:
    """Return the uid of what ``experience`` is a copy of, or None if it is an original."""
    uid = experience.info.get(COPY_OF)
    return None if uid is None else str(uid)


def left_out(before: Sequence[Experience], after: Sequence[Experience]) -> list[Experience]:
    """Return those of ``given`` of which neither they nor a copy are in ``kept``."""
    # A copy stands for its original: what was copied was not left out.
    known = {original_uid(e) or e.eid.uid for e in after} | {e.eid.uid for e in after}
    return [e for e in before if e.eid.uid not in known]


def copy_experience(experience: Experience, *, task: Key, suffix: str) -> Experience:
    """Return a copy under another task id, with an ``info`` of its own and the same tensors.

    A copy of a copy points to the first original.
    """
    made = copy.copy(experience)
    made.eid = replace(experience.eid, task=task, suffix=suffix)
    made.info = {**experience.info, COPY_OF: original_uid(experience) or experience.eid.uid}
    made.metrics = dict(experience.metrics)
    return made


def copy_group(group: Sequence[Experience], taken: set[str], start: int = 1) -> list[Experience]:
    """Return copies of ``group`` as a group of its own, under the first task id that is free.

    ``taken`` holds the ``batch/task`` ids in use and gets the new one.
    """
    eid = group[0].eid
    # Counted up until free: a task of a user's own may be called task~c1.
    number = next(n for n in itertools.count(start) if f"{eid.tid}~c{n}" not in taken)
    taken.add(f"{eid.tid}~c{number}")
    task = f"{eid.task}~c{number}"
    return [copy_experience(e, task=task, suffix=f"{e.eid.suffix}c{number}") for e in group]
