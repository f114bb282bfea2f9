"""The course: lessons that a student solves in a file, on real ranks, and a check that names the mistake."""
