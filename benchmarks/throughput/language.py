"""The work of ppo, sft, reward, dpo and grpo, which both systems do, and our side of it.

The model has GPT-2 small's shape and random weights, no dropout, and a tokenizer of whole words "w1 w2 ...".
SIZES='{"layers": 2, "width": 48}' shrinks it, to try things out. README.md says what a step of each has.
"""

import functools
import importlib
import json
import os
import time
from statistics import mean
from unittest.mock import patch

import numpy as np
import torch
from measurement import GPU, ITERATIONS, column, figures, short_run

from algos.sft import draw_rows
from common.lm import sampling
from common.seeding import rng

# prompts: of grpo; batch: rows of a step of sft, reward and dpo; length: what all lengths except those of ppo are times
SIZES = {"layers": 12, "width": 768, "vocabulary": 50257, "prompts": 8, "batch": 8, "length": 1}
SIZES |= json.loads(os.environ.get("SIZES", "{}"))  # GPUs have others
LAYERS = SIZES["layers"]
WIDTH = SIZES["width"]
VOCABULARY = SIZES["vocabulary"]
LENGTH = SIZES["length"]
HEADS = max(4, WIDTH // 64)
END = 0  # id of the end token
LR = 1e-5
SEED = 1
STEPS = int(os.environ.get("STEPS", 10))  # of a run of sft, reward and dpo
# First steps, which are not counted; of ppo and grpo it is the first iteration. For some steps a process takes memory
# from the system, and each new page costs time.
SKIPPED = STEPS // 2
BATCH = SIZES["batch"]
SHORTEST = 16 * LENGTH
LONGEST = 128 * LENGTH
ATTENTION = "sdpa" if GPU else "eager"
STEP_FLAGS = {
    "batch_size": BATCH,
    "micro_batch_size": BATCH,
    "max_length": LONGEST,
    "total_steps": STEPS,
    "seed": SEED,
    "lr": LR,
    "lr_schedule": "constant",
    "warmup_steps": 0,
    "adam_betas": (0.9, 0.999),
}


def prepare(folder, algorithm):
    """Writes the model that both systems load, and for reward its blocks with a new head, in `classifier`."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    torch.manual_seed(1)
    sizes = {"n_layer": LAYERS, "n_embd": WIDTH, "n_head": HEADS, "vocab_size": VOCABULARY}
    sizes["n_positions"] = 1024 * LENGTH
    drop = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **drop, bos_token_id=END, eos_token_id=END))
    if algorithm == "grpo":
        torch.manual_seed(SEED)
        with torch.no_grad():
            model.transformer.wte.weight[END].normal_(0, model.config.initializer_range)
    else:
        with torch.no_grad():  # the last hidden state has a coordinate near 10; the end token answers to it with -10,
            model.transformer.ln_f.bias[0] = 10  # so that every response has its full length
            model.transformer.wte.weight[END] = 0
            model.transformer.wte.weight[END, 0] = -10
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"<end>": END} | {f"w{i}": i for i in range(1, VOCABULARY)}, unk_token="<end>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>").save_pretrained(folder)
    if algorithm == "reward":
        from algos import reward
        from common.cli import from_task

        classifier, tokenizer, _ = reward.load_classifier(from_task(reward.Args, reward.TASK, seed=SEED), str(folder))
        for part in (classifier, tokenizer):
            part.save_pretrained(folder / "classifier")


SIDES = {  # of plainrl: flags
    "fp32": {"attn_implementation": ATTENTION, "mixed_precision": "no"},
    "bf16": {"attn_implementation": ATTENTION, "mixed_precision": "bf16"},
    "fp32-2-layers": {"attn_implementation": ATTENTION, "mixed_precision": "no", "num_layers_unfrozen": 2},
}


def text(ids):
    return " ".join(f"w{i}" for i in ids)


def forward_flops(tokens, scored):
    """Floating-point operations of a forward pass of a row without padding, the output layer at `scored` positions."""
    blocks = 12 * LAYERS * WIDTH**2  # weights in matrix products
    attention = 2 * LAYERS * WIDTH * tokens**2  # the causal half
    return 2 * blocks * tokens + 2 * WIDTH * VOCABULARY * scored + attention


def measure(algorithm, side, model):
    """(columns, useful GFLOP/s) of a short run of our script."""
    script = importlib.import_module(f"algos.{algorithm}")
    measures = {"ppo": measure_ppo, "sft": measure_sft, "grpo": measure_grpo}
    return measures.get(algorithm, measure_pairs)(script, str(model), SIDES[side])


# ---- ppo -------------------------------------------------------------------------------------------------------------

EPISODES, PROMPT, RESPONSE, EPOCHS = 16, 32, 32, 4


def prompt_ids():
    """One prompt per episode of an iteration: 32 ids each, the same in all iterations."""
    return np.random.default_rng(1).integers(END + 1, VOCABULARY, (EPISODES, PROMPT)).tolist()


def even(output_ids, **_):
    """A trivial reward: the share of even ids."""
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in output_ids]


def ppo_flops():
    """Useful operations of each iteration: sampling, reference and training, the output layer at response positions
    only, no padding, nothing computed twice."""
    return [EPISODES * (2 + 3 * EPOCHS) * forward_flops(PROMPT + RESPONSE, RESPONSE)] * ITERATIONS


def measure_ppo(script, model, flags):
    settings = {
        "total_episodes": EPISODES * ITERATIONS,
        "rollout_batch_size": EPISODES,
        "batch_size": EPISODES,
        "micro_batch_size": EPISODES,
        "ppo_epochs": EPOCHS,
        "max_new_tokens": RESPONSE,
        "lr": LR,
    }
    prompts = [{"prompt": text(ids)} for ids in prompt_ids()]
    steps = short_run(script, model=model, dataset=prompts, reward=even, **settings, **flags)
    assert set(column(steps, "tokens/queries_len")) == {PROMPT}
    assert set(column(steps, "tokens/responses_len")) == {RESPONSE}
    return figures(ppo_flops(), column(steps, "perf/seconds_rollout", "perf/seconds_update"), skipped=1)


# ---- sft -------------------------------------------------------------------------------------------------------------

ROWS = 96


def rows():
    """The rows: texts of whole words. With the end token they have 16 to 128 tokens, log-normal within these bounds."""
    draws = (LENGTH * rng(SEED, "lengths").lognormal(4.0, 0.6, 10 * ROWS)).round().astype(int)
    lengths = draws[(draws >= SHORTEST) & (draws <= LONGEST)][:ROWS]
    ids = [rng(SEED, "ids", row).integers(END + 1, VOCABULARY, length - 1) for row, length in enumerate(lengths)]
    return [{"text": text(row)} for row in ids]


def order():
    """The indices of the rows of all steps, one after the other, as algos/sft.py draws them."""
    return draw_rows(SEED, ROWS, 0, STEPS * BATCH)


def step_lengths():
    """[tokens of the rows of a step], one for each step."""
    lengths = [len(row["text"].split()) + 1 for row in rows()]
    drawn = order()
    return [[lengths[row] for row in drawn[i : i + BATCH]] for i in range(0, len(drawn), BATCH)]


def sft_flops():
    """Useful operations of each step: no padding, no forward of a row's last token, which predicts nothing."""
    return [sum(3 * forward_flops(n - 1, n - 1) for n in step) for step in step_lengths()]


def measure_sft(script, model, flags):
    steps = short_run(script, model=model, dataset=rows(), **STEP_FLAGS, **flags)
    seconds = column(steps, "perf/seconds_update")
    tokens = [round(step["perf/tokens_per_sec"] * step["perf/seconds_update"]) for step in steps]
    assert tokens == list(map(sum, step_lengths()))
    return figures(sft_flops(), seconds, SKIPPED, column(steps, "train/loss"), column(steps, "optim/grad_norm"))


# ---- reward and dpo --------------------------------------------------------------------------------------------------

PAIRS = STEPS * BATCH  # together one epoch
# id of a word that no text has and that begins no other; with the end token as padding, TRL's classifier would read the
# score before the end token
PADDING = VOCABULARY - 1


def pair_ids():
    """[(prompt, chosen, rejected)] of all pairs, the end token with the responses. The three lengths are log-normal
    where both texts have 16 to 128 tokens."""
    draws = (LENGTH * rng(SEED, "lengths").lognormal(3.3, 0.6, (10 * PAIRS, 3))).round().astype(int)
    whole = draws[:, :1] + draws[:, 1:]
    lengths = draws[(draws.min(1) >= 2) & (whole.min(1) >= SHORTEST) & (whole.max(1) <= LONGEST)][:PAIRS]
    found = []
    for row, (prompt, chosen, rejected) in enumerate(lengths.tolist()):
        words = rng(SEED, "ids", row).integers(END + 1, PADDING, prompt + chosen + rejected).tolist()
        end_of_chosen = prompt + chosen - 1
        sides = words[prompt:end_of_chosen], words[end_of_chosen : end_of_chosen + rejected - 1]
        found.append([words[:prompt], *([*side, END] for side in sides)])
    return found


def pair_rows():
    rows = []
    for prompt, *responses in pair_ids():
        chosen, rejected = (f" {text(response[:-1])}" for response in responses)
        rows.append({"prompt": text(prompt), "chosen": chosen, "rejected": rejected})
    return rows


def pair_order():
    """The indices of the pairs of all steps, one after the other, as both scripts draw them."""
    return draw_rows(SEED, PAIRS, 0, PAIRS)


def pair_flops(algorithm):
    """Operations of each step that cannot be left out: no padding, the prompt of a pair once, nothing computed twice.
    In dpo, the output layer at what predicts a response token, no forward of a text's last token, and one forward of
    the reference."""
    ids = pair_ids()
    forward = [0] * STEPS
    for place, row in enumerate(pair_order()):
        prompt, *responses = ids[row]
        step = place // BATCH
        forward[step] -= forward_flops(len(prompt), 0)
        for response in responses:
            tokens = len(prompt) + len(response)
            if algorithm == "dpo":
                forward[step] += forward_flops(tokens - 1, len(response))
            else:
                forward[step] += forward_flops(tokens, 0)
    passes = 4 if algorithm == "dpo" else 3
    return [passes * flops for flops in forward]


def measure_pairs(script, model, flags):
    scoring = []  # seconds in which dpo scores all pairs by the reference, before the steps
    packed = []
    compute_pairs = script.compute_pairs
    in_lines = script.in_lines

    def timed(*args):
        begun = time.perf_counter()
        scores = compute_pairs(*args)
        scoring.append(time.perf_counter() - begun)
        return scores

    def noted(packing, *args):
        packed.append(packing)
        return in_lines(packing, *args)

    algorithm = script.__name__.rpartition(".")[2]
    if algorithm == "reward":
        model = f"{model}/classifier"
    with patch.object(script, "compute_pairs", timed), patch.object(script, "in_lines", noted):
        steps = short_run(script, model=model, dataset=pair_rows(), **STEP_FLAGS, **flags)
    assert set(packed) == {True}  # a script says and does without where it cannot
    assert len(scoring) == (algorithm == "dpo")
    seconds = [second + sum(scoring) / STEPS for second in column(steps, "perf/seconds_update")]
    losses = column(steps, "train/loss")
    return figures(pair_flops(algorithm), seconds, SKIPPED, losses, column(steps, "optim/grad_norm"))


# ---- grpo ------------------------------------------------------------------------------------------------------------
# The responses are given: both systems decode token by token, and their own draw has one id that it can take. So
# sampling costs what it costs, and everything behind it sees the same tokens. The reward asserts that.

PROMPTS = SIZES["prompts"]
GROUP = 4
GROUP_EPISODES = PROMPTS * GROUP
MICRO = 8  # rows of a forward: the default of both
LONGEST_RESPONSE = 96 * LENGTH
CERTAIN = 1e9  # as a logit, beside which no other has a probability


def lengths(name, count, center, spread, low, high):
    """Quantiles of a log-normal distribution cut to [low, high], in random order, times LENGTH."""
    draws = rng(SEED, name).lognormal(center, spread, 100000)
    draws = draws[(draws >= low) & (draws <= high)]
    quantiles = (rng(SEED, f"order of {name}").permutation(count) + 0.5) / count
    return (np.quantile(draws, quantiles).round().astype(int) * LENGTH).tolist()


@functools.cache
def group_prompts():
    """Ids of each prompt; every iteration has them all."""
    ids = []
    for row, length in enumerate(lengths("prompts", PROMPTS, 3.4, 0.5, 16, 64)):
        ids.append(rng(SEED, "ids of a prompt", row).integers(END + 1, VOCABULARY, length).tolist())
    return ids


@functools.cache
def responses():
    """Ids of the GROUP responses to each prompt, with the end token."""
    ids = []
    for row, length in enumerate(lengths("responses", GROUP_EPISODES, 3.7, 0.6, 16, 96)):
        words = rng(SEED, "ids of a response", row).integers(END + 1, VOCABULARY, length - 1)
        ids.append([*words.tolist(), END])
    return [ids[begin : begin + GROUP] for begin in range(0, GROUP_EPISODES, GROUP)]


def group_rows():
    """The prompts as texts of whole words, with what the reward asks for."""
    return [{"prompt": text(ids), "place": place} for place, ids in enumerate(group_prompts())]


def mean_id(output_ids, place, **_):
    """The mean id over the size of the vocabulary. The responses of a group come in order."""
    for row, ids in enumerate(output_ids):
        assert place[row] == place[row - row % GROUP]
        assert list(ids) == responses()[place[row]][row % GROUP]
    return [mean(ids) / VOCABULARY for ids in output_ids]


def grpo_flops():
    """Useful operations of each iteration: sampling, forward and backward pass, a prompt once for its group,
    no padding, the output layer where a response token is predicted."""
    forward = 0
    for prompt, group in zip(group_prompts(), responses(), strict=True):
        forward += sum(forward_flops(len(prompt) + len(ids) - 1, len(ids)) for ids in group)
        forward -= (GROUP - 1) * forward_flops(len(prompt), 0)
    return [4 * forward] * ITERATIONS


def given_ids(seed, stream, iteration, places, width):
    """(len(places), width) float64: the ids of the responses, where a sampler asks for its uniforms."""
    assert stream == "rollout"
    drawn = draw_rows(seed, PROMPTS, (iteration - 1) * PROMPTS, PROMPTS)
    table = torch.full((len(places), width), float(END), dtype=torch.float64)
    for row, place in enumerate(places):
        ids = responses()[drawn[place // GROUP]][place % GROUP]
        table[row, : len(ids)] = torch.tensor(ids, dtype=torch.float64)
    return table


def draw_given(logits, ids, temperature, *filters, draw=sampling.draw):
    """In place of `draw`: what it takes of logits (B, V) that leave nothing but ids (B,), given as the uniforms."""
    logits[torch.arange(len(ids), device=ids.device), ids.long()] = CERTAIN
    return draw(logits, torch.full_like(ids, 0.5), temperature, *filters)


def measure_grpo(script, model, flags):
    settings = {
        "total_episodes": GROUP_EPISODES * ITERATIONS,
        "rollout_batch_size": GROUP_EPISODES,
        "batch_size": GROUP_EPISODES,
        "group_size": GROUP,
        "micro_batch_size": MICRO,
        "kl_coef": 0.0,
        "loss_mean": "token",
        "max_new_tokens": LONGEST_RESPONSE,
        "lr": LR,
        "seed": SEED,
    }
    with patch.object(script, "uniforms", given_ids), patch.object(sampling, "draw", draw_given):
        steps = short_run(script, model=model, dataset=group_rows(), reward=mean_id, **settings, **flags)
    seconds = column(steps, "perf/seconds_rollout", "perf/seconds_update")
    return figures(grpo_flops(), seconds, 1, column(steps, "loss/total"), column(steps, "optim/grad_norm"))
