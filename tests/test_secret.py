"""Where the secret comes from, and that nobody else learns it."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from cos598d.errors import UsageError, UserError
from cos598d.world import secret
from cos598d.world.identity import find_identity


def test_this_user_s_secret_is_made_once_and_nobody_else_can_read_it(tmp_path, monkeypatch):
    monkeypatch.setenv("COS598D_CACHE", str(tmp_path / "cache"))
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: secret.find_secret(None, True, {}), range(8)))
    assert len(found) == 1
    assert len(found.pop()) == 64
    (file,) = (tmp_path / "cache").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert secret.find_secret(None, False, {}) == b""


@pytest.mark.parametrize("spoil", [lambda p: p.chmod(0o644), lambda p: p.write_text("short"), "link", "owner"])
def test_a_secret_that_others_may_know_is_not_used(spoil, tmp_path, monkeypatch):
    monkeypatch.setenv("COS598D_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(secret.tempfile, "gettempdir", lambda: str(tmp_path))
    first = secret.find_secret(None, True, {})
    (file,) = (tmp_path / "cache").iterdir()
    if spoil == "link":
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
    elif spoil == "owner":
        monkeypatch.setattr(os, "geteuid", lambda: file.stat().st_uid + 1)
        (tmp_path / "cache" / f"secret-{os.geteuid()}").write_bytes(first)
        (tmp_path / "cache" / f"secret-{os.geteuid()}").chmod(0o600)
    else:
        spoil(file)
    if spoil == "owner":  # of neither place
        with pytest.raises(
            UserError, match="cannot be saved as .*cache/secret-.* nor as .*. Make such a folder writable"
        ):
            secret.find_secret(None, True, {})
    else:
        assert secret.find_secret(None, True, {}) not in (first, b"")


def test_a_secret_is_a_file_of_this_user_s_or_a_variable(tmp_path):
    file = tmp_path / "secret"
    file.write_text("sixteen letters and more\n")
    file.chmod(0o600)
    identity = find_identity(2, 1, "192.0.2.1", 7000, str(file), environ={})
    assert identity.secret == b"sixteen letters and more"
    assert "sixteen" not in repr(identity)
    variable = {"COS598D_SECRET": "another one of the kind"}
    assert find_identity(2, 1, environ=variable).secret == b"another one of the kind"
    for words, environ, sentence in (
        (str(tmp_path / "none"), {}, "cannot be read"),
        (None, {"COS598D_SECRET": "short"}, "has 5 characters, and a secret needs at least 16"),
    ):
        with pytest.raises(UsageError, match=sentence):
            find_identity(2, 1, secret=words, environ=environ)
    file.chmod(0o640)
    with pytest.raises(UsageError, match="can be read or written by other users. Run `chmod 600"):
        find_identity(2, 1, secret=str(file), environ={})


def test_a_pipe_at_the_secret_s_place_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setenv("COS598D_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(secret.tempfile, "gettempdir", lambda: str(tmp_path))
    (tmp_path / "cache").mkdir()
    pipe = tmp_path / "cache" / f"secret-{os.geteuid()}"
    os.mkfifo(pipe, 0o600)
    assert len(secret.find_secret(None, True, {})) == 64
    with pytest.raises(UsageError, match="is not a regular file"):
        secret.find_secret(str(pipe), True, {})


def test_where_no_folder_can_keep_a_secret_a_run_on_this_host_does_not_begin_open_to_all(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("COS598D_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(secret.tempfile, "gettempdir", lambda: str(tmp_path / "file"))
    torchrun = {"RANK": "1", "WORLD_SIZE": "2"}
    for words, environ in (((2, 0), {}), ((2, 1), {}), ((), torchrun)):
        with pytest.raises(UserError, match="a folder writable for this user only, or give every rank the same COS"):
            find_identity(*words, environ=environ)
        assert find_identity(*words, environ=environ | {"COS598D_SECRET": "s" * 16}).secret == b"s" * 16
    assert find_identity(1, 0, environ={}).secret == b""
    assert find_identity(2, 0, "192.0.2.1", environ={}).secret == b""
