"""Read-only questions to a store: one layer for the command line, tools and pages. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trinity_buffer.lazy import homes_in, lazy_exports

if TYPE_CHECKING:
    from trinity_buffer.inspector.compare import Differing as Differing
    from trinity_buffer.inspector.compare import RunDifference as RunDifference
    from trinity_buffer.inspector.compare import SetDifference as SetDifference
    from trinity_buffer.inspector.compare import compare_runs as compare_runs
    from trinity_buffer.inspector.compare import compare_sets as compare_sets
    from trinity_buffer.inspector.events import EventLine as EventLine
    from trinity_buffer.inspector.events import event_lines as event_lines
    from trinity_buffer.inspector.events import line_of as line_of
    from trinity_buffer.inspector.events import position_before as position_before
    from trinity_buffer.inspector.experience import ExperienceView as ExperienceView
    from trinity_buffer.inspector.experience import Match as Match
    from trinity_buffer.inspector.experience import SetView as SetView
    from trinity_buffer.inspector.experience import TensorSummary as TensorSummary
    from trinity_buffer.inspector.experience import search as search
    from trinity_buffer.inspector.experience import show as show
    from trinity_buffer.inspector.fates import Reason as Reason
    from trinity_buffer.inspector.fates import StepView as StepView
    from trinity_buffer.inspector.fates import Why as Why
    from trinity_buffer.inspector.fates import why as why
    from trinity_buffer.inspector.group_views import GroupView as GroupView
    from trinity_buffer.inspector.group_views import RunView as RunView
    from trinity_buffer.inspector.group_views import groups as groups
    from trinity_buffer.inspector.overviews import ExperimentOverview as ExperimentOverview
    from trinity_buffer.inspector.overviews import Lease as Lease
    from trinity_buffer.inspector.overviews import Overview as Overview
    from trinity_buffer.inspector.overviews import Rejected as Rejected
    from trinity_buffer.inspector.overviews import leases as leases
    from trinity_buffer.inspector.overviews import overview as overview
    from trinity_buffer.inspector.overviews import rejection_counts as rejection_counts
    from trinity_buffer.inspector.overviews import rejections as rejections
    from trinity_buffer.inspector.source import Source as Source
    from trinity_buffer.inspector.source import as_of as as_of
    from trinity_buffer.inspector.source import now as now
    from trinity_buffer.inspector.step_lines import Staleness as Staleness
    from trinity_buffer.inspector.step_lines import StalenessGrowth as StalenessGrowth
    from trinity_buffer.inspector.step_lines import StepContents as StepContents
    from trinity_buffer.inspector.step_lines import StepLine as StepLine
    from trinity_buffer.inspector.step_lines import Tenth as Tenth
    from trinity_buffer.inspector.step_lines import TrainedRow as TrainedRow
    from trinity_buffer.inspector.step_lines import blame as blame
    from trinity_buffer.inspector.step_lines import growth_by_actor as growth_by_actor
    from trinity_buffer.inspector.step_lines import staleness as staleness
    from trinity_buffer.inspector.step_lines import steps as steps
    from trinity_buffer.inspector.token_table import TokenTable as TokenTable
    from trinity_buffer.inspector.token_table import tokens as tokens

_HOMES = homes_in(__file__)
__all__ = [*_HOMES]

__getattr__, __dir__ = lazy_exports(__name__, _HOMES)
