"""What an algorithm asks of a train stream."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from typing import Any

import torch

from trinity_buffer.algorithm import ADD_STRATEGY, Algorithm
from trinity_buffer.algorithm.arguments import made
from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.pipeline.annotate.consumer import RECORDED as RECORDED_SET
from trinity_buffer.pipeline.history.replay import ReplayStream
from trinity_buffer.pipeline.sync_stream import SyncTrainStream
from trinity_buffer.trainer.parallel import Processes
from trinity_buffer.trainer.policy import Policy, Trainable
from trinity_buffer.writer import StagedWriter

_logger = logging.getLogger(__name__)

COMPARE_RUNS = {"grpo", "dapo_dynamic_sampling", "reward_variance", "duplicate_informative"}
COMPARE_RUNS |= {"best_of_group", "step_wise_grpo", "rloo", "grpo_verl"}
"""Strategies and advantage functions that have nothing to say of a run that stands alone."""

RECORDED = frozenset({"logprobs", "reward"})
"""What our own explorers record of a run beside its tokens."""


def require_same_ranks(stream: object, processes: Processes) -> None:
    """Raise unless a stream serves each of the processes whose gradients are averaged its own part.

    A stand-in for one, which may hand on what it reads from it, is not asked.

    Raises:
        InvalidArgumentError: it does not: rows would be trained twice, or gradients be of a part.
    """
    if not isinstance(stream, SyncTrainStream | ReplayStream):
        return
    here, served = processes, stream.options if isinstance(stream, SyncTrainStream) else stream
    # The whole of a replay is of use to every process.
    is_whole = isinstance(stream, ReplayStream) and stream.world_size == 1
    if not is_whole and (here.rank, here.world_size) != (served.rank, served.world_size):
        raise InvalidArgumentError(
            f"this process is rank {here.rank} of {here.world_size} in torch.distributed, and its "
            f"stream was opened as rank {served.rank} of {served.world_size}: give "
            f"rank={here.rank}, world_size={here.world_size}, or start the ranks with torchrun and "
            "init_process_group()"
        )


def strategy_of(algorithm: Algorithm) -> str | None:
    """Return the name of the algorithm's annotation set; None: trained as recorded."""
    return "+".join(choice.name for choice in algorithm.strategies) or None


def strategies_of(algorithm: Algorithm) -> tuple[list[str], dict[str, Any]]:
    """Return names and arguments with which `run_strategy` runs the algorithm's strategies."""
    choices = algorithm.strategies
    if len(choices) == 1:
        return [choices[0].name], dict(choices[0].args)
    return [choice.name for choice in choices], {c.name: dict(c.args) for c in choices}


def require(
    algorithm: Algorithm,
    *,
    schema: str = "experience",
    columns: Collection[str] | None = None,
    rollouts_per_group: int | None = None,
    teacher: bool = False,
    expert: str | None = None,
    experiments: Collection[str] | None = None,
) -> None:
    """Refuse a run that lacks something that its algorithm needs, before any rollout.

    Args:
        algorithm: what is trained.
        schema: of the data.
        columns: what the rows have beside their tokens; None: there are none yet, and they will
            have what our own explorers record.
        rollouts_per_group: runs of a task; None: the algorithm's own number.
        teacher: whether the trainer has a teacher policy.
        expert: experiment with the expert's rows.
        experiments: those of the store; None: there is no store yet.

    Raises:
        InvalidArgumentError: says what is lacking, and what to do.
    """
    algorithm.check_schema(schema)
    for choice in algorithm.strategies:
        made(choice.cls, StagedWriter(), **choice.args)  # refuses arguments of another kind
    reads, loss = algorithm.reads, algorithm.choices["policy_loss_fn"].name
    taught = teacher or "teacher_logprobs" in (columns or RECORDED)
    is_mixed = algorithm.choices["sample_strategy"].name == "mix"
    names = [choice.name for choice in algorithm.strategies]
    scored = any(ADD_STRATEGY.get(name).annotates for name in names)
    unscored = algorithm.needs_advantages and not scored
    advantage = algorithm.choices.get("advantage_fn")
    parts = [*names, *([] if advantage is None else [advantage.name])]
    comparing = next((name for name in parts if name in COMPARE_RUNS), None)
    is_there = experiments is None or expert in experiments
    lacking = {
        "teacher_logprobs: store them with the experiences, or give the trainer a teacher policy "
        "(teacher=FILE)": "teacher_logprob" in reads and not taught,
        "values of a critic, which algorithm=ppo trains and this one does not": (
            "values" in reads and not algorithm.type.use_critic
        ),
        f"an expert's rows for the loss {loss!r}: algorithm=mix takes them, or mix_chord": (
            "expert_mask" in reads and not is_mixed
        ),
        "an expert's rows for the entropy 'mix': algorithm=mix takes them, or mix_chord": (
            algorithm.entropy_loss.usual_rows_only and not is_mixed
        ),
        "reward_baselines, the rewards of greedy answers, which no stream holds: choose another "
        "advantage_fn, such as rloo": "reward_baselines" in reads,
        f"pairs for the loss {loss!r}: algorithm=dpo trains on them": (
            algorithm.policy_loss.pairs and algorithm.type.schema != "dpo"
        ),
        "an expert's rows: record solutions in another experiment of the store, of the schema "
        "'sft', and name it (expert_experiment=NAME)": is_mixed and expert is None,
        f"no expert_experiment={expert!r}: only sample_strategy='mix' reads one": (
            expert is not None and not is_mixed
        ),
        f"expert_experiment={expert!r}, which is not in this store; it holds "
        f"{', '.join(experiments or ()) or 'none'}": (
            is_mixed and expert is not None and not is_there
        ),
        f"advantages, and {'+'.join(names)!r} only chooses: put a strategy that computes them "
        f"behind it (strategy={'+'.join(names)}+grpo)": unscored and bool(names),
        "advantages: name a strategy that computes them (strategy=grpo)": unscored and not names,
        f"several runs of a task, which {comparing!r} compares: rollouts_per_group=1; give 2 or "
        "more": comparing is not None and rollouts_per_group == 1,
    }
    needed = [text for text, is_lacking in lacking.items() if is_lacking]
    if needed:
        raise InvalidArgumentError(f"algorithm {algorithm.name!r} needs {', and '.join(needed)}")


def unread_models(
    algorithm: Algorithm, *, reference: str | None, teacher: str | None
) -> Iterator[str]:
    """Yield a sentence about each frozen model, of which that is the name, that nothing reads."""
    if reference is not None and not algorithm.needs_reference:
        yield (
            f"reference={reference!r}: algorithm {algorithm.name!r} measures no divergence: "
            "choose a kl_loss_fn whose kl_coef is not 0, or leave it out (null)"
        )
    if teacher is not None and "teacher_logprob" not in algorithm.reads:
        yield (
            f"teacher={teacher!r}: algorithm {algorithm.name!r} distils nothing: choose one that "
            "does, such as on_policy_distill, or leave it out (null)"
        )


def warn_of_unread(algorithm: Algorithm, **models: object) -> None:
    """Warn of each frozen model that nothing reads: one script may train many algorithms."""
    names = {role: None if m is None else type(m).__name__ for role, m in models.items()}
    for message in unread_models(algorithm, **names):
        _logger.warning("%s", message)


def warn_of_trained_reference(reference: Policy, policy: Policy, step: int) -> None:
    """Warn if the model that was given, whose copy is the reference, is that of the last commit.

    Args:
        reference: the copy; of a model with an adapter, that model.
        policy: with the weights of the commit.
        step: of the commit.
    """
    pairs = zip(reference.parameters(), policy.parameters(), strict=True)
    if all(given is not own and torch.equal(given, own) for given, own in pairs):
        _logger.warning(
            "the model that was given has the weights after step %d already, and divergences are "
            "measured from them: give the weights that the run began with, or reference=",
            step,
        )


def warn_of_rounding(model: Trainable, optimizer: torch.optim.Optimizer) -> None:
    """Warn of weights in 16 bits that steps of Adam are too small to change.

    The steps of another optimizer are not as large as its rate, or it keeps copies in 32 bits.
    """
    if not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        return
    for group in optimizer.param_groups:
        held = [weight.detach() for weight in group["params"] if weight.requires_grad]
        own = [getattr(w, "to_local", lambda w=w: w)() for w in held if w.element_size() == 2]
        # In float32: a sum of many overflows 16 bits.
        norms = [torch.linalg.vector_norm(w, 1, dtype=torch.float32) for w in own]
        size = sum(map(float, norms)) / max(1, sum(w.numel() for w in own))
        rate = float(group.get("initial_lr", group["lr"]))  # a warm-up begins with 0
        # A step rounds to the next number, or to none: numbers lie up to `eps` apart.
        if own and rate < (least := size * torch.finfo(own[0].dtype).eps / 4):
            _logger.warning(
                "the weights of the %s are %s, to which steps of learning_rate=%g are mostly "
                "rounded away (from %.0e on they are not): load the model in float32 "
                "(dtype=torch.float32, or save it so), or give an optimizer= that keeps the "
                "weights in float32",
                type(model).__name__,
                str(own[0].dtype).removeprefix("torch."),
                rate,
                least,
            )
            return


def require_of(
    algorithm: Algorithm, stream: SyncTrainStream, *, recompute_old_logprob: bool, teacher: bool
) -> None:
    """Refuse a stream that lacks something that its algorithm needs, or needs what is computed.

    Args:
        algorithm: what is trained.
        stream: what it is trained on.
        recompute_old_logprob: whether the trainer computes ``old_logprob`` itself.
        teacher: whether the trainer has a teacher policy.

    Raises:
        InvalidArgumentError: says what is lacking, and what to do.
    """
    columns = stream.columns()
    require(
        algorithm,
        schema=stream.config.get("schema", "experience"),
        columns=columns,
        rollouts_per_group=stream.config.get("rollouts_per_group"),
        teacher=teacher,
        expert=stream.options.expert_experiment,
    )
    computed = {"recompute_old_logprob": recompute_old_logprob, "teacher": teacher}
    unread = {*stream.options.needs} - {*stream_options(algorithm, **computed)["needs"]}
    lacking = unread - (columns or RECORDED)
    for role, column in (("recompute_old_logprob", "logprobs"), ("teacher", "teacher_logprobs")):
        if computed[role] and column in lacking:
            raise InvalidArgumentError(
                f"the stream rejects rows without {column}, which the trainer computes: open it "
                f"with stream_options(algorithm, {role}=True), and, if it has rejected rows "
                "already, under another name (consumer=)"
            )
    # Rewards may have been scored anew since: a set was computed from those of its own scoring.
    reads_rewards = algorithm.advantage is not None and algorithm.advantage.reads_rewards
    scoring = stream.scoring() if reads_rewards else None
    if scoring is not None:
        raise InvalidArgumentError(
            f"algorithm {algorithm.name!r} computes its advantages from the recorded rewards, and "
            f"set {stream.options.annotation_set!r} is computed from those of scoring {scoring!r}: "
            "train it with an algorithm that takes the set's advantages, or on strategy=None"
        )
    recorded = stream.options.annotation_set == RECORDED_SET
    brought = {*(columns or ()), *stream.options.needs}
    if algorithm.needs_advantages and recorded and "advantages" not in brought:
        raise InvalidArgumentError(
            f"algorithm {algorithm.name!r} needs advantages, and this stream reads no annotation "
            f"set: open it with strategy={strategy_of(algorithm)!r}, or, if the rows are recorded "
            "with their advantages, with needs=('advantages',)"
        )


def stream_options(
    algorithm: Algorithm, *, recompute_old_logprob: bool = False, teacher: bool = False
) -> dict[str, Any]:
    """Return the options of `open_train_stream` that follow from an algorithm.

    Args:
        algorithm: what is trained.
        recompute_old_logprob: the trainer computes ``old_logprob`` itself.
        teacher: the trainer has a teacher policy, so that none need be stored.

    Raises:
        InvalidArgumentError: an argument of its ``sample_strategy`` that no stream takes.
    """
    advantage = algorithm.advantage
    # Whether something compares with the log-probabilities that the explorer recorded.
    reads_old = advantage is not None and advantage.reads_old_logprob
    reads_old |= "old_logprob" in algorithm.tensors
    corrects = algorithm.choices["importance_correction"].name != "none"
    compares = corrects or "rollout_logprob" in algorithm.reads
    distils = advantage is not None and "teacher_logprob" in advantage.tensors
    needs = {
        "advantages": algorithm.needs_advantages,
        "logprobs": compares or (reads_old and not recompute_old_logprob),
        "reward": advantage is not None and advantage.reads_rewards,
        "teacher_logprobs": distils and not teacher,
    }
    sampling = algorithm.choices["sample_strategy"]
    passed = ("max_staleness", "expert_data_ratio")
    usual = sampling.cls.default_args()
    for name in sampling.args.keys() - passed:
        if sampling.args[name] != usual.get(name):
            raise InvalidArgumentError(
                f"sample_strategy_args: a train stream passes on {' and '.join(passed)} alone, not "
                f"{name}: make it the default of a class of your own"
            )
    return {
        "sample_strategy": sampling.name,
        "recompute_old_logprob": recompute_old_logprob,
        "needs": tuple(name for name, is_needed in needs.items() if is_needed),
        **{name: sampling.args[name] for name in passed if name in sampling.args},
    }
