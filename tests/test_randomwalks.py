"""The random walks task: `python -m pytest tests/test_randomwalks.py`

Levels are pinned against the table of trlX's own generator (data mean, best walk per start in the data, optimal mean
length); scores against hand-made walks; pairs, tokenizer and models against what their docstrings promise.
"""

import doctest
import itertools
import math
import random
from pathlib import Path

import pytest

from benchmarks.tasks import randomwalks
from common.functions import build

ROW_COLUMNS = {
    "prompts": {"prompt", "shortest"},
    "eval_prompts": {"prompt", "shortest"},
    "text": {"text"},
    "completions": {"prompt", "completion"},
    "best": {"prompt", "completion"},
    "messages": {"messages"},
    "dialogues": {"dialogue"},
    "rewarded": {"prompt", "completion", "reward"},
    "pairs": {"prompt", "chosen", "rejected", "kind"},
}


def mean(numbers):
    numbers = list(numbers)
    return sum(numbers) / len(numbers)


# ---- Graph and levels -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("graph_seed", "data", "best_in_data", "optimal_length"),
    [(1000, 0.3515, 0.9917, 3.65), (1002, 0.7902, 1.0, 3.55), (0, 0.4146, 1.0, 3.10), (2, 0.4838, 1.0, 3.85)],
)
def test_reference_levels(graph_seed, data, best_in_data, optimal_length):
    graph = randomwalks.graph(graph_seed)
    scores = [randomwalks.optimality(walk, graph_seed) for walk in graph.walks]
    best = {
        start: max(score for score, walk in zip(scores, graph.walks, strict=True) if walk[0] == start)
        for start in graph.shortest
    }
    assert len(graph.walks) == 1000 and len(best) == 20
    assert round(mean(scores), 4) == data
    assert round(mean(best.values()), 4) == best_in_data
    assert mean(graph.shortest.values()) == pytest.approx(optimal_length)
    if graph_seed == 1000:
        assert best.pop("m") == pytest.approx(5 / 6)
    assert set(best.values()) == {1.0}


def test_data_walks_are_legal_and_stop_at_the_goal_or_at_ten_nodes():
    for walk in randomwalks.graph().walks:
        assert randomwalks.is_legal(walk) and 2 <= len(walk) <= 10
        assert "a" not in walk[:-1] and (walk[-1] == "a" or len(walk) == 10)


def test_shortest_lengths_by_networkx():
    networkx = pytest.importorskip("networkx")
    graph = randomwalks.graph()
    lengths = networkx.single_target_shortest_path_length(
        networkx.from_numpy_array(graph.adjacency, create_using=networkx.DiGraph), 0
    )
    assert {randomwalks.LETTERS[i]: length + 1 for i, length in dict(lengths).items() if i} == graph.shortest


@pytest.mark.parametrize("graph_seed", [3, 42])
def test_unreachable_goal_is_an_error_that_names_the_graph_seed(graph_seed):
    for function in (randomwalks.graph, randomwalks.prompts, randomwalks.pairs):
        with pytest.raises(ValueError, match=f"graph_seed={graph_seed}:"):
            function(graph_seed=graph_seed)


def test_graph_is_read_only():
    graph = randomwalks.graph()
    with pytest.raises(ValueError):
        graph.adjacency[0, 1] = True
    with pytest.raises(TypeError):
        graph.shortest["b"] = 1
    with pytest.raises(AttributeError):
        graph.walks = ()


# ---- Score ----------------------------------------------------------------------------------------------------------


def shortest_walk(start, graph):
    """Any shortest walk, by always stepping to a node that is one nearer."""
    walk = start
    while walk[-1] != "a":
        near = {"a": 1, **graph.shortest}
        walk += next(x for x in near if walk[-1] + x in graph.edges and near[x] == near[walk[-1]] - 1)
    return walk


def test_score_of_hand_made_walks():
    graph = randomwalks.graph()
    for start in graph.shortest:
        walk = shortest_walk(start, graph)
        assert randomwalks.optimality(walk) == 1.0 and randomwalks.walk_length(walk) == graph.shortest[start]
        assert randomwalks.optimality(walk + "zz a") == 1.0  # what follows the goal is ignored by the score ...
        assert not randomwalks.is_legal(walk + "zz a")  # ... but is not legal,
        assert randomwalks.is_legal(walk + "aaa")  # except to stay there
        assert randomwalks.optimality(walk[:-1]) == 0.0 and randomwalks.is_legal(walk[:-1])  # stops before the goal
        assert randomwalks.optimality("?" + walk) == 0.0 and randomwalks.optimality(walk.upper()) == 0.0
        if start + "a" not in graph.edges:
            assert randomwalks.optimality(start + "a") == 0.0 and not randomwalks.is_legal(start + "a")
    late = next(walk for walk in graph.walks if walk[-1] == "a" and len(walk) == 10)
    assert randomwalks.optimality(late) == 0.0
    walk = next(walk for walk in graph.walks if walk[-1] == "a" and len(walk) == 7)
    assert randomwalks.optimality(walk) == pytest.approx(3 / (10 - graph.shortest[walk[0]]))


def test_score_is_total():
    rng = random.Random(0)
    alphabet = randomwalks.LETTERS + "vwxyz?|A \n\té漢\0"
    samples = ["", "?", "a", "aa", "ab", "\n", "z", "b" * 10_000, "a" * 10_000, "<eos>", "😀a"]
    samples += ["".join(rng.choices(alphabet, k=rng.randrange(15))) for _ in range(200)]
    # a legal walk that goes round in circles and arrives after more than 10 nodes
    graph = randomwalks.graph()
    circle = next(w for w in graph.walks if len(set(w)) < 9 and w[0] in w[1:])
    there = circle[: circle.index(circle[0], 1)]
    samples.append(there * 10 + shortest_walk(circle[0], graph))
    assert randomwalks.is_legal(samples[-1])
    for graph_seed in (1000, 2):
        table = randomwalks.metric(samples, [""] * len(samples), samples, graph_seed=graph_seed, shortest=[1])
        assert set(table) == {"optimality", "lengths", "illegal"}
        assert {len(column) for column in table.values()} == {len(samples)}
        assert table["optimality"] == randomwalks.reward(samples, [], [], graph_seed=graph_seed, other=[2])
        for sample, score, length, illegal in zip(samples, *table.values(), strict=True):
            assert type(score) is float and math.isfinite(score) and 0.0 <= score <= 1.0, repr(sample)
            assert 2 <= length <= 10 and illegal in (0.0, 1.0), repr(sample)
    assert [randomwalks.optimality(sample) for sample in samples[:11] + samples[-1:]] == [0.0] * 12
    assert [randomwalks.is_legal(sample) for sample in samples[:7]] == [False, False, True, True, False, False, False]


def test_doctests():
    assert doctest.testmod(randomwalks).failed == 0


# ---- Rows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ROW_COLUMNS)
def test_row_columns(name):
    function = getattr(randomwalks, name)
    rows, again, other = function(), function(graph_seed=1000), function(graph_seed=2)
    assert rows == again and rows != other
    assert all(set(row) == ROW_COLUMNS[name] for row in rows)
    texts = [value for row in rows for value in row.values() if isinstance(value, str)]
    assert all(texts)
    rows[0].clear()  # rows belong to the caller
    assert function() == again


def test_row_contents():
    walks = list(randomwalks.graph().walks)
    assert [row["prompt"] for row in randomwalks.prompts()] == list("bcdefghijklmnopqrstu")
    assert len(randomwalks.eval_prompts()) == 1000 and len(randomwalks.eval_prompts(samples=3)) == 60
    assert [row["prompt"] for row in randomwalks.eval_prompts(samples=2, starts="cm")] == ["c", "c", "m", "m"]
    assert [row["text"] for row in randomwalks.text()] == walks
    assert [row["prompt"] + row["completion"] for row in randomwalks.completions()] == walks
    assert ["".join(row["dialogue"]) for row in randomwalks.dialogues()] == walks
    assert all(len(row["dialogue"]) == 2 and all(row["dialogue"]) for row in randomwalks.dialogues())
    for walk, row in zip(walks, randomwalks.messages(), strict=True):
        assert [message["role"] for message in row["messages"]] == ["user", "assistant"]
        assert "".join(message["content"] for message in row["messages"]) == walk
    assert mean(row["reward"] for row in randomwalks.rewarded()) == pytest.approx(0.3515, abs=5e-5)


def test_best_rows():
    def scores(rows):
        return [randomwalks.optimality(row["prompt"] + row["completion"]) for row in rows]

    assert scores(randomwalks.best()) == [1.0] * 100
    assert scores(randomwalks.best(fraction=0.4)) == sorted(scores(randomwalks.completions()), reverse=True)[:400]
    perfect = [row for row in randomwalks.completions() if scores([row]) == [1.0]]
    assert randomwalks.best() == perfect[:100]  # ties in the order of the data
    assert len(randomwalks.best(fraction=1.0)) == 1000
    for fraction in (0, 1.5):
        with pytest.raises(ValueError, match="fraction"):
            randomwalks.best(fraction=fraction)


def as_walks(row):
    return row["prompt"] + row["chosen"], row["prompt"] + row["rejected"]


def accuracy(rows, score):
    """Share of pairs whose chosen walk gets the higher score; ties count half."""
    return mean((score(c) > score(r)) + 0.5 * (score(c) == score(r)) for c, r in map(as_walks, rows))


@pytest.mark.parametrize("by", ["pair", "walk"])
@pytest.mark.parametrize("graph_seed", [1000, 1002, 0, 2])
def test_pairs(graph_seed, by):
    graph = randomwalks.graph(graph_seed)
    seen = {}
    for split in ("train", "test"):
        rows = randomwalks.pairs(graph_seed, split, by=by)
        natural, illegal = (randomwalks.pairs(graph_seed, split, kind, by) for kind in ("natural", "illegal"))
        assert [row for row in rows if row["kind"] == "natural"] == natural and len(natural) == len(rows) / 2
        assert [row for row in rows if row["kind"] == "illegal"] == illegal and len(illegal) == len(rows) / 2
        assert len({tuple(row.values()) for row in rows}) == len(rows)
        assert all(
            randomwalks.optimality(c, graph_seed) > randomwalks.optimality(r, graph_seed)
            for c, r in map(as_walks, rows)
        )
        assert {walk for row in natural for walk in as_walks(row)} <= set(graph.walks)
        assert sum(row["rejected"][-1] != "a" for row in natural) == len(natural) / 2

        straight = 0
        for chosen, rejected in map(as_walks, illegal):
            jumps = [x + y for x, y in zip(rejected, rejected[1:], strict=False) if x + y not in graph.edges]
            assert chosen in graph.walks and len(jumps) == 1 and rejected[-1] == "a"
            before = rejected.index(jumps[0]) + 1
            assert chosen.startswith(rejected[:before]) and chosen.endswith(rejected[before:])
            straight += jumps[0][1] == "a"
        assert straight == len(illegal) / 2

        # what length alone can tell
        assert accuracy(natural, lambda walk: -len(walk)) == 1.0
        assert accuracy(illegal, lambda walk: -len(walk)) == 0.0
        assert accuracy(rows, lambda walk: -len(walk)) == 0.5
        assert accuracy(rows, lambda walk: len(walk) % 10) == 0.75
        seen[split] = {key for row in rows for key in (as_walks(row) if by == "walk" else [as_walks(row)])}
        head = rows[: len(rows) // 2]  # shuffled: both kinds from the beginning
        assert 0.35 < mean(row["kind"] == "natural" for row in head) < 0.65
    assert not seen["train"] & seen["test"]


def test_pairs_sizes_and_bad_arguments():
    splits = ("train", "test")
    assert [len(randomwalks.pairs(split=split)) for split in splits] == [2744, 1300]
    assert [len(randomwalks.pairs(split=split, by="walk")) for split in splits] == [1792, 452]
    assert {kind: len(rows) for kind, rows in randomwalks.eval_pairs().items()} == {
        "all": 1300, "natural": 650, "illegal": 650,
    }  # fmt: skip
    for bad in ({"split": "dev"}, {"kind": "length"}, {"by": "start"}, {"count": 0}, {"count": 2745}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            randomwalks.pairs(**bad)


def test_count_takes_the_first_pairs():
    every_pair = randomwalks.pairs()
    assert randomwalks.pairs(count=2744) == every_pair
    assert randomwalks.pairs(count=100) == every_pair[:100]
    assert randomwalks.pairs(kind="illegal", count=10) == randomwalks.pairs(kind="illegal")[:10]
    spec = "benchmarks/tasks/randomwalks.py:pairs:split=train,count=3"  # as --dataset takes it
    assert build(spec, "--dataset") == every_pair[:3]


# ---- Tokenizer ------------------------------------------------------------------------------------------------------


def test_tokenizer(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = randomwalks.tokenizer()
    tokenizer.save_pretrained(tmp_path)
    for t in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        assert len(t) == t.vocab_size == 25 and t.padding_side == "left" and t.model_max_length == 32
        assert (t.bos_token_id, t.eos_token_id, t.pad_token_id, t.unk_token_id) == (21, 22, 23, 24)
        assert t(randomwalks.LETTERS)["input_ids"] == list(range(21))  # nothing is added
        for walk in randomwalks.graph().walks[:50]:
            assert t.decode(t(walk)["input_ids"]) == walk
        assert t("")["input_ids"] == [] and t.decode([]) == ""
        assert t("b?\n 漢zc")["input_ids"] == [1, 24, 24, 24, 24, 24, 2]
        assert t("\n\n")["input_ids"] == [24, 24]
        assert t("b<eos>")["input_ids"] == [1, 22]
        assert t.decode([1, 2, 22, 23], skip_special_tokens=True) == "bc"
        assert t.decode([21, 1, 24, 22]) == "<bos>b<unk><eos>"
        assert t.batch_decode([[1, 2], [3]]) == ["bc", "d"]
        batch = t(["b", "cde"], padding=True)
        assert dict(batch) == {"input_ids": [[23, 23, 1], [2, 3, 4]], "attention_mask": [[0, 0, 1], [1, 1, 1]]}


# ---- Cache and models -----------------------------------------------------------------------------------------------


def load(path):
    from transformers import AutoModelForCausalLM

    model, loading = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(loading.values())
    return model


def test_untrained_model_is_what_the_command_draws(tmp_path):
    """Its weights are those of GPT2Config from seed 0; another CPU may round them otherwise."""
    import torch

    state = torch.get_rng_state()
    randomwalks.draw_untrained_model(str(tmp_path / "model"))
    torch.set_rng_state(state)
    drawn = load(tmp_path / "model")
    stored = load(randomwalks.untrained_model())
    for settings in (stored.config, stored.generation_config):
        assert (settings.bos_token_id, settings.eos_token_id, settings.pad_token_id) == (21, 22, 23)
    assert drawn.config.to_dict() | {"_name_or_path": ""} == stored.config.to_dict() | {"_name_or_path": ""}
    assert stored.config.resid_pdrop == stored.config.embd_pdrop == stored.config.attn_pdrop == 0.0
    assert sum(weight.numel() for weight in stored.parameters()) == 1_512_720
    for (name, weight), (other_name, other) in zip(stored.named_parameters(), drawn.named_parameters(), strict=True):
        assert name == other_name
        torch.testing.assert_close(weight, other, rtol=1e-5, atol=1e-7)


def walk_nll(path):
    """Mean of -log p over the tokens of the 1000 walks behind their first letter, the end included."""
    import torch
    from transformers import AutoTokenizer

    model = load(path)
    letters = AutoTokenizer.from_pretrained(path, padding_side="right")
    texts = [walk + letters.eos_token for walk in randomwalks.graph().walks]
    ids = letters(texts, padding=True, return_tensors="pt").input_ids
    labels = ids.masked_fill(ids == letters.pad_token_id, -100)
    with torch.no_grad():
        return model(input_ids=ids, labels=labels).loss.item()


def test_base_model_walks_like_the_data():
    """Near the entropy of the data, where each step is uniform over the edges of a node and the goal ends a walk; a
    little below it, since the model has seen these walks 29 times."""
    graph = randomwalks.graph()
    nll = []
    for walk in graph.walks:
        for letter in walk[:-1]:
            nll.append(math.log(graph.adjacency[randomwalks.LETTERS.index(letter)].sum()))
        nll.append(0.0)  # the end
    entropy = mean(nll)
    assert entropy - 0.1 < walk_nll(randomwalks.base_model()) < entropy
    assert walk_nll(randomwalks.untrained_model()) > 3


@pytest.mark.slow
def test_base_model_is_made_again_by_its_command(scripts, tmp_path):
    root = Path(randomwalks.__file__).resolve().parents[2]
    config = root / "benchmarks/tasks/randomwalks/base_model.yaml"
    scripts.run([root / "algos/sft.py", "--config", config, "--run-dir", tmp_path / "run"], tmp_path)
    again = load(tmp_path / "run/hf_model")
    stored = load(randomwalks.base_model())
    assert again.config.to_dict() | {"_name_or_path": ""} == stored.config.to_dict() | {"_name_or_path": ""}
    assert walk_nll(tmp_path / "run/hf_model") == pytest.approx(walk_nll(randomwalks.base_model()), abs=0.005)


def test_logit_mask_forbids_what_is_illegal():
    letters, forbidden = randomwalks.tokenizer(), randomwalks.logit_mask(2)
    assert forbidden.shape == (25, 25) and forbidden.dtype == bool
    names = letters.convert_ids_to_tokens(range(25))
    for i, j in itertools.product(range(25), repeat=2):
        if i < 21:
            allowed = randomwalks.is_legal(names[i] + names[j], 2) if j < 21 else names[j] == "<eos>"
        else:
            allowed = j < 21
        assert forbidden[i, j] == (not allowed), (names[i], names[j])
    for walk in randomwalks.graph(2).walks:
        ids = [*letters(walk)["input_ids"], letters.eos_token_id]
        assert not forbidden[ids[:-1], ids[1:]].any(), walk
