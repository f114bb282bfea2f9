"""The ranks of a run before anything travels: who they are, where they meet, and who is still alive."""
