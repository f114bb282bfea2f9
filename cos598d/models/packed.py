"""BERT, RoBERTa and DistilBERT without their padding: forwards of ours over pytorch-transformers' own modules.

The library pads a batch and computes the padding too, which costs as much as tokens do. Losses and gradients without
it are the same up to rounding, since no token attends to padding and no head reads its outputs.

1. The encoder packs the tokens of all examples: (batch, sequence, width) to (tokens, width).
2. Each layer multiplies these rows only. Attention stays within each example.
3. For a head that reads first tokens only, the last layer computes no other output.
4. The rows are put back into (batch, sequence, width), with zeros in padding.

On a GPU, where counting tokens would make the host wait, the library's own forwards stay.
"""

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from cos598d.models.library import modeling_bert, modeling_distilbert

# The library's gelu in Python makes four passes over memory; torch computes the same function in one.
_FASTER = {modeling_bert.gelu: gelu, modeling_distilbert.gelu: gelu}
Outputs = tuple[torch.Tensor, ...]


class Packing(NamedTuple):
    """lengths: the examples' numbers of tokens, one example after the other. firsts: the rows of their first tokens, if
    a layer's output is asked only for these; None for all rows."""

    lengths: list[int]
    firsts: torch.Tensor | None = None

    def asked(self, tokens: torch.Tensor) -> torch.Tensor:
        """The rows of (tokens, width) whose output is computed."""
        return tokens if self.firsts is None else tokens.index_select(0, self.firsts)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, heads: int, dropout: nn.Dropout
    ) -> torch.Tensor:
        """Each asked token's mean of its example's values, weighted by its query's fit to their keys, per head."""
        dtype = query.dtype
        if dtype.itemsize == 2:  # torch's kernel for 16 bits has a backward that takes ten times as long
            query, key, value = query.float(), key.float(), value.float()
        asked = self.lengths if self.firsts is None else [1] * len(self.lengths)
        sides = ((query, asked), (key, self.lengths), (value, self.lengths))
        # Each (1, heads, tokens of the example, width / heads), as views.
        parts = [x.unflatten(1, (1, heads, -1)).permute(1, 2, 0, 3).split(lengths, 2) for x, lengths in sides]
        probability = dropout.p if dropout.training else 0.0
        with torch.autocast("cpu", enabled=False):
            mixed = [
                scaled_dot_product_attention(q, k, v, dropout_p=probability) for q, k, v in zip(*parts, strict=True)
            ]
        return torch.cat([part.transpose(1, 2) for part in mixed], dim=1).flatten(2).squeeze(0)


class BertLayer(modeling_bert.BertLayer):
    """The library's layer, which also takes packed tokens, with a Packing in place of its mask."""

    def forward(self, hidden_states: torch.Tensor, attention_mask: Any, head_mask: Any = None) -> Outputs:
        if not isinstance(attention_mask, Packing):
            return super().forward(hidden_states, attention_mask, head_mask)
        own, packing, asked = self.attention.self, attention_mask, attention_mask.asked(hidden_states)
        sides = own.query(asked), own.key(hidden_states), own.value(hidden_states)
        asked = self.attention.output(packing.attend(*sides, own.num_attention_heads, own.dropout), asked)
        activation = self.intermediate.intermediate_act_fn
        inner = _FASTER.get(activation, activation)(self.intermediate.dense(asked))
        return (self.output(inner, asked),)


class DistilBertLayer(modeling_distilbert.TransformerBlock):
    """The same for DistilBERT's."""

    def forward(self, x: torch.Tensor, attn_mask: Any = None, head_mask: Any = None) -> Outputs:
        if not isinstance(attn_mask, Packing):
            return super().forward(x, attn_mask, head_mask)
        own, asked = self.attention, attn_mask.asked(x)
        sides = own.q_lin(asked), own.k_lin(x), own.v_lin(x)
        asked = self.sa_layer_norm(own.out_lin(attn_mask.attend(*sides, own.n_heads, own.dropout)) + asked)
        inner = _FASTER.get(self.ffn.activation, self.ffn.activation)(self.ffn.lin1(asked))
        return (self.output_layer_norm(self.ffn.dropout(self.ffn.lin2(inner)) + asked),)


class _Encoder(nn.Module):
    """The library's encoder, which packs on a CPU. `first_only`: the head reads first tokens only."""

    kind: Any  # of its layers

    def __init__(self, config: Any, first_only: bool):
        super().__init__(config)
        self.first_only, layers = first_only, self.get_submodule("layer")
        self.layer = nn.ModuleList(self.kind(config) for _ in layers.children())

    def forward(self, x: torch.Tensor, attn_mask: torch.Tensor, head_mask: Any = None) -> Outputs:
        if x.device.type != "cpu":
            return super().forward(x, attn_mask, head_mask)
        # BERT's mask is 0 for tokens and -10000 for padding, (batch, 1, 1, sequence); DistilBERT's is not 0 for tokens
        is_token = attn_mask[:, 0, 0] == 0 if attn_mask.dim() == 4 else attn_mask != 0
        packing, places = Packing(is_token.sum(dim=1).tolist()), is_token.flatten().nonzero().squeeze(1)
        tokens = x.flatten(0, 1).index_select(0, places)
        for number, layer in enumerate(self.layer, start=1):
            if self.first_only and number == len(self.layer):
                lengths = torch.tensor(packing.lengths)
                tokens = layer(tokens, packing._replace(firsts=lengths.cumsum(0) - lengths))[0]
                return (tokens.unsqueeze(1),)
            tokens = layer(tokens, packing)[0]
        empty = tokens.new_zeros(is_token.numel(), tokens.shape[1])
        return (empty.index_copy(0, places, tokens).unflatten(0, is_token.shape),)


class BertEncoder(_Encoder, modeling_bert.BertEncoder):
    """BERT's and RoBERTa's."""

    kind = BertLayer


class DistilBertEncoder(_Encoder, modeling_distilbert.Transformer):
    """DistilBERT's."""

    kind = DistilBertLayer


class _Answers(nn.Module):
    """Question answering whose softmax leaves padding out. The library's includes it, so that a loss would depend on
    how far its batch is padded, and so on the number of ranks."""

    base_model_prefix: str

    def forward(self, attention_mask: torch.Tensor, start_positions=None, end_positions=None, **inputs) -> Outputs:
        """Ids, mask and segments, (batch, sequence), to scores of first and last tokens; with targets, loss first."""
        tokens = getattr(self, self.base_model_prefix)(attention_mask=attention_mask, **inputs)[0]
        scores = self.get_submodule("qa_outputs")(getattr(self, "dropout", nn.Identity())(tokens))
        scores = scores.masked_fill(attention_mask.unsqueeze(-1) == 0, torch.finfo(scores.dtype).min)
        begins, ends = scores.unbind(-1)
        if start_positions is None:
            return begins, ends
        return (cross_entropy(begins, start_positions) + cross_entropy(ends, end_positions)) / 2, begins, ends


class BertAnswers(_Answers, modeling_bert.BertForQuestionAnswering):
    """BERT's, with the library's modules."""


class DistilBertAnswers(_Answers, modeling_distilbert.DistilBertForQuestionAnswering):
    """DistilBERT's, with the library's modules."""
