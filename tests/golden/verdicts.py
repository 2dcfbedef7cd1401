"""From a case to a verdict: the differences that count."""

from __future__ import annotations

import builtins
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.golden.cases import Case
from tests.golden.comparing import compare, to_np
from tests.golden.runners import run


def unexpected(out: SimpleNamespace) -> list[str]:
    return [f"raised {type(out.error).__name__}: {str(out.error)[:120]}"] if out.error else []


def refused(
    out: SimpleNamespace, pattern: str = "", types: tuple[type[BaseException], ...] = (ValueError,)
) -> list[str]:
    """The input must be refused: right type, message that names the culprit, nothing written."""
    want = " or ".join(t.__name__ for t in types) + (f" naming /{pattern}/" if pattern else "")
    if not isinstance(out.error, types) or not re.search(pattern, str(out.error), re.IGNORECASE):
        return [f"{(unexpected(out) or ['no error'])[0]}, expected {want}"]
    return [f"refused after {len(out.writes)} writes"] if out.writes else []


def plain(case: Case, out: SimpleNamespace | None = None, **kw: Any) -> list[str]:
    """The default verdict: same outputs, or refused like the reference."""
    out = out or run(case)
    if case.raises:
        return refused(out, types=tuple({getattr(builtins, case.raises["type"]), ValueError}))
    return unexpected(out) or compare(case, out.value, **kw)


def finite(path: str, *values: Any) -> list[str]:
    return [
        f"{path}: not finite" for v in values if v is not None and not np.isfinite(to_np(v)).all()
    ][:1]


def either(*verdicts: Callable[[], list[str]]) -> list[str]:
    """Passes if one of the alternatives passes; reports the first one otherwise."""
    tried = [v() for v in verdicts]
    return [] if [] in tried else tried[0]
