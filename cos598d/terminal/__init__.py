"""What is printed: a rank's lines and progress bar, streams that may be closed, and text that may be hostile."""
