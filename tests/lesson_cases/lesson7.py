"""Lesson 7 as students write it: changes of the answer that are wrong, with what the check must print, and right files."""

from lesson_cases import all_right, all_wrong

FULL = "if not self.buckets or size > room or parameter.dtype != dtype:"
HOOK = "            parameter.register_post_accumulate_grad_hook(self.on_gradient)\n"
REST = "        while len(self.calls) < len(self.buckets):\n            self.send()\n"
ZEROS = "            if parameter.grad is None:\n                parameter.grad = torch.zeros_like(parameter)\n"
COPY = "parameter.grad.copy_(part.view_as(parameter))"
NUMBER = "    def send(self):\n        number = len(self.calls)\n"
IN_ORDER = """        self.missing[self.place[parameter]] -= 1
        while len(self.calls) < len(self.buckets) and self.missing[len(self.calls)] == 0:
            self.send()
"""
AS_FULL = """        number = self.place[parameter]
        self.missing[number] -= 1
        if self.missing[number] == 0:
            self.send(number)
"""
CALL = 'self.calls.append((buffer, self.comm.all_reduce(buffer, f"bucket {number}", async_op=True)))'
BY_NUMBER = 'self.calls[number] = (buffer, self.comm.all_reduce(buffer, f"bucket {number}", async_op=True))  #!'
ENDS = "        for bucket, (buffer, call) in zip(self.buckets, self.calls):\n"
ENDS_BY_NUMBER = """        for number, bucket in enumerate(self.buckets):
            if number not in self.calls:
                self.send(number)
            buffer, call = self.calls[number]
"""
AT_ONCE = [
    ("        self.calls = []\n", "        self.calls = {}\n"), (IN_ORDER, AS_FULL), (NUMBER, "    def send(self, number):\n"),
    (CALL, BY_NUMBER), (REST + ENDS, ENDS_BY_NUMBER),
]  # fmt: skip

WRONG = all_wrong(7, {
    "frozen ones too": ([("            if not parameter.requires_grad:\n                continue\n", "")], "RuntimeError"),
    "one bucket a gradient": ([(FULL, "if True:")], "one call for each bucket, not for each gradient"),
    "one bucket for all": ([(FULL, "if parameter.dtype != dtype:")], "open another bucket if the next gradient does not fit"),
    "unused ones are waited for": ([(REST + ENDS, ENDS)], "did not use a parameter that other ranks used"),
    "unused ones are left out": (
        [(ZEROS, "            pass\n"), ("parameter.grad.flatten() for parameter in self.buckets[number]]", "parameter.grad.flatten() for parameter in self.buckets[number] if parameter.grad is not None]")],
        "every rank must make the same calls in the same order",
    ),
    "begins what is full at once": (AT_ONCE, "every rank must make the same calls in the same order"),
    "all in finish": ([(HOOK, "")], "calls before backward ends"),
    "all begun by the last hook": ([("self.missing[len(self.calls)] == 0:", "not any(self.missing):")], "begins call 1 of 7 when 13 of 13 gradients are there"),
    "dtypes mixed": ([(FULL, "if size > room:")], "a bucket has one dtype"),
    "one size for all": ([("room, dtype = bucket_bytes", "room, dtype = 512")], "makes 7 calls for 13 gradients in buckets of 1000 bytes, expected 5"),
    "never divides": ([("            buffer /= self.comm.world_size\n", "")], "is the sum over 2 ranks"),
    "never begins again": ([(f"                {COPY}\n        self.begin()\n", f"                {COPY}\n")], "rank 1's gradients are wrong: mixed with earlier steps"),
    "not copied back": ([(COPY, "part.view_as(parameter)")], "keeps its own gradient"),
})  # fmt: skip

RIGHT = {
    "views of the bucket, and an agreement": """import torch

class Buckets:
    def __init__(self, comm, model, bucket_bytes):
        self.comm = comm
        self.all = [p for p in model.parameters() if p.requires_grad]
        open_by_dtype, self.buckets = {}, []
        for p in self.all[::-1]:
            size = p.numel() * p.element_size()
            bucket = open_by_dtype.get(p.dtype)
            if bucket is None or bucket["bytes"] + size > bucket_bytes:
                bucket = open_by_dtype[p.dtype] = {"bytes": 0, "of": []}
                self.buckets.append(bucket)
            bucket["bytes"] += size
            bucket["of"].append(p)
        self.where = {p: i for i, b in enumerate(self.buckets) for p in b["of"]}
        for b in self.buckets:
            b["buffer"] = torch.zeros(sum(p.numel() for p in b["of"]), dtype=b["of"][0].dtype)
            b["views"] = [v.view_as(p) for v, p in zip(b["buffer"].split([p.numel() for p in b["of"]]), b["of"])]
        for p in self.all:
            p.register_post_accumulate_grad_hook(self.got)
        self.seen, self.next, self.calls = set(), 0, []

    def got(self, p):
        self.seen.add(p)
        while self.next < len(self.buckets) and all(q in self.seen for q in self.buckets[self.next]["of"]):
            self.start()

    def start(self):
        b = self.buckets[self.next]
        for p, view in zip(b["of"], b["views"]):
            view.copy_(p.grad / self.comm.world_size) if p.grad is not None else view.zero_()
        self.calls.append(self.comm.all_reduce(b["buffer"], f"bucket {self.next}", async_op=True))
        self.next += 1

    def finish(self):
        used = torch.tensor([p.grad is not None for p in self.all], dtype=torch.int32)
        while self.next < len(self.buckets):
            self.start()
        self.comm.all_reduce(used, "used")
        used = dict(zip(self.all, used.tolist()))
        for b, call in zip(self.buckets, self.calls):
            call.wait()
            for p, view in zip(b["of"], b["views"]):
                p.grad = view.clone() if used[p] else None
        self.seen, self.next, self.calls = set(), 0, []
""",
} | all_right(7, {
    "fewer calls than the plan": [("size > room or", "size > room and parameter.numel() > 10 or"), ("room -= size", "room -= size if parameter.numel() > 10 else 0")],
})  # fmt: skip
