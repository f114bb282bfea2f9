"""Fetch one file over HTTP so that a broken connection costs only what had not arrived yet.

What has arrived is in `NAME.TAG.part`. TAG is a digest of what identifies the file's current version on the server (its
ETag or date, and its length). So bytes of two versions never end up in one file. If the server's answer to a request
for the rest has another tag, the old part is dropped and the download starts again.
"""

import hashlib
import queue
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests
import urllib3
from tqdm import tqdm

from cos598d.errors import UserError
from cos598d.terminal.printable import printable

MOST_BYTES = 2 * 1024**3  # MNLI, the largest, is 0.3 GB; a server that never stops sending must not fill the disk
_TRIES = 4
_PROGRESS = 1024**2  # an attempt that brought more bytes than this was no failure
_CHUNK = 32 * 1024
_SLOWEST = 1024  # bytes per second: a server that sends less might take forever


class Unreachable(UserError):
    """No connection to `host`, or no answer in time. The message is a clause; the caller adds the remedies."""

    def __init__(self, host: str, reason: str) -> None:
        super().__init__(f"cannot reach {host} ({reason})")


def fetch(url: str, folder: Path, timeout: float, pause: float = 0.5, report: Callable[[str], None] = print) -> Path:
    """Download `url` into `folder` and return the path of the finished file, which still ends in `.part`.

    The caller, who holds the folder's lock, checks it and deletes it. A finished part that was left costs one request
    for its last byte. `timeout`: seconds for the connection and the first answer together, and then for each further
    piece. A connection that breaks, or that brings less than 1 kB per second over this time, is resumed: after `pause`
    seconds, then after twice as long each time. It stops after four attempts in a row with less than a megabyte each.
    Raises Unreachable if there is no connection, and UserError for any other refusal; what has arrived is kept.
    """
    name = url.rsplit("/", 1)[1]
    host = urlsplit(url).netloc
    failed = 0
    while failed < _TRIES:
        if failed:
            time.sleep(pause * 2 ** (failed - 1))
        part = min(folder.glob(f"{name}.*.part"), default=None)
        # One byte back, so that the request is still valid for a part that is complete.
        begin = max(part.stat().st_size - 1, 0) if part else 0
        with _answer(url, None if part is None else begin, timeout) as response:
            if response.status_code in (429, 500, 502, 503, 504):
                failed += 1
                report(f"{name}: {host} answered {response.status_code} {printable(response.reason, 60)}.")
                continue
            if response.status_code not in (200, 206, 416):
                raise UserError(f"{host} answered {response.status_code} {printable(response.reason, 60)} for {url}")
            start, total = _range_of(response)
            fresh = folder / f"{name}.{_tag(response, url, total)}.part"
            if response.status_code != 200 and (fresh != part or start != begin):
                if part is None:
                    raise UserError(f"{host} answered {response.status_code} to a request for all of {url}")
                part.unlink()  # the server's file has changed, or this is not the requested range
                continue
            for stale in set(folder.glob(f"{name}.*.part")) - {fresh}:
                stale.unlink()
            if total is not None and total > MOST_BYTES:
                raise UserError(f"{url} is {total} bytes long, more than the {MOST_BYTES} allowed")
            if _receive(response, fresh, start, total, timeout):
                return fresh
        arrived = fresh.stat().st_size
        failed = 1 if arrived - start > _PROGRESS else failed + 1
        if total is None:  # no length: the start of a rest would be unknown, so nothing can be resumed
            fresh.unlink()
        report(f"{name}: the connection to {host} broke after {arrived} bytes.")
    raise UserError(f"{host} did not deliver all of {url} in {failed} tries (what arrived is kept)")


def _answer(url: str, begin: int | None, timeout: float) -> requests.Response:
    """The server's answer, its body unread, within `timeout` seconds, whatever is slow: names, connection or server.

    The request is for the whole file, or for its bytes from `begin` on.
    """
    headers = {"Accept-Encoding": "identity"}  # a compressed answer would have other lengths and ranges
    if begin is not None:
        headers["Range"] = f"bytes={begin}-"
    outcome: queue.Queue[Any] = queue.Queue()

    def ask() -> None:
        try:
            outcome.put(requests.get(url, headers=headers, stream=True, timeout=(timeout, timeout)))
        except Exception as error:  # the waiting thread must get any error
            outcome.put(error)

    # Looking up a name has no time limit, and each of a host's addresses gets the full one. So this is a thread, and a
    # daemon, so that it cannot delay the end of the program.
    threading.Thread(target=ask, daemon=True).start()
    host = urlsplit(url).netloc
    try:
        answer = outcome.get(timeout=timeout)
    except queue.Empty:
        answer = requests.exceptions.Timeout()
    if isinstance(answer, requests.exceptions.Timeout):
        raise Unreachable(host, f"no answer within {timeout:g} seconds") from answer
    if isinstance(answer, Exception):
        raise Unreachable(host, _cause(answer)) from answer
    return answer


def _range_of(response: requests.Response) -> tuple[int, int | None]:
    """The answer's first byte and the whole file's length (None if unknown). The first byte is -1 for a range that was
    not requested."""
    if response.status_code == 200:
        length = response.headers.get("Content-Length", "")
        return 0, int(length) if re.fullmatch(r"\d{1,18}", length) else None
    found = re.fullmatch(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})", response.headers.get("Content-Range", "").strip())
    if not found:
        return -1, None
    first, last, total = (int(number) for number in found.groups())
    return (first, total) if last == total - 1 else (-1, None)


def _tag(response: requests.Response, url: str, total: int | None) -> str:
    """Eight digits for this version of the file: of its ETag, or of its date if there is no strong ETag."""
    version = response.headers.get("ETag", "")
    if not version or version.startswith("W/"):
        version = response.headers.get("Last-Modified", "")
    return hashlib.sha256(f"{url}\n{version}\n{total}".encode()).hexdigest()[:8]


def _receive(response: requests.Response, path: Path, start: int, total: int | None, timeout: float) -> bool:
    """Write the answer's body from byte `start` on. Return whether it arrived completely and fast enough."""
    arrived, name = start, path.name.rsplit(".", 2)[0]
    look_at, at_least = time.monotonic() + timeout, start + _SLOWEST * timeout
    with (
        open(path, "r+b" if start else "wb") as handle,
        tqdm(total=total, initial=start, unit="B", unit_scale=True, desc=name, leave=False, disable=None) as bar,
    ):
        handle.seek(start)
        handle.truncate()
        while arrived <= MOST_BYTES:
            try:
                chunk = response.raw.read1(_CHUNK, decode_content=False)
            except (urllib3.exceptions.HTTPError, OSError):
                return False
            if not chunk:
                return total is None or arrived == total
            handle.write(chunk)
            arrived += len(chunk)
            bar.update(len(chunk))
            if time.monotonic() > look_at:
                if arrived < at_least:
                    return False
                look_at, at_least = time.monotonic() + timeout, arrived + _SLOWEST * timeout
    path.unlink()
    raise UserError(f"{response.url} is longer than the {MOST_BYTES} bytes allowed")


def _cause(error: BaseException) -> str:
    """The system's error inside the libraries' nested exceptions."""
    if isinstance(error, requests.exceptions.ProxyError):
        return "the proxy did not let the connection through"
    if isinstance(error, requests.exceptions.SSLError):
        return "its certificate was not accepted"
    layer: Any = error
    for _ in range(10):
        if isinstance(layer, OSError) and layer.strerror:
            return layer.strerror
        inner = None
        with suppress(AttributeError, IndexError):
            inner = layer.args[0].reason
        layer = inner or layer.__cause__ or layer.__context__
        if layer is None:
            break
    return type(error).__name__
