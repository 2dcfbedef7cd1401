"""Print docs/configuration.md: every key of a run's configuration, from the classes that read it.

python tools/configuration_page.py > docs/configuration.md
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, get_type_hints

from trinity_buffer.options import Options, section_of
from trinity_buffer.pipeline.config import RunConfig

UNITS = {
    r".*_s": "seconds",
    r".*_steps": "gradient steps",
    r"groups_per_.*|max_queued_groups": "groups",
    r"rollouts_per_group": "rollouts",
    r"max_staleness": "policy versions",
    r"tokens_per_microbatch|(explorer\.)?max_tokens": "tokens",
    r"evaluation\.num_eval_samples": "problems",
    r"evaluation\.target_accuracy|optimizer\.min_lr_ratio": "fraction",
}
"""Pattern of a key -> what its number counts."""

HEAD = """# Configuration

What a file for `--config` may hold (YAML if its name ends with `.yaml` or `.yml`, else TOML), and
what `--set KEY=VALUE` changes in `trinity-buffer demo`, `explore`, `train` and `replay`. A file may
also name the `store` of the run (a URL, or a path relative to the file's folder) and its
`experiment`, all that `replay`, `annotate` and `sync-weights` read of it. A dot stands for a
section: `optimizer.learning_rate` is `learning_rate` in `[optimizer]`. The resolved configuration
is the first event of the experiment (`trinity-buffer stats --config`); a later change is an event.

A key that is left out keeps what is recorded, since several programs share an experiment; `explore`
and `train` name what their file leaves out. To lift a bound, give `null` where the table has it:
`--set max_steps=null`, `max_steps: null` in YAML, `None` in Python (TOML has no null).

An experiment that you create in Python takes the same keys, and `schema`. An unknown key is
refused, with a suggestion if a known one is similar; put keys of your own under `extra`. `trainer`
must not contain a slash. `store.experiment(NAME, config=...)` records a change at once: a strategy,
a stream or a plan that then refuses to go on with it leaves it recorded (as a
`ConfigurationChanged` event), until you give the earlier value again. These functions read the
configuration, and check what they read; a keyword argument takes precedence.

- `run_strategy`: `rollouts_per_group`, `group_timeout_s`, `idle_s`, `on_incomplete_group`
- a train stream: `groups_per_step`, `tokens_per_microbatch`, `layout`, `lease_ttl_s`
- `writer.plan`: `trainer`, `groups_per_step`, `max_queued_groups` (at least `groups_per_step`) and
  `max_staleness`; without the last two there is no bound
- all three: `max_rejected_steps`, with `groups_per_step`
- `tb.explore`: `groups_per_batch`, `rollouts_per_group`

The defaults below are those of the commands; the demo's recipes change some of them. `explorer`
and `max_tokens` only apply to a run with your own model, `task` only to the demo's tasks.

| key | type | default | meaning |
|---|---|---|---|
"""


def page() -> str:
    """Return the text of the page."""
    return HEAD + "".join(f"| {' | '.join(row)} |\n" for row in _rows(RunConfig, ""))


def _meanings(options: type[Options]) -> dict[str, str]:
    """Return what stands below each option, where it is declared, in one line."""
    meanings: dict[str, str] = {}
    for declared in reversed(options.__mro__[:-1]):
        (definition,) = ast.parse(inspect.getsource(declared)).body
        assert isinstance(definition, ast.ClassDef)
        meanings |= {
            field.target.id: " ".join(str(below.value.value).split())
            for field, below in pairwise(definition.body)
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
            if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        }
    return meanings


def _rows(options: type[Options], prefix: str) -> Iterator[tuple[str, ...]]:
    meanings, usual = _meanings(options), options()
    for name, kind in get_type_hints(options).items():
        if name == "configured":
            continue
        key, inner = prefix + name, section_of(kind)
        if inner is not None:
            yield from _rows(inner, f"{key}.")
        if inner is None:
            yield (f"`{key}`", _type(kind, key), _shown(getattr(usual, name)), meanings[name])
        elif inner is not kind:
            yield (f"`{key}`", "str", "", f"in place of the section: {meanings[name]}")


def _type(kind: Any, key: str) -> str:
    unit = next((f", {unit}" for pattern, unit in UNITS.items() if re.fullmatch(pattern, key)), "")
    if isinstance(kind, type) and not hasattr(kind, "__args__"):
        return f"{kind.__name__}{unit}"
    text = re.sub(r"typing\.|Literal\[(.*)\]", r"\1", str(kind))
    text = re.sub(r"Optional\[(.*)\]", r"\1 | None", text).replace("None", "null")
    return text.replace(" | ", " or ").replace("'", "`") + unit


def _shown(value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return "null" if value is None else f"`{text}`"


if __name__ == "__main__":
    sys.stdout.write(page())
