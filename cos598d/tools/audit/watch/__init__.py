"""Observe a script on one rank while it runs: its calls, gradients, batches and weights, with their lines."""
