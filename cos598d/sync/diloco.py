"""Local training whose averages are sent in fragments while training continues: streaming DiLoCo."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn

from cos598d.comm.calls import Call
from cos598d.sync.codecs import make_codec
from cos598d.sync.cost import ALL_REDUCE, CollectiveCall, Step
from cos598d.sync.estimate import Buffers, Tensor
from cos598d.sync.local_sgd import LocalSGD
from cos598d.sync.options import SYNC_GROUP, SyncOptions
from cos598d.sync.parts.fragments import Fragment, by_dtype, cut_in_rows, rows_of
from cos598d.terminal.fields import flag


@dataclass(frozen=True)
class DiLoCoOptions(SyncOptions):
    """The options of diloco.

    fragments: the number of parts that weights are averaged in, one after the other.
    outer_learning_rate, outer_momentum: of the outer optimizer.
    """

    fragments: int = flag(
        16, "parts of the weights that diloco averages one after the other", group=SYNC_GROUP, least=1, below=10_000
    )
    outer_learning_rate: float = flag(0.7, "outer optimizer's learning rate, for diloco", group=SYNC_GROUP, above=0)
    outer_momentum: float = flag(
        0.9, "outer optimizer's Nesterov momentum, for diloco", group=SYNC_GROUP, least=0, below=1
    )


class DiLoCo(LocalSGD):
    """Local steps, and an outer step along their averaged movement, fragment by fragment (Douillard et al. 2023,
    "DiLoCo", and 2025, "Streaming DiLoCo with overlapping communication", arXiv 2501.18512).

    The weights are split into F fragments of equal size (`--fragments F`). The ranks hold a second copy of the
    weights, the agreed ones, which is the same on all, and a momentum.
    1. In every step each rank steps by the gradient of its own share of the global batch, as in `local_sgd`.
    2. After every H-th step (`--sync_every H`) the next fragment is sent: each rank takes the difference between its
       weights and the agreed ones, and an all-reduce averages that while training continues.
    3. H steps later, before the next fragment is sent, it has arrived. The agreed weights make a step of SGD along the
       average, with Nesterov's momentum (`--outer_learning_rate`, `--outer_momentum`). Each rank adds to its own
       weights the difference between the new agreed weights and its own weights of point
    2. So it keeps what it has learned since.
    4. Before the model is evaluated or saved, all ranks average their weights, as in `local_sgd`, and that becomes the
       agreed copy. A fragment that is being sent is dropped, because the average replaces it.
    5. Under fp16 the ranks agree on overflows as in `local_sgd`.
    6. A checkpoint waits for the fragment that is being sent, and keeps its average: the run resumes from there to the
       last bit. A resume with other ranks, or with another sync, starts from the average of all weights: that fragment
       and the momentum are dropped.

    The paper mixes the arriving weights with a rank's own, half and half; point 3 adds instead. With H = 1, F = 1, an
    outer learning rate of 1 and no momentum, every rank holds the previous step's average plus its own last step.

    Cost for weights of S bytes: 1 call every H steps. Every rank sends and receives 2(n-1)/n S / (F H) per step on
    average, and waits for none of it if it takes less than H steps. With `--compress` the fragments are compressed,
    with error feedback if the codec has it. In memory 3 S, and one more fragment. Choose it if a step takes far less
    time than sending its gradients.
    """

    options: DiLoCoOptions
    options_kind = DiLoCoOptions
    uses = ("sync_every", "compress", "fragments", "outer_learning_rate", "outer_momentum")
    keeps_nothing = False

    def attach(self, model: nn.Module) -> nn.Module:
        module = super().attach(model)
        self._fragments: list[list[Fragment]] = []  # one per dtype in each
        return module

    def finish(self) -> None:
        """Nothing is sent. Before the first step, all ranks' equal weights become the agreed ones."""
        if not self._fragments:
            self._cut()

    def after_step(self) -> None:
        self._steps += 1
        self.replicas_equal = False
        if self._steps % self.options.sync_every:
            return
        for fragment in self._every():
            fragment.step(self.options.outer_learning_rate, self.options.outer_momentum)
        for fragment in self._fragments[self._steps // self.options.sync_every % len(self._fragments)]:
            fragment.start(self.comm)

    def own_state(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        facts, _ = super().own_state()
        tensors = {
            f"{place}/{name}": tensor
            for place, fragment in enumerate(self._every())
            for name, tensor in fragment.state().items()
        }
        return facts, tensors

    def load_own_state(self, facts: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        super().load_own_state(facts, tensors)
        if not tensors:
            return
        self._cut()
        for place, fragment in enumerate(self._every()):
            prefix = f"{place}/"
            fragment.load({name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)})

    @property
    def own_is_lost(self) -> str:
        return " and ".join(
            filter(None, [super().own_is_lost, "the outer steps' momentum, with the fragment that was under way"])
        )

    @classmethod
    def round_steps(cls, options: SyncOptions) -> int:
        return DiLoCoOptions.of(options).fragments * options.sync_every

    @classmethod
    def averages(cls, step: Step) -> list[CollectiveCall]:
        count = DiLoCoOptions.of(step.options).fragments
        return [
            CollectiveCall(ALL_REDUCE, [tensors[cut.place].of_rows(cut.rows) for cut in cuts])
            for tensors in by_dtype(step.tensors)
            for cuts in cut_in_rows(tensors, [rows_of(tensor.shape) for tensor in tensors], count)
        ]

    @classmethod
    def buffers(cls, tensors: Sequence[Tensor], options: SyncOptions) -> Buffers:
        return Buffers(unsaid="a fragment that is being sent takes more memory")

    def detach(self) -> None:
        self._drop()
        self._fragments = []
        super().detach()

    def _average_weights(self) -> None:
        self._drop()
        super()._average_weights()
        for fragment in self._every():
            fragment.agree()

    def _drop(self) -> None:
        for fragment in self._every():
            fragment.drop()

    def _every(self) -> Iterator[Fragment]:
        return chain.from_iterable(self._fragments)

    def _cut(self) -> None:
        """Make the current weights the agreed ones."""
        self._fragments = [[] for _ in range(self.options.fragments)]
        for weights in by_dtype([p for _, p in self.parameters]):
            names = {p: name for name, p in self.parameters}
            cuts = cut_in_rows(weights, [rows_of(p.shape) for p in weights], self.options.fragments)
            for place, each in enumerate(cuts):
                codec = make_codec(self.options.compress, self.comm, self._all_reduce)
                named = [(names[p], p) for p in weights]
                self._fragments[place].append(Fragment(f"fragment {place}", named, each, codec))

    def _all_reduce(self, tensor: torch.Tensor, name: str) -> Call:
        return self.comm.all_reduce(tensor, name, async_op=True)
