"""Which rows a loss that is not finite comes from: asked after the fact, for whoever has to look.

Whether a step is skipped is decided by one flag (`Trainer`). Only then is it worth a second pass
over the loss: its gradient with respect to every log-probability is the term of that token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trinity_buffer.algorithm import Algorithm
from trinity_buffer.pipeline.microbatch import MicroBatch
from trinity_buffer.pipeline.streaming.train_step import TrainStep
from trinity_buffer.trainer.measuring import rows_of_tokens
from trinity_buffer.trainer.parallel import Processes
from trinity_buffer.trainer.policy import Policy

LARGEST_ROWS = 4
"""So many rows are named of a step that was skipped."""


def largest_rows(
    step: TrainStep, algorithm: Algorithm, policy: Policy, processes: Processes
) -> list[int]:
    """Return the places in the manifest of the rows with the largest terms, the largest first.

    Rows that hold a number that is not finite come before those whose gradient is not finite, and
    these before large ones. Every rank must call it; all get the same answer.
    """
    terms = torch.zeros(len(step.manifest.experiences), dtype=torch.float64)
    for microbatch in step.microbatches:
        slots = microbatch["sample_index"].long().cpu()
        found = _terms_of_rows(microbatch, algorithm, policy).cpu()
        terms.scatter_reduce_(0, slots, found, "amax")
    device = step.microbatches[0]["input_ids"].device
    total = processes.sum(terms.to(device)).cpu()
    order = torch.argsort(total, descending=True, stable=True)[:LARGEST_ROWS]
    return [place for place in order.tolist() if total[place] > 0]


def _terms_of_rows(microbatch: MicroBatch, algorithm: Algorithm, policy: Policy) -> Tensor:
    """Return ``[N]``: the largest term of each row; infinite where its own numbers are not finite.

    A gradient that is not finite counts as the largest finite number: one broken row may spoil
    those of all others.
    """
    with torch.no_grad():
        scores = policy.scores(microbatch)
    leaves = [scores.logprob.requires_grad_(), scores.entropy.requires_grad_()]
    with torch.enable_grad():
        loss, _ = algorithm.loss(leaves[0], microbatch, entropy=leaves[1], layout=microbatch.layout)
        gradients = (
            torch.autograd.grad(loss, leaves, allow_unused=True)
            if loss.requires_grad
            else (None, None)
        )
    largest = torch.finfo(torch.float64).max
    terms = torch.zeros_like(microbatch["input_ids"], dtype=torch.float64)
    for gradient in gradients:
        if gradient is not None:
            size = gradient.double().abs().nan_to_num(nan=largest, posinf=largest)
            terms = torch.maximum(terms, size)
    columns = [scores.logprob.detach(), *(microbatch[name] for name in microbatch)]
    rows = rows_of_tokens(microbatch)
    found = terms.new_zeros(len(microbatch["sample_index"]))
    found.scatter_reduce_(0, rows, terms.flatten(), "amax")
    for column in columns:
        _mark_broken(found, column, rows, of_tokens=terms.shape)
    return found


def _mark_broken(found: Tensor, column: object, rows: Tensor, *, of_tokens: Sequence[int]) -> None:
    """Put infinity where a row of ``column`` (per token or per row) is not finite."""
    if not isinstance(column, Tensor) or not column.is_floating_point():
        return
    broken = torch.where(column.detach().isfinite(), 0.0, torch.inf).double()
    if column.shape == of_tokens:
        found.scatter_reduce_(0, rows, broken.flatten(), "amax")
    elif column.shape == found.shape:
        found.copy_(torch.maximum(found, broken))
