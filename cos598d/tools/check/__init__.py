"""A gradient sync of your own on real ranks: whether it passes every test, what is wrong if not, cost and speed."""
