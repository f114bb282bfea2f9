"""Training on many ranks, built beside the old one."""
