"""Commands that only ask: events, groups, what became of a rollout. None of them loads torch."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import anyio
import typer
from rich.markup import escape

from trinity_buffer import inspector as questions
from trinity_buffer.cli.asking import asked, asked_of
from trinity_buffer.cli.escaping import one_line, unescaped
from trinity_buffer.cli.options import (
    AsOfOption,
    ExperimentOption,
    JsonLinesOption,
    JsonOption,
    StoreOption,
    TrainerOption,
)
from trinity_buffer.cli.printing import (
    console,
    print_json,
    shown,
    table,
    time_of,
)
from trinity_buffer.cli.running import INTERRUPTED
from trinity_buffer.errors import UnknownNameError
from trinity_buffer.identity import parse_uid
from trinity_buffer.inspector import EventLine, ExperienceView, GroupView, TensorSummary
from trinity_buffer.inspector.group_views import Order as GroupOrder
from trinity_buffer.inspector.source import Source
from trinity_buffer.inspector.step_lines import blame
from trinity_buffer.inspector.token_table import TokenTable, token_texts
from trinity_buffer.inspector.token_table import tokens as tokens_of
from trinity_buffer.pipeline.diagnosis import counted
from trinity_buffer.pipeline.experiment import Experiment

_Told = tuple[TokenTable, list[str] | None]
"""Tokens, and their texts where the experiment names a tokenizer."""
AfterOption = Annotated[
    int | None,
    typer.Option("--after", help="Only events after this position. Default: the last ones."),
]
KindOption = Annotated[
    list[str] | None,
    typer.Option("--kind", help="Only this kind, such as StepsCommitted; repeatable."),
]


def events(
    store: StoreOption = None,
    experiment: ExperimentOption = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Wait for more until the experiment is finished.")
    ] = False,
    after: AfterOption = None,
    kind: KindOption = None,
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

    async def question(found: Experiment) -> None:
        first = after
        if first is None:
            first = await questions.position_before(found, limit, kinds=kind, up_to=as_of)
        printed = 0
        lines = questions.event_lines(found, after=first, up_to=as_of, follow=follow, kinds=kind)
        async for line in lines:
            _print_event(line, as_json=as_json)
            printed += 1
            if printed == limit and not follow:
                return

    try:
        anyio.run(asked, store, experiment, question)
    except KeyboardInterrupt:
        raise typer.Exit(0 if follow else INTERRUPTED) from None


def _print_event(line: EventLine, *, as_json: bool) -> None:
    if as_json:
        print_json(line)
        return
    head = f"{line.position:>8}  {time_of(line.recorded_at)}  {line.kind:<20} {line.actor:<12}"
    console().print(one_line(f"{head} {line.summary}"), markup=False)


def groups(
    store: StoreOption = None,
    experiment: ExperimentOption = None,
    annotation_set: Annotated[
        str | None,
        typer.Option(
            "--set", help="Annotation set whose advantages are shown. Default: the first one."
        ),
    ] = None,
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

    async def question(source: Source) -> list[GroupView]:
        named = None
        if step is not None:
            contents = await blame(source, step, trainer=trainer)
            eids = [parse_uid(row.uid) for row in contents.rows if row.uid and not row.experiment]
            named = list(dict.fromkeys((str(eid.batch), str(eid.task)) for eid in eids))
        return await questions.groups(
            source,
            annotation_set=annotation_set,
            batch=batch,
            named=named,
            order=sort,
            limit=limit,
        )

    found: list[GroupView] = asked_of(store, experiment, as_of, question)
    if as_json:
        print_json(*found)
        return
    columns = ["uid", "runs", "mean", "deviation", "rewards", "advantages", "state"]
    first = "the newest" if sort == "newest" else f"the greatest {sort}"
    title = f"{counted(len(found), 'group')}, {first} first"
    console().print(table(title, columns, map_rows(found)))


def map_rows(found: list[GroupView]) -> list[tuple[Any, ...]]:
    """Return groups as rows of a table, each with the uid of its first experience."""
    return [
        (
            group.runs[0].uid,
            len({run.run for run in group.runs}),
            group.mean,
            group.deviation,
            _numbers([run.reward for run in group.runs]),
            _numbers([run.advantage for run in group.runs]),
            group.state,
        )
        for group in found
    ]


def _numbers(values: list[float | None], most: int = 8) -> str:
    told = " ".join("-" if value is None else f"{value:.2g}" for value in values[:most])
    return told + (f" … {len(values)}" if len(values) > most else "")


def show(
    uid: Annotated[str, typer.Argument(help="batch/task/run/step/suffix, such as e0-7/3/1/0/.")],
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

    async def question(source: Source) -> tuple[ExperienceView, _Told | None]:
        try:
            found = await questions.show(source, uid)
        except UnknownNameError:
            if unescaped(uid) == uid:
                raise
            found = await questions.show(source, unescaped(uid))
        if not tokens:
            return found, None
        by_token = await tokens_of(source, found.uid, annotation_set=annotation_set)
        return found, (by_token, await token_texts(source, by_token.ids))

    found, by_token = asked_of(store, experiment, as_of, question)
    if as_json:
        print_json(found if by_token is None else {**asdict(found), "tokens": _plain(*by_token)})
        return
    _print_experience(found)
    if by_token is not None:
        _print_tokens(*by_token)


def _plain(found: TokenTable, texts: list[str] | None) -> dict[str, Any]:
    """Return the tokens as JSON has them: what is no number is null."""
    columns = {"id": found.ids, "mask": found.mask, **found.columns}
    told = {} if texts is None else {"text": texts}
    return told | {
        name: [None if value != value else value for value in values.tolist()]  # noqa: PLR0124 - NaN
        for name, values in columns.items()
    }


def _print_tokens(found: TokenTable, texts: list[str] | None) -> None:
    of = "" if found.annotation_set is None else f", advantages of set {found.annotation_set}"
    parts = [
        "prompt" if at < found.prompt_length else "trained" if mask else "masked"
        for at, mask in enumerate(found.mask.tolist())
    ]
    columns: dict[str, Any] = {"part": parts, "id": found.ids.tolist()}
    if texts is not None:
        columns["text"] = [one_line(repr(text)) for text in texts]
    columns |= {name: values.tolist() for name, values in found.columns.items()}
    rows = [(at, *values) for at, values in enumerate(zip(*columns.values(), strict=True))]
    title = one_line(f"{len(found.ids)} tokens{of}")
    console().print(table(title, ["token", *columns], rows))


def _print_experience(found: ExperienceView) -> None:
    out = console()
    uid = escape(one_line(found.uid))
    out.print(f"[bold]{uid}[/bold] at {found.address}, {found.kind}")
    out.print(
        f"recorded by {one_line(found.actor)}, {time_of(found.recorded_at)} UTC, "
        f"segment {found.segment}, digest {found.digest}\n"
        f"reward {shown(found.reward)}, policy version {shown(found.policy_version)}, "
        f"{found.prompt_length} prompt + {found.length - found.prompt_length} response tokens "
        f"({found.trained_tokens} trained), finish reason {shown(found.finish_reason)}",
        markup=False,
    )
    if found.refused is not None:
        out.print(one_line(f"refused: {found.refused}"), markup=False)
    if found.archived is not None:
        out.print(found.archived, markup=False)
    out.print(table("tensors", _TENSOR_COLUMNS, _tensor_rows(found.tensors)))
    for name, value in found.objects.items():
        out.print(f"{name}: {value}".replace("\n", "\n  "), markup=False)
    for one in found.sets:
        reason = "" if one.reason is None else f": {one.reason}"
        where = "" if one.annotation is None else f" at {one.annotation}"
        copies = f", {one.copies} copies" if one.copies > 1 else ""
        told = one_line(f"set {one.annotation_set}: {one.state}{reason}{where}{copies}")
        out.print(f"\n{told}", markup=False)
        if one.tensors:
            out.print(table("", _TENSOR_COLUMNS, _tensor_rows(one.tensors)))
        for step in one.steps:
            held = "trained" if step.committed else "leased, not committed,"
            told = f"{held} in step {step.step}" if step.step else f"rejected: {step.reason}"
            out.print(one_line(f"  {step.trainer}: {told}"), markup=False)
            if step.measured:
                numbers = (f"{name} {shown(value)}" for name, value in step.measured.items())
                out.print(f"    {', '.join(numbers)}", markup=False)


_TENSOR_COLUMNS = ["field", "dtype", "shape", "min", "mean", "max", "first"]


def _tensor_rows(tensors: dict[str, TensorSummary]) -> list[tuple[Any, ...]]:
    return [
        (
            name,
            one.dtype,
            "× mask" if one.scaled_mask else "×".join(map(str, one.shape)),
            one.minimum,
            one.mean,
            one.maximum,
            " ".join(map(shown, one.first)),
        )
        for name, one in tensors.items()
    ]
