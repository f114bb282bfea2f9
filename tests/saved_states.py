"""A strategy that only has a state, and checkpoints of it, for tests."""

import hashlib
import json
from pathlib import Path

import torch

from cos598d.checkpoints import Checkpoints, RankState
from cos598d.comm.communicator import Communicator
from cos598d.strategies.base import Strategy
from cos598d.strategies.state import BUFFERS, STEP, WEIGHTS, ShardSlice
from cos598d.terminal.files import write_json

COMM = Communicator(None, "gloo", torch.device("cpu"))  # of a run of one rank
SYNC = {"sync": "fake", "bucket_mb": 25}
SHAPES = {"embedding.weight": (7, 3), "layer.bias": (5,), "layer.scale": (), "head.weight": (4, 2, 2), "empty": (0, 3)}
TRAINED = ("embedding.weight", "layer.bias", "layer.scale", "head.weight")


class Stateful(Strategy):
    """Weights and a buffer on rank 0, two values of each trained weight cut over the ranks as evenly as it goes.

    All values follow from `seed`, the same for the whole world; each rank's own from `seed` and its rank.
    """

    own_is_lost = "the fake memory"

    def __init__(self, comm, seed=0, scale=1):
        self.comm, self.loaded, self.own, self.scalars_loaded = comm, {}, None, None
        draw = torch.Generator().manual_seed(seed)
        shapes = {name: tuple(size * scale for size in shape) for name, shape in SHAPES.items()}
        self.wholes = {(WEIGHTS, name): torch.randn(shape, generator=draw) for name, shape in shapes.items()}
        self.wholes[BUFFERS, "layer.counted"] = torch.randint(100, (3,), generator=draw)
        for name in TRAINED:
            for kind in ("exp_avg", "exp_avg_sq"):
                self.wholes[kind, name] = torch.randn(shapes[name], generator=draw).bfloat16()
            self.wholes[STEP, name] = torch.tensor(float(seed))
        self.mine = torch.randn(6, generator=draw) + comm.rank
        self.seed = seed

    def state(self):
        for (kind, name), whole in self.wholes.items():
            if kind in (WEIGHTS, BUFFERS, STEP):
                if self.comm.rank == 0:
                    yield ShardSlice.of_whole(kind, name, whole)
                continue
            begin = 0
            for rank, part in enumerate(whole.reshape(-1).tensor_split(self.comm.world_size)):
                if rank == self.comm.rank and part.numel():
                    yield ShardSlice(kind, name, tuple(whole.shape), begin, part)
                begin += part.numel()

    def load_state(self, wholes):
        self.loaded = {(whole.kind, whole.name): whole.tensor.clone() for whole in wholes}

    def scalars(self):
        return {"loss_scale": 2.0**self.seed}

    def load_scalars(self, scalars):
        self.scalars_loaded = scalars

    def own_state(self):
        return {"counter": self.seed + self.comm.rank}, {"error": self.mine}

    def load_own_state(self, facts, tensors):
        self.own = facts, {name: tensor.clone() for name, tensor in tensors.items()}

    def assert_loaded(self, other):
        """That this one has been given the state of `other`, to the last bit."""
        assert self.loaded.keys() == other.wholes.keys()
        for name, tensor in other.wholes.items():
            found = self.loaded[name]
            assert found.shape == tensor.shape, name
            assert found.dtype == tensor.dtype, name
            assert torch.equal(found, tensor), name


def describe(folder: Path) -> None:
    """What stands beside the weights of a model."""
    write_json(folder / "config.json", {"layers": 2})
    (folder / "vocab.txt").write_text("one\ntwo\n")


def own_of(comm, seed):
    """What a rank remembers of a training."""
    return RankState({"row": seed * 100 + comm.rank}, {"random": torch.arange(4) + comm.rank + seed})


class Told(Checkpoints):
    """Checkpoints of the fake strategy that are open at once, and keep what they say in `said`."""

    def __init__(self, folder, comm, keep=2, resumed=None, describe=describe):
        self.said = []
        super().__init__(Path(folder), comm, keep, describe, SYNC, resumed, self.said.append)
        self.open()

    def hear(self):
        """What they have said since the last call, once nothing is being written any more."""
        self.close()
        said, self.said[:] = list(self.said), []
        return said


def open_checkpoints(folder, comm, keep=2, resumed=None):
    return Told(folder, comm, keep, resumed)


def save(checkpoints, comm, iteration, is_best=False):
    """Save the state that follows from the iteration's number; return what there is to say of it."""
    training = {"position": {"epoch": 1, "iteration": iteration}}
    checkpoints.save(Stateful(comm, iteration), iteration, training, lambda: own_of(comm, iteration), is_best)
    return checkpoints.hear()


def save_all(folder, comm, *iterations, keep=2, best=(), resumed=None):
    """Save at several iterations, each whole before the next."""
    with open_checkpoints(folder, comm, keep, resumed) as checkpoints:
        return [sentence for each in iterations for sentence in save(checkpoints, comm, each, each in best)]


def vouch(place, name):
    """Put the size and digest of a checkpoint's file into its manifest, as a forger does."""
    content, path = (place / name).read_bytes(), place / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    path.write_text(json.dumps(manifest))


def found_in(folder):
    """The names in a folder, in order."""
    return sorted(path.name for path in Path(folder).iterdir())
