"""What owns the module, the optimizer and the gradient sync of one replica."""
