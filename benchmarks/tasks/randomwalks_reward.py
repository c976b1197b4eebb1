"""A reward model of the random walks: a small GPT-2 with a score head that predicts the optimality of a text.

    python benchmarks/tasks/randomwalks_reward.py OUT_DIR          # two minutes on one CPU thread

It shows RL against a learned reward, `--reward OUT_DIR`, on a task where the true score is known. A reward model is
exploited wherever it is wrong, so this one learns from more than the data: a policy may try any string, and illegal
short cuts look best to a model that only knows legal walks. The loss is the mean squared error of the score at the last
token. Texts are padded on the right: GPT-2 counts its positions from the first token of the row.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
from transformers import GPT2Config, GPT2ForSequenceClassification

from benchmarks.tasks.randomwalks import CONTEXT, GOAL, LETTERS, MAX_NODES, graph, optimality, tokenizer
from common.seeding import fast_cpu_matmul, rng, seed_libraries

STEPS, BATCH_SIZE, LR = 2000, 256, 2e-3

# ---- Strings --------------------------------------------------------------------------------------------------------


def walk(draw, graph_seed, jumps=0.0, greedy=0.0, stop=1.0):
    """A string from a random start. Each step is uniform over the letters with probability `jumps`, else an edge: of a
    shortest way with probability `greedy`, else any. At the goal it ends with probability `stop`, else it jumps on."""
    adjacency, shortest = graph(graph_seed).adjacency, {GOAL: 1, **graph(graph_seed).shortest}
    sample = LETTERS[draw.integers(1, len(LETTERS))]
    while len(sample) < MAX_NODES and (GOAL not in sample or draw.random() > stop):
        letters = [LETTERS[j] for j in np.flatnonzero(adjacency[LETTERS.index(sample[-1])])]
        if GOAL in sample or draw.random() < jumps:
            letters = LETTERS
        elif draw.random() < greedy:
            letters = [min(letters, key=shortest.get)]
        sample += letters[draw.integers(len(letters))]
    return sample


def edited(draw, graph_seed):
    """A legal walk after 1 or 2 edits behind its start: a letter removed, inserted, replaced, or (1 in 4) none."""
    sample = walk(draw, graph_seed, greedy=draw.random())
    for _ in range(draw.integers(1, 3)):
        i, letter = draw.integers(1, len(sample) + 1), LETTERS[draw.integers(len(LETTERS))]
        sample = sample[:i] + letter * draw.integers(2) + sample[i + draw.integers(2) :]
    return sample[:MAX_NODES]


def spliced(draw, graph_seed):
    """The first nodes of one legal walk, then another one: a single step that is mostly no edge."""
    head, tail = (walk(draw, graph_seed, greedy=draw.random()) for _ in range(2))
    return (head[: draw.integers(1, len(head))] + tail)[:MAX_NODES]


def shortcut(draw, graph_seed):
    """A legal walk up to some node before the goal, and then the goal: mostly illegal, and legal ones look alike."""
    sample = walk(draw, graph_seed, greedy=draw.random())
    return sample[: draw.integers(1, len(sample))] + GOAL


KINDS = {  # name: function(draw, graph_seed) -> string
    "data": walk,
    "short": lambda *key: walk(*key, greedy=0.8, stop=0.9),
    "jumps": lambda draw, graph_seed: walk(draw, graph_seed, jumps=0.15, greedy=draw.random(), stop=0.9),
    "edited": edited,
    "spliced": spliced,
    "shortcut": shortcut,
    "noise": lambda draw, graph_seed: walk(draw, graph_seed, jumps=1.0, stop=0.5)[: draw.integers(1, MAX_NODES + 1)],
}
MIX = ["data", "short", "jumps", "edited", "edited", "spliced", "spliced"] * 2 + ["shortcut", "noise"]  # of a batch


def batch(draw, kinds, graph_seed, letters):
    """A string of each of the kinds: the model's inputs and `labels` (B,), its optimality.

    Most have the end token. A policy's response of 9 letters has none, and a special token that it samples leaves a
    shorter text without one.
    """
    samples = [KINDS[kind](draw, graph_seed) for kind in kinds]
    ended = [draw.random() < (0.5 if len(sample) == MAX_NODES else 0.95) for sample in samples]
    texts = [sample + letters.eos_token * end for sample, end in zip(samples, ended, strict=True)]
    labels = torch.tensor([optimality(sample, graph_seed) for sample in samples])
    return {**letters(texts, padding=True, return_tensors="pt"), "labels": labels}


# ---- Training -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def errors(model, batches):
    """kind -> |score - optimality| of each string, (B,)."""
    return {kind: (model(**inputs).logits[:, 0] - inputs["labels"]).abs() for kind, inputs in batches.items()}


def main(out_dir, seed, graph_seed):
    Path(out_dir).mkdir(parents=True, exist_ok=True)  # a bad path fails before the training
    seed_libraries(seed)
    fast_cpu_matmul()
    letters = tokenizer()
    letters.padding_side = "right"
    config = GPT2Config(
        vocab_size=len(letters), n_positions=CONTEXT, n_embd=64, n_layer=3, n_head=4, num_labels=1, use_cache=False,
        activation_function="relu", embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0, bos_token_id=letters.bos_token_id,
        eos_token_id=letters.eos_token_id, pad_token_id=letters.pad_token_id,
        initializer_range=0.1,  # with the default, 0.02, the errors are twice as large after as many steps
    )  # fmt: skip
    model = GPT2ForSequenceClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), LR, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=STEPS + 1, pct_start=0.1)

    mix, start = MIX * (BATCH_SIZE // len(MIX)), time.perf_counter()
    held_out = {kind: batch(rng(seed, f"held out {kind}"), [kind] * 1000, graph_seed, letters) for kind in KINDS}
    for step in range(1, STEPS + 1):
        loss = model(**batch(rng(seed, "train", step), mix, graph_seed, letters)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 200 == 0:
            means = " ".join(f"{kind} {error.mean():.3f}" for kind, error in errors(model, held_out).items())
            print(f"{step}/{STEPS} | loss {loss:.5f} | error {means} | {time.perf_counter() - start:.0f} s", flush=True)

    print("\nheld-out   mean error   > 0.1   > 0.25")
    for kind, error in errors(model, held_out).items():
        shares = [(error > bound).float().mean() for bound in (0.1, 0.25)]
        print(f"{kind:10} {error.mean():10.4f} {shares[0]:7.1%} {shares[1]:8.1%}")
    model.save_pretrained(out_dir)
    letters.save_pretrained(out_dir)
    print(f"saved {out_dir}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out_dir", help="directory of the model and its tokenizer")
    parser.add_argument("--seed", type=int, default=1, help="seed of weights and strings")
    parser.add_argument("--graph-seed", type=int, default=1000, help="the graph of the task")
    main(**vars(parser.parse_args()))
