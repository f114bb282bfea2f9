"""Audits as tests run them: every rank of a script under `cos598d audit`, and the verdict that they leave."""

import json
from pathlib import Path

from audit_scripts import FLAGS
from programs import ROOT, Program, free_port


def audit(folder, source, words="", ranks=2, flags=(), is_fresh=False, during=None):
    """Run a script, its path or its source, on so many ranks; return the exit codes, what rank 0 printed, and
    audit.json (or None). `during` is called with the programs while they run."""
    path = source if isinstance(source, Path) else folder / "train.py"
    if path is not source:
        path.write_text(source)
    port = free_port()
    programs = []
    for rank in range(ranks):
        place = {"rank": rank, "world_size": ranks, "master_ip": "127.0.0.1", "master_port": port}
        environ = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        environ |= {"PYTHONPATH": str(ROOT), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        own = words.format(**place).split()
        command = ["-m", "cos598d", "audit", "--output_dir", folder / "audit", *flags, path, *own]
        programs.append(Program(folder, f"rank{rank}", [*map(str, command)], environ, is_fresh))
    if during:
        during(programs)
    codes = [program.wait() for program in programs]
    verdict = folder / "audit" / "audit.json"
    return codes, programs[0].text, json.loads(verdict.read_text()) if verdict.exists() else None


def words_of(style, more):
    """The words of a script of that style."""
    return f"{FLAGS} {more}" if style == "skeleton" else more
