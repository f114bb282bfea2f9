"""Activation checkpointing: backward computes a layer's activations again, so that forward need not keep them."""

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from cos598d.models.packed import BertLayer, DistilBertLayer
from cos598d.models.vit import Block


def recompute_activations(model: nn.Module) -> None:
    """Make every layer of the model's encoder keep only its input for backward, which calls its forward once more.

    1. Forward keeps a layer's input and the state of the random generator.
    2. When backward reaches the layer, its forward runs again from there: dropout draws the same masks.
    3. Then the layer's backward runs as usual: gradients have the same bits.

    It costs one more forward for each backward. Memory holds one layer's activations and the inputs of all others.
    """
    for layer in model.modules():
        if isinstance(layer, (BertLayer, DistilBertLayer, Block)):
            again = partial(checkpoint, layer.forward, use_reentrant=False)
            setattr(layer, "forward", again)  # noqa: B010 - by its name torch's type forbids it
