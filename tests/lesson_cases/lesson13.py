"""Lesson 13 as students write it: changes of the answer that are wrong, with what the check must print, and right ones."""

from lesson_cases import all_right, all_wrong

TAIL = "    while k < n // 2 and 2 * (fewer + math.comb(n, k) / 2**n) <= 0.05:\n"
RATIO = """    ratios = [a / b for a, b in zip(seconds[one], seconds[other])]
    return statistics.median(ratios), interval(ratios)
"""
FLOOR = '    if "none" not in seconds:\n        return None\n    differences = [a - b for a, b in zip(seconds[one], seconds["none"])]\n'

WRONG = all_wrong(13, {
    "least and greatest": ([("[sorted(values)[k - 1], sorted(values)[n - k]]", "[min(values), max(values)]")], "the least and the greatest"),
    "one side alone": ([(TAIL, TAIL.replace("2 * (", "("))], "there is none below 6 values"),
    "one too far": ([("[sorted(values)[k - 1], sorted(values)[n - k]]", "[sorted(values)[k], sorted(values)[n - k - 1]]")], "from either end, expected"),
    "an interval of five": ([(TAIL, "    k = max(1, n // 2 - 2)\n    while False:\n")], "there is none below 6 values"),
    "standard deviations": (
        [("[sorted(values)[k - 1], sorted(values)[n - k]]", "[statistics.median(values) - 2 * statistics.stdev(values), statistics.median(values) + 2 * statistics.stdev(values)]")],
        "from either end, in order",
    ),
    "ratio of medians": ([(RATIO, RATIO.replace("statistics.median(ratios)", "statistics.median(seconds[one]) / statistics.median(seconds[other])"))], "that is the ratio of the medians"),
    "upside down": ([("a / b for", "b / a for")], "expected one / other"),
    "mean": ([("statistics.median(ratios)", "statistics.mean(ratios)")], "that is the mean of the ratios"),
    "above ddp": ([('zip(seconds[one], seconds["none"])', 'zip(seconds[one], seconds["ddp"])')], "expected above the floor's"),
    "a floor that is not there": ([(FLOOR, FLOOR.replace("return None", "return 0.0, None"))], "without a floor"),
    "difference of medians": (
        [("statistics.median(differences)", 'statistics.median(seconds[one]) - statistics.median(seconds["none"])')],
        "that is the difference of the medians",
    ),
    "one lies in it": ([('2: "within the spread"', '2: "holds"')], "claim 2 (one_host: bucketed takes less time than ddp): your verdict is 'holds', but the interval is"),
    "three rounds": ([('4: "too few rounds"', '4: "holds"')], "slow_link has 3 rounds"),
    "no floor taken for zero": ([('5: "no floor"', '5: "holds"')], "two_alone has only"),
    "bf16 beside fp32": ([('7: "not the same work"', '7: "holds"')], "precision is fp32 and bf16"),
    "busy taken for slow": ([('8: "busy machine"', '8: "holds"')], "the floor, which sends nothing, took"),
    "a word of one's own": ([('1: "holds"', '1: "yes"')], "'yes' is no verdict"),
    "a verdict forgotten": ([('        6: "holds",\n', "")], "claim 6"),
})  # fmt: skip

BY_SUM = """    n = len(values)
    possible = [k for k in range(1, n) if 2 * sum(math.comb(n, j) for j in range(k)) <= 0.05 * 2**n]
    if not possible:
        return None
    ordered = sorted(values)
    return ordered[possible[-1] - 1], ordered[-possible[-1]]
"""
LOOP = (
    TAIL
    + """        fewer += math.comb(n, k) / 2**n  # the probability of k heads or fewer
        k += 1
    return [sorted(values)[k - 1], sorted(values)[n - k]] if k else None
"""
)
RIGHT = all_right(13, {
    "by a sum": [("    n, k, fewer = len(values), 0, 0.0\n" + LOOP, BY_SUM)],
    "by index": [(RATIO, "    ratios = sorted(seconds[one][i] / seconds[other][i] for i in range(len(seconds[one])))\n    return [statistics.median(ratios), interval(ratios)]\n")],
})  # fmt: skip
