"""The vision transformer, in plain torch: an image is a sequence of patches, and an encoder like BERT's classifies it.

Dosovitskiy et al., An image is worth 16x16 words, ICLR 2021, https://arxiv.org/abs/2010.11929. Modules are named as in
the published checkpoints, so that their files fit, and ours fit `transformers.ViTForImageClassification`.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, linear, scaled_dot_product_attention

# The `vit-tiny` shape except its images, which are the task's: 0.5 M parameters, images of 8 to 64 pixels per side.
TINY = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 256}
MOST_PATCHES = 32  # per side; attention's work grows with the fourth power of it


@dataclass
class ViTConfig:
    """The defaults are those of ViT-Base for images of 224 x 224 pixels, under the names of published config.json."""

    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.0
    attention_probs_dropout_prob: float = 0.0
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    image_size: int = 224
    patch_size: int = 16
    num_channels: int = 3
    num_labels: int = 2

    def to_dict(self) -> dict[str, Any]:
        """JSON values as transformers reads them: the number of labels is that of their names."""
        values = {name: value for name, value in asdict(self).items() if name != "num_labels"}
        labels = {f"LABEL_{number}": number for number in range(self.num_labels)}
        names = {str(number): name for name, number in labels.items()}
        return values | {"architectures": ["ViTForImageClassification"], "id2label": names, "label2id": labels}


def patch_of(size: int) -> int:
    """The patch size for small images: the largest divisor that gives at least 7 patches per side, or 2 in the smallest
    images. Digits of 8 pixels have 4 x 4 patches, photographs of 32 have 8 x 8."""
    return max(patch for patch in range(1, max(2, size // 7) + 1) if size % patch == 0)


class PatchProjection(nn.Conv2d):
    """Every patch of pixels times the same matrix: (batch, channels, size, size) to (batch, patches, width).

    It is a product, not a convolution: that gives its weight, (width, channels, patch, patch), a contiguous gradient.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        side = self.kernel_size[0]
        patches = input.unfold(2, side, side).unfold(3, side, side)  # (batch, channels, rows, columns, patch, patch)
        vectors = patches.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
        return linear(vectors, self.weight.flatten(1), self.bias)


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


class Block(nn.Module):
    """Tokens (batch, tokens, width) to tokens: x + attention(norm(x)), then x + mlp(norm(x)).

    The norm comes before attention and mlp (BERT's after the sum), so the sums form an unchanged path. In attention,
    every token becomes the mean of all tokens' values, weighted by how well its query fits their keys, per head.
    """

    def __init__(self, config: ViTConfig):
        super().__init__()
        width, inner, self.heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
        if width % self.heads:
            raise ValueError(f"hidden_size {width} is not a multiple of num_attention_heads {self.heads}")
        sides = nn.ModuleDict({name: nn.Linear(width, width) for name in ("query", "key", "value")})
        self.layernorm_before = nn.LayerNorm(width, config.layer_norm_eps)
        self.attention: Any = nn.ModuleDict({"attention": sides, "output": _dense(width, width)})
        self.layernorm_after = nn.LayerNorm(width, config.layer_norm_eps)
        self.intermediate, self.output = _dense(width, inner), _dense(inner, width)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.attention_dropout = config.attention_probs_dropout_prob

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        tokens = tokens + self.dropout(self._attend(self.layernorm_before(tokens)))
        inner = gelu(self.intermediate["dense"](self.layernorm_after(tokens)))
        return tokens + self.dropout(self.output["dense"](inner))

    def _attend(self, tokens: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part(tokens).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.attention["attention"].values()
        )  # each (batch, heads, tokens, width / heads)
        probability = self.attention_dropout if self.training else 0.0
        mixed = scaled_dot_product_attention(query, key, value, dropout_p=probability)
        return self.attention["output"]["dense"](mixed.transpose(1, 2).flatten(2))


class ViTForImageClassification(nn.Module):
    """Pixels (batch, channels, size, size) to `config.num_labels` scores, from the encoder's first token.

    As in pytorch-transformers, outputs are a tuple: (scores,), or with `labels`, int64 (batch,), (mean loss, scores).
    """

    base_model_prefix = "vit"

    def __init__(self, config: ViTConfig):
        super().__init__()
        blocks = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        norm, encoder = nn.LayerNorm(config.hidden_size, config.layer_norm_eps), nn.ModuleDict({"layer": blocks})
        parts = {"embeddings": Embeddings(config), "encoder": encoder, "layernorm": norm}
        self.vit: Any = nn.ModuleDict(parts)
        self.config, self.classifier = config, nn.Linear(config.hidden_size, config.num_labels)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        tokens = self.vit["embeddings"](pixel_values)
        for block in self.vit["encoder"]["layer"]:
            tokens = block(tokens)
        scores = self.classifier(self.vit["layernorm"](tokens)[:, 0])
        return (scores,) if labels is None else (cross_entropy(scores, labels), scores)

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
