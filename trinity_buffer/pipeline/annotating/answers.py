"""What a strategy, which may be the user's own, answers: checked, and noted where it goes wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager


@contextmanager
def noting(strategy: str, uid: Callable[[], str]) -> Iterator[None]:
    """Note on an error inside the context which strategy raised it, and at which experiences.

    Args:
        strategy: name of the annotation set.
        uid: returns the name of the first experience; asked only then.
    """
    try:
        yield
    except Exception as error:
        error.add_note(
            f"in strategy {strategy!r}, which was given {uid()} first; nothing of it is committed"
        )
        raise


def metrics_of(answer: object) -> dict[str, float]:
    """Return the metrics of what ``add`` returned.

    Raises:
        TypeError: it is not a number and a mapping of numbers.
    """
    if not (isinstance(answer, Sequence) and len(answer) == 2 and isinstance(answer[1], Mapping)):
        raise TypeError(
            f"`add` returned {_short(answer)}: it must return how many experiences it wrote and a "
            "mapping of metrics, as in `return len(kept), {}`"
        )
    return {name: _number(name, value) for name, value in answer[1].items()}


def _number(name: str, value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise TypeError(
            f"`add` returned {_short(value)} as metric {name!r}: it must be a number"
        ) from None


def _short(value: object) -> str:
    """Return the type and the beginning of ``value``."""
    return f"{type(value).__name__} {value!r:.60}" if value is not None else "None"
