"""Lesson 0: a step in one process."""

STEP = """import torch

def step(model, optimizer, batch, max_norm):
"""
RIGHT = {
    "zeroed at the end": STEP
    + """    loss = model(**batch)[0]
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    model.zero_grad(set_to_none=True)
    return float(loss)
""",
    "clips by hand": STEP
    + """    for p in model.parameters():
        p.grad = None
    loss, _ = model(**batch)
    loss.backward()
    ps = [p for p in model.parameters() if p.grad is not None]
    norm = torch.sqrt(sum((p.grad.double() ** 2).sum() for p in ps))
    if norm > max_norm:
        for p in ps:
            p.grad *= (max_norm / (norm + 1e-6)).to(p.grad.dtype)
    optimizer.step()
    return loss.detach().item()
""",
}
WRONG = {
    "never zeroed": (
        STEP
        + """    loss = model(**batch)[0]
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    return loss.item()
""",
        "gradients of earlier steps are still there",
    ),
    "zeroed between backward and step": (
        STEP
        + """    loss = model(**batch)[0]
    loss.backward()
    optimizer.zero_grad()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    return loss.item()
""",
        "the weights never change",
    ),
    "no clipping": (
        STEP
        + """    optimizer.zero_grad()
    loss = model(**batch)[0]
    loss.backward()
    optimizer.step()
    return loss.item()
""",
        "the gradients are not clipped",
    ),
    "clips before backward": (
        STEP
        + """    optimizer.zero_grad()
    loss = model(**batch)[0]
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    loss.backward()
    optimizer.step()
    return loss.item()
""",
        "the gradients are not clipped",
    ),
    "clips by value": (
        STEP
        + """    optimizer.zero_grad()
    loss = model(**batch)[0]
    loss.backward()
    torch.nn.utils.clip_grad_value_(model.parameters(), max_norm)
    optimizer.step()
    return loss.item()
""",
        "clamped to max_norm",
    ),
    "scales small gradients up": (
        STEP
        + """    optimizer.zero_grad()
    loss = model(**batch)[0]
    loss.backward()
    ps = [p for p in model.parameters() if p.grad is not None]
    norm = torch.sqrt(sum((p.grad.double() ** 2).sum() for p in ps))
    for p in ps:
        p.grad *= (max_norm / norm).to(p.grad.dtype)
    optimizer.step()
    return loss.item()
""",
        "are scaled up to it",
    ),
    "clips one by one": (
        STEP
        + """    optimizer.zero_grad()
    loss = model(**batch)[0]
    loss.backward()
    for p in model.parameters():
        torch.nn.utils.clip_grad_norm_(p, max_norm)
    optimizer.step()
    return loss.item()
""",
        "each parameter's gradient is clipped by itself",
    ),
    "returns the tensor": (
        STEP
        + """    optimizer.zero_grad()
    loss = model(**batch)[0]
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    return loss
""",
        "return loss.item()",
    ),
    "steps first": (
        STEP
        + """    optimizer.step()
    optimizer.zero_grad()
    loss = model(**batch)[0]
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return loss.item()
""",
        "optimizer.step() comes before backward",
    ),
    "loss after the step": (
        STEP
        + """    optimizer.zero_grad()
    loss = model(**batch)[0]
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    return model(**batch)[0].item()
""",
        "computed after optimizer.step()",
    ),
}
