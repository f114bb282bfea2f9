"""Lessons' files as students write them: two right ones that look unlike the answer, and wrong ones, by lesson.

RIGHT has a name and the code. WRONG has a name, the code, and what the first line that is printed must say. `#!` stands
at the end of the line that it must name.
"""
