"""The floating-point operations of a training step, by formula: those of matrix products, without padding."""

from typing import Any

import numpy as np

# A configuration's names for width, inner width and number of layers.
_SIZES = {
    **dict.fromkeys(("bert", "roberta", "vit"), ("hidden_size", "intermediate_size", "num_hidden_layers")),
    "distilbert": ("dim", "hidden_dim", "n_layers"),
}
BACKWARD = 2  # relative to the forward's: each product has one for its input's gradient and one for its weight's


def training_operations(model_type: str, config: Any, head: str, num_labels: int, lengths: np.ndarray) -> np.ndarray:
    """Operations of a forward and a backward pass of each example, int64 (examples,).

    `lengths` are the examples' tokens without padding, (examples,); images ignore them. A multiplication and an
    addition count as two operations. Only products that the loss needs count: of the layers, of attention, of the
    pooler and of the head. Embedding lookups, norms, activations and the optimizer, a few percent, are left out.
    """
    width, inner, layers = (getattr(config, name) for name in _SIZES[model_type])
    tokens, first = np.asarray(lengths, dtype=np.int64), 0
    if model_type == "vit":
        patches = (config.image_size // config.patch_size) ** 2
        # the gradient of its input is not needed
        first = patches * 2 * config.num_channels * config.patch_size**2 * width
        tokens = np.full_like(tokens, 1 + patches)

    def layer(asked: np.ndarray) -> np.ndarray:
        """Operations of a layer whose output is computed for `asked` tokens of each example."""
        keys_and_values, of_asked = 2 * 2 * width**2 * tokens, (2 * 2 * width**2 + 2 * 2 * width * inner) * asked
        return keys_and_values + of_asked + 2 * 2 * width * tokens * asked

    if head == "question_answering":
        forward = layers * layer(tokens) + 2 * width * 2 * tokens
    elif model_type == "vit":
        forward = layers * layer(tokens) + 2 * width * num_labels
    else:  # a classifier of texts has a layer of the model's width, and the last layer computes the first token only
        forward = (layers - 1) * layer(tokens) + layer(np.ones_like(tokens)) + 2 * width * (num_labels + width)
    return (1 + BACKWARD) * forward + 2 * first
