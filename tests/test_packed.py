"""Models without padding compute what pytorch-transformers' own padded forwards compute. Imports: the oracle's classes
and our modules next to each other, which no run shows."""

import copy

import pytest
import torch
from pytorch_transformers import (
    BertForQuestionAnswering,
    BertForSequenceClassification,
    DistilBertForQuestionAnswering,
    DistilBertForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)
from torch.nn.functional import cross_entropy

from cos598d.models.build import ModelSource, build_model, find_model
from cos598d.models.packed import Packing

CLASSIFIES, ANSWERS = "sequence_classification", "question_answering"
LIBRARY = {
    ("bert", CLASSIFIES): BertForSequenceClassification,
    ("bert", ANSWERS): BertForQuestionAnswering,
    ("distilbert", CLASSIFIES): DistilBertForSequenceClassification,
    ("distilbert", ANSWERS): DistilBertForQuestionAnswering,
    ("roberta", CLASSIFIES): RobertaForSequenceClassification,
}
LENGTHS = [9, 4, 6, 1, 12]


def source_of(kind: str) -> ModelSource:
    if kind != "roberta":
        return find_model("tiny", model_type=kind)
    tiny = find_model("tiny")
    sizes = {name: getattr(tiny.config, name) for name in ("hidden_size", "num_hidden_layers", "intermediate_size")}
    config = RobertaConfig(200, num_attention_heads=2, max_position_embeddings=40, type_vocab_size=1, **sizes)
    return ModelSource(config, None, tiny.encoder, "tiny roberta")


def batch(kind: str, head: str, more_padding: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    width = max(LENGTHS) + more_padding
    ids = torch.randint(5, 200, (len(LENGTHS), max(LENGTHS)), generator=generator)
    mask = (torch.arange(width) < torch.tensor(LENGTHS)[:, None]).long()
    ids = torch.nn.functional.pad(ids, (0, more_padding)) * mask
    ids[:, 0] = 0  # RoBERTa's <s>
    found = {"input_ids": ids, "attention_mask": mask}
    if kind == "bert":
        found["token_type_ids"] = (torch.arange(width) >= 3).long() * mask
    if head == CLASSIFIES:
        return found | {"labels": torch.tensor([0, 1, 1, 0, 1])}
    begins = torch.tensor([2, 0, 5, 0, 7])
    return found | {"start_positions": begins, "end_positions": torch.minimum(begins + 1, torch.tensor(LENGTHS) - 1)}


@pytest.mark.parametrize(("kind", "head"), LIBRARY)
def test_losses_and_gradients_are_the_librarys(kind, head):
    source = source_of(kind)
    ours = build_model(source, head, 2, 0.0, seed=1).double()
    config = copy.deepcopy(ours.config)
    theirs = LIBRARY[kind, head](config).double()
    theirs.load_state_dict(ours.state_dict())
    for parameter in (p for model in (ours, theirs) for p in model.parameters()):
        parameter.data.mul_(3)  # so that the layers are far from linear
    inputs = batch(kind, head)
    loss = ours(**inputs)[0]
    assert torch.equal(loss, ours(**batch(kind, head, more_padding=7))[0])
    if head == CLASSIFIES:
        expected = theirs(**inputs)[0]
    else:  # the library's own loss counts padding's scores: its outputs, with those left out
        targets = [inputs.pop(name) for name in ("start_positions", "end_positions")]
        sides = [side.masked_fill(inputs["attention_mask"] == 0, -torch.inf) for side in theirs(**inputs)]
        expected = sum(cross_entropy(side, target) for side, target in zip(sides, targets, strict=True)) / 2
    loss.backward()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-9)
    wanted = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    found = {name: p.grad for name, p in ours.named_parameters() if p.requires_grad}
    assert found.keys() == wanted.keys(), "every trainable parameter has a gradient, and the library's others have none"
    for name, gradient in found.items():
        assert (gradient - wanted[name]).abs().max() <= 1e-9, name


def test_only_tokens_are_computed_and_in_a_classifiers_last_layer_only_the_first():
    rows: dict[str, list[int]] = {CLASSIFIES: [], ANSWERS: []}
    for head, seen in rows.items():
        model = build_model(source_of("bert"), head, 2, 0.0, seed=1)
        for layer in model.bert.encoder.layer:
            layer.output.dense.register_forward_hook(lambda _, inputs, __, seen=seen: seen.append(len(inputs[0])))
        model(**batch("bert", head))
    assert rows == {CLASSIFIES: [sum(LENGTHS), len(LENGTHS)], ANSWERS: [sum(LENGTHS)] * 2}


def test_attention_drops_weights_and_scales_the_others():
    packing, dropout, values = Packing([4, 2]), torch.nn.Dropout(0.25), torch.ones(6, 2000)
    torch.manual_seed(1)
    drawn = packing.attend(0 * values, values, values, 1000, dropout).view(6, 1000, 2).transpose(0, 1)
    assert drawn.mean().item() == pytest.approx(1.0, abs=0.01)
    # With equal weights of 1/length, each dropped with probability p, the sum's variance is p / (1 - p) / length.
    assert drawn[:, :4].var().item() == pytest.approx(0.25 / 0.75 / 4, rel=0.06)
    assert torch.equal(packing.attend(values, values, values, 2, dropout.eval()), values)


def test_a_copy_computes_with_its_own_weights():
    model, inputs = build_model(source_of("bert"), CLASSIFIES, 2, 0.0, seed=1), batch("bert", CLASSIFIES)
    other, before = copy.deepcopy(model), model(**inputs)[0].item()
    for parameter in other.parameters():
        parameter.data.mul_(3)
    assert model(**inputs)[0].item() == before != other(**inputs)[0].item()
