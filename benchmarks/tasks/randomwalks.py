"""Random walks: find the shortest way to a goal in a fixed random graph. A task with a known optimum, no download.

The graph has 21 nodes, the letters a..u; the goal is `a`. A sample is a string of letters, one per visited node: the
prompt is the start, the output is the rest of the walk. A walk along existing edges that arrives by a shortest path
scores 1.0; a walk that leaves the edges, never arrives, or arrives at the 10th node scores 0.0. The data are 1000
walks that choose each edge at random. Source: the random walks example of trlX (CarperAI/trlx,
examples/randomwalks), after Chen et al. 2021 (Decision Transformer, arXiv:2106.01345). Its walks are reproduced
letter by letter; its score is made total (any string has one) and unreachable goals are an error instead of NaN.

Levels for graph_seed=1000 (means of `optimality`): the data 0.3515 (what imitation reaches), the best walk per start
in the data 0.9917, the optimum 1.0. Start `m` has no optimal walk in the data (best: 0.8333), so learning from the
data alone must join pieces of several walks. A shortest walk has 3.65 nodes on average over the 20 starts.

Spec strings name its functions: `benchmarks/tasks/randomwalks.py:prompts:graph_seed=2`. Copying this file is how to
write your own task: keep the row function that your algorithm reads, `reward`, and perhaps `metric`; with a model from
the Hugging Face hub nothing of the section "Models" is needed.
"""

import functools
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from types import MappingProxyType

import numpy as np

MODELS = Path(__file__).with_suffix("")  # the folder of this name
sys.path.append(str(MODELS.parent))

import characters  # noqa: E402
from arithmetic import keyed_hash  # noqa: E402

GOAL = "a"
LETTERS = "abcdefghijklmnopqrstu"
MAX_NODES = 10
NUM_WALKS = 1000


# ---- Graph ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Graph:
    """What one graph seed fixes. Shared between callers, hence read-only."""

    adjacency: np.ndarray  # (21, 21) bool; [i, j] = an edge leads from LETTERS[i] to LETTERS[j]; [0, 0] is True
    edges: frozenset[str]  # the same as two-letter strings, "ca" = an edge leads from c to a
    walks: tuple[str, ...]  # the data, 1000 walks of 2 to 10 letters
    shortest: Mapping[str, int]  # start -> nodes of a shortest walk to the goal, both ends included; b..u


@functools.cache
def graph(graph_seed: int = 1000) -> Graph:
    """Draw graph and data in trlX's order of draws. ValueError if a start cannot arrive before the 10th node."""
    rng = np.random.RandomState(graph_seed)  # its streams are frozen for all numpy versions (NEP 19)
    n = len(LETTERS)
    adjacency = np.zeros((n, n), dtype=bool)
    while not adjacency.any(axis=1).all():
        adjacency = rng.rand(n, n) > 0.9
        np.fill_diagonal(adjacency, False)
    adjacency[0] = False
    adjacency[0, 0] = True  # the goal is absorbing
    adjacency.setflags(write=False)

    lengths = {0: 1}  # node -> nodes of a shortest walk; breadth first, backwards from the goal
    for length in range(2, MAX_NODES):
        nearer = list(lengths)
        for node in range(n):
            if node not in lengths and adjacency[node, nearer].any():
                lengths[node] = length
    lost = [LETTERS[node] for node in range(n) if node not in lengths]
    if lost:
        raise ValueError(
            f"graph_seed={graph_seed}: no walk of fewer than {MAX_NODES} nodes leads to the goal '{GOAL}' from "
            f"{', '.join(lost)}; choose another graph seed, such as 1000, 1002, 0 or 2"
        )

    walks = []
    for _ in range(NUM_WALKS):
        node = 0
        while node == 0:
            node = rng.randint(n)
        walk = LETTERS[node]
        while node != 0 and len(walk) < MAX_NODES:
            node = rng.choice(np.flatnonzero(adjacency[node]))
            walk += LETTERS[node]
        walks.append(walk)
    edges = frozenset(LETTERS[i] + LETTERS[j] for i, j in np.argwhere(adjacency))
    shortest = MappingProxyType({LETTERS[i]: lengths[i] for i in range(1, n)})
    return Graph(adjacency, edges, tuple(walks), shortest)


# ---- Score ----------------------------------------------------------------------------------------------------------


def follows_edges(walk: str, graph_seed: int) -> bool:
    """True if every step is an edge, so of one letter, too."""
    edges = graph(graph_seed).edges
    return all(x + y in edges for x, y in pairwise(walk))


def is_legal(sample: str, graph_seed: int = 1000) -> bool:
    """True if the sample is one node, or every step follows an edge. It need not arrive.

    After the goal only `a` is legal, its edge to itself. The empty string and unknown letters are illegal.
    >>> is_legal("da"), is_legal("daa"), is_legal("dab"), is_legal("")
    (True, True, False, False)
    """
    return sample[:1] in set(LETTERS) and follows_edges(sample, graph_seed)


def walk_length(sample: str, graph_seed: int = 1000) -> int:
    """Nodes up to and including the first `a`; MAX_NODES if the sample gets there later, illegally, or never.

    What follows the first `a` is ignored, as in trlX. A sample that starts at the goal has not walked: MAX_NODES.
    """
    walk = sample[: sample.find(GOAL) + 1]  # empty without a goal
    if len(walk) < 2 or not follows_edges(walk, graph_seed):
        return MAX_NODES
    return min(len(walk), MAX_NODES)


def optimality(sample: str, graph_seed: int = 1000) -> float:
    """(10 - walk_length) / (10 - shortest walk from this start), in [0, 1] for any string whatsoever."""
    length = walk_length(sample, graph_seed)
    if length == MAX_NODES:  # also every sample without a valid start
        return 0.0
    return (MAX_NODES - length) / (MAX_NODES - graph(graph_seed).shortest[sample[0]])


def reward(
    samples: list[str], prompts: list[str], outputs: list[str], graph_seed: int = 1000, **columns
) -> list[float]:
    return [optimality(sample, graph_seed) for sample in samples]


def metric(samples: list[str], prompts: list[str], outputs: list[str], graph_seed: int = 1000, **columns) -> dict:
    """Per sample: optimality, walk_length (failures count as 10, where trlX logs 100), and 1.0 if it is illegal."""
    return {
        "optimality": [optimality(sample, graph_seed) for sample in samples],
        "lengths": [walk_length(sample, graph_seed) for sample in samples],
        "illegal": [float(not is_legal(sample, graph_seed)) for sample in samples],
    }


# ---- Rows -----------------------------------------------------------------------------------------------------------


def prompts(graph_seed: int = 1000) -> list[dict]:
    """The 20 starts, each with the length of its shortest walk."""
    return [{"prompt": start, "shortest": length} for start, length in graph(graph_seed).shortest.items()]


def eval_prompts(graph_seed: int = 1000, samples: int = 50, starts: str = LETTERS) -> list[dict]:
    """Each of the starts `samples` times. 20 x 50 sampled walks give a mean within about 0.01; 20 x 1 within 0.1."""
    rows = []
    for row in prompts(graph_seed):
        if row["prompt"] in starts:
            rows += [dict(row) for _ in range(samples)]
    return rows


def completions(graph_seed: int = 1000, split: str = "all") -> list[dict]:
    """The 1000 walks as prompt (the start) and completion (the rest; never empty: every walk has 2 nodes or more).

    split: all, train, or test: about a tenth, held out by a hash of the position.
    """
    if split not in ("all", "train", "test"):
        raise ValueError(f"split={split!r} must be all, train or test")
    rows = []
    for position, walk in enumerate(graph(graph_seed).walks):
        held_out = keyed_hash("held out", graph_seed, position) % 10 == 0
        if split == "all" or held_out == (split == "test"):
            rows.append({"prompt": walk[0], "completion": walk[1:]})
    return rows


def best(graph_seed: int = 1000) -> list[dict]:
    """The tenth of the walks of highest optimality as completions, best first, equals in the order of the data."""
    rows = sorted(rewarded(graph_seed), key=lambda row: -row["reward"])[: NUM_WALKS // 10]
    return [{"prompt": row["prompt"], "completion": row["completion"]} for row in rows]


def rewarded(graph_seed: int = 1000) -> list[dict]:
    rows = []
    for walk in graph(graph_seed).walks:
        rows.append({"prompt": walk[0], "completion": walk[1:], "reward": optimality(walk, graph_seed)})
    return rows


def pairs(graph_seed: int = 1000, split: str = "train", kind: str = "all", count: int | None = None) -> list[dict]:
    """Preference pairs from four sources in equal numbers; the chosen walk always has the higher optimality.

    natural  two walks of the data from one start that arrive, the rejected one later (before the 10th node)
    natural  two walks of the data from one start; the rejected one never arrives
    illegal  a walk of the data against itself with nodes left out: one step is no edge, and it still arrives
    illegal  the same; the step without an edge leads straight to the goal

    "The shorter walk wins" is right on every natural pair, and no choice of pairs could change that: the score falls
    with the length, and walks that fail have 10 nodes. It is wrong on every illegal pair, so it scores 0.5 on
    kind="all"; "the longer one wins, unless it has 10 nodes" scores 0.75. So read accuracies by kind.

    A hash puts each pair into train (2 of 3) or test.

    count: only so many, the first in their shuffled order, so that a larger count holds the pairs of a smaller one.
    """
    if split not in ("train", "test") or kind not in ("all", "natural", "illegal"):
        raise ValueError(f"split={split!r}, kind={kind!r}: must be train or test; all, natural or illegal")
    if count is not None and count < 1:
        raise ValueError(f"count={count} must be at least 1")
    sources = pair_sources(graph_seed)

    def in_split(pair: tuple) -> bool:
        is_test = keyed_hash("split", graph_seed, *pair[:2]) % 3 == 0
        return is_test == (split == "test")

    def draw(pair: tuple) -> int:
        return keyed_hash("draw", graph_seed, *pair)

    def shuffle(pair: tuple) -> int:  # not by `draw`: the pairs that were drawn from a large source have small values
        return keyed_hash("shuffle", graph_seed, *pair)

    sources = [sorted(filter(in_split, source), key=draw) for source in sources]
    share = min(map(len, sources))
    mixed = []
    for source in sources:
        mixed += source[:share]
    rows = []
    for chosen, rejected, pair_kind in sorted(mixed, key=shuffle):
        if kind in ("all", pair_kind):
            rows.append({"prompt": chosen[0], "chosen": chosen[1:], "rejected": rejected[1:], "kind": pair_kind})
    if count is not None and count > len(rows):
        raise ValueError(f"count={count}: there are only {len(rows)} such pairs")
    return rows[:count]


def pair_sources(graph_seed: int) -> list[set[tuple[str, str, str]]]:
    """(chosen, rejected, kind) of the four sources of `pairs`."""
    walks = list(dict.fromkeys(graph(graph_seed).walks))
    arrivals = [walk for walk in walks if optimality(walk, graph_seed) > 0]
    later = set()
    never = set()
    for walk in arrivals:
        for other in walks:
            if other[0] != walk[0]:
                continue
            if other[-1] != GOAL:
                never.add((walk, other, "natural"))
            elif len(walk) < len(other) < MAX_NODES:
                later.add((walk, other, "natural"))
    jumps = set()
    straight = set()
    for walk in arrivals:
        for begin, end in combinations(range(len(walk)), 2):
            jump = walk[: begin + 1] + walk[end:]  # from node `begin` to node `end`
            if is_legal(jump, graph_seed):  # a legal shortcut, or one step of the walk
                continue
            if end == len(walk) - 1:
                straight.add((walk, jump, "illegal"))
            else:
                jumps.add((walk, jump, "illegal"))
    return [later, never, jumps, straight]


def eval_pairs(graph_seed: int = 1000) -> dict[str, list[dict]]:
    """The held-out pairs: all, and by kind."""
    return {kind: pairs(graph_seed, "test", kind) for kind in ("all", "natural", "illegal")}


# ---- Models ---------------------------------------------------------------------------------------------------------

CONTEXT = 32  # positions of the model; a walk with bos and eos needs 12


def tokenizer():
    """One token per letter, id = index in LETTERS, then <bos> <eos> <pad> <unk>; no bos or eos is added to a text."""
    return characters.tokenizer(LETTERS, CONTEXT)


def base_model() -> str:
    """Path of a GPT-2 (6 layers, width 144, 1.5 M parameters) that walks like the data: `untrained_model` after

    python algos/sft.py --config benchmarks/tasks/randomwalks/base_model.yaml --run-dir DIRECTORY

    which takes a minute on one CPU core; other machines get other bits. For another graph give its `--dataset`.
    """
    return str(MODELS / "base_model")


def untrained_model() -> str:
    """Path of that model with random weights, drawn where it is not there yet: see characters.py."""
    return characters.untrained_gpt2(LETTERS, CONTEXT, layers=6, width=144, heads=6)
