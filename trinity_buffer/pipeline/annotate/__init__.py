"""From the log to decisions: units, strategies as consumers, new rewards."""
