"""Expert iteration on sums: sample, keep what is right, fine-tune on it by sft.py, again and again.

    python benchmarks/expert_iteration.py --rounds 5 --run-dir runs/expert-seed1

Source: Anthony et al. 2017 (arXiv 1705.08439), for language models Zelikman et al. 2022 (STaR, arXiv 2203.14465);
trlX's rejection fine-tuning (RFT) is of this kind. Each round continues the model of the round before. The directory
of the run gets metrics.jsonl with a line a round, as `check.py --collect` reads it, and a folder a round.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.tables import ROOT, read_jsonl

TASK = "benchmarks/tasks/arithmetic.py"
SETTINGS = "benchmarks/tasks/arithmetic/sft_sums.yaml"
SAMPLES = 8  # of each problem


def run(*command):
    subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, check=True)


def main(rounds, problems, seed, run_dir):
    folder = Path(run_dir).resolve()
    folder.mkdir(parents=True)
    model = ROOT / "benchmarks/tasks/arithmetic/base_sums"
    records = []
    times = [time.time()]
    steps = 0
    for number in range(1, rounds + 1):
        part = folder / f"round_{number}"
        right = folder / f"right_{number}.jsonl"
        draws = seed * 1000 + number  # other problems and samples in each round
        run(TASK, model, right, "--problems", problems, "--samples", SAMPLES, "--seed", draws)
        files = ["--model", model, "--dataset", right, "--run-dir", part]
        run("algos/sft.py", "--config", SETTINGS, "--seed", seed, *files)
        evaluations = [record for record in read_jsonl(part / "metrics.jsonl") if "eval/accuracy" in record]
        if number == 1:
            records.append(evaluations[0] | {"step": 0, "episode": 0})
        steps += evaluations[-1]["step"]
        records.append(evaluations[-1] | {"step": steps, "episode": number * problems * SAMPLES})
        times.append(time.time())
        model = part / "hf_model"
    env = json.loads((part / "env.json").read_text())
    env["command"] = " ".join(["python", *sys.argv])
    (folder / "env.json").write_text(json.dumps(env, indent=2))
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    (folder / "perf.jsonl").write_text("".join(f'{{"time": {moment}}}\n' for moment in times))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--problems", type=int, default=512, help="of a round, with 8 samples each")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--run-dir", required=True, help="a new directory")
    main(**vars(parser.parse_args()))
