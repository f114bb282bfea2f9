"""Lesson 8 as students fix it: each loop not fixed, fixed wrongly, and fixed in another right way."""

from cos598d.tools.course import get_lesson

PAGE, ANSWER = get_lesson(8).page(), get_lesson(8).answer()


def loop_of(source, place):
    """The text of one loop in a file."""
    begin = source.index(f"def {place}_loop")
    end = source.find("\n\n\ndef ", begin)
    return source[begin:] if end < 0 else source[begin:end] + "\n"


def with_loop(place, old="", new="", source=None):
    """The answer, with one loop of the page or with a change in one of its own."""
    right = loop_of(ANSWER, place)
    wrong = loop_of(source, place) if source else right.replace(old, new)
    assert wrong != right, f"nothing changed in {place}_loop"
    return ANSWER.replace(right, wrong)


WRONG = {
    "first as it was": (with_loop("first", source=PAGE), "clipped before"),
    "second as it was": (with_loop("second", source=PAGE), "the same batches"),
    "third as it was": (with_loop("third", source=PAGE), "weights"),
    "fourth as it was": (with_loop("fourth", source=PAGE), "never averaged"),
    "fifth as it was": (with_loop("fifth", source=PAGE), "in fifth_loop"),
    "sixth as it was": (with_loop("sixth", source=PAGE), "in sixth_loop"),
    "clipping left out": (
        with_loop("first", "        nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n", ""),
        "first_loop ends with other weights",
    ),
    "shares that overlap": (with_loop("second", "[rank::ranks]", "[rank * 4 : rank * 4 + 8]"), "overlap"),
    "no training at all": (with_loop("fifth", "range(STEPS)", "range(0)"), "fifth_loop makes 0 steps"),
    "half the training": (with_loop("fifth", "range(STEPS)", "range(STEPS // 2)"), "fifth_loop makes 3 steps"),
    "every part travels": (
        with_loop("fourth", "        with wrapped.no_sync():\n            for part in first:\n                (", "        for part in first:\n            ("),
        "in fourth_loop",
    ),
    "no parts": (
        with_loop("fourth", loop_of(ANSWER, "fourth").split('once."""\n')[1], loop_of(ANSWER, "fifth").split('steps."""\n')[1]),
        "fourth_loop computes 6 examples at a time on rank 0 of 2, expected 2",
    ),
    "the last example dropped": (with_loop("sixth", "(step + 1))[rank::ranks]", "(step + 1) - 1)[rank::ranks]"), "sixth_loop"),
    "divides by two": (ANSWER.replace("        p.grad /= ranks\n", "        p.grad /= 2\n"), "the sum over 4 ranks, divided by 2", (4,)),
    "shares for two": (with_loop("fifth", "[rank::ranks]", "[rank::2]"), "fifth_loop", (4,)),
    "summed": (with_loop("fifth", "        average(model, ranks)\n", "        for p in model.parameters():\n            dist.all_reduce(p.grad)\n"), "summed"),
}  # fmt: skip

FLAT = """        flat = torch.cat([p.grad.flatten() for p in model.parameters()]) / ranks
        dist.all_reduce(flat)
        for p, part in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()])):
            p.grad = part.view_as(p).clone()
"""
BY_HAND = """    optimizer = optimizer_of(model)
    for step in range(STEPS):
        batch = torch.arange(BATCH * step, BATCH * (step + 1))[rank::ranks]
        optimizer.zero_grad()
        for part in batch.tensor_split(3):
            (loss_of(model, inputs[part], labels[part]) / 3).backward()
        average(model, ranks)
        optimizer.step()
"""
RIGHT = {
    "averaged flat": with_loop("first", "        average(model, ranks)\n", FLAT),
    "halves, one after the other": with_loop("second", "[rank::ranks]", ".tensor_split(ranks)[rank]"),
    "parts by hand": with_loop("fourth", loop_of(ANSWER, "fourth").split('once."""\n')[1], BY_HAND),
    "zeroed afterwards": with_loop("fifth", "        optimizer.zero_grad()\n", "        model.zero_grad()\n"),
}
