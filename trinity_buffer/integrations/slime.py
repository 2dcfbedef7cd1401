"""A data source of slime (and miles, vime) over the store, and the rollout function that reads it.

Written against slime's sources (`slime.rollout.data_source.DataSource`, `slime.utils.types.Sample`
at 0d234f3): slime is on no package index, so that its own trainer was not run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from slime.utils.types import Sample

from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.experience import Experience
from trinity_buffer.identity import EID
from trinity_buffer.inspector.overviews import overview
from trinity_buffer.integrations.checkpointed_steps import StoreThread, require_temperature
from trinity_buffer.pipeline.annotate.consumer import run_strategy
from trinity_buffer.sampling import SEGMENTS, not_neutral

SAMPLING = ("temperature", "top_p", "top_k")
"""Options of slime that change the probabilities of tokens, ``rollout_`` before their names."""

CARRIED = (
    *("weight_versions", "remove_sample", "train_metadata", "teacher_log_probs"),
    "mopd_teacher_log_probs",
)
"""Fields that slime's trainer reads and the store does not: handed back as they were."""


class StoreDataSource:
    """Groups that were sampled: recorded by `add_samples`, handed out once by `get_samples`.

    One rollout of slime is one step of the train stream. `save` commits it with slime's checkpoint;
    after `load` of an earlier one, what its weights have not seen comes again.

    Args:
        args: slime's, with ``store_url`` and ``store_experiment`` (both made if there is none), and
            if wanted ``store_strategy`` (``"grpo"``) and ``store_options`` of the stream.
    """

    def __init__(self, args: Any) -> None:
        self.args = args
        self._strategy = getattr(args, "store_strategy", "grpo")
        self._thread = StoreThread(args.store_url, args.store_experiment, {})
        self._trained = 0

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """Return the next ``num_samples`` groups, waiting until they are recorded.

        Raises:
            CheckpointError: the weights have seen nothing of what was committed.
            TrainingError: rows were sampled at another temperature than slime trains at now.
        """
        options = {"strategy": self._strategy, "groups_per_step": num_samples, "follow": True}
        options |= getattr(self.args, "store_options", None) or {}
        steps = self._thread.begin(self._trained, **options)
        rows = self._thread.rows_of(self._thread.portal.call(steps.take))
        require_temperature(rows, getattr(self.args, "rollout_temperature", 1.0))
        # A step holds whole groups in order, so that no sorting is needed.
        groups = groupby(rows, key=lambda row: (row.eid.batch, row.eid.task))
        return [[_sample(row) for row in group] for _, group in groups]

    def add_samples(self, samples: Sequence[Sequence[Sample]]) -> None:
        """Record whole groups; of one that is stored already, what is stored stays.

        After a crash slime samples anew under group numbers that its checkpoint does not know.

        Raises:
            InvalidArgumentError: a sample has no ``group_index``; no group was recorded.
        """
        if any(sample.group_index is None for group in samples for sample in group):
            raise InvalidArgumentError(
                "a sample has group_index=None, and the store names its group by that: set it "
                "where the sample is made, as slime's own data source does"
            )
        asked = {key: getattr(self.args, f"rollout_{key}", None) for key in SAMPLING}
        heat = {} if asked["temperature"] is None else {"temperature": asked["temperature"]}
        sampling = not_neutral(asked) | heat  # one of 1 too: another may be trained with
        for group in samples:
            made = [_experience(run, sample, sampling) for run, sample in enumerate(group)]
            self._thread.portal.call(self._write, made)

    async def _write(self, group: Sequence[Experience]) -> None:
        writer = self._thread.experiment.writer(actor="slime")
        batch = group[0].eid.batch
        if not await writer.stored(batch):
            await writer.write(group)
        await writer.seal(batch, await writer.stored(batch))
        await run_strategy(self._thread.experiment, self._strategy)

    def save(self, rollout_id: int) -> None:
        """Commit everything up to ``rollout_id`` with the checkpoint that slime saved for it."""
        if self._thread.steps is not None:
            folder = Path(self.args.save or "") / f"iter_{rollout_id:07d}"
            checkpoint = folder if self.args.save and folder.is_dir() else None
            self._thread.portal.call(self._thread.steps.commit, rollout_id + 1, checkpoint)

    def load(self, rollout_id: int | None = None) -> None:
        """Go on after ``rollout_id``, which the weights went through."""
        self._trained = 0 if rollout_id is None else rollout_id + 1

    def __len__(self) -> int:
        """Return how many groups were recorded."""
        name = self._thread.experiment.name
        view = self._thread.portal.call(overview, self._thread.store, name)
        return view.experiments[0].sealed

    def close(self) -> None:
        """Release the lease; a trainer that is killed loses it after ``lease_ttl_s``."""
        self._thread.close()


def stored_rollout(
    args: Any, rollout_id: int, data_source: StoreDataSource, *, evaluation: bool = False
) -> list[list[Sample]]:
    """Return slime's next samples: a ``--rollout-function-path`` where others sample.

    Raises:
        InvalidArgumentError: slime evaluates with it, and nothing is sampled here.
    """
    del rollout_id
    if evaluation:
        raise InvalidArgumentError(
            "stored_rollout hands out what is stored and samples nothing, so slime cannot evaluate "
            "with it: name a function that samples by --eval-function-path, or leave out "
            "--eval-interval"
        )
    return data_source.get_samples(args.rollout_batch_size)


def _experience(run: int, sample: Sample, sampling: Mapping[str, Any]) -> Experience:
    names = ("multimodal_inputs", "multimodal_train_inputs")
    if any(getattr(sample, name, None) for name in names):
        raise InvalidArgumentError(
            f"sample {sample.index} has multimodal inputs, and this adapter stores texts alone: a "
            "model would be trained without them"
        )
    held = {name: getattr(sample, name, None) for name in CARRIED}
    carried = {k: value for k, value in held.items() if value is not None and value is not False}
    mask = sample.loss_mask
    if "remove_sample" in carried:  # which other trainers do not read
        carried["loss_mask"], mask = mask, [0] * sample.response_length
    version = next((int(v) for v in sample.weight_versions if str(v).isdigit()), None)
    group = f"group-{sample.group_index}"
    return Experience(
        eid=EID(group, group, run),
        tokens=list(sample.tokens),
        prompt_length=len(sample.tokens) - sample.response_length,
        action_mask=None if mask is None else [bool(counts) for counts in mask],
        logprobs=sample.rollout_log_probs,
        routed_experts=getattr(sample, "rollout_routed_experts", None),
        reward=sample.reward,
        response_text=sample.response or None,
        prompt_text=sample.prompt if isinstance(sample.prompt, str) else None,
        messages=None if isinstance(sample.prompt, str) else list(sample.prompt),
        truncate_status="response_truncated" if sample.status.value == "truncated" else None,
        info={
            **({} if version is None else {"model_version": version}),
            **({SEGMENTS: [dict(sampling)]} if sampling else {}),
            "index": sample.index,
            "group_index": sample.group_index,
            "label": sample.label,
            "status": sample.status.value,
            "metadata": dict(sample.metadata),
            "carried": carried,
        },
    )


def _sample(row: Experience) -> Sample:
    version = row.info.get("model_version")
    routed, mask = row.routed_experts, row.action_mask
    carried = {
        "weight_versions": [] if version is None else [str(version)],  # of earlier releases
        "loss_mask": None if mask is None else mask.int().tolist(),
        **({} if routed is None else {"rollout_routed_experts": routed.numpy()}),
        **row.info.get("carried", {}),
    }
    return Sample(
        group_index=row.info["group_index"],
        index=row.info["index"],
        prompt=row.prompt_text or row.messages or "",
        tokens=row.tokens.tolist(),
        response=row.response_text or "",
        response_length=len(row.tokens) - row.prompt_length,
        label=row.info["label"],
        reward=row.reward,
        rollout_log_probs=None if row.logprobs is None else row.logprobs.tolist(),
        status=Sample.Status(row.info["status"]),
        metadata=row.info["metadata"],
        **carried,
    )
