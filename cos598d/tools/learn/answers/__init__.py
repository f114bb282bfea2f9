"""Files that pass, one a lesson, for teachers and for the reference in a picture."""
