"""The demo: tasks to practise on, a transformer small enough to learn them, and recipes."""
