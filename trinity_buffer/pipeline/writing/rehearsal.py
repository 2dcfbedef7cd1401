"""What an explorer goes through once before its first write: a group, into a store in memory."""

from __future__ import annotations

from functools import cache

import torch

from trinity_buffer.experience import Experience
from trinity_buffer.identity import EID
from trinity_buffer.pipeline.background import settle_imports
from trinity_buffer.pipeline.writing.group_commit import record
from trinity_buffer.pipeline.writing.write_call import WriteCall
from trinity_buffer.store import log, promises
from trinity_buffer.store.promises import PresenceRow
from trinity_buffer.store.scratch import Scratch, scratch
from trinity_buffer.store.transaction import Transaction, compile_for

NAME = "rehearsal"
RUNS = 4
"""Of the group that is written."""

_PROMPT, _TOKENS = 4, 12


@cache
def rehearse_writing(dialect: str) -> None:
    """Write a group to a store in memory, once in a process.

    Its first write would take ten times as long as the next (60 ms, not 4).

    Args:
        dialect: of the store that is written to.
    """
    with scratch() as s:
        written(s)
    compile_for(dialect)
    settle_imports()


def written(s: Scratch) -> int:
    """Write a group to an empty store in memory; return the key of its experiment."""
    key, store = s.write(log.create_experiment, NAME), s.database.segments
    with torch.device("cpu"):  # the process may have another default: a GPU takes seconds to begin
        rollouts = [_rollout(run) for run in range(RUNS)]
    write = WriteCall(rollouts, key, NAME, "experience", "raise").prepare()
    rows = [row for one, families in write.segments.items() for row in store.put(one, families)]

    def commit(tx: Transaction) -> None:
        store.take_in(tx, rows)
        record(tx, [write])
        promises.note_presence(tx, key, PresenceRow("explorer", NAME, NAME, 0, 0, 0, None))

    s.write(commit)
    return key


def _rollout(run: int) -> Experience:
    return Experience(
        eid=EID(NAME, 0, run),
        tokens=torch.arange(_TOKENS + run, dtype=torch.int32),
        prompt_length=_PROMPT,
        logprobs=torch.zeros(_TOKENS + run - _PROMPT),
        reward=float(run),
        response_text=NAME,
        info={"model_version": 0},
    )
