"""How the syncs scale: a table of predictions with measurements in brackets, and what they were fitted to."""

import statistics
from collections import defaultdict

from cos598d.cost.predict import Fitted, Link
from cos598d.records.conventions import FLOOR
from cos598d.terminal.tables import as_text
from cos598d.terminal.words import number_of

LEGEND = (
    "speed-up: examples per second of n hosts over those of one, n t(1) / t(n); every host has its own batch\n"
    "(weak scaling). Numbers in [brackets] were measured; the others are predicted. Every host is assumed to compute\n"
    "as fast as one that was measured."
)


def scale_table(fitted: Fitted, largest: int, link: Link, batch: int) -> str:
    """Which sync is the fastest on most hosts; seconds and speed-up of each on 1, 2, 4 ... hosts, and on those that
    were measured; and the fit."""
    measured = defaultdict(list)
    for bench in fitted.benches:
        for rung in bench.rungs:
            if (bench.link, bench.batch) == (link, batch):
                measured[rung.label, bench.ranks].append(rung.seconds)
    powers = [1 << power for power in range(largest.bit_length())]
    counts = sorted({*powers, largest, *(bench.ranks for bench in fitted.benches if bench.ranks <= largest)})
    labels = dict.fromkeys(rung.label for bench in fitted.benches for rung in bench.rungs)
    seconds, speed_up = [["sync", *map(str, counts)]], [["sync", *map(str, counts)]]
    fastest = []
    for label in labels:
        took = [fitted.predict(label, hosts, link, batch) for hosts in counts]
        found = [statistics.median(measured[label, hosts] or [0.0]) for hosts in counts]
        pairs = list(zip(counts, took, found, strict=True))
        seconds.append([label, *(f"{t:.3f}" + (f" [{m:.3f}]" if m else "") for _, t, m in pairs)])
        gain = [(n * took[0] / t, n * took[0] / m if m else 0.0) for n, t, m in pairs]
        speed_up.append([label, *(f"{p:.2f}" + (f" [{m:.2f}]" if m else "") for p, m in gain)])
        if label != FLOOR:
            fastest.append((took[-1], label, gain[-1][0]))
    _, best, gained = min(fastest)
    head = (
        f"{best} is the fastest on {number_of(counts[-1], 'host')} with links of {link.words}, batch {batch} on each: "
        f"{gained:.2f} times the examples per second of one host."
    )
    tables = [f"seconds per iteration, by the number of hosts\n{as_text(seconds, numbers=True)}"]
    tables.append(f"speed-up, by the number of hosts\n{as_text(speed_up, numbers=True)}")
    return "\n\n".join([head, *tables, LEGEND, _fit_words(fitted)])


def _fit_words(fitted: Fitted) -> str:
    """The fitted costs, their source, and what was left out."""
    costs = fitted.costs
    lines = ["fitted to:"] + [f"  {bench.name}: {bench.words}" for bench in fitted.benches]
    lines.append(
        f"a step takes {costs.step * 1e3:.3g} ms and a byte {costs.byte * 1e9:.3g} ns, besides the link's time"
    )
    left_out = {label: reason for bench in fitted.benches for label, reason in bench.left_out.items()}
    return "\n".join([*lines, *(f"left out: {label}, since {reason}" for label, reason in left_out.items())])
