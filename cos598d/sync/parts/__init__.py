"""What the rungs share."""
