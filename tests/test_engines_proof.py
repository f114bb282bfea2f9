"""The proof's cards of other libraries' engines: the cases that they keep, and by name those that they do not."""

from importlib.metadata import PackageNotFoundError, version

import pytest

from cos598d.strategies import class_of
from cos598d.tools.check.proof.cases import CASES
from cos598d.tools.check.proof.observe import observe_engine
from cos598d.tools.check.proof.prove import prove
from cos598d.tools.check.verdict import CRASHED, KEPT, REFUSED, WRONG

# DeepSpeed gives what is unused zeros for a gradient, so that weight decay moves it, and lays out its buckets by what a
# rank has used. fp16 has a loss scale of its own there.
DEEPSPEED = {"unused parameter": WRONG, "used on one rank": CRASHED, "all at once": WRONG, "fp16 overflow": REFUSED}
DEEPSPEED |= {"many steps": WRONG}  # in float64 it does not keep 10 digits
# --sync, its options, the package that it needs, and the cases that it does not keep
ENGINES = {
    "torch_zero1": ("torch_zero1", {}, "torch", {}),
    "torch_fsdp": ("torch_fsdp", {}, "torch", {}),
    "deepspeed, stage 2": ("deepspeed", {"zero_stage": 2}, "deepspeed", DEEPSPEED),
}


@pytest.mark.long(one_in=3)
@pytest.mark.parametrize("name", ENGINES)
def test_engine_keeps_what_its_card_says(name):
    sync, values, package, others = ENGINES[name]
    try:
        version(package)
    except PackageNotFoundError:
        pytest.skip(f"{package} is not installed: run make engines")
    found = prove(2, CASES, 598, 60, observe_engine, sync, values, class_of(sync).options_kind(**values))
    expected = dict.fromkeys((case.name for case in CASES), KEPT) | others
    assert {case: verdict.status for case, verdict in found.items()} == expected, found
