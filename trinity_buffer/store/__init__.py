"""SQL and bytes: the log, segments, projections and leases. Knows neither tensors nor codecs."""
