"""What a terminal gives and shows: flags, code of your own, lines, a progress bar, and text that may be hostile."""
