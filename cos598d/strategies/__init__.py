"""Strategies: what owns the module, the optimizer and the communication of one replica."""
