"""Read-only questions to a store: one layer for the command line, tools and pages. No torch."""

from trinity_buffer.inspect.events import EventLine, event_lines, line_of, position_before
from trinity_buffer.inspect.groups import GroupView, RunView, groups, ordered
from trinity_buffer.inspect.overview import ExperimentOverview, Overview, overview
from trinity_buffer.inspect.show import ExperienceView, SetView, StepView, show
from trinity_buffer.inspect.tensors import TensorSummary

__all__ = [
    "EventLine",
    "ExperienceView",
    "ExperimentOverview",
    "GroupView",
    "Overview",
    "RunView",
    "SetView",
    "StepView",
    "TensorSummary",
    "event_lines",
    "groups",
    "line_of",
    "ordered",
    "overview",
    "position_before",
    "show",
]
