"""The flags of an audit, and the settings of one of its ranks."""

from dataclasses import dataclass

from cos598d.terminal.fields import flag


@dataclass(frozen=True)
class AuditFlags:
    """The flags of the command."""

    steps: int = flag(3, "examine the first N steps in full, and only count the others", least=1, below=1001)
    output_dir: str | None = flag(
        None,
        "folder for the traces, the verdict and the ranks' logs (default: runs/audit-SCRIPT)",
        metavar="FOLDER",
    )
    strict: bool = flag(
        False,
        "exit with 3 for a fault, 4 if the audit cannot tell, 5 if no gradient was judged, or the script's own code if "
        "it fails",
    )
    ignore: str | None = flag(None, "findings to ignore, such as same_dropout,evaluation_repeated", metavar="NAME,NAME")
    timeout: float | None = flag(
        None, "with --world_size: stop the script after X seconds, and judge the steps so far", above=0
    )
    world_size: int | None = flag(
        None,
        "start N ranks here; {rank}, {world_size}, {master_ip} and {master_port} in the script's arguments are "
        "filled in",
        least=1,
        below=1025,
    )


@dataclass(frozen=True)
class Told:
    """The settings of one rank. `run` is the audit's name if the process that started the ranks chose one; then that
    process judges, else rank 0 does."""

    folder: str
    script: str
    steps: int
    run: str = ""
