"""Which experiences a gradient step takes: how many, from where, how old at most."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Protocol

from typing_extensions import override

from trinity_buffer.algorithm import arguments
from trinity_buffer.algorithm.annotating import reward_of
from trinity_buffer.errors import InvalidArgumentError
from trinity_buffer.experience import Experience
from trinity_buffer.metrics import gather_metrics

__all__ = [
    "SAMPLE_STRATEGY",
    "DefaultSampleStrategy",
    "SamplePlan",
    "SampleReader",
    "SampleStrategy",
    "StalenessControlSampleStrategy",
    "WarmupSampleStrategy",
    "representative_samples",
]

Sampled = tuple[list[Experience], dict[str, float], list[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class SamplePlan:
    """What one gradient step asks for.

    Attributes:
        usual: units (rows or groups, whatever the caller counts) of the policy's own data.
        expert: units of an expert's data.
        min_policy_version: older data are not taken.
    """

    usual: int
    expert: int = 0
    min_policy_version: int = 0


class SampleReader(Protocol):
    """Where experiences come from: hands them out once, and knows how far it is."""

    async def read(self, batch_size: int, *, min_policy_version: int = 0) -> list[Experience]:
        """Return the next experiences, at most ``batch_size``, none older than asked for."""

    def state_dict(self) -> dict[str, Any]:
        """Return how far the reader is."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``."""


@arguments.configured
class SampleStrategy(arguments.Configured, ABC):
    """Plans what a step takes (`plan`), and takes it (`sample`).

    Args:
        reader: of the policy's own data; None if only `plan` is of use.
        batch_size: what one `sample` takes, in the reader's units.

    Raises:
        InvalidArgumentError: an argument that no class in the line of inheritance declares.
    """

    runtime_args: ClassVar[tuple[str, ...]] = ("reader", "batch_size", "expert_reader")

    reader: SampleReader | None = None
    _: KW_ONLY
    batch_size: int = 1

    @abstractmethod
    def plan(self, step: int, size: int) -> SamplePlan:
        """Return the plan of gradient step ``step``, of ``size`` units in all."""

    @abstractmethod
    async def sample(self, step: int) -> Sampled:
        """Return the experiences of ``step``, metrics, and a few of them to look at."""

    def state_dict(self) -> dict[str, Any]:
        """Return how far the reader is."""
        return dict(_required(self.reader).state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``."""
        _required(self.reader).load_state_dict(state)


SAMPLE_STRATEGY: arguments.Registry[type[SampleStrategy]] = arguments.Registry("sample_strategy")


@SAMPLE_STRATEGY.register_module("default")
class DefaultSampleStrategy(SampleStrategy):
    """Takes what comes next."""

    @override
    def plan(self, step: int, size: int) -> SamplePlan:
        """Return ``size`` units of any age."""
        return SamplePlan(size)

    @override
    async def sample(self, step: int) -> Sampled:
        """Return the reader's next experiences."""
        plan = self.plan(step, self.batch_size)
        reader = _required(self.reader)
        taken = await reader.read(plan.usual, min_policy_version=plan.min_policy_version)
        return taken, version_metrics(taken), representative_samples(taken)


@SAMPLE_STRATEGY.register_module("warmup")
class WarmupSampleStrategy(DefaultSampleStrategy):
    """The old name of `DefaultSampleStrategy`."""


@SAMPLE_STRATEGY.register_module("staleness_control")
@arguments.configured
class StalenessControlSampleStrategy(DefaultSampleStrategy):
    """Takes what comes next, if it is not too old.

    Args:
        max_staleness: how many policy versions behind the one that step ``step`` starts from,
            which is ``step - 1``.
        kwargs: the arguments of `SampleStrategy`.
    """

    max_staleness: float = arguments.checked(math.inf, arguments.NOT_NEGATIVE, kw_only=True)

    @override
    def plan(self, step: int, size: int) -> SamplePlan:
        """Return ``size`` units that are young enough."""
        # Step n starts from policy version n - 1.
        oldest = max(step - self.max_staleness - 1, 0)
        return SamplePlan(size, min_policy_version=math.ceil(oldest))


def version_metrics(experiences: Sequence[Experience]) -> dict[str, float]:
    """Return statistics of the policy versions, as ``sample/model_version/{mean,max,min}``.

    Drift is how many versions passed while an experience was generated; 0 if not recorded.
    """
    names = ("model_version", "model_version_drift")
    infos = [e.info for e in experiences if e.info.get("model_version") is not None]
    rows = [{name: info.get(name, 0) for name in names} for info in infos]
    return gather_metrics(rows, "sample") if rows else {}


def representative_samples(experiences: Sequence[Experience]) -> list[dict[str, Any]]:
    """Return the texts of the worst and the best experience, or of the first if rewards lack."""
    if not experiences:
        return []
    rewarded = [e for e in experiences if e.reward is not None]
    if len(rewarded) < len(experiences):
        return [{"prompt": experiences[0].prompt_text, "response": experiences[0].response_text}]
    chosen = [min(rewarded, key=reward_of), max(rewarded, key=reward_of)]
    return [
        {"prompt": e.prompt_text, "response": e.response_text, "reward": e.reward} for e in chosen
    ]


def _required(reader: SampleReader | None) -> SampleReader:
    if reader is None:
        raise InvalidArgumentError("a sample strategy made without reader= can only plan: give one")
    return reader
