"""Lesson 19 as students write it: changes of the answer that are wrong, with what the check must print, and right ones."""

from lesson_cases import all_right, all_wrong

RATE = 'rate * (times if rule == "linear" else times**0.5)'
WARM = "start + (peak - start) * step / steps if step < steps else peak"
SMALL = """    small = local.double().square().sum().reshape(1)
    comm.all_reduce(small, "squared norm")
    small = small.item() / comm.world_size
"""
RESULT = "    return (whole * large - batch * small) / (whole - batch), (small - large) / (1 / batch - 1 / whole)\n"
RATIO = """    signal, noise = (sum(each) for each in zip(*pairs))
    return noise / signal if signal > 0 else None
"""

WRONG = all_wrong(19, {
    "rules exchanged": ([('rule == "linear"', 'rule != "linear"')], "that is by the square root rule"),
    "upside down": ([("large / batch", "batch / large")], "that is upside down: the rate grows with the batch"),
    "never scaled": ([(RATE, "rate")], "that is the rate itself"),
    "large taken for a factor": ([("large / batch", "large")], "large is the batch, and not how many times larger"),
    "warm-up from 0": ([(WARM, "peak * step / steps if step < steps else peak")], "it begins with start, and not with 0"),
    "counted from 1": ([(WARM, "start + (peak - start) * (step + 1) / steps if step < steps else peak")], "count from 0: step 0 has start"),
    "peak too early": ([(WARM, "start + (peak - start) * step / (steps - 1) if step < steps - 1 else peak")], "peak comes in step `steps`, one later"),
    "never ends": ([(WARM, "start + (peak - start) * step / max(steps, 1)")], "it goes on after the warm-up: it stays at peak"),
    "multiplied": ([(WARM, "start * (peak / start) ** (step / steps) if step < steps else peak")], "add the same amount in every step"),
    "no warm-up of no steps": ([(WARM, "start + (peak - start) * min(step / steps, 1)")], "division by zero"),
    "own norm": ([(SMALL, "    small = local.double().square().sum().item()\n    comm.all_reduce(torch.zeros(1), 'nothing')\n"), ("\n\ndef scaled_rate", "\nimport torch\n\ndef scaled_rate")], "small is this rank's own |local|^2"),
    "summed": ([("small.item() / comm.world_size", "small.item()")], "small is the sum over the ranks"),
    "no squares": ([(".square().sum().reshape(1)", ".norm().reshape(1)"), ("mean.double().square().sum().item()", "mean.double().norm().item()")], "|G|^2: got"),
    "mean of elements": ([(".square().sum().reshape(1)", ".square().mean().reshape(1)"), ("mean.double().square().sum().item()", "mean.double().square().mean().item()")], "added up over the elements, and not averaged"),
    "square of the mean norm": ([("local.double().square().sum().reshape(1)", "local.double().norm().reshape(1)"), ("small.item() / comm.world_size", "(small.item() / comm.world_size) ** 2")], "do not square an average"),
    "a part of one batch": ([("whole = batch * comm.world_size", "whole, batch = batch, batch / comm.world_size")], "batch is that of one rank, and not that of all"),
    "cut off at 0": ([("(whole * large - batch * small) / (whole - batch), ", "max(0.0, (whole * large - batch * small) / (whole - batch)), ")], "do not cut it off at 0"),
    "rounded down": ([("large / batch", "large // batch")], "do not round it"),
    "exchanged": ([(RESULT, RESULT.replace("return (whole * large - batch * small) / (whole - batch), (small - large) / (1 / batch - 1 / whole)", "return (small - large) / (1 / batch - 1 / whole), (whole * large - batch * small) / (whole - batch)"))], "return |G|^2 first"),
    "the mean's norm": ([("(whole * large - batch * small) / (whole - batch), ", "large, ")], "that is |mean|^2, which the noise makes larger than |G|^2"),
    "one rank's batch": ([("whole = batch * comm.world_size", "whole = comm.world_size")], "|G|^2: got"),
    "the gradient is sent again": ([(SMALL, "    sent = local.clone()\n    comm.all_reduce(sent, 'gradient')\n" + SMALL)], "estimates makes 2 calls on rank 0 of 2, expected 1"),
    "the gradient is sent": ([(SMALL, "    squares = local.double().square()\n    comm.all_reduce(squares, 'squares')\n    small = squares.sum().item() / comm.world_size\n")], "send |local|^2, and not the gradient"),
    "changed in place": ([("    small = local.double()", "    local.mul_(1.5)\n    small = local.double()")], "estimates changes local or mean"),
    "only positive steps": ([(RATIO, "    pairs = [each for each in pairs if each[0] > 0]\n" + RATIO)], "steps with a negative |G|^2 count too"),
    "never None": ([("noise / signal if signal > 0 else None", "noise / signal")], "expected None"),
    "ratio upside down": ([("noise / signal if", "signal / noise if")], "that is upside down"),
    "mean of ratios": ("lesson19.py.txt", "that is the mean of the ratios"),
    "divided by n": ("lesson19-variance.py.txt", "the variance over n ranks is divided by n - 1, and not by n"),
})  # fmt: skip

# The variance of the ranks' gradients, whose mean is known: algebra makes the same of it.
BY_VARIANCE = """    apart = (local - mean).square().sum().reshape(1)
    comm.all_reduce(apart, "squared distance")
    noise = batch * apart / (comm.world_size - 1)
    return mean.square().sum() - noise / (batch * comm.world_size), noise[0]
"""
RIGHT = all_right(19, {
    "by the variance over ranks": [(SMALL + "    large = mean.double().square().sum().item()\n    whole = batch * comm.world_size\n" + RESULT, BY_VARIANCE)],
    "numpy": [(RATIO, "    import numpy\n    signal, noise = numpy.mean(pairs, axis=0)\n    return noise / signal if signal > 0 else None\n"), (WARM, "peak if step >= steps else (1 - step / steps) * start + step / steps * peak")],
})  # fmt: skip
