"""Trinity's ``sample_strategy.utils`` under its own name."""

from __future__ import annotations

from trinity_buffer.algorithm.sample_strategy.sample_strategy import (
    representative_samples as representative_sample,
)

__all__ = ["representative_sample"]
