"""Embeddings that are large enough to treat the looked-up rows differently from all others."""

from collections.abc import Callable, Iterable

from torch import nn

from cos598d.sync.buckets import MIB

LEAST_BYTES = MIB  # a smaller embedding fits into a bucket and costs almost nothing there


def large_embeddings(model: nn.Module, least_bytes: int | None = None) -> dict[nn.Parameter, nn.Embedding]:
    """The weights that only embeddings use, each with its module, of at least `least_bytes` (default: LEAST_BYTES)."""
    least = LEAST_BYTES if least_bytes is None else least_bytes
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, []).append(module)
    return {
        parameter: modules[0]
        for parameter, modules in owners.items()
        if parameter.requires_grad
        and len(modules) == 1
        and isinstance(modules[0], nn.Embedding)
        and parameter.numel() * parameter.element_size() >= least
    }


def make_sparse(embeddings: Iterable[nn.Embedding]) -> Callable[[], None]:
    """Make backward compute only the rows that were looked up. Call the result to undo that."""
    were_sparse = {embedding: embedding.sparse for embedding in embeddings}
    for embedding in were_sparse:
        # torch supports scale_grad_by_freq only for dense gradients
        embedding.sparse = not embedding.scale_grad_by_freq

    def put_back() -> None:
        for embedding, was_sparse in were_sparse.items():
            embedding.sparse = was_sparse

    return put_back


def why_no_rows(model: nn.Module, least_bytes: int | None = None) -> str | None:
    """Why a model has no embedding whose rows could be left out, as a phrase for the user; None if it has one."""
    if large_embeddings(model, least_bytes):
        return None
    tables = [one.weight for one in model.modules() if isinstance(one, nn.Embedding) and one.weight.requires_grad]
    largest = max((p.numel() * p.element_size() for p in tables), default=0)
    if not tables:
        return "this model trains none; all of its layers use all of their weights for every example"
    if largest < (LEAST_BYTES if least_bytes is None else least_bytes):
        return f"this model's largest has {largest / MIB:.2g} MiB, which is too small for a call of its own"
    return "this model's is also used elsewhere, such as in an output layer, so every row gets a gradient"
