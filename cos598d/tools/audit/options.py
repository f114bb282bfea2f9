"""The flags of an audit, and what one rank of it is told."""

from dataclasses import dataclass

from cos598d.fields import flag

LEVELS = ("fault", "waste", "note")  # of findings, the worst first


@dataclass(frozen=True)
class AuditFlags:
    """What the command line says of an audit."""

    steps: int = flag(
        3, "how many of the first steps are looked at closely; the others are counted", least=1, below=1001
    )
    output_dir: str | None = flag(
        None, "where the books, the verdict and the record go (default: runs/audit-SCRIPT)", metavar="DIR"
    )
    strict: bool = flag(
        False,
        "exit with 3 where a fault was found, with 4 where the audit cannot tell, with 5 where no gradient was judged; "
        "the script has to end well",
    )
    ignore: str | None = flag(
        None, "findings that do not count, by their names, such as padded_duplicates,same_dropout", metavar="NAMES"
    )
    strict_on: str = flag("fault", "what counts with --strict, from here up", choices=LEVELS)
    json: str | None = flag(
        None, "write the verdict as JSON there, too; -: print it, and all else on stderr", metavar="FILE"
    )
    github: bool = flag(False, "print the findings as annotations of GitHub's, too")
    launch: bool = flag(
        False, "the words are a command that starts the ranks by itself, such as mpirun -n 2 python train.py"
    )
    timeout: float | None = flag(
        None, "stop the script after so many seconds, and judge what was seen until then", above=0, metavar="SECONDS"
    )
    world_size: int | None = flag(
        None,
        "start so many ranks here; {rank}, {world_size}, {master_ip} and {master_port} in the script's words are "
        "filled in",
        least=1,
        below=1025,
    )
    master_port: int | None = flag(
        None, "the port at which ranks that are started here meet (default: a free one)", least=1, below=65536
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
