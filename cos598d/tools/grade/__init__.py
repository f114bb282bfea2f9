"""Grading: an assignment from a file, one submission or a class of them, and the formats that teachers' tools read.

A verdict is never what a submission says of itself. A submission's code runs in processes that hand in numbers; a
process that runs none of that code judges them, and tells the grader through a socket that the others do not have.
"""
