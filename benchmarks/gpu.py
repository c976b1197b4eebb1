"""The scripts on a GPU. Writes a page; gpu.md is that of one H100.

    python benchmarks/gpu.py                                         # all of it, to gpu.md
    python benchmarks/gpu.py --parts right token update --limit 540   # for ten minutes of a GPU

traces: the golden traces of tests/golden, on the device with the CPU's random draws. again: whether a repeated and a
continued run with --deterministic are equal. tasks: the embedded task of every script. steps: one iteration of sft,
dpo, grpo and ppo for a model of 0.6 B random weights, and its peak memory beside what benchmarks/scaling predicts.
right: passes as graphs (common/lm/graphs.py) beside the plain loop. token: milliseconds of both. update: forward and
backward of a micro-batch. --tiny: small sizes, which show only that they run. Where git does not know the commit,
COMMIT names it.
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
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.tables import ROOT, read_jsonl

SHAPE = {  # Qwen/Qwen3-0.6B
    "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 2048,
}  # fmt: skip
SMALL = {  # HuggingFaceTB/SmolLM2-135M
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 2048,
}  # fmt: skip
SHAPES = {"qwen3-0.6b": ("qwen3", SHAPE), "smollm2-135m": ("llama", SMALL)}
PEAK = 798e12  # product peak that was measured on an H100 in bfloat16
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PADDING = SimpleNamespace(pad_token_id=0)  # what decoding asks a tokenizer for, without stop strings
TINY = {"vocab_size": 101, "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2}
PREDICTED = {"sft": 29.9, "dpo": 48.7, "grpo": 32.3, "ppo": 32.3}  # GB, of an update: benchmarks/scaling/README.md
TOLERANCES = {"float64": 1e-5, "float32": 1e-2}  # relative; float32 only in the first line, as rounding grows
CPU_DRAW = """
import runpy, sys
sys.path.insert(0, {root!r})
from common.lm import sampling
draw = sampling.draw
sampling.draw = lambda logits, u, *o: draw(logits.cpu(), u.cpu(), *o).to(logits.device)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(words, options=()):
    """(seconds, output) of a script; RuntimeError with the last lines that it printed if it fails."""
    from harness import once

    begin = time.monotonic()
    command = [sys.executable, *options, *once(words)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError("\n".join((done.stdout + done.stderr).splitlines()[-12:]))
    return time.monotonic() - begin, done.stdout


def differences(found, expected):
    """Yields (relative difference, name) of the numbers in both of two records. A value that is not finite is a 0."""
    for name, value in expected.items():
        if not isinstance(value, float) or name not in found:
            continue
        if name != "rewards/accuracies":  # of dpo: rounding decides the first one
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
        pairs = list(zip(read_jsonl(run_dir / "metrics.jsonl"), read_jsonl(GOLDEN / f"{algo}.jsonl"), strict=True))
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
        values = [line[headline] for line in read_jsonl(folder / f"task-{algo}/metrics.jsonl") if headline in line]
        return algo, headline, f"{values[0]:.4g}", f"{values[-1]:.4g}", f"{seconds:.0f}"

    yield from at_once(args, task, [(algo,) for algo in args.algos])


def steps(args, folder):
    """The larger model with the tokenizer of random walks."""
    from benchmarks.tasks import randomwalks

    for part in (build(args, "qwen3-0.6b"), randomwalks.tokenizer()):
        part.save_pretrained(folder / "model")
    length = 32 if args.tiny else 512  # of a prompt, and of a response
    texts = ["abcdefghijklmnopqrstu"[i:] * length for i in range(16)]
    rows = [{"prompt": text[: length - 1], "completion": text[length : 2 * length]} for text in texts]
    pairs = [{"prompt": r["prompt"], "chosen": r["completion"], "rejected": r["completion"][::-1]} for r in rows]
    for name, table in (("rows", rows), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table))
    (folder / "score.py").write_text("def score(outputs, **columns):\n    return [float(len(o)) for o in outputs]\n")
    yield "script", "seconds, with the start", "peak memory, GB", "predicted, GB"
    for algo in PREDICTED:
        flags = f"--model {folder}/model --dataset {folder}/{'pairs' if algo == 'dpo' else 'rows'}.jsonl "
        if algo in ("ppo", "grpo"):
            flags += f"--reward {folder}/score.py:score --total-episodes 64 --rollout-batch-size 64 --batch-size 32 "
            flags += f"--max-new-tokens {length}"
        else:
            flags += f"--max-length {2 * length} --total-steps 2 --batch-size 16"
        run_dir = folder / f"steps-{algo}"
        flags += f" --eval-every 0 --save-every 0 --run-dir {run_dir}"
        seconds, _ = run([f"algos/{algo}.py", *flags.split()])
        peak = read_jsonl(run_dir / "perf.jsonl")[-1]["perf/peak_memory_mb"] * 2**20 / 1e9
        yield algo, f"{seconds:.0f}", f"{peak:.1f}", "" if args.tiny else PREDICTED[algo]


def build(args, name):
    """A model of one of SHAPES with random float32 weights on the device, in evaluation mode, without an end token."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, sizes = SHAPES[name]
    sizes = sizes | (TINY | {"num_attention_heads": 2, "num_key_value_heads": 1} if args.tiny else {})
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **sizes, tie_word_embeddings=True)
    with DEVICE:  # where 0.6 B random numbers are drawn in no time
        lm = AutoModelForCausalLM.from_config(config).eval()
    lm.plain_output = True
    lm.generation_config.eos_token_id = None
    return lm


def queries_of(rows, width, words):
    """(queries, lists of ids of different lengths up to `width`, of which the last quarter repeats others)."""
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(3, words, (rows, width), generator=random).tolist()
    queries = [row[place % (width // 2) :] for place, row in enumerate(ids)]
    return queries[: rows - rows // 4] + queries[: rows // 4]


def graphs(on):
    """Lets passes of `sample` become graphs."""
    from common.lm import sampling

    return patch.object(sampling, "GRAPHS", ("cuda",) if on else ())


def autocast(on=True):
    return torch.autocast(DEVICE.type, torch.bfloat16, enabled=on and DEVICE.type == "cuda")


def timed(function, *inputs, **options):
    """(seconds of a call until the GPU has done its work, result)"""
    wait = torch.cuda.synchronize if DEVICE.type == "cuda" else int
    wait()
    begin = time.perf_counter()
    result = function(*inputs, **options)
    wait()
    return time.perf_counter() - begin, result


@torch.no_grad()
def right(args, folder):
    """Whether graphs draw the ids of the plain loop: all in float32; in bfloat16 rounding decides where two are nearly
    as likely, and the mean log-probability by a pass without a cache is equal."""
    from common.lm.logprobs import line_logprobs
    from common.lm.sampling import sample

    yield "autocast", "rows that differ", "first at token", "repeated run equal", "nats a token, plain", "by graphs"
    lm = build(args, "smollm2-135m")
    rows, tokens = (5, 20) if args.tiny else (32, 400)
    queries = queries_of(rows, 24, lm.config.vocab_size)
    uniforms = torch.rand(rows, tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    limits = torch.randint(1, tokens + 1, (rows,), generator=torch.Generator().manual_seed(3)).tolist()
    for cast in (False, True):
        found = []
        nats = []
        for on in (False, True, True):
            with graphs(on), autocast(cast):
                found.append(sample(lm, PADDING, queries, uniforms, limits))
            lines = []
            for query, ids in zip(queries, found[-1], strict=True):
                lines.append([([*query, *ids], [-100] * len(query) + ids)])
            with autocast(cast):
                nats.append(-line_logprobs(lm, lines)[0].double().mean().item())
        plain, once, again = found
        pairs = [(ids, other) for ids, other in zip(plain, once, strict=True) if ids != other]
        places = [next(t for t, two in enumerate(zip(*pair, strict=True)) if two[0] != two[1]) for pair in pairs]
        yield cast, len(pairs), min(places, default=""), once == again, f"{nats[0]:.4f}", f"{nats[1]:.4f}"


@torch.no_grad()
def token(args, folder):
    """Milliseconds of each of 256 tokens behind up to 128 others, by the plain loop and by graphs."""
    from common.lm import graphs as cuda_graphs
    from common.lm import sampling

    yield "model", "rows", "plain, ms a token", "graphs", "captures", "seconds of a capture", "ms of a replay"
    captured = []

    def measured(function):
        seconds, graph = timed(capture, function)
        captured.append((seconds, timed(lambda: [graph.replay() for _ in range(20)])[0] / 20 * 1e3))
        return graph

    capture = cuda_graphs.capture
    tokens = 16 if args.tiny else 256
    for name in SHAPES:
        lm = build(args, name)
        for rows in args.rows:
            if args.left() < 60:
                return
            queries = queries_of(rows, 8 if args.tiny else 128, lm.config.vocab_size)
            uniforms = torch.rand(rows, tokens, dtype=torch.float64).to(DEVICE)
            milliseconds = {}
            for on in (False, True):
                with graphs(on), autocast():
                    sampling.sample(lm, PADDING, queries, uniforms, [8] * rows)  # warms up
                    seconds, _ = timed(sampling.sample, lm, PADDING, queries, uniforms, [tokens] * rows)
                milliseconds[on] = seconds / tokens * 1e3
            captured.clear()
            with graphs(True), autocast(), patch.object(cuda_graphs, "capture", measured):
                sampling.sample(lm, PADDING, queries, uniforms, [tokens] * rows)
            seconds, replay = max(captured, default=(float("nan"),) * 2)
            both = (f"{milliseconds[on]:.2f}" for on in (False, True))
            yield name, rows, *both, len(captured), f"{seconds:.3f}", f"{replay:.3f}"


def seconds_of_updates(lm, width):
    """Of the forward and backward pass of a micro-batch of 8 rows: the second best of six."""
    from common.lm.logprobs import line_logprobs

    ids = torch.randint(3, lm.config.vocab_size, (8, width)).tolist()
    lines = [[(row, [-100, *row[1:]])] for row in ids]

    def step():
        with autocast():
            loss = -line_logprobs(lm, lines)[0].mean()
        loss.backward()

    seconds = sorted(timed(step)[0] for _ in range(6))
    lm.zero_grad()
    return seconds[1]


def update(args, folder):
    """Micro-batches of 8 rows of 384 tokens."""
    yield "side", "ms", "tokens/s", f"fraction of {PEAK / 1e12:.0f} TFLOP/s"
    lm = build(args, "qwen3-0.6b").train()
    width = 32 if args.tiny else 384
    weights = sum(weight.numel() for weight in lm.parameters())
    for side in ("each casts the weights", "they are cast already"):
        with torch.autocast(DEVICE.type, enabled=False) if side == "they are cast already" else nullcontext():
            seconds = seconds_of_updates(lm, width)
        rate = 8 * width / seconds
        yield side, f"{seconds * 1e3:.1f}", f"{rate:.0f}", f"{6 * weights * rate / PEAK:.3f}"


# ---- Page ------------------------------------------------------------------------------------------------------------

PARTS = {part.__name__: part for part in (right, token, update, traces, again, tasks, steps)}


def heading():
    git = ["git", "describe", "--always", "--dirty"]
    commit = os.environ.get("COMMIT") or subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers", "accelerate")]
    page = f"# {name}\n\nMade by `python benchmarks/gpu.py`, which explains the parts, at commit {commit.strip()};\n"
    return f"{page}{', '.join(versions)}."


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--algos", nargs="+", default="sft reward dpo ilql ppo grpo ddpo".split())
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time of traces and tasks")
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 64, 256, 512], help="of token")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds after which no part begins")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("gpu.md"))
    args = parser.parse_args()
    end = time.monotonic() + args.limit
    args.left = lambda: end - time.monotonic()
    torch.backends.cuda.enable_cudnn_sdp(False)  # as common/launch.py does
    page = [heading()]
    for part in args.parts:
        if args.left() < 60:
            break
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
