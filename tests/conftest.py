"""Shared fixtures of the tests: `python -m pytest tests`

Tiny random models (2 layers, width 12, the 25 letters and special tokens of the random walks),
no network, one thread and no GPU, so that numbers are the same in every run on a machine.

Bitwise equality (runs that continue, frozen weights, processes of a run) is asked of one machine with one set of
instructions alone. Between machines the order of additions differs, so tolerances are those of the arithmetic: its
epsilon, times sizes and the number of roundings. .ci/run repeats the numerical tests with the kernels of a lesser CPU.
"""

import csv
import os
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin take the cores of the other worker
os.environ.setdefault("ACCELERATE_USE_CPU", "true")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from accelerate import Accelerator
from cases import CASES
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen3Config

from benchmarks.tasks import randomwalks, shapes
from common import run as run_module

pytest_plugins = ["harness", "helpers"]
FAMILIES = "gpt2", "llama", "qwen3"
POSITIONS = 32
SIZES = {"hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture(scope="session", autouse=True)
def quick_ends():
    """Runs in the process of the tests leave an empty curve.png and wait for no disk: both took half of their time. The
    processes that `harness` starts draw the curves, and test_reports.py does."""
    undrawn = patch.object(run_module, "draw_curves", lambda records, names, title, path: path.touch())
    with undrawn, patch.object(os, "fsync", lambda descriptor: None):
        yield


@pytest.fixture(autouse=True)
def plain_torch():
    """A script that ran in-process leaves its threads and its precision of products behind: each test starts anew."""
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("highest")


@pytest.fixture
def letters():
    """A new tokenizer of one token per letter: a..u = 0..20, bos 21, eos 22, pad 23, unk 24."""
    return randomwalks.tokenizer()


@pytest.fixture(scope="session")
def build_model():
    """build_model(family, dtype, seed, **config): a random model in evaluation mode. Its weights are large (0.3), so
    that its distributions are far from uniform, and differ by position."""

    def build(family="gpt2", dtype=torch.float32, seed=0, **config):
        letters = randomwalks.tokenizer()
        options = {f"{name}_token_id": getattr(letters, f"{name}_token_id") for name in ("bos", "eos", "pad")}
        options |= {"vocab_size": len(letters), "initializer_range": 0.3, **config}
        sizes = SIZES | {"num_key_value_heads": 1, "head_dim": 6, "max_position_embeddings": POSITIONS}
        if family == "gpt2":
            options = {"n_layer": 2, "n_embd": 12, "n_head": 2, "n_positions": POSITIONS} | options
            config = GPT2Config(resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1, **options)
        else:
            kind = LlamaConfig if family == "llama" else Qwen3Config
            config = kind(**sizes, **({"tie_word_embeddings": family == "qwen3"} | options))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()

    return build


@pytest.fixture(scope="session")
def build_pipeline():
    """build_pipeline(prediction_type, dtype, seed, **scheduler options): a random StableDiffusionPipeline, dropout 0.1,
    with the words of the shapes. Latents 5 x 4 x 12, images 8 x 24. Its weights are large, so that captions matter."""
    from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel

    def build(prediction_type="epsilon", dtype=torch.float32, seed=0, **scheduler):
        words = shapes.tokenizer()
        ids = {f"{name}_token_id": getattr(words, f"{name}_token_id") for name in ("bos", "eos", "pad")}
        sizes = {"max_position_embeddings": words.model_max_length, "vocab_size": len(words), "initializer_range": 1.0}
        options = {"steps_offset": 1, "clip_sample": False, "set_alpha_to_one": False, "beta_schedule": "scaled_linear"}
        options |= {"prediction_type": prediction_type, **scheduler}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            unet = UNet2DConditionModel(
                sample_size=[4, 12], in_channels=5, out_channels=5, block_out_channels=(8, 12), layers_per_block=1,
                cross_attention_dim=12, attention_head_dim=2, norm_num_groups=4, dropout=0.1,
                down_block_types=("CrossAttnDownBlock2D",) * 2, up_block_types=("CrossAttnUpBlock2D",) * 2,
            )  # fmt: skip
            vae = AutoencoderKL(
                sample_size=24, latent_channels=5, block_out_channels=(4, 8), layers_per_block=1, norm_num_groups=4,
                down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
                mid_block_add_attention=False, scaling_factor=0.7,
            )  # fmt: skip
            text_encoder = CLIPTextModel(CLIPTextConfig(**SIZES, **sizes, **ids))
        for name, weight in unet.named_parameters():
            if "attn2" in name:
                weight.data *= 4
            if "conv_out" in name:
                weight.data *= 2
        pipeline = StableDiffusionPipeline(
            vae=vae, unet=unet, text_encoder=text_encoder, tokenizer=words, scheduler=DDIMScheduler(**options),
            safety_checker=None, feature_extractor=None, requires_safety_checker=False,
        )  # fmt: skip
        pipeline.scheduler = DDIMScheduler(**options)  # diffusers has put in steps_offset 1 and no clipping
        pipeline.set_progress_bar_config(disable=True)
        for part in (unet, vae, text_encoder):
            torch.nn.Module.to(part.eval(), dtype)
        return pipeline

    return build


@pytest.fixture(scope="session")
def tiny_dirs(tmp_path_factory, build_model):
    """{family: directory of a tiny model with its tokenizer}. GPT-2 has dropout 0.1 in its configuration."""
    folder = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        build_model(family).save_pretrained(folder / family)
        randomwalks.tokenizer().save_pretrained(folder / family)
    return {family: str(folder / family) for family in FAMILIES}


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture
def gpt2_dir(tiny_dirs):
    return tiny_dirs["gpt2"]


@pytest.fixture
def accelerator():
    return Accelerator()


# ---- The table of faults and bad inputs ------------------------------------------------------------------------------

collected, outcomes = {}, {}  # {test: [(number, scripts)]}, {test: whether it passed}, before any is deselected


def pytest_addoption(parser):
    parser.addoption("--table", metavar="FILE", help="write what became of the cases of tests/cases.py")
    parser.addoption("--script", metavar="FILE", help="check this script, a copy of one of algos/: test_script.py")
    parser.addoption("--with", metavar="FLAGS", default="", help="flags that every run of --script gets")


def pytest_configure(config):
    if config.getoption("--script"):
        config.args = [str(Path(__file__).with_name("test_script.py"))]
        config.option.dist = "load"
        config.option.reportchars = "sf"  # the reasons of what was not asked, and of failures
        config.option.tbstyle = "line"


# Files that take longest, in this order: workers take a file each, and none should be left with a long one at the end.
FIRST = """test_inputs test_faults test_layout test_architectures test_runs test_reports test_golden test_hub
test_seq2seq test_fsdp test_adapters test_ddpo_runs""".split()


def pytest_collection_modifyitems(items):
    places = {name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(FIRST)))  # stable


def pytest_itemcollected(item):
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    named = parameters.get("algo") or parameters.get("script") or ""
    named = getattr(named, "__name__", str(named)).rpartition(".")[2]
    for mark in item.iter_markers("case"):
        case = mark.args[0], mark.args[1] if mark.args[1:] else named
        collected.setdefault(item.nodeid, []).append(case)
        item.user_properties.append(("case", case))  # travels with the report to the process that writes the table


def pytest_runtest_logreport(report):
    if cases := [case for name, case in report.user_properties if name == "case"]:
        collected[report.nodeid] = cases
        outcomes[report.nodeid] = outcomes.get(report.nodeid, True) and report.passed


def case_table(tests):
    """{number: (scripts, number of tests)} of what `collected` holds."""
    order = ["ppo", "grpo", "ilql", "sft", "reward", "dpo", "ddpo"]
    found = {
        number: [names.split() for cases in tests.values() for n, names in cases if n == number] for number in CASES
    }
    return {n: (sorted({x for names in all for x in names}, key=order.index), len(all)) for n, all in found.items()}


@pytest.fixture
def cases(request):
    """table: case_table of the tests that were found; whole: whether all files were looked at."""
    return SimpleNamespace(table=case_table(collected), whole=request.config.args == request.config.getini("testpaths"))


def pytest_sessionfinish(session):
    """The table of this run and, where a test did not run in it, of those before that are in pytest's cache: so `--lf`
    brings it up to date after a repair."""
    path = session.config.getoption("--table")
    if not path or hasattr(session.config, "workerinput"):
        return
    known = session.config.cache.get("plainrl/cases", {})
    known |= {test: [passed, collected[test]] for test, passed in outcomes.items()}
    session.config.cache.set("plainrl/cases", known)
    passed = case_table({test: cases for test, (good, cases) in known.items() if good})
    rows = [["number", "fault or input", "expected", "scripts", "tests", "result"]]
    for number, (scripts, tests) in case_table({test: cases for test, (_, cases) in known.items()}).items():
        result = "passed" if tests and passed[number][1] == tests else f"{passed[number][1]} of {tests} passed"
        rows.append([number, *CASES[number], " ".join(scripts) or "common", tests, result])
    with open(path, "w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)
