"""A part's images as files of a folder or an archive, decoded by several threads."""

import hashlib
import itertools
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from cos598d.data.images.decode import Refused, check_pillow, decode
from cos598d.data.images.encoder import ImageEncoder
from cos598d.data.images.places import ImageStore
from cos598d.data.images.source import ImageSource
from cos598d.errors import UserError
from cos598d.terminal.printable import printable

_THREADS = 8  # at most: Pillow decodes outside Python's lock
_AHEAD = 4  # files that a thread has before it, so that few of the decoded ones wait in memory
_NAMED = 3  # refused files that a sentence names


class Files(ImageSource):
    """`files` of a place and the number of each one's class."""

    def __init__(self, place: ImageStore, files: Sequence[str], labels: Sequence[int] | np.ndarray, words: str):
        """`words` say which part this is, for a bar while it is decoded."""
        check_pillow()
        self.labels = np.asarray(labels, dtype=np.int64)
        self._place, self._files, self._words = place, list(files), words
        digest = hashlib.sha256(self.labels.tobytes())
        for file in self._files:
            digest.update(place.stamp(file).encode("utf-8", "surrogateescape") + b"\0")
        self.digest = digest.hexdigest()

    def pixels(self, places: np.ndarray, encoder: ImageEncoder) -> np.ndarray:
        found = np.empty((len(places), encoder.size, encoder.size, encoder.channels), dtype=np.uint8)
        refused: list[str] = []
        for place, one in enumerate(self._decoded(places, encoder)):
            if isinstance(one, np.ndarray):
                found[place] = one
            else:
                refused.append(one)
        if refused:
            more = f"; and {len(refused) - _NAMED} more" if len(refused) > _NAMED else ""
            raise UserError(
                f"{printable(self._place.name, 200)}: {'; '.join(refused[:_NAMED])}{more}: mend or remove "
                f"{'them' if len(refused) > 1 else 'it'}."
            )
        return found

    def _decoded(self, places: np.ndarray, encoder: ImageEncoder) -> Iterator[np.ndarray | str]:
        """The images in order, each as soon as it is there, or why it is refused."""
        from tqdm import tqdm

        def one(place: int) -> np.ndarray | str:
            file = self._files[place]
            try:
                return encoder.fit(decode(self._place.read(file))[None])[0]
            except Refused as why:
                return f"{printable(file, 100)} {why}"

        threads = min(_THREADS, os.cpu_count() or 1)
        waiting = iter(places.tolist())
        with (
            tqdm(
                None, f"{self._words}: images", len(places), unit=" images", delay=2, disable=None, leave=False
            ) as bar,
            ThreadPoolExecutor(threads, "decode") as pool,
        ):
            futures = [pool.submit(one, place) for place in itertools.islice(waiting, threads * _AHEAD)]
            while futures:
                yield futures.pop(0).result()
                bar.update()
                futures += [pool.submit(one, place) for place in itertools.islice(waiting, 1)]
