"""What sharded strategies are made of: units, their gradients and weights, and how these travel."""
