"""Lesson 10 as students write it: changes of the answer that are wrong, with what the check must print, and right ones."""

from lesson_cases import all_right, all_wrong, part_of

MASK = '    comm.all_reduce(touched, "rows touched", op=torch.distributed.ReduceOp.MAX)\n'
SEND = """    values = gradient[rows]
    comm.all_reduce(values, "rows")
    gradient[rows] = values / comm.world_size
"""
KEEP = """        self.held_back[name] = gradient.clone()
        self.held_back[name][places] = 0
"""
EXCHANGE = part_of(10, "        by_rank_values")

WRONG = all_wrong(10, {
    "rows_summed": ([("values / comm.world_size", "values")], "the gradient is the sum over 3 ranks"),
    "rows_that_all_looked_up": ([("ReduceOp.MAX", "ReduceOp.MIN")], "any rank has looked up"),
    "own_rows_alone": ([(MASK, "")], "rank 0 is in comm.all_reduce of rows"),
    "all_rows": ([(SEND, '    comm.all_reduce(gradient, "rows")\n    gradient /= comm.world_size\n')], "all rows are sent"),
    "eight_bytes_a_row": ([("dtype=torch.uint8", "dtype=torch.int64")], "takes 8 bytes, and one is enough"),
    "rows_not_put_back": ([("    gradient[rows] = values / comm.world_size\n", "    values /= comm.world_size\n")], "still its own"),
    "own_rows_put_back": (
        [("    gradient[rows] = values / comm.world_size\n", "    mine = torch.isin(rows, ids)\n    gradient[rows[mine]] = values[mine] / comm.world_size\n")],
        "is zero on rank",
    ),
    "no_feedback": ([("            gradient += self.held_back[name]\n", "            pass\n")], "is never sent"),
    "sent_and_held_back": ([("        self.held_back[name][places] = 0\n", "")], "is sent again"),
    "one_for_all_names": (
        [("if name in self.held_back", "if self.held_back"), ("self.held_back[name]\n", 'self.held_back["all"]\n'), (KEEP, KEEP.replace("[name]", '["all"]'))],
        "all names share",
    ),
    "largest_with_sign": ([("gradient.abs().topk", "gradient.topk")], "with their sign"),
    "elements_summed": ([("        gradient /= self.comm.world_size\n", "")], "sum over the ranks"),
    "places_of_eight_bytes": ([("places.int()", "places")], "a place as int64 takes 8"),
    "zeros_travel": (
        [(EXCHANGE, "        gradient -= self.held_back[name]\n        self.comm.all_reduce(gradient, name)\n        gradient /= self.comm.world_size\n")],
        "all elements are sent, zeros too",
    ),
    "a_little_off": ([("gradient[rows] = values / comm.world_size", "gradient[rows] = values / comm.world_size * (1 + 2e-5)")], "in its first element on rank"),
    "assigned_not_added": ([("gradient[places.long()] += values", "gradient[places.long()] = values")], "only one of them is left: add what comes in"),
    "not_zeroed_first": ([("        gradient.zero_()\n", "")], "is added to the rank's own gradient: set that to zero first"),
    "divided_by_senders": (
        [("        gradient /= self.comm.world_size\n", "        count = torch.zeros_like(gradient)\n        for places in by_rank_places:\n            count[places.long()] += 1\n        gradient /= count.clamp(min=1)\n")],
        "divided by the number of ranks that sent it",
    ),
    "values_at_own_places": (
        [(EXCHANGE, "        self.comm.all_reduce(values, name)\n        gradient.zero_()\n        gradient[places] = values / self.comm.world_size\n")],
        "each rank's values belong at its own places",
    ),
    "held_without_a_copy": ([("self.held_back[name] = gradient.clone()", "self.held_back[name] = gradient")], "was overwritten by the average: keep a copy"),
    "rounded": ([("max(1, int(self.share * len(gradient)))", "max(1, round(self.share * len(gradient)))")], "k is rounded"),
    "rounded_up": ([("max(1, int(self.share * len(gradient)))", "-int(-self.share * len(gradient) // 1)")], "k is rounded"),
    "nothing_of_small_ones": ([("max(1, int(self.share * len(gradient)))", "int(self.share * len(gradient))")], "nothing of a small tensor is sent"),
    "places_of_two_bytes": ([("places.int()", "places.short().view(torch.float16)"), ("places.long()", "places.view(torch.int16).long()")], "does not fit into 16 bits"),
    "less_the_average": ([(KEEP, "        whole = gradient.clone()\n"), (EXCHANGE, EXCHANGE + "        self.held_back[name] = whole - gradient\n")], "what arrived was subtracted"),
})  # fmt: skip

# Rows agreed on by gathered ids, of which ranks have different numbers; values and places in one call.
GATHERED_IDS = """    mine = ids.unique().int()
    count = torch.tensor([len(mine)], dtype=torch.int32)
    comm.all_reduce(count, "how many", op=torch.distributed.ReduceOp.MAX)
    padded = torch.full((int(count),), -1, dtype=torch.int32)
    padded[: len(mine)] = mine
    parts, _ = comm.all_gather(padded, "ids")
    rows = torch.cat(parts).unique()
    rows = rows[rows >= 0].long()
"""
MARKED = part_of(10, "    touched", "    values")
PACKED = """        packed = torch.cat([values, places.int().view(torch.float32)])
        parts, call = self.comm.all_gather(packed, name, async_op=True)
        call.wait()
        gradient.zero_()
        for part in parts:
            values, places = part.chunk(2)
            gradient.index_add_(0, places.view(torch.int32).long(), values / self.comm.world_size)
"""
RIGHT = all_right(10, {
    "ids_gathered": [(MARKED, GATHERED_IDS)],
    "one_call": [(EXCHANGE, PACKED)],
    "threshold": [("places = gradient.abs().topk(count).indices", "places = gradient.abs().argsort(descending=True)[:count]")],
})  # fmt: skip
