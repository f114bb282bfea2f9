"""Lesson 14 as students write it: changes of the answer that are wrong, with what the check must print, and right ones."""

from lesson_cases import all_right, all_wrong

FLOPS = """    products = 4 * 2 * tokens * width * width + 2 * 2 * tokens * width * inner + 2 * 2 * tokens * tokens * width
    return 3 * layers * products
"""
ROOF = "    return max(operations / peak, moved / bandwidth)\n"
SHARES = "    return [operations / seconds / peak for operations, seconds in [*phases, whole]]\n"
STEP = "    return operations / rate + 2 * (ranks - 1) * (size / ranks / bandwidth + latency)\n"
LEAST = "    return ring * rate / 4\n"
RING = "    ring = 2 * (ranks - 1) / ranks * number_bytes / bandwidth  # seconds per parameter\n"

WRONG = all_wrong(14, {
    "one operation per product": ([(FLOPS, FLOPS.replace("3 * layers", "1.5 * layers"))], "a multiplication and an addition are two"),
    "forward only": ([("3 * layers", "layers")], "that is forward only"),
    "backward as long as forward": ([("3 * layers", "2 * layers")], "that is two thirds"),
    "six per parameter and token": ([(" + 2 * 2 * tokens * tokens * width", "")], "each token with each token is left out"),
    "half of attention": ([("2 * 2 * tokens * tokens * width", "2 * tokens * tokens * width")], "each token with each token comes twice"),
    "one product in the MLP": ([("2 * 2 * tokens * width * inner", "2 * tokens * width * inner")], "the MLP has two products"),
    "three products": ([("4 * 2 * tokens * width * width", "3 * 2 * tokens * width * width")], "four products have a (width, width)"),
    "both limits added": ([(ROOF, "    return operations / peak + moved / bandwidth\n")], "not the sum"),
    "the faster one": ([("max(operations", "min(operations")], "not the shorter"),
    "a roofline in operations per second": ([(ROOF, "    return min(peak, operations / moved * bandwidth)\n")], "expected seconds"),
    "mean of shares": (
        [(SHARES, "    found = [o / s / peak for o, s in phases]\n    return [*found, sum(found) / len(found)]\n")],
        "the last is the mean of the shares",
    ),
    "one number": ([(SHARES, "    return whole[0] / whole[1] / peak\n")], "shares(phases=[["),
    "nothing": ([(ROOF, "    return 0\n")], "is 0, expected"),
    "None": ([(ROOF, "    max(operations / peak, moved / bandwidth)\n")], "is None, expected"),
    "no whole": ([("[*phases, whole]", "phases")], "the last, of all phases together, is missing"),
    "percent": ([("[operations / seconds / peak for", "[100 * operations / seconds / peak for")], "that is in percent"),
    "latency once": ([(STEP, "    return operations / rate + 2 * (ranks - 1) * size / ranks / bandwidth + latency\n")], "each of the 2(n-1) messages takes the latency"),
    "eight bits": ([("size / ranks / bandwidth", "8 * size / ranks / bandwidth")], "in bytes per second here, not in bits"),
    "whole tensor each message": ([("size / ranks / bandwidth", "size / bandwidth")], "each message carries an n-th"),
    "overlapped": ([(STEP, STEP.replace("operations / rate + ", "max(operations / rate, ").replace("latency)\n", "latency))\n"))], "the ring begins when backward has ended"),
    "compute shared out": ([("operations / rate +", "operations / ranks / rate +")], "do not divide them by the ranks"),
    "six operations": ([(LEAST, "    return ring * rate / 6\n")], "4 operations per parameter and token, not 6"),
    "C over W": ([(RING, "    ring = number_bytes / bandwidth\n")], "a ring carries 2(n-1)/n of the bytes, not all once"),
    "one way round": ([(RING, RING.replace("2 * ", ""))], "that is one way round"),
    "upside down": ([(LEAST, "    return 4 / ring / rate\n")], "that is upside down"),
    "at the peak": ([("least_tokens(peak * share,", "least_tokens(peak,")], "at their share of the peak, not at the peak"),
    "fp32 gradients": ([("bandwidth, gpus, 2)", "bandwidth, gpus, 4)")], "a gradient in bf16 has 2 bytes"),
    "GPUs rounded down": ([("math.ceil(state / memory)", "int(state // memory)")], "the last one need not be full"),
    "hours": ([("/ 86400,", "/ 3600,")], "that is in hours"),
    "weights and gradients": ([("16 * parameters", "4 * parameters")], "that is weights and gradients only"),
    "link reversed": ([("batch / gpus < least", "batch / gpus > least")], "tokens, and the ring is hidden from"),
    "a key is missing": ([('        "tokens_each": batch / gpus,\n', "")], "large_model has no 'tokens_each'"),
    "bits": ("lesson14.py.txt", "in bytes per second here, not in bits"),
    "six per parameter": ("lesson14-attention.py.txt", "each token with each token is left out"),
})  # fmt: skip

BY_PARTS = """    forward = 0
    for _ in range(layers):
        for rows, shared, columns in [(tokens, width, width)] * 4 + [(tokens, width, inner)] * 2 + [(tokens, width, tokens)] * 2:
            forward += 2 * rows * shared * columns
    return forward + 2 * forward
"""
MESSAGES = """    seconds = operations / rate
    for _ in range(2 * (ranks - 1)):
        seconds += size / (ranks * bandwidth)
        seconds += latency
    return seconds
"""
NUMPY = """    import numpy as np

    of = np.array(phases, dtype=float)
    return np.append(of[:, 0] / of[:, 1], of[:, 0].sum() / of[:, 1].sum()) / peak
"""
RIGHT = all_right(14, {
    "product by product": [(FLOPS, BY_PARTS)],
    "message by message": [(STEP, MESSAGES)],
    "by intensity": [(ROOF, "    return operations / min(peak, bandwidth * (operations / moved))\n")],
    "with numpy": [(SHARES, NUMPY)],
    "least tokens by a search": [(LEAST, "    low, high = 0.0, 1e30\n    for _ in range(200):\n        middle = (low + high) / 2\n        low, high = (middle, high) if 4 * middle / rate < ring else (low, middle)\n    return high\n")],
})  # fmt: skip
