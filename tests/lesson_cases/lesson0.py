"""Lesson 0 as students write it: changes of the answer that are wrong, with what the check must print, and right ones."""

from lesson_cases import all_right, all_wrong

ZERO = "    optimizer.zero_grad()\n"
LOSS = "    loss = model(**batch)[0]\n"
BACKWARD = "    loss.backward()\n"
CLIP = "    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)\n"
STEP = "    optimizer.step()\n"
RETURN = "    return loss.item()\n"
NORM = """    ps = [p for p in model.parameters() if p.grad is not None]
    norm = torch.sqrt(sum((p.grad.double() ** 2).sum() for p in ps))
"""

WRONG = all_wrong(0, {
    "never zeroed": ([(ZERO, "")], "gradients of earlier steps are still there"),
    "zeroed between backward and step": ([(ZERO, ""), (BACKWARD, BACKWARD + ZERO)], "the weights never change"),
    "no clipping": ([(CLIP, "")], "the gradients are not clipped"),
    "clips before backward": ([(CLIP, ""), (BACKWARD, CLIP + BACKWARD)], "the gradients are not clipped"),
    "clips by value": ([("clip_grad_norm_", "clip_grad_value_")], "clamped to max_norm"),
    "scales small gradients up": ([(CLIP, NORM + "    for p in ps:\n        p.grad *= (max_norm / norm).to(p.grad.dtype)\n")], "are scaled up to it"),
    "clips one by one": (
        [(CLIP, "    for p in model.parameters():\n        torch.nn.utils.clip_grad_norm_(p, max_norm)\n")],
        "each parameter's gradient is clipped by itself",
    ),
    "returns the tensor": ([(RETURN, "    return loss\n")], "return loss.item()"),
    "steps first": ([(STEP, ""), (ZERO, STEP + ZERO)], "optimizer.step() comes before backward"),
    "loss after the step": ([(RETURN, "    return model(**batch)[0].item()\n")], "computed after optimizer.step()"),
})  # fmt: skip

BY_HAND = (
    NORM
    + """    if norm > max_norm:
        for p in ps:
            p.grad *= (max_norm / (norm + 1e-6)).to(p.grad.dtype)
"""
)
RIGHT = all_right(0, {
    "zeroed at the end": [(ZERO, ""), (RETURN, "    model.zero_grad(set_to_none=True)\n    return float(loss)\n")],
    "clips by hand": [
        (ZERO, "    for p in model.parameters():\n        p.grad = None\n"),
        (LOSS, "    loss, _ = model(**batch)\n"), (CLIP, BY_HAND), (RETURN, "    return loss.detach().item()\n"),
    ],
})  # fmt: skip
