"""Flags, code of your own, a rank's lines and progress bar, and text that may be hostile."""
