"""What a step and a checkpoint say of themselves, so that others can check it."""
