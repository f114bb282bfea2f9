"""A damaged checkpoint is named with its file, and the one before is taken."""

import contextlib
import json
import os
import random
import shutil
import struct

import pytest
import torch
from safetensors.torch import save
from saved_states import COMM, SYNC, Stateful, save_all, vouch

from cos598d.checkpoints import find
from cos598d.checkpoints.layout import Damaged
from cos598d.checkpoints.restore import open_checkpoint
from cos598d.errors import UserError

NEWEST = "step-00000005"
MANIFEST, MODEL, OPTIMIZER = "manifest.json", "model/model.safetensors", "optimizer.rank0.safetensors"
TENSORS = (MODEL, OPTIMIZER, "own.rank0.safetensors")
NAMES = (MANIFEST, "training.json", "rank0.json", *TENSORS, "model/config.json", "model/vocab.txt")


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


def test_the_damages_cover_every_file_of_a_checkpoint(saved):
    place = saved / NEWEST
    assert sorted(str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()) == sorted(NAMES)


# What happens to a file.


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


# What happens to a checkpoint's place: the manifest's values change, or a file that the manifest then vouches for.


def edit(place, **changes):
    path = place / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_files(place, **changes):
    edit(place, files=json.loads((place / MANIFEST).read_text())["files"] | changes)


def forge(place, name, content):
    (place / name).write_bytes(content)
    vouch(place, name)


def safetensors(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def one_tensor(dtype, shape, end=4):
    return safetensors({"a@0": {"dtype": dtype, "shape": shape, "data_offsets": [0, end]}}, b"1234")


def pieces(tensors, shapes):
    found = {key: torch.zeros(size) if isinstance(size, int) else size for key, size in tensors.items()}
    return save(found, {"shapes": json.dumps(shapes)})


def cases():
    """Every damage of a checkpoint's place, with words of the sentence that names it."""
    for name in NAMES:
        for damage in (truncate, empty, grow, flip, os.unlink, fold, link, pipe):
            if (name, damage) != (MANIFEST, grow):  # white space at its end says nothing
                words = () if (name, damage) == (MANIFEST, flip) else (name,)
                yield f"{name} {damage.__name__}", lambda place, n=name, d=damage: d(place / n), words

    def changed(how, name, content, *words):
        return f"{how.__name__} {name} {content!r}"[:60], lambda place: how(place, **{name: content}), words

    one = {"bytes": 1, "sha256": "0" * 64}
    out = ("/etc/hostname", "../step-00000003/rank0.json", "model/../../step-00000003/rank0.json", "model/sub/file")
    odd = ("other/file", "model/", "", ".", "..", "./rank0.json", "model\\file", "a\0b", "-rf", "\x1b[31mred\n", "a\n")
    for name in (*out, *odd, "x" * 5000):
        yield changed(edit_files, name, one, "which is not a file of a checkpoint")
    for value in (None, True, -1, 1.0, "12", [1], {}, 10**400, 2**63, 4):
        for key in ("format", "iteration", "world_size"):
            yield changed(edit, key, value)
        yield changed(edit_files, "rank0.json", one | {"bytes": value})
    for value in (None, 1, [], {}, "", "zz"):
        yield from (changed(edit, key, value) for key in ("files", "is_best"))
        yield changed(edit_files, "rank0.json", one | {"sha256": value})
        yield changed(edit_files, "rank0.json", value)
        if not isinstance(value, str):
            yield changed(edit, "run", value)

    no_json = ("", "null", "[]", '"', "{", '{"format": NaN}', '{"a": 1e999}', "[" * 100_000, "\xff", '{"format": 2}')
    for text in no_json:
        yield (
            f"manifest {text[:20]}",
            lambda place, t=text: (place / MANIFEST).write_bytes(t.encode("latin-1")),
            (MANIFEST,),
        )

    def forged(name, what, content, word):
        return f"{name} {what}", lambda place: forge(place, name, content), (word,)

    half = b'{"training": 1, "sync": 1, "scalars": 1, "strategy": 1}'
    for name in ("training.json", "rank0.json"):
        yield from (forged(name, text, text, name) for text in (b"", b"[]", b"null", b"{}", half, b"\xff\xff"))
    files = {
        "empty": b"",
        "pickle": b"\x80\x04\x95",
        "noise": b"\xff" * 64,
        "endless header": struct.pack("<Q", 2**62) + b"{}",
        "half a header": safetensors(b"{"),
        "a list": safetensors([]),
        "huge shape": one_tensor("F32", [2**62, 2**62]),
        "outside": one_tensor("F32", [1], end=2**62),
        "unknown type": one_tensor("F99", [1]),
        "unread type": one_tensor("F8_E5M2", [4]),
        "metadata": safetensors({"__metadata__": 5}),
    }
    for name in TENSORS:
        yield from (forged(name, what, content, name) for what, content in files.items())
    for name in (MODEL, OPTIMIZER):
        for metadata in ({}, {"shapes": "[", "buffers": "{"}, {"shapes": "[]", "buffers": "{}"}):
            yield forged(name, metadata, safetensors({"__metadata__": metadata}), name)
    a, four = "exp_avg/a", [4]
    two_types = {f"{a}@0": torch.zeros(2), f"{a}@2": torch.zeros(2, dtype=torch.int64)}
    wrong_pieces = [
        ({f"{a}@0": 4}, {a: [5]}, "are missing"),
        ({f"{a}@0": 4, f"{a}@3": 2}, {a: [5]}, "do not fit together"),
        ({f"{a}@1": 4}, {a: four}, "do not fit together"),
        (two_types, {a: four}, "do not fit together"),
        ({}, {a: four}, "are missing"),
        ({f"{a}@0": 4}, {}, "not a piece of a tensor"),
        *(({a + at: 4}, {a: four}, "not a piece of a tensor") for at in ("", "@-1", "@²", "@" + "9" * 30)),
        *(({f"{a}@0": 4}, {a: shape}, "shape") for shape in ("4", [-2, -2], [4.0], [True], [2**62] * 2, [1] * 100)),
        ({f"{a}@0": 0}, {a: [0, 2**40, 2**40]}, "shape"),
        ({"weights/a@0": 4}, {"weights/a": four}, "among the optimizer"),
    ]
    for tensors, shapes, word in wrong_pieces:
        yield forged(OPTIMIZER, f"{list(tensors)} {shapes}"[:60], pieces(tensors, shapes), word)


CASES = list(cases())


@pytest.mark.parametrize(("damage", "words"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_damage_is_named_and_the_checkpoint_before_is_taken(folder, damage, words):
    """When it is the one that was asked for, it is refused."""
    damage(folder / NEWEST)
    found = find("auto", folder, COMM)
    assert found.iteration == 3
    (remark,) = found.remarks
    assert remark.startswith(f"the checkpoint {folder / NEWEST} is damaged (")
    assert not {"\n", "\x1b"} & set(remark)
    assert len(remark) < 500
    for word in words:
        assert word in remark
    strategy = Stateful(COMM)
    found.restore(strategy, COMM, SYNC)
    strategy.assert_loaded(Stateful(COMM, 3))
    with pytest.raises(
        UserError, match=r"this checkpoint is incomplete or damaged \(.*\). Give another one, or auto\.$"
    ):
        find(str(folder / NEWEST), None, COMM)


def test_a_linked_model_folder_and_another_iteration_s_manifest_are_damaged(folder, tmp_path):
    model = folder / NEWEST / "model"
    model.rename(tmp_path / "outside")
    model.symlink_to(tmp_path / "outside")
    assert "model is not a folder" in find("auto", folder, COMM).remarks[0]
    shutil.rmtree(folder / NEWEST)
    shutil.copytree(folder / "step-00000003", folder / NEWEST)
    assert "manifest.json belongs to iteration 3" in find("auto", folder, COMM).remarks[0]


def test_a_flipped_bit_in_the_manifest_is_noticed_or_changes_no_fact(folder):
    place = folder / NEWEST
    content = (place / MANIFEST).read_bytes()
    whole = json.loads(content)
    for byte in range(len(content)):
        changed = bytearray(content)
        changed[byte] ^= 1 << byte % 8
        (place / MANIFEST).write_bytes(changed)
        try:
            open_checkpoint(place)
        except Damaged:
            continue
        found = json.loads(changed)
        # Whose it is and how good it was is nobody else's to know; no file depends on it.
        assert {**found, "run": "", "is_best": ""} == {**whole, "run": "", "is_best": ""}, changed


def test_without_a_complete_checkpoint_the_error_names_the_newest(folder):
    for place in folder.iterdir():
        truncate(place / "training.json")
    first = f"no usable checkpoint is left in {folder}: the checkpoint {folder / NEWEST} is damaged (training"
    with pytest.raises(UserError) as raised:
        find("auto", folder, COMM)
    assert str(raised.value).startswith(first)
    assert str(raised.value).endswith(", and 1 more. Start over with --overwrite_output_dir.")


def test_files_with_noise_raise_only_damaged(folder):
    """500 seeded damages of every kind to any file, each vouched for by the manifest half of the time."""
    place, draw = folder / NEWEST, random.Random(15)
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
        if name != MANIFEST and draw.random() < 0.5:
            forge(place, name, bytes(content))
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
