"""The instruments built on the training library, which imports none of them."""
