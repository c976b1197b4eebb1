"""Implicit language Q-learning (ILQL): offline RL of a language model, from texts with rewards.

Papers: Snell et al. 2022 (arXiv 2206.11871); IQL, Kostrikov et al. 2021 (arXiv 2110.06169). Code of the authors:
https://github.com/Sea-Snell/Implicit-Language-Q-Learning/blob/82c9796201ab705e9cb5aac2f97ab3ad75aead9b/src/models/iql_model.py

A token is an action, the text before it the state. Heads for V, two Q, and slow copies of these Q, the targets Q^, read
the hidden states of the language model pi, which is trained to imitate the data at the same time:

    (r + gamma V(s') - Q(s, a))^2, V(s') = 0 at the end    Q learns what V expects next          ilql_targets
    |tau - 1[u < 0]| u^2,  u = min Q^(s, a) - V(s)         V: an upper expectile over actions    expectile_loss
    log sum_b exp Q(s, b) - Q(s, a)                        unseen actions get a low Q (CQL)      cql_loss
    -log pi(a | s) w,  w = exp(awac_beta u), clipped       imitation, weighted by advantage      awac_loss
    Q^ <- Q^ + alpha (Q - Q^)                              --polyak-alpha                       polyak_update
    log pi(a | s) + beta (min Q^(s, a) - V(s))             what is sampled from                  shape_logits

How this differs from trlX's ILQL and the authors' code:
- One transformer, as in trlX; the authors have three (algos/README.md has recipes for a separate policy and target).
- --top-k and --top-p filter pi before Q is added, as in the authors' code: whatever beta is, only tokens that pi finds
  likely are sampled, unless both are off.
- Rows that are cut or `truncated` bootstrap from V of their last state, as in the authors' code; in trlX all rows end.
- Losses are means over the actions of the global batch, so neither micro-batches, processes nor padding change them.

Rows: {"prompt", "completion", "reward"} as texts or chats, {"dialogue": [prompt, output, ...], "reward"},
{"messages", "reward"} or {"text", "reward"}, all of which is output. The reward is a number, received with the last
token, or a list with one for each output. {"truncated": true} means that the episode did not end there.

    accelerate launch algos/ilql.py                                # random walks, on one CPU
    accelerate launch algos/ilql.py --model gpt2 --dataset rewarded.jsonl --metric my_metric.py:metric \
        --eval-prompts prompts.jsonl
    torchrun --nproc_per_node 8 algos/ilql.py --model Qwen/Qwen3-0.6B --dataset org/rewarded:train

Dimension key: B rows, T tokens of a row, Q prompt and R output tokens of an encoder-decoder, A actions of a row,
N actions of a batch, V vocabulary, H hidden size.
"""

import copy
import itertools
import math
import sys
from collections import defaultdict
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from numbers import Real
from pathlib import Path
from statistics import fmean, stdev
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from common.cli import Count, Fraction, ModelArgs, Natural, NonNegative, Positive, RunArgs, Share, StopString, cli
from common.errors import InputError
from common.functions import build, loading
from common.launch import accumulate, prepare, reduce_sums, require_finite, unsharded
from common.lm.evaluation import evaluate_samples
from common.lm.load import load_decoder, load_lm, saved_heads
from common.lm.logprobs import in_chunks, in_float32, token_logprobs
from common.lm.structure import draw_layers, max_positions
from common.lm.tokens import (
    encode_prompts,
    encode_segments,
    int32,
    marked,
    pad_rows,
    row_ends,
    split_rows,
    tell_untrained_end,
)
from common.rows import longest_rows, read_data, set_flag, set_prefix, texts
from common.run import Run, closes_run
from common.seeding import rng

HEADS_FILE = "ilql_heads.safetensors"  # of an export, beside the weights of the model
TASK = "benchmarks/tasks/randomwalks/ilql.yaml"  # used without --model, --dataset and --config


@dataclass
class Args(RunArgs, ModelArgs):
    """Implicit language Q-learning: offline RL of a language model."""

    # ---- algorithm
    epochs: Positive = 3.0
    """Passes over the data."""
    total_steps: Count | None = None
    """Optimizer steps; default: as many as --epochs takes."""
    tau: Fraction = 0.7
    """Expectile of Q over the data's actions that V learns: 0.5 is the mean, near 1 is the maximum (trlX: 0.7; the
    authors: 0.6 to 0.8)."""
    gamma: Fraction = 0.99
    """Discount per token of the outputs (trlX and the authors: 0.99)."""
    cql_scale: NonNegative = 0.1
    """Weight of the CQL loss, which lowers Q for actions that are not in the data (trlX: 0.1; the authors: 1e-4 to
    1)."""
    awac_scale: NonNegative = 1.0
    """Weight of the imitation loss (trlX: 1)."""
    awac_beta: NonNegative = 0.0
    """Weight a token in the imitation loss by exp(beta x advantage); 0: plain imitation (trlX and the authors)."""
    awac_clip: Positive = 20.0
    """Maximum of the weights that --awac-beta gives."""
    two_qs: bool = True
    """Use two Q heads and take the lower of their values; --no-two-qs uses one. Losses are summed over the heads. With
    targets, gradients and moments, two heads need 12.5 GB for a model of width 1024 and 152k words."""
    polyak_alpha: Share = 0.005
    """Weight of the online Q heads when the targets are synchronised with them (the authors: 0.005 at every step; trlX:
    0.001 every 5). The summary says how far the targets will have moved."""
    steps_for_target_q_sync: Count = 1
    """Optimizer steps between synchronisations of the target Q heads (the authors: 1; trlX: 5)."""

    # ---- evaluation by sampling
    betas: tuple[NonNegative, ...] = (0.0, 1.0, 4.0)
    """Weights of the advantage in the policy log pi + beta (min Q^ - V), given as --betas 0 1 4. Each is evaluated as
    eval/<metric>@beta=<beta>; the best by the first metric counts. 0 is imitation (trlX: 1, or 1 and 4; the authors: 8
    to 16). --eval-temperature divides the whole sum."""
    max_new_tokens: Count = 56
    """Maximum length of a response, in tokens (trlX: 56)."""
    stop: tuple[StopString, ...] = ()
    """Strings that end a response; a shell writes a newline as $'\\n'. Tokens up to the one that completes the string
    are kept. The metric sees the text before the string, without trailing space."""
    eval_temperature: NonNegative = 1.0
    """Sampling temperature in evaluations; 0: greedy."""
    top_k: Natural = 20
    """Evaluations sample from the k most likely tokens under pi, whatever their Q; 0: from all (trlX: 20, by the whole
    sum)."""
    top_p: Share = 1.0
    """Evaluations sample from the smallest set of tokens whose probabilities sum to this; 1: from all."""
    decode_batch_size: Count = 256
    """Rows that a process decodes at once. Changes memory and speed; the result only by rounding."""
    logit_mask: str | None = None
    """file.py:function that returns a V x V matrix (from Python, also the matrix): True where the column's token must
    never follow the row's."""

    # ---- optimizer
    lr: Positive = 5e-5
    """Peak learning rate of AdamW (trlX: 5e-5 for GPT-2; the authors: 1e-5 to 1e-4; LoRA adapters need about ten times
    as much)."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """Shape of the learning rate schedule after the warm-up."""
    lr_final: NonNegative = 0.0
    """Learning rate at the end of a linear or cosine decay."""
    warmup_steps: Natural = 0
    """Optimizer steps of linear warm-up."""
    decay_steps: Count | None = None
    """Optimizer steps from the end of the warm-up until --lr-final is reached; default: the rest of the run."""
    adam_betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """Decay rates of AdamW's moments."""
    adam_eps: NonNegative = 1e-8
    """Epsilon of AdamW."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay of weight matrices (not of biases and norms)."""
    max_grad_norm: NonNegative = 1.0
    """Clip the global gradient norm to this; 0: no clipping."""
    batch_size: Count = 128
    """Rows per optimizer step, over all processes (trlX: 128)."""
    micro_batch_size: Count = 8
    """Rows per process and forward pass. Changes memory and speed; the result only by rounding."""

    # ---- data
    dataset: str | None = None
    """Rows with rewards: a .jsonl/.json/.csv/.parquet file, hub id:split or file.py:function; from Python, a list."""
    eval_prompts: str | None = None
    """Rows with a prompt, sampled for --metric; default: the first set of --eval-dataset."""
    metric: str | None = None
    """file.py:function(samples, prompts, outputs, **columns) -> {name: list}. The first metric chooses the best beta
    and the best checkpoint."""
    lower_is_better: bool = False
    """The first metric of --metric, which chooses the best model, is better when it is lower, as an error rate."""
    max_length: Count = 1024
    """Maximum tokens per row; in an encoder-decoder, per prompt and per output. Longer rows are counted and cut before
    an action, where they bootstrap."""
    normalize_rewards: bool = True
    """Scale rewards so that the training rows' returns have standard deviation 1, and mean 0 if all rows end."""

    def problems(self):
        if self.tau in (0, 1):
            yield f"--tau {self.tau} must be above 0 and below 1, or V is unbounded"
        if not self.betas:
            yield "--betas is empty: give at least one number"
        if self.eval_prompts is not None and self.metric is None:
            yield "--eval-prompts needs --metric, which scores the samples"


# ---- Maths -----------------------------------------------------------------------------------------------------------


def ilql_targets(rewards, next_values, not_done, gamma):
    """Regression target of Q(s, a): r + gamma V(s') where not_done, else r; no gradient. All have one shape."""
    return rewards + gamma * next_values.detach() * not_done


def expectile_loss(diff, tau):
    """|tau - 1[diff < 0]| diff^2 per action, diff = min Q^(s, a) - V(s): minimal where V is the tau-expectile of Q."""
    return torch.where(diff < 0, (1 - tau) * diff.square(), tau * diff.square())


def cql_loss(q_logits, actions):
    """log sum_b exp Q(s, b) - Q(s, a) per action: q_logits (..., V) are Q(s, .), actions (...)."""
    q_logits = q_logits.to(torch.promote_types(q_logits.dtype, torch.float32))
    return F.cross_entropy(q_logits.flatten(0, -2), actions.flatten(), reduction="none").view_as(actions)


def awac_loss(nll, advantages, beta, clip=20.0):
    """-log pi(a | s) min(exp(beta A(s, a)), clip) per action, nll = -log pi(a | s); the weight has no gradient.

    Any shape. beta 0 is plain imitation.
    """
    return nll * (beta * advantages.detach()).exp().clamp(max=clip)


@torch.no_grad()
def polyak_update(target, online, alpha):
    """target <- target + alpha (online - target), parameter by parameter: alpha is the weight of the online network."""
    for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
        slow.lerp_(fast, alpha)


def shape_logits(logits, q, v, beta, top_k=0, top_p=1.0, forbidden=None):
    """log pi(a | s) + beta (Q(s, a) - V(s)): the policy that ILQL samples from.

    logits, q: (..., V); v: (...). It is -inf where forbidden (..., V) is True, then outside the top_k likeliest tokens
    of pi (0: all), and outside the smallest set of them with probability top_p; at least in float32.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if forbidden is not None:
        logits = logits.masked_fill(forbidden, -math.inf)
    if 0 < top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[..., -1:], -math.inf)
    if top_p < 1:
        ranked, order = logits.softmax(-1).sort(descending=True, stable=True)
        drop = ranked.cumsum(-1) - ranked >= top_p  # the probability before a token already reaches top_p
        logits = logits.masked_fill(drop.scatter(-1, order, drop), -math.inf)
    return logits.log_softmax(-1) + beta * (q - v[..., None])


# ---- Heads -----------------------------------------------------------------------------------------------------------


class PolicyWithQ(nn.Module):
    """A language model `lm` with `v_head`, `q_heads` and `target_q_heads` on the hidden states that its output
    embedding reads. A head is Linear (H, 2H), ReLU, Linear (2H, 1 or V), at least in float32."""

    def __init__(self, lm, two_qs=True, seed=0):
        super().__init__()
        self.lm = lm
        self._no_split_modules = lm._no_split_modules  # accelerate shards by these blocks
        vocabulary, width = lm.get_output_embeddings().weight.shape
        sizes = [1, vocabulary, vocabulary] if two_qs else [1, vocabulary]
        heads = []
        for number, size in enumerate(sizes):
            head = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, size))
            head.to(lm.device, torch.promote_types(lm.dtype, torch.float32))
            draw_layers(head, seed, "ilql_heads", number)
            heads.append(head)
        self.v_head = heads[0]
        self.q_heads = nn.ModuleList(heads[1:])
        self.target_q_heads = copy.deepcopy(self.q_heads).requires_grad_(False)

    def forward(self, batch, args):
        # the losses are computed in forward, so that DDP and FSDP see the call
        return ilql_losses(self, batch, args)

    @contextmanager
    def guided(self, beta, top_k=0, top_p=1.0, logit_mask=None):
        """Inside, `lm` returns the logits of `shape_logits`, so what samples from it (`lm.generate`) samples from the
        policy with this beta; give `generate` top_k=0, or it keeps the 50 likeliest of the shaped policy.
        logit_mask: bool (V, V), True where the column must not follow the row; a row of True forbids nothing."""
        hidden = []
        if logit_mask is not None:
            logit_mask = (logit_mask & ~logit_mask.all(1, keepdim=True)).to(self.lm.device)

        def record(module, inputs):
            hidden.append(inputs[0])

        def shape(module, inputs, keywords, output):
            with torch.autocast(self.lm.device.type, enabled=False):
                states = hidden.pop().to(self.v_head[0].weight.dtype)
                q = torch.stack([head(states) for head in self.target_q_heads]).amin(0)
                v = self.v_head(states)[..., 0]
            forbidden = None
            if logit_mask is not None:
                ids = keywords["input_ids"] if "input_ids" in keywords else inputs[0]
                forbidden = logit_mask[ids[:, -q.shape[1] :]]
            output.logits = shape_logits(output.logits, q, v, beta, top_k, top_p, forbidden)
            return output

        recording = self.lm.get_output_embeddings().register_forward_pre_hook(record)
        shaping = self.lm.register_forward_hook(shape, with_kwargs=True)
        try:
            with in_float32(self.v_head, self.target_q_heads):
                yield self
        finally:
            recording.remove()
            shaping.remove()

    def head_weights(self):
        return {name: weight for name, weight in self.state_dict().items() if "head" in name.partition(".")[0]}

    @classmethod
    def load(cls, directory, **options):
        """The exported model of a run, `<run>/hf_model`, with its heads. options go to from_pretrained."""
        lm = load_decoder(directory, **options)
        weights = saved_heads(directory, HEADS_FILE, required=True)
        policy = cls(lm, two_qs="q_heads.1.0.weight" in weights)
        policy.load_heads(weights)
        return policy

    def load_heads(self, weights):
        if self.head_weights().keys() != weights.keys():
            flag = "--two-qs" if "q_heads.1.0.weight" in weights else "--no-two-qs"
            raise RuntimeError(f"it was written with {flag}")
        self.load_state_dict(self.state_dict() | weights)


# ---- Rows -> ids -----------------------------------------------------------------------------------------------------


@dataclass
class Episode:
    """A row: its tokens, the positions of its actions, the reward of each action, and whether it ended."""

    ids: list
    actions: list
    rewards: list
    done: bool


def encode_episodes(rows, tokenizer, max_length, flag, encoder=False):
    """(episodes of the rows that have an action, report). The top of this file lists the row formats."""
    if "text" in rows[0] and rows[0].keys().isdisjoint(("messages", "prompt", "completion", "dialogue")):
        outputs = texts(rows, "text", flag)
        rows = [row | {"prompt": "", "completion": text} for row, text in zip(rows, outputs, strict=True)]
    episodes = []
    num_cut = 0
    encoded = encode_segments(rows, tokenizer, flag, encoder)
    for number, (row, (ids, spans)) in enumerate(zip(rows, encoded, strict=True), 1):
        where = f"{flag} row {number}"
        episode, is_cut = make_episode(row, ids, spans, tokenizer, max_length, encoder, where)
        num_cut += is_cut
        if episode.actions:
            episodes.append(episode)
    if not episodes:
        raise InputError(f"{flag}: no row has an action left within --max-length {max_length}")
    counts = sorted(len(episode.actions) for episode in episodes)
    ended = sum(episode.done for episode in episodes)
    report = (
        f"{len(rows)} rows, {num_cut} cut, {len(rows) - len(episodes)} dropped with no action left (--max-length "
        f"{max_length}), {ended} ended; "
        f"actions per row: {counts[0]} to {counts[-1]}, median {counts[len(counts) // 2]}"
    )
    return episodes, report


def make_episode(row, ids, spans, tokenizer, max_length, encoder, where):
    """(episode, whether it was cut) of a row with its tokens and spans, as `encode_segments` yields them.

    An action is a token of an output, including the end token, but not the blanks that a chat template writes after it:
    they are never sampled. A number is the reward of the last action; a list has one number for the last token of each
    output. A truncated row loses its last end token and what comes after it. A row longer than max_length is cut just
    before an action, so that its last state has a value to bootstrap from, and loses later rewards.
    """
    truncated = row.get("truncated")
    if truncated not in (None, 0, 1):
        raise InputError(f"{where}: 'truncated' must be true or false, not {truncated!r:.60}")
    outputs = [(begin, end) for begin, end, trained in spans if trained]
    longest = max_length
    num_over = 0
    if encoder:  # an encoder-decoder: prompt and output are cut separately; the prompt keeps its end token
        _, prompt_length, _ = spans[0]
        num_over = max(0, prompt_length - max_length)
        del ids[prompt_length - 1 - num_over : prompt_length - 1]
        outputs = [(begin - num_over, end - num_over) for begin, end in outputs]
        longest += prompt_length - num_over
    for number, (begin, end) in enumerate(outputs):
        places = [place for place in range(begin, end) if ids[place] in row_ends(tokenizer)]
        if places and truncated and (begin, end) == outputs[-1]:
            ids = ids[: places[-1]]
        elif places and not tokenizer.decode(ids[places[-1] + 1 : end]).strip():
            outputs[number] = (begin, places[-1] + 1)
    places = [range(max(1, begin), min(end, len(ids))) for begin, end in outputs]  # nothing predicts the first
    received = place_rewards(row.get("reward"), places, where)
    actions = list(itertools.chain(*places))
    is_long = len(ids) > longest
    if is_long:
        last_state = max((place for place in actions if place <= longest), default=0)
        ids = ids[:last_state]
        actions = [place for place in actions if place < last_state]
    rewards = [received.get(place, 0.0) for place in actions]
    episode = Episode(int32(ids), int32(actions), rewards, done=not (truncated or is_long))
    return episode, is_long or num_over > 0


def place_rewards(reward, outputs, where):
    """{position: reward} from a row's reward, a number or a list; outputs: the positions of each output."""
    values = reward
    if not isinstance(reward, list):
        values = [0.0] * (len(outputs) - 1) + [reward]
    are_numbers = all(isinstance(value, Real) and abs(value) < 1e38 for value in values)
    if not are_numbers or len(values) != len(outputs):
        form = f"a finite number, or a list of {len(outputs)}, one for each output"
        raise InputError(f"{where}: 'reward' must be {form}, not {reward!r:.60}")
    rewarded = list(zip(outputs, values, strict=True))
    placed = {places[-1]: float(value) for places, value in rewarded if places}
    if placed and any(value for places, value in rewarded if not places):  # without any action the row is dropped
        raise InputError(f"{where}: an output without tokens has a reward")
    return placed


@dataclass
class Batch:
    """Right-padded episodes; for an encoder-decoder all outputs begin at the same position."""

    ids: torch.Tensor  # (B, T)
    query_mask: torch.Tensor | None  # (B, Q) bool, of the prompts that an encoder reads
    states: torch.Tensor  # (B, A + 1): the hidden state from which each action is taken, then the last of the row
    actions: torch.Tensor  # (B, A): ids
    rewards: torch.Tensor  # (B, A), float64
    mask: torch.Tensor  # (B, A): True where there is an action
    at: tuple  # (N,) rows and (N,) columns of the actions in (B, A)
    not_done: torch.Tensor  # (B, A): False at the last action of an episode that ended

    @classmethod
    def of(cls, episodes, pad, device, encoder=False):
        begins = []
        states = []
        not_done = []
        for episode in episodes:
            begin = 1  # the token behind state 0: the second one of a decoder
            if encoder and episode.actions:
                begin = episode.actions[0]  # the first one of the output
            begins.append(begin)
            states.append([place - begin for place in [*episode.actions, len(episode.ids)]])
            going_on = [True] * len(episode.actions)
            if episode.done and going_on:
                going_on[-1] = False
            not_done.append(going_on)
        actions = [[episode.ids[place] for place in episode.actions] for episode in episodes]
        mask = [[True] * len(episode.actions) for episode in episodes]
        mask = pad_rows(mask, False)
        query_mask = None
        if encoder:
            query_mask = pad_rows([[True] * begin for begin in begins], False, begins, device=device)
        return cls(
            ids=pad_rows([episode.ids for episode in episodes], pad, begins, device=device),
            query_mask=query_mask,
            states=pad_rows(states, 0, device=device),
            actions=pad_rows(actions, pad, device=device),
            rewards=pad_rows([episode.rewards for episode in episodes], 0.0, dtype=torch.float64, device=device),
            mask=mask.to(device),
            at=tuple(mask.nonzero().to(device).T),  # of the CPU's mask: a GPU would wait
            not_done=pad_rows(not_done, False, device=device),
        )


# ---- Losses of a batch -----------------------------------------------------------------------------------------------

LOSSES = ("loss", "loss_q", "loss_v", "loss_cql", "loss_awac")
MEANS = ("values", "qvalues", "target_qvalues", "advantages", "target_gap", "awac_weight")


def action_logprobs(lm, batch):
    """log pi(a | s) (N,) of the actions, and the hidden states (B, A + 1, H) of all states of the batch.

    No mask is passed: no token sees the padding after it, and states of padding are never read. An encoder-decoder
    needs the mask of its prompts; for the R tokens after them, with the start token, it has R + 1 states.
    """
    count, width = batch.ids.shape
    positions = torch.arange(width, device=batch.ids.device).expand_as(batch.ids)
    inputs = {"input_ids": batch.ids, "position_ids": positions}
    if batch.query_mask is not None:
        width += 1 - batch.query_mask.shape[1]
        inputs["attention_mask"] = F.pad(batch.query_mask.long(), (0, width - 1), value=1)
    places = batch.at[0] * width + batch.states[batch.at]
    labels = batch.ids.new_full((count, width), -100)
    labels.view(-1)[places] = batch.actions[batch.at]
    logprobs, hidden, _ = token_logprobs(lm, labels, places, **inputs)
    rows = torch.arange(count, device=batch.ids.device)[:, None]
    return logprobs, hidden[rows, batch.states]


def chosen_q(head, features, actions):
    """Q(s, a) (N,) of actions (N,) and features, head[:-1](states) (N, 2H), from only those rows of the last layer that
    the actions need. The gradient of these rows is sparse; autograd adds it to the dense one of the CQL loss, without
    which AdamW would refuse it."""
    last = head[-1]
    weights = F.embedding(actions, last.weight, sparse=True)  # (N, 2H)
    # = head(states).gather(-1, actions[:, None])[:, 0], without the other columns
    return (features * weights).sum(-1) + last.bias[actions]


def ilql_losses(policy, batch, args):
    """{name: (N,)} of losses and statistics, with one number per action of the batch. Those of Q are summed over the
    heads, as in trlX and the authors' code."""
    logprobs, hidden = action_logprobs(policy.lm, batch)
    at = batch.at  # (B, A) -> (N,)
    actions = batch.actions[at]
    not_done = batch.not_done[at]
    hidden_layers = [head[:-1] for head in (*policy.q_heads, *policy.target_q_heads)]
    with in_float32(policy.v_head, *hidden_layers), torch.autocast(hidden.device.type, enabled=False):
        states = hidden.to(policy.v_head[0].weight.dtype)
        values = policy.v_head(states)[..., 0]  # (B, A + 1)
        states = states[at]  # (N, H)
        v = values[at]
        next_v = values[:, 1:][at]
        features = [head[:-1](states) for head in policy.q_heads]  # (N, 2H) each
        heads = list(zip(policy.q_heads, features, strict=True))
        with torch.no_grad():
            targets = [chosen_q(head, head[:-1](states), actions) for head in policy.target_q_heads]
            targets = torch.stack(targets)
        target_q = targets.amin(0)
        advantages = target_q - v.detach()
    # the products with the vocabulary are most of the work: under autocast they have its type
    vocabulary = policy.q_heads[0][-1].out_features
    loss_cql = 0.0
    for head, x in heads:
        loss_cql = loss_cql + in_chunks(cql_loss, head[-1], vocabulary, x, actions)
    # after loss_cql: backward runs in reverse order, and autograd adds a sparse gradient in place if it comes first
    q = torch.stack([chosen_q(head, x, actions) for head, x in heads])  # (heads, N)
    td_errors = q - ilql_targets(batch.rewards[at].to(v.dtype), next_v, not_done, args.gamma)
    loss_q = td_errors.square().sum(0)
    loss_v = expectile_loss(target_q - v, args.tau)
    loss_awac = awac_loss(-logprobs, advantages, args.awac_beta, args.awac_clip)
    with torch.no_grad():
        error = td_errors.abs().mean(0)
        ends = ~not_done
        statistics = {
            "values": v,
            "qvalues": q.mean(0),
            "target_qvalues": target_q,
            "advantages": advantages,
            "target_gap": (q - targets).mean(0),  # over the heads, where target_qvalues has the least of them
            "awac_weight": (args.awac_beta * advantages).exp().clamp(max=args.awac_clip),
            "squared_values": v.square(),
            "squared_advantages": advantages.square(),
            "end_errors": error * ends,
            "inner_errors": error * not_done,
            "ends": ends,
        }
    loss = loss_q + loss_v + args.cql_scale * loss_cql + args.awac_scale * loss_awac
    losses = {"loss": loss, "loss_q": loss_q, "loss_v": loss_v, "loss_cql": loss_cql, "loss_awac": loss_awac}
    return losses | statistics


def loss_metrics(sums, count):
    """The metrics, from the sums over `count` actions of what `ilql_losses` returns."""
    mean = {name: total / count for name, total in sums.items()}
    metrics = {f"losses/{name}": mean[name] for name in LOSSES}
    metrics |= {f"{name}/mean": mean[name] for name in MEANS}
    for name in ("values", "advantages"):
        metrics[f"{name}/std"] = max(0.0, mean[f"squared_{name}"] - mean[name] ** 2) ** 0.5
    metrics["td_error/end"] = mean["end_errors"] / mean["ends"] if mean["ends"] else 0.0
    metrics["td_error/inner"] = mean["inner_errors"] / (1 - mean["ends"]) if mean["ends"] < 1 else 0.0
    return metrics


# ---- Order of rows, optimizer ----------------------------------------------------------------------------------------


def draw_rows(seed, num_rows, start, count):
    """`count` row numbers from position `start` of an endless stream: a keyed permutation of all rows for each pass."""
    epochs = range(start // num_rows, (start + count - 1) // num_rows + 1)
    rows = np.concatenate([rng(seed, "data", epoch).permutation(num_rows) for epoch in epochs])
    return rows[start % num_rows :][:count].tolist()


def make_optimizer(model, args):
    """AdamW on the trained weights, with weight decay of matrices only. A group's `peak_lr` is that of its schedule:
    another group may have its own."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    matrices = {"params": [weight for weight in weights if weight.ndim > 1], "weight_decay": args.weight_decay}
    vectors = {"params": [weight for weight in weights if weight.ndim < 2], "weight_decay": 0.0}
    groups = [group for group in (matrices, vectors) if group["params"]]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=args.adam_betas, eps=args.adam_eps, fused=True)
    for group in optimizer.param_groups:
        group["peak_lr"] = group["lr"]
    return optimizer


def learning_rate(peak, step, total_steps, args):
    """The rate of optimizer step `step`, counted from 0: warm-up to the peak, decay to --lr-final, then constant."""
    if step < args.warmup_steps:
        return peak * (step + 1) / args.warmup_steps
    if args.lr_schedule == "constant":
        return peak
    decay_steps = args.decay_steps or total_steps - args.warmup_steps
    progress = min(1.0, (step - args.warmup_steps) / max(1, decay_steps))
    if args.lr_schedule == "cosine":
        progress = (1 - math.cos(math.pi * progress)) / 2
    return peak + (args.lr_final - peak) * progress


# ---- Evaluation ------------------------------------------------------------------------------------------------------


def evaluation_options(args):
    """How responses of evaluations are sampled: options of `evaluate_samples` and `evaluate_sets`."""
    names = ("seed", "max_new_tokens", "top_k", "top_p", "stop", "decode_batch_size")
    return {name: getattr(args, name) for name in names} | {"temperature": args.eval_temperature}


@torch.no_grad()
def evaluate_losses(accelerator, model, episodes, args, pad):
    """The losses of the whole set, for any batch size and number of processes the same."""
    empty = Episode(episodes[0].ids, [], [], True)  # every process runs the same number of forward passes
    padded = episodes + [empty] * (-len(episodes) % accelerator.num_processes)
    encoder = getattr(model, "module", model).lm.config.is_encoder_decoder
    sums = dict.fromkeys([*LOSSES, "actions"], 0)
    lengths = [len(episode.ids) for episode in padded]
    for places in split_rows(accelerator, range(len(padded)), lengths, False, args.micro_batch_size):
        batch = Batch.of([padded[place] for place in places], pad, accelerator.device, encoder)
        terms = model(batch, args)
        for name in LOSSES:
            sums[name] += terms[name].double().sum()
        sums["actions"] += batch.mask.sum().double()
    sums = reduce_sums(accelerator, sums)
    return {name: sums[name] / sums["actions"] for name in LOSSES}


def evaluate(run, step, model, tokenizer, data, args):
    """The metric of responses sampled with each beta, and the losses of the evaluation sets. Some responses are
    shown."""
    accelerator = run.accelerator
    model.eval()
    policy = accelerator.unwrap_model(model)
    metrics = {}
    samples = []

    options = evaluation_options(args) | {"top_k": 0, "top_p": 1.0}  # `guided` cuts to top-k and top-p
    betas = args.betas if data.metric else ()
    with unsharded(model):
        for beta in betas:
            with policy.guided(beta, args.top_k, args.top_p, data.logit_mask):
                means, beta_samples = evaluate_samples(
                    accelerator, policy.lm, tokenizer, data.prompts, data.queries, data.metric, **options
                )
            metrics |= {f"eval/{name}@beta={beta:g}": value for name, value in means.items()}
            samples.append([{"beta": beta} | sample for sample in beta_samples])
        for name, episodes in data.eval_sets.items():
            means = evaluate_losses(accelerator, model, episodes, args, tokenizer.pad_token_id)
            metrics |= {f"{set_prefix(name)}{key}": value for key, value in means.items()}
    of_each_prompt = zip(*samples, strict=True)
    run.samples(step, [*itertools.chain(*of_each_prompt)])
    run.headline = headline(metrics, data, args.lower_is_better)
    run.lower_is_better = args.lower_is_better
    return metrics


def headline(metrics, data, lower_is_better):
    """The name of the metric that chooses the best model: the first one of --metric, with the beta for which it is
    best (the first if several are equal); without samples, a loss."""
    sampled = [name for name in metrics if "@beta=" in name]
    if sampled:
        first_metric = sampled[0].partition("@beta=")[0] + "@beta="
        names = [name for name in sampled if name.startswith(first_metric) and math.isfinite(metrics[name])]
        if names:
            best = min if lower_is_better else max
            return best(names, key=metrics.get)
    loss = f"{set_prefix(next(iter(data.eval_sets), ''))}loss"
    return loss if loss in metrics else "losses/loss"


# ---- Setup -----------------------------------------------------------------------------------------------------------


def load(args, path, device):
    """The policy and its tokenizer, with weights frozen or adapters added as the flags say, and the heads of an earlier
    run."""
    lm, tokenizer = load_lm(args, path, device)
    policy = PolicyWithQ(lm, args.two_qs, args.seed)
    with loading("--model", path):
        weights = saved_heads(path, HEADS_FILE, args.revision)
        if weights:
            policy.load_heads(weights)
    return policy, tokenizer


def check_logit_mask(logit_mask, lm):
    """The mask of --logit-mask as a tensor (V, V), or None. InputError if it does not fit the model."""
    if logit_mask is None:
        return None
    if lm.config.is_encoder_decoder:
        raise InputError("--logit-mask does not work with encoder-decoders")
    size = lm.get_output_embeddings().weight.shape[0]
    with suppress(TypeError, ValueError, RuntimeError):
        logit_mask = torch.as_tensor(logit_mask)
    if getattr(logit_mask, "dtype", None) != torch.bool or logit_mask.shape != (size, size):
        raise InputError(f"--logit-mask must be bool of shape {[size, size]}, the size of the model's vocabulary")
    return logit_mask


def encode(data, lm, tokenizer, args):
    """Tokenises all rows, and makes a tensor (V, V) of the mask: data gets episodes, of each evaluation set too, and
    queries (ids of prompts)."""
    data.logit_mask = check_logit_mask(data.logit_mask, lm)
    encoder = lm.config.is_encoder_decoder
    limit = max_positions(lm)
    data.max_length = min(args.max_length, limit)
    data.eval_report = ""
    data.episodes, data.report = encode_episodes(data.rows, tokenizer, data.max_length, "--dataset", encoder)
    for name, rows in data.eval_sets.items():
        episodes, report = encode_episodes(rows, tokenizer, data.max_length, set_flag(name), encoder)
        data.eval_sets[name] = episodes
        data.eval_report += f"\n{set_flag(name)}: {report}"
    if data.metric:
        data.prompts, data.queries = encode_prompts(
            data.prompts, tokenizer, args.max_new_tokens, limit, "--eval-prompts", encoder=encoder
        )


def normalize_rewards(data, args):
    """Scales all rewards by the returns of the training episodes, unless --no-normalize-rewards is given."""
    returns = [sum(episode.rewards) for episode in data.episodes]
    mean = fmean(returns)
    std = stdev(returns) if len(returns) > 1 else 0.0
    data.report += f"; return {mean:.4g} +- {std:.4g}"
    if not args.normalize_rewards:
        return
    all_end = all(episode.done for episode in data.episodes)
    data.report += f", scaled to {'0' if all_end else 'any mean'} +- 1"
    if std <= 1e-9 * max(map(abs, returns)):  # which is rounding
        std = 1.0
        equal = "all returns are equal (rows that are cut lose theirs)"
        data.report += f"\nwarning: {equal}: little can be learned beyond imitation"
    for episode in itertools.chain(data.episodes, *data.eval_sets.values()):
        episode.rewards = [reward / std for reward in episode.rewards]
        if all_end and episode.done:  # the mean belongs to the end
            episode.rewards[-1] -= mean / std


def summary(run, tokenizer, data):
    """What is trained, and on which data: {name: text} for `Run.tell`."""
    args = run.args
    lengths = sorted(len(episode.ids) for episode in data.episodes)
    tokens = f"tokens per row: median {lengths[len(lengths) // 2]}, longest {lengths[-1]}, at most {data.max_length}"
    tell_untrained_end(tokenizer, [episode.ids for episode in data.episodes if episode.done])
    first_row = data.episodes[0]
    is_action = [place in first_row.actions for place in range(len(first_row.ids))]
    syncs = run.total_steps // args.steps_for_target_q_sync
    taken_over = 1 - (1 - args.polyak_alpha) ** syncs
    return {
        "data": f"{data.report}{data.eval_report}\n{tokens}",
        "first row": f"{marked(tokenizer, first_row.ids, is_action)[:800]}   [not actions]; its return, as used: "
        f"{sum(first_row.rewards):.4g}",
        "targets": f"move {taken_over:.0%} of the way to Q",
        "steps": f"{run.total_steps} of {args.batch_size} rows, {args.micro_batch_size} per forward pass",
    }


def usage(metric, args):
    """Code that loads the exported model and samples from it with the beta of the headline metric, or if there is none,
    with the first beta above 0."""
    _, evaluated, beta = metric.rpartition("@beta=")
    reason = "the best beta by the last evaluation"
    if not evaluated:
        beta = next((f"{beta:g}" for beta in args.betas if beta > 0), "0")
        reason = "no beta was evaluated"
    options = f"beta={beta}, top_k={args.top_k}, top_p={args.top_p:g}"
    return GUIDED_USAGE.replace("OPTIONS", options).replace("REASON", reason)


GUIDED_USAGE = """from transformers import AutoTokenizer; from algos.ilql import PolicyWithQ  # of this repository
tokenizer, policy = AutoTokenizer.from_pretrained({folder!r}), PolicyWithQ.load({folder!r})
inputs = tokenizer({prompt!r}, add_special_tokens=False, return_tensors='pt')
with policy.guided(OPTIONS):  # REASON
    ids = policy.lm.generate(**inputs, do_sample=True, top_k=0, max_new_tokens={max_new_tokens})
print(tokenizer.decode(ids[0]))"""


# ---- Main ------------------------------------------------------------------------------------------------------------

IN_STATUS = ["losses/loss", "losses/loss_q", "losses/loss_v"]


@closes_run
def main(args):
    """Trains. Returns the newest value of every metric, and the run directory."""
    path = build(args.model, "--model")
    data = read_data(args.dataset, args.eval_dataset, eval_prompts=args.eval_prompts, metric=args.metric)
    data.logit_mask = build(args.logit_mask, "--logit-mask")
    run = Run(args, __file__)
    if run.finished:
        return run.result()
    accelerator = run.accelerator
    device = accelerator.device
    policy, tokenizer = load(args, path, device)
    lm = policy.lm
    encode(data, lm, tokenizer, args)
    run.check_inputs(data, model=lm)
    normalize_rewards(data, args)
    optimizer = make_optimizer(policy, args)
    model = prepare(accelerator, policy, optimizer)
    export = partial(run.export, lm, tokenizer, heads={HEADS_FILE: policy.head_weights()})
    lengths = [len(episode.ids) for episode in data.episodes]
    total_steps = args.total_steps or math.ceil(args.epochs * len(lengths) / args.batch_size)
    evaluates = bool(data.eval_sets or data.metric)
    run.begin(model, optimizer, lm, total_steps, ["losses/loss", *IN_STATUS], evaluates=evaluates)
    run.tell(policy, summary(run, tokenizer, data))
    if run.evaluation_due(run.first_step):
        run.log_evaluation(run.first_step, evaluate(run, run.first_step, model, tokenizer, data, args))
        run.save(run.first_step, export)

    for step in run.iterations():
        model.train()
        # 1. a batch of rows, in keyed random order
        rows = draw_rows(args.seed, len(lengths), (step - 1) * args.batch_size, args.batch_size)
        if args.check:
            rows = longest_rows(lengths, args.batch_size)
        count = sum(len(data.episodes[row].actions) for row in rows)  # of all processes
        # 2. losses of Q, V, CQL and imitation, means over the actions, and the gradient of their weighted sum
        sums = defaultdict(float)
        micro_batches = split_rows(accelerator, rows, lengths, False, args.micro_batch_size)
        for own_rows in accumulate(accelerator, model, micro_batches):
            episodes = [data.episodes[row] for row in own_rows]
            inputs = Batch.of(episodes, tokenizer.pad_token_id, device, lm.config.is_encoder_decoder)
            terms = model(inputs, args)
            # data-parallel training averages gradients over the processes: multiply by their number
            accelerator.backward(terms["loss"].sum() * accelerator.num_processes / count)
            for name, values in terms.items():
                sums[name] += values.detach().double().sum()
        metrics = loss_metrics(reduce_sums(accelerator, sums), count)
        # 3. a step of AdamW
        loss = metrics["losses/loss"]
        grad_norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm or math.inf).item()
        require_finite(step, f"rows {rows}", loss=loss, gradient_norm=grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(group["peak_lr"], step - 1, total_steps, args)
        optimizer.step()
        optimizer.zero_grad()
        # 4. Q^ <- Q^ + alpha (Q - Q^)
        if step % args.steps_for_target_q_sync == 0:
            polyak_update(policy.target_q_heads, policy.q_heads, args.polyak_alpha)
        run.lap("update")
        # 5. log, evaluate, save
        metrics |= {
            "target/syncs": step // args.steps_for_target_q_sync,
            "tokens/actions": count,
            "train/epoch": step * args.batch_size / len(lengths),
            "optim/lr": optimizer.param_groups[0]["lr"],
            "optim/grad_norm": grad_norm,
        }
        run.log(step, metrics, tokens=sum(lengths[row] for row in rows))
        if run.evaluation_due(step):
            run.log_evaluation(step, evaluate(run, step, model, tokenizer, data, args))
        run.save(step, export)

    first = data.episodes[0]
    prompt = tokenizer.decode(first.ids[: first.actions[0]])
    return run.finish(export, prompt, usage(run.headline, args))


if __name__ == "__main__":
    cli(Args, main, task=TASK)
