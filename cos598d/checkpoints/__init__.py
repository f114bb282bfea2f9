"""Checkpoints: the whole training under plain names, which any sync on any number of ranks can continue."""
