"""The flags of an audit, and what one rank of it is told."""

from dataclasses import dataclass

from cos598d.terminal.fields import flag

LEVELS = ("fault", "waste", "note")  # of findings, the worst first


@dataclass(frozen=True)
class AuditFlags:
    """The flags of the command."""

    steps: int = flag(3, "examine the first N steps in full, and only count the others", least=1, below=1001)
    output_dir: str | None = flag(
        None, "folder for the traces, the verdict and the logs of the ranks (default: runs/audit-SCRIPT)", metavar="DIR"
    )
    strict: bool = flag(
        False,
        "exit with 3 for a fault, with 4 if the audit cannot tell, with 5 if no gradient was judged, and with the "
        "script's own code if it fails",
    )
    ignore: str | None = flag(
        None, "names of findings to ignore, such as padded_duplicates,same_dropout", metavar="NAMES"
    )
    strict_on: str = flag("fault", "the mildest finding that --strict counts", choices=LEVELS)
    json: str | None = flag(
        None, "also write the verdict as JSON; -: print it, and everything else on stderr", metavar="FILE"
    )
    github: bool = flag(False, "also print the findings as GitHub annotations")
    launch: bool = flag(False, "run a command that starts the ranks itself, such as mpirun -n 2 python train.py")
    timeout: float | None = flag(
        None, "stop the script after SECONDS, and judge the steps so far", above=0, metavar="SECONDS"
    )
    world_size: int | None = flag(
        None,
        "start N ranks here; {rank}, {world_size}, {master_ip} and {master_port} in the script's arguments are "
        "filled in",
        least=1,
        below=1025,
    )
    master_port: int | None = flag(
        None, "port for the rendezvous of ranks that are started here (default: a free one)", least=1, below=65536
    )


@dataclass(frozen=True)
class Told:
    """What one rank of an audit knows beforehand. `run` is the audit's name where its starter chose one; only then
    somebody else judges."""

    folder: str
    script: str
    steps: int
    run: str = ""
    seconds: float | None = None  # after which the rank stops by itself
