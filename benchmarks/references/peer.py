"""What the scripts of both peers share: the command line, what prepare.py has written, and the curve of a run."""

import argparse
import json
import time
from pathlib import Path

import torch


class Curve:
    """Saves models at even distances, and counts the seconds of training without those of saving."""

    def __init__(self, run_dir, total, saved):
        self.run_dir = run_dir
        self.due = [round(total * part / saved) for part in range(1, saved + 1)]
        self.seconds = 0.0
        self.begun = time.perf_counter()

    def reached(self, iteration, step, episode, model):
        """Saves the model where it is due."""
        self.seconds += time.perf_counter() - self.begun
        if iteration in self.due:
            self.save(step, episode, model)
        self.begun = time.perf_counter()

    def save(self, step, episode, model):
        """Saves the model and writes its record."""
        name = f"models/{step}"
        model.save_pretrained(self.run_dir / name)
        record = {"step": step, "episode": episode, "seconds": self.seconds, "model": name}
        with open(self.run_dir / "train.jsonl", "a") as file:
            file.write(f"{json.dumps(record)}\n")


def main(claims, packages, description):
    """Trains by claims[--claim](inputs, flags, rows, seed, run_dir), which returns the settings of the trainer. Writes
    models/, train.jsonl and peer.json."""
    parser = argparse.ArgumentParser(description=description.partition("\n\n")[0])
    parser.add_argument("--claim", choices=claims, required=True)
    parser.add_argument("--inputs", type=Path, required=True, help="directory that prepare.py has written")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.run_dir.mkdir(parents=True, exist_ok=True)
    flags = json.loads((options.inputs / "settings.json").read_text())
    rows = [json.loads(line) for line in (options.inputs / "rows.jsonl").read_text().splitlines()]
    settings = claims[options.claim](options.inputs, flags, rows, options.seed, options.run_dir)
    versions = {package.__name__: package.__version__ for package in (*packages, torch)}
    about = {"versions": versions, "threads": torch.get_num_threads(), "settings": settings}
    (options.run_dir / "peer.json").write_text(json.dumps(about, indent=2))
