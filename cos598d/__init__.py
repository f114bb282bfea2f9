"""cos598d: learn, teach and measure data-parallel training by fine-tuning BERT."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cos598d.parallel import data_parallel as data_parallel
    from cos598d.sharded_parallel import parallelize as parallelize

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Loaded when it is used: a look at the version, or at a record, costs no torch.
    if name == "data_parallel":
        from cos598d.parallel import data_parallel

        return data_parallel
    if name == "parallelize":
        from cos598d.sharded_parallel import parallelize

        return parallelize
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
