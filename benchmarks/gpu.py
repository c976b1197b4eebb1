"""The scripts on a GPU. Writes a page; gpu.md is that of one H100.

    python benchmarks/gpu.py                  # all of it, to gpu.md
    python benchmarks/gpu.py --parts decode   # one of: traces again tasks steps decode

traces: the golden traces of tests/golden, on the device with the CPU's random draws. again: whether a repeated and a
continued run with --deterministic are equal. tasks: the embedded task of every script. steps: one iteration of sft,
dpo, grpo and ppo for a model of 0.6 B random weights, and its peak memory beside what benchmarks/scaling predicts.
decode: tokens per second of our sampler beside `generate` of transformers. --tiny: small sizes for steps and decode,
which show only that they run. Where git does not know the commit, COMMIT names it.
"""

import argparse
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

SHAPE = {  # Qwen/Qwen3-0.6B
    "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 2048,
}  # fmt: skip
TINY = {"vocab_size": 101, "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2}
PREDICTED = {"sft": 29.9, "dpo": 48.7, "grpo": 32.3, "ppo": 32.3}  # GB, of an update: benchmarks/scaling/README.md
TOLERANCES = {"float64": 1e-5, "float32": 1e-2}  # relative; float32 only in the first line, as rounding grows
CPU_DRAW = """
import runpy, sys
sys.path.insert(0, {root!r})
from common import sampling, seeding
sampling.draw = lambda logits, u, *o: seeding.draw(logits.cpu(), u.cpu(), *o).to(logits.device)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(words, patch=()):
    """(seconds, output) of a script; RuntimeError with the last lines that it printed if it fails."""
    from harness import once

    begin = time.monotonic()
    command = [sys.executable, *patch, *once(words)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError("\n".join((done.stdout + done.stderr).splitlines()[-12:]))
    return time.monotonic() - begin, done.stdout


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def differences(found, expected):
    """Yields (relative difference, name) of the numbers of two records. A value that is not finite counts as 0."""
    for name, value in expected.items():
        if isinstance(value, float) and name != "rewards/accuracies":  # of dpo: rounding decides the first one
            yield abs((found[name] or 0.0) - value) / max(abs(value), 1e-3), name


def at_once(args, function, inputs):
    """Yields function(*input) of all inputs as they are ready, or what went wrong."""
    with ThreadPoolExecutor(args.jobs) as pool:
        running = {pool.submit(function, *words): words for words in inputs}
        for done in as_completed(running):
            try:
                yield done.result()
            except Exception as error:  # the others go on
                text = f"{type(error).__name__}: {str(error)[-2000:]}"
                yield *running[done], text.replace("\n", "<br>").replace("|", "/")


# ---- Parts: each yields the rows of a table, the titles first --------------------------------------------------------


def traces(args, folder):
    from test_golden import GOLDEN, command

    yield "script", "type", "largest relative difference", "of", "within"

    def trace(dtype, algo):
        run_dir = folder / f"{algo}-{dtype}"
        words = [*command(algo, run_dir), "--dtype", dtype, "--mixed-precision", "no"]
        run(words, ["-c", CPU_DRAW.format(root=str(ROOT))])
        pairs = list(zip(records(run_dir / "metrics.jsonl"), records(GOLDEN / f"{algo}.jsonl"), strict=True))
        if dtype == "float32":
            pairs = pairs[:1]
        difference, name = max(found for pair in pairs for found in differences(*pair))
        within = "yes" if difference < TOLERANCES[dtype] else "**no**"
        return algo, dtype, f"{difference:.1e}", name, within

    yield from at_once(args, trace, [(dtype, algo) for dtype in TOLERANCES for algo in args.algos])


def again(args, folder):
    from test_golden import SETTINGS

    yield "script", "two runs are equal", "a run continued from its first checkpoint, too"

    def twice(algo):
        found = []
        for name in ("one", "two"):
            run_dir = folder / f"{algo}-{name}"
            words = [f"algos/{algo}.py", *SETTINGS[algo].split(), *f"--deterministic --run-dir {run_dir}".split()]
            words += ["--save-every", 1 if algo == "ddpo" else 8, "--keep-checkpoints", 9, "--eval-every", 0]
            if algo != "ddpo":  # the embedded tasks have eager attention
                words += ["--attn-implementation", "sdpa"]
            run(words)
            found.append((run_dir / "metrics.jsonl").read_bytes())
        first, *later = sorted((run_dir / "checkpoints").glob("step_*"))
        for checkpoint in later:
            shutil.rmtree(checkpoint)
        (run_dir / "README.md").unlink()  # which says that the run is finished
        assert f"from step {int(first.name.removeprefix('step_'))}\n" in run(words)[1]
        found.append((run_dir / "metrics.jsonl").read_bytes())
        repeated, continued = (lines == found[0] for lines in found[1:])
        return algo, "yes" if repeated else "**no**", "yes" if continued else "**no**"

    yield from at_once(args, twice, [(algo,) for algo in args.algos])


def tasks(args, folder):
    from benchmarks.compare import newest_headline

    yield "script", "headline", "at first", "at last", "seconds"

    def task(algo):
        seconds, _ = run([f"algos/{algo}.py", "--run-dir", folder / f"task-{algo}"])
        headline = newest_headline(folder / f"task-{algo}")
        values = [line[headline] for line in records(folder / f"task-{algo}/metrics.jsonl") if headline in line]
        return algo, headline, f"{values[0]:.4g}", f"{values[-1]:.4g}", f"{seconds:.0f}"

    yield from at_once(args, task, [(algo,) for algo in args.algos])


def save_model(args, folder):
    """A directory with a model of the shape and random weights, and the tokenizer of random walks."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    from benchmarks.tasks import randomwalks

    tokenizer = randomwalks.tokenizer()
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    config = Qwen3Config(**SHAPE | (TINY if args.tiny else {}), **special, tie_word_embeddings=True)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def steps(args, folder):
    model = save_model(args, folder / "model")
    length = 32 if args.tiny else 512  # of a prompt, and of a response
    texts = ["abcdefghijklmnopqrstu"[i:] * length for i in range(16)]
    rows = [{"prompt": text[: length - 1], "completion": text[length : 2 * length]} for text in texts]
    pairs = [{"prompt": r["prompt"], "chosen": r["completion"], "rejected": r["completion"][::-1]} for r in rows]
    for name, table in (("rows", rows), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table))
    (folder / "score.py").write_text("def score(outputs, **columns):\n    return [float(len(o)) for o in outputs]\n")
    yield "script", "seconds, with the start", "peak memory, GB", "predicted, GB"
    for algo in PREDICTED:
        flags = f"--model {model} --dataset {folder}/{'pairs' if algo == 'dpo' else 'rows'}.jsonl "
        if algo in ("ppo", "grpo"):
            flags += f"--reward {folder}/score.py:score --total-episodes 64 --rollout-batch-size 64 --batch-size 32 "
            flags += f"--max-new-tokens {length}"
        else:
            flags += f"--max-length {2 * length} --total-steps 2 --batch-size 16"
        run_dir = folder / f"steps-{algo}"
        seconds, _ = run(
            [f"algos/{algo}.py", *flags.split(), "--eval-every", 0, "--save-every", 0, "--run-dir", run_dir]
        )
        peak = records(run_dir / "perf.jsonl")[-1]["perf/peak_memory_mb"] * 2**20 / 1e9
        yield algo, f"{seconds:.0f}", f"{peak:.1f}", "" if args.tiny else PREDICTED[algo]


@torch.no_grad()
def decode(args, folder):
    from transformers import AutoModelForCausalLM

    from benchmarks.tasks import randomwalks
    from common.sampling import sample

    tokenizer = randomwalks.tokenizer()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lm = AutoModelForCausalLM.from_pretrained(save_model(args, folder / "model")).to(device).eval()
    lm.generation_config.eos_token_id = None
    width = 8 if args.tiny else 256
    yield "rows", "ours, tokens/s", "generate, tokens/s", "ratio"
    for count in args.rows:
        query = torch.randint(0, 21, (count, width), device=device)
        mask = torch.ones_like(query)
        contexts = query.tolist()
        uniforms = torch.rand(count, width, dtype=torch.float64, device=device)
        best = [float("inf")] * 2
        for _ in range(3):  # interleaved; the first one warms up
            for side in (0, 1):
                begin = time.monotonic()
                with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                    if side == 0:
                        sample(lm, tokenizer, contexts, uniforms, [width] * count)
                    else:
                        options = {"do_sample": True, "top_k": 0, "min_new_tokens": width, "max_new_tokens": width}
                        lm.generate(query, attention_mask=mask, **options).cpu()  # waits, as `sample` does
                best[side] = min(best[side], time.monotonic() - begin)
        ours, theirs = (count * width / seconds for seconds in best)
        yield count, f"{ours:.0f}", f"{theirs:.0f}", f"{ours / theirs:.2f}"


# ---- Page ------------------------------------------------------------------------------------------------------------

PARTS = {"traces": traces, "again": again, "tasks": tasks, "steps": steps, "decode": decode}


def heading():
    git = ["git", "describe", "--always", "--dirty"]
    commit = os.environ.get("COMMIT") or subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers", "accelerate")]
    page = f"# {name}\n\nBy `python benchmarks/gpu.py`, which says what the parts are, at commit {commit.strip()};\n"
    return f"{page}{', '.join(versions)}."


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--algos", nargs="+", default="sft reward dpo ilql ppo grpo ddpo".split())
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time of traces and tasks")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256], help="of decode")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("gpu.md"))
    args = parser.parse_args()
    page = [heading()]
    for part in args.parts:
        page.append(f"\n## {part}\n")
        with tempfile.TemporaryDirectory() as folder:
            try:
                for number, row in enumerate(PARTS[part](args, Path(folder))):
                    page.append("| " + " | ".join(map(str, row)) + " |")
                    if number == 0:
                        page.append("|" + " --- |" * len(row))
                    args.out.write_text("\n".join(page) + "\n")  # what there is, if it is stopped
            except Exception as error:
                page.append(f"\n```\n{type(error).__name__}: {error}\n```")
        args.out.write_text("\n".join(page) + "\n")
    print(args.out.read_text())


if __name__ == "__main__":
    main()
