"""Any data-parallel script, unchanged, under observation: which silent fault it has.

`rank` runs the script on one rank, `watch` observes it there and leaves a book of numbers, `exchange` brings the books
of all ranks together, and `judge` finds the faults in them. A rank's book never holds a verdict, and the judge never
runs the script: `cos598d audit FOLDER` judges again.
"""
