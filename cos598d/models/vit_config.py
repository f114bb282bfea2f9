"""The sizes of a vision transformer, under the names in the published checkpoints' config.json."""

import json
from dataclasses import dataclass
from typing import Any

# The `vit-tiny` shape except its images, which are the task's: 0.5 M parameters, images of 8 to 64 pixels per side.
TINY: dict[str, int | bool] = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 256,
}
MOST_PATCHES = 32  # per side; attention's work grows with the fourth power of it


@dataclass
class ViTConfig:
    """The defaults are those of ViT-Base for images of 224 x 224 pixels (Dosovitskiy et al. 2021, table 1)."""

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
    qkv_bias: bool = True
    num_labels: int = 2

    def to_dict(self) -> dict[str, Any]:
        """JSON values as transformers reads them: the number of labels is that of their names."""
        values = {name: value for name, value in vars(self).items() if name != "num_labels"}
        labels = {f"LABEL_{number}": number for number in range(self.num_labels)}
        names = {str(number): name for name, number in labels.items()}
        return values | {"architectures": ["ViTForImageClassification"], "id2label": names, "label2id": labels}

    def to_json_string(self) -> str:
        """The same as text."""
        return json.dumps(self.to_dict(), sort_keys=True)


def patch_of(size: int) -> int:
    """The patch size for small images of `size` pixels per side: the largest divisor that gives at least 7 patches per
    side, or 2 in the smallest images. Digits of 8 pixels have 4 x 4 patches, those of 28 have 7 x 7, photographs of 32
    have 8 x 8."""
    return max(patch for patch in range(1, max(2, size // 7) + 1) if size % patch == 0)
