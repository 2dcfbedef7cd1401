"""The store inside verl: a replay buffer that records and serves, and a callback that commits.

Both are named in verl's configuration, without a change to its code; see docs/other_trainers.md.
Written against verl 0.9.1 and TransferQueue 0.1.11.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.experience import Experience
from trinity_buffer.identity import EID
from trinity_buffer.integrations.checkpointed_steps import StoreThread, last_saved
from trinity_buffer.lazy import importing
from trinity_buffer.pipeline.annotate.consumer import run_strategy

with importing("verl", "trinity-buffer[verl]"):
    from verl.trainer.ppo.checkpoint_callback import CheckpointCallback
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict
with importing("TransferQueue", "trinity-buffer[verl]"):
    import transfer_queue as tq
    from transfer_queue import KVBatchMeta

TRAIN = "train"
OWN = ("prompts", "responses", "response_mask", "loss_mask", "input_ids")
"""Fields of a trajectory that are made of an experience's tokens."""
PLACED = {"rollout_log_probs": "logprobs", "rm_scores": "token_level_reward"}
"""Field of verl -> field of an experience, both per token of the response."""


class StoreReplayBuffer(ReplayBuffer):  # type: ignore[misc]  # verl is untyped
    """Records each prompt's finished trajectories, and hands verl one step of the train stream.

    A prompt is a batch of one group: its uid names both, a session is a run, each of its outputs a
    step. It leaves TransferQueue, which is RAM, once it is durable, and is put back from the store
    when it is trained on. A trainer that goes on from its checkpoint of step N is served what its
    weights have not seen, as it was recorded. For a prompt that leaves nothing to train on, verl is
    asked for another. Validation is verl's own.

    Args:
        sampler_kwargs: ``url`` and ``experiment``, both made if there is none; ``strategy``
            (``"grpo"``), whose advantages stand in the store (verl computes its own); ``config`` of
            the experiment; other keys are options of the stream, see `StreamOptions`.
        kwargs: what else verl gives a custom sampler.

    Raises:
        InvalidArgumentError: verl's trainer is not the synchronous one.
    """

    def __init__(self, *, sampler_kwargs: Any, **kwargs: Any) -> None:
        super().__init__(sampler_kwargs=sampler_kwargs, **kwargs)
        if self.trainer_mode != "sync":
            raise InvalidArgumentError(
                f"trainer.v1.trainer_mode={self.trainer_mode!r}: a step of verl must be a step of "
                "the store, which only 'sync' holds to"
            )
        options = dict(sampler_kwargs)
        url, name = options.pop("url"), options.pop("experiment")
        self._thread = StoreThread(url, name, options.pop("config", {}))
        self._options = {"strategy": "grpo", **options}
        self._checkpoints: Path | None = None
        self._fruitless = 0

    @override
    def sample(
        self, global_steps: int, partition_id: str, batch_size: int
    ) -> tuple[KVBatchMeta, dict[str, Any]]:
        """Return the keys of gradient step ``global_steps``; their values are in TransferQueue.

        Raises:
            CheckpointError: the weights have seen nothing of what was committed.
            InvalidExperienceError: a trajectory holds what cannot be stored.
            InvalidArgumentError: a trajectory has no reward.
        """
        if partition_id != TRAIN:
            return super().sample(global_steps, partition_id, batch_size)  # type: ignore[no-any-return]
        self._record(batch_size)
        options = {**self._options, "groups_per_step": batch_size, "follow": True}
        steps = self._thread.begin(global_steps - 1, **options)
        self._commit()
        taken = self._thread.portal.start_task_soon(steps.take)
        while not wait([taken], timeout=self.poll_interval).done:
            self._record(batch_size)
        return _put(self._thread.rows_of(taken.result())), {}

    def _record(self, batch_size: int) -> None:
        """Write what is finished in TransferQueue, and take it from there.

        Prompts that leave nothing are made up for by whole batches: verl's data loader may give no
        less.
        """
        self._sync_metadata_from_transfer_queue()
        begun = self.prompt_global_steps[TRAIN]
        ended = self.finished_keys[TRAIN] | self.failure_keys[TRAIN]
        for uid in sorted((uid for uid in begun if uid in ended), key=lambda uid: begun[uid]):
            keys = sorted(key for key in self.partitions[TRAIN] if key.rsplit("_", 2)[0] == uid)
            rows = _trajectories(keys, [self.partitions[TRAIN][key] for key in keys])
            self._fruitless += not self._thread.portal.call(self._write, uid, rows)
            self._clear_groups(TRAIN, {uid})
        while self._fruitless > 0:
            self.refill_fn(batch_size)
            self._fruitless -= batch_size

    async def _write(self, uid: str, rows: Sequence[Experience]) -> int:
        """Record a prompt's trajectories; return how many of them there are to train on."""
        writer = self._thread.experiment.writer(actor="verl")
        if rows:
            await writer.write(rows)
        await writer.seal(uid, len(rows))
        return (await run_strategy(self._thread.experiment, self._options["strategy"])).annotated

    def saved(self, checkpoints: Path) -> None:
        """Commit what is in the newest checkpoint that is whole, of those in ``checkpoints``."""
        self._checkpoints = checkpoints
        self._commit()

    def _commit(self) -> None:
        if self._checkpoints is not None and self._thread.steps is not None:
            step = last_saved(self._checkpoints)
            folder = self._checkpoints / f"global_step_{step}"
            self._thread.portal.call(self._thread.steps.commit, step, folder)

    def close(self) -> None:
        """Release the lease; a trainer that is killed loses it after ``lease_ttl_s``."""
        self._thread.close()


class StoreCheckpointCallback(CheckpointCallback):  # type: ignore[misc]  # verl is untyped
    """Commits the steps that a checkpoint of verl holds, once it is whole."""

    @override
    def on_save(self, *, trainer: Any, checkpoint_dir: str, **_: Any) -> None:
        trainer.replay_buffer.saved(Path(checkpoint_dir).parent)


def _trajectories(keys: list[str], tags: list[dict[str, Any]]) -> list[Experience]:
    if not keys:
        return []
    data = tq.kv_batch_get(keys=keys, partition_id=TRAIN)
    columns = {
        name: list(column.unbind() if isinstance(column, torch.Tensor) else column.tolist())
        for name in data.keys()  # noqa: SIM118 - a TensorDict
        for column in [data.get(name)]
    }
    return [
        _experience(key, {name: values[at] for name, values in columns.items()}, tag)
        for at, (key, tag) in enumerate(zip(keys, tags, strict=True))
    ]


def _experience(key: str, row: dict[str, Any], tag: dict[str, Any]) -> Experience:
    if "rm_scores" not in row:
        raise InvalidArgumentError(
            f"trajectory {key} has no rm_scores: its reward must come with it, so that a reward "
            "model needs GPUs of its own (reward.reward_model.enable_resource_pool)"
        )
    uid, session, index = key.rsplit("_", 2)
    positions = row["position_ids"]
    counts_up = torch.equal(positions, torch.arange(positions.shape[-1]))
    held = (*OWN, *PLACED, *(["position_ids"] if counts_up else []))
    version = tag.get("min_global_steps")
    return Experience(
        eid=EID(uid, uid, int(session), int(index)),
        tokens=row["input_ids"].to(torch.int32),
        prompt_length=len(row["prompts"]),
        action_mask=row["response_mask"].bool(),
        reward=float(row["rm_scores"].sum()),
        info={
            "model_version": tag["global_steps"] - 1 if version is None else version,
            "fields": _plain({name: value for name, value in row.items() if name not in held}),
            "tag": _plain(tag),
        },
        **{ours: row[theirs] for theirs, ours in PLACED.items() if theirs in row},
    )


def _plain(value: Any) -> Any:
    """Return a value in types that the store keeps, where there are such."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.dtype == object):
        return [_plain(item) for item in value]
    return value


def _put(rows: Sequence[Experience]) -> KVBatchMeta:
    """Put the trajectories of ``rows`` into TransferQueue, as verl's agent loop would."""
    # verl addresses trajectories by these texts: of two equal ones the first would be lost.
    keys = [f"{row.eid.batch}_{row.eid.run}_{row.eid.step}" for row in rows]
    if len(set(keys)) < len(keys):
        raise InvalidArgumentError("verl takes each trajectory once: use a strategy without copies")
    meta = KVBatchMeta(partition_id=TRAIN, keys=keys, tags=[row.info["tag"] for row in rows])
    # A prompt at a time: another one's trajectories may have other fields.
    for _, group in groupby(range(len(rows)), key=lambda at: rows[at].eid.batch):
        places = list(group)
        fields = list_of_dict_to_tensordict([_fields(rows[at]) for at in places])
        own = {"keys": [keys[at] for at in places], "tags": [meta.tags[at] for at in places]}
        tq.kv_batch_put(partition_id=TRAIN, fields=fields, **own)
    return meta


def _fields(row: Experience) -> dict[str, Any]:
    assert row.action_mask is not None
    ids, mask = row.tokens.long(), row.action_mask.long()
    own = (ids[: row.prompt_length], ids[row.prompt_length :], mask, mask, ids)
    held = {theirs: getattr(row, ours) for theirs, ours in PLACED.items()}
    return {
        **dict(zip(OWN, own, strict=True)),
        **{name: value for name, value in held.items() if value is not None},
        "position_ids": torch.arange(len(ids)),
        **row.info["fields"],
    }
