"""Padding skipped: in what BERT's encoder computes, and in the scores of a question answering head.

The library computes padding in a batch, which costs as much as tokens. Here the tokens of all examples are packed,
layers compute only these, and attention stays within each example. Losses and gradients are the same up to rounding: no
token attends to padding, and nothing reads its outputs.
"""

import copy
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from cos598d.data.library import modeling_bert

# oneDNN prepares a product for each new number of rows, which takes 1 to 4 ms.
MULTIPLE = 32


class Packing:
    """The positions of the tokens in a padded batch.

    mask: (batch, sequence), True for tokens. Packed tokens are (tokens, width): example after example, in the batch's
    order. Some padding follows, if there is any, to make a multiple of MULTIPLE. `asked` are the indices of the tokens
    whose output a layer computes; None for all.
    """

    def __init__(self, mask: torch.Tensor):
        self.lengths: list[int] = mask.sum(dim=1).tolist()
        self._shape = mask.shape
        tokens, padding = (side.flatten().nonzero().squeeze(1) for side in (mask, ~mask))
        fillers = padding[: -len(tokens) % MULTIPLE]
        self._places = torch.cat([tokens, fillers])
        self._parts = [*self.lengths, len(fillers)] if len(fillers) else self.lengths
        self._asked: torch.Tensor | None = None

    def pack(self, padded: torch.Tensor) -> torch.Tensor:
        """The tokens of (batch, sequence, width): (tokens, width)."""
        return padded.flatten(0, 1).index_select(0, self._places)

    def unpack(self, tokens: torch.Tensor) -> torch.Tensor:
        """What was computed: (batch, sequence, width) with any values in padding, or first tokens (batch, 1, width)."""
        if self._asked is not None:
            return tokens.unsqueeze(1)
        padded = tokens.new_zeros(self._shape.numel(), tokens.shape[1])
        return padded.index_copy(0, self._places, tokens).unflatten(0, self._shape)

    def asking_for_first(self) -> "Packing":
        """The same packing, but only the output for each example's first token is computed."""
        ends, first = torch.tensor(self.lengths).cumsum(0), copy.copy(self)
        first._asked = ends - torch.tensor(self.lengths)
        return first

    def asked(self, tokens: torch.Tensor) -> torch.Tensor:
        """The rows of (tokens, width) whose output is computed."""
        return tokens if self._asked is None else tokens.index_select(0, self._asked)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, heads: int, dropout: float
    ) -> torch.Tensor:
        """Attention: each token's mean of its example's values, weighted by its query's fit to their keys, per head.

        key, value: (tokens, width). query and the result: (asked, width), for the tokens whose output is computed.
        `dropout` is the probability with which a weight is dropped.
        """
        if query.dtype.itemsize == 2:  # torch's kernel for 16 bits has a backward that takes ten times as long
            query, key, value = query.float(), key.float(), value.float()
        asked = self._parts if self._asked is None else [1] * len(self.lengths)
        sides = ((query, asked), (key, self._parts), (value, self._parts))
        # Each (1, heads, tokens of the example, width / heads), as views.
        queries, keys, values = (
            x.unflatten(1, (1, heads, -1)).permute(1, 2, 0, 3).split(lengths, 2) for x, lengths in sides
        )
        with torch.autocast("cpu", enabled=False):  # zip drops the keys of padding, which have no query
            mixed = [scaled_dot_product_attention(q, k, v, dropout_p=dropout) for q, k, v in zip(queries, keys, values)]
        return torch.cat([part.transpose(1, 2) for part in mixed], dim=1).flatten(2).squeeze(0)


class PackedSelfAttention(modeling_bert.BertSelfAttention):
    """The library's self-attention, which also takes packed tokens, with a Packing in place of its mask."""

    def forward(self, hidden_states, attention_mask, head_mask=None):
        if not isinstance(attention_mask, Packing):
            return super().forward(hidden_states, attention_mask, head_mask)
        query = self.query(attention_mask.asked(hidden_states))
        key, value = self.key(hidden_states), self.value(hidden_states)
        dropout = self.dropout.p if self.training else 0.0
        return (attention_mask.attend(query, key, value, self.num_attention_heads, dropout),)


class PackedAttention(modeling_bert.BertAttention):
    """The same for the block of self-attention plus the sum of its input and output."""

    def forward(self, input_tensor, attention_mask, head_mask=None):
        if not isinstance(attention_mask, Packing):
            return super().forward(input_tensor, attention_mask, head_mask)
        mixed = self.self(input_tensor, attention_mask)[0]
        return (self.output(mixed, attention_mask.asked(input_tensor)),)


class PackedEncoder(modeling_bert.BertEncoder):
    """The library's encoder, which packs on a CPU. If the head reads only first tokens (`first_only`), the last layer
    computes only these.

    Other cases use the library's code: returned attention or hidden states, head masks, and an example that does not
    begin with a token. So does everything on a GPU, where counting tokens would make the host wait.
    """

    first_only = False

    def forward(self, hidden_states, attention_mask, head_mask=None):
        is_token = attention_mask[:, 0, 0] == 0  # the library's mask: 0 for tokens, -10000 for padding
        masks_heads = head_mask is not None and any(mask is not None for mask in head_mask)
        says_more = self.output_attentions or self.output_hidden_states
        if masks_heads or says_more or hidden_states.device.type != "cpu" or not is_token[:, 0].all():
            return super().forward(hidden_states, attention_mask, head_mask)
        packing = Packing(is_token)
        tokens = packing.pack(hidden_states)
        for number, layer in enumerate(self.layer, start=1):
            if self.first_only and number == len(self.layer):
                packing = packing.asking_for_first()
            tokens = layer(tokens, packing)[0]
        return (packing.unpack(tokens),)


_PACKED: dict[type, type[nn.Module]] = {
    modeling_bert.BertEncoder: PackedEncoder,
    modeling_bert.BertAttention: PackedAttention,
    modeling_bert.BertSelfAttention: PackedSelfAttention,
}


def leave_out_padding(model: nn.Module, head: str) -> None:
    """Make a model of the library, with one of its heads, skip padding. A vision transformer has none.

    BERT's and RoBERTa's encoders no longer compute padding; the other types' do. A question answering head scores it as
    impossible. Modules, weights and their names stay. An encoder's classes become subclasses of the library's.
    """
    for module in model.modules():
        packed = _PACKED.get(type(module))
        if packed is not None:
            module.__class__ = packed
        if isinstance(module, PackedEncoder):
            module.first_only = head == "sequence_classification"
    outputs = getattr(model, "qa_outputs", None)
    if head == "question_answering" and isinstance(outputs, nn.Linear):
        _mask_scores(model, outputs)


def leaves_out_padding(model: nn.Module) -> bool:
    """Whether padding costs almost nothing on a CPU."""
    return any(isinstance(module, PackedEncoder) for module in model.modules())


def cuts_by_length(model: nn.Module, on_cpu: bool) -> bool:
    """Whether a rank's share of a batch is split into groups of similar length, because padding would cost time."""
    return on_cpu and not leaves_out_padding(model)


def _mask_scores(model: nn.Module, outputs: nn.Linear) -> None:
    """Exclude padding from the softmax over a sequence's tokens, in which the library's heads include it.

    Otherwise a loss would depend on how far its batch is padded, and so on the number of ranks. Hooks do this, so the
    model's class and the names of its weights stay the library's.
    """
    masks: list[torch.Tensor] = []

    def keep_mask(module: nn.Module, arguments: tuple, named: dict[str, Any]) -> None:
        masks[:] = [named["attention_mask"]] if named.get("attention_mask") is not None else []

    def mask_scores(module: nn.Module, arguments: tuple, scores: torch.Tensor) -> torch.Tensor:
        for mask in masks:  # (batch, sequence); scores: (batch, sequence, 2)
            scores = scores.masked_fill(mask.unsqueeze(-1) == 0, torch.finfo(scores.dtype).min)
        return scores

    model.register_forward_pre_hook(keep_mask, with_kwargs=True)
    outputs.register_forward_hook(mask_scores)
