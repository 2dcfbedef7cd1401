"""Explorers: they plan, have rollouts made, write, seal, and note what was acknowledged."""
