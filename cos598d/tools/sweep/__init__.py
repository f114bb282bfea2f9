"""Many runs by one command: a grid of settings, each combination a run of its own, and what is known of each.

`grid` reads the axes and their values, `plan` makes the combinations, `forecasts` tells what they will come to, and
`programs` which program runs one; `runner` starts them, `making` sees to what is missing, and `state` keeps in the
sweep's folder how each has ended. `folder` and `child` are for every command that makes runs one after the other: the
table of strategies has its own state on them.
"""
