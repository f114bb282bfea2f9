"""The nine GLUE tasks: columns, labels, metrics, folders, errors; and the bundled samples."""

import hashlib
import json
import warnings

import numpy as np
import pytest
from data_files import refusal, write_task
from programs import ROOT

from cos598d.data import get_task
from cos598d.data.glue.course import compute_metrics
from cos598d.data.glue.read import FORMATS, read_rows
from cos598d.data.samples import rte_sample, squad_sample, vocabulary, write_rte_sample, write_squad_sample
from cos598d.data.text.tokenization import load_encoder
from cos598d.errors import UserError

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "one", "two", '"', "quoted"]
# Class ids (or scores) of the two training rows and, for pairs, whether there is a second text.
EXPECTED = {
    "cola": ([1, 0], False),
    "sst-2": ([0, 1], False),
    "mrpc": ([1, 0], True),
    "sts-b": ([2.5, 5.0], True),
    "qqp": ([1, 0], True),
    "mnli": ([2, 0], True),
    "qnli": ([1, 0], True),
    "rte": ([1, 0], True),
    "wnli": ([1, 0], True),
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("COS598D_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def encoder():
    return load_encoder("bert", PIECES, True)


@pytest.mark.parametrize("name", FORMATS)
def test_each_task_reads_its_texts_and_labels_from_the_official_columns(name, tmp_path, encoder):
    folder = write_task(tmp_path / name, name)
    task = get_task(name.upper())
    task.check(folder)
    labels, pair = EXPECTED[name]
    features = task.load("train", folder, encoder, 16)
    assert features.labels.tolist() == labels
    assert features.labels.dtype == (np.float32 if name == "sts-b" else np.int64)
    one, two = PIECES.index("one"), PIECES.index("two")
    batch = features.collate([0])
    if pair:
        assert batch["input_ids"].tolist() == [[2, one, 3, two, 3]]
        assert batch["token_type_ids"].tolist() == [[0, 0, 0, 1, 1]]
    else:
        assert batch["input_ids"].tolist() == [[2, one, two, 3]]
        assert not batch["token_type_ids"].any()
    assert [len(task.load(part, folder, encoder, 16)) for part in task.evaluation_parts] == (
        [1, 2] if name == "mnli" else [1]
    )
    assert (task.head, task.num_labels) == ("sequence_classification", {"mnli": 3, "sts-b": 1}.get(name, 2))


def test_byte_order_marks_line_ends_quotes_and_separators_are_read(tmp_path, encoder):
    folder = write_task(tmp_path / "RTE", "rte")
    header, body = "index\tsentence1\tsentence2\tlabel\r\n", '0\t"quoted one\ttwo " \u2028 \x85 a\tentailment\r\n'
    (folder / "train.tsv").write_bytes(b"\xef\xbb\xbf" + (header + body + "\r\n1\tone\ttwo\tentailment").encode())
    features = get_task("rte").load("train", folder, encoder, 32)
    assert len(features) == 2
    assert features.labels.tolist() == [0, 0]
    words = [PIECES[piece] for piece in features.collate([0])["input_ids"][0].tolist()]
    assert words == ["[CLS]", '"', "quoted", "one", "[SEP]", "two", '"', "a", "[SEP]"]
    (folder / "train.tsv").write_bytes(b"\xef\xbb\xbfgj04\t1\t\tone\n")  # no header that could hide the mark
    (row,) = read_rows(folder / "train.tsv", FORMATS["cola"])
    assert (row.line, row.identity, row.text_a, row.text_b, row.label) == (1, "0", "one", None, "1")


# Read by its 15 columns, the row would have another label.
MNLI_ROW_CUT = "dev_matched.tsv, line 3: 15 columns where MNLI needs 16"
BAD_ROWS = [
    ("rte", b"0\tone\ttwo", "train.tsv, line 3: 3 columns where RTE needs 4"),
    ("rte", b"0\tone\ttwo\tmaybe", "train.tsv, line 3: unknown label 'maybe'"),
    ("rte", b"0\tone\ttwo\t", "train.tsv, line 3: unknown label ''"),
    ("rte", b"0\t\xe9t\xe9\ttwo\tentailment", "train.tsv, line 3: byte 0xe9 is not UTF-8"),
    ("cola", b"gj04\t1", "train.tsv, line 3: 2 columns where CoLA needs 4"),
    ("sts-b", b"0\tn\tf\t2012\t1\tx\tx\tone\ttwo\thigh", "train.tsv, line 3: the score 'high' is not a number"),
    ("sts-b", b"0\tn\tf\t2012\t1\tx\tx\tone\ttwo\tnan", "train.tsv, line 3: the score 'nan' is not a number"),
    ("sts-b", b"0\tn\tf\t2012\t1\tx\tx\tone\ttwo", "train.tsv, line 3: 9 columns where STS-B needs 10"),
    ("qqp", b"was this\tone question?\t0", "train.tsv, line 3: 3 columns where QQP needs 6"),
    ("mnli", b"one column", "train.tsv, line 3: 1 column where MNLI needs 12"),
    ("mnli", b"0\t9\t9n\tfiction\t(b)\t(b)\t(p)\t(p)\tone\ttwo\ta\tb\tc\td\tentailment", MNLI_ROW_CUT),
]


@pytest.mark.parametrize(("name", "row", "sentence"), BAD_ROWS)
def test_an_error_names_file_and_line_of_a_bad_row(name, row, sentence, tmp_path, encoder):
    folder = write_task(tmp_path / "data", name)
    part = sentence.split(".")[0]
    file = folder / f"{part}.tsv"
    lines = file.read_bytes().split(b"\n")
    file.write_bytes(b"\n".join([*lines[:2], row, *lines[2:]]))
    with refusal(sentence, str(folder)):
        get_task(name).load(part, folder, encoder, 16)
    assert not [kept for kept in (tmp_path / "cache").rglob("*") if kept.is_file() and kept.suffix != ".lock"]


@pytest.mark.parametrize("name", [name for name in FORMATS if FORMATS[name].has_header])
@pytest.mark.parametrize("damage", ["without", "renamed", "reordered", "one more"])
def test_an_error_names_the_columns_found_and_expected(name, damage, tmp_path, encoder):
    """A file without a header would lose its first example, one with other columns be read by wrong texts or labels."""
    folder = write_task(tmp_path / "data", name)
    task, form = get_task(name), FORMATS[name]
    for part in form.parts:
        file = folder / f"{part}.tsv"
        header, *rows = file.read_text().splitlines()
        columns = header.split("\t")
        if damage == "reordered":
            columns[form.text_a], columns[form.label] = columns[form.label], columns[form.text_a]
        elif damage == "renamed":
            columns[form.text_a] = "other\x1b[31m"
        elif damage == "one more":
            columns.append("more")
        file.write_text("\n".join([*(["\t".join(columns)] if damage != "without" else rows[:1]), *rows]) + "\n")
        if damage == "one more" and form.label >= 0:
            assert len(task.load(part, folder, encoder, 16)) == len(rows)  # columns after the last are nobody's
            continue
        shown = rows[0].split("\t") if damage == "without" else columns
        found = ", ".join(shown).replace("\x1b", r"\x1b")[:60]
        expected = f"{form.folder}'s {header.replace(chr(9), ', ')}"
        with refusal(f"{part}.tsv, line 1: the columns are {found}", expected):
            task.load(part, folder, encoder, 16)


def test_a_header_may_differ_in_case_and_white_space(tmp_path, encoder):
    folder = write_task(tmp_path / "RTE", "rte")
    body = (folder / "train.tsv").read_text().replace("index\tsentence1", "\nIndex \tSentence1", 1)
    (folder / "train.tsv").write_text("\ufeff" + body)
    assert len(get_task("rte").load("train", folder, encoder, 16)) == 2


def test_a_header_in_cola_s_files_is_refused(tmp_path, encoder):
    folder = write_task(tmp_path / "CoLA", "cola")
    assert len(get_task("cola").load("train", folder, encoder, 16)) == 2
    body = (folder / "train.tsv").read_text()
    (folder / "train.tsv").write_text("source\tlabel\tstar\tsentence\n" + body)
    with refusal("train.tsv, line 1: unknown label 'label'. Use one of the labels of CoLA: 0, 1"):
        get_task("cola").load("train", folder, encoder, 16)


def test_the_few_broken_lines_of_qqp_s_own_files_are_skipped(tmp_path):
    file = tmp_path / "train.tsv"
    rows = [f"{n}\t1\t2\tone\ttwo\t0" for n in range(1000)]
    file.write_text("\n".join(["id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate", *rows, "\tbroken question\t0"]))
    assert len(list(read_rows(file, FORMATS["qqp"]))) == 1000
    file.write_text(file.read_text() + "\n\tanother\t1")
    with pytest.raises(UserError, match="line 1002: 3 columns"):
        list(read_rows(file, FORMATS["qqp"]))


def test_an_error_names_a_missing_or_empty_file(tmp_path, encoder):
    task = get_task("rte")
    with pytest.raises(UserError, match=r"There is no folder .*nowhere"):
        task.check(tmp_path / "nowhere")
    folder = write_task(tmp_path / "RTE", "rte")
    (folder / "dev.tsv").unlink()
    with refusal("dev.tsv is missing", "download_glue_data.py", "--data_dir"):
        task.check(folder)
    (folder / "dev.tsv").write_text("")
    with refusal("dev.tsv is empty"):
        task.check(folder)
    for content, words in (
        ("index\tsentence1\tsentence2\tlabel\n", "dev.tsv has no rows"),
        ("a file about something else\n", "dev.tsv, line 1: 1 column where RTE needs 4"),
    ):
        (folder / "dev.tsv").write_text(content)
        with refusal(words):
            task.load("dev", folder, encoder, 16)
    with pytest.raises(UserError, match="CoLA has no bundled sample"):
        get_task("cola").check(None)
    with pytest.raises(ValueError, match="rte has the parts train, dev, not 'test'"):
        task.load("test", folder, encoder, 16)


def test_an_error_for_an_unknown_task_lists_the_known_ones():
    with pytest.raises(UserError, match=r"unknown task 'boolq'. Choose one of cola, sst-2, .*wnli"):
        get_task("boolq")


def test_data_is_found_in_its_folder_or_the_parent_or_glue_dir_or_the_sample(tmp_path):
    folder = write_task(tmp_path / "glue" / "RTE", "rte")
    above = folder.parent
    assert get_task("rte").locate(str(folder), {}) == (folder, str(folder))
    assert get_task("RTE").locate(str(above), {"GLUE_DIR": "ignored"}) == (folder, str(folder))
    assert get_task("rte").locate(None, {"GLUE_DIR": str(above)}) == (folder, "GLUE_DIR/RTE")
    assert get_task("rte").locate(None, {"GLUE_DIR": ""}) == (None, "the bundled sample")
    for (name, data_dir, environ), sentence in [
        (("rte", str(tmp_path), {}), "neither train.tsv nor RTE"),
        (("rte", str(tmp_path / "none"), {}), "is not a folder"),
        (("cola", None, {"GLUE_DIR": str(above)}), "which has no folder CoLA"),
        (("sst-2", None, {}), "No data for SST-2"),
    ]:
        with refusal(sentence, "--data_dir", "GLUE_DIR", "python download_glue_data.py --data_dir D --tasks "):
            get_task(name).locate(data_dir, environ)


def test_the_bundled_sample_loads_as_rte(encoder):
    task = get_task("rte")
    task.check(None)
    features = task.load("dev", None, encoder, 64)
    rows = rte_sample("dev")
    assert features.labels.tolist() == [["entailment", "not_entailment"].index(label) for _, _, label in rows]


def test_metrics_are_the_official_ones():
    predicted, labels = np.array([1, 1, 1, 0, 0, 0]), np.array([1, 1, 0, 0, 1, 0])
    # 2 true positives, 2 true negatives, 1 false of each kind: precision = recall = 2/3, mcc = (4 - 1) / 9.
    assert compute_metrics("rte", predicted, labels) == {"acc": pytest.approx(4 / 6)}
    assert compute_metrics("mrpc", predicted, labels) == pytest.approx({"acc": 4 / 6, "f1": 2 / 3, "acc_and_f1": 2 / 3})
    assert compute_metrics("cola", predicted, labels) == {"mcc": pytest.approx(1 / 3)}
    # Ranks 1 2 4 3 against 1 2 3 4: Spearman 1 - 6 * 2 / (4 * 15) = 0.8. Pearson: cov 3.5 / sqrt(5 * 8.75).
    scores, gold = np.array([1.0, 2.0, 5.0, 4.0]), np.array([1.0, 2.0, 3.0, 4.0])
    found = compute_metrics("sts-b", scores, gold)
    pearson = np.cov(scores, gold)[0, 1] / (scores.std(ddof=1) * gold.std(ddof=1))
    assert found == pytest.approx({"pearson": pearson, "spearmanr": 0.8, "corr": (pearson + 0.8) / 2})


def test_constant_answers_give_metrics_without_nan_or_warning():
    same, labels = np.zeros(4), np.array([1, 0, 1, 0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compute_metrics("qqp", same.astype(int), labels) == {"acc": 0.5, "f1": 0.0, "acc_and_f1": 0.25}
        assert compute_metrics("cola", same.astype(int), labels) == {"mcc": 0.0}
        assert compute_metrics("sts-b", same, labels) == {"pearson": 0.0, "spearmanr": 0.0, "corr": 0.0}


def test_outputs_are_scored_by_their_largest_or_as_numbers(tmp_path, encoder):
    task = get_task("mnli")
    folder = write_task(tmp_path / "MNLI", "mnli")
    features = task.load("dev_mismatched", folder, encoder, 16)
    outputs = np.array([[0.1, 0.2, 0.9], [3.0, 1.0, 2.0]], dtype=np.float32)  # right, wrong
    assert task.score("dev_mismatched", outputs, features).metrics == {"acc_mismatched": 0.5}
    assert task.score("dev_matched", outputs, features).metrics == {"acc": 0.5}
    similarity = get_task("sts-b")
    features = similarity.load("train", write_task(tmp_path / "STS-B", "sts-b"), encoder, 16)
    assert similarity.score("dev", np.array([[1.0], [2.0]]), features).metrics == pytest.approx(
        {"pearson": 1.0, "spearmanr": 1.0, "corr": 1.0}
    )


def test_the_data_package_loads_no_large_library(start):
    code = "import sys, cos598d.data; print({'torch', 'sklearn', 'scipy', 'tokenizers'} & {*sys.modules})"
    program = start("import", ["-c", code], {"PYTHONPATH": str(ROOT)})
    assert program.wait() == 0, program.text
    assert program.text == "set()\n"


# The bundled samples


@pytest.mark.parametrize(
    ("write", "names", "digest"),
    [
        (
            write_rte_sample,
            ["train.tsv", "dev.tsv"],
            "5e3a61db77c887e8c398a3fd3117fc89d842e26d5439b90d8c2b89965a2701bc",
        ),
        (
            write_squad_sample,
            ["train-v1.1.json", "train-v2.0.json", "dev-v1.1.json", "dev-v2.0.json"],
            "bcfb22b6858e7af6800ce4be7808dafbd03086f15277c777bd461c6c924fc568",
        ),
    ],
)
def test_the_samples_are_the_same_everywhere(write, names, digest, tmp_path):
    folder = write(tmp_path)
    assert {path.name for path in folder.iterdir()} == {*names}
    assert hashlib.sha256(b"".join((folder / name).read_bytes() for name in names)).hexdigest() == digest
    if write is write_squad_sample:
        assert json.loads((folder / "train-v2.0.json").read_text(encoding="utf-8")) == squad_sample("train", True)


def test_the_vocabulary_has_every_word_of_the_sample():
    encoder = load_encoder("bert", vocabulary(), True)
    unknown = vocabulary().index("[UNK]")
    texts = [sentence for pair in rte_sample("dev") for sentence in pair[:2]]
    assert not any(unknown in ids for ids in encoder.encode_many(texts))
    assert vocabulary()[:5] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert len(set(vocabulary())) == len(vocabulary())
