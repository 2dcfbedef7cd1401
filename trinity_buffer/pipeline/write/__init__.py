"""From a call of `write` to one commit: planned, checked, encoded, with the calls beside it."""
