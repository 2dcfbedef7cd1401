"""Questions about training: steps, what each was given, how stale it was, what was left out."""

from __future__ import annotations

import sys
from typing import Annotated, Any, Literal

import typer

from trinity_buffer import inspector as questions
from trinity_buffer.cli.asking import asked_of
from trinity_buffer.cli.escaping import one_line, unescaped
from trinity_buffer.cli.options import (
    AsOfOption,
    ExperimentOption,
    JsonLinesOption,
    JsonOption,
    StoreOption,
    TrainerOption,
)
from trinity_buffer.cli.printing import console, print_json, shown, table, time_of
from trinity_buffer.errors import UnknownNameError
from trinity_buffer.inspector.fates import Why
from trinity_buffer.inspector.fates import why as why_of
from trinity_buffer.inspector.rejected import Lease, Rejected
from trinity_buffer.inspector.source import Source
from trinity_buffer.inspector.step_lines import (
    EatenRow,
    Staleness,
    StalenessGrowth,
    StepContents,
    StepLine,
    Tenth,
)
from trinity_buffer.pipeline.diagnosis import counted

AfterStepOption = Annotated[
    int | None,
    typer.Option("--after", help="Only steps above this one. Default: the last ones.", min=0),
]
StepLimitOption = Annotated[
    int, typer.Option("--limit", help="Show at most this many steps.", min=1)
]
MEASURED = ("loss_share", "ratio_mean", "ratio_max", "clipped", "kl", "entropy", "gap_mean")
"""What `blame` shows of what the trainer measured of each row."""

METRICS = ("loss", "kl", "entropy", "gradient_norm", "learning_rate")
"""What `steps` shows of the metrics of a step."""

RowOrder = Literal["slot", "abs-advantage", "reward", "staleness", "length", "loss-share"]


def steps(
    store: StoreOption = None,
    experiment: ExperimentOption = None,
    trainer: TrainerOption = None,
    after: AfterStepOption = None,
    limit: StepLimitOption = 20,
    as_of: AsOfOption = None,
    as_json: JsonLinesOption = False,
) -> None:
    """Show gradient steps: rows, tokens, reward, staleness, seconds, and what the trainer recorded.

    Example: trinity-buffer steps --limit 10
    """
    found: list[StepLine] = asked_of(
        store,
        experiment,
        as_of,
        lambda source: questions.steps(source, trainer=trainer, after=after, limit=limit),
    )
    if as_json:
        print_json(*found)
        return
    told = [name for name in METRICS if _any(found, name)]
    columns = ["step", "state", "rows", "groups", "tokens", "reward", "staleness", "oldest"]
    rows = [
        (
            *(line.step, line.state, line.rows, line.groups, line.tokens, line.reward),
            *(line.staleness, line.oldest, line.seconds),
            *(line.metrics.get(name) for name in told),
        )
        for line in found
    ]
    title = f"steps of {found[0].trainer}" if found else "no steps yet"
    console().print(table(one_line(title), [*columns, "seconds", *told], rows))


def _any(found: list[StepLine], name: str) -> bool:
    return any(name in line.metrics for line in found)


def blame(
    step: Annotated[int, typer.Argument(help="Number of a gradient step.", min=1)],
    store: StoreOption = None,
    experiment: ExperimentOption = None,
    trainer: TrainerOption = None,
    sort: Annotated[RowOrder, typer.Option(help="Order of the rows.")] = "slot",
    limit: Annotated[int | None, typer.Option(help="Show at most this many rows.", min=1)] = None,
    as_of: AsOfOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say exactly what one gradient step was trained on, and whether its commit proves it.

    Example: trinity-buffer blame 2 --sort loss-share
    """
    found: StepContents = asked_of(
        store, experiment, as_of, lambda source: questions.blame(source, step, trainer=trainer)
    )
    rows = sorted(found.rows, key=_ORDERS[sort])[:limit]
    if as_json:
        print_json({**_plain(found), "rows": rows})
        return
    line = found.line
    proof = {None: "not committed", True: "its commit names it", False: "ITS COMMIT NAMES ANOTHER"}
    console().print(
        one_line(
            f"step {step} of {line.trainer}, {line.state}: {counted(line.rows, 'row')} in "
            f"{counted(line.groups, 'group')} and {counted(line.microbatches, 'micro-batch')} "
            f"({found.layout}), set {found.annotation_set}, {time_of(line.recorded_at)} UTC; "
            f"manifest {found.digest}, {proof[found.proven]}"
        ),
        markup=False,
    )
    columns = ["slot", "uid", "micro-batch", "reward", "advantage", "version", "stale", "tokens"]
    told = [name for name in MEASURED if any(name in row.measured for row in found.rows)]
    cells = [(*_cells(row), *(row.measured.get(name) for name in told)) for row in rows]
    told_of = "" if len(rows) == len(found.rows) else f" of {len(found.rows)}"
    console().print(table(f"{len(rows)}{told_of} rows", [*columns, "actor", *told], cells))


def _plain(found: StepContents) -> dict[str, Any]:
    names = ("line", "annotation_set", "layout", "digest", "proven")
    return {name: getattr(found, name) for name in names}


def _cells(row: EatenRow) -> tuple[Any, ...]:
    who = row.actor or row.experiment
    numbers = (row.reward, row.advantage, row.policy_version, row.staleness, row.length)
    return (row.slot, row.uid, row.microbatch, *numbers, who)


_ORDERS: dict[str, Any] = {
    "slot": lambda row: row.slot,
    "abs-advantage": lambda row: (-abs(row.advantage or 0.0), row.slot),
    "reward": lambda row: (-(row.reward or 0.0), row.slot),
    "staleness": lambda row: (-(row.staleness or 0), row.slot),
    "length": lambda row: (-row.length, row.slot),
    "loss-share": lambda row: (-row.measured.get("loss_share", 0.0), row.slot),
}


def why(
    uid: Annotated[str, typer.Argument(help="batch/task/run/step/suffix, such as e0-7/3/1/0/.")],
    store: StoreOption = None,
    experiment: ExperimentOption = None,
    as_of: AsOfOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say why a rollout was trained or never was: each event that decided it, in order.

    Steps that a rewind superseded are left out.

    Example: trinity-buffer why e0-7/3/1/0/
    """

    async def question(source: Source) -> Why:
        try:
            return await why_of(source, uid)
        except UnknownNameError:
            if unescaped(uid) == uid:
                raise
            return await why_of(source, unescaped(uid))

    found: Why = asked_of(store, experiment, as_of, question)
    if as_json:
        print_json(found)
        return
    out = console()
    out.print(one_line(f"{found.uid}: {found.verdict}"), markup=False)
    rows = [(r.position, time_of(r.recorded_at), r.actor, r.what) for r in found.reasons]
    out.print(table("", ["position", "time", "actor", "what"], rows))


def rejected(
    store: StoreOption = None,
    experiment: ExperimentOption = None,
    by: Annotated[
        str | None,
        typer.Option(help="Only what this strategy or trainer rejected; door: refused by write()."),
    ] = None,
    reason: Annotated[
        str | None,
        typer.Option(help="Only this reason, or this kind of reason, such as stale or invalid."),
    ] = None,
    limit: Annotated[
        int, typer.Option(help="Show at most this many, the newest ones.", min=1)
    ] = 20,
    as_of: AsOfOption = None,
    as_json: JsonLinesOption = False,
) -> None:
    """Show what was left out, by whom and why.

    Example: trinity-buffer rejected --reason zero_variance
    """

    async def question(source: Source) -> tuple[list[Rejected], Any]:
        found = await questions.rejections(source, by=by, reason=reason, limit=limit)
        return found, await questions.rejection_counts(source)

    found, counts = asked_of(store, experiment, as_of, question)
    there = {one for name, reasons in counts.items() if by in (None, name) for one in reasons}
    if reason is not None and there and not found:
        known = ", ".join(map(repr, sorted(there)))
        told = one_line(f"no rejection has the reason {reason!r} (there: {known})")
        sys.stderr.write(f"{told}\n")
    if as_json:
        print_json(*found)
        return
    out = console()
    for name, reasons in counts.items():
        out.print(one_line(f"{name}: {shown(reasons)}"), markup=False)
    rows = [(one.position, one.by, one.reason, one.uid) for one in found]
    if found:
        title = f"{len(found)}, the newest first"
        out.print(table(title, ["position", "by", "reason", "uid"], rows))
    elif not there:
        told = "nothing was left out" if by is None else f"{by} left out nothing"
        out.print(one_line(told), markup=False)


def leases(
    store: StoreOption = None,
    experiment: ExperimentOption = None,
    as_of: AsOfOption = None,
    as_json: JsonLinesOption = False,
) -> None:
    """Show who holds each lease of a trainer or strategy, until when, and how far a trainer is.

    Example: trinity-buffer leases --json
    """
    found: list[Lease] = asked_of(store, experiment, as_of, questions.leases)
    if as_json:
        print_json(*found)
        return
    columns = ["kind", "name", "state", "owner", "token", "expires in s", "leased", "committed"]
    rows = [
        (
            *(one.kind, one.trainer, one.state, one.owner, one.token, one.expires_in_s),
            *(one.leased_step, one.committed_step),
        )
        for one in found
    ]
    console().print(table("leases" if found else "no trainer yet", columns, rows))


def staleness(
    store: StoreOption = None,
    experiment: ExperimentOption = None,
    trainer: TrainerOption = None,
    after: AfterStepOption = None,
    limit: Annotated[int, typer.Option(help="Show at most this many steps.", min=1)] = 100,
    as_of: AsOfOption = None,
    as_json: JsonLinesOption = False,
) -> None:
    """Show staleness, in policy versions: by gradient step and by actor, and whether it grew.

    Example: trinity-buffer staleness --limit 50
    """
    found: list[Staleness] = asked_of(
        store,
        experiment,
        as_of,
        lambda source: questions.staleness(source, trainer=trainer, after=after, limit=limit),
    )
    if as_json:
        print_json(*found)
        return
    rows = [(o.step, o.state, o.actor, o.rows, o.mean, o.greatest) for o in found]
    out = console()
    out.print(table("", ["step", "state", "actor", "rows", "mean", "greatest"], rows))
    for one in questions.growth_by_actor(found):
        out.print(one_line(_grown(one)), markup=False)


def _grown(one: StalenessGrowth) -> str:
    name = "all actors" if one.actor is None else one.actor
    told = f"{_range(one.first_step, one.last_step)}: {name} mean {one.mean:.3g}"
    if one.first_step != one.last_step:
        told += f" ({_tenth(one.begin)}; {_tenth(one.end)})"
    return f"{told}, greatest {one.greatest}, over {one.rows:,} rows"


def _tenth(one: Tenth) -> str:
    mean = "no rows" if one.mean is None else f"{one.mean:.3g}"
    return f"{_range(one.first, one.last)}: {mean}"


def _range(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first} to {last}"
