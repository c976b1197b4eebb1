"""Whole runs of algos/ddpo.py: `python -m pytest tests/test_ddpo_runs.py`

The command as typed and what it leaves; the first ratio; runs that continue bitwise; the reward as the only thing that
is learnt from; data, trackers, and bad input. Runs are in-process, on a random pipeline
of 8 x 24 pixels, unless a launcher, a kill or a real base model is the point.
"""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from statistics import fmean, pstdev

import numpy as np
import pytest
import safetensors.torch
import torch
from accelerate import Accelerator, tracking
from accelerate.state import AcceleratorState
from accelerate.tracking import GeneralTracker
from PIL import Image
from test_ddpo import slow_advantages

from algos import ddpo
from benchmarks.tasks import shapes
from common import logging
from common.cli import InputError, cli, parse
from common.seeding import stream_rows

ROOT = Path(__file__).resolve().parents[1]
ROWS = [{"prompt": caption, "target": i / 4, "note": {"id": i}} for i, caption in enumerate(shapes.CAPTIONS[:5])]
USER_FILE = """
def reward(images, prompts, target, **columns):
    return [-abs(4 * image[0].mean().item() - t) for image, t in zip(images, target)]


def no_rows():
    return []
"""


def redness(images, prompts, target, **columns):
    return [-abs(4 * image[0].mean().item() - t) for image, t in zip(images, target, strict=True)]


def run_ddpo(model, run_dir, rows=ROWS, **flags):
    """Two epochs of 8 images of 3 steps, two optimizer steps in each, unless flags say otherwise."""
    settings = {
        "reward": redness, "num_epochs": 2, "rollout_batch_size": 8, "batch_size": 4, "num_inference_steps": 3,
        "guidance_scale": 1.0, "lr": 1e-3, "cliprange": 1e-3, "stat_min_count": 2, "stat_buffer_size": 4,
        "micro_batch_size": 64, "decode_batch_size": 64, "eval_every": 0, "save_every": 0, "threads": 1,
    }  # fmt: skip
    return ddpo.main(ddpo.Args(model=model, run_dir=str(run_dir), dataset=rows, **settings | flags))


def log(run_dir):
    return [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]


def samples(run_dir):
    return [json.loads(line) for line in (Path(run_dir) / "samples.jsonl").read_text().splitlines()]


def newest(run_dir):
    return max((Path(run_dir) / "checkpoints").glob("step_*"))


def state(checkpoint):
    return json.loads((checkpoint / "state.json").read_text())


def unet(pipeline):
    """The UNet's weights of a pipeline's directory."""
    return safetensors.torch.load_file(Path(pipeline) / "unet/diffusion_pytorch_model.safetensors")


def equal(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def recorded(monkeypatch, name):
    """Replaces a function of ddpo by one that keeps (arguments, result) of every call in the returned list."""
    calls, function = [], getattr(ddpo, name)

    def keep(*args, **keywords):
        calls.append((args, function(*args, **keywords)))
        return calls[-1][1]

    monkeypatch.setattr(ddpo, name, keep)
    return calls


def pixels(path, count, height, width):
    """The images (count, 3, height, width), uint8, of a grid of eight a row: enlarged, with text below each; what is
    behind the last one must be white."""
    scale = 128 // width
    tile_height, tile_width = height * scale + 2 * ddpo.TEXT_HEIGHT, width * scale
    sheet = np.asarray(Image.open(path))
    assert sheet.shape == (math.ceil(count / 8) * tile_height, 8 * tile_width, 3) and sheet.dtype == np.uint8
    cells = sheet.reshape(-1, tile_height, 8, tile_width, 3).transpose(0, 2, 4, 1, 3)
    cells = cells.reshape(-1, 3, tile_height, tile_width)
    assert (cells[count:] == 255).all()
    enlarged, text = np.split(cells[:count], [height * scale], axis=2)
    images = enlarged[:, :, ::scale, ::scale]
    assert np.array_equal(enlarged, images.repeat(scale, axis=2).repeat(scale, axis=3))
    assert (text.min(axis=(1, 2, 3)) < 100).all()
    return images


def jsonl(path, rows):
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def tiny(build_pipeline, tmp_path_factory):
    """Directory of a random pipeline."""
    folder = tmp_path_factory.mktemp("tiny") / "pipeline"
    build_pipeline().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def fresh_accelerator():
    """For runs of another precision: accelerate keeps that of the first run of a process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


# ---- The command as typed --------------------------------------------------------------------------------------------

TYPED = """--num-epochs 2 --rollout-batch-size 8 --batch-size 4 --num-inference-steps 3 --eval-every 2 --threads 1
--eval-dataset benchmarks/tasks/shapes.py:eval_prompts:samples=1""".split()


@pytest.fixture(scope="module")
def typed(tmp_path_factory):
    """(run directory, output) of a run of the embedded task, as a user starts it."""
    folder = tmp_path_factory.mktemp("typed")
    words = [Path(sys.executable).with_name("accelerate"), "launch", ROOT / "algos/ddpo.py", *TYPED]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (run,) = (folder / "runs").iterdir()
    return run, done.stdout


def test_what_a_run_leaves(typed):
    run, out = typed
    names = "README.md checkpoints config.yaml curve.png env.json hf_model hf_model_best images metrics.jsonl"
    assert sorted(p.name for p in run.iterdir()) == [".lock", *names.split(), "perf.jsonl", "samples.jsonl"]
    assert re.fullmatch("ddpo-[0-9a-f]{8}", run.name)
    evaluated = "reward reward_std agreement colour shape brightness kilobytes diversity".split()
    trained = """objective/scores objective/scores_std objective/diversity loss/policy policy/approxkl policy/clipfrac
    policy/ratio policy/ratio_deviation policy/ratio_deviation_first optim/lr optim/grad_norm epoch""".split()
    first, *others = log(run)
    assert first.keys() == {"step", *(f"eval/{name}" for name in evaluated)}
    assert [record["step"] for record in (first, *others)] == [0, 2, 4]
    assert all(record.keys() == first.keys() | {*trained} for record in others)
    assert all(math.isfinite(value) for record in (first, *others) for value in record.values())
    assert [record["epoch"] for record in others] == [1, 2]
    rows = samples(run)
    columns = ["step", "prompt", "reward", "agreement", "colour", "shape", "brightness", "kilobytes"]
    assert all([*row] == columns for row in rows)
    assert [(row["step"], row["prompt"]) for row in rows] == [(n, p) for n in (0, 2, 4) for p in shapes.CAPTIONS]
    for record in (first, *others):
        found = [row for row in rows if row["step"] == record["step"]]
        for name in columns[2:]:
            assert record[f"eval/{name}"] == pytest.approx(fmean(row[name] for row in found), rel=1e-12), name
        assert record["eval/reward_std"] == pytest.approx(pstdev([row["reward"] for row in found]), rel=1e-9)
    assert sorted(p.name for p in (run / "images").iterdir()) == [f"step_{step:08d}.png" for step in (0, 2, 4)]
    grids = [pixels(run / f"images/step_{step:08d}.png", 12, 32, 32) for step in (0, 2, 4)]
    for record, grid in zip((first, *others), grids, strict=True):
        assert grid.mean(axis=(1, 2, 3)).max() < 250 and len({image.tobytes() for image in grid}) == 12
        found = [row["brightness"] for row in rows if row["step"] == record["step"]]
        assert found == pytest.approx((grid.mean(axis=(1, 2, 3)) / 255).tolist(), abs=1e-6)
        assert record["eval/diversity"] == pytest.approx((grid / 255).std(axis=0).mean(), abs=1e-9)
    assert (grids[0] != grids[2]).any()  # the noise is the same, the weights are not
    assert "1,077,572 parameters, 1,077,572 trained" in out and "data: 12 prompts, 12 to evaluate; first" in out
    assert "lr 0.0003 constant, cliprange 0.001, guidance 1, eta 1\n2 epochs x (8 images of 3 steps, 3 of them" in out
    assert "2 optimizer steps of 4 images x 3 steps: 12 pairs a process, 64 a forward)" in out
    assert "--config benchmarks/tasks/shapes/ddpo.yaml" in out


def test_the_last_lines_and_the_card(typed):
    run, out = typed
    card = (run / "README.md").read_text()
    assert "shapes.py:base_model trained by ddpo.py on benchmarks/tasks/shapes.py:compressibility\n" in card
    first, *_, last = log(run)
    assert f"- `eval/reward`: {first['eval/reward']:.3g} at step 0, **{last['eval/reward']:.3g}** at step 4\n" in card
    rows = samples(run)
    newest = {row["prompt"]: row["reward"] for row in rows if row["step"] == 4}
    for prompt in list(newest)[:3]:
        assert re.search(rf"\n     +4 +{prompt} +{newest[prompt]:.3g} ", card)
    place = f"runs/{run.name}"
    assert re.search(r"^eval/reward [▁▂▃▄▅▆▇█]{3} -1\.\d+ -> -1\.\d+$", out, re.M)
    last = f"card: {place}/README.md\npicture: {place}/curve.png\nmodel: {place}/hf_model"
    assert out.rstrip().endswith(last)
    usage = re.findall(r"```python\n(.*?)\n```", card, re.S)[0]
    assert usage in out and "num_inference_steps=3, eta=1.0, guidance_scale=1.0" in usage


def test_the_lines_that_load_the_model_run(typed):
    """As printed, from the directory in which the command was typed."""
    run, out = typed
    usage = re.findall(r"^import torch; from diffusers .*?save\('sample.png'\)$", out, re.M | re.S)[-1]
    folder = run.parents[1]
    done = subprocess.run([sys.executable, "-c", usage], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    image = np.asarray(Image.open(folder / "sample.png"))
    assert image.shape == (32, 32, 3) and 5 < image.std() < 120
    assert not re.search("safety|not expected|newly initialized", done.stderr)


def test_the_export_is_a_plain_pipeline_that_starts_the_next_run(typed, tmp_path):
    """VAE and text encoder are the base model's; evaluating the export gives what the last evaluation gave."""
    from diffusers import StableDiffusionPipeline, UNet2DConditionModel

    run, _ = typed
    model, report = UNet2DConditionModel.from_pretrained(run / "hf_model/unet", output_loading_info=True)
    assert not any(report.values())
    saved = safetensors.torch.load_file(newest(run) / "model.safetensors")
    assert equal(model.state_dict(), saved) and equal(unet(run / "hf_model"), saved)
    pipeline, base = map(StableDiffusionPipeline.from_pretrained, (run / "hf_model", shapes.BASE_MODEL))
    for part in ("vae", "text_encoder"):
        assert equal(getattr(pipeline, part).state_dict(), getattr(base, part).state_dict())
    moved = [not torch.equal(w, base.unet.state_dict()[name]) for name, w in saved.items()]
    assert sum(moved) > 0.9 * len(moved)
    assert pipeline.safety_checker is None and pipeline.scheduler.config.prediction_type == "v_prediction"
    words = ["--config", str(run / "config.yaml"), "--num-epochs", "1", "--threads", "1"]
    words += ["--model", str(run / "hf_model"), "--run-dir", str(tmp_path / "next")]
    ddpo.main(parse(words, ddpo.Args))
    end, start = log(run)[-1], log(tmp_path / "next")[0]
    assert start | {"step": 4} == {name: end[name] for name in start}


@pytest.mark.parametrize("how", ["the flags", "config.yaml"])
def test_the_same_command_again(typed, monkeypatch, capfd, how):
    run, _ = typed
    before = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in run.rglob("*") if p.is_file() and p.name != ".lock"}
    words = TYPED if how == "the flags" else ["--config", f"runs/{run.name}/config.yaml"]
    monkeypatch.chdir(run.parents[1])
    monkeypatch.setattr(sys, "argv", ["algos/ddpo.py", *words])
    cli(ddpo.Args, ddpo.main, task=ddpo.TASK)
    assert f"runs/{run.name} is finished, its model is in runs/{run.name}/hf_model" in capfd.readouterr().out
    assert before == {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in before}


# ---- The first update ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora_r", [0, 4])
@pytest.mark.parametrize("guidance_scale", [1.0, 5.0])
def test_the_first_ratio_is_one(tmp_path, guidance_scale, lora_r):
    """In every epoch, as long as there is one update in it; in batches other than those of sampling. Guidance adds the
    rounding of two outputs, times its weight and its weight less 1."""
    bound = 20 * torch.finfo(torch.float32).eps * (2 * guidance_scale - 1)
    flags = {"batch_size": 8, "num_epochs": 3, "guidance_scale": guidance_scale, "lora_r": lora_r, "lr": 1e-3}
    _, run = run_ddpo(str(shapes.BASE_MODEL), tmp_path / "run", micro_batch_size=5, decode_batch_size=3, **flags)
    for record in log(run):
        assert record["policy/ratio_deviation_first"] == record["policy/ratio_deviation"] <= bound
        assert record["policy/approxkl"] <= bound**2 and record["policy/clipfrac"] == 0
        assert record["policy/ratio"] == pytest.approx(1, abs=bound) and record["optim/grad_norm"] > 1e-3
    flags |= {"batch_size": 2, "num_epochs": 1}
    (record,) = log(run_ddpo(str(shapes.BASE_MODEL), tmp_path / "more", **flags)[1])
    assert record["policy/ratio_deviation_first"] <= bound  # of the first of four updates; later ones move
    assert record["policy/ratio_deviation"] > bound and record["policy/approxkl"] > bound**2


@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction", "sample"])
def test_the_first_ratio_in_float64(build_pipeline, tmp_path, prediction_type):
    """However a pipeline predicts, given as an object, also with clipping; dropout is off."""
    pipeline = build_pipeline(prediction_type, torch.float64, clip_sample=prediction_type == "epsilon")
    flags = {"batch_size": 8, "num_epochs": 2, "guidance_scale": 3.0, "dtype": "float64", "micro_batch_size": 5}
    _, run = run_ddpo(pipeline, tmp_path / "run", **flags)
    for record in log(run):
        assert record["policy/ratio_deviation"] <= 1e-11 and record["policy/approxkl"] <= 1e-20
    assert json.loads((run / "hf_model/scheduler/scheduler_config.json").read_text())["prediction_type"] == (
        prediction_type
    )


BFLOAT16 = [{"mixed_precision": "bf16"}, {"mixed_precision": "bf16", "lora_r": 4}, {"dtype": "bfloat16", "lora_r": 4}]


@pytest.mark.parametrize("flags", BFLOAT16, ids=str)
@pytest.mark.case(64, "ddpo")
def test_bfloat16(fresh_accelerator, tmp_path, flags):
    """Rounding stays below what --cliprange lets pass (it is 0 with most kernels), and is reported; the export has
    the type of the weights and loads."""
    from diffusers import StableDiffusionPipeline

    flags = flags | {"batch_size": 8, "micro_batch_size": 5}
    _, run = run_ddpo(str(shapes.BASE_MODEL), tmp_path / "run", **flags)
    for record in log(run):
        assert 0 <= record["policy/ratio_deviation_first"] < 5e-4
        assert record["policy/ratio_deviation"] == record["policy/ratio_deviation_first"]
        assert all(math.isfinite(value) for value in record.values())
    kind = torch.bfloat16 if "dtype" in flags else torch.float32
    assert {weight.dtype for weight in unet(run / "hf_model").values()} == {kind}
    assert not equal(unet(run / "hf_model"), {k: w.to(kind) for k, w in unet(shapes.BASE_MODEL).items()})
    pipeline = StableDiffusionPipeline.from_pretrained(run / "hf_model", dtype=kind)
    assert "forward" not in vars(pipeline.unet)


def test_bfloat16_weights_of_an_object_are_not_trained(build_pipeline, tmp_path):
    with pytest.raises(InputError, match="--dtype bfloat16: most updates of such weights would round to nothing"):
        run_ddpo(build_pipeline(dtype=torch.bfloat16), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_rounding_that_moves_the_ratio_is_said(monkeypatch, tiny, tmp_path, capfd):
    """Here the log-probabilities of sampling are 1e-3 off."""
    denoise = ddpo.denoise
    monkeypatch.setattr(ddpo, "denoise", lambda *args: (lambda x, p: (x, p - 1e-3))(*denoise(*args)))
    _, run = run_ddpo(tiny, tmp_path / "run", batch_size=8, num_epochs=3)
    assert [r["policy/ratio_deviation_first"] for r in log(run)] == pytest.approx([1e-3] * 3, rel=0.02)
    assert capfd.readouterr().out.count("warning: rounding moves the ratio by 1.0e-03, --cliprange is 0.001") == 1


# ---- Killed and continued --------------------------------------------------------------------------------------------

LONG = {
    "num_epochs": 4, "eval_every": 2, "save_every": 2, "eval_dataset": ROWS[:3], "guidance_scale": 2.0,
    "lr_schedule": "linear", "warmup_steps": 3, "weight_decay": 0.1, "timestep_fraction": 0.7, "stat_buffer_size": 3,
}  # fmt: skip


def contents(run):
    """{file: bytes} of what must be equal: metrics, samples, pictures, exports, and the newest checkpoint with the
    statistics of prompts in its state.json."""
    paths = [run / "metrics.jsonl", run / "config.yaml", *run.glob("samples.jsonl")]
    paths += [*run.glob("images/*.png"), *run.glob("hf_model*/**/*.safetensors"), *newest(run).iterdir()]
    found = {str(path.relative_to(run)): path.read_bytes() for path in paths if path.parent.name != "lora"}
    for path in run.glob("hf_model*/lora/*.safetensors"):  # the order of its metadata is of the hash seed
        weights = sorted(safetensors.torch.load_file(path).items())
        found[str(path.relative_to(run))] = [(name, weight.numpy().tobytes()) for name, weight in weights]
    return found


def same(run, other):
    one, two = contents(run), contents(other)
    assert one.keys() == two.keys() and [name for name in one if one[name] != two[name]] == []


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory):
    """{lora_r: an uninterrupted run}"""
    found = {}

    def get(lora_r):
        if lora_r not in found:
            folder = tmp_path_factory.mktemp("whole") / "run"  # the card's title is the run's
            found[lora_r] = run_ddpo(tiny, folder, lora_r=lora_r, **LONG)[1]
        return found[lora_r]

    return get


STOPS = [("stopped", 2, 2), ("killed", 2, 2), ("twice", 1, 0)]


@pytest.mark.slow
@pytest.mark.parametrize(("how", "after", "lora_r"), STOPS)
def test_a_run_continues_bitwise(monkeypatch, tiny, whole, tmp_path, how, after, lora_r):
    """Stopped by SIGTERM at the end of an epoch, or killed there, before its checkpoint."""
    stop_requested = logging.Run.stop_requested
    for times in range(1 + (how == "twice")):
        calls = []

        def stop(run, calls=calls):
            calls.append(1)
            if len(calls) == after:
                assert how != "killed", "killed"  # the epoch is in metrics.jsonl, and no checkpoint
                os.kill(os.getpid(), signal.SIGTERM)
            return stop_requested(run)

        monkeypatch.setattr(logging.Run, "stop_requested", stop)
        with pytest.raises((SystemExit, AssertionError)) as stopped:
            run_ddpo(tiny, tmp_path / "run", lora_r=lora_r, **LONG)
        assert getattr(stopped.value, "code", None) == (None if how == "killed" else 143)
        assert log(tmp_path / "run")[-1]["epoch"] == after * (times + 1)
        monkeypatch.setattr(logging.Run, "stop_requested", stop_requested)
    kept = state(newest(tmp_path / "run"))
    assert kept["iteration"] == after * (2 if how == "twice" else 1) - (how == "killed") and kept["rewards"]
    run_ddpo(tiny, tmp_path / "run", lora_r=lora_r, **LONG)
    same(tmp_path / "run", whole(lora_r))


def test_adapters_go_on_with_the_weights_that_they_adapt(whole, build_pipeline, tmp_path):
    """They are saved alone: another base model is refused."""
    build_pipeline(seed=1).save_pretrained(tmp_path / "other")
    flags = LONG | {"lora_r": 2, "num_epochs": 5, "resume": str(newest(whole(2)))}
    with pytest.raises(InputError, match="is of other weights, among them frozen ones: keep its --model"):
        run_ddpo(str(tmp_path / "other"), tmp_path / "run", **flags)


def test_what_a_checkpoint_holds(whole, tiny):
    """With LoRA the adapters alone; the last rewards of each prompt; no pickle. Adapters lie beside the export, too,
    and plain diffusers puts them on the base model."""
    from diffusers import StableDiffusionPipeline

    full, adapters = (safetensors.torch.load_file(newest(whole(r)) / "model.safetensors") for r in (0, 2))
    assert equal(full, unet(whole(0) / "hf_model")) and full.keys() == unet(tiny).keys()
    assert adapters and all(".lora_A." in name or ".lora_B." in name for name in adapters)
    bytes_full, bytes_lora = (sum(p.stat().st_size for p in newest(whole(r)).glob("*.safetensors")) for r in (0, 2))
    assert bytes_lora < bytes_full / 3
    for lora_r in (0, 2):
        names = {p.name for p in newest(whole(lora_r)).iterdir()}
        assert names == {"MANIFEST.json", "model.safetensors", "optim.safetensors", "state.json"}
        kept = state(newest(whole(lora_r)))
        assert kept["iteration"] == 4 and kept["step"] == 8
        assert kept["rewards"].keys() <= {row["prompt"] for row in ROWS}
        assert all(len(known) <= 3 for known in kept["rewards"].values()) and len(kept["rewards"]) == 5
        files = [p.suffix for p in whole(lora_r).rglob("*") if p.is_file() and p.name != ".lock"]
        assert {*files} == {".json", ".jsonl", ".yaml", ".md", ".png", ".safetensors"}
    pipeline = StableDiffusionPipeline.from_pretrained(tiny)
    pipeline.load_lora_weights(whole(2) / "hf_model/lora")
    pipeline.fuse_lora()
    pipeline.unload_lora_weights()
    fused, merged = pipeline.unet.state_dict(), unet(whole(2) / "hf_model")
    assert fused.keys() == merged.keys() == unet(tiny).keys()
    assert all(torch.allclose(fused[name], merged[name], rtol=0, atol=1e-6) for name in fused)
    assert max((merged[name] - w).abs().max() for name, w in unet(tiny).items()) > 1e-4


@pytest.mark.parametrize(("of", "to"), [(2, 0), (0, 2), (2, 4)])
def test_a_checkpoint_of_other_weights_is_refused(whole, tiny, tmp_path, of, to):
    """In its own directory by the list of differences; from elsewhere with --resume PATH."""
    shutil.copytree(whole(of), tmp_path / "run")
    with pytest.raises(InputError, match=f"--lora-r: was {of}, is {to}"):
        run_ddpo(tiny, tmp_path / "run", lora_r=to, **LONG)
    with pytest.raises(InputError, match=r"^[^\n]*(lora|adapter|frozen weights)[^\n]*$"):
        run_ddpo(tiny, tmp_path / "new", lora_r=to, resume=str(newest(whole(of))), **LONG | {"num_epochs": 5})


def test_a_longer_run_from_a_checkpoint(whole, tiny, tmp_path):
    """--resume PATH with more epochs, statistics and moments included, is the longer run."""
    flags = LONG | {"lr_schedule": "constant", "num_epochs": 2}
    run_ddpo(tiny, tmp_path / "short", **flags)
    _, run = run_ddpo(tiny, tmp_path / "more", resume=str(newest(tmp_path / "short")), **flags | {"num_epochs": 3})
    _, straight = run_ddpo(tiny, tmp_path / "straight", **flags | {"num_epochs": 3})
    assert log(run) == log(straight)[-1:] and equal(unet(run / "hf_model"), unet(straight / "hf_model"))


def test_the_best_evaluation_is_kept(tiny, tmp_path):
    """That of the first set; steps 2, 4 and 6 have 1, 5 and 2."""
    scripted, calls = {2: 9, 5: 1, 8: 5, 11: 2}, []  # the reward's calls: evaluation x, evaluation y, rollout

    def reward(images, prompts):
        calls.append(len(prompts))
        value = scripted.get(len(calls) + 1, 0)
        return [value + (0.01 * i if len(prompts) == 8 else 0) for i in range(len(prompts))]

    flags = {"num_epochs": 3, "eval_every": 2, "save_every": 2, "keep_checkpoints": 1}
    flags |= {"eval_dataset": {"x": ROWS[:2], "y": ROWS[2:3]}, "reward": reward}
    _, run = run_ddpo(tiny, tmp_path / "run", **flags)
    assert [record["eval/x/reward"] for record in log(run)] == [9, 1, 5, 2]
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step_00000004", "step_00000006"]
    assert (state(newest(run))["best_score"], state(newest(run))["best_step"]) == (5, 4)
    best = safetensors.torch.load_file(run / "checkpoints/step_00000004/model.safetensors")
    assert equal(unet(run / "hf_model_best"), best) and not equal(unet(run / "hf_model"), best)


# ---- What it learns from ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [{}, {"lora_r": 2}, {"per_prompt_stats": False}, {"ppo_epochs": 2}], ids=str)
@pytest.mark.case(32, "ddpo")
def test_a_constant_reward_changes_nothing(tiny, tmp_path, flags):
    flags |= {"reward": lambda images, prompts: [0.3] * len(images), "weight_decay": 0.0, "guidance_scale": 2.0}
    _, run = run_ddpo(tiny, tmp_path / "run", **flags)
    assert equal(unet(run / "hf_model"), unet(tiny)) and [r["optim/grad_norm"] for r in log(run)] == [0, 0]


def test_weight_decay_alone_moves_matrices(tiny, tmp_path):
    flags = {"reward": lambda images, prompts: [0.3] * len(images), "weight_decay": 0.1, "num_epochs": 1}
    _, run = run_ddpo(tiny, tmp_path / "run", **flags)
    after = unet(run / "hf_model")
    for name, weight in unet(tiny).items():
        expected = weight * (1 - 1e-3 * 0.1) ** 2 if weight.ndim > 1 else weight
        assert torch.allclose(after[name], expected, rtol=1e-6, atol=0), name


def test_it_learns_from_the_reward(tmp_path):
    """A short run on the shapes that is rewarded with brightness."""
    flags = {"rollout_batch_size": 48, "batch_size": 16, "num_epochs": 12, "num_inference_steps": 5, "lr": 5e-4}
    flags |= {"stat_buffer_size": 32, "stat_min_count": 16, "eval_every": 36, "reward": shapes.brightness}
    flags |= {"eval_dataset": shapes.eval_prompts(samples=2)}
    metrics, run = run_ddpo(str(shapes.BASE_MODEL), tmp_path / "run", shapes.prompts(), **flags)
    assert metrics["eval/reward"] > log(run)[0]["eval/reward"] + 0.025


@pytest.mark.parametrize(("guidance_scale", "rows"), [(1.0, 1), (5.0, 2)])
def test_guidance_takes_a_second_row(monkeypatch, tiny, tmp_path, guidance_scale, rows):
    """Of each image and step, in sampling and in training; without it none."""
    found, load_pipeline = [], ddpo.load_pipeline

    def hooked(*args):
        pipeline = load_pipeline(*args)
        pipeline.unet.register_forward_pre_hook(lambda module, inputs: found.append((module.training, len(inputs[0]))))
        return pipeline

    monkeypatch.setattr(ddpo, "load_pipeline", hooked)
    flags = {"num_epochs": 1, "guidance_scale": guidance_scale, "timestep_fraction": 0.7}
    run_ddpo(tiny, tmp_path / "run", **flags)
    assert sum(n for training, n in found if not training) == 8 * 3 * rows
    assert sum(n for training, n in found if training) == 8 * 2 * rows


@pytest.mark.parametrize("per_prompt_stats", [True, False])
@pytest.mark.parametrize("kind", [int, float])
def test_every_pair_is_trained_with_its_images_advantage(monkeypatch, tiny, tmp_path, kind, per_prompt_stats):
    """Rewards are integers, or floats of the same value. A pair is known by its log-probability: all differ."""
    from diffusers import StableDiffusionPipeline

    losses, sampled, epochs = recorded(monkeypatch, "ddpo_loss"), recorded(monkeypatch, "sample_images"), []

    def reward(images, prompts, note):
        values = [kind((7 * i * i + 3 * n["id"] + 5 * len(epochs)) % 11) for i, n in enumerate(note)]
        assert [n["id"] for n in note] == [shapes.CAPTIONS.index(prompt) for prompt in prompts]
        epochs.append((prompts, values))
        return values

    flags = {"num_epochs": 3, "ppo_epochs": 2, "micro_batch_size": 5, "adv_clip_max": 1.2, "stat_buffer_size": 3}
    flags |= {"timestep_fraction": 0.7, "per_prompt_stats": per_prompt_stats, "lr": 1e-9}
    _, run = run_ddpo(tiny, tmp_path / "run", reward=reward, **flags)
    history, expected = {}, []
    for prompts, rewards in epochs:
        found = [(reward - fmean(rewards)) / (pstdev(rewards) + 1e-8) for reward in rewards]
        if per_prompt_stats:
            found = slow_advantages(history, prompts, rewards, size=3, count=2)
        expected += [max(-1.2, min(1.2, advantage)) for advantage in found]
    assert 1.2 in expected and -1.2 in expected and len({f"{x:.6f}" for x in expected}) > 8
    pairs = {}
    for epoch, (_, found) in enumerate(sampled):
        latents, logprobs = found["latents"], found["logprobs"]
        assert latents.shape == (8, 4, 5, 4, 12) and logprobs.shape == (8, 3)
        pairs |= {logprobs[i, n].item(): (epoch * 8 + i, n) for i in range(8) for n in range(3)}
    assert len(pairs) == 3 * 8 * 3
    pipeline, (_, found) = StableDiffusionPipeline.from_pretrained(tiny), sampled[0]
    images, latents = found["images"], found["latents"]
    with torch.no_grad():  # images are what diffusers would show of the last latents
        decoded = pipeline.vae.decode(latents[:, -1] / pipeline.vae.config.scaling_factor).sample
    shown = pipeline.image_processor.postprocess(decoded, "pil")
    assert all(np.array_equal(a.permute(1, 2, 0), b) for a, b in zip(images, shown, strict=True))
    seen = Counter()
    for (new, old, advantages, clip_range), _ in losses:
        assert clip_range == 1e-3 and torch.allclose(new, old, atol=1e-3)
        for logprob, advantage in zip(old.tolist(), advantages.tolist(), strict=True):
            image, n = pairs[logprob]
            seen[image, n] += 1
            assert advantage == pytest.approx(expected[image], abs=1e-6), (image, n)
    counts = Counter(image for image, _ in seen.elements())
    assert counts == dict.fromkeys(range(24), 4) and max(seen.values()) <= 2  # 2 passes x 2 of 3 steps
    drawn = [ROWS[i]["prompt"] for i in stream_rows(1, "data", 5, 0, 24)]
    assert drawn == [prompt for prompts, _ in epochs for prompt in prompts]
    kept = state(newest(run))["rewards"]
    values = [(p, r) for prompts, rewards in epochs for p, r in zip(prompts, rewards, strict=True)]
    assert kept == ({p: [r for q, r in values if q == p][-3:] for p in drawn} if per_prompt_stats else {})
    assert log(run)[-1]["objective/scores"] == pytest.approx(fmean(epochs[-1][1]))
    assert log(run)[-1]["objective/scores_std"] == pytest.approx(pstdev(epochs[-1][1]))


# ---- Data ------------------------------------------------------------------------------------------------------------


def test_prompts_that_differ_behind_the_text_encoders_end(tiny, tmp_path):
    """They have equal embeddings, and statistics of their own (TRL keys them by decoded tokens)."""
    start = " ".join(["a red circle"] * 40)
    rows = [{"prompt": f"{start} {end}", "level": level} for end, level in (("here", 0), ("There", 10), ("there", 20))]
    reward = lambda images, prompts, level: [x + i % 2 for i, x in enumerate(level)]  # noqa: E731
    _, run = run_ddpo(tiny, tmp_path / "run", rows, reward=reward, num_epochs=3, stat_buffer_size=32)
    kept = state(newest(run))["rewards"]
    assert kept.keys() == {row["prompt"] for row in rows}
    for row in rows:
        assert set(kept[row["prompt"]]) == {row["level"], row["level"] + 1}
    assert sum(map(len, kept.values())) == 24


def test_several_evaluation_sets(monkeypatch, tiny, tmp_path):
    """Each has metrics, rows and a grid of its own, with the same noise at every evaluation; the first one decides
    which model is best. What the reward gets are the pixels of the grid."""
    seen = []

    def keep(images, prompts, target, **columns):
        assert images.dtype == torch.float32 and images.device.type == "cpu"
        seen.append((list(prompts), list(target), columns, images.clone()))
        return redness(images, prompts, target)

    def metric(images, prompts, note):
        return {"id": [n["id"] for n in note], "level": [image.mean().item() for image in images]}

    sets = {"x": ROWS, "a/y": ROWS[3:1:-1]}
    _, run = run_ddpo(tiny, tmp_path / "run", reward=keep, metric=metric, eval_dataset=sets, eval_every=2, lr=1e-12)
    rows = samples(run)
    assert [*rows[0]] == ["step", "set", "prompt", "reward", "id", "level"]
    assert [(r["step"], r["set"], r["id"]) for r in rows] == [
        (step, name, row["note"]["id"]) for step in (0, 2, 4) for name, found in sets.items() for row in found
    ]
    evaluations = [call for call in seen if len(call[0]) != 8]
    assert [len(call[0]) for call in evaluations] == [5, 2] * 3
    names = [(step, name) for step in (0, 2, 4) for name in ("x", "a_y")]
    assert sorted(p.name for p in (run / "images").iterdir()) == sorted(f"step_{s:08d}_{n}.png" for s, n in names)
    for (step, name), (prompts, target, columns, images) in zip(names, evaluations, strict=True):
        grid = pixels(run / f"images/step_{step:08d}_{name}.png", len(prompts), 8, 24)
        assert np.array_equal(grid, (images * 255).round().to(torch.uint8)) and images.max() <= 1
        assert torch.equal(images, torch.from_numpy(grid.copy()).float() / 255)
        found = sets[name.replace("_", "/")]
        assert prompts == [row["prompt"] for row in found] and target == [row["target"] for row in found]
        assert columns == {"note": [row["note"] for row in found]}
    for record in log(run):
        for name in sets:
            found = [row for row in rows if (row["step"], row["set"]) == (record["step"], name)]
            for key in ("reward", "id", "level"):
                assert record[f"eval/{name}/{key}"] == pytest.approx(fmean(row[key] for row in found))
    assert all(torch.equal(evaluations[i][3], evaluations[i + 2][3]) for i in range(4))  # lr is next to nothing
    rollouts = [call for call in seen if len(call[0]) == 8]
    assert len(rollouts) == 2 and not torch.equal(rollouts[0][3], rollouts[1][3])
    assert "eval/x/reward" in (run / "README.md").read_text()


def test_prompts_from_a_file(tiny, tmp_path):
    """A line a prompt; without an evaluation set, the first --rollout-batch-size of them are evaluated."""
    prompts = ["a red circle", "Ein Kreis, ä", "a blue square", "x y z", "a green triangle"]
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(prompts) + "\n", encoding="utf-8")
    seen = []

    def reward(images, prompts):
        seen.append(prompts)
        return [image.mean().item() for image in images]

    flags = {"num_epochs": 2, "rollout_batch_size": 4, "batch_size": 4, "eval_every": 1, "reward": reward}
    _, run = run_ddpo(tiny, tmp_path / "run", str(path), **flags)
    assert [row["prompt"] for row in samples(run)] == prompts[:4] * 3
    assert [p for call in seen[1::2] for p in call] == [prompts[i] for i in stream_rows(1, "data", 5, 0, 8)]
    assert "pipeline('a red circle', num_inference_steps=3" in (run / "README.md").read_text()


def test_columns_beside_text(tiny, tmp_path):
    """`text` serves as prompt; the other columns reach the reward as those beside `prompt` do."""
    rows = [{"text": row["prompt"], "target": row["target"]} for row in ROWS]
    run_ddpo(tiny, tmp_path / "prompt", num_epochs=1)
    run_ddpo(tiny, tmp_path / "text", rows, num_epochs=1)
    assert log(tmp_path / "text") == log(tmp_path / "prompt")


# ---- Trackers --------------------------------------------------------------------------------------------------------


class Recorder(GeneralTracker):
    """A tracker that keeps what it gets, or fails in the method `fails`."""

    requires_logging_directory = False

    def __init__(self, name, fails=None):
        self.name, self.fails, self.metrics, self.images, self.tables = name, fails, {}, {}, {}
        super().__init__()

    @property
    def tracker(self):
        return self

    def store_init_configuration(self, values):
        assert self.fails != "init", "no account"

    def log(self, values, step=None, **options):
        assert self.fails != "log", "no network"
        self.metrics[step] = values

    def log_table(self, name, columns, data, step):
        assert self.name == "wandb" and name == "eval/samples"
        self.tables[step] = (columns, data)

    def log_images(self, values, step=None, **options):
        assert self.fails != "log_images", "no space"
        assert options == ({"dataformats": "NHWC"} if self.name == "tensorboard" else {})
        self.images.setdefault(step, {}).update(values)


@pytest.mark.parametrize("track", ["wandb", "tensorboard"])
def test_trackers_get_metrics_and_grids(monkeypatch, tiny, tmp_path, track):
    recorder = Recorder(track)
    monkeypatch.setattr(tracking, "filter_trackers", lambda names, folder: [recorder] if names == [track] else [])
    sets = {"x": ROWS, "y": ROWS[:2]}
    _, run = run_ddpo(tiny, tmp_path / "run", track=track, eval_dataset=sets, eval_every=4, num_epochs=3)
    assert [*recorder.metrics] == [0, 2, 4, 6] and [*recorder.images] == [0, 4, 6]
    for record in log(run):
        assert record.items() - {("step", record["step"])} <= recorder.metrics[record["step"]].items()
    assert "perf/images_per_sec" in recorder.metrics[2]
    assert [*recorder.tables] == ([0, 4, 6] if track == "wandb" else [])
    for step, table in recorder.tables.items():
        rows = [row for row in samples(run) if row["step"] == step]
        cells = [[row["set"], row["prompt"], row["reward"]] for row in rows]
        assert table == (["set", "prompt", "reward"], cells)
    for step, found in recorder.images.items():
        assert found.keys() == {"eval/images_x", "eval/images_y"}
        for name, images in found.items():
            file = run / f"images/step_{step:08d}_{name[-1]}.png"
            assert images.shape == (1, 5 * 8 + 2 * ddpo.TEXT_HEIGHT, 8 * 24 * 5, 3)
            assert np.array_equal(images[0], np.asarray(Image.open(file)))


@pytest.mark.parametrize("fails", [None, "init", "log", "log_images"])
@pytest.mark.case(61, "ddpo")
def test_a_tracker_that_fails_stops_nothing(monkeypatch, tiny, tmp_path, capfd, fails):
    recorder = Recorder("wandb", fails)
    monkeypatch.setattr(tracking, "filter_trackers", lambda names, folder: [recorder])
    _, run = run_ddpo(tiny, tmp_path / "run", track="wandb", eval_every=2)
    assert capfd.readouterr().out.count("warning: --track wandb is off") == (fails in ("init", "log"))
    assert [record["step"] for record in log(run)] == [0, 2, 4] and (run / "README.md").exists()
    assert [*recorder.images] == {None: [0, 2, 4], "log": [0]}.get(fails, [])  # images come before the metrics


@pytest.mark.slow
@pytest.mark.case(61, "ddpo")
def test_wandb_offline(tiny, tmp_path):
    (tmp_path / "user.py").write_text(USER_FILE)
    jsonl(tmp_path / "x.jsonl", ROWS)
    flags = f"""--model {tiny} --dataset x.jsonl --reward user.py:reward --num-epochs 1 --rollout-batch-size 8
    --batch-size 4 --num-inference-steps 3 --threads 1 --run-dir run --track wandb""".split()
    env = os.environ | {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "HOME": str(tmp_path / "home")}
    command = [sys.executable, ROOT / "algos/ddpo.py", *flags]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0 and "warning" not in done.stdout, done.stderr
    (record,) = (tmp_path / "run").rglob("*.wandb")
    assert all(name in record.read_bytes() for name in (b"eval/reward", b"policy/approxkl", b"eval/images"))
    media = [np.asarray(Image.open(path)) for path in (tmp_path / "run/wandb").rglob("*.png")]
    grids = [np.asarray(Image.open(path)) for path in (tmp_path / "run/images").iterdir()]
    assert len(media) == len(grids) == 2 and {x.tobytes() for x in media} == {x.tobytes() for x in grids}


# ---- Bad input -------------------------------------------------------------------------------------------------------

BASE = """--model model --dataset rows.jsonl --reward user.py:reward --num-epochs 1 --rollout-batch-size 8
--batch-size 4 --num-inference-steps 3 --threads 1 --run-dir run""".split()


@pytest.fixture
def here(tiny, tmp_path, monkeypatch):
    """A working directory with model, rows and functions."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    Path("model").symlink_to(tiny)
    Path("user.py").write_text(USER_FILE)
    jsonl("rows.jsonl", ROWS)
    return tmp_path


@pytest.fixture
def command(here, monkeypatch, capfd):
    """command(*flags) -> (exit code, stdout, stderr), as if typed; a word may hold several flags."""

    def run(*flags, base=BASE):
        words = [word for flag in flags for word in flag.split()]
        monkeypatch.setattr(sys, "argv", ["algos/ddpo.py", *base, *words])
        capfd.readouterr()
        code = 0
        try:
            cli(ddpo.Args, ddpo.main, task=ddpo.TASK)
        except SystemExit as stop:
            code = stop.code
        return code, *capfd.readouterr()

    return run


def scheduler(folder, kind, model="model", **options):
    """A copy of the model's directory with another scheduler."""
    import diffusers

    shutil.copytree(model, folder, symlinks=False)
    getattr(diffusers, kind)(**options).save_pretrained(Path(folder) / "scheduler")
    index = json.loads((Path(folder) / "model_index.json").read_text()) | {"scheduler": ["diffusers", kind]}
    (Path(folder) / "model_index.json").write_text(json.dumps(index))


BAD_COMMANDS = [
    ("--model flow", "--model flow: its FlowMatchEulerDiscreteScheduler has no beta_start, as DDIM needs"),
    ("--model last_alpha_one --num-inference-steps 1", "--num-inference-steps 1: no step of this scheduler has noise"),
    ("--guidance-scale nan", "--guidance-scale nan must be 1 (no guidance) or more"),
    ("--guidance-scale 1 --negative-prompt grey", "--negative-prompt needs a --guidance-scale above 1"),
    ("--rollout-batch-size 10", "--rollout-batch-size 10 must be a multiple of --batch-size 4"),
    ("--timestep-fraction 1.1", "--timestep-fraction 1.1 must be in (0, 1]"),
    ("--cliprange -1", "--cliprange -1.0 must be 0 or a positive number"),
    ("--adv-clip-max nan", "--adv-clip-max nan must be a positive number"),
    ("--stat-min-count 9 --stat-buffer-size 8", "--stat-min-count 9 must be at most --stat-buffer-size 8"),
    ("--lora-alpha 4", "--lora-alpha and --lora-targets need --lora-r"),
    ("--lora-r 2 --lora-targets nothing like it", "--lora-targets nothing like it: "),
    ("--eta 0 --lr 0 --batch-size 3", "3 problems:"),
    ("--dataset user.py:no_rows", "--dataset [] holds no rows"),
    ("--eval-dataset rows.jsonl,other.jsonl", "--eval-dataset other has the columns caption, target; expected prompt"),
    ("--eval-dataset rows.jsonl,rows.jsonl", "--eval-dataset rows.jsonl,rows.jsonl: two sets have the same name"),
]


@pytest.mark.parametrize(("flags", "sentence"), BAD_COMMANDS, ids=lambda x: x[:60])
@pytest.mark.case(57, "ddpo")
def test_bad_commands(command, here, flags, sentence):
    """One sentence, exit code 2, and nothing is written."""
    jsonl("other.jsonl", [{"caption": "a red circle", "target": 1}])
    if "flow" in flags:
        scheduler("flow", "FlowMatchEulerDiscreteScheduler")
    if "last_alpha_one" in flags:
        scheduler("last_alpha_one", "DDIMScheduler", set_alpha_to_one=True)
    code, _, err = command(flags)
    assert code == 2 and err.startswith("error: ") and sentence in err, err
    assert len(err.splitlines()) == (4 if "problems" in sentence else 1) and len(err) < 600, err
    assert not Path("run").exists()


def test_your_own_dataset_needs_your_own_reward(command, here):
    base = [word for word in BASE if word not in ("--reward", "user.py:reward")]
    code, _, err = command(base=base)
    assert code == 2 and err.startswith("error: --reward is missing: ")
    assert not Path("run").exists()


@pytest.mark.case(25, "ddpo")
def test_a_reward_that_fails_later_leaves_the_last_checkpoint(tiny, tmp_path):
    """In the third rollout; once mended, the run goes on from there."""
    calls, broken = [], [True]

    def reward(images, prompts, target, **columns):
        calls.append(1)
        scores = redness(images, prompts, target)
        return [*scores[:3], math.nan, *scores[4:]] if broken[0] and len(calls) == 3 else scores

    flags = {"num_epochs": 3, "save_every": 1, "reward": reward}
    with pytest.raises(InputError, match=r"returned nan for row 4, prompt 'a .*'; expected a finite number"):
        run_ddpo(tiny, tmp_path / "run", **flags)
    assert state(newest(tmp_path / "run"))["iteration"] == 2 and [r["step"] for r in log(tmp_path / "run")] == [2, 4]


@pytest.mark.parametrize("embedded", [False, True])
def test_check_writes_nothing(command, here, embedded):
    flags = "--check --num-inference-steps 3 --threads 1 --rollout-batch-size 32"
    base = flags.split() if embedded else [*BASE, "--check"]
    before = sorted(here.rglob("*"))
    code, out, err = command(base=base)
    assert code == 0 and "check passed" in out and "samples at step 0" in out and "ddpo: " in out, err
    assert "one iteration: " in out
    assert [p for p in sorted(here.rglob("*")) if p not in before and "__pycache__" not in p.parts] == []


@pytest.mark.case(72, "ddpo")
def test_a_last_step_without_noise_is_not_trained(monkeypatch, command, here):
    """set_alpha_to_one: its log-probability would be infinite. No loss is of that step."""
    scheduler("model2", "DDIMScheduler", set_alpha_to_one=True, clip_sample=False)
    losses, sampled = recorded(monkeypatch, "ddpo_loss"), recorded(monkeypatch, "sample_images")
    code, out, err = command("--model model2 --eval-every 0 --num-inference-steps 4")
    assert code == 0 and "images of 4 steps, 3 of them with noise" in out and "x 3 steps: 12 pairs" in out, err
    old = torch.cat([args[1] for args, _ in losses])
    logprobs = sampled[0][1]["logprobs"]
    assert (
        old.sort().values.tolist() == logprobs[:, :3].flatten().sort().values.tolist() and (logprobs[:, 3] == 0).all()
    )


# ---- Numbers that are not finite -------------------------------------------------------------------------------------


def intact(run, step):
    """The newest checkpoint is of that step, and finite, and there is no export."""
    assert newest(run).name == f"step_{step:08d}" and not (run / "hf_model").exists()
    for file in newest(run).glob("*.safetensors"):
        assert all(weight.isfinite().all() for weight in safetensors.torch.load_file(file).values())


@pytest.mark.case(33, "ddpo")
def test_advantages_that_overflow_stop_the_run(tiny, tmp_path):
    """Finite rewards whose mean is not."""
    calls = []

    def reward(images, prompts, target, **columns):
        calls.append(1)
        return [1.7e308] * len(images) if len(calls) == 2 else redness(images, prompts, target)

    flags = {"save_every": 1, "num_epochs": 3, "reward": reward}
    with pytest.raises(
        FloatingPointError, match=r"step 3: gradient norm nan, in epoch 2, .*; the last checkpoint is int"
    ):
        run_ddpo(tiny, tmp_path / "run", **flags)
    intact(tmp_path / "run", 2)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("lora_r", [0, 2])
@pytest.mark.case(33, "ddpo")
def test_gradients_that_are_not_finite_stop_before_the_step(monkeypatch, tiny, tmp_path, value, lora_r):
    """Here of one weight, in the fourth step; once that is gone, the same command ends as if nothing had been."""
    flags = {"save_every": 1, "num_epochs": 3, "lora_r": lora_r}
    steps, clip = [], Accelerator.clip_grad_norm_

    def spoil(self, weights, *args):
        steps.append(1)
        weights = list(weights)
        if len(steps) == 4:
            next(weight.grad for weight in weights if weight.grad is not None).view(-1)[0] = value
        return clip(self, weights, *args)

    monkeypatch.setattr(Accelerator, "clip_grad_norm_", spoil)
    with pytest.raises(FloatingPointError, match=f"step 4: gradient norm {value}, in epoch 2"):
        run_ddpo(tiny, tmp_path / "run", **flags)
    intact(tmp_path / "run", 2)
    monkeypatch.undo()
    for name in ("run", "whole"):
        run_ddpo(tiny, tmp_path / name, **flags)
    same(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize("at", ["first", "last"])
@pytest.mark.case(33, "ddpo")
def test_weights_that_are_not_finite_are_never_saved(monkeypatch, tiny, tmp_path, at):
    """A step that spoils a weight, the first of an epoch or its last one: images or gradients tell; no checkpoint and
    no export holds it."""
    steps, step = [], torch.optim.AdamW.step

    def spoil(self, *args):
        steps.append(1)
        step(self, *args)
        if len(steps) == {"first": 3, "last": 4}[at]:
            self.param_groups[0]["params"][0].data.view(-1)[0] = math.nan

    monkeypatch.setattr(torch.optim.AdamW, "step", spoil)
    with pytest.raises(FloatingPointError, match="not finite|gradient norm nan"):
        run_ddpo(tiny, tmp_path / "run", save_every=1, num_epochs=3)
    intact(tmp_path / "run", 2)


@pytest.mark.parametrize("part", ["unet", "vae", "text_encoder"])
@pytest.mark.case(36, "ddpo")
def test_weights_that_are_not_finite_are_told_by_the_first_image(build_pipeline, tmp_path, part):
    """Before the reward sees it. The last weight of each part is used by every image."""
    pipeline = build_pipeline()
    *_, weight = getattr(pipeline, part).parameters()
    weight.data[0] = math.nan
    scores = []
    reward = lambda images, prompts: scores.append(1)  # noqa: E731
    with pytest.raises(FloatingPointError, match="the image of 'a .*' is not finite"):
        run_ddpo(pipeline, tmp_path / "run", reward=reward, eval_every=2)
    assert not scores and not (tmp_path / "run").exists()


@pytest.mark.case(35, "ddpo")
def test_images_that_are_not_finite_stop_the_run(monkeypatch, tiny, tmp_path):
    """In the second epoch: the checkpoint of the first one is intact."""
    calls = []
    denoise = ddpo.denoise

    def broken(*args):
        calls.append(1)
        latents, logprobs = denoise(*args)
        latents[2, -1, 0, 0, 0] = math.nan if len(calls) == 2 else 0.0
        return latents, logprobs

    monkeypatch.setattr(ddpo, "denoise", broken)
    with pytest.raises(FloatingPointError, match="the image of 'a .*' is not finite"):
        run_ddpo(tiny, tmp_path / "run", save_every=1)
    intact(tmp_path / "run", 2)


# ---- Small promises --------------------------------------------------------------------------------------------------


def test_check_calls_the_reward_on_the_training_rows_too(tiny, tmp_path):
    """Whose columns may be others than those of the evaluation."""

    def reward(images, prompts, answer):
        return [1.0] * len(prompts)

    rows = [{"prompt": "a red circle"}]
    flags = {"eval_dataset": [row | {"answer": 1} for row in rows], "reward": reward, "check": True}
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'answer'"):
        run_ddpo(tiny, tmp_path / "run", rows, **flags)
    assert not (tmp_path / "run").exists()


def test_check_calls_the_metric_on_evaluation_rows_alone(tiny, tmp_path, capfd):
    """As a run does: training rows need no columns for it."""

    def metric(images, prompts, answer):
        return {"right": [1.0] * len(prompts)}

    flags = {"eval_dataset": [{"prompt": "a red circle", "answer": 1}], "metric": metric}
    flags |= {"check": True, "eval_every": 2}
    assert run_ddpo(tiny, tmp_path / "run", reward=lambda prompts: [1.0] * len(prompts), **flags) == ({}, None)
    out = capfd.readouterr().out
    assert "check passed" in out and out.count("samples at step 0") == 1


def test_check_is_the_evaluation_and_the_first_epoch(monkeypatch, tiny, tmp_path, capfd):
    sampled = recorded(monkeypatch, "sample_images")
    run_ddpo(tiny, tmp_path / "run", eval_dataset={"x": ROWS, "y": ROWS[2:3]}, eval_every=2, check=True)
    assert "check passed" in capfd.readouterr().out and not (tmp_path / "run").exists()
    first = [ROWS[i]["prompt"] for i in stream_rows(1, "data", 5, 0, 8)]
    assert [args[2] for args, _ in sampled][:3] == [[row["prompt"] for row in ROWS], [ROWS[2]["prompt"]], first]


@pytest.mark.case(32, "ddpo")
def test_equal_rewards_are_said(tiny, tmp_path, capfd):
    warning = "all rewards of the first epoch are 3.0"
    run_ddpo(tiny, tmp_path / "equal", reward=lambda prompts: [3] * len(prompts))
    assert warning in capfd.readouterr().out
    run_ddpo(tiny, tmp_path / "other", reward=lambda prompts: list(range(len(prompts))))
    assert "all rewards" not in capfd.readouterr().out
