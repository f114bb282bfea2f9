"""GLUE: its files, its nine tasks, its official metrics, and the original assignment's names for them."""
