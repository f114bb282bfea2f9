"""A gradient sync of your own on real ranks: whether it keeps every claim, what is wrong if not, cost and speed."""
