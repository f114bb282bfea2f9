"""Small files of the nine GLUE tasks, in the columns that GLUE distributes."""

from cos598d.data import TaskFlags, get_task

STSB = "index genre filename year old_index source1 source2 sentence1 sentence2 score"
MNLI_TRAIN = (
    "index promptID pairID genre sentence1_binary_parse sentence2_binary_parse sentence1_parse sentence2_parse "
    "sentence1 sentence2 label1 gold_label"
)
MNLI_DEV = MNLI_TRAIN.replace("label1", "label1 label2 label3 label4 label5")
MNLI_ROW = "0 9 9n fiction (b) (b) (p) (p) one two"

# Each task's files as GLUE distributes them: a space means a tab here, and ~ a space.
FILES = {
    "cola": {"train": ["gj04 1 ? one~two", "bc01 0 * two"], "dev": ["gj04 1 ? one"]},
    "sst-2": {"train": ["sentence label", "one~two 0", "two 1"], "dev": ["sentence label", "one 1"]},
    "mrpc": {
        "train": ["Quality #1~ID #2~ID #1~String #2~String", "1 70 71 one two", "0 72 73 two one~one"],
        "dev": ["Quality #1~ID #2~ID #1~String #2~String", "1 74 75 one one"],
    },
    "sts-b": {
        "train": [STSB, "0 news MSR 2012 1 none none one two 2.500", "1 news MSR 2012 2 none none two one 5"],
        "dev": [STSB, "0 news MSR 2012 1 none none one one 0.000"],
    },
    "qqp": {
        "train": ["id qid1 qid2 question1 question2 is_duplicate", "133 213 214 one two 1", "9 1 2 two one 0"],
        "dev": ["id qid1 qid2 question1 question2 is_duplicate", "1 2 3 one one 1"],
    },
    "mnli": {
        "train": [MNLI_TRAIN, f"{MNLI_ROW} neutral neutral", f"{MNLI_ROW} entailment contradiction"],
        "dev_matched": [MNLI_DEV, f"{MNLI_ROW} a b c d e entailment"],
        "dev_mismatched": [MNLI_DEV, f"{MNLI_ROW} a b c d e neutral", f"{MNLI_ROW} a b c d e entailment"],
    },
    "qnli": {
        "train": ["index question sentence label", "0 one two not_entailment", "1 two one entailment"],
        "dev": ["index question sentence label", "0 one one entailment"],
    },
    "rte": {
        "train": ["index sentence1 sentence2 label", "0 one two not_entailment", "1 two one entailment"],
        "dev": ["index sentence1 sentence2 label", "0 one one entailment"],
    },
    "wnli": {
        "train": ["index sentence1 sentence2 label", "0 one two 1", "1 two one 0"],
        "dev": ["index sentence1 sentence2 label", "0 one one 1"],
    },
}


def task_at(place, name, **flags):
    """The task of that name with the data of a folder, or of a variable of the environment."""
    task = get_task(name, TaskFlags(**flags))
    task.find(place and str(place))
    return task


def write_task(folder, name):
    folder.mkdir(parents=True, exist_ok=True)
    for part, lines in FILES[name].items():
        text = "".join(f"{line}\n" for line in lines).replace(" ", "\t").replace("~", " ")
        (folder / f"{part}.tsv").write_text(text, encoding="utf-8")
    return folder
