"""What is done with a log afterwards: replayed, compacted, migrated."""
