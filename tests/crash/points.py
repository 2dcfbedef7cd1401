"""Named places at which a test ends a process: set from outside, the package knows none of them.

``after-append:3`` kills the process (SIGKILL, as the kernel's memory killer would) when it reaches
``after-append`` for the third time.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from trinity_buffer.store.transaction import Session
from trinity_buffer.trainer import checkpoint

VARIABLE = "TRINITY_BUFFER_CRASH_AT"
"""Of the environment of a demo whose processes are forked: where each is killed."""

TRANSACTIONS = {
    "trinity_buffer.pipeline.write.writer:SQLWriter.plan": "plan",
    "trinity_buffer.pipeline.write.writer:GroupCommit._append": "append",
    "trinity_buffer.pipeline.annotate.consumer:StrategyConsumer._commit": "annotate",
    "trinity_buffer.pipeline.coordination.lease:TrainerLease.append": "lease",
    "trinity_buffer.pipeline.train.stream:LeadingStream._commit": "commit",
    "trinity_buffer.pipeline.history.compact:_Compaction._delete": "compact",
}
"""What runs in a transaction, or makes what does -> the name of the transaction."""

CRASH_POINTS = (
    *(
        f"{where}-{name}"
        for name in TRANSACTIONS.values()
        for where in ("before", "inside", "after")
    ),
    *(f"{at}-{name}" for name in ("step", "checkpoint") for at in ("before", "after")),
)

Reached = Callable[[str], None]


def killing(wanted: str, last_words: Reached = lambda _: None) -> Reached:
    """Return a function that kills the process at ``wanted``, such as ``after-append:3``.

    Args:
        last_words: called with the place just before.
    """
    name, _, count = wanted.partition(":")
    assert name in CRASH_POINTS, name
    left = int(count or 1)

    def count_down(point: str) -> None:
        nonlocal left
        if point == name:
            left -= 1
            if left == 0:
                last_words(point)
                os.kill(os.getpid(), signal.SIGKILL)

    return count_down


def install(reached: Reached, patch: Callable[[object, str, Any], None] = setattr) -> None:
    """Let the package call ``reached`` with the name of each place, before it goes on."""
    write = Session.write

    def with_places(s: Session, f: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        maker = f.__qualname__.partition(".<locals>")[0] if hasattr(f, "__qualname__") else ""
        name = TRANSACTIONS.get(f"{f.__module__}:{maker}")
        if name is None:
            return write(s, f, *args, **kwargs)
        recorded = False

        def inside(tx: Any) -> Any:
            nonlocal recorded
            ends = dict(tx.appended)
            done = f(tx, *args, **kwargs)
            recorded = tx.appended != ends
            if recorded:
                reached(f"inside-{name}")
            return done

        reached(f"before-{name}")
        done = write(s, inside)
        if recorded:
            reached(f"after-{name}")
        return done

    begin, finish = checkpoint.begin, checkpoint.PendingCheckpoint.finish

    def with_begin(*args: Any) -> checkpoint.PendingCheckpoint:
        reached("before-checkpoint")
        return begin(*args)

    def with_finish(pending: checkpoint.PendingCheckpoint) -> Any:
        digests = finish(pending)
        reached("after-checkpoint")
        return digests

    patch(Session, "write", with_places)
    patch(checkpoint, "begin", with_begin)
    patch(checkpoint.PendingCheckpoint, "finish", with_finish)


def install_steps(reached: Reached) -> None:
    """Let every optimizer of this process call ``reached`` around its steps, to the end."""
    register_optimizer_step_pre_hook(lambda *_: reached("before-step"))
    register_optimizer_step_post_hook(lambda *_: reached("after-step"))
