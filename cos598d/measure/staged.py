"""Files of a record that are whole on the disk before the first of them takes its name."""

from collections.abc import Mapping
from pathlib import Path

from cos598d.terminal.files import GrowingFile


class Staged:
    """What rank 0 writes when its run is over: the summary, and what else stands beside the rows."""

    def __init__(self) -> None:
        self._files: list[GrowingFile] = []

    def write(self, folder: Path, texts: Mapping[str, str]) -> None:
        """Bring texts, by their files' names in `folder`, to the disk, yet unnamed. Raises OSError, which names one."""
        for name, text in texts.items():
            self._files.append(GrowingFile(folder / name))
            self._files[-1].write(text)
            self._files[-1].complete()

    def publish(self) -> None:
        """Give them their names, in the order in which they came."""
        for file in self._files:
            file.publish()

    def close(self) -> None:
        """Close them; those without a name vanish."""
        for file in self._files:
            file.close()
