"""The random walks task: `python -m pytest tests/test_randomwalks.py`

Levels are pinned against the table of trlX's own generator (data mean, best walk per start in the data, optimal mean
length); scores against hand-made walks; pairs, tokenizer, cache and model against what their docstrings promise.
"""

import doctest
import itertools
import logging
import math
import multiprocessing
import os
import random
import subprocess
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.tasks import randomwalks
from common import identity

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


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("PLAINRL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


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
    for function in (randomwalks.graph, randomwalks.prompts, randomwalks.pairs, randomwalks.base_model):
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
    for bad in ({"split": "dev"}, {"kind": "length"}, {"by": "start"}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            randomwalks.pairs(**bad)


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


def test_untrained_model(monkeypatch, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    models, records = [], []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    monkeypatch.setattr(logging.getLogger("transformers"), "handlers", [handler])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seed, dtype in ((1, torch.float32), (2, torch.float64)):
            monkeypatch.setenv("PLAINRL_CACHE", str(tmp_path / str(seed)))
            torch.manual_seed(seed)
            state = torch.get_rng_state()
            try:
                torch.set_default_dtype(dtype)
                path = randomwalks.untrained_model()
            finally:
                torch.set_default_dtype(torch.float32)
            assert torch.equal(torch.get_rng_state(), state)
            assert Path(path).parent == tmp_path / str(seed) and path == randomwalks.untrained_model()
            model, loading = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
            assert not any(loading.values())
            query = AutoTokenizer.from_pretrained(path)(["b", "c"], return_tensors="pt")
            assert model.generate(**query, max_new_tokens=4, do_sample=True).shape[0] == 2
            models.append(model)
    assert not records and not [str(w.message) for w in caught]
    config, generation = models[0].config, models[0].generation_config
    for settings in (config, generation):
        assert (settings.bos_token_id, settings.eos_token_id, settings.pad_token_id) == (21, 22, 23)
    assert config.resid_pdrop == config.embd_pdrop == config.attn_pdrop == 0.0
    assert sum(p.numel() for p in models[0].parameters()) == 1_512_720
    first, second = (model.state_dict() for model in models)
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    assert all(p.dtype == torch.float32 for p in models[1].parameters())


def test_cache_folder(monkeypatch, tmp_path, own_cache):
    monkeypatch.setattr(randomwalks.tempfile, "tempdir", str(tmp_path))
    temporary = tmp_path / f"plainrl-{os.getuid()}"
    assert randomwalks.cache_dir() == own_cache
    (tmp_path / "file").touch()
    monkeypatch.setenv("PLAINRL_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(OSError, match="PLAINRL_CACHE"):
        randomwalks.cache_dir()
    monkeypatch.delenv("PLAINRL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert randomwalks.cache_dir() == tmp_path / "xdg" / "plainrl"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert randomwalks.cache_dir() == tmp_path / "home" / ".cache" / "plainrl"
    monkeypatch.setenv("HOME", str(tmp_path / "file"))  # a home that cannot hold a folder
    assert randomwalks.cache_dir() == temporary
    monkeypatch.delenv("HOME")
    assert randomwalks.cache_dir() == temporary


@pytest.fixture
def fake_sft(monkeypatch, tmp_path):
    """An sft.py of two bytes, and subprocess.run replaced by a stub that writes `<run-dir>/hf_model`."""
    fake = SimpleNamespace(script=tmp_path / "sft.py", calls=[], returncode=0, error=None)
    fake.script.write_text("#1")

    def run(command, env, **options):
        fake.calls.append((command, env))
        model = Path(command[command.index("--run-dir") + 1]) / "hf_model"
        model.mkdir(parents=True)
        (model / "config.json").write_text("{}")
        if fake.error:
            raise fake.error
        return subprocess.CompletedProcess(command, fake.returncode)

    monkeypatch.setattr(randomwalks, "SFT_SCRIPT", fake.script)
    monkeypatch.setattr(randomwalks.subprocess, "run", run)
    return fake


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


def finished(cache):
    """Directories that a later call would take for finished, or that somebody forgot."""
    return sorted(path for path in cache.iterdir() if path.is_dir())


def test_base_model_command_and_environment(monkeypatch, own_cache, fake_sft):
    launcher = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK"]
    launcher += ["ROLE_RANK", "ROLE_NAME", "TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION"]
    for name in launcher:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("RANKING", "kept")
    path = Path(randomwalks.base_model(graph_seed=2))
    assert (path / "config.json").exists() and finished(own_cache) == [path]
    [(command, environment)] = fake_sft.calls
    assert not set(launcher) & set(environment) and "RANK" in os.environ
    assert environment["RANKING"] == "kept" and environment["PLAINRL_CACHE"] == str(own_cache)
    assert command[:2] == [randomwalks.sys.executable, str(fake_sft.script)]
    task = str(Path(randomwalks.__file__).resolve())
    assert command[command.index("--model") + 1] == f"{task}:untrained_model"
    assert command[command.index("--dataset") + 1] == f"{task}:completions:graph_seed=2"
    assert set(randomwalks.BASE_MODEL_FLAGS) <= set(command)
    assert own_cache in Path(command[command.index("--run-dir") + 1]).parents  # so that the rename stays on one disk


def test_base_model_fingerprint(monkeypatch, own_cache, fake_sft, tmp_path):
    paths = [randomwalks.base_model(), randomwalks.base_model(graph_seed=1000)]
    assert paths[0] == paths[1] and len(fake_sft.calls) == 1  # trained once
    paths.append(randomwalks.base_model(graph_seed=0))
    fake_sft.script.write_text("#2")
    paths.append(randomwalks.base_model())
    monkeypatch.setattr(randomwalks, "BASE_MODEL_FLAGS", [*randomwalks.BASE_MODEL_FLAGS, "--seed", "1"])
    paths.append(randomwalks.base_model())
    copy = tmp_path / "copy.py"
    copy.write_bytes(Path(randomwalks.__file__).read_bytes() + b"\n")
    monkeypatch.setattr(randomwalks, "__file__", str(copy))
    paths.append(randomwalks.base_model())
    assert len(set(paths)) == 5 == len(fake_sft.calls) and finished(own_cache) == sorted(map(Path, set(paths)))


def test_a_change_of_the_code_trains_a_new_base_model_and_says_why(monkeypatch, own_cache, fake_sft, capsys):
    root = own_cache.parent / "repository"
    (root / "common").mkdir(parents=True)
    for name in ("data", "seeding"):
        (root / f"common/{name}.py").write_text("#1")
    monkeypatch.setattr(identity, "ROOT", root)
    first = randomwalks.base_model()
    assert "changed" not in capsys.readouterr().out
    (root / "common/data.py").write_text("#2")
    second = randomwalks.base_model()
    assert first != second and "since then has changed: common/data.py)" in capsys.readouterr().out
    fake_sft.script.write_text("#2")
    (root / "common/new.py").write_text("#1")
    assert randomwalks.base_model() not in (first, second)
    assert "since then has changed: common/new.py, script)" in capsys.readouterr().out
    (root / "common/new.py").unlink()
    fake_sft.script.write_text("#1")
    assert randomwalks.base_model() == second and capsys.readouterr().out == ""


def test_failed_or_interrupted_training_leaves_nothing(own_cache, fake_sft):
    fake_sft.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        randomwalks.base_model()
    assert finished(own_cache) == []
    fake_sft.error, fake_sft.returncode = None, 2
    with pytest.raises(RuntimeError, match="exit code 2"):
        randomwalks.base_model()
    assert finished(own_cache) == []
    fake_sft.returncode = 0
    path = Path(randomwalks.base_model())
    assert finished(own_cache) == [path] and len(fake_sft.calls) == 3


def build_slowly(log, barrier):
    def build(scratch):
        with open(log, "a") as file:
            file.write("built\n")
        time.sleep(0.3)  # without the lock, the other process starts its own meanwhile
        (scratch / "model").mkdir()
        return scratch / "model"

    barrier.wait(timeout=20)
    randomwalks.cached("slow", build)


def test_two_processes_build_once(tmp_path, own_cache):
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(2)
    processes = [context.Process(target=build_slowly, args=(tmp_path / "log", barrier)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=20)
    assert [process.exitcode for process in processes] == [0, 0]
    assert (tmp_path / "log").read_text() == "built\n" and finished(own_cache) == [own_cache / "slow"]
