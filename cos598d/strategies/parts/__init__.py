"""The parts of sharded strategies: units, their gradients and weights, and how these are sent."""
