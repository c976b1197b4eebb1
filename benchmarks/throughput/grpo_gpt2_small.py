"""Throughput of algos/grpo.py on a GPT-2-small shape on a CPU, beside TRL 1.16.0 (peer_trl_1_16_grpo.py).

Work of an iteration: 8 prompts of 16 to 64 tokens, 4 responses to each of 16 to 96, and one optimizer step, or two.
The responses are given: both systems decode token by token, and their own draw has one id that it can take. So
sampling costs what it costs, and everything behind it sees the same tokens. The reward asserts that.

    bash benchmarks/throughput/make_peer_env_trl_1_16.sh    # once: a virtual environment with TRL 1.16.0
    bash benchmarks/throughput/run_grpo.sh                  # on a quiet machine
"""

import functools
import time
from contextlib import ExitStack
from statistics import mean, median
from unittest.mock import patch

import numpy as np
import ppo_gpt2_small
import torch
from measurement import main, short_run
from ppo_gpt2_small import END, ITERATIONS, LR, SHAPE, VOCABULARY, forward_flops
from tables import agreement, distinct, first_of, grouped, mode_table, provenance

from common import sampling, seeding  # found by way of measurement

# ---- Workload: the peer imports it from here -------------------------------------------------------------------------

PROMPTS = 8
GROUP = 4
EPISODES = PROMPTS * GROUP
PROMPT_RANGE = (16, 64)
RESPONSE_RANGE = (16, 96)
MICRO = 8  # rows of a forward: the default of both
SEED = 1
CERTAIN = 1e9  # as a logit, beside which no other has a probability

WORKS = {  # what an iteration is: settings of algos/grpo.py, and text
    "plain": ({"kl_coef": 0.0}, "no reference, one optimizer step"),
    "kl": ({"kl_coef": 0.04}, "KL coefficient 0.04, so a reference scores the responses; one optimizer step"),
    "epochs": (
        {"kl_coef": 0.0, "ppo_epochs": 2},
        "no reference, two optimizer steps on the same episodes, so the policy scores them before the first",
    ),
    "equal": ({"kl_coef": 0.0}, "plain, where the scores are equal in every second group"),
}
_EAGER = {"model_init_kwargs": {"attn_implementation": "eager"}}
SETTINGS = {  # of TRL's GRPOTrainer: (flags, our matmul precision), and what they are
    "defaults": ({}, False, "its default settings, without gradient checkpointing"),
    "same-flags": (_EAGER, True, "defaults with eager attention and matmul precision medium"),
    "same-flags-kept-memory": (_EAGER, True, "same-flags, and the C library keeps freed memory"),
    "micro-32": (
        _EAGER | {"per_device_train_batch_size": EPISODES, "gradient_accumulation_steps": 1},
        True,
        "same-flags with 32 rows a forward",
    ),
}


def our_modes():
    """{mode: (flags, text)} of algos/grpo.py."""
    modes = {}
    for work, (settings, _) in WORKS.items():
        modes[f"fp32-{work}"] = (settings, "matmul precision medium, eager attention, 8 rows a forward")
        modes[f"bf16-{work}"] = (
            settings | {"mixed_precision": "bf16"},
            "`--mixed-precision bf16`: weights and optimizer fp32",
        )
    return modes


def peer_modes():
    """{mode: (flags, our matmul precision, text)} of TRL's GRPOTrainer; all its settings for the plain work alone."""
    modes = {}
    for precision in ("fp32", "bf16"):
        for work, (settings, _) in WORKS.items():
            own = {"beta": settings["kl_coef"], "num_iterations": settings.get("ppo_epochs", 1)}
            for setting, (flags, medium, text) in SETTINGS.items():
                if work != "plain" and setting != "same-flags-kept-memory":
                    continue
                modes[f"{precision}-{work}-{setting}"] = (own | flags, medium, text)
    return modes


MODES = our_modes()
PEER_MODES = peer_modes()
COMPARISONS = [  # in the first table: name, our mode, modes of the peer, goal
    ("grpo", "fp32-plain", [f"fp32-plain-{setting}" for setting in SETTINGS], 2.0),
    ("grpo", "bf16-plain", [f"bf16-plain-{setting}" for setting in SETTINGS], None),
]


def family(mode):
    """Precision and work of a mode, as text."""
    return "-".join(mode.split("-")[:2])


def work_of(mode):
    """The entry of WORKS that a mode is about."""
    return mode.split("-")[1]


def steps_of(mode):
    """Optimizer steps of an iteration."""
    settings, _ = WORKS[work_of(mode)]
    return settings.get("ppo_epochs", 1)


def prepare(folder):
    """Writes the model of ppo_gpt2_small.py, where the end token is as likely as others, and its tokenizer."""
    from transformers import GPT2LMHeadModel

    ppo_gpt2_small.prepare(folder)
    model = GPT2LMHeadModel.from_pretrained(folder)
    torch.manual_seed(SEED)
    with torch.no_grad():
        model.transformer.ln_f.bias[0] = 0
        model.transformer.wte.weight[END].normal_(0, model.config.initializer_range)
    model.save_pretrained(folder)


def lengths(name, count, center, spread, low, high):
    """Quantiles of a log-normal distribution cut to [low, high], in random order."""
    draws = seeding.rng(SEED, name).lognormal(center, spread, 100000)
    draws = draws[(draws >= low) & (draws <= high)]
    quantiles = (seeding.rng(SEED, f"order of {name}").permutation(count) + 0.5) / count
    return np.quantile(draws, quantiles).round().astype(int).tolist()


@functools.cache
def prompts():
    """Ids of each prompt; every iteration has them all."""
    ids = []
    for row, length in enumerate(lengths("prompts", PROMPTS, 3.4, 0.5, *PROMPT_RANGE)):
        ids.append(seeding.rng(SEED, "ids of a prompt", row).integers(END + 1, VOCABULARY, length).tolist())
    return ids


@functools.cache
def responses():
    """Ids of the GROUP responses to each prompt, with the end token."""
    ids = []
    for row, length in enumerate(lengths("responses", EPISODES, 3.7, 0.6, *RESPONSE_RANGE)):
        words = seeding.rng(SEED, "ids of a response", row).integers(END + 1, VOCABULARY, length - 1)
        ids.append([*words.tolist(), END])
    return [ids[begin : begin + GROUP] for begin in range(0, EPISODES, GROUP)]


def is_equal(mode, place):
    """Whether all responses to the prompt at this place have the same score."""
    return work_of(mode) == "equal" and place % 2 == 1


def rows(mode):
    """The prompts as texts of whole words, with what the reward asks for."""
    found = []
    for place, ids in enumerate(prompts()):
        text = " ".join(f"w{i}" for i in ids)
        found.append({"prompt": text, "place": place, "equal": is_equal(mode, place)})
    return found


def reward(output_ids, place, equal, **_):
    """The mean id over the size of the vocabulary, or 0.5 in a group of equal scores. place, equal: columns of `rows`,
    for each response. The responses of a group come in order."""
    scores = []
    for row, ids in enumerate(output_ids):
        assert place[row] == place[row - row % GROUP]
        assert list(ids) == responses()[place[row]][row % GROUP]
        score = mean(ids) / VOCABULARY
        if equal[row]:
            score = 0.5
        scores.append(score)
    return scores


def episode_lengths(mode, trained=False):
    """[(prompt tokens, response tokens)] of the episodes; trained: of those alone whose groups have several scores."""
    lengths = []
    for place, prompt in enumerate(prompts()):
        if trained and is_equal(mode, place):
            continue
        for response in responses()[place]:
            lengths.append((len(prompt), len(response)))
    return lengths


def forward_of(episodes):
    """Floating-point operations of a forward pass of whole groups: a prompt once for its group, no padding, the output
    layer where a response token is predicted, no forward of a text's last token."""
    flops = 0
    for row, (prompt, response) in enumerate(episodes):
        flops += forward_flops(prompt + response - 1, response)
        if row % GROUP:
            flops -= forward_flops(prompt, 0)
    return flops


def useful_flops(mode):
    """Floating-point operations of an iteration that cannot be left out: sampling, the reference, and forward and
    backward pass of what has an advantage."""
    settings, _ = WORKS[work_of(mode)]
    scored = 1
    if settings["kl_coef"]:
        scored += 1
    training = 3 * steps_of(mode) * forward_of(episode_lengths(mode, trained=True))
    return scored * forward_of(episode_lengths(mode)) + training


def padding():
    """Shares of the positions that are padding: with all rows padded to the longest prompt and the longest response,
    and in forwards of MICRO rows by length."""
    episodes = episode_lengths("fp32-plain")
    tokens = sum(map(sum, episodes))
    by_length = sorted(episodes, key=sum)

    def share(width):
        positions = 0
        for begin in range(0, EPISODES, width):
            part = by_length[begin : begin + width]
            positions += len(part) * sum(map(max, zip(*part, strict=True)))
        return 1 - tokens / positions

    return share(EPISODES), share(MICRO)


# ---- Measurement -----------------------------------------------------------------------------------------------------


def figures(mode, sampling_seconds, scoring_seconds, update_seconds, losses, grad_norms, logprob):
    """Columns of the CSV file and useful GFLOP/s.

    From the seconds and losses of all iterations, the gradient norms of all optimizer steps, and the mean
    log-probability of the tokens that have an advantage, at the first step.
    """
    totals = []
    print("  seconds of all iterations, the first not counted: sampling + scoring + update")
    for parts in zip(sampling_seconds, scoring_seconds, update_seconds, strict=True):
        print("  ", " + ".join(f"{seconds:.2f}" for seconds in parts))
        totals.append(sum(parts))
    print(f"  losses {losses}, gradient norms {grad_norms}, log-probability {logprob:.5f}", flush=True)
    assert len(losses) == len(totals) == ITERATIONS
    assert len(grad_norms) == ITERATIONS * steps_of(mode)
    seconds = median(totals[1:])
    episodes = episode_lengths(mode)
    tokens = sum(map(sum, episodes))
    together, by_length = padding()
    columns = {
        "seconds_sampling": f"{median(sampling_seconds[1:]):.4f}",
        "seconds_scoring": f"{median(scoring_seconds[1:]):.4f}",
        "seconds_update": f"{median(update_seconds[1:]):.4f}",
        "seconds": f"{seconds:.4f}",
        "seconds_first": f"{totals[0]:.4f}",
        "counted": len(totals) - 1,
        "tokens_per_sec": f"{tokens / seconds:.1f}",
        "work_gflop": f"{useful_flops(mode) / 1e9:.1f}",
        "prompt_tokens": f"{mean(prompt for prompt, _ in episodes):.1f}",
        "response_tokens": f"{mean(response for _, response in episodes):.1f}",
        "padding_together": f"{together:.4f}",
        "padding_by_length": f"{by_length:.4f}",
        "losses": " ".join(f"{loss:.6f}" for loss in losses),
        "grad_norms": " ".join(f"{norm:.6f}" for norm in grad_norms),
        "logprob": f"{logprob:.6f}",
        "shape": "x".join(map(str, SHAPE)),
    }
    return columns, useful_flops(mode) / seconds / 1e9


def given_ids(seed, stream, iteration, places, width):
    """(len(places), width) float64: the ids of the responses, where a sampler asks for its uniforms."""
    assert stream == "rollout"
    drawn = seeding.stream_rows(seed, "data", PROMPTS, (iteration - 1) * PROMPTS, PROMPTS)
    table = torch.full((len(places), width), float(END), dtype=torch.float64)
    for row, place in enumerate(places):
        ids = responses()[drawn[place // GROUP]][place % GROUP]
        table[row, : len(ids)] = torch.tensor(ids, dtype=torch.float64)
    return table


def draw_given(logits, ids, temperature, **filters):
    """What `draw` takes of logits (B, V) that leave nothing but ids (B,), which come in place of the uniforms."""
    logits[torch.arange(len(ids)), ids.long()] = CERTAIN
    drawn = seeding.draw(logits, torch.full_like(ids, 0.5), temperature, **filters)
    assert torch.equal(drawn, ids.long())
    return drawn


def measure_ours(mode, model):
    """What record() stores of a short run of algos/grpo.py."""
    from accelerate import Accelerator

    from algos import grpo

    flags, _ = MODES[mode]
    scoring = []
    grad_norms = []
    plain_score = grpo.all_logprobs
    plain_clip = Accelerator.clip_grad_norm_

    def timed_score(*args):
        begun = time.perf_counter()
        logprobs = plain_score(*args)
        scoring.append(time.perf_counter() - begun)
        return logprobs

    def noted_clip(self, *args):
        norm = plain_clip(self, *args)
        grad_norms.append(norm.item())
        return norm

    with ExitStack() as stack:
        stack.enter_context(patch.object(sampling, "uniforms", given_ids))
        stack.enter_context(patch.object(sampling, "draw", draw_given))
        stack.enter_context(patch.object(grpo, "all_logprobs", timed_score))
        stack.enter_context(patch.object(Accelerator, "clip_grad_norm_", noted_clip))
        settings = {
            "total_episodes": EPISODES * ITERATIONS,
            "rollout_batch_size": EPISODES,
            "batch_size": EPISODES,
            "group_size": GROUP,
            "micro_batch_size": MICRO,
            "loss_mean": "token",
            "max_new_tokens": RESPONSE_RANGE[1],
            "lr": LR,
            "seed": SEED,
            "attn_implementation": "eager",
        }
        perf, metrics = short_run(grpo, mode, model=str(model), dataset=rows(mode), reward=reward, **settings | flags)
    calls = len(scoring) // ITERATIONS  # of an iteration: policy and reference, one of them, or none
    assert calls == (flags["kl_coef"] > 0) + (steps_of(mode) > 1)
    scoring_seconds = [sum(scoring[i * calls : (i + 1) * calls]) for i in range(ITERATIONS)]
    rollout_seconds = [line["perf/seconds_rollout"] for line in perf]
    sampling_seconds = [both - own for both, own in zip(rollout_seconds, scoring_seconds, strict=True)]
    update_seconds = [line["perf/seconds_update"] for line in perf]
    losses = [line["loss/total"] for line in metrics]
    logprob = -metrics[0]["policy/nll"]
    return figures(mode, sampling_seconds, scoring_seconds, update_seconds, losses, grad_norms, logprob)


# ---- Page ------------------------------------------------------------------------------------------------------------

SECTION = """## grpo

An iteration is {PROMPTS} prompts of {PROMPT_LOW} to {PROMPT_HIGH} tokens (mean {prompt_tokens}), {GROUP} responses to
each of {RESPONSE_LOW} to {RESPONSE_HIGH} (mean {response_tokens}, the end token included), log-normal, and one
optimizer step on all {EPISODES} episodes, or two. AdamW on all weights; model {shape}. All rows padded to the longest
prompt and the longest response, as TRL has them, {padding_together} % of the positions are padding; in forwards of
{MICRO} rows by length, as plainrl has them, {padding_by_length} %.

{works}

{table}

{notes}

- `sampling s`: decoding, texts, reward and advantages. `scoring s`: log-probabilities of the responses before the
  update, of the reference (kl) or of the policy that sampled (epochs). `update s`: the rest of an iteration. Each is a
  median of its own.
- `tokens/s`: prompt and response tokens of the episodes over the seconds of the iteration.
- Useful work: sampling, reference, forward and backward of rows that have an advantage; a prompt once for its group, no
  padding, the output layer where a response token is predicted.
- The responses are given: both systems decode token by token with all of their own work, but the logit of the given id
  is set to {CERTAIN:g} before the draw, so that a draw takes it; the reward asserts that all ids are those. Both take
  {MICRO} rows a forward, the default of both, the loss of DAPO (mean over all tokens), and advantages over the standard
  deviation.
- Scores differ within every group, but for `equal`. There, {trained_tokens} % of the tokens are of groups that have a
  gradient: plainrl leaves the other rows out of the update, TRL computes them.
- Rows of plainrl that have ended leave the batch while it decodes; in the `generate` that TRL calls they stay.
- TRL's update also computes the entropy of every distribution, which it logs. Its KL is here that of Shao et al., as in
  plainrl (`use_bias_correction_kl=False`). bf16 and gradient checkpointing are on by default.
- TRL gives the model no positions where it scores, so that GPT-2 would count the padding to the left of a prompt, as
  `generate` does not. Here a hook adds them: without it, the gradients of the two systems differ.
- Not measured: longer responses, vLLM.

Did the runs do the same work? Largest relative differences in the first step (fp32: at most {TOLERANCE};
log-probability: the mean of the tokens):

{same_work}

{provenance}
"""
TOLERANCE = 1e-3


def section(rows):
    """The text of the section, from the rows of results_grpo.csv."""
    all_texts = {mode: text for mode, (*_, text) in (MODES | PEER_MODES).items()}
    texts = {}
    for kind in MODES:
        texts |= {mode: text for mode, text in all_texts.items() if family(mode) == kind}
    shown = {
        "seconds_sampling": ("sampling s", 2),
        "seconds_scoring": ("scoring s", 2),
        "seconds_update": ("update s", 2),
        "seconds": ("iteration s", 2),
        "tokens_per_sec": ("tokens/s", 0),
        "peak_memory_mb": ("peak memory MB", 0),
        "fraction": ("fraction of GEMM peak", 3),
    }
    against = {f"times TRL {name}": lambda mode, name=name: f"{family(mode)}-{name}" for name in SETTINGS}
    table, notes = mode_table(rows, texts, shown, against | {"times plainrl": family})
    figures = {"loss": first_of("losses"), "gradient norm": first_of("grad_norms")}
    figures["log-probability"] = first_of("logprob")
    trained = sum(map(sum, episode_lengths("fp32-equal", trained=True)))
    everything = sum(map(sum, episode_lengths("fp32-equal")))
    return SECTION.format(
        table=table,
        notes=notes,
        provenance=provenance(rows),
        same_work=agreement(grouped(rows, lambda row: family(row["mode"])), figures, TOLERANCE),
        works="\n".join(f"- {work}: {text}" for work, (_, text) in WORKS.items()),
        trained_tokens=f"{100 * trained / everything:.0f}",
        **{name: distinct(rows, name) for name in ("prompt_tokens", "response_tokens", "shape")},
        **{name: f"{100 * float(rows[0][name]):.0f}" for name in ("padding_together", "padding_by_length")},
        PROMPTS=PROMPTS,
        GROUP=GROUP,
        EPISODES=EPISODES,
        MICRO=MICRO,
        PROMPT_LOW=PROMPT_RANGE[0],
        PROMPT_HIGH=PROMPT_RANGE[1],
        RESPONSE_LOW=RESPONSE_RANGE[0],
        RESPONSE_HIGH=RESPONSE_RANGE[1],
        CERTAIN=CERTAIN,
        TOLERANCE=TOLERANCE,
    )


if __name__ == "__main__":
    main(__doc__, dict.fromkeys(MODES, "plainrl"), measure_ours, prepare)
