"""GLUE: its files, its nine tasks, its official metrics, and the course's own names for them."""
