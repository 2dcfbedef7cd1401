"""The GPU side: a plain loop over the train stream, its checkpoints and its optimizer."""
