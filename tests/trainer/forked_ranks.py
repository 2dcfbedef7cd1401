"""Ranks are forked from a process that has imported what they need, besides what others do."""

from __future__ import annotations

from tests.crash.forking import CONTEXT, IMPORTED, said_by

__all__ = ["said_by"]

# Each has ``main``. transformers and FSDP take some seconds, in every process that imports them.
CONTEXT.set_forkserver_preload(
    [
        *IMPORTED,
        "tests.trainer.numbers_rank",
        "tests.trainer.rank_process",
        "tests.trainer.sharded_rank",
        "tests.trainer.wrapped_rank",
    ]
)
