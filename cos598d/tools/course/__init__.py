"""The course: twenty lessons, each a page with blanks, an answer, and tests that say what is wrong in a file."""
