"""Commands that only ask: the log, groups, rollouts, steps, differences. They load no torch."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, fields, replace
from typing import Annotated, Any, TypeVar

import anyio
import typer
from rich.console import Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from trinity_buffer import inspector as questions
from trinity_buffer.cli import options, output
from trinity_buffer.cli.escaping import one_line, unescaped
from trinity_buffer.errors import InvalidArgumentError, UnknownNameError
from trinity_buffer.identity import parse_uid
from trinity_buffer.inspector.experience import Unreadable
from trinity_buffer.inspector.group_views import Order as GroupOrder
from trinity_buffer.inspector.source import Source, now
from trinity_buffer.inspector.step_lines import ROW_ORDERS, RowOrder
from trinity_buffer.inspector.token_table import token_texts
from trinity_buffer.pipeline.coordination.diagnosis import counted
from trinity_buffer.pipeline.store import Experiment, Store, open_store
from trinity_buffer.pipeline.verify.projections import Progress
from trinity_buffer.store import writer_queries

T = TypeVar("T")

After = Annotated[int | None, typer.Option(min=0)]

STEP_METRICS = ("loss", "kl", "entropy", "gradient_norm", "learning_rate")
"""What `steps` shows of the metrics of a step."""

ROW_METRICS = ("loss_share", "ratio_mean", "ratio_max", "clipped", "kl", "entropy", "gap_mean")
"""What `blame` shows of what the trainer measured of each row."""

MOST_LINES = 200
"""Lines of steps that `diff` prints of two runs."""

FRAME_S = 0.5
"""Minimum time between two frames of `top`, however much is written."""


@options.command(lines=True, follows=True)
async def events(
    experiment: Experiment,
    follow: Annotated[bool, typer.Option("--follow", "-f")] = False,
    after: int | None = None,
    kind: list[str] | None = None,
    limit: options.Count = 20,
    as_of: options.OptionalCount = None,
    as_json: bool = False,
) -> None:
    """Print the events of the log, one per line: the last ones, or those after a position.

    Example: trinity-buffer events --follow --kind StepsCommitted

    Args:
        follow: Wait for more until the experiment is finished.
        after: Only events after this position. Default: the last ones.
        kind: Only this kind, such as StepsCommitted; repeatable.
        limit: How many; with --follow and without --after, how many earlier ones come first.
    """
    first = after
    if first is None:  # counted among the chosen kinds, so that `limit` lines are printed
        first = await questions.position_before(experiment, limit, kinds=kind, up_to=as_of)
    printed = 0
    lines = questions.event_lines(experiment, after=first, up_to=as_of, follow=follow, kinds=kind)
    async for line in lines:
        if as_json:
            output.print_json(line)
        else:
            time = output.time_of(line.recorded_at)
            head = f"{line.position:>8}  {time}  {line.kind:<20} {line.actor:<12}"
            output.say(f"{head} {line.summary}")
        printed += 1
        if printed == limit and not follow:
            return


@options.command(lines=True)
async def groups(
    source: Source,
    annotation_set: str | None = None,
    batch: str | None = None,
    step: options.OptionalCount = None,
    trainer: str | None = None,
    sort: GroupOrder = "newest",
    limit: options.Count = 20,
) -> output.Answer:
    """Show groups: rewards and advantages of the runs of a task, and what became of them.

    Example: trinity-buffer groups --set grpo --limit 5

    Args:
        batch: Only groups of this batch.
        step: Only groups that this gradient step was trained on.
        sort: Which groups come first; any order but newest reads all groups.
        limit: Show at most this many, the first ones.
    """
    trained = None
    if step is not None:
        contents = await questions.blame(source, step, trainer=trainer)
        annotation_set = annotation_set or contents.annotation_set
        # An expert's row has no group in this experiment.
        eids = [parse_uid(row.uid) for row in contents.rows if row.uid and not row.experiment]
        trained = list(dict.fromkeys((str(eid.batch), str(eid.task)) for eid in eids))
    views = await questions.groups(
        source, annotation_set=annotation_set, batch=batch, named=trained, order=sort, limit=limit
    )

    columns = ["uid", "runs", "mean", "deviation", "rewards", "advantages", "state"]
    first = "the newest" if sort == "newest" else f"the greatest {sort}"
    title = f"{counted(len(views), 'group')}, {first} first"
    return output.Answer(views, lambda: [output.table(title, columns, [*map(_cells_of, views)])])


def _cells_of(view: questions.GroupView) -> tuple[Any, ...]:
    runs, known = view.runs, len({run.run for run in view.runs})
    rewards, advantages = [run.reward for run in runs], [run.advantage for run in runs]
    numbers = (known, view.mean, view.deviation, _numbers(rewards), _numbers(advantages))
    return (runs[0].uid, *numbers, view.state)


def _numbers(values: list[float | None], most: int = 8) -> str:
    known = {value for value in values[:most] if value is not None}
    # As few digits as tell them apart.
    few = next((n for n in range(2, 17) if len({f"{v:.{n}g}" for v in known}) == len(known)), 17)
    text = " ".join("-" if value is None else f"{value:.{few}g}" for value in values[:most])
    return text + (f" … {len(values)}" if len(values) > most else "")


async def _by_uid(question: Callable[[Source, str], Awaitable[T]], source: Source, uid: str) -> T:
    """Ask about ``uid``; if there is none, about the one that a table prints as ``uid``."""
    try:
        return await question(source, uid)
    except UnknownNameError:
        if unescaped(uid) == uid:
            raise
        return await question(source, unescaped(uid))


@options.command()
async def show(
    source: Source, uid: str, annotation_set: str | None = None, tokens: bool = False
) -> output.Answer:
    """Show one experience: what it holds, its annotations, where it was trained, or why not.

    Example: trinity-buffer show e0-7/3/1/0/ --tokens

    Args:
        annotation_set: Annotation set whose advantages --tokens shows. Default: the one that was
            trained, or the first.
        tokens: A line for each token: id, mask, log-prob, advantage.
    """
    view = await _by_uid(questions.show, source, uid)
    if not tokens:
        return output.Answer(view, _experience_text(view))
    by_token = await questions.tokens(source, view.uid, annotation_set=annotation_set)
    texts = await token_texts(source, by_token.ids)
    columns = ({} if texts is None else {"text": texts}) | by_token.lists()
    value = asdict(view) | {"tokens": columns, "measured_in": by_token.measured_in}
    return output.Answer(value, lambda: [*_experience_text(view), _token_table(by_token, columns)])


def _token_table(tokens: questions.TokenTable, columns: Mapping[str, Sequence[Any]]) -> Table:
    of = "" if tokens.annotation_set is None else f", advantages of set {tokens.annotation_set}"
    of += "" if tokens.measured_in is None else f", measured in {tokens.measured_in}"
    parts = [
        "prompt" if at < tokens.prompt_length else "trained" if mask else "masked"
        for at, mask in enumerate(columns["mask"])
    ]
    cells: dict[str, Any] = {"part": parts, "id": columns["id"]}
    if "text" in columns:
        cells["text"] = [*map(repr, columns["text"])]
    cells |= {name: columns[name] for name in tokens.columns}
    rows = [(at, *values) for at, values in enumerate(zip(*cells.values(), strict=True))]
    return output.table(one_line(f"{len(parts)} tokens{of}"), ["token", *cells], rows)


def _experience_text(view: questions.ExperienceView) -> output.Lines:
    uid = escape(one_line(view.uid))
    yield Text.from_markup(f"[bold]{uid}[/bold] at {view.address}, {view.kind}", emoji=False)
    yield (
        f"recorded by {view.actor}, {output.time_of(view.recorded_at)} UTC, "
        f"segment {view.segment}, digest {view.digest}"
    )
    yield (
        f"reward {output.shown(view.reward)}, policy version {output.shown(view.policy_version)}, "
        f"{view.prompt_length} prompt + {view.length - view.prompt_length} response tokens "
        f"({view.trained_tokens} trained), finish reason {output.shown(view.finish_reason)}"
    )
    if view.refused is not None:
        yield f"refused: {view.refused}"
    if view.archived is not None:
        yield output.verbatim(view.archived)
    yield _tensor_table("tensors", view.tensors)
    # Indented, so that no line of a stored text looks like a field of its own.
    for name, value in view.objects.items():
        yield output.verbatim(f"{name}: {value}".replace("\n", "\n  "))
    for part in view.sets:
        reason = "" if part.reason is None else f": {part.reason}"
        where = "" if part.annotation is None else f" at {part.annotation}"
        copies = f", {part.copies} copies" if part.copies > 1 else ""
        yield ""
        yield f"set {part.annotation_set}: {part.state}{reason}{where}{copies}"
        if part.tensors:
            yield _tensor_table("", part.tensors)
        for step in part.steps:
            held = step.state if step.committed else "leased, not committed,"
            fate = f"{held} in step {step.step}" if step.step else f"rejected: {step.reason}"
            yield f"  {step.trainer}: {fate}"
            if step.measured:
                yield "    " + ", ".join(f"{k} {output.shown(v)}" for k, v in step.measured.items())


def _tensor_table(title: str, tensors: Mapping[str, questions.TensorSummary]) -> Table:
    rows = []
    for name, of in tensors.items():
        shape = "× mask" if of.scaled_mask else "×".join(map(str, of.shape))
        first = " ".join(map(output.shown, of.first))
        rows.append((name, of.dtype, shape, of.minimum, of.mean, of.maximum, first))
    return output.table(title, ["field", "dtype", "shape", "min", "mean", "max", "first"], rows)


@options.command(lines=True)
async def steps(
    source: Source, trainer: str | None = None, after: After = None, limit: options.Count = 20
) -> output.Answer:
    """Show gradient steps: rows, tokens, reward, staleness, seconds, and what the trainer recorded.

    Example: trinity-buffer steps --limit 10

    Args:
        after: Only steps above this one. Default: the last ones.
        limit: Show at most this many steps.
    """
    lines = await questions.steps(source, trainer=trainer, after=after, limit=limit)

    columns = "step, state, rows, groups, tokens, reward, staleness, oldest, seconds"
    columns += _known("metrics", STEP_METRICS, lines)
    title = f"steps of {lines[0].trainer}" if lines else "no steps yet"
    return output.Answer(lines, lambda: [output.table_of(one_line(title), columns, lines)])


def _known(attribute: str, names: Sequence[str], items: Sequence[object]) -> str:
    """Return columns of those names that a table of an item has: others would be of dashes."""
    known = [name for name in names if any(name in getattr(item, attribute) for item in items)]
    return "".join(f", {name}={attribute}.{name}" for name in known)


@options.command()
async def blame(
    source: Source,
    step: Annotated[int, typer.Argument(min=1)],
    trainer: str | None = None,
    sort: RowOrder = "slot",
    limit: options.OptionalCount = None,
) -> output.Answer:
    """Say exactly what one gradient step was trained on, and whether its commit proves it.

    Example: trinity-buffer blame 2 --sort loss-share

    Args:
        step: Number of a gradient step.
        sort: Order of the rows.
        limit: Show at most this many rows.
    """
    contents = await questions.blame(source, step, trainer=trainer)
    if sort == "loss-share" and not any(row.measured for row in contents.rows):
        raise InvalidArgumentError(
            f"--sort loss-share: trainer {contents.line.trainer!r} measured no rows of step {step} "
            "(record_row_metrics of a run; a loop of your own measures none); --sort abs-advantage "
            "needs no measure"
        )
    rows = tuple(sorted(contents.rows, key=ROW_ORDERS[sort])[:limit])

    def text() -> output.Lines:
        line = contents.line
        proof = {True: "its commit names it", False: "ITS COMMIT NAMES ANOTHER"}
        yield (
            f"step {step} of {line.trainer}, {line.state}: {counted(line.rows, 'row')} in "
            f"{counted(line.groups, 'group')} and {counted(line.microbatches, 'micro-batch')} "
            f"({contents.layout}), set {contents.annotation_set}, "
            f"{output.time_of(line.recorded_at)} UTC; manifest {contents.digest}, "
            + ("not committed" if contents.proven is None else proof[contents.proven])
        )
        columns = (
            "slot, uid, micro-batch=microbatch, reward, advantage, version=policy_version, "
            "stale=staleness, tokens=length, actor"
        ) + _known("measured", ROW_METRICS, contents.rows)
        title = f"{len(rows)} rows"
        if len(rows) < len(contents.rows):
            title = f"{len(rows)} of {len(contents.rows)} rows"
        if sort == "loss-share" and not any("loss_share" in row.measured for row in contents.rows):
            title += ", by slot: the loss had no gradient that they could share"
        # An expert's row has no actor here, but an experiment.
        named = [replace(row, actor=row.actor or row.experiment) for row in rows]
        yield output.table_of(title, columns, named)

    return output.Answer(replace(contents, rows=rows), text())


@options.command()
async def why(source: Source, uid: str) -> output.Answer:
    """Say why a rollout was trained or never was: each event that decided it, in order.

    Example: trinity-buffer why e0-7/3/1/0/
    """
    answer = await _by_uid(questions.why, source, uid)
    table = output.table_of("", "position, time=recorded_at, actor, what", answer.reasons)
    return output.Answer(answer, [f"{answer.uid}: {answer.verdict}", table])


@options.command(lines=True)
async def rejected(
    source: Source, by: str | None = None, reason: str | None = None, limit: options.Count = 20
) -> output.Answer:
    """Show what was left out, by whom and why.

    Example: trinity-buffer rejected --reason zero_variance

    Args:
        by: Only what this strategy or trainer rejected; door: refused by write().
        reason: Only this reason, or this kind of reason, such as stale or invalid.
        limit: Show at most this many, the newest ones.
    """
    rows = await questions.rejections(source, by=by, reason=reason, limit=limit)
    counts = await questions.rejection_counts(source)
    known = {name for who, reasons in counts.items() if by in (None, who) for name in reasons}
    if reason is not None and known and not rows:
        names = ", ".join(map(repr, sorted(known)))
        message = f"no rejection has the reason {reason!r} (there: {names})"
        sys.stderr.write(one_line(message) + "\n")  # standard output may be parsed as JSON

    def text() -> output.Lines:
        yield from (f"{name}: {output.shown(reasons)}" for name, reasons in counts.items())
        if rows:
            title = f"{len(rows)}, the newest first"
            yield output.table_of(title, "position, by, reason, uid", rows)
        elif not known:
            yield "nothing was left out" if by is None else f"{by} left out nothing"

    return output.Answer(rows, text())


@options.command(lines=True)
async def leases(source: Source) -> output.Answer:
    """Show who holds each lease of a trainer or strategy, until when, and how far a trainer is.

    Example: trinity-buffer leases --json
    """
    held = await questions.leases(source)
    columns = (
        "kind, name=trainer, state, owner, token, expires in s=expires_in_s, leased=leased_step, "
        "committed=committed_step"
    )
    title = "leases" if held else "no trainer yet"
    return output.Answer(held, [output.table_of(title, columns, held)])


@options.command(lines=True)
async def staleness(
    source: Source, trainer: str | None = None, after: After = None, limit: options.Count = 100
) -> output.Answer:
    """Show staleness, in policy versions: by gradient step and by actor, and whether it grew.

    Example: trinity-buffer staleness --limit 50

    Args:
        after: Only steps above this one. Default: the last ones.
        limit: Show at most this many steps.
    """
    by_step = await questions.staleness(source, trainer=trainer, after=after, limit=limit)

    def text() -> output.Lines:
        yield output.table_of("", "step, state, actor, rows, mean, greatest", by_step)
        yield from map(_growth_line, questions.growth_by_actor(by_step))
        if not by_step:
            yield "no row of these steps names its policy version (info['model_version'])"

    return output.Answer(by_step, text())


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


@options.command()
async def diff(
    store: Store,
    first: str,
    second: str,
    experiment: str | None = None,
    other_store: str | None = None,
    limit: options.Count = 20,
    as_of: options.OptionalCount = None,
    *,
    progress: Progress,
) -> output.Answer:
    """Compare two annotation sets over the same rollouts, or two runs step by step.

    Example: trinity-buffer diff grpo grpo-4

    Args:
        first: An annotation set, or an experiment.
        second: Another one.
        other_store: Store of SECOND, if it is an experiment.
        limit: Show at most this many differing rows.
    """
    async with AsyncExitStack() as stack:
        other = store
        if other_store is not None:
            other = await stack.enter_async_context(open_store(other_store, read_only=True))
        # Names of two experiments go before those of two sets of one.
        if first in await store.experiments() and second in await other.experiments():
            if as_of is not None:
                raise InvalidArgumentError(
                    "--as-of is a position of one log: it goes with two annotation sets, not two "
                    "runs"
                )
            a, b = now(await store.experiment(first)), now(await other.experiment(second))
            runs = await questions.compare_runs(a, b, progress=progress)
            return output.Answer(runs, _runs_text(runs, store.url, other.url))
    chosen = await store.experiment(await options.experiment_in(store, experiment))
    async with questions.as_of(chosen, as_of, progress) as source:
        sets = await questions.compare_sets(source, first, second, limit=limit, progress=progress)
    # `asdict` would copy a Counter by counting its items.
    value = {one.name: getattr(sets, one.name) for one in fields(sets) if one.name != "total"}
    value["mean"] = sets.mean
    return output.Answer(value, _sets_text(sets), sets.unreadable)


def _sets_text(sets: questions.SetDifference) -> output.Lines:
    states = sets.states.most_common()
    yield output.table(f"{sets.first} / {sets.second}", ["states", "experiences"], states)
    yield (
        f"{sets.both} have an advantage in both: {sets.equal} the same, {sets.opposite} of "
        f"opposite sign, mean difference {output.shown(sets.mean)}, "
        f"greatest {output.shown(sets.greatest)}"
    )
    rows = [(r.uid, r.first, r.second, r.first_advantage, r.second_advantage) for r in sets.rows]
    if rows:
        columns = ["uid", sets.first, sets.second, "advantage", "advantage "]
        yield output.table("what differs most", columns, rows)
    else:
        yield f"no difference in any advantage{' that can be read' if sets.unreadable else ''}"


def _runs_text(runs: questions.RunDifference, *stores: str) -> output.Lines:
    sides = [runs.first, runs.second]
    if runs.first == runs.second and len(set(stores)) > 1:  # only the store tells them apart
        sides = [f"{name} ({store})" for name, store in zip(sides, stores, strict=True)]
    if runs.config:
        rows = [(name, *values) for name, values in runs.config.items()]
        yield output.table("configuration", ["key", *sides], rows)
    else:
        yield "no difference in the configuration"
    numbers = [(name, *values) for name, values in runs.numbers.items()]
    yield output.table("in numbers", ["", *sides], numbers)
    steps = runs.steps.items()
    lines = [(step, name, *values) for step, of in steps for name, values in of.items()]
    yield output.table("steps of both", ["step", "", *sides], lines[-MOST_LINES:])
    if len(lines) > MOST_LINES:
        yield f"these are the last {MOST_LINES} of {len(lines)} lines: --json has them all"


@options.command(lines=True)
async def search(
    source: Source,
    text: str,
    exact: bool = False,
    limit: options.Count = 20,
    *,
    progress: Progress,
    as_json: bool,
) -> output.Answer:
    """Find rollouts by their text; each is printed as soon as it is found.

    Example: trinity-buffer search "3 1 2" --limit 5

    Args:
        text: What to look for in prompts, responses, messages (chosen and rejected ones too) and
            tools.
        exact: Match upper and lower case exactly.
        limit: Stop after this many results.
    """
    count, lost = 0, list[Unreadable]()
    matches = questions.search(source, text, exact=exact, progress=progress, unreadable=lost)
    async for match in matches:
        count += 1
        if as_json:
            output.print_json(match)
        else:
            output.say(f"{match.uid}  {match.field}: {match.excerpt}")
        if count == limit:
            break

    return output.Answer([], [] if count else f"no text in the store holds {text!r}", lost)


@options.command()
async def top(experiment: Experiment, once: bool = False) -> None:
    """Watch a run: how far each process is, the last steps, and the last events.

    Example: trinity-buffer top --once

    Args:
        once: Print one screen, and end.
    """
    if once:
        output.console().print(await _screen(experiment))
        return
    changes = experiment.database.changes
    with Live(console=output.console(), screen=False, auto_refresh=False) as live:
        while True:
            state = await changes.state()  # before the reads: a write meanwhile is not missed
            live.update(await _screen(experiment), refresh=True)
            if await experiment.is_finished():
                return
            await changes.changed(state)
            await anyio.sleep(FRAME_S)  # writes meanwhile share the next frame


async def _screen(experiment: Experiment) -> Group:
    source = now(experiment)
    consumers = await source.read(writer_queries.consumers, source.key)
    trainers = [lease for lease in await questions.leases(source) if lease.kind == "trainer"]
    strategies = [row for row in consumers.values() if row.kind == "strategy"]
    columns = "trainer, lease=state, handed out=leased_step, committed=committed_step"
    parts = [
        output.table_of(one_line(experiment.name), columns, trainers),
        output.table_of("strategies", "set=name, seen up to=cursor, groups=calls", strategies),
    ]
    for trainer in trainers[:1]:
        steps = await questions.steps(source, trainer=trainer.trainer, limit=5)
        columns = "step, state, rows, reward, staleness, seconds"
        parts.append(output.table_of("last steps", columns, steps))
    after = await questions.position_before(experiment, 8)
    lines = questions.event_lines(experiment, after=after)
    last = [replace(line, summary=line.summary[:60]) async for line in lines]
    columns = "position, time=recorded_at, kind, actor, what=summary"
    parts.append(output.table_of("last events", columns, last))
    return Group(*parts)
