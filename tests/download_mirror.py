"""A small server on this machine and a small data set, for the tests of the download."""

import contextlib
import http.server
import io
import os
import random
import textwrap
import threading
import zipfile
from dataclasses import dataclass, field
from unittest.mock import patch

from data_files import refusal
from programs import ROOT

from cos598d.data.fetch.catalogue import Dataset, DatasetFile, Download
from cos598d.data.fetch.download import obtain


@dataclass
class Mirror:
    """What the server offers and how it misbehaves; `asked` is the log of (file name, Range header)."""

    files: dict[str, bytes] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)  # ETags, by file name
    ranges: bool = True
    lengths: bool = True
    break_after: list[int] = field(default_factory=list)  # bytes of the next answers, then the connection drops
    statuses: list[int] = field(default_factory=list)  # of the next answers
    stall_after: int | None = None
    trickles: bool = False  # after a stall byte by byte, each sooner than a reader gives up
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    url: str = ""


@contextlib.contextmanager
def serving():
    """A Mirror that a server on a free port of this machine offers as long as the block runs, past any proxy."""
    offered = Mirror()
    released = threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            name = self.path.lstrip("/")
            asked_range = self.headers.get("Range")
            offered.asked.append((name, asked_range))
            status = offered.statuses.pop(0) if offered.statuses else 200
            if status != 200 or name not in offered.files:
                self.send_error(status if status != 200 else 404)
                return
            content = offered.files[name]
            is_part = asked_range is not None and offered.ranges
            start = int(asked_range.removeprefix("bytes=").removesuffix("-")) if is_part else 0
            if start and start >= len(content):
                self.send_error(416)
                return
            self.send_response(206 if is_part else 200)
            if is_part:
                self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
            if name in offered.versions:
                self.send_header("ETag", offered.versions[name])
            if offered.lengths:
                self.send_header("Content-Length", str(len(content) - start))
            self.end_headers()
            stop = offered.break_after.pop(0) if offered.break_after else offered.stall_after
            self.wfile.write(content[start : None if stop is None else start + stop])
            if offered.stall_after is not None:
                self.wfile.flush()
                at = start + offered.stall_after
                while not released.wait(0.05 if offered.trickles else 30) and offered.trickles:
                    self.wfile.write(content[at : at + 1])
                    self.wfile.flush()
                    at += 1

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    offered.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        with patch.dict(os.environ, NO_PROXY="127.0.0.1"):
            yield offered
    finally:
        released.set()
        server.shutdown()
        server.server_close()


def table(rows, seed=0, columns=3):
    """A TSV file of incompressible text, so that archives are long enough to break in the middle."""
    draw = random.Random(seed)
    lines = ["\t".join(f"column{number}" for number in range(columns))]
    lines += ["\t".join([str(row), *(draw.randbytes(100).hex() for _ in range(columns - 1))]) for row in range(rows)]
    return ("\n".join(lines) + "\n").encode()


TINY = {"train.tsv": table(600, 1), "dev.tsv": table(50, 2), "test.tsv": table(70, 3)}
TINY_SET = Dataset(
    "Tiny",
    "Tiny",
    (Download("http://nowhere.invalid/Tiny-clean.zip"),),
    (
        DatasetFile("train.tsv", (599, 600)),
        DatasetFile("dev.tsv", (50,)),
        DatasetFile("test.tsv", (70,), optional=True),
    ),
)


def zipped(files, folder="TinyFolder/", method=zipfile.ZIP_DEFLATED):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, content in files.items():
            archive.writestr(folder + name, content)
    return buffer.getvalue()


ARCHIVE = zipped(TINY)


def left_in(folder):
    """The names in the data folder, without lock files, which stay so that no two processes lock different files."""
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


def get(mirror, folder, dataset=TINY_SET, timeout=5.0):
    said = []
    obtain(dataset, folder, mirror.url, timeout, said.append)
    return said


def refused(mirror, folder, words, dataset=TINY_SET):
    """Obtaining it must fail with one sentence, and leave no target, no unpacked file and no useless part."""
    with refusal(words) as caught:
        get(mirror, folder, dataset)
    assert caught.value.exit_code == 1
    assert left_in(folder) == []


def assert_is_tiny(folder):
    assert {path.name: path.read_bytes() for path in (folder / "Tiny").iterdir()} == TINY
    assert left_in(folder) == ["Tiny"]


def driver(before_install):
    """A program that obtains Tiny and runs one statement when it is unpacked but not yet in its place."""
    return textwrap.dedent(
        f"""
        import sys, time
        from dataclasses import replace
        from pathlib import Path
        sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
        from download_mirror import TINY_SET, obtain
        from cos598d.data.fetch.unpack import unpack_zip
        def unpack(files, into):
            unpacked = unpack_zip(files, into)
            {before_install}
            return unpacked
        obtain(replace(TINY_SET, unpack=unpack), Path(sys.argv[1]), sys.argv[2])
        """
    )
