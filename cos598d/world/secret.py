"""The secret that the ranks of a run share, so that no other process can become one of them."""

import contextlib
import os
import secrets
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from cos598d.errors import UsageError, UserError
from cos598d.terminal.files import cache_folder

SECRET_VARIABLE = "COS598D_SECRET"
SHORTEST, LARGEST = 16, 4096


def find_secret(file: str | None, on_this_host: bool, environ: Mapping[str, str] = os.environ) -> bytes:
    """The secret in `file` (--secret), else in COS598D_SECRET; else, for a run that stays `on_this_host`, this user's.

    That one is in a file which only this user can read, so that four shells of one user have the same secret without a
    flag. For several hosts the default is empty. Raises UsageError for a file that others can read, or a secret of
    fewer than 16 characters; UserError if no folder can keep this user's.
    """
    if file is not None:
        return _checked(_read(Path(file)), f"--secret {file}")
    if environ.get(SECRET_VARIABLE):
        return _checked(
            environ[SECRET_VARIABLE].encode(errors="surrogateescape"), f"the environment's {SECRET_VARIABLE}"
        )
    return _this_users() if on_this_host else b""


def new_secret() -> str:
    """A random secret, as text."""
    return secrets.token_hex(32)


def _read(path: Path) -> bytes:
    try:
        with open(path, "rb", opener=_open) as handle:
            found = os.fstat(handle.fileno()).st_mode
            if not stat.S_ISREG(found):
                raise UsageError(f"--secret {path} is not a regular file. Give a file with the secret.")
            if found & 0o077:
                raise UsageError(f"--secret {path} can be read or written by other users. Run `chmod 600 {path}`.")
            return handle.read(LARGEST)
    except OSError as error:
        raise UsageError(f"--secret {path} cannot be read ({error.strerror}). Give a file with the secret.") from None


def _checked(secret: bytes, name: str) -> bytes:
    secret = secret.strip()
    if len(secret) < SHORTEST:
        raise UsageError(
            f"{name} has {len(secret)} characters, and a secret needs at least {SHORTEST}. "
            f"Make one with `openssl rand -hex 32`."
        )
    return secret


def _this_users() -> bytes:
    """This user's secret on this host, created by the first process that needs it.

    Raises UserError if no folder can keep it.
    """
    user = os.geteuid() if hasattr(os, "geteuid") else "user"
    tried = []
    with contextlib.suppress(UserError):  # this user has no home folder
        tried.append(cache_folder() / f"secret-{user}")
    with contextlib.suppress(OSError):  # there is no folder for temporary files
        tried.append(Path(tempfile.gettempdir()) / f"cos598d-secret-{user}")
    for path in tried:
        secret = _kept(path)
        if secret:
            return secret
    places = " nor as ".join(map(str, tried)) or "a file in the home folder nor in TMPDIR"
    raise UserError(
        f"the secret that keeps other users of this host out of the run cannot be saved as {places}. Make such a "
        "folder writable for this user only, or give every rank the same COS598D_SECRET or --secret FILE."
    )


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # does not wait for a pipe that somebody may have put there


def _kept(path: Path) -> bytes:
    """The secret in `path`, created if there is none; empty if it cannot be kept, or others may know it."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        if not os.path.lexists(path):
            # Written to another file, then linked: the first of several processes wins, and none reads half a secret.
            draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                with open(descriptor, "w") as handle:
                    handle.write(new_secret())
                with contextlib.suppress(FileExistsError):
                    os.link(draft, path)
            finally:
                os.unlink(draft)
    with contextlib.suppress(OSError):
        with open(path, "rb", opener=lambda name, flags: _open(name, flags | os.O_NOFOLLOW)) as handle:
            found = os.fstat(handle.fileno())
            mine = found.st_uid == os.geteuid() and stat.S_ISREG(found.st_mode) and not found.st_mode & 0o077
            secret = handle.read(LARGEST).strip() if mine else b""
        if len(secret) >= SHORTEST:
            return secret
    return b""
