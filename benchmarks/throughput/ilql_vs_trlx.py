"""Throughput and memory of algos/ilql.py on a CPU, beside the structure of trlX's ILQL step, re-implemented here.

trlX itself is no package of the registry and needs libraries of 2023, so the peer, `trlx_structure`, does the work of a
step in the way that trlX does it, in this file's own words (`TrlxStructure`). Workloads:

    walks   a step of 100 rows of the random walks task (6 layers, width 144, vocabulary 25)
    gpt2    a step of 8 rows of 16 to 64 tokens on the model of ppo_gpt2_small.py (vocabulary 50257)
    memory  forward and backward of 32 such rows, to compare the peak memory of the losses

    bash benchmarks/throughput/run_ilql.sh    # on a quiet machine
"""

import copy
import os
import time
from functools import reduce
from statistics import mean, median

import torch
from measurement import keep_freed_memory, main, short_run
from ppo_gpt2_small import END, LR, SHAPE, VOCABULARY, forward_flops, prepare
from tables import agreement, by_mode, first_of, mode_table, precision, provenance, ratios, spread
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from algos import ilql  # found by way of measurement
from benchmarks.tasks import randomwalks
from common import models
from common.launch import fast_cpu_matmul
from common.seeding import rng, stream_rows

# ---- Workloads -------------------------------------------------------------------------------------------------------

STEPS = int(os.environ.get("STEPS", 4))  # of a process on gpt2, the first printed and not counted
WALK_STEPS, WALK_SKIPPED, SKIPPED = 10 * STEPS, 5, 1
WALK_BATCH, BATCH, MEMORY_BATCH = 100, 8, 32
SHORTEST, LONGEST, ROWS = 16, 64, 128
SEED, WALK_LR, BETAS = 1, 2e-4, (0.9, 0.95)
WORKLOADS = {  # steps, of which not counted, rows of a step, learning rate
    "walks": (WALK_STEPS, WALK_SKIPPED, WALK_BATCH, WALK_LR),
    "gpt2": (STEPS, SKIPPED, BATCH, LR),
    "memory": (0, 0, MEMORY_BATCH, LR),
}
SHAPES = {"walks": (6, 144, 25), "gpt2": SHAPE, "memory": SHAPE}  # that of randomwalks.untrained_model

_BF16 = {"mixed_precision": "bf16"}
OURS = {  # modes of algos/ilql.py: flags, and what they show
    "walks-fp32": ({}, "matmul precision medium, eager attention, fused AdamW; one forward of 100 rows"),
    "walks-bf16": (_BF16, "`--mixed-precision bf16`: weights, heads and optimizer fp32"),
    "gpt2-fp32": ({}, "one forward of 8 rows"),
    "gpt2-bf16": (_BF16, "`--mixed-precision bf16`: weights, heads and optimizer fp32"),
    "memory-fp32": ({}, "forward and backward of 32 rows at once"),
    "memory-bf16": (_BF16, "the same with `--mixed-precision bf16`"),
}
_DEFAULTS = "torch's defaults: matmul precision highest, sdpa attention, AdamW not fused"
_SAME = "with our switches of the process: precision medium, eager, fused AdamW, keeping freed memory"
PEER = {  # modes of the peer: our switches, and what they are
    "walks-trlx-defaults": (False, _DEFAULTS),
    "walks-trlx-same-flags": (True, _SAME),
    "gpt2-trlx-defaults": (False, _DEFAULTS),
    "gpt2-trlx-same-flags": (True, _SAME),
    "memory-trlx-defaults": (False, "forward and backward of 32 rows at once"),
}
SYSTEMS = dict.fromkeys(OURS, "plainrl") | dict.fromkeys(PEER, "trlx_structure")
SETTINGS = ("trlx-defaults", "trlx-same-flags")
COMPARISONS = [  # in the first table: name, our mode, modes of the peer (which is in float32), goal
    ("ilql, GPT-2 small", "gpt2-fp32", ["gpt2-trlx-defaults", "gpt2-trlx-same-flags"], 2.5),
    ("ilql, GPT-2 small", "gpt2-bf16", ["gpt2-trlx-defaults", "gpt2-trlx-same-flags"], None),
    ("ilql, random walks", "walks-fp32", ["walks-trlx-defaults", "walks-trlx-same-flags"], 2.5),
    ("ilql, random walks", "walks-bf16", ["walks-trlx-defaults", "walks-trlx-same-flags"], None),
]
MEMORY_GOAL = 20
LOSSES = ("loss", "loss_q", "loss_v", "loss_cql", "loss_awac")


def rows(workload):
    """The rows: walks with their optimality, or texts of whole words whose two lengths are log-normal where a row has
    16 to 64 tokens with the end token, and whose reward is normal."""
    if workload == "walks":
        return randomwalks.rewarded()
    draws = rng(SEED, "lengths").lognormal((2.2, 3.2), (0.5, 0.5), (10 * ROWS, 2)).round().astype(int)
    whole, found = draws.sum(1) + 1, []
    kept = draws[(draws.min(1) >= 2) & (whole >= SHORTEST) & (whole <= LONGEST)][:ROWS].tolist()
    rewards = rng(SEED, "rewards").standard_normal(ROWS).tolist()
    for row, ((prompt, output), reward) in enumerate(zip(kept, rewards, strict=True)):
        words = [f"w{i}" for i in rng(SEED, "ids", row).integers(END + 1, VOCABULARY, prompt + output)]
        texts = " ".join(words[:prompt]), "".join(f" {word}" for word in words[prompt:])
        found.append({"prompt": texts[0], "completion": texts[1], "reward": reward})
    return found


def order(workload):
    """[indices of the rows of a step], one for each step, as algos/ilql.py draws them."""
    steps, _, batch, _ = WORKLOADS[workload]
    size, steps = len(rows(workload)), max(1, steps)
    return [stream_rows(SEED, "data", size, step * batch, batch) for step in range(steps)]


def settings(workload, flags, model):
    """Flags of algos/ilql.py: the hyperparameters of trlX's random walks, a constant learning rate, no clipping."""
    steps, _, batch, lr = WORKLOADS[workload]
    fixed = {"max_grad_norm": 0.0, "lr_schedule": "constant", "warmup_steps": 0, "adam_betas": BETAS, "two_qs": True}
    fixed |= {"gamma": 0.99, "tau": 0.8, "cql_scale": 0.1, "awac_scale": 1.0, "awac_beta": 0.0}
    fixed |= {"polyak_alpha": 0.1, "steps_for_target_q_sync": 5, "attn_implementation": "eager"}
    fixed |= {"model": model, "dataset": rows(workload), "max_length": LONGEST, "seed": SEED, "lr": lr}
    return fixed | {"batch_size": batch, "total_steps": max(1, steps), "micro_batch_size": batch} | flags


def load(workload, model):
    """(model, tokenizer, rows as algos/ilql.py encodes them, Args), the rewards scaled as both systems do."""
    path = randomwalks.untrained_model() if workload == "walks" else str(model)
    args = ilql.Args(**settings(workload, {}, path))
    lm, tokenizer = models.load_model(args, path)
    episodes, _ = ilql.encode_episodes(args.dataset, tokenizer, LONGEST, "rows")
    assert len(episodes) == len(args.dataset)
    ilql.normalize_rewards(ilql.Data(args.dataset, {}, [], None, None, episodes=episodes), args)
    return lm, tokenizer, episodes, args


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
        for column, value in zip(columns, found, strict=True):
            column.append(torch.tensor(value))
    return {name: pad_sequence(column, batch_first=True) for name, column in zip(names, columns, strict=True)}


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
        keep_freed_memory()
    else:
        lm.set_attn_implementation("sdpa")
    peer = TrlxStructure(lm, ilql.PolicyWithQ(lm, True, SEED).head_weights())
    weights = [weight for weight in peer.parameters() if weight.requires_grad]
    options = {"lr": args.lr, "betas": args.adam_betas, "eps": args.adam_eps, "weight_decay": 0.0}
    return peer, torch.optim.AdamW(weights, **options | ({"fused": True} if same_flags else {}))


def peer_steps(workload, same_flags, model):
    """(seconds of every step, {name: loss} of every step, norm of the first gradient)."""
    lm, _, episodes, args = load(workload, model)
    peer, optimizer = build_peer(lm, args, same_flags)
    seconds, losses, grad_norm = [], [], None
    for step, drawn in enumerate(order(workload), 1):
        begun = time.perf_counter()
        found, stats = peer.losses(collate([episodes[row] for row in drawn]), args)
        found["loss"].backward()
        seconds.append(time.perf_counter() - begun)
        if step == 1:
            grads = [weight.grad for weight in peer.parameters() if weight.grad is not None]
            grad_norm = nn.utils.get_total_norm(grads).item()
            del grads
        begun = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        if step % args.steps_for_target_q_sync == 0:
            with torch.no_grad():
                for slow, fast in zip(peer.target_q_heads.parameters(), peer.q_heads.parameters(), strict=True):
                    slow.copy_(args.polyak_alpha * fast + (1 - args.polyak_alpha) * slow)
        seconds[-1] += time.perf_counter() - begun
        losses.append({name: stats[name] for name in LOSSES})
    return seconds, losses, grad_norm


# ---- Measurement -----------------------------------------------------------------------------------------------------


def our_steps(workload, name, flags, model):
    """The same of a short run of algos/ilql.py."""
    path = randomwalks.untrained_model() if workload == "walks" else str(model)
    perf, metrics = short_run(ilql, name, **settings(workload, flags, path))
    losses = [{name: line[f"losses/{name}"] for name in LOSSES} for line in metrics]
    return [line["perf/seconds_update"] for line in perf], losses, metrics[0]["optim/grad_norm"]


def figures(workload, model, seconds, losses, grad_norm, memory=("", "")):
    """Columns of the CSV file and useful GFLOP/s."""
    steps, skipped, batch, _ = WORKLOADS[workload]
    shape = SHAPES[workload]
    _, _, episodes, _ = load(workload, model)
    drawn = [[episodes[row] for row in step] for step in order(workload)]
    lengths = [[len(episode.ids) for episode in step] for step in drawn]
    counted, tokens = seconds[skipped:], sum(map(sum, lengths))
    print("  seconds", *(f"{s:.3f}" for s in seconds), f"(the first {skipped} are not counted)")
    print("  losses", *(f"{found['loss']:.4f}" for found in losses), flush=True)
    columns = {
        "seconds": f"{median(counted):.4f}" if counted else "", "seconds_first": f"{seconds[0]:.4f}" if steps else "",
        "counted": len(counted), "batch": batch,
        "rows_per_sec": f"{batch / median(counted):.2f}" if counted else "",
        "row_tokens": f"{tokens / len(drawn) / batch:.2f}",
        "row_actions": f"{mean(len(episode.actions) for step in drawn for episode in step):.2f}",
        "padding": f"{1 - tokens / sum(batch * max(step) for step in lengths):.4f}",
        "first_tokens": max(lengths[0]), "first_actions": max(len(episode.actions) for episode in drawn[0]),
        "losses": " ".join(f"{found['loss']:.6f}" for found in losses),
        "first": " ".join(f"{losses[0][name]:.6f}" for name in LOSSES), "grad_norm": f"{grad_norm:.6f}",
        "loss_mb": memory[0], "loss_gradients_mb": memory[1], "shape": "x".join(map(str, shape)),
    }  # fmt: skip
    flops = [useful_flops(step, shape) for step in drawn[skipped:]] if counted else []
    return columns, median(n / s for n, s in zip(flops, counted, strict=True)) / 1e9 if counted else 0.0


def measure(mode, model):
    """What record() stores of a run."""
    workload, _, name = mode.partition("-")
    if workload == "memory":
        return figures(workload, model, *measure_memory(mode, model))
    if mode in OURS:
        return figures(workload, model, *our_steps(workload, name, OURS[mode][0], model))
    return figures(workload, model, *peer_steps(workload, PEER[mode][0], model))


def loss_peak(lm, backward):
    """Bytes: the largest amount of memory that torch has allocated between the moment at which the transformer has
    returned its last hidden states and that at which their gradient is complete, above what it has at the former."""
    marks = "loss phase begins", "loss phase ends"

    def mark(name):
        with torch.profiler.record_function(name):
            pass

    def began(module, inputs, output):
        mark(marks[0])
        output.last_hidden_state.register_hook(lambda gradient: mark(marks[1]))

    hook = lm.base_model.register_forward_hook(began)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        backward()
    hook.remove()
    events = profiler.profiler.kineto_results.events()
    begin, end = (next(event.start_ns() for event in events if event.name() == name) for name in marks)
    sizes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    level = peak = 0
    for moment, size in sizes:
        if begin <= moment <= end:
            level += size
            peak = max(peak, level)
    return peak


def measure_memory(mode, model):
    """What figures() gets of forward and backward of a batch without optimizer: no seconds."""
    lm, tokenizer, episodes, args = load("memory", model)
    batch = [episodes[row] for row in order("memory")[0]]
    if mode in OURS:
        policy = ilql.PolicyWithQ(lm, args.two_qs, args.seed)
        assert policy.lm.plain_output
        batch = ilql.Batch.of(sorted(batch, key=lambda e: len(e.ids)), tokenizer.pad_token_id, "cpu")

        def losses():
            with torch.autocast("cpu", torch.bfloat16, enabled="bf16" in mode):
                terms = policy(batch, args)
            return {name: terms[name].sum() / batch.mask.sum() for name in LOSSES}
    else:
        policy, _ = build_peer(lm, args, PEER[mode][0])
        batch = collate(batch)

        def losses():
            return policy.losses(batch, args)[0]

    first = []

    def backward():
        found = losses()
        found["loss"].backward()
        first.append({name: value.item() for name, value in found.items()})

    trained = loss_peak(lm, backward)
    grads = [weight.grad for weight in policy.parameters() if weight.grad is not None]
    grad_norm = nn.utils.get_total_norm(grads).item()
    policy.zero_grad()
    output_layer = lm.get_output_embeddings()
    for weight in (w for head in (policy.v_head, policy.q_heads, output_layer) for w in head.parameters()):
        weight.requires_grad_(False)
    # where a weight is frozen, CPU kernels copy it for every row of a strided input: not so in training
    output_layer.forward = lambda x: F.linear(x.contiguous(), output_layer.weight)
    memory = [f"{peak / 2**20:.1f}" for peak in (loss_peak(lm, backward), trained)]
    return [], first[:1], grad_norm, memory


# ---- Page ------------------------------------------------------------------------------------------------------------

SECTION = """## ilql

`trlx_structure` is **not trlX's code**: it is this benchmark's re-implementation, in its own words, of the work that an
ILQL step of trlX does. trlX itself is no package of the registry and needs libraries of 2023, so it was not run for
this page. The only figures of trlX itself that are known are of a run before it, of which no records are kept: random
walks, 0.107 s a step of 100 rows, and 200 such steps in about 57 s with evaluations. They are not comparable with these
tables.

Random walks, {walks_shape}: {walks_batch} rows a step, of {walks_tokens} tokens on average, {walks_actions} of them
actions; {walks_padding} % of the positions are padding.

{walks}

GPT-2 small, {gpt2_shape}: {gpt2_batch} rows a step, of {SHORTEST} to {LONGEST} tokens, log-normal (mean {gpt2_tokens},
of which {gpt2_actions} are actions); {gpt2_padding} % of the positions are padding.

{gpt2}

Memory of the losses of {memory_batch} such rows at once. Goal, `memory-fp32`: {MEMORY_GOAL} times less than the peer;
measured {memory_times}.

{memory}

{notes}

- `step s`: median over the counted steps of a run (walks: {walks_counted} behind {WALK_SKIPPED} others, GPT-2 small:
  {gpt2_counted} behind {SKIPPED}), with the collation of the batch.
- `loss memory MB`: what torch has allocated at most between the moment at which the transformer has returned its last
  hidden states and that at which their gradient is complete, above the level at the former, from the allocations and
  releases that torch's profiler records. So weights, optimizer and activations of the transformer do not count. The
  weights of the heads and of the output layer are frozen in this pass. `with gradients MB`: they are trained, as in a
  step, so that their gradients and the buffers in which these are made count, too.
- Useful work: forward and backward without padding, no last token of a row, output layer and heads at actions only,
  targets only at the token taken.
- Both systems take the same rows in the same order, with AdamW of the same betas, a constant learning rate, no weight
  decay and no clipping (plainrl still computes the norm of the gradient, the peer does not). The peer is in float32:
  Hugging Face's model with all hidden states and the logits of every position; Q and target Q over the whole vocabulary
  at the padded actions, of which the taken ones are gathered; cross-entropies of full float32 logits; mean, smallest,
  largest and deviation of values and Q fetched every step; rows padded to the longest of the batch; targets
  synchronised every 5 steps. In its favour: no key-value cache is made, the targets' Q has no graph, and the targets
  follow by the step count (main of trlX rarely synchronises).

Did the runs do the same work? Largest relative differences in the first step (fp32: at most {TOLERANCE}; bf16 beside
fp32):

{same_work}

{provenance}
"""
TOLERANCE = 1e-4


def section(rows):
    """The text of the section, from the rows of results_ilql.csv."""
    runs = by_mode(rows)
    texts = {mode: text for mode, (_, text) in (OURS | PEER).items()}
    speed = {"seconds": ("step s", 3), "rows_per_sec": ("rows/s", 1), "peak_memory_mb": ("peak memory MB", 0)}
    speed |= {"fraction": ("fraction of GEMM peak", 3)}
    memory = {"loss_mb": ("loss memory MB", 0), "loss_gradients_mb": ("with gradients MB", 0)}
    memory |= {"peak_memory_mb": ("peak memory MB", 0)}
    fields = {"notes": []}
    groups = {}
    for workload in WORKLOADS:
        found = [row for row in rows if row["mode"].startswith(workload)]
        against = {f"times {name}": lambda mode, name=name: f"{workload_of(mode)}-{name}" for name in SETTINGS}
        against["times plainrl"] = lambda mode: f"{workload_of(mode)}-fp32"
        shown = speed
        column = "seconds"
        if workload == "memory":
            against = {"times less": lambda mode: "memory-trlx-defaults"}
            shown = memory
            column = "loss_mb"
        fields[workload], notes = mode_table(found, texts, shown, against, column)
        fields["notes"].append(notes)
        names = {"shape": "shape", "batch": "batch", "counted": "counted"}
        names |= {"tokens": "row_tokens", "actions": "row_actions"}
        fields |= {f"{workload}_{name}": found[0][column] for name, column in names.items()}
        fields[f"{workload}_padding"] = f"{100 * float(found[0]['padding']):.0f}"
        for kind in ("fp32", "bf16"):
            if any(precision(row["mode"]) == kind for row in found):
                groups[f"{workload} {kind}"] = [row for row in found if precision(row["mode"]) in ("fp32", kind)]
    figures = {}
    for place, name in enumerate(LOSSES):
        figures[name] = lambda row, place=place: float(row["first"].split()[place])
    figures["gradient norm"] = first_of("grad_norm")
    fields["notes"] = "\n".join(fields["notes"])
    return SECTION.format(
        **fields, provenance=provenance(rows), same_work=agreement(groups, figures, TOLERANCE),
        memory_times=spread(ratios(runs, "memory-fp32", "memory-trlx-defaults", "loss_mb"), 1),
        **{name: globals()[name] for name in "SHORTEST LONGEST WALK_SKIPPED SKIPPED TOLERANCE MEMORY_GOAL".split()},
    )  # fmt: skip


def workload_of(mode):
    """The entry of WORKLOADS that a mode is about."""
    return mode.partition("-")[0]


if __name__ == "__main__":
    main(__doc__, SYSTEMS, measure, prepare)
