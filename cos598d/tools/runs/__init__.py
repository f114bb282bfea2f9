"""Many runs by one command: `demo`, `strategies`, `traffic` and `sweep` plan them, one runner makes them.

`plan` has a run before it is made, and a sweep's axes and combinations; `experiments` has ready-made ones. `programs`
chooses the program that makes a run. `runner` starts what is missing, `jobs` runs the programs, and `folder` keeps how
each run has ended, so that a later call continues; `folders` are those of a sweep and of a table of strategies.
`results` prints what runs will cost and what they came to.
"""
