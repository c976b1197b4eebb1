"""Throughput of algos/ppo.py on a GPT-2-small shape on a CPU, beside TRL 0.8.6 (peer_trl_0_8_6.py) and TRL 1.12.0, the
last release with PPO (peer_trl_1_12_ppo.py).

Work of an iteration: 16 prompts of 32 tokens, responses of 32 tokens, 4 PPO epochs of one optimizer step (batch 16).
The weights are random: 12 layers, width 768, vocabulary 50257, no dropout. The end token's logit is near -100, so that
every response has its 32 tokens.

    bash benchmarks/throughput/make_peer_env.sh             # once: virtual environments with TRL 0.8.6
    bash benchmarks/throughput/make_peer_env_trl_1_12.sh    # and 1.12.0
    bash benchmarks/throughput/run_ppo.sh                   # on a quiet machine

The other benchmarks take the model from here. PLAINRL_BENCH_TINY=1 shrinks it to 2 layers, width 48 and vocabulary
1000, to try the scripts out.
"""

import os
from statistics import median

import numpy as np
import torch
from measurement import TINY, main, short_run
from tables import distinct, mode_table, precision, provenance, spread

# ---- Workload: the peers import it from here -------------------------------------------------------------------------

LAYERS, WIDTH, HEADS, VOCABULARY = (2, 48, 4, 1000) if TINY else (12, 768, 12, 50257)
SHAPE = (LAYERS, WIDTH, VOCABULARY)
EPISODES, PROMPT, RESPONSE, EPOCHS = 16, 32, 32, 4
LR = 1e-5
ITERATIONS = int(os.environ.get("ITERATIONS", 2))  # of a process; the first is printed and not counted
END = 0  # id of the end token

MODES = {  # of algos/ppo.py: flags, and what they show
    "fp32": ({}, "matmul precision medium, eager attention, one-batch rollouts"),
    "fp32-highest": ({"attn_implementation": "eager"}, "fp32 without matmul precision medium"),
    "fp32-sdpa": ({"attn_implementation": "sdpa"}, "fp32 without eager attention"),
    "fp32-decode-4": ({"decode_batch_size": 4}, "fp32 without one-batch rollouts: 4 rows at a time"),
    "bf16": ({"mixed_precision": "bf16"}, "`--mixed-precision bf16`: weights and optimizer fp32"),
    "fp32-2-layers": ({"num_layers_unfrozen": 2}, "`--num-layers-unfrozen 2`"),
    "bf16-2-layers": ({"mixed_precision": "bf16", "num_layers_unfrozen": 2}, "both"),
}
OLDER_MODES = {  # of stored rows alone: what they switch off is gone
    "fp32-2-layers-no-cache": (
        {},
        "the same with `--no-cache-trunk`: the frozen blocks run in every pass",
    ),
    "fp32-malloc": ({}, "fp32 without keeping freed memory (glibc's default thresholds)"),
}
PEER_MODES = {  # of PPOTrainer of TRL 0.8.6: (rows of a generate call, our matmul precision); 2-layers trains as many
    "defaults": ((4, False), "TRL 0.8.6 with its default `generate(batch_size=4)`"),
    "tuned": ((16, False), "TRL 0.8.6 with `generate(batch_size=16)`"),
    "same-flags": ((16, True), "tuned, with matmul precision medium (its attention is eager)"),
    "same-flags-kept-memory": ((16, True), "same-flags, and the C library keeps freed memory"),
    "bf16-same-flags": ((16, True), "same-flags, all of it in `torch.autocast` to bf16"),
    "2-layers-tuned": ((16, False), "tuned, with `num_shared_layers=10`: two blocks are trained"),
    "2-layers-same-flags-kept-memory": ((16, True), "same-flags-kept-memory, with `num_shared_layers=10`"),
}
NEW_PEER_MODES = {  # of PPOTrainer of TRL 1.12.0: (attention, our matmul precision)
    "1.12-fp32-defaults": (("sdpa", False), "TRL 1.12.0 with its default settings, without gradient checkpointing"),
    "1.12-fp32-same-flags": (("eager", True), "the same with eager attention and matmul precision medium"),
    "1.12-bf16-same-flags": (("eager", True), "1.12-fp32-same-flags, all of it in `torch.autocast` to bf16"),
}
TWO_LAYER_PEERS = [mode for mode in PEER_MODES if "2-layers" in mode]
BF16_PEERS = [mode for mode in PEER_MODES | NEW_PEER_MODES if "bf16" in mode]
FP32_PEERS = [mode for mode in PEER_MODES | NEW_PEER_MODES if mode not in TWO_LAYER_PEERS + BF16_PEERS]
COMPARISONS = [  # in the first table: name, our mode, modes of the peer, goal
    ("ppo", "fp32", FP32_PEERS, 3.5),
    ("ppo", "bf16", BF16_PEERS, None),
    ("ppo, 2 of 12 layers", "fp32-2-layers", TWO_LAYER_PEERS, 8),
]


def prompt_ids():
    """One prompt per episode of an iteration: 32 ids each, the same in all iterations."""
    return np.random.default_rng(1).integers(END + 1, VOCABULARY, (EPISODES, PROMPT)).tolist()


def reward(output_ids, **_):
    """A trivial reward: the share of even ids."""
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in output_ids]


def prepare(folder):
    """Writes the random model and its tokenizer of whole words "w1 w2 ..." that both systems load."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    torch.manual_seed(1)
    sizes = {"n_layer": LAYERS, "n_embd": WIDTH, "n_head": HEADS, "vocab_size": VOCABULARY}
    drop = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **drop, bos_token_id=END, eos_token_id=END))
    with torch.no_grad():  # the last hidden state has a coordinate near 10; the end token answers to it with -10
        model.transformer.ln_f.bias[0] = 10
        model.transformer.wte.weight[END] = 0
        model.transformer.wte.weight[END, 0] = -10
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"<end>": END} | {f"w{i}": i for i in range(1, VOCABULARY)}, unk_token="<end>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>").save_pretrained(folder)


def forward_flops(tokens, scored, shape=SHAPE):
    """Floating-point operations of a forward pass of a row without padding, the output layer at `scored` positions."""
    layers, width, vocabulary = shape
    blocks = 12 * layers * width**2  # weights in matrix products
    attention = 2 * layers * width * tokens**2  # the causal half
    return 2 * blocks * tokens + 2 * width * vocabulary * scored + attention


def useful_flops():
    """Floating-point operations of an iteration that cannot be left out: sampling, reference and training, the output
    layer at response positions only, no padding, nothing computed twice."""
    forward = forward_flops(PROMPT + RESPONSE, RESPONSE)
    return EPISODES * (forward + forward + EPOCHS * 3 * forward)


# ---- Measurement -----------------------------------------------------------------------------------------------------


def measure_ours(mode, model):
    """What record() stores of a short run of algos/ppo.py."""
    from algos import ppo

    prompts = [{"prompt": " ".join(f"w{i}" for i in ids)} for ids in prompt_ids()]
    perf, metrics = short_run(
        ppo, mode, model=str(model), dataset=prompts, reward=reward, total_episodes=EPISODES * ITERATIONS,
        rollout_batch_size=EPISODES, batch_size=EPISODES, micro_batch_size=EPISODES, ppo_epochs=EPOCHS,
        max_new_tokens=RESPONSE, lr=LR, **{"attn_implementation": "eager"} | MODES[mode][0],
    )  # fmt: skip
    assert all((m["tokens/queries_len"], m["tokens/responses_len"]) == (PROMPT, RESPONSE) for m in metrics)
    seconds = ([p[f"perf/seconds_{phase}"] for p in perf] for phase in ("rollout", "update"))
    return figures(*seconds, metrics[0]["objective/entropy"] / RESPONSE)


def figures(rollout, update, entropy):
    """Columns of the CSV file and useful GFLOP/s, from the seconds of all iterations and the nats a sampled token of
    the first one."""
    totals = [a + b for a, b in zip(rollout, update, strict=True)]
    print(f"  entropy {entropy:.3f}; seconds of all iterations, the first not counted:")
    print("  rollout", *(f"{s:.2f}" for s in rollout), "| update", *(f"{s:.2f}" for s in update), flush=True)
    seconds = median(totals[1:])
    columns = {
        "seconds_rollout": f"{median(rollout[1:]):.3f}", "seconds_update": f"{median(update[1:]):.3f}",
        "seconds": f"{seconds:.3f}", "seconds_first": f"{totals[0]:.3f}", "counted": len(totals) - 1,
        "tokens_per_sec": f"{EPISODES * (PROMPT + RESPONSE) / seconds:.1f}",
        "work_gflop": f"{useful_flops() / 1e9:.1f}", "entropy": f"{entropy:.4f}", "shape": "x".join(map(str, SHAPE)),
    }  # fmt: skip
    return columns, useful_flops() / seconds / 1e9


# ---- Page ------------------------------------------------------------------------------------------------------------

SECTION = """## ppo

An iteration is {EPISODES} prompts of {PROMPT} tokens, {EPISODES} responses of {RESPONSE}, and {EPOCHS} PPO epochs of
one optimizer step (batch {EPISODES}); model {shape} (layers, width, vocabulary). The first iteration of a run is not
counted, {counted} is.

{table}

{notes}

- The systems cut an iteration differently: compare `iteration s`. `rollout s` of plainrl and of TRL 1.12 has sampling,
  scoring by policy, reference and value model, reward and advantages. That of TRL 0.8.6 has sampling and reward; the
  rest is in `PPOTrainer.step`, its `update s`.
- `tokens/s`: prompt and response tokens over the seconds of the iteration.
- Useful work: {work} GFLOP an iteration, which is sampling, reference and training, with the output layer at response
  positions only. It is that of full training in the rows of two layers, too.
- The end token's logit is near -100, so every response has its full length (asserted). TRL takes one optimizer step an
  epoch, too. Entropy of the first rollout: {entropies} nats a token.
- TRL 1.12 trains a value model of its own, a second GPT-2 of the same size, where plainrl and TRL 0.8.6 have a head on
  the policy: its algorithm runs twice as many blocks. It gets the reward without a reward model, in its favour. Its
  `bf16=True` has no effect, since its Accelerator is not told.
- plainrl clips gradients, TRL does not by default.
- Not measured: padding, a reward model.

{provenance}
"""


def section(rows):
    """The text of the section, from the rows of results_ppo.csv."""
    texts = {mode: text for mode, (_, text) in (MODES | OLDER_MODES | PEER_MODES | NEW_PEER_MODES).items()}
    shown = {"seconds_rollout": ("rollout s", 2), "seconds_update": ("update s", 2), "seconds": ("iteration s", 2)}
    shown |= {"tokens_per_sec": ("tokens/s", 0), "peak_memory_mb": ("peak memory MB", 0)}
    shown |= {"fraction": ("fraction of GEMM peak", 3)}
    against = {
        "times TRL defaults": lambda mode: "defaults",
        "times TRL tuned": lambda mode: "tuned",
        "times TRL same-flags": lambda mode: "bf16-same-flags" if "bf16" in mode else "same-flags",
        "times TRL 1.12 same-flags": lambda mode: f"1.12-{precision(mode)}-same-flags",
        "times plainrl": precision,
    }
    table, notes = mode_table(rows, texts, shown, against)
    return SECTION.format(
        table=table, notes=notes, work=rows[0]["work_gflop"], shape=rows[0]["shape"], provenance=provenance(rows),
        counted=distinct(rows, "counted"),
        entropies=spread([float(row["entropy"]) for row in rows], 3),
        EPISODES=EPISODES, PROMPT=PROMPT, RESPONSE=RESPONSE, EPOCHS=EPOCHS,
    )  # fmt: skip


if __name__ == "__main__":
    main(__doc__, dict.fromkeys(MODES, "plainrl"), measure_ours, prepare)
