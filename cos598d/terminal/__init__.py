"""What a terminal gives and shows: flags, code of your own, a rank's lines and progress bar, text that may be hostile."""
