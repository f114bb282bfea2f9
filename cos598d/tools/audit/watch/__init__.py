"""What is seen of a script on one rank while it runs: its calls, gradients, batches and weights, and where they are."""
