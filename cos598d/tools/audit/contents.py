"""The names of calls and of their contents in books, and how many calls of a long run are noted one by one."""

GRADIENT, WEIGHT, BUFFER, SCALAR, OTHER, NOTHING = "gradient", "weight", "buffer", "scalar", "other", "nothing"
MOST_ROWS, MOST_ENTRIES, MOST_ITERATIONS = 2000, 4000, 20_000
ALL_REDUCE, BROADCAST, REDUCE, ALL_GATHER, REDUCE_SCATTER = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "reduce_scatter",
)
GATHER, SCATTER, ALL_TO_ALL, BARRIER, SEND, RECEIVE = "gather", "scatter", "all_to_all", "barrier", "send", "recv"
