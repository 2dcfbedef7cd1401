"""Which rows to look at when a model or a loss fails in a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch

from trinity_buffer.errors import TrainingError
from trinity_buffer.pipeline.microbatch import MicroBatch
from trinity_buffer.pipeline.streaming.train_step import TrainStep
from trinity_buffer.trainer.causal_lm import CausalLM
from trinity_buffer.trainer.measuring import rows_of_tokens
from trinity_buffer.trainer.models import Models

Uids = Callable[[TrainStep, Sequence[int]], list[str]]
"""Returns the uids of rows of a step, by their places in its manifest."""


@contextmanager
def noting(step: TrainStep, uids: Uids, microbatch: MicroBatch) -> Iterator[None]:
    """Note on an error inside the context in which step it was raised, and at which rows."""
    try:
        yield
    except Exception as error:
        with suppress(RuntimeError):  # a device that failed tells nothing any more
            places = microbatch["sample_index"].tolist()
            width = microbatch.get("max_seqlen", microbatch["input_ids"].shape[-1])
            first = f"the first {uids(step, places[:1])[0]}" if places else "which is none"
            error.add_note(
                f"in step {step.step}, in the micro-batch of {len(places)} rows of up to {width} "
                f"tokens, {first}"
            )
            if places and _lacked_memory(error):
                lengths = _lengths(microbatch)
                longest = max(range(len(places)), key=lengths.__getitem__)
                uid = uids(step, [places[longest]])[0]
                error.add_note(
                    f"memory was too small for it; its longest row, {uid}, has {lengths[longest]} "
                    f"tokens. {without(uid)}; max_tokens= leaves out all rows that are longer, and "
                    "a smaller tokens_per_microbatch= makes the steps to come of smaller pieces"
                )
        raise


def without(uid: str) -> str:
    """Return how to go on without a row."""
    return f"Go on without the row: `trinity-buffer train --drop {uid}`, or drop=[{uid!r}]"


def _lacked_memory(error: Exception) -> bool:
    """Return whether ``error`` says that there was too little memory; torch has no type for all."""
    words = ("out of memory", "not enough memory", "can't allocate memory")
    return isinstance(error, MemoryError) or any(one in str(error) for one in words)


def _lengths(microbatch: MicroBatch) -> list[int]:
    """Return how many tokens each row of a micro-batch has."""
    if "cu_seqlens" in microbatch:
        return [int(size) for size in microbatch["cu_seqlens"].diff()]
    return [int(size) for size in microbatch["attention_mask"].sum(dim=1)]


def require_known(step: TrainStep, uids: Uids, models: Models) -> None:
    """Return if the models have every token of a step, with one look at the device.

    Args:
        step: that is about to be trained.
        uids: of its rows.
        models: those of transformers say how many tokens they have.

    Raises:
        TrainingError: names a row with another token, and the model that does not have it.
    """
    known = {
        name: model.vocabulary
        for name in ("model", "reference", "teacher")
        if isinstance(model := getattr(models, "policy" if name == "model" else name), CausalLM)
    }
    vocabulary, name = min(((size, name) for name, size in known.items() if size), default=(0, ""))
    filled = [one for one in step.microbatches if one["input_ids"].numel()]
    largest = [one["input_ids"].max() for one in filled]
    if not (largest and name) or int(torch.stack(largest).max()) < vocabulary:
        return
    at = int(torch.stack(largest).argmax())
    row = rows_of_tokens(filled[at])[filled[at]["input_ids"].argmax()]
    place = int(filled[at]["sample_index"][row])
    (uid,) = uids(step, [place])
    remedy = "call its resize_token_embeddings first" if name == "model" else "give another one"
    raise TrainingError(
        f"step {step.step}: row {uid} holds token {int(largest[at])}, and the "
        f"{name} has the tokens 0 to {vocabulary - 1}: take a {name} whose tokenizer made the "
        f"rows, or {remedy}. {without(uid)}"
    )
