"""The log against everything that must agree with it, and against the world outside."""
