"""The flags that only SQuAD has."""

from dataclasses import dataclass

from cos598d.terminal.fields import flag

GROUP = "SQuAD"  # their heading in --help


@dataclass(frozen=True)
class SquadOptions:
    """Names and defaults as in pytorch-transformers' example."""

    train_file: str | None = flag(
        None,
        "file to train on, a path or a name in the data folder (default: train-v1.1.json there)",
        group=GROUP,
        metavar="FILE",
        is_local=True,
    )
    predict_file: str | None = flag(
        None,
        "file to evaluate on (default: dev-v1.1.json in the data folder)",
        group=GROUP,
        metavar="FILE",
        is_local=True,
    )
    version_2_with_negative: bool = flag(
        False, "SQuAD 2.0: questions may have no answer; default files are those of v2.0", group=GROUP
    )
    null_score_diff_threshold: float = flag(
        0.0, "predict no answer if its score is higher than the best answer's by more than X", group=GROUP
    )
    doc_stride: int = flag(128, "word pieces from one window over a long context to the next", group=GROUP, least=1)
    max_query_length: int = flag(64, "word pieces of a question; longer ones are cut", group=GROUP, least=1)
    max_answer_length: int = flag(30, "word pieces of the longest answer that is predicted", group=GROUP, least=1)
    n_best_size: int = flag(20, "answers kept for each question in nbest_predictions.json", group=GROUP, least=1)
    verbose_logging: bool = flag(
        False, "print every question whose answer is not exactly at its given place", group=GROUP, is_local=True
    )
