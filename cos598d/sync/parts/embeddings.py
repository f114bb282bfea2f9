"""The embeddings of which it pays to treat the rows that a batch looked up apart from all others."""

from torch import nn

from cos598d.sync.buckets import MIB

LEAST_BYTES = MIB  # a smaller embedding fits into a bucket and costs next to nothing there


def large_embeddings(model: nn.Module) -> dict[nn.Parameter, nn.Embedding]:
    """The weights that are embeddings and nothing else, by their modules; those of at least LEAST_BYTES."""
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
        and parameter.numel() * parameter.element_size() >= LEAST_BYTES
    }
