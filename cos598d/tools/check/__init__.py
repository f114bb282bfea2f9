"""Does a gradient sync, or any way to train, do what one process does? Plain tests that run on real ranks."""
