"""Submissions graded by the tests that students run at home: one, or a class; and files for teachers' platforms."""
