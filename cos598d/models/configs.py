"""Model types: pytorch-transformers' classes for texts and our ViT for images, and their configurations."""

import json
import logging
from pathlib import Path
from typing import Any

from pytorch_transformers import modeling_bert, modeling_distilbert, modeling_roberta
from torch import nn

from cos598d.errors import UserError
from cos598d.models import vit
from cos598d.models.packed import BertAnswers, BertEncoder, DistilBertAnswers, DistilBertEncoder
from cos598d.terminal.printable import printable
from cos598d.terminal.reading import read_json

# Its warnings (such as RoBERTa's about every batch without its special tokens) would confuse the user of a run.
logging.getLogger("pytorch_transformers").setLevel(logging.ERROR)

CONFIGS: dict[str, Any] = {
    "bert": modeling_bert.BertConfig,
    "roberta": modeling_roberta.RobertaConfig,
    "distilbert": modeling_distilbert.DistilBertConfig,
    "vit": vit.ViTConfig,
}
_TEXT, _QUESTIONS, _IMAGE = "sequence_classification", "question_answering", "image_classification"
_CLASSES: dict[tuple[str, str], Any] = {
    ("bert", _TEXT): modeling_bert.BertForSequenceClassification,
    ("bert", _QUESTIONS): BertAnswers,
    ("roberta", _TEXT): modeling_roberta.RobertaForSequenceClassification,
    ("distilbert", _TEXT): modeling_distilbert.DistilBertForSequenceClassification,
    ("distilbert", _QUESTIONS): DistilBertAnswers,
    ("vit", _IMAGE): vit.ViTForImageClassification,
}
# Whole numbers above 0 that a config.json must give: the library would silently take those of its own default model.
_SIZES = {
    **dict.fromkeys(
        ("bert", "roberta", "vit"), ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    ),
    "distilbert": ("dim", "n_layers", "n_heads", "hidden_dim"),
}
_DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob")
DROPOUTS = {
    **dict.fromkeys(("bert", "roberta", "vit"), _DROPOUTS),
    "distilbert": ("dropout", "attention_dropout", "seq_classif_dropout", "qa_dropout"),
}
TINY = {
    "bert": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128},
    "distilbert": {"dim": 64, "n_layers": 2, "n_heads": 2, "hidden_dim": 128},
}
_WHOLE = "Give the config.json that belongs to the model"


def read_config(path: Path) -> tuple[str, Any]:
    """The model type and the configuration in a config.json. Raises UserError if no model can be built from it."""
    try:
        values = read_json(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}). Give a folder that holds a model's config.json.") from error
    kind = values.get("model_type", "bert") if isinstance(values, dict) else None
    if kind not in CONFIGS:
        raise UserError(f"{path} describes a model of type {printable(repr(kind), 60)}, not {', '.join(CONFIGS)}.")
    config = CONFIGS[kind]()
    texts = () if kind == "vit" else ("vocab_size", "max_position_embeddings")
    for name in (*_SIZES[kind], *texts):
        if type(values.get(name)) is not int or values[name] < 1:
            shown = printable(repr(values.get(name)), 60)
            raise UserError(f"{path} gives {shown} for {name}, and a {kind} needs a whole number above 0. {_WHOLE}.")
    for name, value in values.items():
        own = getattr(config, name, None)
        if isinstance(getattr(CONFIGS[kind], name, None), property) or callable(own):
            continue  # a newer library's name for a size that has another one here
        kinds = {bool: bool, int: int, float: (int, float), str: str}.get(type(own), object)
        if not isinstance(value, kinds) or (isinstance(value, bool) and kinds not in (bool, object)):
            shown = printable(repr(value), 60)
            raise UserError(f"{path} gives {shown} for {name}, where one like {own!r} is expected. {_WHOLE}.")
        setattr(config, name, value)
    activation = values.get("hidden_act", values.get("activation", "gelu"))
    if activation not in ("gelu", "relu") or (kind == "vit" and activation != "gelu"):
        raise UserError(f"{path} has the activation {activation!r}. Choose a model with gelu.")
    if getattr(config, "sinusoidal_pos_embds", False) and "sinusoidal_pos_embds" in values:
        raise UserError(f"{path} asks for position embeddings that are not learned. Choose a model with learned ones.")
    if kind == "distilbert":
        config.sinusoidal_pos_embds = False
    return kind, config


def plain_config(kind: str, config: Any) -> dict[str, Any]:
    """The configuration as JSON values, with `model_type`, which a modern reader needs."""
    return {"model_type": kind, **json.loads(json.dumps(config.to_dict()))}


def type_of(config: Any) -> str:
    """The model type of a configuration."""
    return next(kind for kind, known in CONFIGS.items() if type(config) is known)


def check_head(kind: str, head: str) -> None:
    """Raise UserError for a type without such a head: RoBERTa has none for questions in pytorch-transformers."""
    if (kind, head) not in _CLASSES:
        able = [one for one, other in _CLASSES if other == head]
        raise UserError(f"there is no {kind} model for {head.replace('_', ' ')}. Choose a {' or '.join(able)} model.")


def empty_model(kind: str, head: str, config: Any) -> nn.Module:
    """The model with a head, whose weights are not filled yet. Raises UserError for a configuration that cannot be.

    Its encoder computes no padding. A pooler that the head does not read is frozen: every trainable parameter gets a
    gradient in every step.
    """
    check_head(kind, head)
    try:
        model: nn.Module = _CLASSES[kind, head](config)
        first_only = head == _TEXT
        if kind == "distilbert":
            getattr(model, "distilbert").transformer = DistilBertEncoder(config, first_only)  # noqa: B009
        elif kind != "vit":
            inner = getattr(model, kind)
            inner.encoder = BertEncoder(config, first_only)
            inner.pooler.requires_grad_((kind, head) == ("bert", _TEXT))
        return model
    except (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(f"the model's configuration does not fit a {kind} ({type(error).__name__}: {error}).") from error
