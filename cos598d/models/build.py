"""The model of a run: found by its name, then built with a task's head and filled with weights."""

import copy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.nn import init
from torch.nn.functional import gelu
from torch.overrides import TorchFunctionMode

from cos598d.data.encoder import Encoder, ImageForm
from cos598d.data.images.encoder import ImageEncoder
from cos598d.data.library import modeling_bert, modeling_distilbert, modeling_xlm, modeling_xlnet
from cos598d.data.text.tokenization import load_encoder
from cos598d.errors import UserError, first_line
from cos598d.models.architectures import (
    ARCHITECTURES,
    IMAGE_TYPES,
    longest_sequence,
    model_class,
    read_config,
    vocabulary_length,
)
from cos598d.models.checkpoint import WEIGHT_FILES, fill_model
from cos598d.models.find import (
    RANDOM_SHAPES,
    find_folder,
    find_weights,
    lowers_case,
    named_config,
    named_vocabulary,
    random_shape,
    revisions,
    shape_vocabulary,
)
from cos598d.models.find_image import find_vit
from cos598d.models.linear import multiply_by_the_faster
from cos598d.models.padding import leave_out_padding
from cos598d.models.products import ProductShape, widest_product
from cos598d.terminal.printable import printable

MODEL_TYPES = tuple(ARCHITECTURES)

# Modules that a task puts on top of the encoder. A file may lack them: they start with random weights.
_HEAD_PARTS = (
    *("classifier", "pre_classifier", "qa_outputs", "sequence_summary", "logits_proj"),
    *("start_logits", "end_logits", "answer_class"),
)
# The library's activations in Python make four passes over memory; torch computes the same functions in one.
_FASTER = {
    modeling_bert.gelu: gelu,
    modeling_distilbert.gelu: gelu,
    modeling_xlm.gelu: gelu,
    modeling_xlnet.gelu: partial(gelu, approximate="tanh"),
}


@dataclass(frozen=True)
class ModelSource:
    """A model that was found but not built yet.

    model_type   one of MODEL_TYPES
    config       pytorch_transformers' configuration of that type, as in the source
    weights      the file of its weights; None: random ones
    vocabulary   the folder or file of its tokenizer, or a list of word pieces; empty for a model that reads images
    lower_case   whether the tokenizer lower-cases text
    description  a phrase for the user: which model, from where, how large
    revisions    the commits of its files on the hub, by the models' names
    images       the encoder of its inputs, for a model that reads images
    product      the shape of the largest product of its linear layers, used to compare precisions
    """

    model_type: str
    config: Any
    weights: Path | None
    vocabulary: Path | list[str]
    lower_case: bool
    description: str
    revisions: Mapping[str, str] = field(default_factory=dict)
    images: ImageEncoder | None = None
    product: ProductShape = ProductShape(rows=1, inputs=1, outputs=1)  # until the model's modules are known

    def load_encoder(self) -> Encoder:
        """The encoder of a task's texts or images for this model. Raises UserError for an invalid vocabulary."""
        return self.images or load_encoder(self.model_type, self.vocabulary, self.lower_case)

    @property
    def longest_sequence(self) -> int | None:
        """The most tokens in an input, including special tokens; None: any number."""
        return longest_sequence(self.model_type, self.config)


def find_model(
    name: str,
    model_type: str = "bert",
    *,
    config_name: str | None = None,
    tokenizer_name: str | None = None,
    cache_dir: str | None = None,
    do_lower_case: bool = False,
    form: ImageForm | None = None,
) -> ModelSource:
    """Find the model that `name` means. Download its files if they are on the hub and not in the cache.

    `name` is, tried in this order: `minilm`, `tiny`, `bert-base`, `vit-tiny`, `vit-base` (write ./tiny for a folder of
    that name), a folder, a name on the hub (NAME@REVISION for another revision than the main branch's). `config_name`
    and `tokenizer_name` take the configuration or the vocabulary from another such name or a file. `cache_dir` replaces
    the hub's cache folder. Text is lower-cased with `do_lower_case`; otherwise as the vocabulary's
    tokenizer_config.json says; otherwise if the name contains "uncased". `form` is that of a task's images.

    The weights are not read (MiniLM's are hashed). Raises UserError for anything that cannot work.
    """
    if model_type not in ARCHITECTURES:
        raise UserError(f"there is no model type {model_type!r}. Choose one of {', '.join(MODEL_TYPES)}.")
    if model_type in IMAGE_TYPES:
        found = find_vit(name, model_type, config_name, cache_dir, form)
        source = ModelSource(
            model_type=model_type,
            config=found.config,
            weights=found.weights,
            vocabulary=[],
            lower_case=False,
            description=found.description,
            revisions=revisions(found.weights, found.config_file),
            images=found.encoder,
        )
    else:
        source = _find_text_model(name, model_type, config_name, tokenizer_name, cache_dir, do_lower_case)
    model = unfilled_model(model_type, ARCHITECTURES[model_type].head, source.config)
    parameters = count_parameters(model)
    memory = psutil.virtual_memory().total
    if 4 * parameters > memory:
        raise UserError(
            f"the configuration ({config_name or name}) makes a model of {4 * parameters / 1e9:.3g} GB, and this "
            f"machine has {memory / 1e9:.3g} GB of memory. Choose a smaller model."
        )
    description = f"{source.description}, {parameters / 1e6:.1f} M parameters"
    return replace(source, description=description, product=widest_product(model))


def _find_text_model(
    name: str,
    model_type: str,
    config_name: str | None,
    tokenizer_name: str | None,
    cache_dir: str | None,
    do_lower_case: bool,
) -> ModelSource:
    files = ARCHITECTURES[model_type].vocabulary_files
    if tokenizer_name:
        vocabulary, lower_case = named_vocabulary(tokenizer_name, model_type, cache_dir)
    if name in RANDOM_SHAPES:
        weights = None
        if not tokenizer_name:
            vocabulary, lower_case = shape_vocabulary(name, model_type)
        description = f"tiny {model_type}, random weights" if name == "tiny" else "BERT-base's shape, random weights"
    else:
        needed: list[tuple[str, ...]] = [] if config_name else [("config.json",)]
        needed += [WEIGHT_FILES] if tokenizer_name else [WEIGHT_FILES, *((file,) for file in files)]
        folder, description = find_folder(name, model_type, needed, cache_dir)
        weights = find_weights(folder, name)
        if not tokenizer_name:
            vocabulary, lower_case = folder, lowers_case(folder, name)

    length = vocabulary_length(model_type, vocabulary)
    config_file = None  # if it is not next to the weights
    if config_name:
        config, config_file = named_config(config_name, model_type, length, cache_dir)
    elif weights is None:
        config = random_shape(name, model_type, length)
    else:
        config = read_config(folder / "config.json", model_type)
    if length > config.vocab_size:
        raise UserError(
            f"the vocabulary ({tokenizer_name or name}) has {length} entries, but the model ({config_name or name}) "
            f"has embeddings for {config.vocab_size}. Choose a vocabulary and a model that belong together."
        )
    return ModelSource(
        model_type=model_type,
        config=config,
        weights=weights,
        vocabulary=vocabulary,
        lower_case=do_lower_case or lower_case,
        description=description,
        revisions=revisions(weights, vocabulary, config_file),
    )


def build_model(source: ModelSource, head: str, num_labels: int, dropout: float | None, seed: int) -> torch.nn.Module:
    """The model of `source` with a head, one of `architectures.HEADS` that its type has, on the CPU, float32.

    `num_labels` is the head's number of outputs; 1 means regression. `dropout` replaces all dropout probabilities; None
    keeps the configuration's. Weights in no file (a new head, random shapes) are drawn by the library's rule for the
    type, from a generator seeded with `seed`. They are the same on every rank, and the global generators do not change.
    The returned model is in training mode. A question answering model scores padding as impossible if it is called with
    attention_mask=.

    Raises UserError if the weights do not fit, and for a type without such a head.
    """
    model = bare_model(source, head, num_labels, dropout)
    new: list[torch.nn.Module] = [model]
    if source.weights is not None:
        may_be_new = [*_HEAD_PARTS, *_unused_parts(source.model_type, head)]
        # A model that was trained on photographs of some classes may be fine-tuned for others.
        may_differ = ["classifier"] if source.model_type in IMAGE_TYPES else []
        new = [model.get_submodule(part) for part in fill_model(model, source.weights, may_be_new, may_differ)]
    draw: Callable[[torch.nn.Module], None] = getattr(model, "_init_weights")  # noqa: B009 - torch's type hides it
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        for module in new:
            module.apply(draw)

    if source.model_type == "xlm":
        # Its forward pass computes its positions in a way that torch warns about.
        warnings.filterwarnings("ignore", message="The number of elements in the out tensor")
    return model.train()


def bare_model(source: ModelSource, head: str, num_labels: int, dropout: float | None = None) -> torch.nn.Module:
    """As `build_model`, but without values in its weights: for its shapes, which take almost no memory."""
    config = copy.deepcopy(source.config)
    config.num_labels = num_labels
    if dropout is not None:
        for name in ARCHITECTURES[source.model_type].dropouts:
            setattr(config, name, dropout)
    model = unfilled_model(source.model_type, head, config)
    leave_out_padding(model, head)
    for module in model.modules():
        for name, value in vars(module).items():
            if callable(value) and value in _FASTER:
                setattr(module, name, _FASTER[value])
    multiply_by_the_faster(model)
    return model


def uses_every_parameter(model_type: str, head: str) -> bool:
    """Whether every parameter gets a gradient in every step, whatever the configuration.

    Exceptions: BERT's pooler under question answering, and RoBERTa's always; XLNet's mask embedding and XLM's language
    embeddings, which only pretraining uses; and both types' answer class for SQuAD 1.1.
    """
    return model_type in ("distilbert", "vit") or (model_type == "bert" and head == "sequence_classification")


def count_parameters(model: torch.nn.Module) -> int:
    """The number of parameters, including frozen ones; tied ones count once."""
    return sum(parameter.numel() for parameter in model.parameters())


def _unused_parts(model_type: str, head: str) -> list[str]:
    """Modules of the encoder that never reach the output, so that a file may lack them."""
    if model_type == "roberta":
        return ["roberta.pooler"]
    return ["bert.pooler"] if (model_type, head) == ("bert", "question_answering") else []


class _NoDraws(TorchFunctionMode):
    """A context in which filling a tensor with random numbers does nothing: the tensor keeps uninitialized memory."""

    _DRAWS = frozenset(
        (torch.Tensor.normal_, torch.Tensor.uniform_, init.normal_, init.uniform_, init.kaiming_uniform_)
    )

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in self._DRAWS:
            return args[0] if args else kwargs["tensor"]
        return function(*args, **(kwargs or {}))


def unfilled_model(model_type: str, head: str, config) -> torch.nn.Module:
    """A model whose weights are not filled yet. Its memory is not touched, so it costs almost nothing."""
    wanted = model_class(model_type, head)
    try:
        with _NoDraws():
            return wanted(config)
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(
            f"the model's configuration does not fit a {wanted.__name__} "
            f"({type(error).__name__}: {printable(first_line(error), 200)}). "
            "Give the config.json that belongs to a model of this type."
        ) from error
