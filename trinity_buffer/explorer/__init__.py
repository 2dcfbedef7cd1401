"""Explorers: tasks to practise on, rollouts of a policy, and the recipes that make it learn."""
