"""One typed loader reads records: every command names damage by file, field and what was expected."""

import pytest
from report_records import edit, write_run
from scale_records import write_bench

from cos598d.commands.cli import main
from cos598d.records.kinds import Fields
from cos598d.records.run import ITERATION, read_summary
from cos598d.records.old_schema import read, read_rows

DEEP = "[" * 100_000


def said(capsys, *words):
    """The exit code and the only line on standard error of a command that is to fail, without `error: `."""
    code = main([str(word) for word in words])
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: ")
    return code, lines[0].removeprefix("error: ")


DAMAGES = [
    (lambda s: s.update(world_size=2.0), "its world_size is 2.0, where a number of ranks from 1 to 65536 is expected"),
    (lambda s: s.update(world_size=True), "its world_size is true"),
    (lambda s: s.update(world_size=10**9), "its world_size is 1000000000"),
    (lambda s: s.pop("task"), "it has no task, where text is expected"),
    (lambda s: s["losses"].insert(2, "low"), 'its losses[2] is "low", where a number is expected'),
    (lambda s: s["seconds_per_iteration"].update(median=[1]), "its seconds_per_iteration.median is [1]"),
    (lambda s: s["seconds_per_iteration"].update(interval_95=[1]), "where a list of 2 or null is expected"),
    (lambda s: s["seconds_per_iteration"].pop("first"), "it has no seconds_per_iteration.first"),
    (lambda s: s["phases"].pop("seconds_clip"), "it has no phases.seconds_clip, where a number or null is expected"),
    (lambda s: s.update(bytes_sent_per_iteration=[1]), "its bytes_sent_per_iteration is [1], where a list of 2 is"),
    (lambda s: s["wire"].update(ranks_by_interface=[[2]]), "its wire.ranks_by_interface[0][0] is 2, where a rank of 2"),
    (
        lambda s: s["wire"].update(bytes_sent_per_iteration=[1]),
        "its wire.bytes_sent_per_iteration is [1], where",
    ),
    (lambda s: s["epochs"][0].update(counted_bytes_sent=["x", 1]), "its epochs[0].counted_bytes_sent[0]"),
    (lambda s: s["epochs"][0].update(predicted_bytes_sent=[1, None]), "its epochs[0].predicted_bytes_sent"),
    (lambda s: s.update(sync=["\x1b"]), 'its sync is ["\\x1b"], where text is expected'),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGES)
def test_every_command_names_a_damaged_summary_and_its_field(damage, words, tmp_path, capsys):
    folder = write_run(tmp_path / "run", wire_share=1.0)
    edit(folder / "summary.json", damage)
    for command in (["compare", folder], ["compare", "--markdown", folder], ["traffic", folder], ["report", folder]):
        more = ["-o", tmp_path / "page.md"] if command[0] == "report" else []
        code, line = said(capsys, *command, *more)
        assert code == 1
        assert line.startswith(f"{folder / 'summary.json'} is damaged: "), line
        assert words in line
        assert line.endswith(". Run it again.")


TEXTS = [
    ('{"losses": [1e999]}', "1e999 is too large for a number"),
    ('{"losses": [NaN]}', "NaN is not a JSON number"),
    ('{"losses": [Infinity]}', "Infinity is not a JSON number"),
    ("{", "is not JSON"),
    (DEEP, "nested too deep"),
    ("[" * 100 + "]" * 100, "nested more than 32 deep"),
    ("[]", "it is [], where an object is expected"),
    ("", "is not JSON"),
    ("9" * 5000, "is not JSON"),
    ("\ufeff{}", "is not JSON"),
]


@pytest.mark.parametrize(("text", "words"), TEXTS)
@pytest.mark.parametrize("name", ["summary.json", "environment.json", "config.json", "bench.json"])
def test_a_file_that_is_not_json_is_named(name, text, words, tmp_path, capsys):
    if name == "bench.json":
        folder = write_bench(tmp_path / "bench", syncs="flat")
        command = ["scale", folder]
    else:
        folder = write_run(tmp_path / "run")
        command = ["compare", folder]
    (folder / name).write_text(text, encoding="utf-8")
    code, line = said(capsys, *command)
    assert code == 1
    assert str(folder / name) in line
    assert words in line
    assert len(line) < 500


def test_a_record_s_text_is_printable(tmp_path, capsys):
    folder = write_run(tmp_path / "run", sync="\x1b[2J", words="lone \ud800 surrogate")
    edit(folder / "environment.json", lambda found: found.update({"\x1bname": "\u202evalue"}))
    page = tmp_path / "page.html"
    assert main(["report", str(folder), "-o", str(page)]) == 0
    text = page.read_text()
    assert "lone \\ud800 surrogate" in text
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert read_summary(folder)["sync"] == "\\x1b[2J"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda b: b["setting"].update(world_size=4.0), "its setting.world_size is 4.0"),
        (lambda b: b["summary"]["flat"].update(seconds_median="fast"), 'its summary.flat.seconds_median is "fast"'),
        (lambda b: b["traffic"]["flat"].update(calls=[]), "its traffic.flat.calls is [], where a list of 1 or more"),
        (lambda b: b["arrivals"]["tensors"][3].update(shape=[1.5]), "its arrivals.tensors[3].shape[0] is 1.5"),
        (lambda b: b["environment"]["network"].update(rate=3), "its environment.network.rate is 3"),
        (lambda b: b["samples"].append(None), "where an object is expected"),
    ],
)
def test_a_damaged_bench_is_named_with_its_field(damage, words, tmp_path, capsys):
    folder = write_bench(tmp_path / "bench", syncs="flat")
    edit(folder / "bench.json", damage)
    for command in (["scale", folder], ["report", folder, "-o", tmp_path / "page.md"]):
        code, line = said(capsys, *command)
        assert code == 1
        assert line.startswith(f"{folder / 'bench.json'} is damaged: "), line
        assert words in line


@pytest.mark.parametrize(
    "damage",
    [
        lambda s: s.pop("epochs"),
        lambda s: s["wire"].pop("packets_sent_per_iteration"),
        lambda s: s["epochs"][0].pop("predicted_bytes_sent"),
        lambda s: s["epochs"][0].update(counted_bytes_sent=None),
        lambda s: s["wire"].update(packets_sent_per_iteration=[None, None]),
    ],
)
def test_traffic_refuses_a_record_without_its_counts(damage, tmp_path, capsys):
    folder = write_run(tmp_path / "run", wire_share=1.0)
    edit(folder / "summary.json", lambda s: s["wire"].update(packets_sent_per_iteration=[9, 9]))
    assert main(["traffic", str(folder)]) == 0
    capsys.readouterr()
    edit(folder / "summary.json", damage)
    code, line = said(capsys, "traffic", folder)
    assert code == 1
    assert line.startswith("run did not count its traffic") or "no count of packets" in line


def test_rows_are_read_one_by_one_and_a_damaged_one_is_named_by_its_line(tmp_path):
    folder = write_run(tmp_path / "run")
    path = folder / "iterations.rank0.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:2], lines[2].replace('"seconds": ', '"seconds": -')]))
    rows = read_rows(path, ITERATION, "run again")
    assert [next(rows)["iteration"], next(rows)["iteration"]] == [1, 2]
    with pytest.raises(Exception, match=r"iterations.rank0.jsonl, line 3 is damaged: its seconds is -.* above 0"):
        next(rows)


def test_unknown_fields_may_have_any_value(tmp_path):
    path = tmp_path / "some.json"
    path.write_text('{"new": [1, {"x": null}]}')
    assert read(path, Fields(), "run again") == {"new": [1, {"x": None}]}


@pytest.mark.parametrize("name", ["iterations.rank0.jsonl", "iterations.rank1.jsonl", "communication.rank1.jsonl"])
def test_compare_names_a_file_of_rows_that_was_cut(name, tmp_path, capsys):
    folder = write_run(tmp_path / "run")
    path = folder / name
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    code, line = said(capsys, "compare", folder)
    assert code == 1
    assert line.startswith(f"{path} is damaged: its last row is not complete. ")
    path.write_bytes(b"\n".join(whole.splitlines()[:-1]) + b"\n")  # a whole last row, of an earlier iteration
    if "iterations.rank0" in name:
        code, line = said(capsys, "compare", folder)
        assert code == 1
        assert line.startswith(f"{path} ends at iteration 4 of 5, so it was cut. ")
    path.write_bytes(whole)
    assert main(["compare", str(folder)]) == 0
