"""ZeRO by hand: optimizer state, gradients and weights cut into one shard for each rank."""
