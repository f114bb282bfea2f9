"""Many runs by one command: `demo`, `strategies`, `traffic` and `sweep` plan them, one runner makes them.

`planned` is one of them before it is made. `grid` reads a sweep's axes and values, and `plan` makes its combinations;
`forecasts` predicts what runs will come to; `programs` is which program makes one. `runner` sees to what is missing,
`jobs` starts the programs, and `folder` keeps how each run has ended, so that a later call goes on.
"""
