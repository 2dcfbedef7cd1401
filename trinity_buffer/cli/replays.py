"""A run once more from its log: the trainer on the recorded batches, compared with what it made."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import torch

from trinity_buffer.cli.roles import (
    Say,
    config_of,
    line_of,
    settings_of,
    trainer_on,
    use_one_thread,
)
from trinity_buffer.cli.run_algorithm import algorithm_of, parts_of
from trinity_buffer.cli.run_config import RunConfig, overridden, resolved
from trinity_buffer.demo.policy import TransformerPolicy
from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.own_code import own_code
from trinity_buffer.pipeline.history.replay import RecordedEnd, open_replay_stream, recorded_end
from trinity_buffer.pipeline.proof.checkpoint import digest_of
from trinity_buffer.pipeline.store import open_store
from trinity_buffer.pipeline.streaming.committing import environment_of_run
from trinity_buffer.trainer.checkpoint_folder import read_step, save_checkpoint
from trinity_buffer.trainer.requirements import stream_options
from trinity_buffer.trainer.trainer import StepReport, Trainer

OF_STEPS = frozenset(
    {
        *("groups_per_batch", "groups_per_step", "rollouts_per_group", "tokens_per_microbatch"),
        *("layout", "max_staleness", "max_waiting_groups", "strategy", "strategy_args"),
        *(
            "deadline_s",
            "idle_s",
            "incomplete",
            "stalled_after_s",
            "commit_every_steps",
            "max_steps",
        ),
    }
)
"""Keys that say what the steps of a run hold, and when it explores, commits and ends."""


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """What came of a replay.

    Attributes:
        first, last: the gradient steps that were run again.
        identical: whether the weights are bit for bit those that were published after ``last``;
            None where that cannot be asked: another loss, or nothing was published then.
        digest: sha256 of the replayed weights.
        recorded: sha256 of the recorded ones, None if there are none.
        differences: of torch, device, threads and flags, recorded -> here.
        mean_loss: over the steps.
    """

    first: int
    last: int
    identical: bool | None
    digest: str
    recorded: str | None
    differences: dict[str, list[Any]]
    mean_loss: float


def replay(
    url: str,
    experiment: str,
    *,
    steps: str | None,
    from_checkpoint: Path | None,
    overrides: list[str],
    say: Say,
) -> ReplayReport:
    """Train again on the recorded batches, changing nothing in the store.

    Args:
        steps: ``A:B``; either may be left out.
        from_checkpoint: begin with these weights, after the step that they went through.
        overrides: of the run's configuration, such as ``algorithm=gspo``; the weights then differ.
    """
    use_one_thread()
    recorded_config, _ = anyio.run(config_of, url, experiment)
    config = resolved(overridden(recorded_config.model_dump(), overrides))
    _require_effect(overrides)
    first, last = _span(steps, from_checkpoint)
    end = anyio.run(_end, url, experiment, config.trainer, last)
    last, environment = end.step, end.environment
    _require_same(environment)
    span = {"consumer": config.trainer, "first": first, "last": last}
    span["repeat_skips"] = not overrides
    if overrides:  # else it needs what the run had
        span["needs"] = stream_options(algorithm_of(config))["needs"]
    then = partial(_score_as_then, without_heads=end.without_heads)
    recorded = end.digest
    digest, losses = _trained_again(
        url, experiment, config, from_checkpoint, span, then, say, recorded
    )
    unchanged = not overrides and recorded is not None
    return ReplayReport(
        first,
        last,
        digest == recorded if unchanged else None,
        digest,
        recorded,
        _differences(environment),
        sum(losses) / len(losses) if losses else 0.0,
    )


def _require_effect(overrides: list[str]) -> None:
    """Return if each override can change what a replay does.

    Raises:
        InvalidArgumentError: one is of a key that only says how a run gets its steps.
    """
    idle = [key for key in (one.partition("=")[0] for one in overrides) if key in OF_STEPS]
    if idle:
        raise InvalidArgumentError(
            f"--set {idle[0]}: a replay takes its steps, their micro-batches and their advantages "
            "from the log, so that this would change nothing: leave it out"
        )


def _trained_again(
    url: str,
    experiment: str,
    config: RunConfig,
    from_checkpoint: Path | None,
    span: dict[str, Any],
    score_as_then: Callable[[Trainer, int], None],
    say: Say,
    recorded: str | None,
) -> tuple[str, list[float]]:
    """Return the digest of the weights after the replayed steps, and the losses on the way.

    Args:
        recorded: digest of the weights then, whose version the other has.
    """
    losses: list[float] = []

    def tell(report: StepReport) -> None:
        losses.append(report.loss)
        say(line_of(report))
        score_as_then(trainer, report.step + 1)

    # The trainer must not commit on the way: what it writes is thrown away.
    config = config.model_copy(update={"commit_every_steps": 1 << 30, "max_steps": None})
    with (
        tempfile.TemporaryDirectory() as scratch,
        open_replay_stream(
            url, experiment=experiment, from_checkpoint=from_checkpoint, **span
        ) as stream,
    ):
        settings = replace(settings_of(config, Path(scratch)), max_skipped_steps=None)
        algorithm = algorithm_of(config)
        trainer = trainer_on(stream, config, algorithm, settings)
        score_as_then(trainer, span["first"])
        with own_code(parts_of(algorithm)):
            trainer.run(tell)
        folder = save_checkpoint(Path(scratch), trainer.state)
        return digest_of(folder / trainer.policy.file_name, like=recorded), losses


def _span(steps: str | None, from_checkpoint: Path | None) -> tuple[int, int | None]:
    begin, _, end = (steps or "").partition(":")
    try:
        first = int(begin) if begin else None
        last = int(end) if end else None
    except ValueError as error:
        raise InvalidArgumentError(f"--steps {steps}: write it as A:B, such as 10:20") from error
    if last is not None and last < (first or 1):
        raise InvalidArgumentError(
            f"--steps {steps}: it ends before it begins: write it as A:B, such as 10:20"
        )
    if from_checkpoint is None:
        if first not in (None, 1):
            raise InvalidArgumentError(
                f"--steps {steps}: to begin at step {first} the weights after step "
                f"{(first or 1) - 1} are needed: --from-checkpoint FOLDER"
            )
        return 1, last
    after = read_step(from_checkpoint)
    if first not in (None, after + 1):
        raise InvalidArgumentError(
            f"--steps {steps}: {from_checkpoint} is followed by step {after + 1}"
        )
    return after + 1, last


async def _end(url: str, experiment: str, trainer: str, last: int | None) -> RecordedEnd:
    async with open_store(url, read_only=True) as store:
        return await recorded_end(await store.experiment(experiment), trainer, last)


def _require_same(environment: dict[str, Any]) -> None:
    """Restore what can be restored of the recorded environment."""
    if environment.get("threads"):
        torch.set_num_threads(environment["threads"])
    if environment.get("deterministic"):
        torch.use_deterministic_algorithms(mode=True)


def _score_as_then(trainer: Trainer, step: int, *, without_heads: int) -> None:
    """Let a step be scored as it was: before the log had heads, from all logits at once."""
    for model in trainer.scoring:
        if isinstance(model, TransformerPolicy):
            model.whole_logits = step <= without_heads


def _differences(environment: dict[str, Any]) -> dict[str, list[Any]]:
    here = environment_of_run(environment.get("device", "cpu"))
    return {
        name: [value, here.get(name)]
        for name, value in environment.items()
        if name != "seed" and here.get(name) != value
    }
