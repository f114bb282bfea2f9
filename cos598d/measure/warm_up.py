"""How many iterations at a run's start are not counted as its own: the one constant of runs, benches and pages."""

# The first touches memory and fills caches; torch's DDP lays its buckets anew in its second forward, by the order in
# which the first backward's gradients came.
WARM_UP = 2
