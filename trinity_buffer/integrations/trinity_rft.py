"""The store inside Trinity-RFT: an operator that records, a sample strategy that trains from it.

Both are named by their dotted path in Trinity's configuration, without a change to its code; see
docs/other_trainers.md. Written against Trinity-RFT 0.6.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any

from typing_extensions import override

from trinity_buffer.experience import CustomField, Experience
from trinity_buffer.integrations import checkpointed_steps as checkpointed
from trinity_buffer.integrations.imports.formats import counted_eid
from trinity_buffer.lazy import TESTED, importing
from trinity_buffer.pipeline.annotate.consumer import run_strategy
from trinity_buffer.pipeline.load.columns import experiences_of
from trinity_buffer.pipeline.store import Experiment, open_store

with importing("trinity-rft", f"trinity-rft{TESTED['trinity-rft']}"):
    from trinity.algorithm.sample_strategy.sample_strategy import SampleStrategy
    from trinity.algorithm.sample_strategy.utils import representative_sample
    from trinity.buffer.operators.experience_operator import ExperienceOperatorV1
    from trinity.common import experience as theirs

PLAIN = tuple(f.name for f in fields(theirs.Experience) if f.name not in ("eid", "custom_fields"))
"""What both experiences hold under the same name."""


class StoreOperator(ExperienceOperatorV1):  # type: ignore[misc]  # trinity is untyped
    """Writes what an explorer made into the store, annotates it, and leaves Trinity's queue empty.

    An explorer that makes a batch again after a crash draws other samples under the names of the
    first ones: what is stored stays, and only what is missing is written.

    Args:
        url: of the store; made if there is none.
        experiment: its name; made if there is none.
        strategy: the annotation set that is computed after each write.
        config: of the experiment, such as ``{"rollouts_per_group": 8}``.
        actor: whose writes these are.
        seal: whether all of a batch comes in one call, so that a group that lacks a run is known to
            lack it for good.
    """

    def __init__(
        self,
        url: str,
        experiment: str,
        strategy: str = "grpo",
        config: dict[str, Any] | None = None,
        actor: str = "trinity-explorer",
        *,
        seal: bool = True,
    ) -> None:
        self._url, self._name, self._strategy = url, experiment, strategy
        self._config, self._actor, self._seal = config or {}, actor, seal
        self._stack = AsyncExitStack()
        self._experiment: Experiment | None = None

    @override
    async def prepare(self) -> None:
        store = await self._stack.enter_async_context(open_store(self._url))
        self._experiment = await store.experiment(self._name, config=self._config)

    @override
    async def process(
        self, exps: list[theirs.Experience]
    ) -> tuple[list[theirs.Experience], dict[str, float]]:
        """Record ``exps``; return none of them, and how many were new.

        Raises:
            InvalidExperienceError: see `BufferWriter.write`; a reward that is no number is recorded
                as rejected.
        """
        assert self._experiment is not None, "prepare() comes first"
        experiment = self._experiment
        writer = experiment.writer(actor=self._actor, on_invalid="quarantine")
        batches: dict[Any, list[Experience]] = {}
        for made in from_trinity(exps):
            batches.setdefault(made.eid.batch, []).append(made)
        written = 0
        for batch, rows in batches.items():
            stored = {row.eid.uid async for row in experiment.read(batch=batch, families=())}
            if new := [row for row in rows if row.eid.uid not in stored]:
                await writer.write(new)
            if self._seal:
                await writer.seal(batch, await writer.stored(batch))
            written += len(new)
        await run_strategy(experiment, self._strategy)
        return [], {"store/written": float(written), "store/seen": float(len(exps))}

    @override
    async def close(self) -> None:
        await self._stack.aclose()


class StoreSampleStrategy(SampleStrategy):  # type: ignore[misc]  # trinity is untyped
    """Hands Trinity's trainer one step of the train stream after the other.

    Trinity saves its checkpoints in the background, so a step is committed with the checkpoint that
    holds it once Trinity has said that this is whole, at the next sample. A restarted trainer asks
    for the step after the one that its weights went through: what it has is committed, what it has
    not comes again.

    Args:
        buffer_config: Trinity's; not used.
        url: of the store.
        experiment: its name.
        strategy: the annotation set.
        checkpoints: Trinity's ``checkpoint_job_dir``; None: commits name no checkpoint.
        temperature: by which Trinity's trainer divides all logits.
        options: of the stream; see `StreamOptions`. It follows what explorers record until the
            experiment is finished; with ``follow=False`` it ends with what is stored.
    """

    def __init__(
        self,
        buffer_config: Any = None,
        *,
        url: str,
        experiment: str,
        strategy: str = "grpo",
        checkpoints: str | None = None,
        temperature: float = 1.0,
        **options: Any,
    ) -> None:
        super().__init__(buffer_config)
        self._url, self._name = url, experiment
        self._options = {"strategy": strategy, "follow": True, **options}
        self._checkpoints = None if checkpoints is None else Path(checkpoints)
        self._temperature = temperature
        self._stack = AsyncExitStack()
        self._opened: tuple[Experiment, checkpointed.CheckpointedSteps] | None = None

    @override
    async def sample(
        self, step: int, **_: Any
    ) -> tuple[list[theirs.Experience], dict[str, Any], list[Any]]:
        """Return the experiences of gradient step ``step``, with their advantages.

        Raises:
            CheckpointError: the weights have not seen what was committed, and no checkpoint leads
                back to them.
            StopAsyncIteration: the stream has ended; Trinity's trainer ends with it.
            TrainingError: rows were sampled at another temperature, or no trainer can score them.
        """
        if self._opened is None:
            store = await self._stack.enter_async_context(open_store(self._url))
            named = await store.experiment(self._name)
            opening = checkpointed.checkpointed_steps(named, step - 1, **self._options)
            self._opened = named, await self._stack.enter_async_context(opening)
        experiment, steps = self._opened
        folder = self._checkpoints
        saved = steps.newest if folder is None else checkpointed.last_saved(folder)
        await steps.commit(saved, folder and folder / f"global_step_{saved}")
        taken = await steps.take()
        for microbatch in taken.microbatches:
            microbatch.require_scorable()
        rows = await experiences_of(experiment, taken.manifest)
        checkpointed.require_temperature(rows, self._temperature)
        samples = to_trinity(rows)
        metrics: dict[str, Any] = {}
        self.set_model_version_metric(samples, metrics)
        return samples, metrics, representative_sample(samples)

    async def close(self) -> None:
        """Release the lease; a trainer that is killed loses it after ``lease_ttl_s``."""
        await self._stack.aclose()

    @classmethod
    @override
    def default_args(cls) -> dict[str, Any]:
        return {}

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the store knows what was trained."""
        return {}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Ignore it; see `state_dict`."""


def from_trinity(experiences: Sequence[theirs.Experience]) -> list[Experience]:
    """Return Trinity's experiences as the store takes them.

    Experiences of one step of a run are told apart by `counted_eid`.
    """
    seen: dict[tuple[Any, ...], int] = {}
    pairs = [(counted_eid(row.eid, seen), _shared(row, CustomField)) for row in experiences]
    return [Experience(eid=eid, **shared) for eid, shared in pairs]


def to_trinity(experiences: Sequence[Experience]) -> list[theirs.Experience]:
    """Return stored experiences as Trinity's, with the store's names."""
    return [
        theirs.Experience(eid=theirs.EID(**row.eid.to_dict()), **_shared(row, theirs.CustomField))
        for row in experiences
    ]


def _shared(row: Experience | theirs.Experience, custom_field: Any) -> dict[str, Any]:
    """Return the fields that both classes have, custom fields as the other's class."""
    shared = {name: getattr(row, name) for name in PLAIN}
    shared["custom_fields"] = [
        custom_field(field.source_field, field.destination_field, field.data_type)
        for field in row.custom_fields
    ]
    return shared
