"""The instruments built on the training library: it imports none of them."""
