"""Reading what the log and the segments hold: for strategies, trainers and readers alike."""
