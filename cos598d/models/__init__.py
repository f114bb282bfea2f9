"""The model of a run: found by its name, built with a task's head, filled with weights, and saved."""
