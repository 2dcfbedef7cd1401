"""What a run explores with and trains: the demo's tasks, or a model and rollouts of the user's."""

from __future__ import annotations

import inspect
import math
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import anyio
import torch

from trinity_buffer.algorithm import ALGORITHM_TYPE
from trinity_buffer.cli.run_config import algorithm_of, is_folder
from trinity_buffer.demo.policy import PolicyConfig, TransformerPolicy
from trinity_buffer.demo.rollout import SolutionSampler, TaskSampler, evaluate, needs_of
from trinity_buffer.demo.tasks import GuessNumber, SortDigits, Task
from trinity_buffer.errors import CheckpointError, InvalidArgumentError
from trinity_buffer.explorer import explore as exploring
from trinity_buffer.explorer.local_model import LocalModel, load_causal_lm, load_tokenizer
from trinity_buffer.explorer.server import OpenAIModel
from trinity_buffer.lazy import extra
from trinity_buffer.options import option_types
from trinity_buffer.pipeline.config import ModelConfig, RolloutOptions, RunConfig
from trinity_buffer.pipeline.store import Experiment
from trinity_buffer.trainer.causal_lm import CausalLM
from trinity_buffer.trainer.policy import in_eval_mode
from trinity_buffer.trainer.requirements import require, strategy_of, unread_models
from trinity_buffer.user_code import failed, kind_of, look_in, own_code


def task_of(config: RunConfig) -> Task:
    """Return the demo's task of a run."""
    if config.task.name == "guess":
        return GuessNumber(numbers=config.task.numbers, turns=config.task.turns)
    return SortDigits(digits=config.task.digits)


def first_policy(config: RunConfig) -> TransformerPolicy:
    """Return the policy of version 0: random weights that depend on the seed alone."""
    task, model = task_of(config), config.model
    assert isinstance(model, ModelConfig)
    shape = PolicyConfig(task.vocab_size, model.width, model.layers, model.heads, task.max_length)
    return TransformerPolicy(shape, seed=config.seed)


def require_run(
    config: RunConfig,
    *,
    explores: bool | None = None,
    schema: str = "experience",
    columns: Collection[str] | None = None,
    experiments: Collection[str] | None = None,
) -> None:
    """Raise InvalidArgumentError unless a run has what its algorithm needs.

    Args:
        config: of the run.
        explores: require reference and teacher, and what makes rollouts, or what is trained; None:
            none of them.
        schema: of its data.
        columns: of the stored rows; None: of those that our explorers will record.
        experiments: of the store; None if it does not exist yet.
    """
    algorithm = algorithm_of(config)
    if "rollouts_per_group" in config.algorithm_args:
        raise InvalidArgumentError(
            "algorithm_args.rollouts_per_group: say rollouts_per_group, which the explorers read"
        )
    if config.trainer == strategy_of(algorithm):
        raise InvalidArgumentError(
            f"trainer={config.trainer!r} is the name of the strategy's annotation set: give the "
            "trainer another"
        )
    correction = algorithm.choices["importance_correction"].name
    if correction != "none" and not config.recompute_old_logprob:
        raise InvalidArgumentError(
            f"importance_correction={correction!r} needs recompute_old_logprob=true: it compares "
            "the trainer's log-probabilities with those of the rollouts"
        )
    require(
        algorithm,
        schema=schema,
        columns=columns,
        rollouts_per_group=config.rollouts_per_group,
        teacher=config.teacher is not None,
        expert=config.expert_experiment,
        experiments=experiments,
    )
    if explores is not None:
        require_policies(config)
        backend_for(config).require(explores=explores)
        models = {"reference": config.reference, "teacher": config.teacher}
        for message in unread_models(algorithm, **models):
            raise InvalidArgumentError(message)


def require_policies(config: RunConfig) -> None:
    """Raise InvalidArgumentError unless reference and teacher exist, and fit the demo's task."""
    for key in ("reference", "teacher"):
        path = getattr(config, key)
        if path is None:
            continue
        if isinstance(config.model, str):  # large: its content is checked when it is loaded
            if not is_folder(Path(path)):
                raise InvalidArgumentError(
                    f"{key} = {path!r}: there is no such folder; it must hold a causal language "
                    "model of transformers, as model does"
                )
            continue
        task = task_of(config)
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


@dataclass(frozen=True, slots=True)
class DemoBackend:
    """The demo's small tasks and its transformer."""

    config: RunConfig
    policy_file = TransformerPolicy.file_name

    @property
    def max_tokens(self) -> int | None:
        """Length of the longest experience of the task."""
        return task_of(self.config).max_length

    def policy(self) -> TransformerPolicy:
        """Return the policy of version 0."""
        return first_policy(self.config).to(self.config.device)

    def load(self, path: str | Path) -> TransformerPolicy:
        """Return the policy in the file ``path``; CheckpointError if there is none."""
        return TransformerPolicy.load(path).to(self.config.device)

    def require(self, *, explores: bool) -> None:
        """Raise InvalidArgumentError if the algorithm takes solutions and the task has none."""
        if explores:  # to train, the first policy only needs its seed
            self._sampler()

    def _sampler(self) -> exploring.Sampler:
        config = self.config
        data = needs_of(algorithm_of(config), config.groups_per_step).data
        if data == "rollouts":
            return TaskSampler(first_policy(config), task_of(config), config.seed)
        return SolutionSampler(task_of(config), config.seed, pairs=data == "pairs")

    async def explore(self, experiment: Experiment, *, actor: str, **options: Any) -> None:
        """Make rollouts of fresh problems until the experiment is finished."""
        rules, sampler = exploring.ExploreOptions(**options), self._sampler()
        # Recorded data take no time to make, so a batch of them is one write.
        samples = algorithm_of(self.config).type.use_rollout
        per_write = 8 if samples else self.config.groups_per_batch
        explorer = exploring.SamplingExplorer(
            experiment, sampler, actor, rules, groups_per_write=per_write
        )
        await explorer.run()

    def accuracy(self, policy: TransformerPolicy, *, problems: int, seed: int) -> float:
        """Return the fraction of fresh problems that greedy answers solve."""
        return evaluate(policy, task_of(self.config), problems, seed=seed)


@dataclass(frozen=True, slots=True)
class HFBackend:
    """The user's own rollouts, and the model of transformers that the configuration names."""

    config: RunConfig
    policy_file = CausalLM.file_name

    @property
    def max_tokens(self) -> int | None:
        """Length of the longest experience, as the configuration says."""
        return self.config.max_tokens

    def policy(self) -> CausalLM:
        """Return the model that the configuration names."""
        return self.load(self._model_path)

    def load(self, path: str | Path) -> CausalLM:
        """Return the model in the folder ``path``; InvalidArgumentError if it cannot be loaded."""
        _disable_progress_bars()
        return CausalLM(load_causal_lm(path).to(self.config.device))

    def require(self, *, explores: bool) -> None:
        """Raise InvalidArgumentError unless there is all that is trained, or that explores.

        That is a rollout, tasks and what is sampled from.
        """
        if ALGORITHM_TYPE.get(self.config.algorithm).use_critic:
            raise InvalidArgumentError(
                f"algorithm={self.config.algorithm} trains a critic, and a model of transformers "
                "has none here: choose an algorithm without a critic, such as grpo"
            )
        target = self.config.evaluation.target_accuracy
        if target is not None and self.config.evaluate is None:
            raise InvalidArgumentError(
                f"evaluation.target_accuracy={target} needs evaluate=MODULE:FUNCTION, which "
                "measures it: name one, or leave it out (null)"
            )
        if explores:
            self._rollout()
            self._tasks(checks_only=True)
        # A server of vLLM renders the chat template itself, so its explorers need no tokenizer.
        if not explores or self.config.server is None or self.config.server_type != "vllm":
            _ = self._model_path

    async def explore(self, experiment: Experiment, **options: Any) -> None:
        """Roll out the list of tasks to its end, or until the experiment is finished."""
        config = self.config
        rollout, tasks = self._rollout(), self._tasks()
        options |= {name: getattr(config.explorer, name) for name in option_types(RolloutOptions)}
        torch.seed()  # explorers started together must not sample the same tokens
        with own_code({f"rollout {config.rollout!r}": rollout}):
            async with self._model() as model:
                await exploring.explore(
                    experiment, tasks=tasks, rollout=rollout, model=model, **options
                )

    def accuracy(self, policy: CausalLM, *, problems: int, seed: int) -> float | None:  # noqa: ARG002
        """Return the accuracy of greedy answers, as ``evaluate`` says, or None without it."""
        if self.config.evaluate is None:
            return None
        evaluate = self._named("evaluate", self.config.evaluate)
        tokenizer = load_tokenizer(self._model_path)
        most = self.config.explorer.max_tokens
        with own_code({f"evaluate {self.config.evaluate!r}": evaluate}), in_eval_mode(policy.model):
            model = LocalModel(policy.model, tokenizer, temperature=0, max_tokens=most)
            returned = anyio.run(evaluate, model)
        try:
            accuracy = float(returned)
        except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: of torch
            accuracy = math.nan
        if not math.isfinite(accuracy):
            what = returned if isinstance(returned, float) else kind_of(returned)
            raise InvalidArgumentError(
                f"evaluate = {self.config.evaluate!r}: it returned {what}, it must return the "
                "accuracy, one finite number"
            )
        return accuracy

    @asynccontextmanager
    async def _model(self) -> AsyncIterator[Any]:
        """Yield the model that rollouts talk to."""
        most, dialect = self.config.explorer.max_tokens, self.config.server_type
        if self.config.server is None:
            _disable_progress_bars()
            yield LocalModel(self._model_path, max_tokens=most)
            return
        tokenizer = None if dialect == "vllm" else load_tokenizer(self._model_path)
        async with OpenAIModel(
            self.config.server, dialect=dialect, tokenizer=tokenizer, max_tokens=most
        ) as model:
            yield model

    @property
    def _model_path(self) -> str:
        """The folder of the model, relative to the folder of the file."""
        assert isinstance(self.config.model, str)
        path = Path(self.config.folder or ".").resolve() / self.config.model
        if not is_folder(path):
            raise InvalidArgumentError(
                f"model = {self.config.model!r}: there is no folder {path}; it must hold a causal "
                "language model of transformers, tokenizer included"
            )
        return str(path)

    def _rollout(self) -> Callable[[Any, Any], Any]:
        name = self.config.rollout
        if name is None:
            raise InvalidArgumentError(
                "the run names no rollout, so there is nothing to explore: give rollout and tasks "
                "(`trinity-buffer init FOLDER` writes an example), or use `trinity-buffer record`"
            )
        rollout = self._named("rollout", name)
        if not inspect.iscoroutinefunction(rollout):
            raise InvalidArgumentError(
                f"rollout = {name!r}: it must be an async function of a task and a model"
            )
        return rollout  # type: ignore[no-any-return]  # the user's own

    def _tasks(self, *, checks_only: bool = False) -> Any:
        """Return the tasks, or check what ``tasks`` names as far as possible without using it."""
        tasks, wrong = self._named("tasks", str(self.config.tasks)), None
        with own_code({f"tasks {self.config.tasks!r}": tasks if callable(tasks) else type(tasks)}):
            # An async function is callable too, and its coroutine is no list.
            if inspect.iscoroutinefunction(tasks) or inspect.isasyncgenfunction(tasks):
                wrong = "it is an async function"
            elif not (callable(tasks) and checks_only):
                origin = "it returned" if callable(tasks) else "it is"
                tasks = tasks() if callable(tasks) else tasks
                is_list = isinstance(tasks, Iterable) or hasattr(tasks, "__getitem__")
                if not is_list or isinstance(tasks, str | bytes):
                    wrong = f"{origin} {kind_of(tasks)}"
                elif not (checks_only or hasattr(tasks, "items")):
                    tasks = list(tasks)  # a mapping stays one: its keys name the tasks
        if wrong is not None:
            raise InvalidArgumentError(
                f"tasks = {self.config.tasks!r}: {wrong}, it must be a list of tasks, or a plain "
                "function that returns one"
            )
        return tasks

    def _named(self, key: str, name: str) -> Any:
        """Return the object ``module:name``, looked up first in the folder of the file."""
        module, _, attribute = name.partition(":")
        folder = look_in(self.config.folder)
        try:
            return getattr(import_module(module), attribute)
        except (ImportError, AttributeError, ValueError) as error:
            raise InvalidArgumentError(
                f"{key} = {name!r}: write it as module:name, importable from {folder} ({error})"
            ) from error
        except Exception as error:
            raise failed(f"{key} {name!r}", error) from error


def _disable_progress_bars() -> None:
    """Turn transformers' progress bars off: a supervised process prints into a log."""
    extra("transformers.utils.logging", "hf").disable_progress_bar()


Backend = DemoBackend | HFBackend


def backend_for(config: RunConfig) -> Backend:
    """Return the backend of a run: the user's own if ``model`` is a folder."""
    return HFBackend(config) if isinstance(config.model, str) else DemoBackend(config)
