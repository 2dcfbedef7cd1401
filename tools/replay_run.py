"""What would my loss have done? The recorded batches, in order, through a loss of your own.

python tools/replay_run.py runs/demo.db --experiment demo

No GPU generates anything, and the store is only read: the manifests say what each gradient step was
trained on, and the same tensors come back. Put your loss in place of `sequence_reinforce`.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

import trinity_buffer as tb
from trinity_buffer.algorithm import BatchLayout, aggregate_loss


def sequence_reinforce(
    logprob: Tensor, action_mask: Tensor, advantages: Tensor, layout: BatchLayout
) -> Tensor:
    """Return the loss of a micro-batch: REINFORCE in which every sequence weighs the same.

    ``layout`` has the denominators of the whole step, so micro-batches add up.
    """
    return aggregate_loss(-advantages * logprob, action_mask, "seq-mean-token-mean", layout=layout)


def replay(url: str, experiment: str, trainer: str) -> None:
    """Print the loss and the size of its gradient for each recorded step."""
    with tb.open_replay_stream(url, experiment=experiment, consumer=trainer) as stream:
        for step in stream:
            losses, squares = [], []
            for microbatch in step.microbatches:
                # In place of a policy: what the explorer's said, as if it could be changed freely.
                # A policy of your own gives `logprob` from `microbatch["input_ids"]`.
                logprob = microbatch["rollout_logprob"].clone().requires_grad_()
                loss = sequence_reinforce(
                    logprob, microbatch["action_mask"], microbatch["advantages"], microbatch.layout
                )
                (gradient,) = torch.autograd.grad(loss, logprob)
                losses.append(loss.detach())
                squares.append(gradient.square().sum())
            loss, norm = torch.stack(losses).sum(), torch.stack(squares).sum().sqrt()
            rows, digest = len(step.manifest.experiences), step.manifest.digest.hex()[:12]
            print(f"step {step.step}  {rows} rows  loss {loss:+.4f}  |grad| {norm:.4f}  {digest}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("store", help="path or URL")
    parser.add_argument("--experiment", required=True)
    parser.add_argument("--trainer", default="trainer", help="name of the trainer")
    given = parser.parse_args()
    try:
        replay(given.store, given.experiment, given.trainer)
    except tb.TrinityBufferError as error:
        raise SystemExit(f"error: {error}") from None
