"""TransferQueue: rows are columns in the memory of two storage units, which are Ray's actors.

The strategy writes back the column of advantages alone; the trainer asks for rows that have all
columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import ray
import torch
import transfer_queue
from omegaconf import OmegaConf
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorStack
from typing_extensions import override

from benchmarks.peers.protocol import Job, StoreClient
from benchmarks.peers.rollouts import RUNS, Array, Batch, Rollout, scores
from benchmarks.peers.stores import ray_session

PARTITION = "rollouts"
COLUMNS = ["tokens", "logprobs", "mask", "facts", "advantage"]


@contextmanager
def serving(folder: Path, job: Job) -> Iterator[str]:  # noqa: ARG001
    """Start Ray, the controller and the storage units; yield Ray's address."""
    with ray_session.started() as address:
        sampler = transfer_queue.GRPOGroupNSampler(n_samples_per_prompt=RUNS)
        controller = {"sampler": sampler, "polling_mode": True}
        settings = OmegaConf.create({"controller": controller}, flags={"allow_objects": True})
        transfer_queue.init(settings)
        yield address
        transfer_queue.close()


class Client(StoreClient):
    """A client of the controller and of the storage units."""

    poll_s: ClassVar[float] = 0.01

    def __init__(self, address: str) -> None:
        ray_session.join(address)
        transfer_queue.init()
        self._client = transfer_queue.get_client()

    @override
    def write(self, rollouts: Sequence[Rollout], advantages: Array | None = None) -> None:
        columns = {
            "tokens": np.stack([one.tokens for one in rollouts]),
            "logprobs": np.stack([one.logprobs for one in rollouts]),
            "mask": np.stack([one.mask for one in rollouts]),
            "facts": np.array([(one.number, one.reward, one.written_at) for one in rollouts]),
        }
        found: dict[str, Any] = {name: torch.from_numpy(of) for name, of in columns.items()}
        found["text"] = NonTensorStack(*(one.text for one in rollouts))
        if advantages is not None:
            found["advantage"] = torch.from_numpy(advantages)[:, None]
        rows = TensorDict(found, batch_size=[len(rollouts)])
        self._client.put(rows, partition_id=PARTITION)

    @override
    def decide(self, limit: int) -> int:
        meta, found = self._get(["facts"], limit, "strategy")
        if meta is None:
            return 0
        facts = _dense(found["facts"]).numpy()
        tasks = facts[:, 0].astype(int).reshape(-1, RUNS) // RUNS
        assert (tasks == tasks[:, :1]).all(), "a group was split"
        values = {"advantage": torch.from_numpy(scores(facts[:, 1]))[:, None]}
        self._client.put(TensorDict(values, batch_size=[len(facts)]), metadata=meta)
        return len(facts)

    @override
    def read(self, rows: int) -> Batch | None:
        meta, found = self._get(COLUMNS, rows, "trainer")
        if meta is None:
            return None
        tokens, logprobs, mask, facts, advantage = (_dense(found[name]) for name in COLUMNS)
        return Batch(tokens, logprobs, mask, advantage * mask, facts[:, 2].tolist())

    def _get(self, columns: Sequence[str], rows: int, task: str) -> tuple[Any, Any]:
        """Return the next rows that have these columns and were not given for ``task``."""
        meta = self._client.get_meta(
            data_fields=list(columns), batch_size=rows, partition_id=PARTITION, task_name=task
        )
        if meta is None or meta.size == 0:
            return None, None
        return meta, self._client.get_data(meta)

    @override
    def close(self) -> None:
        ray.shutdown()


def _dense(column: torch.Tensor) -> torch.Tensor:
    return torch.nested.to_padded_tensor(column, 0) if column.is_nested else column
