"""The floating-point operations of a training step, by formula: those of matrix products, without padding."""

from typing import Any

import numpy as np

from cos598d.models.architectures import IMAGE_TYPES

# A configuration's names for width, inner width and number of layers, for the types that the formula supports.
_SIZES = {
    **dict.fromkeys(("bert", "roberta", "vit"), ("hidden_size", "intermediate_size", "num_hidden_layers")),
    "distilbert": ("dim", "hidden_dim", "n_layers"),
}
_FIRST_ONLY = ("bert", "roberta")  # for a classifier, their last layer computes only the first token's output
_POOLED = ("bert", "roberta", "distilbert")  # their classifier has a layer of the model's width before it
BACKWARD = 2  # relative to the forward's: each product has one for its input's gradient and one for its weight's


def training_operations(
    model_type: str, config: Any, head: str, num_labels: int, lengths: np.ndarray
) -> np.ndarray | None:
    """Operations of a forward and a backward pass of each example, int64 (examples,); None for an unknown type.

    `lengths` are the examples' tokens without padding, (examples,); images ignore them. A multiplication and an
    addition count as two operations. Only products that the loss needs count: of the layers, of attention, of the
    pooler and of the head. Embedding lookups, norms, activations and the optimizer, a few percent, are left out.
    """
    if model_type not in _SIZES:
        return None
    width, inner, layers = (getattr(config, name) for name in _SIZES[model_type])
    tokens, first = np.asarray(lengths, dtype=np.int64), 0
    if model_type in IMAGE_TYPES:
        patches = (config.image_size // config.patch_size) ** 2
        # the gradient of its input is not needed
        first = patches * 2 * config.num_channels * config.patch_size**2 * width
        tokens = np.full_like(tokens, 1 + patches)

    def layer(asked: np.ndarray) -> np.ndarray:
        """Operations of a layer whose output is computed for `asked` tokens of each example."""
        keys_and_values, of_asked = 2 * 2 * width**2 * tokens, (2 * 2 * width**2 + 2 * 2 * width * inner) * asked
        return keys_and_values + of_asked + 2 * 2 * width * tokens * asked

    answers = head == "question_answering"
    one = np.ones_like(tokens)
    last = layer(one if model_type in _FIRST_ONLY and not answers else tokens)
    forward = (layers - 1) * layer(tokens) + last
    if answers:
        forward += 2 * width * 2 * tokens
    else:
        forward += 2 * width * (num_labels + (width if model_type in _POOLED else 0))
    return (1 + BACKWARD) * forward + 2 * first
