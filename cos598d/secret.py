"""The secret that the ranks of a run share, so that nobody else's process becomes one of them."""

import contextlib
import os
import secrets
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from cos598d.errors import UsageError, UserError
from cos598d.files import cache_folder

VARIABLE = "COS598D_SECRET"
SHORTEST, LARGEST = 16, 4096


def find_secret(file: str | None, on_this_host: bool, environ: Mapping[str, str] = os.environ) -> bytes:
    """The secret in `file` (--secret), else in COS598D_SECRET; else, for a run that stays `on_this_host`, this user's.

    That one is kept in a file which only this user can read, so that four shells of one user have the same and need
    no flag. Empty where there is none. Raises UsageError for a file that others can read, or a secret of fewer than
    16 characters.
    """
    if file is not None:
        return _checked(_read(Path(file)), f"--secret {file}")
    if environ.get(VARIABLE):
        return _checked(environ[VARIABLE].encode(errors="surrogateescape"), f"the environment's {VARIABLE}")
    return _own() if on_this_host else b""


def new_secret() -> str:
    """A secret that nobody can guess, as text."""
    return secrets.token_hex(32)


def _read(path: Path) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY)
        with open(descriptor, "rb") as handle:
            if os.fstat(descriptor).st_mode & 0o077:
                raise UsageError(f"--secret {path} can be read or written by other users: chmod 600 {path}.")
            return handle.read(LARGEST)
    except OSError as error:
        raise UsageError(f"--secret {path} cannot be read ({error.strerror}): give a file with the secret.") from None


def _checked(secret: bytes, name: str) -> bytes:
    secret = secret.strip()
    if len(secret) < SHORTEST:
        raise UsageError(
            f"{name} has {len(secret)} characters, and a secret needs at least {SHORTEST}: "
            f"make one with `openssl rand -hex 32`."
        )
    return secret


def _own() -> bytes:
    """This user's secret on this host, made by whoever needs it first; empty where no folder can keep it."""
    user = os.geteuid() if hasattr(os, "geteuid") else "user"
    with contextlib.suppress(UserError):  # nobody knows this user's home
        secret = _kept(cache_folder() / f"secret-{user}")
        if secret:
            return secret
    return _kept(Path(tempfile.gettempdir()) / f"cos598d-secret-{user}")


def _kept(path: Path) -> bytes:
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        if not os.path.lexists(path):
            # Written beside, then linked: the first of several wins, and nobody reads half of it.
            beside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
            descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                with open(descriptor, "w") as handle:
                    handle.write(new_secret())
                with contextlib.suppress(FileExistsError):
                    os.link(beside, path)
            finally:
                os.unlink(beside)
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        with open(descriptor, "rb") as handle:
            found = os.fstat(descriptor)
            mine = found.st_uid == os.geteuid() and stat.S_ISREG(found.st_mode) and not found.st_mode & 0o077
            secret = handle.read(LARGEST).strip()
        if mine and len(secret) >= SHORTEST:
            return secret
    return b""
