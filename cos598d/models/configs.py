"""Model types: pytorch-transformers' classes for texts and our ViT for images, and their configurations."""

import json
import logging
from pathlib import Path
from typing import Any

from torch import nn

from cos598d.errors import UserError, first_line
from cos598d.models import vit
from cos598d.models.library import modeling_bert, modeling_distilbert, modeling_roberta
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
# The `tiny` shapes. A config.json must give these sizes: else the library would silently take its own default's.
TINY = {
    **dict.fromkeys(
        ("bert", "roberta"),
        {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128},
    ),
    "distilbert": {"dim": 64, "n_layers": 2, "n_heads": 2, "hidden_dim": 128},
    "vit": vit.TINY,
}
_DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob")
_DISTILBERTS = ("dropout", "attention_dropout", "seq_classif_dropout", "qa_dropout")
DROPOUTS = {**dict.fromkeys(("bert", "roberta", "vit"), _DROPOUTS), "distilbert": _DISTILBERTS}


def read_config(path: Path) -> Any:
    """The configuration in a config.json. Raises UserError if no model can be built from it."""
    try:
        values = read_json(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}). Give a folder that holds a model's config.json.") from error
    kind = values.get("model_type", "bert") if isinstance(values, dict) else None
    if not isinstance(kind, str) or kind not in CONFIGS:
        raise UserError(f"{path} describes a model of type {printable(repr(kind), 60)}, not {', '.join(CONFIGS)}.")
    config = CONFIGS[kind]()
    for name in (*TINY[kind], *(() if kind == "vit" else ("vocab_size", "max_position_embeddings"))):
        if type(values.get(name)) is not int or values[name] < 1:
            raise _wrong(path, name, values.get(name), "a whole number above 0")
    for name, value in values.items():
        own = getattr(config, name, None)
        if isinstance(getattr(CONFIGS[kind], name, None), property) or callable(own):
            continue  # a newer library's name for a size that has another one here
        if isinstance(own, (bool, int, float, str)) and not isinstance(value, (type(own), int)):
            raise _wrong(path, name, value, f"one like {own!r}")
        setattr(config, name, value)
    activation = values.get("hidden_act", values.get("activation", "gelu"))
    if activation not in ("gelu", "relu") or (kind == "vit" and activation != "gelu"):
        raise _wrong(path, "the activation", activation, "gelu")
    if values.get("sinusoidal_pos_embds"):
        raise _wrong(path, "sinusoidal_pos_embds", True, "false")
    return config


def _wrong(path: Path, name: str, value: Any, wanted: str) -> UserError:
    shown = printable(repr(value), 60)
    return UserError(f"{path} gives {shown} for {name}, where {wanted} is expected. Give the config.json of a model.")


def type_of(config: Any) -> str:
    """The model type of a configuration."""
    return next(kind for kind, known in CONFIGS.items() if type(config) is known)


def plain_config(config: Any) -> dict[str, Any]:
    """The configuration as JSON values, with `model_type`, which a modern reader needs."""
    return {"model_type": type_of(config), **json.loads(json.dumps(config.to_dict()))}


def check_head(kind: str, head: str) -> None:
    """Raise UserError for a type without such a head: pytorch-transformers has no RoBERTa for questions."""
    if (kind, head) not in _CLASSES:
        able = [one for one, other in _CLASSES if other == head]
        raise UserError(f"there is no {kind} model for {head.replace('_', ' ')}. Choose a {' or '.join(able)} model.")


def empty_model(config: Any, head: str) -> nn.Module:
    """The model with a head, whose weights are not filled yet. Raises UserError for a configuration that cannot be.

    Its encoder computes no padding. A pooler that the head does not read is frozen: every trainable parameter gets a
    gradient in every step.
    """
    kind = type_of(config)
    check_head(kind, head)
    try:
        model: Any = _CLASSES[kind, head](config)
        if kind == "distilbert":
            model.distilbert.transformer = DistilBertEncoder(config, head == _TEXT)
        elif kind != "vit":
            inner = getattr(model, kind)
            inner.encoder = BertEncoder(config, head == _TEXT)
            inner.pooler.requires_grad_((kind, head) == ("bert", _TEXT))
    except (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(
            f"the configuration does not fit a {kind} ({first_line(error)}). Give a model's own."
        ) from error
    return model
