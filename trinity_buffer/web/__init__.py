"""Pages about a store: made on the server, without scripts; whatever a rollout says stays text."""
