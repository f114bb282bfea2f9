"""How many floating-point operations a training step needs, by formula: those of matrix products, without padding."""

from typing import Any

import numpy as np

from cos598d.models.architectures import IMAGE_TYPES

# The names of a configuration's width, inner width and number of layers, of the types that the formula knows.
_SIZES = {
    **dict.fromkeys(("bert", "roberta", "vit"), ("hidden_size", "intermediate_size", "num_hidden_layers")),
    "distilbert": ("dim", "hidden_dim", "n_layers"),
}
_FIRST_ONLY = ("bert", "roberta")  # their last layer computes only the first token's output for a classifier
_POOLED = ("bert", "roberta", "distilbert")  # a layer of the model's width comes before their classifier
BACKWARD = 2  # times the forward's: each product has one for its input's gradient and one for its weight's


def training_operations(
    model_type: str, config: Any, head: str, num_labels: int, lengths: np.ndarray
) -> np.ndarray | None:
    """Operations of a forward and a backward pass of each example, int64 (examples); None of an unknown type.

    `lengths` are the examples' tokens without padding, (examples); images ignore them. A multiplication and an
    addition are two. Counted are the products that the loss needs: of the layers, of attention, of the pooler and of
    the head. Looking up embeddings, norms, activations and the optimizer are left out; they are a few percent.
    """
    if model_type not in _SIZES:
        return None
    width, inner, layers = (getattr(config, name) for name in _SIZES[model_type])
    tokens, first = np.asarray(lengths, dtype=np.int64), 0
    if model_type in IMAGE_TYPES:
        patches = (config.image_size // config.patch_size) ** 2
        first = patches * 2 * config.num_channels * config.patch_size**2 * width  # nothing needs its input's gradient
        tokens = np.full_like(tokens, 1 + patches)

    def layer(asked: np.ndarray) -> np.ndarray:
        """Of a layer whose output is computed for so many tokens of each example."""
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
