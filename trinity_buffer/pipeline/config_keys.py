"""The keys of an experiment's configuration: what nobody reads is refused, with what was meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from trinity_buffer.errors import InvalidArgumentError

EXTRA = "extra"
"""The key under which users keep what is their own; nothing here reads it."""

CONFIG_KEYS = frozenset(
    {
        *("schema", EXTRA, "task", "model", "optimizer", "loss", "evaluation", "seed"),
        *("rollout", "tasks", "evaluate", "server", "folder", "exploring"),
        *("algorithm", "algorithm_args", "strategy", "strategy_args", "reference", "teacher"),
        *("expert_experiment", "recompute_old_logprob", "trainer", "groups_per_batch"),
        *("rollouts_per_group", "deadline_s", "incomplete", "groups_per_step"),
        *("max_waiting_groups", "max_staleness", "commit_every_steps", "max_steps"),
        *("max_skipped_steps", "max_rejected_steps", "lease_ttl_s", "tokens_per_microbatch"),
        *("max_tokens", "layout", "dialect", "tokenizer", "record_facts", "record_tokens"),
    }
)
"""What somebody reads: the pipeline, or the processes of a run (``cli.run_config``)."""


def require_known(experiment: str, given: Iterable[str], stored: Iterable[str]) -> None:
    """Do nothing if every key of ``given`` is read by somebody, or ``stored`` already.

    Raises:
        InvalidArgumentError: it is not; the message names the key that was probably meant.
    """
    for key in sorted(set(given) - CONFIG_KEYS - set(stored)):
        close = difflib.get_close_matches(key, CONFIG_KEYS, n=1)
        meant = f"did you mean {close[0]!r}?" if close else "nothing reads it."
        raise InvalidArgumentError(
            f"experiment {experiment!r}: there is no configuration key {key!r}; {meant} Keep what "
            f"is your own under {EXTRA!r}"
        )
