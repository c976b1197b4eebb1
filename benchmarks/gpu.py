"""The scripts on a GPU. Each row goes at once to a .csv file of its part; check.py makes the tables of gpu.md and
gpu_decode.md from those in benchmarks/gpu.

    python benchmarks/gpu.py                                            # ten minutes of a GPU, to runs/gpu
    python benchmarks/gpu.py --parts traces again tasks --limit 3600 --out benchmarks/gpu

Each part is a process of its own, which ends at its deadline (PARTS) or at --limit: a part that fails spoils no other.
right: passes as graphs (common/lm/graphs.py) beside the plain loop. profile: the kernels of a replayed pass and of an
update, and the gaps between them. token: milliseconds of a token by graphs and by the plain loop. update: forward and
backward of a micro-batch. peers: tokens by transformers, and steps of TRL if it is installed here or in PEER_1_16
(throughput/run.py). pretrained: SmolLM2 with its own weights. traces: the golden traces of tests/golden, on the device
with the CPU's random draws. again: whether a repeated and a continued run with --deterministic are equal. tasks: the
embedded task of every script. --tiny: small sizes, to try it. COMMIT names the commit where git does not know it.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from unittest.mock import patch

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[1] / "tests")]

from benchmarks.tables import ROOT, read_jsonl  # noqa: E402

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
TINY |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 6}
YES = {True: "yes", False: "**no**"}
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
    """Yields function(*input) of all inputs as they are ready. What goes wrong is printed, and the others go on."""
    with ThreadPoolExecutor(args.jobs) as pool:
        running = {pool.submit(function, *words): words for words in inputs}
        for done in as_completed(running):
            try:
                yield done.result()
            except Exception as error:
                print(*running[done], f"{type(error).__name__}: {str(error)[-2000:]}", file=sys.stderr)


# ---- Parts: each yields rows of its table, {column: value} -----------------------------------------------------------


def traces(args, folder):
    from test_golden import GOLDEN, command

    def trace(dtype, algo):
        run_dir = folder / f"{algo}-{dtype}"
        words = [*command(algo, run_dir), "--dtype", dtype, "--mixed-precision", "no"]
        run(words, ["-c", CPU_DRAW.format(root=str(ROOT))])
        pairs = list(zip(read_jsonl(run_dir / "metrics.jsonl"), read_jsonl(GOLDEN / f"{algo}.jsonl"), strict=True))
        if dtype == "float32":
            pairs = pairs[:1]
        difference, name = max(found for pair in pairs for found in differences(*pair))
        row = {"script": algo, "type": dtype, "largest relative difference": f"{difference:.1e}", "of": name}
        return row | {"within": YES[difference < TOLERANCES[dtype]]}

    yield from at_once(args, trace, [(dtype, algo) for dtype in TOLERANCES for algo in args.algos])


def again(args, folder):
    from test_golden import SETTINGS

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
        shutil.rmtree(run_dir / "hf_model")  # without which no run is finished
        assert f"from step {int(first.name.removeprefix('step_'))}\n" in run(words)[1]
        found.append((run_dir / "metrics.jsonl").read_bytes())
        repeated, continued = (YES[lines == found[0]] for lines in found[1:])
        row = {"script": algo, "two runs are equal": repeated}
        return row | {"a run continued from its first checkpoint, too": continued}

    yield from at_once(args, twice, [(algo,) for algo in args.algos])


def tasks(args, folder):
    from benchmarks.compare import newest_headline

    def task(algo):
        seconds, _ = run([f"algos/{algo}.py", "--run-dir", folder / f"task-{algo}"])
        headline = newest_headline(folder / f"task-{algo}")
        values = [line[headline] for line in read_jsonl(folder / f"task-{algo}/metrics.jsonl") if headline in line]
        row = {"script": algo, "headline": headline, "at first": f"{values[0]:.4g}", "at last": f"{values[-1]:.4g}"}
        return row | {"seconds": f"{seconds:.0f}"}

    yield from at_once(args, task, [(algo,) for algo in args.algos])


def build(args, name):
    """A model of one of SHAPES with random float32 weights on the device, in evaluation mode, without an end token."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, sizes = SHAPES[name]
    sizes = sizes | (TINY if args.tiny else {})
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **sizes, tie_word_embeddings=True)
    with DEVICE:  # where 0.6 B random numbers are drawn in no time
        lm = AutoModelForCausalLM.from_config(config).to(DEVICE).eval()
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
    """Lets passes of `sample` become graphs, except on a CPU."""
    from common.lm import sampling

    return patch.object(sampling, "GRAPHS", (DEVICE.type,) if on and DEVICE.type != "cpu" else ())


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
        row = {"autocast": cast, "rows that differ": len(pairs), "first at token": min(places, default="")}
        row["repeated run equal"] = once == again
        yield row | {"nats a token, plain": f"{nats[0]:.4f}", "by graphs": f"{nats[1]:.4f}"}


def decoding(args, lm, rows):
    """A function that samples 256 tokens for each row, behind up to 128 others, or the first `limit` of them."""
    from common.lm.sampling import sample

    tokens = 16 if args.tiny else 256
    queries = queries_of(rows, 8 if args.tiny else 128, lm.config.vocab_size)
    uniforms = torch.rand(rows, tokens, dtype=torch.float64).to(DEVICE)

    def decode(limit=tokens):
        sample(lm, PADDING, queries, uniforms, [min(limit, tokens)] * rows)

    return decode


class Enough(Exception):
    """Ends the sampling of `of_graph`."""


def of_graph(decode, function):
    """(seconds of the capture, function(graph)) of the first graph in a call of `decode`, while its tensors are there;
    None where no pass becomes a graph."""
    from common.lm import graphs as cuda_graphs

    def measured(forward):
        seconds, graph = timed(capture, forward)
        raise Enough(seconds, function(graph))

    capture = cuda_graphs.capture
    try:
        with graphs(True), autocast(), patch.object(cuda_graphs, "capture", measured):
            decode()
    except Enough as enough:
        return enough.args


def spans_of(function):
    """[(begin, end, name)] in microseconds of the kernels of a call; on a CPU of torch's operations."""
    kind = "CUDA" if DEVICE.type == "cuda" else "CPU"
    with torch.profiler.profile(activities=[getattr(torch.profiler.ProfilerActivity, kind)]) as profiler:
        timed(function)
    events = [event for event in profiler.events() if event.device_type.name == kind]
    return sorted((event.time_range.start, event.time_range.end, event.name) for event in events)


def kernel_rows(of, spans):
    """Rows of the kernels (begin, end, name), sorted by their begin, that take most time; then of all, and of the gaps
    in which none ran."""
    calls = {}
    taken = {}
    gaps = 0.0
    idle_since = spans[0][0]
    for begin, end, name in spans:
        calls[name] = calls.get(name, 0) + 1
        taken[name] = taken.get(name, 0.0) + end - begin
        gaps += max(0.0, begin - idle_since)
        idle_since = max(idle_since, end)
    rows = [(name, calls[name], taken[name]) for name in sorted(taken, key=lambda name: -taken[name])[:25]]
    rows += [("all kernels", len(spans), sum(taken.values())), ("gaps between them", "", gaps)]
    for name, number, microseconds in rows:
        name = name.removeprefix("void ").replace("|", "/")[:120]
        yield {"of": of, "kernel": name, "calls": number, "microseconds": f"{microseconds:.0f}"}


def profile(args, folder):
    """A replay at different numbers of rows, and an update as in the part `update`."""
    spans_of(partial(torch.ones, 1, device=DEVICE))  # CUPTI has to be there before a graph is captured
    lm = build(args, "qwen3-0.6b")
    for rows in args.rows:
        with torch.no_grad():
            measured = of_graph(decoding(args, lm, rows), lambda graph: spans_of(graph.replay))
        if measured:
            yield from kernel_rows(f"replay, {rows} rows", measured[1])
    step = micro_batch(args, lm.train())
    step()
    yield from kernel_rows("update", spans_of(step))


def median_replay(graph):
    return median(timed(graph.replay)[0] for _ in range(20))


@torch.no_grad()
def token(args, folder):
    """Milliseconds of a token: by the plain loop the mean of the first 64, by graphs of 256."""
    for name in SHAPES:
        lm = build(args, name)
        for rows in args.rows:
            decode = decoding(args, lm, rows)
            row = {"model": name, "rows": rows}
            for title, on, tokens in (("plain, ms a token", False, 64), ("graphs", True, 256)):
                with graphs(on), autocast():
                    decode(8)  # warms up
                    row[title] = f"{timed(decode, tokens)[0] / tokens * 1e3:.2f}"
            capture, replay = of_graph(decode, median_replay) or (float("nan"), float("nan"))
            yield row | {"seconds of a capture": f"{capture:.3f}", "ms of a replay": f"{replay * 1e3:.3f}"}


def micro_batch(args, lm):
    """A function with the forward and backward pass of 8 rows of 384 tokens."""
    from common.lm.logprobs import line_logprobs

    ids = torch.randint(3, lm.config.vocab_size, (8, 32 if args.tiny else 384)).tolist()
    lines = [[(row, [-100, *row[1:]])] for row in ids]

    def step():
        with autocast():
            loss = -line_logprobs(lm, lines)[0].mean()
        loss.backward()

    return step


def update(args, folder):
    """The second best of six."""
    lm = build(args, "qwen3-0.6b").train()
    step = micro_batch(args, lm)
    weights = sum(weight.numel() for weight in lm.parameters())
    for side in ("each casts the weights", "they are cast already"):
        with torch.autocast(DEVICE.type, enabled=False) if side == "they are cast already" else nullcontext():
            seconds = sorted(timed(step)[0] for _ in range(6))[1]
        lm.zero_grad()
        rate = 8 * (32 if args.tiny else 384) / seconds
        row = {"side": side, "ms": f"{seconds * 1e3:.1f}", "tokens/s": f"{rate:.0f}"}
        yield row | {f"fraction of {PEAK / 1e12:.0f} TFLOP/s": f"{6 * weights * rate / PEAK:.3f}"}


def peers(args, folder):
    """Tokens of 64 rows by graphs and by transformers' `generate`; steps of grpo, sft and dpo beside TRL's."""
    from common.lm.sampling import sample

    lm = build(args, "qwen3-0.6b")
    rows, width, tokens = (3, 8, 8) if args.tiny else (64, 128, 64)
    query = torch.randint(3, lm.config.vocab_size, (rows, width))
    uniforms = torch.rand(rows, tokens, dtype=torch.float64).to(DEVICE)

    def ours():
        with graphs(True):
            sample(lm, PADDING, query.tolist(), uniforms, [tokens] * rows)

    def generate(**options):
        ids = query.to(DEVICE)
        options |= {"do_sample": True, "top_k": 0, "pad_token_id": 0, "min_new_tokens": tokens}
        lm.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, **options)

    def tokens_of(side, function, rounded=False):
        with autocast(not rounded):
            function()  # warms up
            seconds, _ = timed(function)
        row = {"side": side, "ms a token": f"{seconds / tokens * 1e3:.2f}"}
        return row | {"tokens/s": f"{rows * tokens / seconds:.0f}"}

    yield tokens_of("plainrl", ours)
    yield tokens_of("generate", generate)
    if args.tiny:
        return
    if importlib.util.find_spec("trl"):
        os.environ.setdefault("PEER_1_16", sys.prefix)
    for algo in ("grpo", "sft", "dpo"):  # whose rows are for throughput/results.csv
        words = f"{algo} --gpu --repeats 1 --results {args.out.resolve()}/throughput.csv --sides bf16 bf16-defaults"
        subprocess.run([sys.executable, "benchmarks/throughput/run.py", *words.split(), "bf16-same-flags"], cwd=ROOT)
    lm.bfloat16()  # a static cache has the type of the weights
    static = partial(generate, cache_implementation="static")  # which transformers compiles
    yield tokens_of("static and compiled, bfloat16 weights", static, rounded=True)


def pretrained(args, folder):
    """SmolLM2-135M learns sums: by grpo as on a CPU (curves/smollm2-answers), and with four times as many rows at once
    after sft on the answers."""
    from benchmarks.check import training_seconds
    from benchmarks.tasks import pretrained as task

    rows = [{"prompt": row["prompt"], "completion": f" {task.sum_of(row['prompt'])}\n"} for row in task.sums()]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = "benchmarks/tasks/pretrained.py"
    grpo = "--config benchmarks/tasks/pretrained/grpo_sums.yaml"
    sft = f"--model {file}:model --dataset {folder}/sums.jsonl --eval-prompts {file}:sums:split=test,copies=4 "
    sft += f"--metric {file}:sum_metric --max-new-tokens 6 --batch-size 64 --total-steps 40 --eval-every 10"
    larger = f"{grpo} --model {folder}/sft/hf_model --rollout-batch-size 256 --micro-batch-size 128 --batch-size 128"
    for name, flags in {"grpo": grpo, "sft": sft, "grpo after sft": larger}.items():
        run_dir = folder / name
        run([f"algos/{name.split()[0]}.py", *flags.split(), "--run-dir", run_dir])
        seconds = training_seconds(run_dir)
        for record in read_jsonl(run_dir / "metrics.jsonl"):
            if "eval/first_number" in record:
                row = {"run": name, "step": record["step"], "seconds": f"{seconds.get(record['step'], 0.0):.1f}"}
                yield row | {"share of right sums": f"{record['eval/first_number']:.3f}"}


# ---- Command ---------------------------------------------------------------------------------------------------------

# Seconds until a part ends at the latest. The first six are those of a command without flags.
SECONDS = {right: 45, profile: 60, token: 75, update: 30, peers: 200, pretrained: 140}
SECONDS |= {traces: 900, again: 900, tasks: 900}
PARTS = {part.__name__: part for part in SECONDS}


def where():
    git = ["git", "describe", "--always", "--dirty"]
    commit = os.environ.get("COMMIT") or subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers", "accelerate")]
    return {"device": device, "commit": commit, "versions": ", ".join(versions)}


def measure(part, args):
    from benchmarks.throughput.measurement import append

    torch.backends.cuda.enable_cudnn_sdp(False)  # as common/launch.py does
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for row in PARTS[part](args, Path(folder)):
            append(args.out / f"{part}.csv", where() | row)
            print(part, *row.values(), sep=" | ", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS][:6])
    parser.add_argument("--algos", nargs="+", default="sft reward dpo ilql ppo grpo ddpo".split())
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time of traces, again and tasks")
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 64, 512], help="of token and profile")
    parser.add_argument("--limit", type=float, default=570, help="seconds of all parts together")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/gpu")
    parser.add_argument("--one", nargs="+", choices=PARTS, help=argparse.SUPPRESS)  # of the processes of the parts
    args = parser.parse_args()
    for part in args.one or ():
        measure(part, args)
    end = time.monotonic() + args.limit
    for part in [] if args.one else args.parts:
        seconds = max(0.0, min(SECONDS[PARTS[part]], end - time.monotonic()))
        begin = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, *sys.argv[1:], "--one", part]
            process = subprocess.Popen(command, env=os.environ | {"TMPDIR": folder}, start_new_session=True)
            try:
                said = f"exit code {process.wait(seconds)}"
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                said = "stopped at its deadline"
        print(f"{part}: {said}, {time.monotonic() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
