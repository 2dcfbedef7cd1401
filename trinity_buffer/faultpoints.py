"""Named places at which a test may kill the process. Nothing happens unless the environment asks.

``TRINITY_BUFFER_CRASH_AT=after-append:3`` kills the process (SIGKILL, as the kernel's memory killer
would) when it reaches ``after-append`` for the third time. Without the variable, `reached` is a
function that does nothing.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

VARIABLE = "TRINITY_BUFFER_CRASH_AT"

CRASH_POINTS = (
    "before-plan",
    "after-plan",
    "before-append",
    "inside-append",
    "after-append",
    "before-annotate",
    "inside-annotate",
    "after-annotate",
    "before-lease",
    "inside-lease",
    "after-lease",
    "before-step",
    "after-step",
    "before-checkpoint",
    "after-checkpoint",
    "before-commit",
    "inside-commit",
    "after-commit",
    "before-compact",
    "inside-compact",
    "after-compact",
)


def nothing(point: str) -> None:
    """Pass: no crash was asked for."""


def armed(wanted: str, last_words: Callable[[str], None] = nothing) -> Callable[[str], None]:
    """Return a function that kills the process at ``wanted``, such as ``after-append:3``.

    Args:
        last_words: called with the place just before.
    """
    name, _, count = wanted.partition(":")
    if name not in CRASH_POINTS:
        raise ValueError(
            f"{VARIABLE}={wanted}: there is no crash point {name!r}; there are "
            f"{', '.join(CRASH_POINTS)}"
        )
    left = int(count or 1)

    def count_down(point: str) -> None:
        nonlocal left
        if point == name:
            left -= 1
            if left == 0:
                last_words(point)
                os.kill(os.getpid(), signal.SIGKILL)

    return count_down


reached: Callable[[str], None] = (
    armed(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else nothing
)
"""Call it with the name of the place."""
