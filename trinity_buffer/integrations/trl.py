"""TRL's `GRPOTrainer`, fed from the store.

Written against TRL 1.16: `GRPOTrainer._generate_and_score_completions` is the method that its
documentation names for advantages of one's own. Loss, optimizer, logging and checkpoints are TRL's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from typing_extensions import override

from trinity_buffer.algorithm.layout import BatchLayout
from trinity_buffer.errors import CheckpointError, InvalidArgumentError
from trinity_buffer.integrations.checkpointed_steps import require_max_steps, saving_interval
from trinity_buffer.lazy import importing
from trinity_buffer.pipeline.manifest import rows_by_rank
from trinity_buffer.pipeline.sync_stream import SyncTrainStream
from trinity_buffer.pipeline.train.microbatch import MicroBatch
from trinity_buffer.pipeline.train.step import TrainStep

with importing("trl", "trinity-buffer[trl]"):
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

MEANS_OVER_ROWS = ("grpo", "dr_grpo", "sapo", "luspo")
"""The losses of TRL that divide by the number of rows."""


class StoredGRPOTrainer(GRPOTrainer):  # type: ignore[misc]  # trl is untyped
    """A `GRPOTrainer` whose completions, old log-probs and advantages are those of a train stream.

    One optimizer step is one step of the stream. Each checkpoint that TRL saves commits the steps
    up to it; a restart goes on from the last committed one by itself, and what was trained after it
    is handed out again. Open the stream with ``rank`` and ``world_size`` where there are several
    processes.

    Args:
        model: as `GRPOTrainer` takes it.
        stream: from `trinity_buffer.open_train_stream`, padded.
        args: ``max_steps`` must be given, ``beta`` be 0, and ``steps_per_generation`` be
            ``gradient_accumulation_steps``, as it is by default.
        kwargs: what else `GRPOTrainer` takes, but for rewards and data sets: the store has them.

    Attributes:
        trained: the step whose rows TRL has been handed last.

    Raises:
        InvalidArgumentError: settings that the store cannot serve.
        TrainingError: in a step, rows have pictures, or were sampled at another temperature than
            that of ``args``.
    """

    def __init__(
        self, model: Any, *, stream: SyncTrainStream, args: GRPOConfig, **kwargs: Any
    ) -> None:
        _require_served(args)
        stream.require_commits(saving_interval(args), "save_steps")
        self.stream = stream
        self._upcoming: TrainStep | None = None
        self.trained: TrainStep | None = None
        self._committed: TrainStep | None = None
        rows = Dataset.from_list([{"prompt": ""}] * args.generation_batch_size)
        super().__init__(model, _stored_reward, args=args, train_dataset=rows, **kwargs)
        self.add_callback(_CommitCheckpoints(self))

    @override
    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """Train until ``max_steps`` or the end of the stream; see `transformers.Trainer.train`.

        Raises:
            CheckpointError: the last commit named no checkpoint, so that nothing can go on from it,
                or another one than ``resume_from_checkpoint``.
        """
        resume = self.stream.resume
        if resume is not None:
            if resume.checkpoint is None:
                raise CheckpointError(
                    f"step {resume.step} was committed without a checkpoint: go back to one with, "
                    "open_train_stream(resume_from=...)"
                )
            asked, last = resume_from_checkpoint, resume.checkpoint
            if isinstance(asked, str | Path) and Path(asked).resolve() != last.resolve():
                raise CheckpointError(
                    f"resume_from_checkpoint={asked}: the store goes on after step {resume.step}, "
                    f"with {last}: to go back, open the stream with resume_from=STEP"
                )
            resume_from_checkpoint = str(last)
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    @override
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Return the loss of one accumulation step; see `transformers.Trainer.training_step`.

        A step of which every row was dropped leaves the weights as they are.
        """
        if self._step % self.args.steps_per_generation == 0:
            self.trained = self._next_step()
        if self.trained is None or self.trained.microbatches:
            return super().training_step(model, inputs, num_items_in_batch)  # type: ignore[no-any-return]
        self._step += 1
        return torch.zeros((), device=self.accelerator.device)

    def _next_step(self) -> TrainStep:
        step = self._upcoming or next(self.stream, None)
        if step is None:
            raise InvalidArgumentError("the stream has no step to train on")
        if step.step != self.state.global_step + 1:
            raise CheckpointError(
                f"TRL is at step {self.state.global_step}, the stream hands out step {step.step}: "
                "train from the checkpoint of the last commit"
            )
        self._upcoming = None
        for microbatch in step.microbatches:
            microbatch.require_plain(self.args.temperature)
        return step

    @override
    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        if not self.model.training:
            raise InvalidArgumentError("evaluation needs completions of the policy as it is now")
        assert self.trained is not None, "training_step() comes first"
        microbatches, parts = self.trained.microbatches, self.args.steps_per_generation
        batch = trl_batch(microbatches, pad=self._tokenizer.pad_token_id)
        # TRL gathers a number of each row: all ranks need as many.
        most, layout = max(rows_by_rank(self.trained.manifest)), microbatches[0].layout
        batch = _filled_up(batch, most + -most % parts, self.args.loss_type, layout)
        batch["num_items_in_batch"] = torch.tensor(layout.total.tokens)
        return {name: value.to(self.accelerator.device) for name, value in batch.items()}

    @override
    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Look for the next step where this one is saved: explorers may wait for its policy."""
        super()._maybe_log_save_evaluate(*args, **kwargs)
        if self._upcoming is None and self.state.global_step < self.state.max_steps:
            self._upcoming = next(self.stream, None)
            if self._upcoming is None:
                self.control.should_training_stop = True
                # As TRL itself does at `max_steps`, which the stream has ended before.
                if self.trained is not self._committed and self.args.save_strategy != "no":
                    self.control.should_save = True
                    super()._maybe_log_save_evaluate(*args, **kwargs)

    def commit(self, checkpoint: Path) -> None:
        """Record that what was trained so far is in ``checkpoint``."""
        if self.trained is not None:
            self.stream.commit(self.trained, checkpoint)
            self._committed = self.trained


class _CommitCheckpoints(TrainerCallback):  # type: ignore[misc]  # transformers is untyped here
    def __init__(self, trainer: StoredGRPOTrainer) -> None:
        self._trainer = trainer

    @override
    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._trainer.commit(Path(args.output_dir) / f"checkpoint-{state.global_step}")


def trl_batch(microbatches: Sequence[MicroBatch], *, pad: int) -> dict[str, Tensor]:
    """Return padded micro-batches as TRL wants a step: prompts left-padded, answers right-padded.

    ``prompt_ids``, ``prompt_mask`` int64 ``[N, P]``; ``completion_ids``, ``completion_mask``,
    ``tool_mask`` int64 and ``advantages``, ``old_per_token_logps`` float32 ``[N, C]``. A row is cut
    where its first trained token is; old log-probabilities are there if the step has any.

    Raises:
        InvalidArgumentError: packed micro-batches.
    """
    prompts: list[Tensor] = []
    answers: dict[str, list[Tensor]] = {"input_ids": [], "action_mask": [], "advantages": []}
    for batch in microbatches:
        if "cu_seqlens" in batch:
            raise InvalidArgumentError("TRL takes no packed rows: open with layout='padded'")
        if "old_logprob" in batch:
            answers.setdefault("old_logprob", [])
        lengths = batch["attention_mask"].sum(-1).tolist()
        for row, length in enumerate(lengths):
            mask = batch["action_mask"][row, :length]
            # The first action token; a row without one keeps its last token as the completion.
            cut = int(mask.int().argmax()) if mask.any() else length - 1
            prompts.append(batch["input_ids"][row, :cut])
            for name, values in answers.items():
                values.append(batch[name][row, cut:length])
    if not prompts:  # a rank without rows takes part all the same, with one of no weight
        prompts.append(torch.tensor([pad]))
        for name, values in answers.items():
            values.append(microbatches[0][name].new_zeros(1))
    # TRL pads prompts on the left and completions on the right.
    before = partial(pad_sequence, batch_first=True, padding_side="left")
    ids = answers.pop("input_ids")
    padded = {
        "prompt_ids": before(prompts, padding_value=pad),
        "prompt_mask": before([torch.ones_like(ids) for ids in prompts]),
        "completion_ids": pad_sequence(ids, batch_first=True, padding_value=pad),
        "completion_mask": pad_sequence([torch.ones_like(x) for x in ids], batch_first=True),
    }
    names = {"action_mask": "tool_mask", "old_logprob": "old_per_token_logps"}
    for name, values in answers.items():
        padded[names.get(name, name)] = pad_sequence(values, batch_first=True)
    padded["tool_mask"] = padded["tool_mask"].long()
    return padded


def _filled_up(
    batch: dict[str, Tensor], number: int, loss_type: str, layout: BatchLayout
) -> dict[str, Tensor]:
    """Return a step with rows of no weight added, until it has ``number`` as on all ranks.

    The loss stays what it was.
    """
    rows = len(batch["advantages"])
    full = {name: of[[*range(rows), *[0] * (number - rows)]] for name, of in batch.items()}
    full["tool_mask"][rows:] = 0
    if loss_type in MEANS_OVER_ROWS:
        full["advantages"] *= number * layout.world_size / layout.total.sequences
    return full


def _require_served(args: GRPOConfig) -> None:
    """Refuse settings under which a step of TRL is not a step of the store."""
    require_max_steps(args)
    if args.beta:
        raise InvalidArgumentError(
            f"beta={args.beta}: the scores of a reference model are not in the store; use beta=0"
        )
    if args.num_iterations != 1 or args.steps_per_generation != args.gradient_accumulation_steps:
        raise InvalidArgumentError(
            f"num_iterations={args.num_iterations}, steps_per_generation="
            f"{args.steps_per_generation}, gradient_accumulation_steps="
            f"{args.gradient_accumulation_steps}: one optimizer step must be one step of the stream"
        )
    if args.mask_truncated_completions:
        raise InvalidArgumentError(
            "mask_truncated_completions=True: a step does not say which rows were cut off; let the "
            "explorer write those with an action_mask of zeros, or a strategy reject them"
        )


def _stored_reward(**_: Any) -> list[float]:
    raise AssertionError("advantages come from the store")  # pragma: no cover - TRL wants a reward
