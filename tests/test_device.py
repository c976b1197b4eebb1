"""Every script on a device that is none (tests/device.py): `python -m pytest tests/test_device.py`

No tensor is left on the CPU where a GPU would refuse it, the numbers are those of the CPU, and the host waits for the
device no more often than it must.
"""

import json
import subprocess
import sys

import pytest
from harness import ROOT, at, by_default, command
from helpers import log
from test_ppo_modes import save_classifier

from benchmarks import gpu
from benchmarks.tables import read_csv

START = f"import sys\nsys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}]\nimport device\ndevice.start("


def on_device(scripts, argv, folder, patch="", expect=0, exact=True):
    """Runs a script on the device; returns what was counted: {kind: {place: how often}}. exact: draws are a CPU's."""
    written = folder / "counts.json"
    process = scripts.run(argv, folder, expect, patch=f"{START}{str(written)!r}, exact={exact})\n{patch}")
    assert "gpu:0" in process.out
    return json.loads(written.read_text())


def test_the_numbers_of_ppo_are_those_of_a_cpu(scripts, work, whole, tmp_path):
    argv = command(work, "ppo", tmp_path / "run")
    on_device(scripts, argv, tmp_path, at("common.run", "Run.stop_requested", 4, signal=15), expect=143)
    on_device(scripts, argv, tmp_path)
    for found, record in zip(log(tmp_path / "run"), log(whole("ppo")[0]), strict=True):
        assert found == pytest.approx(record, rel=1e-4, abs=1e-5)


SHORT = {
    "ppo": "--total-episodes 8 --stop a --num-layers-unfrozen 1 --gradient-checkpointing --reward judge:good",
    "grpo": "--total-episodes 8 --lora-r 3 --top-k 5 --top-p 0.9 --ratio-level sequence",
    "sft": "--total-steps 2 --packing --lora-r 3",
    "reward": "--total-steps 2 --num-layers-unfrozen 1",
    "dpo": "--total-steps 2 --no-precompute-ref --no-packing --loss-type sigmoid_norm",
    "ilql": "--total-steps 2 --num-layers-unfrozen 1 --check",
    "ddpo": "--num-epochs 1 --lora-r 3 --guidance-scale 3",
}


@pytest.mark.parametrize("algo", SHORT)
def test_every_script_runs(algo, scripts, work, tmp_path):
    save_classifier(tmp_path / "judge", "GPT2", "<pad>")
    argv = command(work, algo, tmp_path / "run", *SHORT[algo].split())
    on_device(scripts, argv, tmp_path, exact=algo != "grpo")


# How many forward passes there are besides, and the waits and copies to the device of each. The wait is transformers',
# which looks whether positions begin again.
BUDGETS = {
    "ppo": (8, 1, 3),
    "grpo": (8, 1, 3),
    "sft": (4, 1, 2),
    "reward": (4, 1, 5),
    "dpo": (9, 1, 5),
    "ilql": (4, 1, 7),
    "ddpo": (2, 0, 1),
}
# GPT-2 also looks whether a row has padding, which newer models do not
UNASKED = "import transformers\ntransformers.PreTrainedModel.warn_if_padding_and_no_attention_mask = lambda *_: None"


@by_default("ppo", "grpo", "sft")
def test_waits_and_copies_of_a_micro_batch(algo, scripts, work, tmp_path):
    length = {"ppo": "--total-episodes 8", "grpo": "--total-episodes 8", "ddpo": "--num-epochs 1"}
    flags = f"{length.get(algo, '--total-steps 2')} --eval-every 0 --save-every 0 --micro-batch-size"
    found = []
    for size in (4, 2):
        argv = command(work, algo, tmp_path / f"run{size}", *flags.split(), size)
        found.append(on_device(scripts, argv, tmp_path, UNASKED))
    number, *budgets = BUDGETS[algo]
    for kind, budget in zip(("waits", "copies"), budgets, strict=True):
        fewer, more = (counts[kind] for counts in found)
        added = {place: more[place] - fewer.get(place, 0) for place in more}
        assert sum(added.values()) <= budget * number, {place: value for place, value in added.items() if value}


DECODE = """
import json, sys, torch
import device
from transformers import AutoModelForCausalLM, AutoTokenizer
from common.lm.sampling import sample

lm = AutoModelForCausalLM.from_pretrained(sys.argv[1]).to(device.DEVICE).eval()
lm.generation_config.eos_token_id = None
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
uniforms = torch.rand(2, 29, dtype=torch.float64).to(device.DEVICE)
for places in device.counts.values():
    places.clear()
responses = sample(lm, tokenizer, [[3, 9], [4, 17, 5]], uniforms, [29, 23], stop=("zz",))
assert [len(ids) for ids in responses] == [29, 23]
print(json.dumps(device.counts))
"""


def test_waits_of_decoding(scripts, work, tmp_path):
    """One look at what was drawn in 16 tokens, also with a stop string, and two of transformers at the first mask. What
    is copied are the contexts with their mask and limits, which of them are equal, and the beginning of two caches."""
    (tmp_path / "decode.py").write_text(DECODE)
    process = scripts.run([tmp_path / "decode.py", work / "model"], tmp_path, patch=f"{START})")
    counts = json.loads(process.out.splitlines()[-1])
    assert sum(counts["waits"].values()) <= 2 + 2, counts["waits"]
    assert sum(counts["copies"].values()) <= 5 + 2 * 2, counts["copies"]


# benchmarks/gpu.py on the device, in which passes become graphs of tests/graphs.py.
SIMULATED = f"""{START}exact=False)
import graphs
from benchmarks import gpu
from common.lm import graphs as cuda_graphs
gpu.DEVICE = device.DEVICE
cuda_graphs.capture = graphs.Graph
cuda_graphs.never_waits = graphs.never_waits
gpu.main()
"""
SLOW_ROWS = [{"right": 2, "token": 2, "peers": 2}, {"traces": 2, "again": 1}]
ROWS = [{"update": 2, "profile": 54}, *(pytest.param(rows, marks=pytest.mark.slow) for rows in SLOW_ROWS)]


@pytest.mark.parametrize("rows", ROWS)
def test_the_rows_of_a_gpu(rows, tmp_path):
    """How many of each part, in the columns of the rows that are stored."""
    argv = [sys.executable, "-c", SIMULATED, *"--tiny --algos sft --rows 3 --out".split(), tmp_path, "--one", *rows]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for part, count in rows.items():
        found = read_csv(tmp_path / f"{part}.csv")
        stored = ROOT / f"benchmarks/gpu/{part}.csv"
        assert not stored.exists() or found[0].keys() == read_csv(stored)[0].keys(), part
        assert len(found) == count and "**no**" not in str(found) and "nan" not in str(found), part
        assert part != "right" or [row["rows that differ"] for row in found] == ["0", "0"]


def test_kernels_and_gaps():
    """The longest first. What runs beside another one leaves no gap."""
    spans = [(3, 5, "a"), (4, 9, "void b"), (5, 6, "a"), (11, 12, "a"), (12, 13, "c")]
    found = [[*row.values()][1:] for row in gpu.kernel_rows("replay", spans)]
    kernels = [["b", 1, "5"], ["a", 3, "4"], ["c", 1, "1"]]
    assert found == [*kernels, ["all kernels", 5, "10"], ["gaps between them", "", "2"]]


def test_a_part_ends_at_its_deadline(tmp_path):
    argv = [sys.executable, ROOT / "benchmarks/gpu.py", *"--tiny --parts update --limit 0 --out".split(), tmp_path]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("update: stopped at its deadline, 0 s") and not [*tmp_path.iterdir()]
