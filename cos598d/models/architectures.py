"""Model types: pytorch-transformers 1.2.0's five and our ViT, with their classes, configurations, vocabularies."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from cos598d.data.library import pytorch_transformers
from cos598d.errors import UserError
from cos598d.models import vit, vit_config
from cos598d.terminal.printable import printable
from cos598d.terminal.reading import read_json

# Its warnings (such as RoBERTa's about every batch without its special tokens) would confuse the user of a training
# run.
logging.getLogger("pytorch_transformers").setLevel(logging.ERROR)

HEADS = {
    "sequence_classification": "ForSequenceClassification",
    "question_answering": "ForQuestionAnswering",
    "image_classification": "ForImageClassification",
}


@dataclass(frozen=True)
class Architecture:
    """One model type.

    prefix            of its class names: "Bert" in BertConfig, BertForSequenceClassification
    sizes             whole numbers > 0 that its config.json must give; otherwise the library would silently take those
                      of its own default model; alternatives are separated by "|"
    dropouts          its configuration's names for dropout probabilities
    vocabulary_files  the files that its tokenizer reads from a folder; none for a type that reads images
    tiny              the smallest shape (`tiny`, `vit-tiny`) in the type's own names
    module            the module of its classes
    head              its simplest one of HEADS
    usual             the default of --model_name_or_path for this type
    """

    prefix: str
    sizes: tuple[str, ...]
    dropouts: tuple[str, ...]
    vocabulary_files: tuple[str, ...]
    tiny: dict[str, int | bool]
    usual: str
    module: ModuleType = pytorch_transformers
    head: str = "sequence_classification"


_BERT_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
_BERT_DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob")
_BERT_TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}

ARCHITECTURES = {
    "bert": Architecture(
        prefix="Bert",
        sizes=(*_BERT_SIZES, "max_position_embeddings"),
        dropouts=_BERT_DROPOUTS,
        vocabulary_files=("vocab.txt",),
        tiny={**_BERT_TINY, "max_position_embeddings": 512},
        usual="minilm",
    ),
    "roberta": Architecture(
        prefix="Roberta",
        sizes=(*_BERT_SIZES, "max_position_embeddings"),
        dropouts=_BERT_DROPOUTS,
        vocabulary_files=("vocab.json", "merges.txt"),
        # RoBERTa counts positions from 2 and has only one segment.
        tiny={**_BERT_TINY, "max_position_embeddings": 514, "type_vocab_size": 1},
        usual="roberta-base",
    ),
    "distilbert": Architecture(
        prefix="DistilBert",
        sizes=("vocab_size", "dim", "n_layers", "n_heads", "hidden_dim", "max_position_embeddings"),
        dropouts=("dropout", "attention_dropout", "seq_classif_dropout", "qa_dropout"),
        vocabulary_files=("vocab.txt",),
        tiny={"dim": 64, "n_layers": 2, "n_heads": 2, "hidden_dim": 128, "max_position_embeddings": 512},
        usual="distilbert-base-uncased",
    ),
    "xlnet": Architecture(
        prefix="XLNet",
        sizes=("n_token|vocab_size", "d_model", "n_layer", "n_head", "d_inner"),
        dropouts=("dropout", "summary_last_dropout"),
        vocabulary_files=("spiece.model",),
        tiny={"d_model": 64, "n_layer": 2, "n_head": 2, "d_inner": 128},
        usual="xlnet-base-cased",
    ),
    "xlm": Architecture(
        prefix="XLM",
        sizes=("n_words|vocab_size", "emb_dim", "n_layers", "n_heads", "max_position_embeddings"),
        dropouts=("dropout", "attention_dropout", "summary_first_dropout"),
        vocabulary_files=("vocab.json", "merges.txt"),
        tiny={"emb_dim": 64, "n_layers": 2, "n_heads": 2, "max_position_embeddings": 512},
        usual="xlm-mlm-en-2048",
    ),
    "vit": Architecture(
        prefix="ViT",
        sizes=(
            *("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
            *("image_size", "patch_size", "num_channels"),
        ),
        dropouts=_BERT_DROPOUTS,
        vocabulary_files=(),
        tiny=vit_config.TINY,
        usual="vit-tiny",
        module=vit,
        head="image_classification",
    ),
}
IMAGE_TYPES = tuple(name for name, one in ARCHITECTURES.items() if not one.vocabulary_files)
TEXT_TYPES = tuple(name for name in ARCHITECTURES if name not in IMAGE_TYPES)


_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a string", dict: "an object"}
# Outside these ranges a configuration builds no model, or one with non-finite numbers; nobody trains more layers.
_RANGES = {
    "layer_norm_eps": (1e-30, 1.0),
    "initializer_range": (0.0, 10.0),
    "embed_init_std": (0.0, 10.0),
    "init_std": (0.0, 10.0),
} | dict.fromkeys(("num_hidden_layers", "n_layers", "n_layer"), (1, 1000))


def config_class(model_type: str) -> type:
    architecture = ARCHITECTURES[model_type]
    return getattr(architecture.module, architecture.prefix + "Config")


def model_class(model_type: str, head: str) -> type[torch.nn.Module]:
    """The library's class for a type and a head. Raises UserError if there is none (RoBERTa's question answering)."""
    suffix = HEADS[head]
    of_types = {name: getattr(one.module, one.prefix + suffix, None) for name, one in ARCHITECTURES.items()}
    found = of_types[model_type]
    if found is None:
        *others, last = (name for name, one in of_types.items() if one is not None)
        raise UserError(
            f"there is no {model_type} model for {head.replace('_', ' ')}. "
            f"Choose --model_type {' or '.join([*filter(None, [', '.join(others)]), last])}."
        )
    return found


def new_config(model_type: str, vocabulary_size: int, sizes: dict[str, int | bool]):
    """A configuration of the given sizes, in the type's own names; everything else has the library's defaults.

    A type that reads images ignores the vocabulary's size.
    """
    if model_type in IMAGE_TYPES:
        return config_class(model_type)(**sizes)
    if model_type == "distilbert":
        sizes = {"sinusoidal_pos_embds": False, **sizes}
    return config_class(model_type)(vocabulary_size, **sizes)


def read_config(path: Path, model_type: str):
    """The configuration in the file `path`. Raises UserError if it is missing, not JSON, or not of this type."""
    try:
        values = read_json(path)
    except FileNotFoundError as error:
        raise UserError(f"there is no {path}. Give a folder that holds a model's config.json.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({error}). Give a model's config.json.") from error
    if not isinstance(values, dict):
        raise UserError(f"{path} holds a JSON {type(values).__name__}, not an object. Give a model's config.json.")
    named = values.get("model_type", model_type)
    if named != model_type:
        known = (
            f"Pass --model_type {named}"
            if named in list(ARCHITECTURES)
            else f"Choose one of {', '.join(ARCHITECTURES)}"
        )
        raise UserError(f"{path} describes a model of type {printable(repr(named), 60)}, not {model_type!r}. {known}.")
    for names in ARCHITECTURES[model_type].sizes:
        value = next((values[name] for name in names.split("|") if name in values), None)
        if type(value) is not int or value < 1:
            raise _wrong(path, names.replace("|", " or "), value, f"a {model_type} model needs a whole number above 0")
    config = new_config(model_type, -1, {})
    _check_types(path, values, config)
    for name, value in values.items():
        # Newer files use names (vocab_size) that are properties here, some of them read-only.
        described = getattr(type(config), name, None)
        if not isinstance(described, property):
            config.__dict__[name] = value
        elif described.fset:
            setattr(config, name, value)
    if getattr(config, "sinusoidal_pos_embds", False) or getattr(config, "sinusoidal_embeddings", False):
        raise UserError(
            f"{path} asks for sinusoidal position embeddings, which pytorch-transformers cannot build on this torch. "
            "Choose a model with learned ones."
        )
    return config


def _check_types(path: Path, values: dict[str, Any], config: Any) -> None:
    """Raise UserError for a value whose type differs from the library's own configuration.

    Names that it lacks come from newer libraries and stay, except those that would replace its methods.
    """
    for name, value in values.items():
        own = vars(config).get(name)
        if name.startswith("__") or callable(getattr(type(config), name, None)):
            raise _wrong(path, name, value, "a configuration has no such setting")
        if own is None:
            continue
        kinds = {bool: (bool,), int: (int,), float: (int, float)}.get(type(own), (type(own),))
        if type(value) not in kinds:
            raise _wrong(path, name, value, f"{_KINDS.get(type(own), type(own).__name__)} is expected")
        if name in _RANGES and not _RANGES[name][0] <= value <= _RANGES[name][1]:
            raise _wrong(path, name, value, f"a number from {_RANGES[name][0]:g} to {_RANGES[name][1]:g} is expected")


def _wrong(path: Path, name: str, value: Any, wanted: str) -> UserError:
    shown = (
        "a list" if isinstance(value, list) else "an object" if isinstance(value, dict) else printable(repr(value), 60)
    )
    return UserError(
        f"{path} gives {shown} for {printable(name, 60)}, where {wanted}. "
        "Give the config.json that belongs to the model."
    )


def longest_sequence(model_type: str, config) -> int | None:
    """The most tokens in an input, including special tokens; None if positions are relative (XLNet), and for images,
    which all have the same number."""
    if model_type == "xlnet" or model_type in IMAGE_TYPES:
        return None
    return config.max_position_embeddings - (2 if model_type == "roberta" else 0)


def vocabulary_length(model_type: str, source: Path | Sequence[str]) -> int:
    """The number of ids in a vocabulary, the largest id plus one, read from the tokenizer's own file.

    `source` is a folder, a vocabulary file, or a list of word pieces. Raises UserError for a missing or invalid file.
    """
    if not isinstance(source, Path):
        return len(source)
    files = ARCHITECTURES[model_type].vocabulary_files
    for file in files if source.is_dir() else ():
        if not (source / file).is_file():
            raise UserError(
                f"{source} holds no {file}, which a {model_type} tokenizer reads. "
                f"Give --tokenizer_name a folder with {' and '.join(files)}."
            )
    path = source / files[0] if source.is_dir() else source
    # Tokens that were added to a saved tokenizer; pytorch-transformers writes {} for none.
    added = path.parent / "added_tokens.json"
    try:
        extra = _largest_id(added) + 1 if added.is_file() else 0
        if path.suffix == ".json":
            return max(_largest_id(path) + 1, extra)
        if path.suffix == ".model":
            from sentencepiece import SentencePieceProcessor

            return max(SentencePieceProcessor(model_file=str(path)).get_piece_size(), extra)
        with path.open(encoding="utf-8") as lines:
            return max(sum(1 for _ in lines), extra)
    except (OSError, ValueError, AttributeError, TypeError, RuntimeError) as error:
        raise UserError(
            f"{path} is not readable as a {model_type} vocabulary ({error}). Give --tokenizer_name another."
        ) from error


def _largest_id(path: Path) -> int:
    """The largest id in a JSON object of tokens and ids; -1 in an empty one."""
    return max(read_json(path).values(), default=-1)
