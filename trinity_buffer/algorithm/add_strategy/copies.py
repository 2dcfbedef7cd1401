"""Copies of experiences: annotation rows that point to their original, never copied tensors."""

from __future__ import annotations

import copy
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
    found = experience.info.get(COPY_OF)
    return None if found is None else str(found)


def copy_experience(experience: Experience, *, task: Key, suffix: str) -> Experience:
    """Return a copy under another task id, with an ``info`` of its own and the same tensors.

    A copy of a copy points to the first original.
    """
    made = copy.copy(experience)
    made.eid = replace(experience.eid, task=task, suffix=suffix)
    made.info = {**experience.info, COPY_OF: original_uid(experience) or experience.eid.uid}
    made.metrics = dict(experience.metrics)
    return made
