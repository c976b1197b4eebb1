"""What can be asked of any script, an edited copy of yours included: `pytest --script=algos/my_grpo.py`

A new flag that is off by default is on with `--with="--entropy-coef 0.01"`, which every run gets.

The script runs as a command, on a tiny model and rows of the tests, with the flags that the nearest script of the
repository is tested with, as far as it still has them. What does not apply to it is a line of the summary and no
failure. Without --script the slow run asks the seven scripts of the repository.
"""

import dataclasses
import json
import re

import pytest
import torch
from harness import ALGOS, ROOT, SETTINGS, at, launch, same, torchrun
from helpers import log, same_run

from common.functions import import_file


class Script:
    """A script and the one of the repository that it shares most lines with (kind)."""

    def __init__(self, path, given=""):
        self.path = path
        self.given = given  # flags that every run gets
        self.kind = max(ALGOS, key=lambda algo: self.shared_lines(ROOT / f"algos/{algo}.py"))
        self.module = import_file(path, path.read_bytes())
        self.fields = {field.name: field.default for field in dataclasses.fields(self.module.Args)}

    def needs_common(self):
        if "from common" not in self.path.read_text():
            pytest.skip("not asked: the script does not use common/, where this would happen")

    def shared_lines(self, other):
        return len({*self.path.read_text().splitlines()} & {*other.read_text().splitlines()})

    def command(self, text):
        """The command line of these flags, without those that the script lacks, and of the given ones."""
        words = []
        for flag in re.findall(r"--\S+(?: (?!--)\S+)*", f"{text} {self.given}"):
            if flag.split()[0][2:].replace("-", "_") in self.fields:
                words += flag.split()
        return [self.path, *words]

    def needs(self, flag):
        if flag[2:].replace("-", "_") not in self.fields:
            pytest.skip(f"not asked: the script has no {flag}")


def pytest_generate_tests(metafunc):
    paths = [pytest.param(ROOT / f"algos/{algo}.py", marks=pytest.mark.slow, id=algo) for algo in ALGOS]
    given = metafunc.config.getoption("--script")
    metafunc.parametrize("script", [given] if given else paths, indirect=True, scope="session")


@pytest.fixture(scope="session")
def script(request):
    path = (request.config.invocation_params.dir / request.param).resolve()
    if not path.exists():
        pytest.fail(f"--script {request.param}: there is no such file", pytrace=False)
    return Script(path, request.config.getoption("--with"))


def settings(script):
    """In float64. With the usual epsilon Adam makes steps of rounding errors where a gradient is zero."""
    return f"{SETTINGS[script.kind]} --dtype float64 --adam-eps 1e-6 --attn-implementation sdpa"


PATH = f"import sys; sys.path.append({str(ROOT)!r})\n"  # as PYTHONPATH does, for a copy that lies elsewhere


@pytest.fixture(scope="session")
def run(script, scripts, work, tmp_path_factory):
    """run(flags) -> directory of a finished run; the last of equal flags wins."""

    def start(more="", expect=0, folder=None, patch=""):
        folder = folder or tmp_path_factory.mktemp("script")
        argv = script.command(f"{settings(script)} {more} --run-dir {folder}/run")
        scripts.run(argv, work, expect=expect, patch=PATH + patch)
        return folder / "run"

    return start


@pytest.fixture(scope="session")
def base(run):
    return run()


def test_new_defaults_are_tried(script):
    """A run of the tests has settings of its own, which would hide a default that the copy has changed."""
    original = Script(ROOT / f"algos/{script.kind}.py")
    set_here = {*re.findall(r"--([\w-]+)", settings(script))}
    set_here |= {*re.findall(r"(?m)^(\w+):", (ROOT / original.module.TASK).read_text())}
    given = {*re.findall(r"--([\w-]+)", script.given)}
    for name, value in script.fields.items():
        flag = name.replace("_", "-")
        if original.fields.get(name, value) != value and {name, flag} & set_here and flag not in given:
            pytest.skip(f"not tried: the new default of --{flag}, which the tests set: add --with='--{flag} {value}'")


LEARNING = {  # a short run of the embedded task, what it measures, and by how much that changes at least
    "ppo": ("--total-episodes 1280 --rollout-batch-size 256 --batch-size 256", "eval/reward", 0.25),
    "grpo": ("--total-episodes 5120", "eval/reward", 0.2),
    "sft": ("--total-steps 20", "eval/loss", -1.0),
    "reward": ("--total-steps 40", "eval/all/accuracy", 0.1),
    "dpo": ("--total-steps 40", "eval/all/rewards/accuracies", 0.2),  # 0.235 on a CPU with AVX2
    "ilql": ("--total-steps 150", "eval/optimality@beta=64", 0.3),
    "ddpo": ("--num-epochs 8", "eval/reward", 0.02),
}


def test_it_learns_its_embedded_task_a_little(script, scripts, tmp_path):
    flags, name, growth = LEARNING[script.kind]
    argv = script.command(f"{flags} --eval-every 100000 --save-every 0 --threads 1 --run-dir run")
    scripts.run(argv, tmp_path, patch=PATH)
    values = [record[name] for record in log(tmp_path / "run") if name in record]
    if not values:
        pytest.skip(f"not asked: it logs no {name}")
    gain = values[-1] - values[0]
    enough = gain > growth if growth > 0 else gain < growth
    assert enough, f"{name} went from {values[0]:.3f} to {values[-1]:.3f}; expected a change of {growth} or more"


# metric -> its value where the policy is still the one that sampled, and the reference
START = dict.fromkeys("policy/approxkl policy/clipfrac objective/kl loss/kl rewards/chosen rewards/margins".split(), 0)
START |= {"policy/ratio": 1}


def test_it_starts_with_ratio_1_and_kl_0(script, run):
    """Two optimizer steps an iteration, which move nothing: what the rollout has kept is compared with the update's. A
    single step may take both from one forward pass."""
    first = log(run("--ppo-epochs 1 --batch-size 4 --rollout-batch-size 8 --eval-every 0 --lr 1e-30"))[0]
    known = [name for name in START if name in first]
    if "logps/chosen" not in first:  # then rewards are a model's, and not log-ratios to a reference
        known = [name for name in known if not name.startswith("rewards/")]
    if not known:
        pytest.skip("not asked: it logs no ratio and no KL")
    for name in known:
        assert first[name] == pytest.approx(START[name], abs=1e-9), f"{name} is {first[name]} at the first step"


@pytest.mark.parametrize("size", [1, 3])
def test_micro_batches_change_nothing(script, run, base, size):
    script.needs("--micro-batch-size")
    flags = f"--micro-batch-size {size} --decode-batch-size {size}"
    same_run(run(flags), base, 1e-8, flags)


def test_two_processes_change_nothing(script, work, base, tmp_path):
    argv = script.command(f"{settings(script)} --run-dir {tmp_path}/run")
    result = launch(torchrun(2), argv, work, work, PYTHONPATH=str(ROOT))
    assert result.returncode == 0, result.stderr[-2000:]
    same_run(tmp_path / "run", base, 1e-8, "two processes")


PADDED = f"sys.path.append({str(ROOT / 'tests')!r}); import helpers; helpers.pad_more()\n"
# which the script then imports
MASK = "import algos.ppo, common.lm.tokens as tokens; tokens.pad_rows = algos.ppo.pad_rows\n"


def test_what_stands_in_padding_changes_nothing(script, run, base):
    """More padding, of random tokens."""
    script.needs_common()
    if script.kind == "ddpo":
        pytest.skip("not asked: captions are padded to one length")
    same_run(run(patch=PADDED + MASK * (script.kind == "ppo")), base, 1e-8, "other padding")


def test_killed_and_continued_it_ends_with_the_same_bytes(script, run, base, tmp_path):
    script.needs_common()
    place = 5 if script.kind in ("ppo", "grpo", "ddpo") else 9
    run(expect=-9, folder=tmp_path, patch=at("common.run", "Run.stop_requested", place))
    same(run(folder=tmp_path), base)


BAD = {"--reward": ("user.py:bad_reward", "user.py:bad_reward returned "), "--dataset": ("bad.jsonl", "--dataset ")}


@pytest.mark.parametrize("flag", BAD)
def test_bad_input_is_one_sentence(flag, script, scripts, work, tmp_path):
    script.needs(flag)
    value, sentence = BAD[flag]
    (work / "bad.jsonl").write_text(json.dumps({"prompt": 3, "shift": 0}) + "\n")
    argv = script.command(f"{settings(script)} {flag} {value} --run-dir {tmp_path}/run")
    err = scripts.run(argv, work, expect=2, patch=PATH).err
    assert re.match(rf"error: {sentence}.*\n$", err), err
    assert not (tmp_path / "run").exists()


def test_its_export_loads(script, base):
    """With transformers or diffusers alone, every weight found, and it answers with finite numbers."""
    folder = base / "hf_model"
    if script.kind == "ddpo":
        from diffusers import StableDiffusionPipeline

        pipeline = StableDiffusionPipeline.from_pretrained(folder)
        assert all(weight.isfinite().all() for weight in pipeline.unet.parameters())
        return
    import transformers

    (architecture,) = json.loads((folder / "config.json").read_text())["architectures"]
    model, report = getattr(transformers, architecture).from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    ids = transformers.AutoTokenizer.from_pretrained(folder)("bcd", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert model(input_ids=ids).logits.isfinite().all()
