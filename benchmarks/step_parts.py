"""What does a step's time go to? Shares of a trace by kind of operation, without the operations that others call.

    cos598d bench --world_size 4 --step --sync shared_weights --trace traces --output runs/parts
    python benchmarks/step_parts.py traces/ddp.rank0.json traces/shared_weights.rank0.json

A bench's "of the peak" is the share of what the processor can multiply. This says what the rest is: products that are
slower than the peak, other operations, and the time in which no operation runs: Python, waits for ranks and links.
"""

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# The first that fits an operation's name counts.
KINDS = {
    "attention": r"scaled_dot_product|flash_attention|softmax(?!.*nll)",
    "products of matrices": r"mm$|_linear_pointwise|convolution|aten::dot",
    "GELU": r"gelu",
    "layer norms": r"layer_norm",
    "AdamW and clipping": r"adam|_foreach|linalg_vector_norm|clamp",
    "embeddings": r"embedding",
    "sums of gradients": r"aten::(add_?|sum|mul_?)$",
    "copies": r"aten::(copy_|cat|index_select|index_copy|clone|zero_|fill_|contiguous)",
    "calls": r"gloo|c10d|nccl",
    "other operations": r"",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="+", help="files of bench --trace")
    traces = parser.parse_args().traces
    found = [shares(json.loads(path.read_text())["traceEvents"]) for path in traces]
    print("| part of the step", *(f"| {path.name.removesuffix('.json')}" for path in traces), "|")
    print("|---" * (len(traces) + 1) + "|")
    for kind in [*KINDS, "no operation"]:
        print(f"| {kind}", *(f"| {share[kind]:.1%}" for share in found), "|")
    return 0


def shares(events: Sequence[dict[str, Any]]) -> Counter[str]:
    """The share of each kind in the time between the first operation's start and the last one's end, on the thread
    whose operations take longest: an operation's own time, without that of those within it."""
    by_thread: dict[Any, list[tuple[float, float, str]]] = {}
    for event in events:
        if event.get("cat") == "cpu_op" and event.get("ph") == "X":
            span = event["ts"], event["ts"] + event["dur"], event["name"]
            by_thread.setdefault(event["tid"], []).append(span)
    spans = max(by_thread.values(), key=lambda those: sum(end - start for start, end, _ in those))
    spans.sort(key=lambda span: (span[0], -span[1]))
    own: Counter[str] = Counter()
    open_spans: list[tuple[float, str]] = []  # the end and kind of those that the present one lies in
    for start, end, name in spans:
        while open_spans and open_spans[-1][0] <= start:
            open_spans.pop()
        kind = next(kind for kind, words in KINDS.items() if re.search(words, name))
        own[kind] += end - start
        if open_spans:
            own[open_spans[-1][1]] -= end - start
        open_spans.append((end, kind))
    whole = max(end for _, end, _ in spans) - spans[0][0]
    own["no operation"] = whole - sum(own.values())
    return Counter({kind: time / whole for kind, time in own.items()})


if __name__ == "__main__":
    sys.exit(main())
