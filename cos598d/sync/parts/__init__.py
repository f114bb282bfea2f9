"""Code that the built-in syncs share."""
