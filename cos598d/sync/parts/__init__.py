"""What the built-in syncs share."""
