"""A rank's start imports what it uses: what it does not use costs every rank of every run."""

import importlib
import inspect
import subprocess
import sys

from programs import ROOT, TINY_TRAINING

from cos598d.commands.cli import COMMANDS


def python(code):
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_run_imports_no_statistics_no_storage_and_no_other_tokenizers():
    loaded = set(python("import sys, cos598d.run; print(*sys.modules)"))
    assert "pytorch_transformers.modeling_bert" in loaded
    assert not loaded & {"scipy.stats", "sklearn", "boto3.session", "sacremoses.tokenize", "matplotlib", "tensorboard"}


def test_the_list_of_commands_and_what_only_reads_records_load_no_torch():
    """Nor does any command load another: only the one that is asked for, with the flags that it shares."""
    code = (
        "import contextlib, io, sys; from cos598d.commands.cli import COMMANDS, main\n"
        "for words in map(str.split, ('', *'compare report cluster new score sample picture grade'.split())):\n"
        "    with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):\n"
        "        main([*words, '--help'])\n"
        "    loaded = {'torch', 'numpy', *(f'cos598d.commands.{name}' for name in COMMANDS)} & sys.modules.keys()\n"
        "    assert all(name in text.getvalue() for name in COMMANDS) or words\n"
        "    print(len(text.getvalue()) > 100, ','.join(sorted(loaded)) if not words else 'torch' in loaded)"
    )
    assert python(code) == ["True"] + ["True", "False"] * 8


def test_every_command_is_a_file_of_the_same_shape():
    for name in COMMANDS:
        command = importlib.import_module(f"cos598d.commands.{name}")
        assert command.__doc__.startswith(f"`python -m cos598d {name}`"), name
        assert list(inspect.signature(command.add_options).parameters)[0] == "parser"
        assert list(inspect.signature(command.run).parameters) == ["options"]


def test_what_is_imported_later_is_there_when_it_is_used():
    code = (
        "import cos598d.library, sys, sacremoses, boto3; from pytorch_transformers import tokenization_xlm as xlm\n"
        "print(sacremoses.MosesTokenizer(lang='en').tokenize('one two')[1], xlm.sm.MosesTokenizer.__name__)\n"
        "print(boto3.session.Session.__name__)"
    )
    assert python(code) == ["two", "MosesTokenizer", "Session"]


def test_a_training_imports_no_compiler(tmp_path):
    code = (
        "import sys; from cos598d.commands.cli import main\n"
        f"words = ['--output_dir', {str(tmp_path / 'out')!r}, '--sync', 'all_reduce', '--max_steps', '2']\n"
        f"assert main(['train', *{TINY_TRAINING!r}, *words]) == 0\n"
        "print('compiled' if 'torch._dynamo.eval_frame' in sys.modules else 'plain')"
    )
    assert python(code)[-1] == "plain"


def test_ddp_is_made_and_steps_without_a_compiler(tmp_path):
    """And what else is asked of the compiler's utilities is the real ones'."""
    code = (
        "import sys, torch; from cos598d.imports import leave_out_compiler; leave_out_compiler()\n"
        "import torch.distributed as dist; from torch.nn.parallel import DistributedDataParallel\n"
        f"dist.init_process_group('gloo', init_method='file://{tmp_path}/store', rank=0, world_size=1)\n"
        "model = DistributedDataParallel(torch.nn.Linear(2, 1))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "model(torch.ones(3, 2)).sum().backward(); optimizer.step(); dist.destroy_process_group()\n"
        "print('compiled' if 'torch._dynamo.eval_frame' in sys.modules else 'plain')\n"
        "mode, times = torch._dynamo.utils.get_optimize_ddp_mode(), torch._dynamo.utils.compile_times.__module__\n"
        "print(times, torch._dynamo.utils.get_optimize_ddp_mode() == mode, torch._dynamo.eval_frame.__name__)"
    )
    assert python(code) == ["plain", "torch._dynamo.utils", "True", "torch._dynamo.eval_frame"]


def test_a_checkpoint_is_computed_again_without_a_compiler():
    """And what is set or asked of the compiler's settings is the real ones'."""
    code = (
        "import sys, torch; from cos598d.imports import leave_out_compiler; leave_out_compiler()\n"
        "from torch.utils.checkpoint import checkpoint\n"
        "x = torch.ones(2, requires_grad=True)\n"
        "checkpoint(lambda x: x.sin().sum(), x, use_reentrant=False).backward()\n"
        "print('compiled' if 'torch._dynamo.eval_frame' in sys.modules else 'plain')\n"
        "torch._dynamo.config.verbose = True\n"
        "print(torch._dynamo.config.verbose, sys.modules['torch._dynamo.config'].verbose, "
        "torch._dynamo.config.error_on_nested_fx_trace)"
    )
    assert python(code) == ["plain", "True", "True", "True"]


def test_who_compiles_after_all_gets_torchs_own_compiler():
    code = (
        "import torch; from cos598d.imports import leave_out_compiler; leave_out_compiler()\n"
        "weight = torch.nn.Parameter(torch.ones(3)); weight.grad = torch.ones(3)\n"
        "optimizer = torch.optim.SGD([weight], lr=1.0); optimizer.step()\n"
        "double = torch.compile(lambda x: 2 * x, backend='eager')\n"
        "print(int(weight.sum()), int(double(torch.ones(1))), torch._dynamo.eval_frame.__name__)"
    )
    assert python(code) == ["0", "2", "torch._dynamo.eval_frame"]


def test_who_only_looks_for_a_line_s_module_brings_no_compiler():
    """inspect asks every module for its file: in the middle of an import of torch's that leads in a circle."""
    code = (
        "import inspect, sys; from cos598d.imports import leave_out_compiler; leave_out_compiler()\n"
        "inspect.getmodule(sys._getframe())\n"
        "print('compiled' if 'torch._dynamo.eval_frame' in sys.modules else 'plain')\n"
        "from torch.distributed.tensor import DeviceMesh; print(DeviceMesh.__name__)"
    )
    assert python(code) == ["plain", "DeviceMesh"]
