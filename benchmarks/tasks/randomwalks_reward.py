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
from common.launch import fast_cpu_matmul
from common.seeding import rng, seed_libraries

STEPS = 2000
BATCH_SIZE = 256
LR = 2e-3

# ---- Strings --------------------------------------------------------------------------------------------------------


def walk(draw, graph_seed, jumps=0.0, greedy=0.0, stop=1.0):
    """A string from a random start. Each step is uniform over the letters with probability `jumps`, else an edge: of a
    shortest way with probability `greedy`, else any. At the goal it ends with probability `stop`, else it jumps on."""
    adjacency = graph(graph_seed).adjacency
    shortest = {GOAL: 1, **graph(graph_seed).shortest}
    sample = LETTERS[draw.integers(1, len(LETTERS))]
    while len(sample) < MAX_NODES:
        if GOAL in sample and draw.random() <= stop:
            break
        if GOAL in sample or draw.random() < jumps:
            choices = LETTERS
        else:
            neighbours = np.flatnonzero(adjacency[LETTERS.index(sample[-1])])
            choices = [LETTERS[node] for node in neighbours]
            if draw.random() < greedy:
                choices = [min(choices, key=shortest.get)]
        sample += choices[draw.integers(len(choices))]
    return sample


def legal_walk(draw, graph_seed):
    """A walk along edges, greedy with a probability that is drawn too."""
    return walk(draw, graph_seed, greedy=draw.random())


def short(draw, graph_seed):
    """A walk along edges that is mostly greedy, and in 1 of 10 cases does not end at the goal."""
    return walk(draw, graph_seed, greedy=0.8, stop=0.9)


def jumping(draw, graph_seed):
    """A walk with some jumps, which in 1 of 10 cases does not end at the goal."""
    greedy = draw.random()
    return walk(draw, graph_seed, jumps=0.15, greedy=greedy, stop=0.9)


def edited(draw, graph_seed):
    """A legal walk after 1 or 2 edits behind its start: a letter removed, inserted, replaced, or (1 in 4) none."""
    sample = legal_walk(draw, graph_seed)
    for _ in range(draw.integers(1, 3)):
        place = draw.integers(1, len(sample) + 1)
        letter = LETTERS[draw.integers(len(LETTERS))]
        is_inserted = draw.integers(2) == 1
        is_removed = draw.integers(2) == 1
        head = sample[:place]
        tail = sample[place:]
        if is_inserted:
            head += letter
        if is_removed:
            tail = tail[1:]
        sample = head + tail
    return sample[:MAX_NODES]


def spliced(draw, graph_seed):
    """The first nodes of one legal walk, then another one: a single step that is mostly no edge."""
    head = legal_walk(draw, graph_seed)
    tail = legal_walk(draw, graph_seed)
    kept = draw.integers(1, len(head))
    sample = head[:kept] + tail
    return sample[:MAX_NODES]


def shortcut(draw, graph_seed):
    """A legal walk up to some node before the goal, and then the goal: mostly illegal, and legal ones look alike."""
    sample = legal_walk(draw, graph_seed)
    kept = draw.integers(1, len(sample))
    return sample[:kept] + GOAL


def noise(draw, graph_seed):
    """Random letters."""
    sample = walk(draw, graph_seed, jumps=1.0, stop=0.5)
    kept = draw.integers(1, MAX_NODES + 1)
    return sample[:kept]


KINDS = {  # name: function(draw, graph_seed) -> string
    "data": walk,
    "short": short,
    "jumps": jumping,
    "edited": edited,
    "spliced": spliced,
    "shortcut": shortcut,
    "noise": noise,
}
MIX = ["data", "short", "jumps", "edited", "edited", "spliced", "spliced"] * 2 + ["shortcut", "noise"]  # of a batch


def batch(draw, kinds, graph_seed, letter_tokenizer):
    """A string of each of the kinds: the model's inputs and `labels` (B,), its optimality.

    Most have the end token. A policy's response of 9 letters has none, and a special token that it samples leaves a
    shorter text without one.
    """
    samples = [KINDS[kind](draw, graph_seed) for kind in kinds]
    texts = []
    for sample in samples:
        text = sample
        end_rate = 0.5 if len(sample) == MAX_NODES else 0.95
        if draw.random() < end_rate:
            text += letter_tokenizer.eos_token
        texts.append(text)
    labels = torch.tensor([optimality(sample, graph_seed) for sample in samples])
    inputs = letter_tokenizer(texts, padding=True, return_tensors="pt")
    return {**inputs, "labels": labels}


# ---- Training -------------------------------------------------------------------------------------------------------


def untrained_model(letter_tokenizer):
    """The classifier with weights from torch's generator."""
    config = GPT2Config(
        vocab_size=len(letter_tokenizer),
        n_positions=CONTEXT,
        n_embd=64,
        n_layer=3,
        n_head=4,
        num_labels=1,
        use_cache=False,
        activation_function="relu",
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        bos_token_id=letter_tokenizer.bos_token_id,
        eos_token_id=letter_tokenizer.eos_token_id,
        pad_token_id=letter_tokenizer.pad_token_id,
        initializer_range=0.1,  # with the default, 0.02, the errors are twice as large after as many steps
    )
    return GPT2ForSequenceClassification(config)


@torch.no_grad()
def errors(model, batches):
    """kind -> |score - optimality| of each string, (B,)."""
    by_kind = {}
    for kind, inputs in batches.items():
        scores = model(**inputs).logits[:, 0]
        by_kind[kind] = (scores - inputs["labels"]).abs()
    return by_kind


def main(out_dir, seed, graph_seed):
    Path(out_dir).mkdir(parents=True, exist_ok=True)  # a bad path fails before the training
    seed_libraries(seed)
    fast_cpu_matmul()
    letter_tokenizer = tokenizer()
    letter_tokenizer.padding_side = "right"
    model = untrained_model(letter_tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), LR, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=STEPS + 1, pct_start=0.1)

    start = time.perf_counter()
    held_out = {}
    for kind in KINDS:
        draw = rng(seed, f"held out {kind}")
        held_out[kind] = batch(draw, [kind] * 1000, graph_seed, letter_tokenizer=letter_tokenizer)
    kinds = MIX * (BATCH_SIZE // len(MIX))
    for step in range(1, STEPS + 1):
        inputs = batch(rng(seed, "train", step), kinds, graph_seed, letter_tokenizer=letter_tokenizer)
        loss = model(**inputs).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 200 == 0:
            means = [f"{kind} {error.mean():.3f}" for kind, error in errors(model, held_out).items()]
            seconds = time.perf_counter() - start
            print(f"{step}/{STEPS} | loss {loss:.5f} | error {' '.join(means)} | {seconds:.0f} s", flush=True)

    print("\nheld-out   mean error   > 0.1   > 0.25")
    for kind, error in errors(model, held_out).items():
        large = (error > 0.1).float().mean()
        very_large = (error > 0.25).float().mean()
        print(f"{kind:10} {error.mean():10.4f} {large:7.1%} {very_large:8.1%}")
    model.save_pretrained(out_dir)
    letter_tokenizer.save_pretrained(out_dir)
    print(f"saved {out_dir}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out_dir", help="directory of the model and its tokenizer")
    parser.add_argument("--seed", type=int, default=1, help="seed of weights and strings")
    parser.add_argument("--graph-seed", type=int, default=1000, help="the graph of the task")
    main(**vars(parser.parse_args()))
