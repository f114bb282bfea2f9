"""The embeddings of which it pays to treat the rows that a batch looked up apart from all others."""

from collections.abc import Callable, Iterable

from torch import nn

from cos598d.sync.buckets import MIB

LEAST_BYTES = MIB  # a smaller embedding fits into a bucket and costs next to nothing there


def large_embeddings(model: nn.Module, least_bytes: int | None = None) -> dict[nn.Parameter, nn.Embedding]:
    """The weights that are embeddings and nothing else, by their modules; those of `least_bytes`, else LEAST_BYTES."""
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
    """Let backward compute only the rows that were looked up; what is returned puts it back as it was."""
    were_sparse = {embedding: embedding.sparse for embedding in embeddings}
    for embedding in were_sparse:
        embedding.sparse = not embedding.scale_grad_by_freq  # torch has that only for dense gradients

    def put_back() -> None:
        for embedding, was_sparse in were_sparse.items():
            embedding.sparse = was_sparse

    return put_back


def why_no_rows(model: nn.Module, least_bytes: int | None = None) -> str | None:
    """Why a model has no embedding of which rows could be left out, in words; None where it has one."""
    if large_embeddings(model, least_bytes):
        return None
    tables = [one.weight for one in model.modules() if isinstance(one, nn.Embedding) and one.weight.requires_grad]
    largest = max((p.numel() * p.element_size() for p in tables), default=0)
    if not tables:
        return "this model trains none: all of its layers use all of their weights for every example"
    if largest < (LEAST_BYTES if least_bytes is None else least_bytes):
        return f"this model's largest has {largest / MIB:.2g} MiB, too little to be worth a call of its own"
    return "this model's also serves elsewhere, as an output layer does, and there every row gets a gradient"
