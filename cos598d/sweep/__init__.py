"""Many runs by one command: programs of their own, made one after the other, and a folder that knows how each ended."""
