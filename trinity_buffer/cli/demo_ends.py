"""The ends of a demo's run: its small tasks, and its transformer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trinity_buffer.algorithm import Algorithm
from trinity_buffer.cli.run_algorithm import algorithm_of
from trinity_buffer.cli.run_config import ModelConfig, RunConfig
from trinity_buffer.cli.run_file import is_folder
from trinity_buffer.demo.needs import needs_of
from trinity_buffer.demo.policy import PolicyConfig, TransformerPolicy
from trinity_buffer.demo.rollout import TaskSampler, evaluate
from trinity_buffer.demo.solutions import SolutionSampler
from trinity_buffer.demo.tasks import GuessNumber, SortDigits, Task
from trinity_buffer.errors import CheckpointError, InvalidArgumentError
from trinity_buffer.explorer.explore import BatchReport, ExploreOptions, Sampler, SamplingExplorer
from trinity_buffer.pipeline.experiment import Experiment
from trinity_buffer.trainer.checkpoint import POLICY_FILE


def task_of(config: RunConfig) -> Task:
    """Return the task of a run."""
    if config.task.name == "guess":
        return GuessNumber(numbers=config.task.numbers, turns=config.task.turns)
    return SortDigits(digits=config.task.digits)


def first_policy(config: RunConfig) -> TransformerPolicy:
    """Return the policy of version 0: random weights that follow from the seed."""
    task, model = task_of(config), config.model
    assert isinstance(model, ModelConfig)
    shape = PolicyConfig(task.vocab_size, model.width, model.layers, model.heads, task.max_length)
    return TransformerPolicy(shape, seed=config.seed)


def require_policies(config: RunConfig) -> None:
    """Return if the policies that a run names are there, and those of a demo speak of its task.

    Raises:
        InvalidArgumentError: names the key, the file or folder and what is wrong with it.
    """
    named = {key: getattr(config, key) for key in ("reference", "teacher")}
    named = {key: path for key, path in named.items() if path is not None}
    if isinstance(config.model, str):  # one's own are large: what is in them is seen in use
        for key, path in named.items():
            if not is_folder(Path(path)):
                raise InvalidArgumentError(
                    f"{key} = {path!r}: there is no such folder; it must hold a causal language "
                    "model of transformers, as model does"
                )
        return
    task = task_of(config)
    for key, path in named.items():
        try:
            shape = TransformerPolicy.load(path).config
        except CheckpointError as error:
            raise InvalidArgumentError(f"{key}={path}: {error}") from error
        if shape.vocab_size != task.vocab_size or shape.max_length < task.max_length:
            raise InvalidArgumentError(
                f"{key}={path} knows {shape.vocab_size} tokens in texts of up to "
                f"{shape.max_length}; the task {task.name!r} has {task.vocab_size}, in texts of up "
                f"to {task.max_length}: name a policy that learnt this task"
            )


def sampler_of(config: RunConfig) -> Sampler:
    """Return what makes the data of a run: its policy, or what solves the task already.

    Raises:
        InvalidArgumentError: the algorithm takes solutions, and the task has none.
    """
    data = needs_of(algorithm_of(config), config.groups_per_step).data
    if data == "rollouts":
        return TaskSampler(first_policy(config), task_of(config), config.seed)
    return SolutionSampler(task_of(config), config.seed, pairs=data == "pairs")


@dataclass(frozen=True, slots=True)
class DemoEnds:
    """The ends of a demo's run: its small tasks, and its transformer."""

    config: RunConfig

    @property
    def policy_file(self) -> str:
        """What the policy is called in a checkpoint."""
        return POLICY_FILE

    @property
    def max_tokens(self) -> int | None:
        """How long an experience of the task may be."""
        return task_of(self.config).max_length

    def policy(self) -> TransformerPolicy:
        """Return the policy of version 0: random weights that follow from the seed."""
        return first_policy(self.config).to(self.config.device)

    def load(self, path: str | Path) -> TransformerPolicy:
        """Return the policy in the file ``path``.

        Raises:
            CheckpointError: there is none.
        """
        return TransformerPolicy.load(path).to(self.config.device)

    def require_explorable(self) -> None:
        """Return if there is something to explore with.

        Raises:
            InvalidArgumentError: the algorithm takes solutions, and the task has none.
        """
        sampler_of(self.config)

    def require_trainable(self) -> None:
        """Return: the first policy of a demo follows from its seed."""

    async def explore(
        self,
        experiment: Experiment,
        algorithm: Algorithm,
        *,
        actor: str,
        acknowledgements: Path | None,
        max_batches: int | None,
        take_over: bool,
        report: Callable[[BatchReport], None],
    ) -> None:
        """Make rollouts of fresh problems until the experiment is finished."""
        config = self.config
        options = ExploreOptions(
            groups_per_batch=config.groups_per_batch,
            rollouts_per_group=config.rollouts_per_group,
            acknowledgements=acknowledgements,
            max_batches=max_batches,
            take_over=take_over,
            report=report,
        )
        per_write = 8 if algorithm.type.use_rollout else config.groups_per_batch
        sampler = sampler_of(config)
        await SamplingExplorer(
            experiment, sampler, actor, options, groups_per_write=per_write
        ).run()

    def accuracy(self, policy: TransformerPolicy, *, problems: int, seed: int) -> float:
        """Return the share of fresh problems that greedy answers solve."""
        return evaluate(policy, task_of(self.config), problems, seed=seed)
