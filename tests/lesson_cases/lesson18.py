"""Lesson 18 as students write it: changes of the answer that are wrong, with what the check must print, and right ones."""

from lesson_cases import all_right, all_wrong

KIND = '    kind = "starved loader" if name == LOADER else "blocking call" if name in blocking else "straggler"\n'
LATE = "        if sum(map(bool, late)) > len(late) / 2:\n"
OTHERS = "(own[name] - statistics.median(lengths[r][name] for r in lengths if r != rank), rank, name)"
SMALL = "    if len(calls_of(ranks[0].steps[-1])) > 20:\n"
THRESHOLD = "    if seconds < 0.02 * statistics.median(each.seconds for each in ranks):\n"
MEDIANS = "return {name: statistics.median(each) for"
MICRO = 'found[e["name"]].append(e["dur"] / 1e6)'
OUTER = 'OUTER = ("ProfilerStep", "forward", "backward", "wait for the calls")'
COSTS = '[(last["ts"] - end_of_backward(s)) / 1e6 for s in rank.steps for last in calls_of(s)[-1:]]'

WRONG = all_wrong(18, {
    "rank by place in the list": ([('self.rank = trace["distributedInfo"]["rank"]', "self.rank = -1"), ("ranks = [Steps(trace) for trace in traces]\n", "ranks = [Steps(trace) for trace in traces]\n    for place, each in enumerate(ranks):\n        each.rank = place\n")], "The list is in any order: the rank is in distributedInfo"),
    "microseconds": ([(MICRO, MICRO.replace(" / 1e6", "")), ("self.seconds = statistics.median(s[\"dur\"] for s in whole) / 1e6", "self.seconds = statistics.median(s[\"dur\"] for s in whole)")], "these are microseconds"),
    "whole length": ([("    return found(kind, rank, name, seconds)\n", "    return found(kind, rank, name, lengths[rank][name])\n")], "that is its whole length"),
    "sum of steps": ([("    return found(kind, rank, name, seconds)\n", "    return found(kind, rank, name, seconds * len(ranks[0].steps))\n")], "steps, expected what each costs"),
    "never none": ([(THRESHOLD, "    if seconds < 0:\n")], "expected 'none': no region is longer on one rank"),
    "always none": ([(THRESHOLD, "    if seconds < 10:\n")], "your fault is 'none', expected"),
    "late is not looked for": ([(LATE, "        if False:\n")], "only after backward"),
    "blocking is a straggler": ([(KIND, '    kind = "starved loader" if name == LOADER else "straggler"\n')], "expected 'blocking call': rank"),
    "loader is a straggler": ([(KIND, '    kind = "blocking call" if name in blocking else "straggler"\n')], "waits for its batch"),
    "small calls are not counted": ([(SMALL, "    if False:\n")], "each step makes a call for every tensor"),
    "small calls cost all of it": ([('(len(calls_of(s)) - 1) * min(e["dur"] for e in calls_of(s)) / 1e6', 'sum(e["dur"] for e in calls_of(s)) / 1e6')], "one call costs as much as the shortest call of the step"),
    "late costs all of it": ([(COSTS, COSTS.replace('last["ts"]', 'last["ts"] + last["dur"]'))], "take off the last call's own length"),
    "largest step": ([(MEDIANS, MEDIANS.replace("statistics.median", "max"))], "expected"),
    "forward counts": ([(OUTER, 'OUTER = ("ProfilerStep", "wait for the calls")')], "in 'forward', expected"),
    "last late bucket": ([("late[-1][0]", "late[-1][-1]")], "late bucket in '"),
    "mean of the others": ([(OTHERS, OTHERS.replace("statistics.median(", "statistics.mean("))], "excess over the mean of the other ranks"),
    "fastest of the others": ([(OTHERS, OTHERS.replace("statistics.median(", "min("))], "excess over the fastest of the other ranks"),
    "median with the rank itself": ([(OTHERS, OTHERS.replace(" if r != rank", ""))], "expected"),
    "a low threshold": ([(THRESHOLD, THRESHOLD.replace("0.02", "0.005"))], "expected 'none': no region is longer on one rank"),
    "mean over the steps": ([(MEDIANS, MEDIANS.replace("median", "mean"))], "take the median over the steps"),
    "median of the small calls": ([('(len(calls_of(s)) - 1) * min(e["dur"] for e in calls_of(s)) / 1e6', '(len(calls_of(s)) - 1) * statistics.median(e["dur"] for e in calls_of(s)) / 1e6')], "take neither the median nor the sum"),
    "no dictionary": ([('    return {"fault": fault, "rank": rank, "call": call, "seconds": seconds}\n', "    return fault, rank, call, seconds\n")], "expected a dictionary with fault, rank, call, seconds"),
    "the longest call": ("lesson18.py.txt", "A rank that waits is not slow: look for what it waits for"),
})  # fmt: skip

RIGHT = all_right(18, {
    "strictly inside": [("self.steps = [[e for e in events if s[\"ts\"] <= e[\"ts\"] < s[\"ts\"] + s[\"dur\"]] for s in whole]", "self.steps = [[e for e in events if e is s or (s[\"ts\"] < e[\"ts\"] and e[\"ts\"] + e[\"dur\"] < s[\"ts\"] + s[\"dur\"])] for s in whole]")],
    "inside, ends compared": [("any(e[\"ts\"] <= ts < e[\"ts\"] + e[\"dur\"] for ts in begins)", "any(e[\"ts\"] <= ts and ts + 25 <= e[\"ts\"] + e[\"dur\"] for ts in begins)")],
    "outer regions by what they contain": [(OUTER, 'OUTER = ("ProfilerStep", "wait for the calls")'), ("                if e[\"tid\"] == e[\"pid\"] and e[\"cat\"] == \"user_annotation\"", "                inner = [o for o in step if o is not e and o[\"cat\"] == \"user_annotation\" and o[\"tid\"] == o[\"pid\"] and e[\"ts\"] <= o[\"ts\"] and o[\"ts\"] + o[\"dur\"] <= e[\"ts\"] + e[\"dur\"]]\n                if not inner and e[\"tid\"] == e[\"pid\"] and e[\"cat\"] == \"user_annotation\"")],
    "without the first step": [("self.steps = [[e for e in events if s[\"ts\"] <= e[\"ts\"] < s[\"ts\"] + s[\"dur\"]] for s in whole]", "whole = whole[1:]\n        self.steps = [[e for e in events if s[\"ts\"] <= e[\"ts\"] < s[\"ts\"] + s[\"dur\"]] for s in whole]")],
    "numbers of numpy": [("    return {\"fault\": fault, \"rank\": rank, \"call\": call, \"seconds\": seconds}\n", "    import numpy as np\n\n    return {\"fault\": fault, \"rank\": None if rank is None else np.int64(rank), \"call\": call, \"seconds\": np.float64(seconds)}\n")],
    "stretches that compute nothing": [(KIND, '    kind = "starved loader" if "DataLoader" in name else "straggler" if name.split()[-1].isalpha() else "blocking call"\n')],
})  # fmt: skip
