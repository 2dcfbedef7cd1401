"""SQL and bytes: the log, its segments, its projections and its leases. Knows neither tensors nor their encoding."""
