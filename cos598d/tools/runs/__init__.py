"""Many runs by one command: `demo`, `strategies`, `traffic` and `sweep` plan them, one runner makes them.

`planned` is one of them before it is made. `grid` reads a sweep's axes and values, and `plan` makes its combinations.
`forecasts` predicts runs' costs; `programs` chooses the program that makes one. `runner` starts what is missing, `jobs`
runs the programs, and `folder` keeps how each run has ended, so that a later call continues.
"""
