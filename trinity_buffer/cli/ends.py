"""The two ends of a run: what makes its rollouts, and the policy that is trained."""

from __future__ import annotations

from trinity_buffer.cli.demo_ends import DemoEnds
from trinity_buffer.cli.own_ends import OwnEnds
from trinity_buffer.cli.run_config import RunConfig

Ends = DemoEnds | OwnEnds
"""What a run explores with and trains, from its configuration alone."""


def ends_of(config: RunConfig) -> Ends:
    """Return the ends of a run: one's own where the configuration names the folder of a model."""
    return OwnEnds(config) if isinstance(config.model, str) else DemoEnds(config)
