"""pytorch-transformers, imported without two packages that it needs for what nobody here uses."""

from cos598d.imports import import_later

# Its download from Amazon's storage, and the tokenizer of XLM.
RARELY_USED = ("boto3", "sacremoses")

for _name in RARELY_USED:
    import_later(_name)

import pytorch_transformers  # noqa: E402
from pytorch_transformers import (  # noqa: E402
    modeling_bert,
    modeling_distilbert,
    modeling_xlm,
    modeling_xlnet,
)

__all__ = ["modeling_bert", "modeling_distilbert", "modeling_xlm", "modeling_xlnet", "pytorch_transformers"]
