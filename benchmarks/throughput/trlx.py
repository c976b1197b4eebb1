"""ILQL beside the structure of trlX's step, which is re-implemented here: trlX itself is no package of the registry and
needs libraries of 2023. `TrlxStructure` does the work of a step in the way that trlX does it, in this file's own words.

walks  a step of 100 rows of the random walks task (6 layers, width 144, vocabulary 25)
gpt2   a step of 8 rows of 16 to 64 tokens on the model of language.py
"""

import copy
import os
import time
from functools import reduce

import torch
from language import END, LR, SHAPE, VOCABULARY, forward_flops, text
from measurement import column, figures, short_run
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from algos import ilql  # found by way of measurement
from benchmarks.tasks import randomwalks
from common import models
from common.launch import fast_cpu_matmul
from common.seeding import rng, stream_rows

# ---- Workloads -------------------------------------------------------------------------------------------------------

STEPS = int(os.environ.get("STEPS", 4))  # of a process on gpt2, the first not counted; on the walks ten times as many
SHORTEST, LONGEST, ROWS = 16, 64, 128
SEED = 1
WORKLOADS = {  # steps, of which not counted, rows of a step, learning rate, shape
    "walks": (10 * STEPS, 5, 100, 2e-4, (6, 144, 25)),
    "gpt2": (STEPS, 1, 8, LR, SHAPE),
}


def rows(workload):
    """The rows: walks with their optimality, or texts of whole words whose two lengths are log-normal where a row has
    16 to 64 tokens with the end token, and whose reward is normal."""
    if workload == "walks":
        return randomwalks.rewarded()
    draws = rng(SEED, "lengths").lognormal((2.2, 3.2), (0.5, 0.5), (10 * ROWS, 2)).round().astype(int)
    whole = draws.sum(1) + 1
    kept = draws[(draws.min(1) >= 2) & (whole >= SHORTEST) & (whole <= LONGEST)][:ROWS].tolist()
    rewards = rng(SEED, "rewards").standard_normal(ROWS).tolist()
    found = []
    for row, ((prompt, output), reward) in enumerate(zip(kept, rewards, strict=True)):
        ids = rng(SEED, "ids", row).integers(END + 1, VOCABULARY, prompt + output)
        found.append({"prompt": text(ids[:prompt]), "completion": f" {text(ids[prompt:])}", "reward": reward})
    return found


def order(workload):
    """[indices of the rows of a step], one for each step, as algos/ilql.py draws them."""
    steps, _, batch, *_ = WORKLOADS[workload]
    size = len(rows(workload))
    return [stream_rows(SEED, "data", size, step * batch, batch) for step in range(steps)]


def settings(workload, flags, model):
    """Flags of algos/ilql.py: the hyperparameters of trlX's random walks, a constant learning rate, no clipping."""
    steps, _, batch, lr, _ = WORKLOADS[workload]
    fixed = {"max_grad_norm": 0.0, "lr_schedule": "constant", "warmup_steps": 0, "adam_betas": (0.9, 0.95)}
    fixed |= {"gamma": 0.99, "tau": 0.8, "cql_scale": 0.1, "awac_scale": 1.0, "awac_beta": 0.0, "two_qs": True}
    fixed |= {"polyak_alpha": 0.1, "steps_for_target_q_sync": 5, "attn_implementation": "eager"}
    fixed |= {"model": str(model), "dataset": rows(workload), "max_length": LONGEST, "seed": SEED}
    if workload == "walks":
        fixed["model"] = randomwalks.untrained_model()
    return fixed | {"lr": lr, "batch_size": batch, "total_steps": steps, "micro_batch_size": batch} | flags


def load(workload, model):
    """(model, rows as algos/ilql.py encodes them, Args), the rewards scaled as both systems do."""
    args = ilql.Args(**settings(workload, {}, model))
    lm, tokenizer = models.load_model(args, args.model)
    episodes, _ = ilql.encode_episodes(args.dataset, tokenizer, LONGEST, "rows")
    assert len(episodes) == len(args.dataset)
    ilql.normalize_rewards(ilql.Data(args.dataset, {}, [], None, None, episodes=episodes), args)
    return lm, episodes, args


def useful_flops(episodes, shape):
    """Floating-point operations of a step that cannot be left out: no padding, nothing computed twice; no forward of
    the last token of a row, which ended; the output layer, V, both Q and the first layer of both targets at actions."""
    _, width, vocabulary = shape
    first = 2 * width**2  # weights in the first layer of a head
    total = 0
    for episode in episodes:
        total += 3 * forward_flops(len(episode.ids) - 1, len(episode.actions), shape)
        heads = 6 * (first + 2 * width) + 2 * 6 * (first + 2 * width * vocabulary) + 2 * 2 * first
        total += heads * len(episode.actions)
    return total


# ---- The peer --------------------------------------------------------------------------------------------------------


def collate(episodes):
    """{name: tensor padded at the right with zeros}: tokens, the place before each action, these and the last place,
    rewards of the actions, and 1 for every state but the last."""
    names = ("ids", "mask", "actions_ixs", "states_ixs", "rewards", "dones")
    columns = [[] for _ in names]
    for episode in episodes:
        before = [place - 1 for place in episode.actions]
        states, alive = [*before, len(episode.ids) - 1], [1] * len(before) + [0]
        found = (episode.ids, [1] * len(episode.ids), before, states, episode.rewards, alive)
        for values, value in zip(columns, found, strict=True):
            values.append(torch.tensor(value))
    return {name: pad_sequence(values, batch_first=True) for name, values in zip(names, columns, strict=True)}


def select(x, places):
    """x (B, T, D) at places (B, N): (B, N, D)."""
    return x.gather(1, places[..., None].expand(-1, -1, x.shape[-1]))


def statistics_of(x, mask, n):
    """Mean, smallest, largest and standard deviation where mask is 1, each fetched from the device."""
    center = (x * mask).sum() / n
    least, most = torch.where(mask > 0, x, torch.inf).min(), torch.where(mask > 0, x, -torch.inf).max()
    spread = (((x - center) * mask).square().sum() / n).sqrt()
    return {name: value.item() for name, value in dict(mean=center, min=least, max=most, std=spread).items()}


class TrlxStructure(nn.Module):
    """The work of an ILQL step as trlX does it: all logits at every position, online and target Q over the whole
    vocabulary at the padded actions, of which the taken ones are gathered afterwards; everything in float32."""

    def __init__(self, lm, weights):
        super().__init__()
        self.lm, (vocabulary, width) = lm, lm.get_output_embeddings().weight.shape

        def head(size):
            return nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, size))

        with torch.device("meta"):
            self.v_head, self.q_heads = head(1), nn.ModuleList([head(vocabulary), head(vocabulary)])
            self.target_q_heads = copy.deepcopy(self.q_heads).requires_grad_(False)
        assert not self.load_state_dict(weights, strict=False, assign=True).unexpected_keys

    def forward(self, batch):
        output = self.lm(
            input_ids=batch["ids"], attention_mask=batch["mask"], output_hidden_states=True, use_cache=False
        )
        hidden = output.hidden_states[-1]
        at_actions, at_states = select(hidden, batch["actions_ixs"]), select(hidden, batch["states_ixs"])
        with torch.no_grad():
            target_qs = [head(at_actions) for head in self.target_q_heads]
        qs, values = [head(at_actions) for head in self.q_heads], self.v_head(at_states)[..., 0]
        return output.logits, qs, target_qs, values

    def losses(self, batch, args):
        """({name: loss}, statistics): means over the actions of this batch."""
        logits, qs, target_qs, values = self(batch)
        mask, dones = batch["dones"][:, :-1], batch["dones"][:, 1:]
        n, vocabulary = mask.sum().clamp(min=1), logits.shape[-1]
        actions = batch["ids"][:, 1:].gather(1, batch["actions_ixs"])[..., None]
        q = [x.gather(-1, actions)[..., 0] for x in qs]
        target_q = reduce(torch.minimum, [x.gather(-1, actions)[..., 0] for x in target_qs])
        v, next_v = values[:, :-1], values[:, 1:].detach()
        wanted = batch["rewards"] + args.gamma * next_v * dones

        def average(x):
            return (x * mask).sum() / n

        def cross_entropy(x):
            nll = F.cross_entropy(x.reshape(-1, vocabulary), actions.reshape(-1), reduction="none")
            return nll.view(mask.shape)

        gap = target_q - v
        weight = (args.awac_beta * gap.detach()).exp()
        found = {
            "loss_q": sum(average((x - wanted).square()) for x in q),
            "loss_v": average(torch.where(gap >= 0, args.tau, 1 - args.tau) * gap.square()),
            "loss_cql": sum(average(cross_entropy(x)) for x in qs),
            "loss_awac": average(cross_entropy(select(logits, batch["actions_ixs"])) * weight),
        }
        loss = found["loss_q"] + found["loss_v"] + args.cql_scale * found["loss_cql"]
        found = {"loss": loss + args.awac_scale * found["loss_awac"]} | found
        with torch.no_grad():
            observed = {"values": v, "awac_weight": weight} | {f"qvalues/{i}": x for i, x in enumerate(q)}
            stats = {name: statistics_of(x, mask, n) for name, x in observed.items()}
        return found, stats | {name: value.item() for name, value in found.items()}


def build_peer(lm, args, same_flags):
    """The peer with the weights with which algos/ilql.py starts, and its optimizer."""
    if same_flags:
        fast_cpu_matmul()
    else:
        lm.set_attn_implementation("sdpa")
    peer = TrlxStructure(lm, ilql.PolicyWithQ(lm, True, SEED).head_weights())
    weights = [weight for weight in peer.parameters() if weight.requires_grad]
    options = {"lr": args.lr, "betas": args.adam_betas, "eps": args.adam_eps, "weight_decay": 0.0}
    return peer, torch.optim.AdamW(weights, **options | ({"fused": True} if same_flags else {}))


def peer_steps(workload, same_flags, model):
    """(seconds, losses and norms of the gradients) of every step."""
    lm, episodes, args = load(workload, model)
    peer, optimizer = build_peer(lm, args, same_flags)
    seconds = []
    losses = []
    grad_norms = []
    for step, drawn in enumerate(order(workload), 1):
        begun = time.perf_counter()
        found, stats = peer.losses(collate([episodes[row] for row in drawn]), args)
        found["loss"].backward()
        seconds.append(time.perf_counter() - begun)
        if step == 1:
            grads = [weight.grad for weight in peer.parameters() if weight.grad is not None]
            grad_norms.append(nn.utils.get_total_norm(grads).item())
            del grads
        begun = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        if step % args.steps_for_target_q_sync == 0:
            with torch.no_grad():
                for slow, fast in zip(peer.target_q_heads.parameters(), peer.q_heads.parameters(), strict=True):
                    slow.copy_(args.polyak_alpha * fast + (1 - args.polyak_alpha) * slow)
        seconds[-1] += time.perf_counter() - begun
        losses.append(stats["loss"])
    return seconds, losses, grad_norms


# ---- Measurement -----------------------------------------------------------------------------------------------------


def our_steps(workload, flags, model):
    """The same of a short run of algos/ilql.py."""
    steps = short_run(ilql, **settings(workload, flags, model))
    return [column(steps, key) for key in ("perf/seconds_update", "losses/loss", "optim/grad_norm")]


def measure(algorithm, side, model):
    """(columns, useful GFLOP/s) of a run of either system."""
    workload = side.partition("-")[0]
    _, skipped, *_, shape = WORKLOADS[workload]
    if "trlx" in side:
        seconds, losses, grad_norms = peer_steps(workload, side.endswith("same-flags"), model)
    else:
        flags = {"mixed_precision": "bf16"} if side.endswith("bf16") else {}
        seconds, losses, grad_norms = our_steps(workload, flags, model)
    _, episodes, _ = load(workload, model)
    flops = [useful_flops([episodes[row] for row in step], shape) for step in order(workload)]
    return figures(flops, seconds, skipped, losses, grad_norms)
