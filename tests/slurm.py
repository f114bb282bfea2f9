"""A SLURM of four nodes on this machine, of the real daemons: for tests, in its own folder and on its own ports."""

import contextlib
import os
import re
import shutil
import socket
import subprocess
import time
from pathlib import Path

from programs import NOT_INHERITED, free_port

NODES = 4
DAEMONS = ("munged", "slurmctld", "slurmd")
COMMANDS = ("sbatch", "srun", "squeue", "scancel", "scontrol", "sinfo", "setpriv")
# The nodes' names resolve nowhere, as on clusters whose DNS does not know them.
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldPort={controller}
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,batch_sched_delay=0
ReturnToService=2
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
KillWait=30
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing():
    """Why there can be no SLURM here, in a few words; "" where there can be."""
    if os.geteuid():
        return "SLURM's daemons need root"
    absent = [name for name in (*DAEMONS, *COMMANDS) if not shutil.which(name)]
    return f"not installed: {', '.join(absent)} (apt-get install slurm-wlm munge)" if absent else ""


def wait(holds, seconds, told):
    """Wait until `holds()`; else fail with what `told()` says."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds} s:\n{told()}"
        time.sleep(0.1)


class Slurm:
    """The daemons, from `start` to `stop`, which also ends what their jobs have left."""

    def __init__(self, folder: Path):
        self.folder = folder
        strangers = ("SLURM", "SBATCH", *NOT_INHERITED)
        own = {name: value for name, value in os.environ.items() if not name.startswith(strangers)}
        self.environ = own | {"SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen] = []

    def start(self, seconds=60):
        """Start all and wait until every node is idle."""
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        ports = dict.fromkeys(free_port() for _ in range(4 * NODES))
        names = {f"n{number}": port for number, port in zip(range(1, NODES + 1), list(ports)[1:])}
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={port} CPUs=2 State=UNKNOWN"
            for name, port in names.items()
        )
        words = {"host": socket.gethostname(), "folder": self.folder, "controller": list(ports)[0], "nodes": nodes}
        (self.folder / "slurm.conf").write_text(CONFIGURATION.format(**words))
        places = {"socket": "munge.socket", "key-file": "munge.key", "pid-file": "munge.pid", "seed-file": "munge.seed"}
        self._run("munged", "--foreground", "--force", *(f"--{flag}={self.folder / at}" for flag, at in places.items()))
        wait((self.folder / "munge.socket").exists, seconds, lambda: "munged does not listen")
        self._run("slurmctld", "-D")
        for name in names:
            self._run("slurmd", "-D", "-N", name)
        wait(self._is_idle, seconds, lambda: self.ask("sinfo", check=False))

    def _run(self, name, *words):
        log = self.folder / f"daemon{len(self._daemons)}.{name}.log"
        with log.open("w") as output:
            # The kernel ends it when the test's process is gone, however it went.
            daemon = ["setpriv", "--pdeathsig", "KILL", name, *words]
            self._daemons.append(subprocess.Popen(daemon, env=self.environ, stdout=output, stderr=output))

    def _is_idle(self):
        return self.ask("sinfo", "--noheader", "--format=%D %t", check=False).strip() == f"{NODES} idle"

    def ask(self, *words, check=True, folder=None):
        """What a command of SLURM's prints, in this folder."""
        words, how = list(map(str, words)), {"cwd": folder, "env": self.environ, "timeout": 60}
        done = subprocess.run(words, **how, capture_output=True, text=True, check=False)
        assert done.returncode == 0 or not check, f"{words} failed: {done.stderr}"
        return done.stdout

    def stop(self):
        """End all jobs, then the daemons, the last started first."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.ask("scancel", "--user", "root", "--signal=KILL", "--full", check=False)
            self.ask("scancel", "--user", "root", check=False)
        with contextlib.suppress(AssertionError):
            wait(lambda: not self.ask("squeue", "--noheader", check=False).strip(), 40, str)
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


class Job:
    """A script given to sbatch; what it prints is in `text`."""

    def __init__(self, slurm: Slurm, folder: Path, script: Path, output: Path, words=(), flags=()):
        self.slurm, self.output = slurm, output
        words = ["sbatch", "--parsable", "--output", output, *words, script, *flags]
        self.id = slurm.ask(*map(str, words), folder=folder).strip()

    @property
    def text(self):
        """What it has printed so far."""
        path = Path(str(self.output).replace("%j", self.id))
        return path.read_text() if path.exists() else ""

    def field(self, name):
        """A field of what `scontrol show job` says, such as JobState; "" when the job is forgotten."""
        found = re.search(rf"\b{name}=(\S*)", self.slurm.ask("scontrol", "show", "job", self.id, check=False))
        return found[1] if found else ""

    def wait_for(self, words, seconds=90):
        """Wait until it has printed a match of the regular expression `words`."""
        wait(lambda: re.search(words, self.text), seconds, lambda: f"{words!r} not in:\n{self.text}")

    def wait_until(self, state, seconds=90):
        """Wait for one state, such as PENDING or COMPLETED."""
        wait(lambda: self.field("JobState") == state, seconds, lambda: f"{state} not reached:\n{self.text}")

    def comes_back(self, seconds=90):
        """Wait until it is in the queue again, and spare it the two minutes for which SLURM holds it back there."""
        self.wait_until("PENDING", seconds)
        self.slurm.ask("scontrol", "update", f"JobId={self.id}", "StartTime=now")
