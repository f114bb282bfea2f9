"""Other people's engines as strategies, one file each; the registry of strategies has their names."""

from cos598d.imports import bring_back_compiler

bring_back_compiler()  # before an engine is imported: all of them know torch's
