"""--activation_checkpointing keeps fewer activations, and the gradients have the same bits."""

import copy

import pytest
import torch

from cos598d.data.encoders import ImageForm
from cos598d.models.build import build_model, find_model
from cos598d.models.recompute import recompute_activations
from cos598d.records.unfinished import read_summary

TEXT, IMAGE, ANSWER = "sequence_classification", "image_classification", "question_answering"


def source_of(model_type):
    return find_model("vit-tiny", ImageForm(8, 1)) if model_type == "vit" else find_model("tiny", model_type=model_type)


def model_and_inputs(model_type, head, dropout):
    model = build_model(source_of(model_type), head, 2, dropout, seed=1)
    generator = torch.Generator().manual_seed(2)
    labels = torch.tensor([0, 1, 1])
    if model_type == "vit":
        return model, {"pixel_values": torch.rand(3, 1, 8, 8, generator=generator), "labels": labels}
    ids = torch.randint(5, 90, (3, 40), generator=generator)
    mask = torch.arange(40) < torch.tensor([40, 9, 23])[:, None]  # so that padding is left out
    told = {"labels": labels} if head == TEXT else {"start_positions": labels, "end_positions": labels}
    return model, {"input_ids": ids, "attention_mask": mask.long(), **told}


def one_pass(model, inputs, precision):
    """Bytes kept for backward, the loss and all gradients, dropout drawn from one seed."""
    torch.manual_seed(3)
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            loss = model(**inputs)[0]
        at_forward = sum(kept.values())
    loss.backward()
    return at_forward, loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(("model_type", "head"), [("bert", TEXT), ("bert", ANSWER), ("vit", IMAGE)])
def test_recomputed_gradients_have_the_same_bits(model_type, head, dropout, precision):
    model, inputs = model_and_inputs(model_type, head, dropout)
    again = copy.deepcopy(model)
    recompute_activations(again)
    assert again.state_dict().keys() == model.state_dict().keys()
    kept, loss, gradients = one_pass(model, inputs, precision)
    kept_again, loss_again, gradients_again = one_pass(again, inputs, precision)
    assert torch.equal(loss, loss_again)
    assert gradients.keys() == gradients_again.keys()
    for name, gradient in gradients.items():
        assert torch.equal(gradient, gradients_again[name]), name
    assert kept_again < kept
    if dropout:
        torch.manual_seed(4)
        assert not torch.equal(again(**inputs)[0], loss_again), "another seed, other masks"


@pytest.mark.long(one_in=4)
@pytest.mark.parametrize("sync", ["ddp", "zero3", "shared_weights", "torch_fsdp"])
def test_a_run_that_recomputes_has_the_same_losses(sync, start, tmp_path):
    found = {}
    for name, more in (("plain", []), ("again", ["--activation_checkpointing"])):
        words = ["-m", "cos598d", "train", "--task_name", "digits", "--max_train_examples", 60, "--do_train"]
        words += ["--total_train_batch_size", 20, "--max_steps", 3, "--sync", sync, "--world_size", 2, "--no_cuda"]
        words += ["--dropout", 0.2, "--no_save_model", "--output_dir", name]
        program = start(name, [*words, *more])
        assert program.wait() == 0, program.text
        found[name] = read_summary(tmp_path / name).losses
    assert found["plain"] == found["again"]
