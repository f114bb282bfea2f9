"""The tests of an engine, case by case; and one process on the whole batch, with which its ranks are compared.

Each case has one feature that engines often get wrong."""

import functools
import math
from dataclasses import dataclass, replace

import torch

from cos598d.config import RunConfig
from cos598d.strategies.optimizers import make_optimizer
from cos598d.strategies.precision import FIRST, autocast
from cos598d.tools.check.proof.model import Parts, ProofFeatures, proof_model

BATCHES = (16, 16, 16)
SGD, ADAMW = "sgd", "adamw"
# Relative to a tensor's largest value. Rounding differs with the order of summation; a real mistake is orders of
# magnitude larger. Half precision rounds to 8 bits (bf16) and 11 bits (fp16), and so does what is computed from it.
DOUBLE = "float64"
TOLERANCES = {"fp32": 1e-5, "bf16": 4e-2, "fp16": 1e-2, DOUBLE: 1e-10}
# What a case examines: the weights after training; those at its start; the bytes held; a skipped step; the weights
# after another strategy object has taken over; the buffers after settle.
WEIGHTS, START, MEMORY, OVERFLOW, TAKEN_OVER, BUFFERS = (
    "weights",
    "start",
    "memory",
    "overflow",
    "taken over",
    "buffers",
)
Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Training:
    """How a model is trained: `steps` of the case's batches by this optimizer."""

    name: str
    optimizer: str
    steps: int
    learning_rate: float
    weight_decay: float

    @property
    def gives_gradients(self) -> bool:
        """Whether it changes the weights by the gradient only."""
        return self.steps == 1

    def rate(self, step: int) -> float:
        """The learning rate of a step. It follows a schedule, so that an engine with its own rate is noticed."""
        return self.learning_rate / (1 + step)


# Without weight decay a step is the gradient itself: (w0 - w1) / lr. It is long, so that rounding the weights loses
# little of it.
ONE_SGD_STEP = Training("one SGD step", SGD, 1, 64.0, 0.0)
# A wide model has equally large weights but smaller gradients.
LONG_SGD_STEP = replace(ONE_SGD_STEP, learning_rate=4096.0)
SGD_STEPS = Training("SGD", SGD, len(BATCHES), 0.2, 0.1)
MANY_STEPS = Training("many SGD steps", SGD, 37, 0.2, 0.1)
ADAMW_STEPS = Training("AdamW", ADAMW, len(BATCHES), 0.02, 0.1)


@dataclass(frozen=True)
class Case:
    """One claim about an engine: `says` describes it in the report."""

    name: str
    says: str
    parts: Parts = Parts()
    trainings: tuple[Training, ...] = (ONE_SGD_STEP, SGD_STEPS, ADAMW_STEPS)
    batch_sizes: tuple[int, ...] = BATCHES
    accumulation: int = 1
    max_grad_norm: float = 0.0
    precision: str = "fp32"
    overflows_in: int | None = None
    looks_at: str = WEIGHTS

    @property
    def tolerance(self) -> float:
        """Relative to a tensor's largest value."""
        return TOLERANCES[DOUBLE if self.parts.is_double else self.precision]

    def config(self, sync: str, training: Training, values: dict) -> RunConfig:
        """The run of which this training of the case is a small version; `values` are the options of the sync."""
        return RunConfig(
            sync=sync,
            do_train=True,
            total_train_batch_size=self.batch_sizes[0],
            gradient_accumulation_steps=self.accumulation,
            optimizer=training.optimizer,
            learning_rate=training.learning_rate,
            weight_decay=training.weight_decay,
            # With a small one, Adam turns rounding noise in near-zero gradients into whole steps.
            adam_epsilon=3e-2 if training.optimizer == ADAMW else RunConfig.adam_epsilon,
            max_grad_norm=self.max_grad_norm,
            precision=self.precision,
            **values,
        )


CLIP = 0.2  # the norms here are above 1
TOO_HIGH = 1e4  # and below this
ALL_PARTS = Parts(is_tied=True, is_used_twice=True, has_unused=True, has_frozen=True, has_small=True, has_buffer=True)
CASES = (
    Case(
        "same start",
        "every rank trains on from rank 0's weights, though its own were others",
        trainings=(ONE_SGD_STEP,),
        looks_at=START,
    ),
    Case(
        "gradients",
        "the gradient of every weight is the whole batch's",
        trainings=(ONE_SGD_STEP,),
    ),
    Case("steps", "three steps with a falling learning rate and weight decay", trainings=(SGD_STEPS, ADAMW_STEPS)),
    Case("accumulation", "every step's batch in 4 parts", accumulation=4),
    Case("clipping", "the whole gradient's norm is cut down to a sixth or less", max_grad_norm=CLIP),
    Case("no need to clip", "a norm below the limit leaves the gradient as it is", max_grad_norm=TOO_HIGH),
    Case("tied weights", "the output's weight is the embedding's", Parts(is_tied=True)),
    Case("module used twice", "one layer is called twice in a forward", Parts(is_used_twice=True)),
    Case(
        "unused parameter",
        "a layer that no rank uses stays as it is, whatever the weight decay",
        Parts(has_unused=True),
    ),
    Case(
        "used on one rank",
        "a layer that only some ranks use gets the mean over all of them",
        Parts(has_rarely_used=True),
    ),
    Case(
        "frozen parameter", "a frozen layer stays as it is, and what is below it still trains", Parts(has_frozen=True)
    ),
    Case("small parameters", "parameters of one and of three elements, fewer than ranks", Parts(has_small=True)),
    Case("buffer", "what the forward reads of a buffer is rank 0's", Parts(has_buffer=True)),
    Case("uneven last batch", "batches of 16, 7 and 3 examples, so that a rank may have none", batch_sizes=(16, 7, 3)),
    Case(
        "all at once",
        "all of the above but a layer that only some ranks use",
        ALL_PARTS,
        batch_sizes=(16, 7, 3),
        accumulation=4,
        max_grad_norm=CLIP,
    ),
    Case(
        "bf16",
        "accumulation, clipping and tied weights under bf16",
        Parts(is_tied=True),
        accumulation=4,
        max_grad_norm=CLIP,
        precision="bf16",
    ),
    Case(
        "fp16 overflow",
        "a step that overflows in fp16 on one rank is left out on all, and leaves no trace in the next",
        trainings=(ADAMW_STEPS,),
        precision="fp16",
        overflows_in=1,
        looks_at=OVERFLOW,
    ),
    Case(
        "many steps",
        "37 steps in float64: none is left out, nothing travels in fewer bits, and nothing drifts",
        Parts(is_double=True),
        trainings=(MANY_STEPS,),
        batch_sizes=(16,) * MANY_STEPS.steps,
    ),
    Case(
        "going on",
        "after two steps a new engine goes on with the state, as when a run is resumed",
        trainings=(SGD_STEPS, ADAMW_STEPS),
        looks_at=TAKEN_OVER,
    ),
    Case(
        "settled buffers",
        "after settle every rank has rank 0's buffers, which each rank's own examples had changed",
        Parts(has_statistics=True),
        trainings=(SGD_STEPS,),
        looks_at=BUFFERS,
    ),
    Case(
        "memory",
        "what an engine cuts over the ranks is held once by all of them together",
        Parts(width=32),
        trainings=(ADAMW_STEPS,),
        looks_at=MEMORY,
    ),
    Case(
        "large tensors",
        "weights of 15 MB, some of them larger than a first bucket",
        Parts(width=512),
        trainings=(LONG_SGD_STEP,),
    ),
)


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
