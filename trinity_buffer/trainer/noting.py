"""Which rows to look at when a model or a loss fails in a step, or would read them wrongly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from trinity_buffer.algorithm import Algorithm
from trinity_buffer.errors import TrainingError
from trinity_buffer.pipeline.microbatch import MicroBatch
from trinity_buffer.pipeline.streaming.train_step import TrainStep
from trinity_buffer.trainer.causal_lm import CausalLM
from trinity_buffer.trainer.measuring import rows_of_tokens
from trinity_buffer.trainer.models import Models

Uids = Callable[[TrainStep, Sequence[int]], list[str]]
"""Returns the uids of rows of a step, by their places in its manifest."""

READERS = {
    "temperature": ("policy", "reference", "teacher"),
    "multi_modal_inputs": ("policy", "critic", "reference", "teacher"),
}
"""What only some models read, and say so (``takes``) -> which models have to."""


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


def settle_sampling(step: TrainStep, algorithm: Algorithm, *, recomputed: bool) -> None:
    """Leave in a step what its algorithm has to know of how the rows were sampled.

    That is nothing where rows are imitated, not compared with what sampled them.

    Args:
        step: changed in place.
        algorithm: that is trained.
        recomputed: the trainer computes ``old_logprob`` itself.

    Raises:
        TrainingError: what was recorded of a row cannot be compared; names it and the option.
    """
    corrects = algorithm.choices["importance_correction"].name != "none"
    for microbatch in step.microbatches:
        if algorithm.type.schema != "experience":
            microbatch.drop("temperature")
            microbatch.unscorable = {}
        microbatch.require_scorable(compared=corrects or not recomputed)


def require_taken(step: TrainStep, uids: Uids, models: Models) -> None:
    """Raise unless the models read all that the rows of a step bring.

    Raises:
        TrainingError: names a row, and the model whose ``takes`` lacks what the row brings.
    """
    for microbatch in step.microbatches:
        for name, row in _brought(microbatch).items():
            passing = [role for role in READERS[name] if not _takes(getattr(models, role), name)]
            if passing:
                (uid,) = uids(step, [int(microbatch["sample_index"][row])])
                kind = type(getattr(models, passing[0])).__name__
                raise TrainingError(
                    f"step {step.step}: row {uid} has {name}, and the {passing[0]}, a {kind}, "
                    f"would pass over it: give a {passing[0]} that reads it and says so, takes = "
                    f"{{{name!r}}}. {without(uid)}"
                )


def _takes(model: Any, name: str) -> bool:
    return model is None or name in getattr(model, "takes", ())


def _brought(microbatch: MicroBatch) -> dict[str, int]:
    """Return what few rows bring -> the first row of the micro-batch that brings it."""
    found = {}
    pictures = [row for row, inputs in enumerate(microbatch.multi_modal_inputs) if inputs]
    if pictures:
        found["multi_modal_inputs"] = pictures[0]
    heat = microbatch.get("temperature")
    if heat is not None and bool((heat != 1).any()):
        found["temperature"] = int(rows_of_tokens(microbatch)[heat.flatten() != 1][0])
    return found


def require_known(step: TrainStep, uids: Uids, models: Models) -> None:
    """Refuse a step with a token that a model does not have, with one look at the device.

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
