"""The live projections beside what the log says: folded again, or computed in memory."""
