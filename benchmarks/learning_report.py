"""The table of what has learnt, and a plot of the curves of each family."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trinity_buffer.cli.demo_run import needs_of_run
from trinity_buffer.cli.run_config import resolved
from trinity_buffer.demo.recipes import RECIPES, DemoRecipe, config_for

Line = Mapping[str, Any]

HEAD = """# Does it learn?

Every registered algorithm trains a small transformer (two layers, random weights) on a task of the
demo, with the command `trinity-buffer demo --algorithm NAME`. Explorers, trainer and strategy run
as separate processes on one store; the demo also makes the solutions, pairs, teacher or expert
that an algorithm needs.

- Tasks: `sort` is sorting three digits (chance: 0.1 %); `guess` is finding a number below 8 in four
  turns.
- A run ends as soon as the trainer's greedy answers to 256 fresh problems reach `threshold`; the
  plain command goes on to 0.95. `within` is the number of steps after which the recipe gives up.
- Afterwards the run is replayed from its log. `replay same` counts the runs whose weights came out
  bit for bit the same.
- Nothing was lost or trained twice in any run, unless a row says otherwise.
- `commit` lists the commits that the runs were made at. `not run` means that the recipe has changed
  since; older results are in `learning.jsonl`.

```sh
python benchmarks/learning.py --all
python benchmarks/learning.py --report   # this page
```

| algorithm | task | data | threshold | within | steps needed, per seed | replay same | commit |
|---|---|---|---|---|---|---|---|
"""


def write_report(lines: Sequence[Line], docs: Path) -> None:
    """Write ``learning.md`` and its plots into ``docs``."""
    newest = {(line["algorithm"], line["seed"]): line for line in lines}
    rows = [_row(name, newest) for name in RECIPES]
    families = list(dict.fromkeys(recipe.family for recipe in RECIPES.values()))
    plots = [plot for family in families if (plot := _plot(family, newest, docs))]
    pictures = "\n\n".join(f"![{family}]({file})" for family, file in plots)
    (docs / "learning.md").write_text(HEAD + "\n".join(rows) + "\n\n" + pictures + "\n")


def digest_of(recipe: DemoRecipe) -> str:
    """Return what tells results of a recipe from those of another."""
    text = json.dumps(asdict(recipe), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def _row(name: str, newest: Mapping[tuple[str, int], Line]) -> str:
    recipe = RECIPES[name]
    found = [line for (of, _), line in sorted(newest.items()) if of == name]
    found = [line for line in found if line["setup"] == digest_of(recipe)]
    cells = (
        f"`{name}`",
        recipe.task,
        _data(name),
        f"{recipe.threshold}",
        f"{recipe.max_steps}",
        ", ".join(map(_steps, found)) or "not run",
        f"{sum(line['identical'] for line in found)} of {len(found)}",
        ", ".join(dict.fromkeys(line["commit"] for line in found)) or "-",
    )
    return "| " + " | ".join(cells) + " |"


def _data(name: str) -> str:
    needs = needs_of_run(resolved(config_for(name)))
    return needs.data + " + teacher" * needs.teacher + " + expert" * bool(needs.expert_groups)


def _steps(line: Line) -> str:
    """Return after how many steps a run had learnt, and what else must be said of it."""
    said = str(line["reached"]) if line["reached"] else f"not reached ({line['best']:.2f})"
    if line["lost"] or line["duplicated"]:
        said += f" (lost {line['lost']}, duplicated {line['duplicated']})"
    return said


def _plot(
    family: str, newest: Mapping[tuple[str, int], Line], docs: Path
) -> tuple[str, str] | None:
    """Draw the curves of a family; return its name and the file's, or None if there are none."""
    import matplotlib as mpl  # noqa: PLC0415 - only a report draws

    mpl.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    names = [name for name, recipe in RECIPES.items() if recipe.family == family]
    figure, axes = pyplot.subplots(figsize=(6, 3), dpi=80)
    drawn = False
    for number, name in enumerate(names):
        label: str | None = name
        for (of, _), line in sorted(newest.items()):
            if of != name or line["setup"] != digest_of(RECIPES[name]):
                continue
            steps, accuracies = zip(*[(0, 0.0), *map(tuple, line["curve"])], strict=True)
            axes.plot(steps, accuracies, color=f"C{number}", label=label, linewidth=1)
            label, drawn = None, True
    axes.set(title=family, xlabel="gradient step", ylabel="accuracy", ylim=(0, 1))
    axes.axhline(RECIPES[names[0]].threshold, color="grey", linewidth=0.5)
    file = f"learning-{family.replace(' ', '-')}.png"
    if drawn:
        axes.legend(fontsize="x-small")
        figure.savefig(docs / file, bbox_inches="tight")
    pyplot.close(figure)
    return (family, file) if drawn else None
