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

import fcntl
import functools
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType

import numpy as np

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
        lengths |= {i: length for i in range(n) if i not in lengths and adjacency[i, list(lengths)].any()}
    if lost := [LETTERS[i] for i in range(n) if i not in lengths]:
        raise ValueError(
            f"graph_seed={graph_seed}: no walk of fewer than {MAX_NODES} nodes leads to the goal '{GOAL}' from "
            f"{', '.join(lost)}; choose another graph seed, such as 1000, 1002, 0 or 2"
        )

    walks = []
    for _ in range(NUM_WALKS):
        nodes = [0]
        while nodes[0] == 0:
            nodes[0] = rng.randint(n)
        while nodes[-1] != 0 and len(nodes) < MAX_NODES:
            nodes.append(rng.choice(np.flatnonzero(adjacency[nodes[-1]])))
        walks.append("".join(LETTERS[i] for i in nodes))
    edges = frozenset(LETTERS[i] + LETTERS[j] for i, j in np.argwhere(adjacency))
    shortest = MappingProxyType({LETTERS[i]: lengths[i] for i in range(1, n)})
    return Graph(adjacency, edges, tuple(walks), shortest)


# ---- Score ----------------------------------------------------------------------------------------------------------


def is_legal(sample: str, graph_seed: int = 1000) -> bool:
    """True if the sample is one node, or every step follows an edge. It need not arrive.

    After the goal only `a` is legal, its edge to itself. The empty string and unknown letters are illegal.
    >>> is_legal("da"), is_legal("daa"), is_legal("dab"), is_legal("")
    (True, True, False, False)
    """
    edges = graph(graph_seed).edges
    return sample[:1] in set(LETTERS) and all(x + y in edges for x, y in pairwise(sample))


def walk_length(sample: str, graph_seed: int = 1000) -> int:
    """Nodes up to and including the first `a`; MAX_NODES if the sample gets there later, illegally, or never.

    What follows the first `a` is ignored, as in trlX. A sample that starts at the goal has not walked: MAX_NODES.
    """
    edges = graph(graph_seed).edges
    walk = sample[: sample.find(GOAL) + 1]  # empty without a goal
    legal = len(walk) > 1 and all(x + y in edges for x, y in pairwise(walk))
    return min(len(walk), MAX_NODES) if legal else MAX_NODES


def optimality(sample: str, graph_seed: int = 1000) -> float:
    """(10 - walk_length) / (10 - shortest walk from this start), in [0, 1] for any string whatsoever."""
    length = walk_length(sample, graph_seed)
    if length == MAX_NODES:  # also every sample without a valid start
        return 0.0
    return (MAX_NODES - length) / (MAX_NODES - graph(graph_seed).shortest[sample[0]])


def reward(
    samples: list[str], prompts: list[str], outputs: list[str], graph_seed: int = 1000, **columns
) -> list[float]:
    """Optimality of each sample (prompt + output)."""
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
    rows = [row for row in prompts(graph_seed) if row["prompt"] in starts]
    return [dict(row) for row in rows for _ in range(samples)]


def text(graph_seed: int = 1000) -> list[dict]:
    """The 1000 walks as plain text."""
    return [{"text": walk} for walk in graph(graph_seed).walks]


def completions(graph_seed: int = 1000, split: str = "all") -> list[dict]:
    """The 1000 walks as prompt (the start) and completion (the rest; never empty: every walk has 2 nodes or more).

    split: all, train, or test: about a tenth, held out by a hash of the position.
    """
    if split not in ("all", "train", "test"):
        raise ValueError(f"split={split!r} must be all, train or test")
    rows = [{"prompt": walk[0], "completion": walk[1:]} for walk in graph(graph_seed).walks]
    held_out = [keyed_hash("held out", graph_seed, i) % 10 == 0 for i in range(len(rows))]
    return [row for row, out in zip(rows, held_out, strict=True) if split == "all" or out == (split == "test")]


def best(graph_seed: int = 1000, fraction: float = 0.1) -> list[dict]:
    """The walks of highest optimality as completions, best first, equals in the order of the data."""
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction={fraction} must lie in (0, 1]")
    rows = sorted(rewarded(graph_seed), key=lambda row: -row["reward"])[: max(1, round(fraction * NUM_WALKS))]
    return [{"prompt": row["prompt"], "completion": row["completion"]} for row in rows]


def messages(graph_seed: int = 1000) -> list[dict]:
    """The 1000 walks as chats of two messages."""
    return [
        {"messages": [{"role": "user", "content": walk[0]}, {"role": "assistant", "content": walk[1:]}]}
        for walk in graph(graph_seed).walks
    ]


def dialogues(graph_seed: int = 1000) -> list[dict]:
    """The 1000 walks as trlX samples: prompt, output."""
    return [{"dialogue": [walk[0], walk[1:]]} for walk in graph(graph_seed).walks]


def rewarded(graph_seed: int = 1000) -> list[dict]:
    """The 1000 walks with their optimality, for offline RL."""
    walks = graph(graph_seed).walks
    return [{"prompt": w[0], "completion": w[1:], "reward": optimality(w, graph_seed)} for w in walks]


def keyed_hash(*key) -> int:
    """A 64-bit hash of the key: a draw that depends on no generator, hence on no order of draws."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "big")


def pairs(graph_seed: int = 1000, split: str = "train", kind: str = "all", by: str = "pair") -> list[dict]:
    """Preference pairs from four sources in equal numbers; the chosen walk always has the higher optimality.

    natural  two walks of the data from one start that arrive, the rejected one later (before the 10th node)
    natural  two walks of the data from one start; the rejected one never arrives
    illegal  a walk of the data against itself with nodes left out: one step is no edge, and it still arrives
    illegal  the same; the step without an edge leads straight to the goal

    "The shorter walk wins" is right on every natural pair, and no choice of pairs could change that: the score falls
    with the length, and walks that fail have 10 nodes. It is wrong on every illegal pair, so it scores 0.5 on
    kind="all"; "the longer one wins, unless it has 10 nodes" scores 0.75. So read accuracies by kind.

    A hash puts each pair into train (2 of 3) or test. by="walk" does so with each walk, the illegal ones included, and
    keeps the pairs with both walks on one side. That is harder than it looks: 28 walks arrive within four nodes (graph
    seed 1000), and those held out are never chosen in training, while illegal walks like them are rejected.
    """
    if split not in ("train", "test") or kind not in ("all", "natural", "illegal") or by not in ("pair", "walk"):
        options = "train or test; all, natural or illegal; pair or walk"
        raise ValueError(f"split={split!r}, kind={kind!r}, by={by!r}: must be {options}")
    walks = list(dict.fromkeys(graph(graph_seed).walks))
    arrivals = [walk for walk in walks if optimality(walk, graph_seed) > 0]
    sources = [
        [(c, r, "natural") for c in arrivals for r in arrivals if c[0] == r[0] and len(c) < len(r)],
        [(c, r, "natural") for c in arrivals for r in walks if c[0] == r[0] and r[-1] != GOAL],
        [(c, c[: i + 1] + c[j:], "illegal") for c in arrivals for i in range(len(c)) for j in range(i + 2, len(c) - 1)],
        [(c, c[: i + 1] + GOAL, "illegal") for c in arrivals for i in range(len(c) - 2)],
    ]
    for number in (2, 3):  # jumps that happen to follow an edge are legal shortcuts
        sources[number] = [pair for pair in sources[number] if not is_legal(pair[1], graph_seed)]

    def in_split(pair: tuple) -> bool:
        keys = [pair[:1], pair[1:2]] if by == "walk" else [pair[:2]]
        return all((keyed_hash("split", graph_seed, *key) % 3 == 0) == (split == "test") for key in keys)

    def draw(pair: tuple) -> int:
        return keyed_hash("draw", graph_seed, *pair)

    def shuffle(pair: tuple) -> int:  # not by `draw`: the pairs that were drawn from a large source have small values
        return keyed_hash("shuffle", graph_seed, *pair)

    sources = [sorted({pair for pair in source if in_split(pair)}, key=draw) for source in sources]
    count = min(map(len, sources))
    if count == 0:
        raise ValueError(f"graph_seed={graph_seed}: the {split} split has no walks for one source of pairs")
    mixed = sorted((pair for source in sources for pair in source[:count]), key=shuffle)
    return [{"prompt": c[0], "chosen": c[1:], "rejected": r[1:], "kind": k} for c, r, k in mixed if kind in ("all", k)]


def eval_pairs(graph_seed: int = 1000, by: str = "pair") -> dict[str, list[dict]]:
    """The held-out pairs: all, and by kind."""
    return {kind: pairs(graph_seed, "test", kind, by) for kind in ("all", "natural", "illegal")}


# ---- Models ---------------------------------------------------------------------------------------------------------

SFT_SCRIPT = Path(__file__).resolve().parents[2] / "algos" / "sft.py"
BASE_MODEL_FLAGS = """--total-steps 300 --batch-size 96 --micro-batch-size 32 --lr 1e-3 --warmup-steps 0
--adam-betas 0.9 0.999 --max-length 16 --eval-every 0 --save-every 0""".split()
CODE_FILE = "code.json"  # in a base model's directory: hashes of the code that trained it
CONTEXT = 32  # positions of the model; a walk with bos and eos needs 12


def tokenizer():
    """One token per letter, id = index in LETTERS, then <bos> <eos> <pad> <unk>; no bos or eos is added to a text."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    specials = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    vocabulary = {token: i for i, token in enumerate([*LETTERS, *specials.values()])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")  # "." would leave newlines in one piece
    backend.decoder = decoders.Fuse()  # no spaces between letters
    inputs = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, **specials, padding_side="left", model_max_length=CONTEXT, model_input_names=inputs
    )


def logit_mask(graph_seed: int = 1000) -> np.ndarray:
    """(V, V), True where the token of the column must not follow that of the row: steps that are no edge, and special
    tokens other than <eos>, which may follow every letter. After a special token every letter may come."""
    letters = tokenizer()
    forbidden = np.ones((len(letters), len(letters)), dtype=bool)
    forbidden[: len(LETTERS), : len(LETTERS)] = ~graph(graph_seed).adjacency
    forbidden[len(LETTERS) :, : len(LETTERS)] = False
    forbidden[: len(LETTERS), letters.eos_token_id] = False
    return forbidden


def cache_dir() -> Path:
    """$PLAINRL_CACHE, else the user's cache folder, else (no $HOME, or not writable) one in the temporary folder."""
    home = os.environ.get("HOME")
    user = os.environ.get("XDG_CACHE_HOME") or (home and f"{home}/.cache")
    folders = [user and f"{user}/plainrl", f"{tempfile.gettempdir()}/plainrl-{os.getuid()}"]
    if explicit := os.environ.get("PLAINRL_CACHE"):
        folders = [explicit]  # never another one than the user asked for
    for folder in map(Path, filter(None, folders)):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
            return folder.absolute()
        except OSError as error:
            reason = error
    raise OSError(f"no writable cache folder ({reason}): set PLAINRL_CACHE to one")


def cached(name: str, build: Callable[[Path], Path]) -> str:
    """Path of the directory `name` in the cache. On first use, `build(scratch folder)` returns the directory to keep.

    One process builds while others wait; the directory appears by a rename, so it is complete or absent.
    """
    final = cache_dir() / name
    if not final.is_dir():
        with open(final.with_name(name + ".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not final.is_dir():  # no other process has built it meanwhile
                with tempfile.TemporaryDirectory(dir=final.parent, prefix=name + ".tmp-") as scratch:
                    os.rename(build(Path(scratch)), final)
    return str(final)


def fingerprint(*settings) -> str:
    """8 hex digits that change with this file or the settings."""
    return hashlib.blake2b(Path(__file__).read_bytes() + json.dumps(settings).encode(), digest_size=4).hexdigest()


def untrained_model() -> str:
    """Path of a randomly initialised GPT-2 (6 layers, width 144, 1.5 M parameters) with its tokenizer.

    The same weights in every process: drawn on the CPU from seed 0, whatever torch's generators hold, and these stay
    as they were.
    """

    def build(scratch: Path) -> Path:
        import torch
        from transformers import AutoModelForCausalLM, GPT2Config
        from transformers.utils import logging

        logging.disable_progress_bar()
        letters = tokenizer()
        special_ids = {f"{name}_token_id": getattr(letters, f"{name}_token_id") for name in ("bos", "eos", "pad")}
        config = GPT2Config(
            vocab_size=len(letters), n_layer=6, n_embd=144, n_head=6, n_positions=CONTEXT, **special_ids,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.default_generator.manual_seed(0)  # torch.manual_seed would also reseed every GPU
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.save_pretrained(scratch / "model")
        letters.save_pretrained(scratch / "model")
        return scratch / "model"

    return cached(f"randomwalks-untrained-{fingerprint()}", build)


def base_model(graph_seed: int = 1000) -> str:
    """Path of that model after `algos/sft.py` on `completions`: it walks like the data. Trained on first use.

    The script runs as one process of its own, also under torchrun or accelerate launch, so their variables are
    removed from its environment. A change of the script, or of what it imports from common/, trains a new one.
    """
    from common.identity import code_hashes  # here, so that a copy of this file needs nothing of the repository

    graph(graph_seed)  # a bad graph seed fails here
    name = f"randomwalks-base-{graph_seed}"
    code = code_hashes(SFT_SCRIPT)
    launcher = re.compile(r"(RANK|WORLD_SIZE)$|(LOCAL|MASTER|TORCHELASTIC|ACCELERATE|GROUP|ROLE)_")
    environment = {name: value for name, value in os.environ.items() if not launcher.match(name)}

    def build(scratch: Path) -> Path:
        task = Path(__file__).resolve()
        command = [sys.executable, str(SFT_SCRIPT), *BASE_MODEL_FLAGS, "--run-dir", str(scratch / "run")]
        command += ["--model", f"{task}:untrained_model", "--dataset", f"{task}:completions:graph_seed={graph_seed}"]
        reason = changed_code(name, code)
        print(f"randomwalks: training the base model once, to be kept in {scratch.parent}{reason}", flush=True)
        if status := subprocess.run(command, env=environment).returncode:
            raise RuntimeError(
                f"training the randomwalks base model failed with exit code {status}: {' '.join(command)}"
            )
        model = scratch / "run" / "hf_model"
        (model / CODE_FILE).write_text(json.dumps(code))
        return model

    return cached(f"{name}-{fingerprint(graph_seed, BASE_MODEL_FLAGS, code)}", build)


def changed_code(name: str, code: dict[str, str]) -> str:
    """What to say of the files that have changed since the newest base model of this name was trained; or nothing."""
    earlier = sorted(cache_dir().glob(f"{name}-*/{CODE_FILE}"), key=os.path.getmtime)
    if not earlier:
        return ""
    before = json.loads(earlier[-1].read_text())
    changed = sorted(file for file in before | code if before.get(file) != code.get(file))
    return f" (there is an older one; since then has changed: {', '.join(changed)})" if changed else ""
