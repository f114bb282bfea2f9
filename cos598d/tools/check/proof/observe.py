"""What the ranks of a proof do: train a small model with an engine, as the loop does, and hand in the results."""

import contextlib
import functools
import json
import math
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from cos598d.comm.communicator import Communicator
from cos598d.comm.ledger import Ledger
from cos598d.data.sampler import MicroBatch, micro_batches
from cos598d.errors import UserError
from cos598d.loop import step
from cos598d.strategies import get_strategy
from cos598d.strategies.base import Module, Strategy
from cos598d.strategies.memory import count_memory, state_tensors
from cos598d.strategies.optimizers import make_optimizer, set_learning_rate
from cos598d.strategies.state import FullTensor, local
from cos598d.sync.options import SyncOptions
from cos598d.tools.check.evidence import Evidence
from cos598d.tools.check.proof.cases import BUFFERS, CASES, MEMORY, OVERFLOW, START, TAKEN_OVER, Case, Training
from cos598d.tools.check.proof.model import ProofFeatures, proof_model

FINISHED, REFUSAL, UNCLAIMED, CUT, HELD, SEEN = "finished", "refusal", "not claimed", "cut", "held", "seen"
TAKEN_OVER_AFTER = 2  # steps
# Called with a communicator, find_unused_parameters, SyncOptions and a precision.
MakeStrategy = Callable[..., Strategy]


def observe_engine(
    comm: Communicator,
    name: str,
    values: Mapping[str, Any],
    options: SyncOptions,
    cases: Sequence[str],
    nonce: int,
    seconds: float,
) -> None:
    """Train with `--sync name` and `options`; `values` are the options that a user gave."""

    def check(case: Case, training: Training) -> None:
        case.config(name, training, dict(values)).check(comm.world_size)

    observe(comm, get_strategy(name), options, cases, nonce, seconds, check)


def observe(
    comm: Communicator,
    make_strategy: MakeStrategy,
    options: SyncOptions,
    cases: Sequence[str],
    nonce: int,
    seconds: float,
    check: Callable[[Case, Training], None] = lambda case, training: None,
) -> None:
    """Train with `make_strategy`, for each of the cases. `check` raises UserError for a case that it refuses.

    An engine may also refuse a case itself, until it has made a training's first step; after that it has failed.
    Results are handed in after each case, so that one that ends the world does not lose the others. A case may take
    `seconds`. Then the kernel ends this process, since an engine may wait for longer.
    """
    evidence = Evidence(comm.rank, nonce)
    finished: list[str] = []
    for case in CASES:
        if case.name not in cases:
            continue
        signal.setitimer(signal.ITIMER_REAL, seconds)
        comm.ledger = Ledger()
        evidence.report(case.name, UNCLAIMED, "")
        refusal = ""
        try:
            for training in case.trainings:
                check(case, training)
                _Trial(comm, make_strategy, options, case, training, evidence).run()
                evidence.report(case.name, f"{training.name}, {FINISHED}", True)
        except UserError as error:
            refusal = str(error)
        evidence.report(case.name, REFUSAL, refusal)
        finished.append(case.name)
        evidence.report("", FINISHED, finished)
        evidence.hand_in()


class _Trial:
    """One training of a case on a rank."""

    def __init__(
        self,
        comm: Communicator,
        make_strategy: MakeStrategy,
        options: SyncOptions,
        case: Case,
        training: Training,
        evidence: Evidence,
    ):
        self._comm, self._case, self._training, self._evidence = comm, case, training, evidence
        self._features = ProofFeatures(case.batch_sizes, evidence.nonce, case.overflows_in)
        self._model = proof_model(evidence.nonce + comm.rank, case.parts).to(comm.device)
        self._make = functools.partial(make_strategy, comm, case.parts.may_be_unused, options, case.precision)
        self._strategy = self._make()
        self._losses: list[list[float]] = []  # of each step, of its micro-batches
        self._weights: list[list[float]] = []
        self._counted: list[bool] = []
        self._gradient_bytes = 0  # before the latest step

    def run(self) -> None:
        """Train, and hand in what the case needs."""
        case, training, strategy = self._case, self._training, self._strategy
        if strategy.equal_layers and case.parts.has_rarely_used:
            self._evidence.report(case.name, UNCLAIMED, "all ranks must call the same layers")
            return
        config = case.config("none", training, {})
        module = strategy.attach(self._model, functools.partial(make_optimizer, config=config))
        if case.looks_at == MEMORY:
            strategy.phase = self._phase
        if case.looks_at == START:
            with strategy.whole():
                self._hand_in("start")
            strategy.detach()
            return
        self._model.train()
        self._step(module, 0)
        try:
            self._go_on(module)
        except UserError as error:
            raise RuntimeError(f"after its first step it refuses: {error}") from error

    def _go_on(self, module: Module) -> None:
        """Train from the second step to the end, and hand in what the case needs."""
        case, training, strategy = self._case, self._training, self._strategy
        for number in range(1, training.steps + 1):
            if case.looks_at == OVERFLOW:
                with strategy.whole():
                    self._hand_in(f"step {number}")
            if case.looks_at == TAKEN_OVER and number == TAKEN_OVER_AFTER:
                module = self._take_over()
            if number < training.steps:
                self._step(module, number)
        if case.looks_at == MEMORY:
            if not strategy.shards:
                self._evidence.report(case.name, UNCLAIMED, "every rank holds everything")
            self._report(CUT, list(strategy.shards))
            held = strategy.memory()
            held["gradients"] = max(held.get("gradients", 0), self._gradient_bytes)
            self._report(HELD, [[name, size] for name, size in held.items()])
            self._report(SEEN, [[name, size] for name, size in self._seen().items()])
        if training.gives_gradients:
            with strategy.whole():
                self._hand_in("weights")
        if case.looks_at == BUFFERS:
            self._hand_in_buffers("before settle")
        self._strategy.settle()
        if case.looks_at == BUFFERS:
            self._hand_in_buffers("after settle")
        self._strategy.detach()
        if not training.gives_gradients:
            self._hand_in("weights")
        losses = [
            sum(loss * weight for loss, weight in zip(losses, weights, strict=True))
            for losses, weights in zip(self._losses, self._weights, strict=True)
        ]
        self._report("losses", losses)
        self._report("counted", self._counted)

    def _take_over(self) -> Module:
        """Pass the training to a new strategy with a model of other weights. Return the module to call from now on."""
        old, comm = self._strategy, self._comm
        pieces = [(each, each.values.detach().cpu().clone()) for each in old.state()]
        kept = [(e.kind, e.name, e.shape, e.begin, values) for e, values in pieces]
        facts, tensors = old.own_state()
        own = json.dumps([old.scalars(), facts]), {name: tensor.detach().clone() for name, tensor in tensors.items()}
        old.detach()
        folder = Path(tempfile.gettempdir())
        torch.save(kept, folder / f"pieces{comm.rank}")
        comm.exchange("saved")
        self._model = proof_model(self._evidence.nonce + comm.world_size, self._case.parts).to(comm.device)
        self._strategy = self._make()
        config = self._case.config("none", self._training, {})
        module = self._strategy.attach(self._model, functools.partial(make_optimizer, config=config))
        self._model.train()
        self._strategy.load_state(_wholes([torch.load(folder / f"pieces{rank}") for rank in range(comm.world_size)]))
        scalars, facts = json.loads(own[0])
        self._strategy.load_scalars(scalars)
        self._strategy.load_own_state(facts, own[1])
        comm.exchange("loaded")  # before the next trial writes there
        return module

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Count the gradients at the start of the step, since they may be freed after it."""
        if name == "step":
            self._gradient_bytes = self._strategy.memory().get("gradients", 0)
        yield

    def _step(self, module: Module, number: int) -> None:
        set_learning_rate(self._strategy.optimizer, self._training.rate(number))
        self._comm.ledger.begin(number + 1, 0.0)
        parts = micro_batches(
            self._features.batches[number],
            self._comm.rank,
            self._comm.world_size,
            self._case.accumulation,
        )
        losses: list[float] = []

        def observed(**inputs: torch.Tensor) -> tuple:
            outputs = module(**inputs)
            losses.append(outputs[0].item())
            return outputs

        def load(part: MicroBatch) -> dict[str, torch.Tensor]:
            inputs = self._features.collate(part.indices)
            return {name: tensor.to(self._comm.device) for name, tensor in inputs.items()}

        self._counted.append(bool(step(self._strategy, observed, parts, load, self._case.max_grad_norm)))
        self._losses.append(losses)
        self._weights.append([part.weight for part in parts])

    def _seen(self) -> dict[str, int]:
        """Visible bytes by category, whatever the engine reports."""
        optimizer = self._strategy.optimizer
        return count_memory(
            parameters=[local(p.data) for p in self._model.parameters()],
            optimizer=[local(tensor) for tensor in state_tensors(optimizer)] if hasattr(optimizer, "state") else [],
        )

    def _hand_in(self, moment: str) -> None:
        weights = {name: p.detach().cpu() for name, p in self._model.named_parameters()}
        self._evidence.put(self._case.name, f"{self._training.name}, {moment}", weights)

    def _hand_in_buffers(self, moment: str) -> None:
        buffers = {name: buffer.cpu() for name, buffer in self._model.named_buffers()}
        self._evidence.put(self._case.name, f"{self._training.name}, {moment}", buffers)

    def _report(self, name: str, value: Any) -> None:
        self._evidence.report(self._case.name, f"{self._training.name}, {name}", value)


def _wholes(by_rank: Sequence[Sequence[tuple]]) -> list[FullTensor]:
    """The whole tensors from the ranks' pieces."""
    parts: dict[tuple, list[tuple[int, torch.Tensor]]] = {}
    for kind, name, shape, begin, values in (piece for pieces in by_rank for piece in pieces):
        parts.setdefault((kind, name, shape), []).append((begin, values.flatten()))
    wholes = []
    for (kind, name, shape), pieces in parts.items():
        values = torch.cat([values for _, values in sorted(pieces, key=lambda piece: piece[0])])
        if values.numel() != math.prod(shape):
            raise RuntimeError(f"the state has {values.numel()} elements of {kind} of {name}, not {math.prod(shape)}")
        wholes.append(FullTensor(kind, name, values.view(shape)))
    return wholes
