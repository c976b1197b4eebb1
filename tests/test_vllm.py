"""The guide's rollouts by vLLM, on a CPU, in an environment that is made by tests/make_vllm_env.sh:

    python -m pytest -m vllm -n 0 tests/test_vllm.py

The engine has to have the weights of each iteration. Where nobody hands them over, that must show.
"""

import os
import socket
import subprocess
import sys
import time
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

import pytest
from harness import ROOT, lines, torchrun
from helpers import write
from test_recipes import FILES, TEXT

pytestmark = pytest.mark.vllm

# The guide's function, which may hand over the weights of the start alone, and how far its log-probabilities are off.
CHECK = """
import torch
import my_{kind} as recipe

hand_over = recipe.hand_over


def episode(prompt_ids, model, seeds, temperature, max_new_tokens, stop_strings, iteration, handed=True, dtype=None):
    recipe.hand_over = hand_over if handed or iteration == 1 else lambda *_: None
    given = [prompt_ids, model, seeds, temperature, max_new_tokens, stop_strings]
    turns, columns = recipe.episode(*given, *([dtype] if dtype else []))
    gaps = []
    for ids, [(new, _)], logprobs in zip(prompt_ids, turns, columns["sampler_logprobs"]):
        logits = model(torch.tensor([ids + new])).logits[0, len(ids) - 1 : -1].div(temperature)
        gaps.append(float((logits.log_softmax(-1)[range(len(new)), new] - torch.tensor(logprobs)).abs().max()))
    return turns, columns | {{"gap": gaps}}


def reward(outputs, gap, **columns):
    return {{"score": [float(len(output)) for output in outputs], "gap": gap}}
"""
FLAGS = "--max-new-tokens 8 --total-episodes 48 --rollout-batch-size 16 --batch-size 16 --lr 1e-2 --eval-every 0"


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder with a tiny Llama, whose heads are as wide as the engine's attention on a CPU wants, and rows."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("work")
    words = {letter: number for number, letter in enumerate("<>_0123456789+= abcdefghijklmnopqrst")}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="_"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    special = {"bos_token": "<", "eos_token": ">", "pad_token": "_", "unk_token": "_"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder / "my_model")
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}
    ends = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    config = LlamaConfig(vocab_size=len(words), intermediate_size=96, tie_word_embeddings=True, **sizes, **ends)
    LlamaForCausalLM(config).save_pretrained(folder / "my_model")
    write(folder / "rows.jsonl", [{"prompt": f"{number % 4}+{number // 4}="} for number in range(16)])
    for kind in ("vllm", "server"):
        (folder / f"my_{kind}.py").write_text(FILES[f"my_{kind}.py"])
        (folder / f"check_{kind}.py").write_text(CHECK.format(kind=kind))
    return folder


def run(work, kind, name, algo="grpo", options="", flags=(), launcher=(sys.executable,), **environment):
    """The records of a run: 3 iterations, in float32."""
    rollout = f"check_{kind}.py:episode{options}"
    words = f"--model my_model --dataset rows.jsonl --rollout {rollout} --reward check_{kind}.py:reward {FLAGS}"
    argv = [*launcher, ROOT / f"algos/{algo}.py", *words.split(), "--threads", "1", "--run-dir", name, *flags]
    known = {"PYTHONPATH": str(work), "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    known |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "ACCELERATE_USE_CPU": "true"}
    environment = os.environ | known | environment
    done = subprocess.run([*map(str, argv)], cwd=work, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    return lines(work / name / "metrics.jsonl")


def gaps_of(records, handed, is_grpo=True):
    """Fails if the engine has not the weights that it should have: those of each iteration, or of the start."""
    gaps = [record["reward/gap"] for record in records]
    assert len(gaps) == 3 and gaps[0] < 1e-4, gaps
    assert max(gaps) < 1e-4 if handed else min(gaps[1:]) > 1e-2, gaps
    if is_grpo:
        kls = [record["mismatch/kl"] for record in records]
        assert max(map(abs, kls)) < 1e-7 if handed else min(kls[1:]) > 1e-4, kls


@pytest.mark.parametrize("adapters", [(), ("--lora-r", "4")], ids=["all", "lora"])
@pytest.mark.parametrize("handed", ["true", "false"])
def test_the_engine_has_the_weights_of_each_iteration(work, handed, adapters):
    options = f":handed={handed},dtype=float32"
    records = run(work, "vllm", f"{handed}{len(adapters)}", options=options, flags=adapters)
    gaps_of(records, handed == "true")


def test_ppo_with_stop_strings(work):
    """Some responses end with a letter, at the limit too."""
    flags = ["--stop", *"abcdef"]
    records = run(work, "vllm", "ppo", "ppo", ":dtype=float32", flags)
    gaps_of(records, True, is_grpo=False)
    assert 0 < records[0]["tokens/truncated_rate"] < 1


@pytest.fixture(scope="module")
def server(work):
    """The guide's command on a free port, in float32."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    [command] = [block for block in TEXT.split("```") if "vllm.entrypoints" in block]
    command = command.replace("8117", port).replace("bfloat16", "float32").replace("python", sys.executable, 1)
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    with open(work / "server.log", "w") as log:
        process = subprocess.Popen(
            ["bash", "-c", command], cwd=work, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        for _ in range(300):
            assert process.poll() is None, (work / "server.log").read_text()[-3000:]
            try:
                build_opener(ProxyHandler({})).open(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            except (URLError, OSError):
                time.sleep(1)
        yield {"ENGINE": f"http://127.0.0.1:{port}", "WEIGHTS": str(work / "handed")}
    finally:
        os.killpg(process.pid, 15)
        process.wait(30)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_server_for_several_processes(work, server, processes):
    launcher = [sys.executable] if processes == 1 else torchrun(2)
    records = run(work, "server", f"served{processes}", flags=["--lora-r", "4"], launcher=launcher, **server)
    gaps_of(records, True)


def test_a_server_that_nobody_hands_weights(work, server):
    gaps_of(run(work, "server", "forgotten", options=":handed=false", **server), False)
