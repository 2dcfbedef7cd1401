"""Read-only questions to a store: one layer for the command line, tools and pages. No torch."""

from trinity_buffer.inspect.compare import (
    Differing,
    RunDifference,
    SetDifference,
    compare_runs,
    compare_sets,
)
from trinity_buffer.inspect.events import EventLine, event_lines, line_of, position_before
from trinity_buffer.inspect.groups import GroupView, RunView, groups
from trinity_buffer.inspect.overview import ExperimentOverview, Overview, overview
from trinity_buffer.inspect.rejected import (
    Lease,
    Rejected,
    leases,
    rejection_counts,
    rejections,
)
from trinity_buffer.inspect.search import Match, search
from trinity_buffer.inspect.show import ExperienceView, SetView, StepView, show
from trinity_buffer.inspect.source import Source, as_of, now
from trinity_buffer.inspect.steps import (
    EatenRow,
    Staleness,
    StepContents,
    StepLine,
    blame,
    staleness,
    steps,
)
from trinity_buffer.inspect.tensors import TensorSummary
from trinity_buffer.inspect.tokens import TokenTable, tokens
from trinity_buffer.inspect.why import Reason, Why, why

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
    "StepContents",
    "StepLine",
    "StepView",
    "TensorSummary",
    "TokenTable",
    "Why",
    "as_of",
    "blame",
    "compare_runs",
    "compare_sets",
    "event_lines",
    "groups",
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
