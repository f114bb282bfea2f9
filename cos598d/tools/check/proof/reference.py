"""One process on the whole batch: a plain loop without strategies, with which ranks are compared."""

import functools
import math
from dataclasses import dataclass

import torch

from cos598d.strategies.optimizers import make_optimizer
from cos598d.strategies.precision import FIRST, autocast
from cos598d.tools.check.proof.cases import Case, Training
from cos598d.tools.check.proof.model import ProofFeatures, proof_model

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Reference:
    """`weights` before the first step and after each; each step's loss; the norms of gradients before clipping.

    state_bytes and gradient_bytes: of the optimizer's state and of the gradients in one process.
    """

    weights: list[Weights]
    losses: list[float]
    norms: list[float]
    state_bytes: int
    gradient_bytes: int


@functools.lru_cache(maxsize=64)
def reference(case: Case, training: Training, nonce: int) -> Reference:
    """The training of a case in one process."""
    features = ProofFeatures(case.batch_sizes, nonce, case.overflows_in)
    model = proof_model(nonce, case.parts)
    optimizer = make_optimizer(model.named_parameters(), config=case.config("none", training, {}))
    found = Reference([_weights(model)], [], [], 0, 0)
    scale = FIRST if case.precision == "fp16" else 1.0
    gradient_bytes = 0
    for number in range(training.steps):
        for group in optimizer.param_groups:
            group["lr"] = training.rate(number)
        with autocast(case.precision, torch.device("cpu")):
            loss = model(**features.collate(features.batches[number]))[0]
        (loss * scale).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        for gradient in gradients:
            gradient /= scale
        limit = case.max_grad_norm or math.inf
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        if bool(norm.isfinite()):
            optimizer.step()
        gradient_bytes = sum(gradient.nbytes for gradient in gradients)
        optimizer.zero_grad(set_to_none=True)
        found.weights.append(_weights(model))
        found.losses.append(loss.item())
        found.norms.append(norm.item())
    state = [value for kept in optimizer.state.values() for value in kept.values() if isinstance(value, torch.Tensor)]
    return Reference(found.weights, found.losses, found.norms, sum(each.nbytes for each in state), gradient_bytes)


def _weights(model: torch.nn.Module) -> Weights:
    return {name: p.detach().clone() for name, p in model.named_parameters()}
