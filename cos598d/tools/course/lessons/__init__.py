"""A folder for each lesson: its facts, the page to fill in, the answer, and the tests of a student's file."""
