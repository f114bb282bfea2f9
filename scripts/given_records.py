"""Makes the records that lesson 13 reads: benches cut down to what a comparison asks for.

    python scripts/given_records.py NAME=BENCH [NAME=BENCH ...] [--without LABEL] [--to FOLDER]

Each BENCH is a folder that `cos598d bench --output` has written; how they were made stands in each record.
"""

import argparse
import json
from pathlib import Path

from cos598d.records.bench import read_record
from cos598d.terminal.files import write_whole

SETTING = ("model", "precision", "world_size", "rounds", "batch", "tokens", "step")
FOLDER = Path(__file__).resolve().parents[1] / "cos598d" / "tools" / "learn" / "given"


def cut_down(bench, without=()):
    """What lesson 13 knows of a bench: its setting, link and commit, and each candidate's seconds by round."""
    setting, environment = bench["setting"], bench["environment"]
    seconds = {}
    for sample in sorted(bench["samples"], key=lambda sample: (sample["round"], sample["candidate"])):
        if sample["candidate"] not in without:
            seconds.setdefault(sample["candidate"], []).append(round(sample["seconds"], 6))
    known = {name: setting.get(name) for name in SETTING} | {"precision": setting.get("precision") or "fp32"}
    network = environment.get("network") or {}
    about = {"cores": environment.get("cores"), "link": network.get("rate"), "delay": network.get("delay")}
    labels = ",".join(sorted(set(seconds) - {"none", "ddp"}))
    command = f"cos598d bench {'--step ' if setting['step'] else ''}--sync {labels} --rounds {setting['rounds']}"
    command += f" --precision {known['precision']}" if known["precision"] != "fp32" else ""
    if about["link"]:
        command = f"cos598d cluster run --rate {about['link']} --delay {about['delay']} -- {command}"
    left_out = sorted({sample["candidate"] for sample in bench["samples"]} & set(without))
    facts = {"made_by": command, "left_out": left_out, "commit": environment.get("commit")}
    return facts | {"setting": known | about, "seconds": seconds}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("records", nargs="+", metavar="NAME=BENCH")
    parser.add_argument("--without", action="append", default=[], metavar="LABEL", help="leave this candidate out")
    parser.add_argument("--to", type=Path, default=FOLDER, metavar="FOLDER")
    options = parser.parse_args()
    for words in options.records:
        name, _, bench = words.partition("=")
        record = cut_down(read_record(Path(bench))[1], options.without)
        path = options.to / f"{name}.json"
        write_whole(path, (json.dumps(record, indent=1) + "\n").encode())
        print(f"{path}: {', '.join(record['seconds'])}")


if __name__ == "__main__":
    main()
