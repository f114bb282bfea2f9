"""Damaged checkpoints: each is named in a sentence, whatever is wrong with it, and the one before is taken."""

import contextlib
import hashlib
import json
import os
import random
import shutil
import struct

import pytest
import torch
from safetensors.torch import save_file
from saved_states import SYNC, Stateful, save_all

from cos598d.checkpoints import find
from cos598d.checkpoints.layout import Damaged
from cos598d.checkpoints.restore import open_checkpoint
from cos598d.comm.communicator import Communicator
from cos598d.errors import UserError

COMM = Communicator(None, "gloo", torch.device("cpu"))
NAMES = (
    "manifest.json",
    "training.json",
    "rank0.json",
    "optimizer.rank0.safetensors",
    "own.rank0.safetensors",
    "model/model.safetensors",
    "model/config.json",
    "model/vocab.txt",
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    save_all(folder, COMM, 3, 5)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    """Checkpoints of iterations 3 and 5, for this test alone."""
    shutil.copytree(saved, tmp_path / "checkpoints")
    return tmp_path / "checkpoints"


def assert_named_and_passed_over(folder, *words):
    """The damaged one is named with `words`, the one before is restored; alone it is refused in one sentence."""
    found = find("auto", folder, COMM)
    assert found.iteration == 3
    (remark,) = found.remarks
    assert remark.startswith(f"the checkpoint {folder / 'step-00000005'} is damaged (")
    assert "\n" not in remark
    assert len(remark) < 500
    for word in words:
        assert word in remark
    strategy = Stateful(COMM)
    found.restore(strategy, COMM, SYNC)
    strategy.assert_loaded(Stateful(COMM, 3))
    with pytest.raises(UserError, match=r"this is no whole checkpoint \(.*\): give another one, or auto\.$"):
        find(str(folder / "step-00000005"), None, COMM)


def test_the_tests_damage_every_file_of_a_checkpoint(saved):
    place = saved / "step-00000005"
    assert sorted(str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()) == sorted(NAMES)


def truncate(path):
    os.truncate(path, path.stat().st_size - 2)


def empty(path):
    os.truncate(path, 0)


def grow(path):
    with path.open("ab") as file:
        file.write(b" ")


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def fold(path):
    path.unlink()
    path.mkdir()


def link(path):
    outside = path.parents[2] / "outside"
    path.rename(outside)
    path.symlink_to(outside)


def pipe(path):
    path.unlink()
    os.mkfifo(path)


DAMAGES = (truncate, empty, grow, flip, os.unlink, fold, link, pipe)
# White space at the end of the manifest says nothing.
DAMAGED = [(name, damage) for name in NAMES for damage in DAMAGES if (name, damage) != ("manifest.json", grow)]


@pytest.mark.parametrize(("name", "damage"), DAMAGED)
def test_one_damaged_file_is_named_and_the_checkpoint_before_is_taken(folder, name, damage):
    damage(folder / "step-00000005" / name)
    assert_named_and_passed_over(folder, *([] if name == "manifest.json" and damage is flip else [name]))


def test_a_model_s_folder_that_is_a_link_leads_nowhere(folder, tmp_path):
    model = folder / "step-00000005" / "model"
    model.rename(tmp_path / "outside")
    model.symlink_to(tmp_path / "outside")
    assert_named_and_passed_over(folder, "model is not a folder")


def test_a_flipped_bit_anywhere_in_the_manifest_is_noticed_or_says_the_same(folder):
    place = folder / "step-00000005"
    content = (place / "manifest.json").read_bytes()
    whole = json.loads(content)
    for byte in range(len(content)):
        changed = bytearray(content)
        changed[byte] ^= 1 << byte % 8
        (place / "manifest.json").write_bytes(changed)
        try:
            open_checkpoint(place)
        except Damaged:
            continue
        found = json.loads(changed)
        # Whose it is and how good it was is nobody else's to know; no file depends on it.
        assert {**found, "run": "", "is_best": ""} == {**whole, "run": "", "is_best": ""}, changed


def edit(folder, **changes):
    """Change values of the newest manifest."""
    path = folder / "step-00000005" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_files(folder, **changes):
    files = json.loads((folder / "step-00000005" / "manifest.json").read_text())["files"]
    edit(folder, files=files | changes)


ONE = {"bytes": 1, "sha256": "0" * 64}


@pytest.mark.parametrize(
    "name",
    [
        "/etc/hostname",
        "../step-00000003/rank0.json",
        "model/../../step-00000003/rank0.json",
        "model/sub/file",
        "other/file",
        "model/",
        "",
        ".",
        "..",
        "./rank0.json",
        "model\\file",
        "a\0b",
        "-rf",
        "\x1b[31mred\n",
        pytest.param("x" * 5000, id="long"),
    ],
)
def test_a_manifest_that_names_what_is_no_file_of_a_checkpoint_is_damaged(folder, name):
    edit_files(folder, **{name: ONE})
    assert_named_and_passed_over(folder, "which is no file of a checkpoint")
    assert "\x1b" not in find("auto", folder, COMM).remarks[0]


@pytest.mark.parametrize("value", [None, True, -1, 1.0, "12", [1], {}, 10**400, 2**63, 4])
@pytest.mark.parametrize("key", ["format", "iteration", "world_size", "bytes"])
def test_a_manifest_with_a_number_that_is_none_is_damaged(folder, key, value):
    if key == "bytes":
        edit_files(folder, **{"rank0.json": {"bytes": value, "sha256": "0" * 64}})
    else:
        edit(folder, **{key: value})
    assert_named_and_passed_over(folder)


OTHER_TYPES = (None, 1, [], {}, "", "zz")
OF_OTHER_TYPES = [(key, value) for key in ("files", "is_best", "sha256", "facts") for value in OTHER_TYPES]
OF_OTHER_TYPES += [("run", value) for value in OTHER_TYPES if not isinstance(value, str)]


@pytest.mark.parametrize(("key", "value"), OF_OTHER_TYPES)
def test_a_manifest_with_a_value_of_another_type_is_damaged(folder, key, value):
    if key == "sha256":
        edit_files(folder, **{"rank0.json": {"bytes": 1, "sha256": value}})
    elif key == "facts":
        edit_files(folder, **{"rank0.json": value})
    else:
        edit(folder, **{key: value})
    assert_named_and_passed_over(folder)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        '"',
        "{",
        '{"format": NaN}',
        '{"a": 1e999}',
        pytest.param("[" * 100_000, id="deep"),
        "\xff",
        '{"format": 2}',
    ],
)
def test_a_manifest_that_is_not_json_is_damaged(folder, text):
    (folder / "step-00000005" / "manifest.json").write_text(text, encoding="latin-1")
    assert_named_and_passed_over(folder, "manifest.json")


def test_a_manifest_of_another_iteration_is_damaged(folder):
    shutil.rmtree(folder / "step-00000005")
    shutil.copytree(folder / "step-00000003", folder / "step-00000005")
    assert_named_and_passed_over(folder, "manifest.json is that of iteration 3")


def test_if_none_is_whole_one_sentence_says_so(folder):
    for place in folder.iterdir():
        truncate(place / "training.json")
    with pytest.raises(UserError) as raised:
        find("auto", folder, COMM)
    first = f"no whole checkpoint is left in {folder}: the checkpoint {folder / 'step-00000005'} is damaged (training"
    assert str(raised.value).startswith(first)
    assert str(raised.value).endswith(", and 1 more.")


def forge(folder, name, content):
    """Replace a file by one that the manifest vouches for: its author is not to be trusted."""
    (folder / "step-00000005" / name).write_bytes(content)
    facts = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    edit_files(folder, **{name: facts})


@pytest.mark.parametrize("name", ["training.json", "rank0.json"])
@pytest.mark.parametrize(
    "content", [b"", b"[]", b"null", b"{}", b'{"training": 1, "sync": 1, "scalars": 1, "strategy": 1}', b"\xff\xff"]
)
def test_a_forged_json_file_is_damaged(folder, name, content):
    forge(folder, name, content)
    assert_named_and_passed_over(folder, name)


def safetensors(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


FORGED = {
    "empty": b"",
    "pickle": b"\x80\x04\x95",
    "noise": b"\xff" * 64,
    "endless header": struct.pack("<Q", 2**62) + b"{}",
    "half a header": safetensors(b"{"),
    "a list": safetensors([]),
    "huge shape": safetensors({"a@0": {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 4]}}, b"1234"),
    "outside": safetensors({"a@0": {"dtype": "F32", "shape": [1], "data_offsets": [0, 2**62]}}, b"1234"),
    "unknown type": safetensors({"a@0": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}, b"1234"),
    "unread type": safetensors({"a@0": {"dtype": "F8_E5M2", "shape": [4], "data_offsets": [0, 4]}}, b"1234"),
    "metadata": safetensors({"__metadata__": 5}),
}


@pytest.mark.parametrize("name", ["model/model.safetensors", "optimizer.rank0.safetensors", "own.rank0.safetensors"])
@pytest.mark.parametrize("content", FORGED.values(), ids=FORGED.keys())
def test_a_forged_file_of_tensors_is_damaged(folder, name, content):
    forge(folder, name, content)
    assert_named_and_passed_over(folder, name)


@pytest.mark.parametrize("name", ["model/model.safetensors", "optimizer.rank0.safetensors"])
@pytest.mark.parametrize("metadata", [{}, {"shapes": "[", "buffers": "{"}, {"shapes": "[]", "buffers": "{}"}], ids=repr)
def test_forged_metadata_are_damaged(folder, name, metadata):
    forge(folder, name, safetensors({"__metadata__": metadata}))
    assert_named_and_passed_over(folder, name)


def pieces(folder, tensors, shapes):
    path = folder.parent / "forged"
    save_file(tensors, path, {"shapes": json.dumps(shapes)})
    forge(folder, "optimizer.rank0.safetensors", path.read_bytes())


@pytest.mark.parametrize(
    ("tensors", "shapes", "word"),
    [
        ({"exp_avg/a@0": 4}, {"exp_avg/a": [5]}, "not all there"),
        ({"exp_avg/a@0": 4, "exp_avg/a@3": 2}, {"exp_avg/a": [5]}, "do not fit together"),
        ({"exp_avg/a@1": 4}, {"exp_avg/a": [4]}, "do not fit together"),
        ({}, {"exp_avg/a": [4]}, "not all there"),
        ({"exp_avg/a@0": 4}, {}, "no piece of a tensor"),
        ({"exp_avg/a": 4}, {"exp_avg/a": [4]}, "no piece of a tensor"),
        ({"exp_avg/a@-1": 4}, {"exp_avg/a": [4]}, "no piece of a tensor"),
        ({"exp_avg/a@²": 4}, {"exp_avg/a": [4]}, "no piece of a tensor"),
        ({"exp_avg/a@" + "9" * 30: 4}, {"exp_avg/a": [4]}, "no piece of a tensor"),
        ({"exp_avg/a@0": 4}, {"exp_avg/a": "4"}, "as a shape"),
        ({"exp_avg/a@0": 4}, {"exp_avg/a": [-2, -2]}, "as a shape"),
        ({"exp_avg/a@0": 4}, {"exp_avg/a": [4.0]}, "as a shape"),
        ({"exp_avg/a@0": 4}, {"exp_avg/a": [True]}, "as a shape"),
        ({"exp_avg/a@0": 0}, {"exp_avg/a": [0, 2**40, 2**40]}, "as a shape"),
        ({"exp_avg/a@0": 4}, {"exp_avg/a": [2**62, 2**62]}, "as a shape"),
        ({"exp_avg/a@0": 4}, {"exp_avg/a": [1] * 100}, "as a shape"),
        ({"weights/a@0": 4}, {"weights/a": [4]}, "among the optimizer"),
    ],
)
def test_forged_pieces_that_make_no_tensor_are_damaged(folder, tensors, shapes, word):
    pieces(folder, {key: torch.zeros(size) for key, size in tensors.items()}, shapes)
    assert_named_and_passed_over(folder, word)


def test_pieces_of_two_types_make_no_tensor(folder):
    tensors = {"exp_avg/a@0": torch.zeros(2), "exp_avg/a@2": torch.zeros(2, dtype=torch.int64)}
    pieces(folder, tensors, {"exp_avg/a": [4]})
    assert_named_and_passed_over(folder, "do not fit together")


def test_files_full_of_noise_never_raise_anything_but_damaged(folder):
    """500 seeded damages of every kind to any file, each vouched for by the manifest half of the time."""
    place, draw = folder / "step-00000005", random.Random(15)
    contents = {name: (place / name).read_bytes() for name in NAMES}
    said = []
    for _ in range(500):
        name = draw.choice(NAMES)
        content = bytearray(contents[name])
        for _ in range(draw.choice((1, 2, 30))):
            at = draw.randrange(max(1, len(content)))
            if content and draw.random() < 0.5:
                content[at] = draw.randrange(256)
            else:
                content[at : at + draw.randrange(9)] = draw.choice((b"", b"-", b"9" * 20, b"null", b"@", b"\0\xff"))
        if name != "manifest.json" and draw.random() < 0.5:
            forge(folder, name, bytes(content))
        else:
            (place / name).write_bytes(content)
        try:
            checkpoint = open_checkpoint(place)
            with contextlib.suppress(UserError):
                checkpoint.restore(Stateful(COMM), COMM, SYNC)
        except Damaged as error:
            said.append(str(error))
        for each, whole in contents.items():
            (place / each).write_bytes(whole)
    assert len(said) > 250
    assert not [sentence for sentence in said if "\n" in sentence or len(sentence) > 500]
