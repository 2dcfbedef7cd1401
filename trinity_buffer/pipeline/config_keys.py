"""Validates keys and values of an experiment's configuration."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard

from trinity_buffer.errors import InvalidArgumentError

EXTRA = "extra"
"""The key for the user's own values; nothing here reads it."""

CONFIG_KEYS = frozenset(
    {
        *("schema", EXTRA, "task", "model", "optimizer", "loss", "evaluation", "seed"),
        *("rollout", "tasks", "evaluate", "server", "folder", "exploring"),
        *("algorithm", "algorithm_args", "strategy", "strategy_args", "reference", "teacher"),
        *("expert_experiment", "recompute_old_logprob", "trainer", "groups_per_batch"),
        *("rollouts_per_group", "deadline_s", "idle_s", "incomplete", "groups_per_step"),
        *("max_waiting_groups", "max_staleness", "commit_every_steps", "max_steps"),
        *("max_skipped_steps", "max_rejected_steps", "lease_ttl_s", "tokens_per_microbatch"),
        *("max_tokens", "layout", "dialect", "tokenizer", "record_facts", "record_tokens"),
        *("async_checkpoints", "stalled_after_s", "deterministic", "device"),
    }
)
"""All keys that the pipeline or the processes of a run (``cli.run_config``) read."""


LEAST = {
    **dict.fromkeys(("groups_per_batch", "rollouts_per_group", "groups_per_step"), 1),
    **dict.fromkeys(("max_waiting_groups", "max_rejected_steps", "tokens_per_microbatch"), 1),
    "max_staleness": 0,
}
"""Integers that the pipeline reads, and the minimum of each; None counts as unset."""


SECONDS = ("lease_ttl_s", "stalled_after_s")
"""Seconds that the pipeline reads; None counts as unset, or as never."""


def require_values(experiment: str, config: Mapping[str, Any]) -> None:
    """Raise unless the values of ``config`` that the pipeline reads are valid.

    Raises:
        InvalidArgumentError: names the key, its value and the accepted values.
    """
    for key, value in config.items():
        least, must = LEAST.get(key), ""
        if value is None:
            continue
        if least is not None and not (type(value) is int and value >= least):
            must = f"an integer, at least {least}"
        elif key == "trainer" and not isinstance(value, str):
            must = "a text"
        elif key in SECONDS and not (_is_number(value) and 0 < value <= LONGEST_S):
            must = f"a number of seconds above 0, at most {LONGEST_S:.0e}"
        if must:
            raise InvalidArgumentError(
                f"experiment {experiment!r}: {key}={value!r:.100}: it must be {must}"
            )


LONGEST_S = 1e9
"""Some thirty years: practically for ever, yet it can be added to a clock without overflow."""


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def require_known(experiment: str, keys: Iterable[str], stored: Iterable[str]) -> None:
    """Raise unless every key is known, or ``stored`` already.

    Raises:
        InvalidArgumentError: an unknown key; the message names the one probably meant.
    """
    for key in sorted(set(keys) - CONFIG_KEYS - set(stored)):
        close = difflib.get_close_matches(key, CONFIG_KEYS, n=1)
        meant = f"did you mean {close[0]!r}?" if close else "nothing reads it."
        raise InvalidArgumentError(
            f"experiment {experiment!r}: there is no configuration key {key!r}; {meant} Keep what "
            f"is your own under {EXTRA!r}"
        )
