"""Another user of this machine who wants in: what he sends to a run's ports and tries with its files, until ended."""

import contextlib
import encodings.idna  # noqa: F401 - sockets load it when first used, when the files of Python may be out of reach
import json
import os
import pickle
import random
import socket
import struct
import sys
import time
from pathlib import Path

from cos598d.world.connection import ProtocolError, connect, make_key
from cos598d.world.secret import find_secret

NOBODY = 65534
MOST_SILENT = 40


class Bomb:
    """Runs a command in whoever unpickles it."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def rubbish(marker):
    """What he sends, by its name. `marker` is a file that appears when somebody unpickles it."""
    bomb = pickle.dumps(Bomb(f"touch {marker}"))

    def torch_store(operation, key, value=b""):
        words = b"\0" + struct.pack("<I", 0x3C85F7CE) + bytes([operation]) + struct.pack("<Q", len(key)) + key
        return words + struct.pack("<Q", len(value)) + value

    objection = b"/cos598d/0/objection"
    return {
        "a browser": b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
        "a rank of old": struct.pack(">I", 1),
        "an objection in torch's store": torch_store(1, objection, b"\x1b[2Jstop"),
        "a key deleted in torch's store": torch_store(9, b"/cos598d/0/arrived/0"),
        "a pickle in torch's store": torch_store(1, b"/torch.rendezvous.state", bomb),
        "a pickle": bomb,
        "a message of a lost rank": b'{"lost": 1, "sentence": "\x1b[2Jlost"}\n',
        "a sequence number of gloo's": struct.pack("<q", random.randrange(64)),
        "bytes": os.urandom(2000),
        "a line without end": b"A" * (1 << 20),
        "nothing": b"",
    }


def fork_attack(folder: Path, files: list[Path]) -> int:
    """Begin to attack as another user, in a process whose id is returned; needs root.

    `folder` holds targets.json, [[ip, port, process], ...], which is read again and again, and gets attack.jsonl. What
    he could do and should not have stands there as {"got": what}; {"sent": name} is what he sent.
    """
    report = os.open(folder / "attack.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    process = os.fork()
    if process:
        os.close(report)
        return process
    try:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        os.environ["HOME"] = os.environ["COS598D_CACHE"] = f"/tmp/nobody-{os.getpid()}"
        with os.fdopen(report, "w", buffering=1) as handle:
            try:
                _attack(folder, files, lambda **what: print(json.dumps(what), file=handle))
            except Exception as error:
                print(json.dumps({"died": repr(error)}), file=handle)
    finally:
        os._exit(0)


def _attack(folder, files, tell):
    words, silent = rubbish(folder / "executed"), []
    while True:
        try:
            targets = json.loads((folder / "targets.json").read_text())
        except (OSError, ValueError):
            targets = []
        for ip, port, process in targets:
            name = random.choice(list(words))
            with contextlib.suppress(OSError):
                line = socket.create_connection((ip, port), timeout=0.1)
                line.settimeout(0.1)
                silent.append(line)
                tell(sent=name)
                line.sendall(words[name])
            for key in (b"", find_secret(None, False), b"a guess of sixteen"):
                with contextlib.suppress(ProtocolError, OSError):
                    connect((ip, port), make_key(key, "meeting", ""), 1, 0.1, 1 << 20).close()
                    tell(got=f"into {ip}:{port} with {key!r}")
            with contextlib.suppress(OSError):
                os.kill(process, 0)
                tell(got=f"a signal to {process}")
            with contextlib.suppress(OSError):
                Path(f"/proc/{process}/environ").read_bytes()
                tell(got=f"the environment of {process}")
        while len(silent) > MOST_SILENT:
            silent.pop(0).close()
        for file in files:
            for opened, mode in ((file, "rb"), (file / "mine", "xb"), (file, "ab")):
                with contextlib.suppress(OSError), open(opened, mode):
                    tell(got=f"{opened} opened for {mode}")
            with contextlib.suppress(OSError):
                for inside in file.iterdir():
                    with contextlib.suppress(OSError), open(inside, "rb") as handle:
                        handle.read(1)
                        tell(got=f"{inside} read")
        time.sleep(0.02)
