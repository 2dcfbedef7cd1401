"""Which process may do what, and who waits for whom."""
