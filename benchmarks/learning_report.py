"""The table of what has learnt, and a plot of the curves of each family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.learning_setups import SETUPS

Line = Mapping[str, Any]

HEAD = """# Does it learn?

Every algorithm of the registry trains a transformer of two layers on the demo's task, from a store:
rollouts (or recorded data) are written, annotated, leased, trained and committed as in a run of
many processes, here by one. On-policy algorithms start from random weights. An algorithm passes if
greedy answers to 512 fresh problems reach the threshold within the stated number of gradient steps,
with every seed. `sort` is three digits to be sorted (chance: 0.1 %); `guess` is a number below 8 to
be found in four turns.

```sh
python benchmarks/learning.py --all      # about a minute of one core per run; goes on where it was
python benchmarks/learning.py --report   # this page
```

| algorithm | task | data | threshold | within | steps needed, per seed | CPU s per run | commit |
|---|---|---|---|---|---|---|---|
"""


def write_report(lines: Sequence[Line], docs: Path) -> None:
    """Write ``learning.md`` and its plots into ``docs``."""
    newest = {(line["algorithm"], line["seed"]): line for line in lines}
    rows = [_row(name, newest) for name in SETUPS]
    families = list(dict.fromkeys(setup.family for setup in SETUPS.values()))
    plots = [plot for family in families if (plot := _plot(family, newest, docs))]
    pictures = "\n\n".join(f"![{family}]({file})" for family, file in plots)
    (docs / "learning.md").write_text(HEAD + "\n".join(rows) + "\n\n" + pictures + "\n")


def _row(name: str, newest: Mapping[tuple[str, int], Line]) -> str:
    setup = SETUPS[name]
    found = [line for (of, _), line in sorted(newest.items()) if of == name]
    found = [line for line in found if line["setup"] == setup.digest]
    steps = [str(f["reached"]) if f["reached"] else f"not reached ({f['best']:.2f})" for f in found]
    data = setup.data + (" + teacher" if setup.teacher else "") + (" + expert" * setup.expert)
    seconds = f"{sum(line['cpu_s'] for line in found) / len(found):.0f}" if found else "-"
    commit = found[-1]["commit"] if found else "-"
    cells = (
        f"`{name}`",
        setup.task,
        data,
        f"{setup.threshold}",
        f"{setup.max_steps}",
        ", ".join(steps) or "not run",
        seconds,
        commit,
    )
    return "| " + " | ".join(cells) + " |"


def _plot(
    family: str, newest: Mapping[tuple[str, int], Line], docs: Path
) -> tuple[str, str] | None:
    """Draw the curves of a family; return its name and the file's, or None if there are none."""
    import matplotlib as mpl  # noqa: PLC0415 - only a report draws

    mpl.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    names = [name for name, setup in SETUPS.items() if setup.family == family]
    figure, axes = pyplot.subplots(figsize=(6, 3), dpi=80)
    drawn = False
    for number, name in enumerate(names):
        label: str | None = name
        for (of, _), line in sorted(newest.items()):
            if of != name or line["setup"] != SETUPS[name].digest:
                continue
            steps, accuracies = zip(*[(0, 0.0), *map(tuple, line["curve"])], strict=True)
            axes.plot(steps, accuracies, color=f"C{number}", label=label, linewidth=1)
            label, drawn = None, True
    axes.set(title=family, xlabel="gradient step", ylabel="accuracy", ylim=(0, 1))
    axes.axhline(SETUPS[names[0]].threshold, color="grey", linewidth=0.5)
    file = f"learning-{family.replace(' ', '-')}.png"
    if drawn:
        axes.legend(fontsize="x-small")
        figure.savefig(docs / file, bbox_inches="tight")
    pyplot.close(figure)
    return (family, file) if drawn else None
