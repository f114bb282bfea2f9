"""Lesson 7: buckets."""

ANSWER = """import torch

class Buckets:
    def __init__(self, comm, model, bucket_bytes):
        self.comm, self.buckets, self.place = comm, [], {}
        room, dtype = 0, None
        for _, p in reversed(list(model.named_parameters())):
            if not p.requires_grad:
                continue
            size = p.numel() * p.element_size()
            if size > room or p.dtype != dtype:
                self.buckets.append([])
                room, dtype = bucket_bytes, p.dtype
            self.buckets[-1].append(p)
            self.place[p] = len(self.buckets) - 1
            room -= size
            p.register_post_accumulate_grad_hook(self.on_gradient)
        self.begin()

    def begin(self):
        self.missing, self.calls = [len(bucket) for bucket in self.buckets], []

    def on_gradient(self, p):
        self.missing[self.place[p]] -= 1
        while len(self.calls) < len(self.buckets) and self.missing[len(self.calls)] == 0:
            self.send()

    def send(self):
        number = len(self.calls)
        for p in self.buckets[number]:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        buffer = torch.cat([p.grad.flatten() for p in self.buckets[number]])
        self.calls.append((buffer, self.comm.all_reduce(buffer, f"bucket {number}", async_op=True)))

    def finish(self):
        while len(self.calls) < len(self.buckets):
            self.send()
        for bucket, (buffer, call) in zip(self.buckets, self.calls):
            call.wait()
            buffer /= self.comm.world_size
            for p, part in zip(bucket, buffer.split([p.numel() for p in bucket])):
                p.grad.copy_(part.view_as(p))
        self.begin()
"""
AT_ONCE = """import torch

class Buckets:
    def __init__(self, comm, model, bucket_bytes):
        self.comm, self.buckets, self.place = comm, [], {}
        room, dtype = 0, None
        for _, p in reversed(list(model.named_parameters())):
            if not p.requires_grad:
                continue
            size = p.numel() * p.element_size()
            if size > room or p.dtype != dtype:
                self.buckets.append([])
                room, dtype = bucket_bytes, p.dtype
            self.buckets[-1].append(p)
            self.place[p] = len(self.buckets) - 1
            room -= size
            p.register_post_accumulate_grad_hook(self.on_gradient)
        self.begin()

    def begin(self):
        self.missing, self.calls = [len(bucket) for bucket in self.buckets], {}

    def on_gradient(self, p):
        number = self.place[p]
        self.missing[number] -= 1
        if self.missing[number] == 0:
            self.send(number)

    def send(self, number):
        for p in self.buckets[number]:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        buffer = torch.cat([p.grad.flatten() for p in self.buckets[number]])
        self.calls[number] = (buffer, self.comm.all_reduce(buffer, f"bucket {number}", async_op=True))  #!

    def finish(self):
        for number, bucket in enumerate(self.buckets):
            if number not in self.calls:
                self.send(number)
            buffer, call = self.calls[number]
            call.wait()
            buffer /= self.comm.world_size
            for p, part in zip(bucket, buffer.split([p.numel() for p in bucket])):
                p.grad.copy_(part.view_as(p))
        self.begin()
"""
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
    "fewer calls than the plan": ANSWER.replace(
        "if size > room or p.dtype", "if size > room and p.numel() > 10 or p.dtype"
    ).replace("room -= size", "room -= size if p.numel() > 10 else 0"),
}
WRONG = {
    "frozen ones too": (
        ANSWER.replace("            if not p.requires_grad:\n                continue\n", ""),
        "RuntimeError",
    ),
    "one bucket a gradient": (
        ANSWER.replace("if size > room or p.dtype != dtype:", "if True:"),
        "one call for each bucket, not for each gradient",
    ),
    "one bucket for all": (
        ANSWER.replace("if size > room or p.dtype != dtype:", "if p.dtype != dtype:"),
        "open another bucket where the next does not fit",
    ),
    "unused ones are waited for": (
        ANSWER.replace(
            "        while len(self.calls) < len(self.buckets):\n            self.send()\n        for bucket",
            "        for bucket",
        ),
        "did not use a parameter, other ranks did",
    ),
    "unused ones are left out": (
        ANSWER.replace(
            "            if p.grad is None:\n                p.grad = torch.zeros_like(p)\n", "            pass\n"
        ).replace("for p in self.buckets[number]])", "for p in self.buckets[number] if p.grad is not None])"),
        "every rank must make the same calls in the same order",
    ),
    "begins what is full at once": (AT_ONCE, "every rank must make the same calls in the same order"),
    "all in finish": (
        ANSWER.replace("            p.register_post_accumulate_grad_hook(self.on_gradient)\n", ""),
        "calls before backward ends",
    ),
    "all begun by the last hook": (
        ANSWER.replace("self.missing[len(self.calls)] == 0:", "not any(self.missing):"),
        "begins call 1 of 7 when 13 of 13 gradients are there",
    ),
    "dtypes mixed": (
        ANSWER.replace("if size > room or p.dtype != dtype:", "if size > room:"),
        "a bucket has one dtype",
    ),
    "one size for all": (
        ANSWER.replace("room, dtype = bucket_bytes", "room, dtype = 512"),
        "makes 7 calls for 13 gradients in buckets of 1000 bytes, expected 5",
    ),
    "called an agreement": (
        ANSWER.replace("if size > room or p.dtype != dtype:", "if True:").replace(
            "async_op=True", "async_op=True, purpose='agreement'"
        ),
        "one call for each bucket, not for each gradient",
    ),
    "never divides": (ANSWER.replace("            buffer /= self.comm.world_size\n", ""), "is the sum over 2 ranks"),
    "never begins again": (
        ANSWER.removesuffix("        self.begin()\n"),
        "rank 1's gradients are wrong: mixed with earlier steps",
    ),
    "not copied back": (
        ANSWER.replace("p.grad.copy_(part.view_as(p))", "part.view_as(p)"),
        "keeps its own gradient",
    ),
}
