"""The model of a run: found by its name, then built with a task's head and filled with weights."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from cos598d.data.encoders import Encoder, ImageEncoder, ImageForm, TextEncoder, load_encoder, word_pieces
from cos598d.data.samples import vocabulary
from cos598d.errors import UserError
from cos598d.models import vit
from cos598d.models.checkpoint import fill_model
from cos598d.models.configs import CONFIGS, DROPOUTS, TINY, empty_model, read_config, type_of
from cos598d.models.names import WAYS_OUT, find_folder, find_weights, installed_minilm

BERT_BASE_VOCABULARY = 28996  # of the cased model; its other sizes are the library's defaults
# Modules that a task puts on top of the encoder. A file may lack them: they start with random weights.
_HEAD_PARTS = ("classifier", "pre_classifier", "qa_outputs")


@dataclass(frozen=True)
class ModelSource:
    """A model that was found but not built yet.

    config: as in the source. weights: their file; None: random ones. encoder: of its texts or images. description: a
    phrase for the user.
    """

    config: Any
    weights: Path | None
    encoder: Encoder
    description: str

    @property
    def model_type(self) -> str:
        """bert, roberta, distilbert or vit."""
        return type_of(self.config)

    @property
    def revisions(self) -> Mapping[str, str]:
        """The commit of its files on the hub, by the model's name; empty for other files."""
        folder = self.weights.parent if self.weights else Path()
        name = "/".join(folder.parent.parent.name.split("--")[1:])
        return {name: folder.name} if folder.parent.name == "snapshots" else {}

    @property
    def longest_sequence(self) -> int | None:
        """The most tokens in an input, including special tokens; None for images."""
        most: int | None = getattr(self.config, "max_position_embeddings", None)
        return most - 2 if most is not None and self.model_type == "roberta" else most


def find_model(
    name: str,
    form: ImageForm | None = None,
    *,
    model_type: str | None = None,
    cache_dir: str | None = None,
    do_lower_case: bool = False,
) -> ModelSource:
    """Find the model that `name` means. Download its files if they are on the hub and not in the cache.

    `name` is, tried in this order: `minilm`, `tiny`, `bert-base`, `vit-tiny`, `vit-base` (write ./tiny for a folder of
    that name), a folder, a name on the hub (NAME@REVISION for another revision than the main branch's). `form` is that
    of a task's images; None for texts. `model_type` is what the model must be, if given. `cache_dir` replaces the
    hub's cache folder. `do_lower_case` lower-cases text, also if the tokenizer's files do not.

    The weights are not read. Raises UserError for anything that cannot work.
    """
    if name in ("tiny", "bert-base"):
        source = _random_text(name, model_type or "bert")
    elif name in ("vit-tiny", "vit-base"):
        source = _random_image(name, form or ImageForm(224, 3))
    else:
        folder = find_folder(name, cache_dir)
        weights = find_weights(folder)
        if weights is None:
            raise UserError(f"{folder} has no model.safetensors or pytorch_model.bin. {WAYS_OUT}")
        config = read_config(folder / "config.json")
        kind = type_of(config)
        if kind == "vit":
            encoder: Encoder = ImageEncoder(config.image_size, config.num_channels)
        else:
            encoder = load_encoder(folder, kind == "bert", do_lower_case, name)
        words = "MiniLM-L6 (minilm), pretrained" if name == "minilm" else f"{kind} from {name}"
        source = ModelSource(config, weights, encoder, words)
    _check(name, source, form, model_type)
    with torch.device("meta"):
        model = build_model(source, "sequence_classification" if form is None else "image_classification", 2, None, 0)
    return replace(source, description=f"{source.description}, {count_parameters(model) / 1e6:.1f} M parameters")


def _random_text(name: str, kind: str) -> ModelSource:
    if name == "bert-base" and kind == "bert":
        folder = installed_minilm()
        # A word-piece vocabulary without its last entries still works: their words split into smaller pieces.
        pieces = (folder / "vocab.txt").read_text(encoding="utf-8").splitlines() if folder else vocabulary()
        encoder, config = word_pieces(pieces[:BERT_BASE_VOCABULARY], True), CONFIGS[kind](BERT_BASE_VOCABULARY)
        return ModelSource(config, None, TextEncoder(encoder), "BERT-base's shape, random weights")
    if kind not in (("bert", "distilbert") if name == "tiny" else ("bert",)):
        raise UserError(f"{name} cannot be a model of type {kind}. Leave --model_type out, or choose another model.")
    pieces = vocabulary()
    encoder, config = word_pieces(pieces, True), CONFIGS[kind](len(pieces), **TINY[kind])
    if kind == "distilbert":
        config.sinusoidal_pos_embds = False
    return ModelSource(config, None, TextEncoder(encoder, kind == "bert"), f"tiny {kind}, random weights")


def _random_image(name: str, form: ImageForm) -> ModelSource:
    """A random shape takes images unchanged: `vit-tiny` in patches that suit their size, `vit-base` in those of 16."""
    patch = vit.patch_of(form.size) if name == "vit-tiny" else vit.ViTConfig.patch_size
    if not 1 <= form.size // patch <= vit.MOST_PATCHES or form.size % patch:
        wanted = f"{name} needs images of at most {vit.MOST_PATCHES} patches of {patch} pixels per side"
        raise UserError(f"{wanted}, not {form.size} pixels. Give --image_size a multiple of 16 (vit-tiny: of 4 or 8).")
    sizes: dict[str, Any] = vit.TINY if name == "vit-tiny" else {}
    config = vit.ViTConfig(image_size=form.size, patch_size=patch, num_channels=form.channels, **sizes)
    words = "tiny vit" if name == "vit-tiny" else "ViT-Base's shape"
    return ModelSource(config, None, ImageEncoder(form.size, form.channels), f"{words}, random weights")


def _check(name: str, source: ModelSource, form: ImageForm | None, model_type: str | None) -> None:
    kind, config, encoder = source.model_type, source.config, source.encoder
    if model_type is not None and kind != model_type:
        raise UserError(f"{name} is a model of type {kind}, not {model_type}. Pass --model_type {kind}, or none.")
    if (kind == "vit") != (form is not None):
        reads, has, way = ("images", "texts", "minilm or tiny") if kind == "vit" else ("texts", "images", "vit-tiny")
        raise UserError(f"{name} reads {reads}, and the task has {has}. Choose {way}.")
    if form is not None and form.is_asked_for and form.size != config.image_size:
        size = f"{name} reads images of {config.image_size} pixels per side"
        raise UserError(f"--image_size {form.size}: {size}. Leave the flag out, and images are scaled to that.")
    if isinstance(encoder, TextEncoder) and encoder.vocab_size > config.vocab_size:
        counts = f"has {encoder.vocab_size} entries, and its model embeds {config.vocab_size}"
        raise UserError(f"the vocabulary of {name} {counts}. Choose a folder whose files belong together.")


class NothingDrawn(TorchFunctionMode):
    """Within it no number is drawn into a tensor: on meta tensors torch would load its decompositions for that."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_draw = getattr(func, "__name__", "") in ("normal_", "uniform_", "trunc_normal_", "kaiming_uniform_")
        return (args[0] if args else kwargs["tensor"]) if is_draw else func(*args, **kwargs)


def build_model(source: ModelSource, head: str, num_labels: int, dropout: float | None, seed: int) -> nn.Module:
    """The model of `source` with a head, float32, in training mode, and the same on every rank.

    head: "sequence_classification", "question_answering" or "image_classification". `num_labels` is its number of
    outputs; 1 means regression. `dropout` replaces all dropout probabilities; None keeps the configuration's. Weights
    in no file (a new head, random shapes) are drawn by the library's rule from a generator seeded with `seed`; the
    global generators do not change. A question answering model scores padding as impossible.

    Under `with torch.device("meta")` the model has shapes and no values. Raises UserError if the weights do not fit,
    and for a type without such a head.
    """
    kind, config, is_bare = source.model_type, copy.deepcopy(source.config), torch.get_default_device().type == "meta"
    config.num_labels = num_labels
    for name in DROPOUTS[kind] if dropout is not None else ():
        setattr(config, name, dropout)
    with torch.device("meta"), NothingDrawn():
        model = empty_model(config, head)
    if is_bare:
        return model.train()
    model.to_empty(device="cpu")
    new: list[nn.Module] = [model]
    if source.weights is not None:
        frozen = {name.rpartition(".dense")[0] for name, p in model.named_parameters() if not p.requires_grad}
        # A model that was trained on photographs of some classes may be fine-tuned for others.
        may_differ = ["classifier"] if kind == "vit" else []
        found = fill_model(model, source.weights, [*_HEAD_PARTS, *frozen], may_differ)
        new = [model.get_submodule(part) for part in found]
    draw: Any = getattr(model, "_init_weights")  # noqa: B009 - torch's type hides it
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        for module in new:
            module.apply(draw)
    return model.train()


def count_parameters(model: nn.Module) -> int:
    """The number of parameters, including frozen ones; tied ones count once."""
    return sum(parameter.numel() for parameter in model.parameters())
