"""The ends of a run of one's own: a model of transformers or a server, and one's own rollouts."""

from __future__ import annotations

import inspect
import math
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import anyio
import torch

from trinity_buffer.algorithm import ALGORITHM_TYPE, Algorithm
from trinity_buffer.cli.run_config import RunConfig
from trinity_buffer.cli.run_file import is_folder
from trinity_buffer.errors import InvalidArgumentError, TrinityBufferError
from trinity_buffer.experience import Experience
from trinity_buffer.explorer.explore import BatchReport, explore
from trinity_buffer.explorer.local_model import LocalModel, load_causal_lm, load_tokenizer
from trinity_buffer.explorer.openai_model import OpenAIModel
from trinity_buffer.extras import extra
from trinity_buffer.own_code import failed, kind_of, look_in
from trinity_buffer.pipeline.experiment import Experiment
from trinity_buffer.trainer.causal_lm import CausalLM
from trinity_buffer.trainer.policy import in_eval_mode


@dataclass(frozen=True, slots=True)
class OwnEnds:
    """The ends of a run of one's own: its rollouts, and the model that its configuration names."""

    config: RunConfig

    @property
    def policy_file(self) -> str:
        """What the policy is called in a checkpoint."""
        return CausalLM.file_name

    @property
    def max_tokens(self) -> int | None:
        """How long an experience may be, as the configuration says."""
        return self.config.max_tokens

    def policy(self) -> CausalLM:
        """Return the model that the configuration names."""
        return self.load(self._model_path)

    def load(self, path: str | Path) -> CausalLM:
        """Return the model in the folder ``path``.

        Raises:
            InvalidArgumentError: it cannot be loaded.
        """
        _hush()
        return CausalLM(load_causal_lm(path).to(self.config.device))

    def require_explorable(self) -> None:
        """Return if there are a rollout, tasks and, where it samples itself, a model.

        Raises:
            InvalidArgumentError: none is named, or what is named is not there; or what is explored
                could not be trained.
        """
        self._require_no_critic()
        self._rollout()
        self._tasks_or_function()
        if self.config.server is None or self.config.dialect != "vllm":
            _ = self._model_path

    def require_trainable(self) -> None:
        """Return if there is a model, and all that its algorithm trains.

        Raises:
            InvalidArgumentError: there is no such folder, or no critic.
        """
        self._require_no_critic()
        _ = self._model_path

    def _require_no_critic(self) -> None:
        if ALGORITHM_TYPE.get(self.config.algorithm).use_critic:
            raise InvalidArgumentError(
                f"algorithm={self.config.algorithm} trains a critic, and a model of transformers "
                "has none here: choose an algorithm without a critic, such as grpo"
            )

    async def explore(
        self,
        experiment: Experiment,
        algorithm: Algorithm,  # noqa: ARG002 - one's own rollouts know what they are for
        *,
        actor: str,
        acknowledgements: Path | None,
        max_batches: int | None,
        take_over: bool,
        report: Callable[[BatchReport], None],
    ) -> None:
        """Roll out the list of tasks until it is through, or the experiment is finished."""
        config = self.config
        rollout, tasks = self._rollout(), self._tasks()
        torch.seed()  # no two explorers may say the same
        options = config.exploring.model_dump(exclude={"max_tokens"})
        try:
            async with self._sampled() as model:
                await explore(
                    experiment,
                    actor=actor,
                    tasks=tasks,
                    rollout=rollout,
                    model=model,
                    groups_per_batch=config.groups_per_batch,
                    rollouts_per_group=config.rollouts_per_group,
                    acknowledgements=acknowledgements,
                    max_batches=max_batches,
                    take_over=take_over,
                    report=report,
                    **options,
                )
        except TrinityBufferError:
            raise
        except OSError as error:
            raise failed(f"rollout {config.rollout!r}", error) from error

    def accuracy(self, policy: CausalLM, *, problems: int, seed: int) -> float | None:  # noqa: ARG002
        """Return what ``evaluate`` says of the model's likeliest answers, or None without it."""
        if self.config.evaluate is None:
            return None
        evaluate = self._named("evaluate", self.config.evaluate)
        tokenizer = load_tokenizer(self._model_path)
        most = self.config.exploring.max_tokens
        try:
            with in_eval_mode(policy.model):
                model = LocalModel(policy.model, tokenizer, temperature=0, max_tokens=most)
                returned = anyio.run(evaluate, model)
        except Exception as error:
            raise failed(f"evaluate {self.config.evaluate!r}", error) from error
        try:
            accuracy = float(returned)
        except (TypeError, ValueError, OverflowError, RuntimeError):  # the last of torch
            accuracy = math.nan
        if not math.isfinite(accuracy):
            what = returned if isinstance(returned, float) else kind_of(returned)
            raise InvalidArgumentError(
                f"evaluate = {self.config.evaluate!r}: it returned {what}, it must return the "
                "accuracy, one finite number"
            )
        return accuracy

    @asynccontextmanager
    async def _sampled(self) -> AsyncIterator[Any]:
        """Yield what the rollouts talk to."""
        most = self.config.exploring.max_tokens
        if self.config.server is None:
            _hush()
            yield LocalModel(self._model_path, max_tokens=most)
            return
        dialect = self.config.dialect
        tokenizer = None if dialect == "vllm" else load_tokenizer(self._model_path)
        async with OpenAIModel(
            self.config.server, dialect=dialect, tokenizer=tokenizer, max_tokens=most
        ) as model:
            yield model

    @property
    def _model_path(self) -> str:
        """The folder of the model, seen from the folder of the file."""
        assert isinstance(self.config.model, str)
        found = Path(self.config.folder or ".").resolve() / self.config.model
        if not is_folder(found):
            raise InvalidArgumentError(
                f"model = {self.config.model!r}: there is no folder {found}; it must hold a causal "
                "language model of transformers, tokenizer included"
            )
        return str(found)

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

        async def attempt(task: Any, model: Any) -> Sequence[Experience]:
            try:
                return await rollout(task, model)  # type: ignore[no-any-return]  # one's own
            except (TrinityBufferError, OSError):
                raise
            except Exception as error:
                raise failed(f"rollout {name!r}", error) from error

        return attempt

    def _tasks(self) -> Any:
        found = self._tasks_or_function()
        try:
            tasks = found() if callable(found) else found
            if callable(found):
                self._require_list(tasks, "it returned")
            return tasks if hasattr(tasks, "items") else list(tasks)
        except TrinityBufferError:
            raise
        except Exception as error:
            raise failed(f"tasks {self.config.tasks!r}", error) from error

    def _tasks_or_function(self) -> Any:
        """Return what ``tasks`` names: as far as can be seen without a call, it is of use."""
        found = self._named("tasks", str(self.config.tasks))
        if inspect.iscoroutinefunction(found) or inspect.isasyncgenfunction(found):
            raise self._no_tasks("it is an async function")
        if not callable(found):
            self._require_list(found, "it is")
        return found

    def _require_list(self, tasks: Any, said: str) -> None:
        one_by_one = isinstance(tasks, Iterable) or hasattr(tasks, "__getitem__")
        if not one_by_one or isinstance(tasks, str | bytes):
            raise self._no_tasks(f"{said} {kind_of(tasks)}")

    def _no_tasks(self, said: str) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"tasks = {self.config.tasks!r}: {said}, it must be a list of tasks, or a plain "
            "function that returns one"
        )

    def _named(self, key: str, name: str) -> Any:
        """Return what ``module:name`` means, seen from the folder of the file."""
        module, _, attribute = name.partition(":")
        folder = look_in(self.config.folder)
        try:
            found = getattr(import_module(module), attribute)
        except (ImportError, AttributeError, ValueError) as error:
            raise InvalidArgumentError(
                f"{key} = {name!r}: write it as module:name, importable from {folder} ({error})"
            ) from error
        except Exception as error:
            raise failed(f"{key} {name!r}", error) from error
        return found


def _hush() -> None:
    """Let transformers show no bars: what a process says goes to a log."""
    extra("transformers.utils.logging", "hf").disable_progress_bar()
