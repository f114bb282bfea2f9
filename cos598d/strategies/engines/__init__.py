"""Other people's engines as strategies, one file each; the registry of strategies has their names."""
