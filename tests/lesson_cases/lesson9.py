"""Lesson 9 as students write it: changes of the answer that are wrong, with what the check must print, and right ones."""

from lesson_cases import all_right, all_wrong, part_of

RING = "    return 2 * (ranks - 1) * (8 * size / ranks / rate + delay)\n"
RING_SENT = "    return 2 * (ranks - 1) * size / ranks\n"
GATHERED = "        return 2 * ((ranks - 1) * 8 * size / rate + delay)\n"
QUEUE = part_of(9, "    ended = 0.0\n")

WRONG = all_wrong(9, {
    "bytes_for_bits": ([("8 * size / ranks / rate", "size / ranks / rate"), ("        return 2 * ((ranks - 1) * 8 * size", "        return 2 * ((ranks - 1) * size")], "a byte has eight bits"),
    "no_delay": ([(RING, RING.replace(" + delay", ""))], "the delay is left out"),
    "delay_once": ([(RING, "    return 2 * (ranks - 1) * 8 * size / ranks / rate + delay\n")], "each of the 2(n-1) steps takes the delay"),
    "whole_tensor_each_step": ([(RING, RING.replace("size / ranks / rate", "size / rate"))], "each step carries an n-th"),
    "half_the_ring": ([(RING_SENT, RING_SENT.replace("2 * ", ""))], "that is one way round"),
    "twice_the_size": ([(RING_SENT, "    return 2 * size\n")], "a rank passes on n-1 of the n parts, twice"),
    "rank_0_sends_one": ([("(ranks - 1) * size if rank == 0 else size", "size")], "to each of the n-1 others"),
    "no_scatter": ([(GATHERED, GATHERED.replace("2 * ", ""))], "that is only the gather"),
    "delays_one_by_one": ([(GATHERED, "        return 2 * (ranks - 1) * (8 * size / rate + delay)\n")], "take the delay once per phase"),
    "after_backward": ([(QUEUE, '    return backward + sum(seconds("ring", size, ranks, rate, delay) for _, size in buckets)\n')], "during backward, not after it"),
    "all_at_the_start": ([("max(ended, ready)", "ended")], "before its gradients are there"),
    "no_queue": ([("        ended = max(ended, ready) + ", "        ended = max(ended, ready + "), ("rate, delay)\n    return max(backward", "rate, delay))\n    return max(backward")], "until the one before it has arrived"),
    "ends_before_backward": ([("    return max(backward, ended)\n", "    return ended\n")], "a step does not end before backward does"),
    "step_without_delay": ([("seconds(\"ring\", size, ranks, rate, delay)", "seconds(\"ring\", size, ranks, rate, 0.0)")], "the delay is left out"),
    "backward_alone": ([("    return max(backward, ended)\n", "    return backward\n")], "buckets may arrive after backward has ended"),
    "in_words": ([(RING_SENT, '    return f"{2 * (ranks - 1) * size / ranks} bytes"\n')], " bytes', expected"),
})  # fmt: skip

STEP_BY_STEP = """    total, part = 0.0, size / ranks
    for step in range(2 * (ranks - 1)):
        total += part * 8 / rate
        total += delay
    return total
"""
# From the end: how late each bucket may begin.
BY_SUMS = """    each = [seconds("ring", size, ranks, rate, delay) for _, size in buckets]
    return max(backward, *(ready + sum(each[place:]) for place, (ready, _) in enumerate(buckets)))
"""
RIGHT = all_right(9, {
    "step_by_step": [(RING, STEP_BY_STEP)],
    "by_sums": [(QUEUE, BY_SUMS)],
    "whole_numbers": [(RING_SENT, "    return 2 * (ranks - 1) * (size // ranks)\n")],
})  # fmt: skip
