"""The models of a trainer: what each says of a step, and what each row of it did to the policy.

Of a step that fails, the rows to look at are named.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from shlex import quote
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trinity_buffer.algorithm import Algorithm
from trinity_buffer.algorithm.building import require_recorded
from trinity_buffer.algorithm.functional import aggregate_loss, keep, mask_of_rows, spread
from trinity_buffer.algorithm.layout import BatchLayout, tokens_per_row
from trinity_buffer.errors import InvalidArgumentError, TrainingError
from trinity_buffer.pipeline.train.microbatch import MicroBatch
from trinity_buffer.pipeline.train.step import Reduce, StepMeasures, TrainStep, require_rewarded
from trinity_buffer.trainer.causal_lm import CausalLM
from trinity_buffer.trainer.parallel import Processes, is_sharded
from trinity_buffer.trainer.policy import Critic, Policy, TokenScores, Trainable, in_eval_mode
from trinity_buffer.trainer.token_scores import stand_in

_SUMS = ("tokens", "weight", "clipped", "entropy", "ratio", "gap", "kl")
_MEANS = ("clipped", "entropy", "ratio", "gap", "kl")
"""Also a number of the whole step: the mean over its action tokens."""

_TOKENS = ("logprob", "ratio", "entropy", "weight")


class StepMeter:
    """Collects what `StepMeasures` says of one step; made anew for each.

    Of each row, over its action tokens:

    ========================  =====================================================================
    ``loss_share``            its part in the sum of |d loss / d logprob| over the step, policy term
    ``ratio_mean`` ``_max``   exp(logprob - old_logprob)
    ``clipped``               share whose policy term has no gradient, though it has an advantage
    ``kl``                    mean of logprob - ref_logprob
    ``entropy``               mean, in nats
    ``gap_mean`` ``_max``     absolute difference of logprob and what the explorer recorded
    ========================  =====================================================================

    A number that needs a tensor which the step does not have is NaN.

    Args:
        rows: how many the manifest has.
        tokens: also keep numbers of every token: ``logprob``, ``ratio``, ``entropy`` and
            ``weight``, the derivative of the policy's term by the log-probability.
    """

    def __init__(self, step: TrainStep, *, tokens: bool = False) -> None:
        self._step = step.step
        rows, device = len(step.manifest.experiences), step.microbatches[0]["input_ids"].device
        self._sums = torch.zeros(len(_SUMS), rows, device=device)
        self._most = torch.zeros(2, rows, device=device)
        self._sizes = torch.zeros(rows, dtype=torch.int64, device=device)
        self._tokens: list[tuple[Tensor, Tensor]] | None = [] if tokens else None
        self._weight: Tensor | None = None

    def weigh(self, gradient: Tensor) -> None:
        """Take the gradient of the policy's term; called in the backward pass."""
        self._weight = gradient

    @torch.no_grad()
    def add(self, microbatch: MicroBatch, scores: TokenScores) -> None:
        """Take in a micro-batch, after its backward pass."""
        ids = microbatch["input_ids"]
        weight = torch.zeros_like(scores.logprob) if self._weight is None else self._weight
        self._weight = None
        if not ids.numel():
            return
        mask = microbatch["action_mask"]
        ratio = _difference(microbatch, "old_logprob", scores.logprob).where(mask, 0.0).exp()
        gap = _difference(microbatch, "rollout_logprob", scores.logprob).abs()
        per_token = {
            "tokens": mask,
            "weight": weight.abs(),
            # Which tokens have an advantage and no gradient; NaN where there are no advantages.
            # From the tensors, which warn of nothing: a loss may read no advantages.
            "clipped": torch.full_like(weight, torch.nan)
            if "advantages" not in microbatch
            else ((weight == 0) & (microbatch.tensors["advantages"] != 0)).to(weight),
            "entropy": scores.entropy,
            "ratio": ratio,
            "gap": gap,
            "kl": _difference(microbatch, "ref_logprob", scores.logprob),
        }
        rows, slots = rows_of_tokens(microbatch), microbatch["sample_index"].long()
        stacked = torch.stack([per_token[name].float() for name in _SUMS])
        stacked = stacked.where(mask, 0.0).flatten(1)
        place = slots[rows]
        self._sums.index_add_(1, place, stacked)
        most = torch.stack([ratio, gap]).float().where(mask, 0.0).flatten(1)
        self._most.scatter_reduce_(1, place.expand(2, -1), most, "amax")
        if self._tokens is not None:
            of_tokens = torch.stack([scores.logprob, ratio, scores.entropy, weight])
            there = microbatch["attention_mask"].flatten()
            place = place[there]
            self._sizes.index_add_(0, place, torch.ones_like(place))
            self._tokens.append((place, of_tokens.flatten(1)[:, there].float()))

    def measures(self, metrics: Mapping[str, float], processes: Processes) -> StepMeasures:
        """Return the measures of all ranks; every rank must call it."""
        # Rows of other ranks are 0 here.
        both = processes.sum(torch.cat([self._sums, self._most])).cpu()
        sums, most = dict(zip(_SUMS, both, strict=False)), both[len(_SUMS) :]
        count = sums["tokens"]
        most = most.where(count > 0, torch.nan)
        rows = {
            "loss_share": sums["weight"] / sums["weight"].sum(),
            "ratio_mean": sums["ratio"] / count,
            "ratio_max": most[0],
            "clipped": sums["clipped"] / count,
            "kl": sums["kl"] / count,
            "entropy": sums["entropy"] / count,
            "gap_mean": sums["gap"] / count,
            "gap_max": most[1],
        }
        known = {name: values.numpy() for name, values in rows.items()}
        # The mean over the action tokens of the rows that have the number.
        there = {name: ~sums[name].isnan() for name in _MEANS}
        whole = {n: float(sums[n][has].sum() / count[has].sum()) for n, has in there.items()}
        tokens = {} if self._tokens is None else self._of_tokens(processes)
        return StepMeasures(self._step, known, {**whole, **metrics}, tokens)

    def _of_tokens(self, processes: Processes) -> dict[str, list[Tensor]]:
        sizes = processes.sum(self._sizes)
        begins = sizes.cumsum(0) - sizes
        every = self._most.new_zeros(len(_TOKENS), int(sizes.sum()))
        for place, values in self._tokens or ():
            # A row's tokens follow each other: each is so far behind the first of its row.
            first = torch.ones_like(place, dtype=torch.bool)
            first[1:] = place[1:] != place[:-1]
            steps = torch.arange(len(place), device=place.device)
            behind = steps - steps.where(first, 0).cummax(0).values
            every[:, begins[place] + behind] = values
        parts = processes.sum(every).cpu().split_with_sizes(sizes.tolist(), dim=1)
        return {name: [part[at].clone() for part in parts] for at, name in enumerate(_TOKENS)}


def _difference(microbatch: MicroBatch, name: str, logprob: Tensor) -> Tensor:
    """Return ``logprob - name``, NaN where the row or the step has none."""
    other: Tensor | None = microbatch.get(name)
    if other is None:
        return torch.full_like(logprob, torch.nan)
    difference = logprob - other
    recorded = microbatch.get("logprob_mask")
    if recorded is None or other is not microbatch.get("rollout_logprob"):
        return difference  # what the trainer computed is there for every row
    there = recorded.to(difference.device)[rows_of_tokens(microbatch)].view_as(difference)
    return difference.where(there, torch.nan)


def rows_of_tokens(microbatch: MicroBatch) -> Tensor:
    """Return of each token, padding included, the row of the micro-batch that it belongs to."""
    ids, rows = microbatch["input_ids"], len(microbatch["sample_index"])
    numbers = torch.arange(rows, device=ids.device)
    return spread(numbers, ids, microbatch.layout).reshape(-1)


class Number(NamedTuple):
    """A number of one rank, and how much it counts beside those of others."""

    value: Any
    weight: Any = 1.0


def numbers_of_step(
    processes: Processes, deciding: Sequence[Tensor], own_numbers: Mapping[str, Number]
) -> tuple[bool, dict[str, float]]:
    """Return whether all of ``deciding`` is finite, on all ranks, and what one process would say.

    ==================  ===========================================================================
    name ends in        over the micro-batches, then over the ranks
    ==================  ===========================================================================
    ``loss``            the sum; the mean over ranks, since a loss counts in their number
    ``_max``, ``_min``  the largest, the smallest; so with ``/`` in place of ``_``
    else                the mean, weighted by action tokens, or by rows for a metric of rows
    ==================  ===========================================================================

    A number that is NaN counts only where the sum is asked for. Every rank must call it, all get
    the same. There is one look at the device, and one exchange.
    """
    flags = torch.stack([torch.as_tensor(value).detach().isfinite() for value in deciding])
    parts = [part for number in own_numbers.values() for part in number]
    # All in one tensor: each copy from a GPU waits for what it computes.
    read = torch.stack([_double(part, flags.device) for part in (flags.all(), *parts)]).tolist()
    own = dict(zip(own_numbers, zip(read[1::2], read[2::2], strict=True), strict=True))
    every = processes.gather((read[0] > 0, own))
    numbers = {}
    for name in sorted({name for _, of_rank in every for name in of_rank}):
        pairs = [of_rank[name] for _, of_rank in every if name in of_rank]
        values, weights = torch.tensor(pairs, dtype=torch.float64).unbind(1)
        numbers[name] = float(_joined(name, values, weights).value)
        if name.endswith("loss"):
            # Each rank's loss is scaled by the number of ranks, whose mean the optimizer takes.
            numbers[name] /= processes.world_size
    return all(finite for finite, _ in every), numbers


def combined(
    parts: Sequence[Mapping[str, Any]],
    microbatches: Sequence[MicroBatch],
    row_metrics: Collection[str] = (),
) -> dict[str, Number]:
    """Return this rank's numbers of a step, from those of its micro-batches.

    Args:
        parts: the metrics of each of ``microbatches``.
        row_metrics: names of those that are means over rows.
    """
    sizes = [_sizes(microbatch) for microbatch in microbatches]
    numbers = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        # A mixed loss names the kind of rows before its metrics.
        kind = name.removeprefix("actor/").split("/")[0]
        kind = kind if kind in ("usual", "expert") else "tokens"
        kind = "rows" if name in row_metrics else kind
        pairs = zip(parts, sizes, strict=True)
        having = [(part[name], size[kind]) for part, size in pairs if name in part]
        device = sizes[0][kind].device
        columns = zip(*having, strict=True)
        stacked = (torch.stack([_double(v, device) for v in column]) for column in columns)
        numbers[name] = _joined(name, *stacked)
    return numbers


def _sizes(microbatch: MicroBatch) -> dict[str, Tensor]:
    """Return how many rows a micro-batch has, and how many action tokens of each kind."""
    mask = microbatch["action_mask"] != 0
    expert = torch.zeros_like(mask)
    if "expert_mask" in microbatch:
        expert = mask_of_rows(microbatch["expert_mask"], mask, microbatch.layout)
    return {
        "rows": torch.tensor(len(microbatch["sample_index"]), device=mask.device),
        "tokens": mask.sum(),
        "usual": (mask & ~expert).sum(),
        "expert": (mask & expert).sum(),
    }


def _joined(name: str, values: Tensor, weights: Tensor) -> Number:
    """Return one number of several."""
    if name.endswith("loss"):
        return Number(values.sum())
    # A mean over no token at all counts for next to nothing, and is said where there is no other.
    known = weights.clamp(min=1e-30).where(~values.isnan(), 0.0)
    if name.endswith(("/max", "_max", "/min", "_min")):
        sign = 1.0 if name.endswith("max") else -1.0
        most = (sign * values).where((weights > 0) & (known > 0), -torch.inf).amax()
        return Number(sign * most.where(most > -torch.inf, torch.nan), known.sum())
    total = known.sum()
    return Number((values.where(known > 0, 0.0) * known).sum() / total, total)


def _double(value: Any, device: torch.device) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64).detach().to(device)


@dataclass(frozen=True, slots=True)
class StepReport:
    """What is said of one gradient step, in numbers: of all ranks, except ``seconds``.

    Attributes:
        reward: see `TrainStep.reward`, without penalties; 0 where no reward is known.
        tokens: those that are trained.
        staleness: see `TrainStep.staleness`; 0 where no version is known.
        seconds: from the arrival of the batch to the end of its commit, if there was one.
        skipped: the loss or the gradient norm was not finite, and the weights are what they were.
        unknown: which of ``reward`` and ``staleness`` are 0 because no row has them.
        measures: what each row did, which the commit records; None without `record_row_metrics`.
    """

    step: int
    loss: float
    reward: float
    gradient_norm: float
    staleness: float
    rows: int
    tokens: int
    seconds: float
    recorded: bool
    committed: bool
    skipped: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    measures: StepMeasures | None = field(default=None, repr=False)
    unknown: tuple[str, ...] = ()


@dataclass(slots=True)
class Models:
    """The policy and those beside it.

    Attributes:
        policy: what is trained.
        critic: trained beside it, where the algorithm uses one.
        reference: frozen; by default the policy of version 0.
        teacher: frozen; None: teachers' log-probabilities come with the data, or are not needed.
    """

    policy: Policy
    critic: Critic | None = None
    reference: Policy | None = None
    teacher: Policy | None = None


def require_trained(policy: Policy, optimizer: torch.optim.Optimizer | None) -> None:
    """Raise unless steps of ``optimizer`` can change ``policy``, and a checkpoint keeps the change.

    Args:
        policy: what is trained.
        optimizer: that was given, None if none was.

    Raises:
        InvalidArgumentError: they cannot; says what to give.
    """
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        raise InvalidArgumentError(
            f"optimizer={optimizer!r:.80} is no optimizer: make one of the model's parameters, "
            "such as torch.optim.AdamW(model.parameters(), lr=1e-6)"
        )
    weights = list(policy.parameters())
    own, in_parts = {id(weight) for weight in weights}, [is_sharded(weight) for weight in weights]
    trained = trained_weights(policy)
    held = own if optimizer is None else held_by(optimizer)
    unsaved: Mapping[str, Tensor] = getattr(policy, "unsaved", dict)()
    lost = [name for name, weight in unsaved.items() if id(weight) in held]
    refused = {
        f"ranks hold the weights of a {type(policy).__name__} in parts (FSDP2), and it does not "
        "say what a checkpoint keeps of them: give the Trainer the model of transformers itself, "
        "or train in a loop of your own": any(in_parts) and not hasattr(policy, "held"),
        "ranks hold some weights of the model in parts (FSDP2) and others whole: call fully_shard "
        "on the model itself, too, after its layers": any(in_parts) and not all(in_parts),
        "no parameter of the model requires a gradient, so that nothing can be trained: call "
        "model.requires_grad_(), or add an adapter": not trained,
        "optimizer= holds no parameter of this model that requires a gradient, so that its steps "
        "would change nothing: make it of model.parameters() of the very model that the Trainer is "
        "given": not trained & held,
        f"optimizer= holds {len(held - own)} parameters that are not this model's, which no "
        "checkpoint would keep: make it of model.parameters(), all or some of them": held - own,
        f"a checkpoint keeps the active adapter alone, and {len(lost)} weights outside it would be "
        f"trained and lost, such as {''.join(lost[:1])}: name their modules in modules_to_save of "
        "the adapter's configuration, freeze them (requires_grad_(False)), or leave them out of "
        "optimizer=": lost,
    }
    for message, applies in refused.items():
        if applies:
            raise InvalidArgumentError(message)


def require_same_weights(model: Trainable, processes: Processes) -> None:
    """Raise unless all ranks have the same weights, which they step by the same gradients.

    Of what ranks hold in parts each has its own. Every rank must call it.

    Raises:
        InvalidArgumentError: they differ; every rank says so.
    """
    if processes.world_size == 1:
        return
    # Their bits as integers, whose sum is the same in any order, on any device.
    held = (weight.detach().flatten() for weight in model.parameters() if not is_sharded(weight))
    sums = [int(weight.view(_INTEGERS[weight.element_size()]).sum()) for weight in held]
    first, *others = processes.gather(sums)
    if any(of_rank != first for of_rank in others):
        raise InvalidArgumentError(
            f"the ranks have different weights of a {type(model).__name__}, and the mean of their "
            "gradients is of none of them: seed torch alike on every rank before the model, or an "
            "adapter of it, is made, or load the same weights"
        )


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
"""By the bytes of a number."""


def held_by(optimizer: torch.optim.Optimizer) -> set[int]:
    """Return the ``id`` of every weight that ``optimizer`` steps."""
    return {id(weight) for group in optimizer.param_groups for weight in group["params"]}


def trained_weights(model: Any, optimizer: torch.optim.Optimizer | None = None) -> set[int]:
    """Return the ``id`` of each weight that ``optimizer`` trains; None: one of all weights."""
    every: Any = getattr(model, "parameters", list)()
    trained = {id(weight) for weight in every if weight.requires_grad}
    return trained if optimizer is None else trained & held_by(optimizer)


def new_critic(policy: Policy) -> Critic:
    """Return a fresh critic that reads what ``policy`` reads.

    Raises:
        InvalidArgumentError: this policy cannot make one.
    """
    make = getattr(policy, "new_critic", None)
    if make is None:
        raise InvalidArgumentError(
            f"the algorithm trains a critic, and {type(policy).__name__} has no method "
            "`new_critic()`: add it, or choose an algorithm without a critic, such as grpo"
        )
    return make()  # type: ignore[no-any-return]  # found by its name


def values_of(critic: Critic, microbatch: MicroBatch) -> Tensor:
    """Return the value of every token of a micro-batch."""
    ids = microbatch["input_ids"]
    # A rank without rows takes part in what the others compute together.
    read = microbatch if ids.numel() else stand_in(microbatch)
    limits = {name: read.get(name) for name in ("cu_seqlens", "max_seqlen")}
    values = critic.values(read["input_ids"], **limits)
    if ids.numel():
        return values
    return values[:0] if ids.dim() == 1 else values[:0, : ids.shape[1]]


def prepare(
    step: TrainStep,
    algorithm: Algorithm,
    models: Models,
    *,
    blaming: Callable[[MicroBatch], AbstractContextManager[object]] = nullcontext,
    reduce: Reduce | None = None,
    recompute_old_logprob: bool = False,
) -> dict[str, Any]:
    """Put everything into the micro-batches that the loss reads and the store does not hold.

    Log-probabilities of the policy before the step, of reference and teacher, and values, all of
    them without dropout; then, over the whole step, the penalty on rewards and the advantages.

    Args:
        step: changed in place.
        algorithm: what is trained.
        models: of the trainer.
        blaming: what is done with a micro-batch is done inside this context.
        reduce: sums a tensor over data-parallel ranks.
        recompute_old_logprob: whatever the explorers recorded.

    Raises:
        InvalidArgumentError: a tensor is missing; the message names it, or a row without it.
    """
    with in_eval_mode(models.policy, models.critic, models.reference, models.teacher):
        for microbatch in step.microbatches:
            if recompute_old_logprob:
                microbatch.drop("old_logprob")
            with blaming(microbatch):
                _score(microbatch, algorithm, models, recomputes=recompute_old_logprob)
    metrics: dict[str, Any] = {}
    penalty, advantage = algorithm.kl_penalty, algorithm.advantage
    # With a coefficient of 0 the divergence is still reported where a reference is there.
    measures = penalty.kl_coef != 0 or all("ref_logprob" in m for m in step.microbatches)
    if algorithm.choices["kl_penalty_fn"].name != "none" and measures:
        for microbatch in step.microbatches[:1]:  # each knows what is lacking in the whole step
            require_recorded(microbatch, penalty, ("old_logprob", "expert_mask"))
        require_rewarded(step.microbatches, advantage)  # before penalties take the place of some
        metrics |= step.apply(partial(_penalty, algorithm))
    if advantage is not None:
        metrics |= step.compute(advantage, reduce=reduce)
    return metrics


@torch.no_grad()
def _score(batch: MicroBatch, algorithm: Algorithm, models: Models, *, recomputes: bool) -> None:
    wanted = algorithm.reads
    # Where none were recorded, both keys are absent: to compute them unasked would say that the
    # rollouts were made by these very weights.
    left_to_us = recomputes or "rollout_logprob" in batch
    before = "old_logprob" not in batch and left_to_us
    if before or "entropy" in wanted:
        scores = models.policy.scores(batch)
        batch["entropy"] = scores.entropy
        if before:
            batch["old_logprob"] = scores.logprob
    if "necs" in wanted:
        batch["necs"] = _necs(models.policy, batch)
    if models.reference is not None and algorithm.needs_reference:
        batch["ref_logprob"] = models.reference.scores(batch).logprob
    if models.teacher is not None:
        batch["teacher_logprob"] = models.teacher.scores(batch).logprob
    if "teacher_logprob" in wanted and "teacher_logprob" not in batch:
        raise InvalidArgumentError(
            f"algorithm {algorithm.name!r} needs teacher_logprob: store teacher_logprobs with the "
            "experiences, or give the trainer a teacher policy"
        )
    if models.critic is not None and algorithm.type.use_critic:
        batch["values"] = values_of(models.critic, batch)


def _necs(policy: Policy, microbatch: MicroBatch) -> Tensor:
    """Return the expected change of entropy at every token, 0 where nothing was acted."""
    changes = getattr(policy, "entropy_changes", None)
    if changes is None:
        raise InvalidArgumentError(
            f"{type(policy).__name__} has no method `entropy_changes(microbatch)`, and the "
            "algorithm needs the expected change of entropy: add it (`token_scores.py` has one "
            "for any hidden states), or choose another advantage function"
        )
    necs: Tensor = changes(microbatch)
    return necs.where(microbatch["action_mask"], 0.0)


def _penalty(algorithm: Algorithm, batch: dict[str, Any], layout: BatchLayout) -> dict[str, Tensor]:
    """Take the divergence from the reference off the rewards; return metrics."""
    scored = {**batch, "token_level_scores": batch["token_level_rewards"]}
    changed, metrics = algorithm.kl_penalty.apply_kl_penalty_to_reward(scored, layout=layout)
    batch["token_level_rewards"] = changed["token_level_rewards"]
    return {f"penalty/{name}": value for name, value in metrics.items()}


Uids = Callable[[TrainStep, Sequence[int]], list[str]]
"""Returns the uids of rows of a step, by their places in its manifest."""

READERS = {
    "temperature": ("policy", "reference", "teacher"),
    "multi_modal_inputs": ("policy", "critic", "reference", "teacher"),
}
"""What only some models read, and say so (``takes``) -> which models have to."""


@contextmanager
def blame_rows(step: TrainStep, uids: Uids, microbatch: MicroBatch) -> Iterator[None]:
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
            if "index out of range in self" in str(error):  # not of tokens: they were looked at
                error.add_note("the model has no such position: max_tokens= leaves out longer rows")
            # Torch has no type for all errors of too little memory.
            words = ("out of memory", "not enough memory", "can't allocate memory")
            lacked = isinstance(error, MemoryError) or any(text in str(error) for text in words)
            if places and lacked:
                there, limits = microbatch["attention_mask"], microbatch.get("cu_seqlens")
                lengths = tokens_per_row(there, limits).tolist()
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
    return f"Go on without the row: `trinity-buffer train --drop {quote(uid)}`, or drop=[{uid!r}]"


def require_readable(
    step: TrainStep,
    uids: Uids,
    algorithm: Algorithm,
    models: Models,
    recomputed: bool,  # noqa: FBT001 - of the settings
) -> None:
    """Raise unless algorithm and models can read all that the rows of a step bring.

    What an algorithm that imitates rows need not know of how they were sampled leaves the step.

    Args:
        step: that is about to be trained; changed in place.
        uids: of its rows.
        algorithm: that is trained.
        models: of the trainer; those of transformers say how many tokens they have.
        recomputed: the trainer computes ``old_logprob`` itself.

    Raises:
        TrainingError: names a row; and what was recorded of it and cannot be compared, the model
            that would pass over something, or the one that does not have a token.
    """
    corrects = algorithm.choices["importance_correction"].name != "none"
    for microbatch in step.microbatches:
        if algorithm.type.schema != "experience":
            microbatch.drop("temperature")
            microbatch.unscorable = {}
        microbatch.require_scorable(compared=corrects or not recomputed)
        _require_taken(step, uids, models, microbatch)
    _require_known(step, uids, models)


def _require_taken(step: TrainStep, uids: Uids, models: Models, microbatch: MicroBatch) -> None:
    """Raise unless all models that have to read what a row brings say that they do."""
    # What few rows bring -> the first row that brings it.
    brought = {}
    pictures = [row for row, inputs in enumerate(microbatch.multi_modal_inputs) if inputs]
    if pictures:
        brought["multi_modal_inputs"] = pictures[0]
    heat = microbatch.get("temperature")
    if heat is not None and bool((heat != 1).any()):
        brought["temperature"] = int(rows_of_tokens(microbatch)[heat.flatten() != 1][0])
    for name, role in [(column, reader) for column in brought for reader in READERS[column]]:
        model = getattr(models, role)
        if model is not None and name not in getattr(model, "takes", ()):
            (uid,) = uids(step, [int(microbatch["sample_index"][brought[name]])])
            raise TrainingError(
                f"step {step.step}: row {uid} has {name}, and the {role}, a {type(model).__name__},"
                f" would pass over it: give a {role} that reads it and says so, takes = "
                f"{{{name!r}}}. {without(uid)}"
            )


def _require_known(step: TrainStep, uids: Uids, models: Models) -> None:
    """Raise if a token is none that every model has, with one look at the device."""
    named = {"model": models.policy, "reference": models.reference, "teacher": models.teacher}
    sizes = [(m.vocabulary, name) for name, m in named.items() if isinstance(m, CausalLM)]
    vocabulary, name = min(((size, name) for size, name in sizes if size), default=(0, ""))
    filled = [microbatch for microbatch in step.microbatches if microbatch["input_ids"].numel()]
    if not (vocabulary and filled):
        return
    largest = torch.stack([microbatch["input_ids"].max() for microbatch in filled]).tolist()
    token = max(largest)
    if token < vocabulary:
        return
    microbatch = filled[largest.index(token)]
    row = rows_of_tokens(microbatch)[microbatch["input_ids"].argmax()]
    (uid,) = uids(step, [int(microbatch["sample_index"][row])])
    remedy = "call its resize_token_embeddings first" if name == "model" else "give another one"
    raise TrainingError(
        f"step {step.step}: row {uid} holds token {token}, and the {name} has the tokens 0 to "
        f"{vocabulary - 1}: take a {name} whose tokenizer made the row, or {remedy}. {without(uid)}"
    )


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
        of_rows = _terms_of_rows(microbatch, algorithm, policy).cpu()
        terms.scatter_reduce_(0, slots, of_rows, "amax")
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
        depends = loss.requires_grad
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True) if depends else ()
    largest = torch.finfo(torch.float64).max
    terms = torch.zeros_like(microbatch["input_ids"], dtype=torch.float64)
    for gradient in gradients:
        if gradient is not None:
            size = gradient.double().abs().nan_to_num(nan=largest, posinf=largest)
            terms = torch.maximum(terms, size)
    rows = rows_of_tokens(microbatch)
    of_rows = terms.new_zeros(len(microbatch["sample_index"]))
    of_rows.scatter_reduce_(0, rows, terms.flatten(), "amax")
    for column in (scores.logprob.detach(), *(microbatch[name] for name in microbatch)):
        if not isinstance(column, Tensor) or not column.is_floating_point():
            continue
        broken = torch.where(column.detach().isfinite(), 0.0, torch.inf).double()
        if column.shape == terms.shape:
            of_rows.scatter_reduce_(0, rows, broken.flatten(), "amax")
        elif column.shape == of_rows.shape:
            of_rows = torch.maximum(of_rows, broken)
    return of_rows


def value_loss(
    predicted: Tensor,
    values: Tensor,
    returns: Tensor,
    action_mask: Tensor,
    *,
    clip_range: float | None = None,
    loss_agg_mode: str = "token-mean",
    layout: BatchLayout | None = None,
) -> Tensor:
    """Return half the squared error between values and returns, on action tokens.

    Args:
        predicted: by the critic as it is now.
        values: by the critic before the step.
        returns: what it is to predict.
        action_mask: what counts.
        clip_range: how far a value may move from the one of the step's beginning, as in PPO's first
            implementations, where the worse of the two errors counts; None: any way. The
            algorithms' descriptions name no such range, so there is none by default.
        loss_agg_mode: see `aggregate_loss`.
        layout: boundaries and denominators of the step.
    """
    now, before = keep(action_mask, predicted), keep(action_mask, values)
    wanted = keep(action_mask, returns)
    errors = (now - wanted).square()
    if clip_range is not None:
        near = before + (now - before).clamp(-clip_range, clip_range)
        errors = torch.maximum(errors, (near - wanted).square())
    return aggregate_loss(0.5 * errors, action_mask, loss_agg_mode, layout=layout)
