"""The vision transformer, in plain torch: an image is a sequence of patches, and an encoder like BERT's classifies it.

Dosovitskiy et al., An image is worth 16x16 words, ICLR 2021, https://arxiv.org/abs/2010.11929. Modules are named as in
the published checkpoints, so that their files fit, and ours fit `transformers.ViTForImageClassification`.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from cos598d.models.vit_config import ViTConfig

_TANH_GELU = partial(functional.gelu, approximate="tanh")
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": functional.gelu,
    "relu": functional.relu,
    "gelu_new": _TANH_GELU,
    "gelu_pytorch_tanh": _TANH_GELU,
}


class PatchProjection(nn.Conv2d):
    """Every patch of pixels times the same matrix: a convolution with a stride of whole patches, computed as a product.

    Pixels (batch, channels, size, size) to (batch, patches, width). Its weight, (width, channels, patch, patch), has a
    contiguous gradient, which a convolution of one channel would not give.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        side = self.kernel_size[0]
        patches = input.unfold(2, side, side).unfold(3, side, side)  # (batch, channels, rows, columns, patch, patch)
        vectors = patches.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
        return functional.linear(vectors, self.weight.flatten(1), self.bias)


class Embeddings(nn.Module):
    """Pixels (batch, channels, size, size) to tokens (batch, 1 + patches, width).

    1. Each patch of pixels is projected.
    2. A learned token is put first; its output classifies the image.
    3. A learned vector for each position is added.
    """

    def __init__(self, config: ViTConfig):
        super().__init__()
        width, patch = config.hidden_size, config.patch_size
        patches = (config.image_size // patch) ** 2
        if not patches:
            raise ValueError(f"an image of {config.image_size} pixels per side has no patch of {patch}")
        self.cls_token = nn.Parameter(torch.empty(1, 1, width))
        self.position_embeddings = nn.Parameter(torch.empty(1, 1 + patches, width))
        self.patch_embeddings = nn.ModuleDict({"projection": PatchProjection(config.num_channels, width, patch, patch)})
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        patches = self.patch_embeddings["projection"](pixel_values)
        first = self.cls_token.expand(len(patches), -1, -1)
        return self.dropout(torch.cat([first, patches], dim=1) + self.position_embeddings)


class Attention(nn.Module):
    """Every token becomes the mean of all tokens' values, weighted by how well its query fits their keys.

    Each head does so with its own part of the width. Tokens (batch, tokens, width) to the same shape.
    """

    def __init__(self, config: ViTConfig):
        super().__init__()
        width = config.hidden_size
        self.heads = config.num_attention_heads
        if width % self.heads:
            raise ValueError(f"hidden_size {width} is not a multiple of num_attention_heads {self.heads}")
        self.attention = nn.ModuleDict(
            {name: nn.Linear(width, width, config.qkv_bias) for name in ("query", "key", "value")}
        )
        self.output = _dense(width, width)
        self.dropout = nn.Dropout(config.attention_probs_dropout_prob)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part(tokens).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.attention.values()
        )  # each (batch, heads, tokens, width / heads)
        probability = self.dropout.p if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(query, key, value, dropout_p=probability)
        return self.output["dense"](mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Tokens (batch, tokens, width) to tokens: x + attention(norm(x)), then x + mlp(norm(x)).

    The norm comes before attention and mlp (BERT's after the sum), so the sums form an unchanged path.
    """

    def __init__(self, config: ViTConfig):
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.layernorm_before = nn.LayerNorm(width, config.layer_norm_eps)
        self.attention = Attention(config)
        self.layernorm_after = nn.LayerNorm(width, config.layer_norm_eps)
        self.intermediate, self.output = _dense(width, inner), _dense(inner, width)
        self.activation = ACTIVATIONS[config.hidden_act]
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        tokens = tokens + self.dropout(self.attention(self.layernorm_before(tokens)))
        inner = self.activation(self.intermediate["dense"](self.layernorm_after(tokens)))
        return tokens + self.dropout(self.output["dense"](inner))


class VitEncoder(nn.Module):
    """All blocks, one after the other."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.layer = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        for block in self.layer:
            tokens = block(tokens)
        return tokens


class ViT(nn.Module):
    """Pixels (batch, channels, size, size) to the encoder's output for each token (batch, 1 + patches, width)."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.embeddings, self.encoder = Embeddings(config), VitEncoder(config)
        self.layernorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.layernorm(self.encoder(self.embeddings(pixel_values)))


class ViTForImageClassification(nn.Module):
    """Pixels (batch, channels, size, size) to `config.num_labels` scores, from the encoder's first token.

    As in pytorch-transformers, outputs are a tuple: (scores,), or with `labels`, int64 (batch,), (mean loss, scores).
    """

    base_model_prefix = "vit"

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.config, self.vit = config, ViT(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        scores = self.classifier(self.vit(pixel_values)[:, 0])
        return (scores,) if labels is None else (functional.cross_entropy(scores, labels), scores)

    def _init_weights(self, module: nn.Module) -> None:
        """Draw one module's new weights, as pytorch-transformers' models do when `apply` calls it."""
        deviation = self.config.initializer_range
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            nn.init.trunc_normal_(module.weight, std=deviation)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, Embeddings):
            nn.init.trunc_normal_(module.cls_token, std=deviation)
            nn.init.trunc_normal_(module.position_embeddings, std=deviation)


def _dense(inputs: int, outputs: int) -> nn.ModuleDict:
    return nn.ModuleDict({"dense": nn.Linear(inputs, outputs)})
