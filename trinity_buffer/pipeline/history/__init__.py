"""What is done with a log afterwards: rebuilt, replayed, compacted, migrated."""
