"""Task 3: torch's DistributedDataParallel."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a plain checkout, with the package installed or not

from cos598d.commands.script import script

if __name__ == "__main__":
    script("task3", sync="ddp", task="squad")
