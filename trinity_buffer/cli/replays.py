"""Train a run again from its log, and compare the weights with the recorded ones."""

from __future__ import annotations

import math
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import anyio

from trinity_buffer.cli import roles
from trinity_buffer.cli.roles import Say
from trinity_buffer.cli.run_config import algorithm_of, overridden, parts_of, resolved
from trinity_buffer.demo.policy import TransformerPolicy
from trinity_buffer.errors import CheckpointError, InvalidArgumentError
from trinity_buffer.options import renamed_key
from trinity_buffer.pipeline.config import RunConfig
from trinity_buffer.pipeline.history.replay import RecordedEnd, open_replay_stream, recorded_end
from trinity_buffer.pipeline.store import open_store
from trinity_buffer.pipeline.train.checkpoint import digest_of, require_digest
from trinity_buffer.trainer.checkpoint import read_step, save_checkpoint
from trinity_buffer.trainer.determinism import largest_difference
from trinity_buffer.trainer.requirements import stream_options
from trinity_buffer.trainer.trainer import StepReport, Trainer
from trinity_buffer.user_code import own_code

OF_STEPS = frozenset(
    {
        *("groups_per_batch", "groups_per_step", "rollouts_per_group", "tokens_per_microbatch"),
        *("layout", "max_staleness", "max_queued_groups", "strategy", "strategy_args"),
        *("group_timeout_s", "idle_s", "on_incomplete_group", "stalled_after_s"),
        *("commit_every_steps", "max_steps"),
    }
)
"""Keys without effect on a replay: they decide what steps hold, and when a run commits and ends."""


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """The result of a replay.

    Attributes:
        first, last: gradient steps that were run again.
        identical: whether the weights are bit for bit those published after ``last``; None: another
            loss was used, or none were published then.
        digest: sha256 of the replayed weights.
        recorded: sha256 of the recorded ones, if there are any.
        differences: of software, device and settings: name -> recorded, here.
        mean_loss: over the steps.
        largest_difference: of the weights, relative to the largest of their tensor; None: they were
            not compared, or it is infinite.
        tensor: the tensor with that difference; None: they were not compared.
        within: whether it is within the tolerance; None: there is none, or they were not compared.
    """

    first: int
    last: int
    identical: bool | None
    digest: str
    recorded: str | None
    differences: dict[str, list[Any]]
    mean_loss: float
    largest_difference: float | None
    tensor: str | None
    within: bool | None


def replay(
    url: str,
    experiment: str,
    *,
    steps: str | None,
    from_checkpoint: Path | None,
    overrides: list[str],
    tolerance: float | None,
    say: Say,
) -> ReplayReport:
    """Train again on the recorded batches, changing nothing in the store.

    Args:
        url: of the store.
        experiment: its name.
        steps: ``A:B``; either may be left out.
        from_checkpoint: begin with these weights, after their step.
        overrides: of the run's configuration, such as ``algorithm=gspo``; the weights then differ.
        tolerance: largest relative difference of the weights that is accepted; None: compare bits.
        say: prints a line.
    """
    if tolerance is not None and math.isnan(tolerance):
        raise InvalidArgumentError("--tolerance nan: give a number, such as 1e-5")
    roles.use_one_thread()
    config = _configured(url, experiment, overrides)
    first, last = _span(steps, from_checkpoint)
    end = anyio.run(_end, url, experiment, config.trainer, last)
    options: dict[str, Any] = {"first": first, "last": end.step, "repeat_skips": not overrides}
    if overrides:  # another algorithm may need other columns than the run's
        options["needs"] = stream_options(algorithm_of(config))["needs"]
    losses: list[float] = []

    def on_step(report: StepReport) -> None:
        losses.append(report.loss)
        say(roles.line_of(report))
        _score_as_then(trainer, report.step + 1, end)

    with tempfile.TemporaryDirectory() as scratch:
        with open_replay_stream(
            url,
            experiment=experiment,
            consumer=config.trainer,
            from_checkpoint=from_checkpoint,
            device=config.device,
            **options,
        ) as stream:
            algorithm = algorithm_of(config)
            settings = replace(roles.settings_of(config, Path(scratch)), max_skipped_steps=None)
            trainer = roles.trainer_on(stream, config, algorithm, settings)
            _score_as_then(trainer, first, end)
            with own_code(parts_of(algorithm)):
                trainer.run(on_step)
        weights = save_checkpoint(Path(scratch), trainer.state) / trainer.policy.file_name
        digest = digest_of(weights, like=end.digest)
        identical = None if overrides or end.digest is None else digest == end.digest
        is_measured = tolerance is not None or identical is False
        relative, tensor = _compared(end, weights) if is_measured else (None, None)
    return ReplayReport(
        first,
        end.step,
        identical,
        digest,
        end.digest,
        dict(trainer.differences),
        sum(losses) / len(losses) if losses else 0.0,
        relative,
        tensor,
        within=None if tolerance is None or relative is None else relative <= tolerance,
    )


def _configured(url: str, experiment: str, overrides: list[str]) -> RunConfig:
    """Return the configuration of the run, with what is overridden for a replay on this device."""
    # Refused rather than ignored: the user would take equal weights for a result.
    for key in (renamed_key(override.partition("=")[0]) for override in overrides):
        if key in OF_STEPS:
            raise InvalidArgumentError(
                f"--set {key}: a replay takes its steps, their micro-batches and their advantages "
                "from the log, so that this would change nothing: leave it out"
            )
    run = anyio.run(roles.config_of, url, experiment)
    config = roles.at_its_device(resolved(overridden(asdict(run), overrides)))
    # No commits: the replay's checkpoints are thrown away.
    return replace(config, commit_every_steps=1 << 30, max_steps=None)


def _compared(end: RecordedEnd, weights: Path) -> tuple[float, str] | tuple[None, None]:
    """Return how far ``weights`` are from the recorded ones; None if those no longer exist."""
    if end.weights is None or end.digest is None or not end.weights.exists():
        return None, None
    try:
        require_digest(end.weights, end.digest)
    except CheckpointError:  # other weights have taken their place
        return None, None
    return largest_difference(end.weights, weights)


def _span(steps: str | None, from_checkpoint: Path | None) -> tuple[int, int | None]:
    begin, _, end = (steps or "").partition(":")
    try:
        first, last = (int(text) if text else None for text in (begin, end))
    except ValueError as error:
        raise InvalidArgumentError(f"--steps {steps}: write it as A:B, such as 10:20") from error
    if last is not None and last < (first or 1):
        raise InvalidArgumentError(
            f"--steps {steps}: it ends before it begins: write it as A:B, such as 10:20"
        )
    begin_at = 1 if from_checkpoint is None else read_step(from_checkpoint) + 1
    if first in (None, begin_at):
        return begin_at, last
    wrong = f"{from_checkpoint} is followed by step {begin_at}"
    if from_checkpoint is None:
        wrong = (
            f"to begin at step {first} the weights after step {(first or 1) - 1} are needed: "
            "--from-checkpoint FOLDER"
        )
    raise InvalidArgumentError(f"--steps {steps}: {wrong}")


async def _end(url: str, experiment: str, trainer: str, last: int | None) -> RecordedEnd:
    async with open_store(url, read_only=True) as store:
        return await recorded_end(await store.experiment(experiment), trainer, last)


def _score_as_then(trainer: Trainer, step: int, end: RecordedEnd) -> None:
    """Score a step as the run did: from all logits at once, before the log had heads."""
    for model in trainer.scoring:
        if isinstance(model, TransformerPolicy):
            model.whole_logits = step <= end.without_heads
