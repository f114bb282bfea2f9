"""Other libraries' engines as strategies, one file each. Their names are in the registry of strategies."""
