"""Many runs from one command: what is planned, what makes it, and the table of what came out."""
