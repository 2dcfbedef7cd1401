"""Read-only questions to a store: one layer for the command line, tools and pages. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trinity_buffer.names_on_use import names_on_use

if TYPE_CHECKING:
    from trinity_buffer.inspect.ageing import StalenessGrowth, Tenth, growth_by_actor
    from trinity_buffer.inspect.compare import (
        Differing,
        RunDifference,
        SetDifference,
        compare_runs,
        compare_sets,
    )
    from trinity_buffer.inspect.events import EventLine, event_lines, line_of, position_before
    from trinity_buffer.inspect.experience_view import ExperienceView, SetView, StepView, show
    from trinity_buffer.inspect.group_views import GroupView, RunView, groups
    from trinity_buffer.inspect.overviews import ExperimentOverview, Overview, overview
    from trinity_buffer.inspect.reasons import Reason, Why, why
    from trinity_buffer.inspect.rejected import (
        Lease,
        Rejected,
        leases,
        rejection_counts,
        rejections,
    )
    from trinity_buffer.inspect.searching import Match, search
    from trinity_buffer.inspect.source import Source, as_of, now
    from trinity_buffer.inspect.step_lines import (
        EatenRow,
        Staleness,
        StepContents,
        StepLine,
        blame,
        staleness,
        steps,
    )
    from trinity_buffer.inspect.tensors import TensorSummary
    from trinity_buffer.inspect.token_table import TokenTable, tokens

__all__ = [
    "Differing",
    "EatenRow",
    "EventLine",
    "ExperienceView",
    "ExperimentOverview",
    "GroupView",
    "Lease",
    "Match",
    "Overview",
    "Reason",
    "Rejected",
    "RunDifference",
    "RunView",
    "SetDifference",
    "SetView",
    "Source",
    "Staleness",
    "StalenessGrowth",
    "StepContents",
    "StepLine",
    "StepView",
    "TensorSummary",
    "Tenth",
    "TokenTable",
    "Why",
    "as_of",
    "blame",
    "compare_runs",
    "compare_sets",
    "event_lines",
    "groups",
    "growth_by_actor",
    "leases",
    "line_of",
    "now",
    "overview",
    "position_before",
    "rejection_counts",
    "rejections",
    "search",
    "show",
    "staleness",
    "steps",
    "tokens",
    "why",
]

_HOMES = {
    "StalenessGrowth": "trinity_buffer.inspect.ageing",
    "Tenth": "trinity_buffer.inspect.ageing",
    "growth_by_actor": "trinity_buffer.inspect.ageing",
    "Differing": "trinity_buffer.inspect.compare",
    "RunDifference": "trinity_buffer.inspect.compare",
    "SetDifference": "trinity_buffer.inspect.compare",
    "compare_runs": "trinity_buffer.inspect.compare",
    "compare_sets": "trinity_buffer.inspect.compare",
    "EventLine": "trinity_buffer.inspect.events",
    "event_lines": "trinity_buffer.inspect.events",
    "line_of": "trinity_buffer.inspect.events",
    "position_before": "trinity_buffer.inspect.events",
    "GroupView": "trinity_buffer.inspect.group_views",
    "RunView": "trinity_buffer.inspect.group_views",
    "groups": "trinity_buffer.inspect.group_views",
    "ExperimentOverview": "trinity_buffer.inspect.overviews",
    "Overview": "trinity_buffer.inspect.overviews",
    "overview": "trinity_buffer.inspect.overviews",
    "Lease": "trinity_buffer.inspect.rejected",
    "Rejected": "trinity_buffer.inspect.rejected",
    "leases": "trinity_buffer.inspect.rejected",
    "rejection_counts": "trinity_buffer.inspect.rejected",
    "rejections": "trinity_buffer.inspect.rejected",
    "Match": "trinity_buffer.inspect.searching",
    "search": "trinity_buffer.inspect.searching",
    "ExperienceView": "trinity_buffer.inspect.experience_view",
    "SetView": "trinity_buffer.inspect.experience_view",
    "StepView": "trinity_buffer.inspect.experience_view",
    "show": "trinity_buffer.inspect.experience_view",
    "Source": "trinity_buffer.inspect.source",
    "as_of": "trinity_buffer.inspect.source",
    "now": "trinity_buffer.inspect.source",
    "EatenRow": "trinity_buffer.inspect.step_lines",
    "Staleness": "trinity_buffer.inspect.step_lines",
    "StepContents": "trinity_buffer.inspect.step_lines",
    "StepLine": "trinity_buffer.inspect.step_lines",
    "blame": "trinity_buffer.inspect.step_lines",
    "staleness": "trinity_buffer.inspect.step_lines",
    "steps": "trinity_buffer.inspect.step_lines",
    "TensorSummary": "trinity_buffer.inspect.tensors",
    "TokenTable": "trinity_buffer.inspect.token_table",
    "tokens": "trinity_buffer.inspect.token_table",
    "Reason": "trinity_buffer.inspect.reasons",
    "Why": "trinity_buffer.inspect.reasons",
    "why": "trinity_buffer.inspect.reasons",
}

__getattr__, __dir__ = names_on_use(__name__, _HOMES)
