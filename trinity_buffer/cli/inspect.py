"""Commands that only ask: the log, groups, rollouts, steps, differences. They load no torch."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any, Literal

import anyio
import typer
from rich.console import Group
from rich.live import Live
from rich.markup import escape

from trinity_buffer import inspector as questions
from trinity_buffer.cli.escaping import one_line, unescaped
from trinity_buffer.cli.options import (
    INTERRUPTED,
    AsOfOption,
    ExperimentOption,
    JsonLinesOption,
    JsonOption,
    SetNameOption,
    StoreOption,
    TrainerOption,
    UidArgument,
    asked_of,
    chosen_store,
    on_experiment,
    run,
)
from trinity_buffer.cli.output import (
    console,
    end_if_damaged,
    fields_of,
    print_json,
    progress,
    say,
    shown,
    table,
    time_of,
)
from trinity_buffer.errors import InvalidArgumentError, UnknownNameError
from trinity_buffer.identity import parse_uid
from trinity_buffer.inspector.group_views import Order as GroupOrder
from trinity_buffer.inspector.source import Source, now
from trinity_buffer.inspector.token_table import token_texts
from trinity_buffer.pipeline.coordination.diagnosis import counted
from trinity_buffer.pipeline.experiment import Experiment
from trinity_buffer.pipeline.store import open_store
from trinity_buffer.store import writer_queries
from trinity_buffer.store.url import named

AfterStepOption = Annotated[
    int | None,
    typer.Option("--after", help="Only steps above this one. Default: the last ones.", min=0),
]
StepLimitOption = Annotated[
    int, typer.Option("--limit", help="Show at most this many steps.", min=1)
]
RowOrder = Literal["slot", "abs-advantage", "reward", "staleness", "length", "loss-share"]

ROW_METRICS = ("loss_share", "ratio_mean", "ratio_max", "clipped", "kl", "entropy", "gap_mean")
"""What `blame` shows of what the trainer measured of each row."""

STEP_METRICS = ("loss", "kl", "entropy", "gradient_norm", "learning_rate")
"""What `steps` shows of the metrics of a step."""

TENSOR_COLUMNS = ["field", "dtype", "shape", "min", "mean", "max", "first"]

MOST_LINES = 200
"""Lines of steps that `diff` prints of two runs."""

FRAME_S = 0.5
"""Minimum time between two frames of `top`, however much is written."""


def events(
    store: StoreOption = None,
    experiment: ExperimentOption = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Wait for more until the experiment is finished.")
    ] = False,
    after: Annotated[
        int | None,
        typer.Option("--after", help="Only events after this position. Default: the last ones."),
    ] = None,
    kind: Annotated[
        list[str] | None,
        typer.Option("--kind", help="Only this kind, such as StepsCommitted; repeatable."),
    ] = None,
    limit: Annotated[
        int,
        typer.Option(
            help="How many; with --follow and without --after, how many earlier ones come first.",
            min=1,
        ),
    ] = 20,
    as_of: AsOfOption = None,
    as_json: JsonLinesOption = False,
) -> None:
    """Print the events of the log, one per line: the last ones, or those after a position.

    Example: trinity-buffer events --follow --kind StepsCommitted
    """

    async def question(opened: Experiment) -> None:
        first = after
        if first is None:  # counted among the chosen kinds, so that `limit` lines are printed
            first = await questions.position_before(opened, limit, kinds=kind, up_to=as_of)
        printed = 0
        lines = questions.event_lines(opened, after=first, up_to=as_of, follow=follow, kinds=kind)
        async for line in lines:
            if as_json:
                print_json(line)
            else:
                head = f"{line.position:>8}  {time_of(line.recorded_at)}  {line.kind:<20}"
                say(f"{head} {line.actor:<12} {line.summary}")
            printed += 1
            if printed == limit and not follow:
                return

    try:
        anyio.run(on_experiment, store, experiment, question)
    except KeyboardInterrupt:  # the usual end of a follower
        raise typer.Exit(0 if follow else INTERRUPTED) from None


def groups(
    store: StoreOption = None,
    experiment: ExperimentOption = None,
    annotation_set: SetNameOption = None,
    batch: Annotated[str | None, typer.Option(help="Only groups of this batch.")] = None,
    step: Annotated[
        int | None, typer.Option(help="Only groups that this gradient step was trained on.", min=1)
    ] = None,
    trainer: TrainerOption = None,
    sort: Annotated[
        GroupOrder,
        typer.Option(help="Which groups come first; any order but newest reads all groups."),
    ] = "newest",
    limit: Annotated[int, typer.Option(help="Show at most this many, the first ones.", min=1)] = 20,
    as_of: AsOfOption = None,
    as_json: JsonLinesOption = False,
) -> None:
    """Show groups: rewards and advantages of the runs of a task, and what became of them.

    Example: trinity-buffer groups --set grpo --limit 5
    """

    async def question(source: Source) -> list[questions.GroupView]:
        trained = None
        if step is not None:
            contents = await questions.blame(source, step, trainer=trainer)
            # An expert's row has no group in this experiment.
            eids = [parse_uid(row.uid) for row in contents.rows if row.uid and not row.experiment]
            trained = list(dict.fromkeys((str(eid.batch), str(eid.task)) for eid in eids))
        return await questions.groups(
            source,
            annotation_set=annotation_set,
            batch=batch,
            named=trained,
            order=sort,
            limit=limit,
        )

    views: list[questions.GroupView] = asked_of(store, experiment, as_of, question)
    if as_json:
        print_json(*views)
        return
    rows = [
        (
            view.runs[0].uid,
            len({run.run for run in view.runs}),
            view.mean,
            view.deviation,
            _numbers([run.reward for run in view.runs]),
            _numbers([run.advantage for run in view.runs]),
            view.state,
        )
        for view in views
    ]
    columns = ["uid", "runs", "mean", "deviation", "rewards", "advantages", "state"]
    first = "the newest" if sort == "newest" else f"the greatest {sort}"
    console().print(table(f"{counted(len(views), 'group')}, {first} first", columns, rows))


def _numbers(values: list[float | None], most: int = 8) -> str:
    text = " ".join("-" if value is None else f"{value:.2g}" for value in values[:most])
    return text + (f" … {len(values)}" if len(values) > most else "")


async def _by_uid(question: Callable[[str], Awaitable[Any]], uid: str) -> Any:
    """Ask about ``uid``; if there is none, about the one that a table prints as ``uid``."""
    try:
        return await question(uid)
    except UnknownNameError:
        if unescaped(uid) == uid:
            raise
        return await question(unescaped(uid))


def show(
    uid: UidArgument,
    store: StoreOption = None,
    experiment: ExperimentOption = None,
    annotation_set: Annotated[
        str | None, typer.Option("--set", help="Annotation set whose advantages --tokens shows.")
    ] = None,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="A line for each token: id, mask, log-prob, advantage.")
    ] = False,
    as_of: AsOfOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show one experience: what it holds, its annotations, where it was trained, or why not.

    Example: trinity-buffer show e0-7/3/1/0/ --tokens
    """

    async def question(source: Source) -> tuple[questions.ExperienceView, Any]:
        view = await _by_uid(lambda uid: questions.show(source, uid), uid)
        if not tokens:
            return view, None
        by_token = await questions.tokens(source, view.uid, annotation_set=annotation_set)
        return view, (by_token, await token_texts(source, by_token.ids))

    view, by_token = asked_of(store, experiment, as_of, question)
    if as_json:
        print_json(view if by_token is None else asdict(view) | {"tokens": _plain(*by_token)})
        return
    _print_experience(view)
    if by_token is not None:
        _print_tokens(*by_token)


def _plain(tokens: questions.TokenTable, texts: list[str] | None) -> dict[str, Any]:
    """Return the columns of tokens as JSON has them, null in place of NaN."""
    columns = {"id": tokens.ids, "mask": tokens.mask, **tokens.columns}
    by_name: dict[str, Any] = {} if texts is None else {"text": texts}
    return by_name | {
        name: [None if value != value else value for value in values.tolist()]  # noqa: PLR0124 - NaN
        for name, values in columns.items()
    }


def _print_tokens(tokens: questions.TokenTable, texts: list[str] | None) -> None:
    of = "" if tokens.annotation_set is None else f", advantages of set {tokens.annotation_set}"
    parts = [
        "prompt" if at < tokens.prompt_length else "trained" if mask else "masked"
        for at, mask in enumerate(tokens.mask.tolist())
    ]
    columns: dict[str, Any] = {"part": parts, "id": tokens.ids.tolist()}
    if texts is not None:
        columns["text"] = [one_line(repr(text)) for text in texts]
    columns |= {name: values.tolist() for name, values in tokens.columns.items()}
    rows = [(at, *values) for at, values in enumerate(zip(*columns.values(), strict=True))]
    console().print(table(one_line(f"{len(tokens.ids)} tokens{of}"), ["token", *columns], rows))


def _print_experience(view: questions.ExperienceView) -> None:
    out = console()
    out.print(f"[bold]{escape(one_line(view.uid))}[/bold] at {view.address}, {view.kind}")
    say(
        f"recorded by {view.actor}, {time_of(view.recorded_at)} UTC, "
        f"segment {view.segment}, digest {view.digest}",
        f"reward {shown(view.reward)}, policy version {shown(view.policy_version)}, "
        f"{view.prompt_length} prompt + {view.length - view.prompt_length} response tokens "
        f"({view.trained_tokens} trained), finish reason {shown(view.finish_reason)}",
    )
    if view.refused is not None:
        say(f"refused: {view.refused}")
    if view.archived is not None:
        out.print(view.archived, markup=False)
    out.print(table("tensors", TENSOR_COLUMNS, _tensor_rows(view.tensors)))
    # Indented, so that no line of a stored text looks like a field of its own.
    for name, value in view.objects.items():
        out.print(f"{name}: {value}".replace("\n", "\n  "), markup=False)
    for part in view.sets:
        reason = "" if part.reason is None else f": {part.reason}"
        where = "" if part.annotation is None else f" at {part.annotation}"
        copies = f", {part.copies} copies" if part.copies > 1 else ""
        out.print()
        say(f"set {part.annotation_set}: {part.state}{reason}{where}{copies}")
        if part.tensors:
            out.print(table("", TENSOR_COLUMNS, _tensor_rows(part.tensors)))
        for step in part.steps:
            held = "trained" if step.committed else "leased, not committed,"
            fate = f"{held} in step {step.step}" if step.step else f"rejected: {step.reason}"
            say(f"  {step.trainer}: {fate}")
            if step.measured:
                say("    " + ", ".join(f"{k} {shown(v)}" for k, v in step.measured.items()))


def _tensor_rows(tensors: Mapping[str, questions.TensorSummary]) -> list[tuple[Any, ...]]:
    return [
        (
            name,
            summary.dtype,
            "× mask" if summary.scaled_mask else "×".join(map(str, summary.shape)),
            summary.minimum,
            summary.mean,
            summary.maximum,
            " ".join(map(shown, summary.first)),
        )
        for name, summary in tensors.items()
    ]


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
    lines: list[questions.StepLine] = asked_of(
        store,
        experiment,
        as_of,
        lambda source: questions.steps(source, trainer=trainer, after=after, limit=limit),
    )
    if as_json:
        print_json(*lines)
        return
    # A metric that no step has would be a column of dashes.
    names = [name for name in STEP_METRICS if any(name in line.metrics for line in lines)]
    columns = ["step", "state", "rows", "groups", "tokens", "reward", "staleness", "oldest"]
    rows = [
        (
            *(line.step, line.state, line.rows, line.groups, line.tokens, line.reward),
            *(line.staleness, line.oldest, line.seconds, *map(line.metrics.get, names)),
        )
        for line in lines
    ]
    title = f"steps of {lines[0].trainer}" if lines else "no steps yet"
    console().print(table(one_line(title), [*columns, "seconds", *names], rows))


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
    contents: questions.StepContents = asked_of(
        store, experiment, as_of, lambda source: questions.blame(source, step, trainer=trainer)
    )
    rows = sorted(contents.rows, key=_ORDERS[sort])[:limit]
    if as_json:
        print_json(fields_of(contents) | {"rows": rows})
        return
    line = contents.line
    proof = {None: "not committed", True: "its commit names it", False: "ITS COMMIT NAMES ANOTHER"}
    say(
        f"step {step} of {line.trainer}, {line.state}: {counted(line.rows, 'row')} in "
        f"{counted(line.groups, 'group')} and {counted(line.microbatches, 'micro-batch')} "
        f"({contents.layout}), set {contents.annotation_set}, {time_of(line.recorded_at)} UTC; "
        f"manifest {contents.digest}, {proof[contents.proven]}"
    )
    columns = ["slot", "uid", "micro-batch", "reward", "advantage", "version", "stale", "tokens"]
    names = [name for name in ROW_METRICS if any(name in row.measured for row in contents.rows)]
    cells = [
        (
            *(row.slot, row.uid, row.microbatch, row.reward, row.advantage, row.policy_version),
            *(row.staleness, row.length, row.actor or row.experiment),
            *map(row.measured.get, names),
        )
        for row in rows
    ]
    of = "" if len(rows) == len(contents.rows) else f" of {len(contents.rows)}"
    console().print(table(f"{len(rows)}{of} rows", [*columns, "actor", *names], cells))


# The slot breaks ties, so that two calls print the same order.
_ORDERS: dict[str, Any] = {
    "slot": lambda row: row.slot,
    "abs-advantage": lambda row: (-abs(row.advantage or 0.0), row.slot),
    "reward": lambda row: (-(row.reward or 0.0), row.slot),
    "staleness": lambda row: (-(row.staleness or 0), row.slot),
    "length": lambda row: (-row.length, row.slot),
    "loss-share": lambda row: (-row.measured.get("loss_share", 0.0), row.slot),
}


def why(
    uid: UidArgument,
    store: StoreOption = None,
    experiment: ExperimentOption = None,
    as_of: AsOfOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say why a rollout was trained or never was: each event that decided it, in order.

    Steps that a rewind superseded are left out.

    Example: trinity-buffer why e0-7/3/1/0/
    """
    answer: questions.Why = asked_of(
        store,
        experiment,
        as_of,
        lambda source: _by_uid(lambda uid: questions.why(source, uid), uid),
    )
    if as_json:
        print_json(answer)
        return
    say(f"{answer.uid}: {answer.verdict}")
    rows = [(r.position, time_of(r.recorded_at), r.actor, r.what) for r in answer.reasons]
    console().print(table("", ["position", "time", "actor", "what"], rows))


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

    async def question(source: Source) -> tuple[list[questions.Rejected], Any]:
        rows = await questions.rejections(source, by=by, reason=reason, limit=limit)
        return rows, await questions.rejection_counts(source)

    rows, counts = asked_of(store, experiment, as_of, question)
    known = {name for who, reasons in counts.items() if by in (None, who) for name in reasons}
    if reason is not None and known and not rows:
        names = ", ".join(map(repr, sorted(known)))
        message = f"no rejection has the reason {reason!r} (there: {names})"
        sys.stderr.write(one_line(message) + "\n")  # standard output may be parsed as JSON
    if as_json:
        print_json(*rows)
        return
    say(*(f"{name}: {shown(reasons)}" for name, reasons in counts.items()))
    if rows:
        cells = [(row.position, row.by, row.reason, row.uid) for row in rows]
        columns = ["position", "by", "reason", "uid"]
        console().print(table(f"{len(rows)}, the newest first", columns, cells))
    elif not known:
        say("nothing was left out" if by is None else f"{by} left out nothing")


def leases(
    store: StoreOption = None,
    experiment: ExperimentOption = None,
    as_of: AsOfOption = None,
    as_json: JsonLinesOption = False,
) -> None:
    """Show who holds each lease of a trainer or strategy, until when, and how far a trainer is.

    Example: trinity-buffer leases --json
    """
    held: list[questions.Lease] = asked_of(store, experiment, as_of, questions.leases)
    if as_json:
        print_json(*held)
        return
    columns = ["kind", "name", "state", "owner", "token", "expires in s", "leased", "committed"]
    rows = [
        (
            *(lease.kind, lease.trainer, lease.state, lease.owner, lease.token),
            *(lease.expires_in_s, lease.leased_step, lease.committed_step),
        )
        for lease in held
    ]
    console().print(table("leases" if held else "no trainer yet", columns, rows))


def staleness(
    store: StoreOption = None,
    experiment: ExperimentOption = None,
    trainer: TrainerOption = None,
    after: AfterStepOption = None,
    limit: StepLimitOption = 100,
    as_of: AsOfOption = None,
    as_json: JsonLinesOption = False,
) -> None:
    """Show staleness, in policy versions: by gradient step and by actor, and whether it grew.

    Example: trinity-buffer staleness --limit 50
    """
    by_step: list[questions.Staleness] = asked_of(
        store,
        experiment,
        as_of,
        lambda source: questions.staleness(source, trainer=trainer, after=after, limit=limit),
    )
    if as_json:
        print_json(*by_step)
        return
    rows = [(o.step, o.state, o.actor, o.rows, o.mean, o.greatest) for o in by_step]
    console().print(table("", ["step", "state", "actor", "rows", "mean", "greatest"], rows))
    say(*map(_growth_line, questions.growth_by_actor(by_step)))


def _growth_line(growth: questions.StalenessGrowth) -> str:
    def range_of(first: int, last: int) -> str:
        return f"step {first}" if first == last else f"steps {first} to {last}"

    def tenth(part: questions.Tenth) -> str:
        mean = "no rows" if part.mean is None else f"{part.mean:.3g}"
        return f"{range_of(part.first, part.last)}: {mean}"

    name = "all actors" if growth.actor is None else growth.actor
    line = f"{range_of(growth.first_step, growth.last_step)}: {name} mean {growth.mean:.3g}"
    if growth.first_step != growth.last_step:
        line += f" ({tenth(growth.begin)}; {tenth(growth.end)})"
    return f"{line}, greatest {growth.greatest}, over {growth.rows:,} rows"


def diff(
    first: Annotated[str, typer.Argument(help="An annotation set, or an experiment.")],
    second: Annotated[str, typer.Argument(help="Another one.")],
    store: StoreOption = None,
    experiment: ExperimentOption = None,
    other_store: Annotated[
        str | None, typer.Option("--other-store", help="Store of SECOND, if it is an experiment.")
    ] = None,
    limit: Annotated[int, typer.Option(help="Show at most this many differing rows.", min=1)] = 20,
    as_of: AsOfOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare two annotation sets over the same rollouts, or two runs step by step.

    Example: trinity-buffer diff grpo grpo-4
    """
    url = chosen_store(store)
    other = other_store or url

    async def compared_runs() -> questions.RunDifference | None:
        # Names of two experiments go before those of two sets of one.
        async with open_store(url, read_only=True) as one, open_store(other, read_only=True) as two:
            if first not in await one.experiments() or second not in await two.experiments():
                return None
            if as_of is not None:
                raise InvalidArgumentError(
                    "--as-of is a position of one log: it goes with two annotation sets, not two "
                    "runs"
                )
            with progress() as report:
                a, b = now(await one.experiment(first)), now(await two.experiment(second))
                return await questions.compare_runs(a, b, progress=report)

    runs: questions.RunDifference | None = run(compared_runs)
    if runs is not None:
        if as_json:
            print_json(runs)
        else:
            _print_runs(runs, url, other)
        return

    async def question(source: Source) -> questions.SetDifference:
        with progress() as report:
            return await questions.compare_sets(source, first, second, limit=limit, progress=report)

    sets: questions.SetDifference = asked_of(url, experiment, as_of, question)
    if as_json:
        print_json(fields_of(sets, without="total") | {"mean": sets.mean})
    else:
        _print_sets(sets)
    end_if_damaged(sets.unreadable)


def _print_sets(sets: questions.SetDifference) -> None:
    out = console()
    states = sets.states.most_common()
    out.print(table(f"{sets.first} / {sets.second}", ["states", "experiences"], states))
    out.print(
        f"{sets.both} have an advantage in both: {sets.equal} the same, {sets.opposite} of "
        f"opposite sign, mean difference {shown(sets.mean)}, greatest {shown(sets.greatest)}",
        markup=False,
    )
    rows = [(r.uid, r.first, r.second, r.first_advantage, r.second_advantage) for r in sets.rows]
    if rows:
        columns = ["uid", sets.first, sets.second, "advantage", "advantage "]
        out.print(table("what differs most", columns, rows))
    else:
        legible = " that can be read" if sets.unreadable else ""
        out.print(f"no difference in any advantage{legible}")


def _print_runs(runs: questions.RunDifference, *stores: str) -> None:
    out = console()
    sides = [runs.first, runs.second]
    if runs.first == runs.second and len(set(stores)) > 1:  # only the store tells them apart
        sides = [f"{name} ({named(store)})" for name, store in zip(sides, stores, strict=True)]
    if runs.config:
        rows = [(name, *values) for name, values in runs.config.items()]
        out.print(table("configuration", ["key", *sides], rows))
    else:
        out.print("no difference in the configuration")
    numbers = [(name, *values) for name, values in runs.numbers.items()]
    out.print(table("in numbers", ["", *sides], numbers))
    lines = [
        (step, name, *values)
        for step, metrics in runs.steps.items()
        for name, values in metrics.items()
    ]
    out.print(table("steps of both", ["step", "", *sides], lines[-MOST_LINES:]))
    if len(lines) > MOST_LINES:
        say(f"these are the last {MOST_LINES} of {len(lines)} lines: --json has them all")


def search(
    text: Annotated[
        str,
        typer.Argument(
            help="What to look for in prompts, responses, messages (chosen and rejected ones too)"
            " and tools."
        ),
    ],
    store: StoreOption = None,
    experiment: ExperimentOption = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Match upper and lower case exactly.")
    ] = False,
    limit: Annotated[int, typer.Option(help="Stop after this many results.", min=1)] = 20,
    as_of: AsOfOption = None,
    as_json: JsonLinesOption = False,
) -> None:
    """Find rollouts by their text; each is printed as soon as it is found.

    Example: trinity-buffer search "3 1 2" --limit 5
    """
    damaged: list[Any] = []

    async def question(source: Source) -> int:
        count = 0
        with progress() as report:
            matches = questions.search(
                source, text, exact=exact, progress=report, unreadable=damaged
            )
            async for match in matches:
                count += 1
                if as_json:
                    print_json(match)
                else:
                    say(f"{match.uid}  {match.field}: {match.excerpt}")
                if count == limit:
                    break
        return count

    count = asked_of(store, experiment, as_of, question)
    if not count and not as_json:
        say(f"no text holds {text!r}")
    end_if_damaged(damaged)


def top(
    store: StoreOption = None,
    experiment: ExperimentOption = None,
    once: Annotated[bool, typer.Option("--once", help="Print one screen, and end.")] = False,
) -> None:
    """Watch a run: how far each process is, the last steps, and the last events.

    Example: trinity-buffer top --once
    """

    async def watch(opened: Experiment) -> None:
        if once:
            console().print(await _screen(opened))
            return
        changes = opened.database.changes
        with Live(console=console(), screen=False, auto_refresh=False) as live:
            while True:
                state = await changes.state()  # before the reads: a write meanwhile is not missed
                live.update(await _screen(opened), refresh=True)
                if await opened.is_finished():
                    return
                await changes.changed(state)
                await anyio.sleep(FRAME_S)  # writes meanwhile share the next frame

    run(lambda: on_experiment(store, experiment, watch))


async def _screen(experiment: Experiment) -> Group:
    source = now(experiment)
    consumers = await source.read(writer_queries.consumers, source.key)
    trainers = [one for one in await questions.leases(source) if one.kind == "trainer"]
    parts: list[tuple[str, Sequence[str], Sequence[Sequence[Any]]]] = [
        (
            one_line(experiment.name),
            ["trainer", "lease", "handed out", "committed"],
            [(one.trainer, one.state, one.leased_step, one.committed_step) for one in trainers],
        ),
        (
            "strategies",
            ["set", "seen up to", "groups"],
            [(x.name, x.cursor, x.calls) for x in consumers.values() if x.kind == "strategy"],
        ),
    ]
    for one in trainers[:1]:
        lines = await questions.steps(source, trainer=one.trainer, limit=5)
        rows = [(x.step, x.state, x.rows, x.reward, x.staleness, x.seconds) for x in lines]
        columns = ["step", "state", "rows", "reward", "staleness", "seconds"]
        parts.append(("last steps", columns, rows))
    after = await questions.position_before(experiment, 8)
    last = [line async for line in questions.event_lines(experiment, after=after)]
    what = [(e.position, time_of(e.recorded_at), e.kind, e.actor, e.summary[:60]) for e in last]
    parts.append(("last events", ["position", "time", "kind", "actor", "what"], what))
    return Group(*(table(*part) for part in parts))
