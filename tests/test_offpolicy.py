"""Samplers that are not the policy, in grpo.py: `python -m pytest tests/test_offpolicy.py`

What a rollout function returns as the column sampler_logprobs, the weights of --correction, the metrics of mismatch/,
and the sampler of benchmarks/tasks/stale.py.
"""

import math
from functools import partial

import pytest
import torch
from helpers import close, log, random, recorded, rolled, tensor
from test_grpo import ADVANTAGES, GOLDEN, LENGTHS, MASK, NEW, OLD, args_of, losses_of, run_grpo, table
from test_rollouts import once, run

from algos import grpo
from benchmarks.tasks import stale
from common.lm import own_rollouts
from common.lm.load import load_model

CORRECTIONS = ["none", "truncate", "mask", "sequence-mask", "decoupled"]
SAMPLER = OLD + table(1.3, 2.7, 0.5, 0.8, -0.1)
COLUMN = [SAMPLER[row, :length].tolist() for row, length in enumerate(LENGTHS)]


def test_weights_by_hand():
    """Responses of three tokens, of one and of two, with ratios of 1/2, 3 and 2; 5/2; 1/4 and 2."""
    log_ratio = tensor(0.5, 3, 2, 2.5, 0.25, 2).log()
    expected = {
        "none": [1, 1, 1, 1, 1, 1],
        "truncate": [0.5, 2.25, 2, 2.25, 0.25, 2],
        "mask": [0.5, 0, 2, 0, 0.25, 2],
        "sequence-mask": [0, 0, 0, 0, 0.5, 0.5],
        "decoupled": [0.5, 3, 2, 2.5, 0.25, 2],
    }
    for correction in CORRECTIONS:
        close(grpo.correction_weights(log_ratio, [3, 1, 2], correction, 2.25), expected[correction])
    close(grpo.correction_weights(log_ratio, [3, 1, 2], "sequence-mask", 3.5), [3, 3, 3, 2.5, 0.5, 0.5])
    for correction in CORRECTIONS:  # of a process whose lines only fill its share
        assert grpo.correction_weights(log_ratio[:0], [], correction, 2.0).shape == (0,)
    assert grpo.sequence_means(log_ratio[:0], []).shape == (0,)


# For these rows, the lines of GRPOTrainer._generate_and_score_completions (v1.16.0) made `importance_sampling_ratio` of
# OLD and SAMPLER. TRL raises an error for a token_truncate without a limit: 1e9 stands for none.
CORRECTED = [row for row in GOLDEN if "correction" in row["flags"]]


@pytest.mark.parametrize("row", CORRECTED, ids=lambda row: row["flags"]["correction"])
def test_corrections_are_those_of_trl(monkeypatch, row):
    args = args_of(max_new_tokens=11, ppo_epochs=2, **row["flags"])
    new = NEW.clone().requires_grad_()
    loss, _ = losses_of(monkeypatch, new, args, sampler_logprobs=COLUMN)
    assert loss.item() == pytest.approx(row["loss"], rel=1e-12)
    loss.backward()
    close(new.grad[MASK], row["gradient"])


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_the_loss_is_the_slow_definition(monkeypatch, correction):
    """Token by token, with the metrics of the gap."""
    limit = 1.7
    args = args_of(max_new_tokens=11, ppo_epochs=2, kl_coef=0.0, correction=correction, correction_limit=limit)
    new = NEW.clone().requires_grad_()
    loss, terms = losses_of(monkeypatch, new, args, sampler_logprobs=COLUMN)
    expected = 0.0
    kl, ratios, num_limited = [], [], 0
    for row, length in enumerate(LENGTHS):
        x = [float(OLD[row, t] - SAMPLER[row, t]) for t in range(length)]
        for t in range(length):
            weight = math.exp(sum(x)) if correction == "sequence-mask" else math.exp(x[t])
            kl.append(math.exp(x[t]) - 1 - x[t])
            ratios.append(math.exp(x[t]))
            num_limited += weight > limit and correction != "none"
            if weight > limit and "mask" in correction:
                weight = 0.0
            if correction == "truncate":
                weight = min(weight, limit)
            if correction == "none":
                weight = 1.0
            ratio = (new[row, t] - OLD[row, t]).exp()
            advantage = ADVANTAGES[row]
            clipped = torch.minimum(advantage * ratio, advantage * ratio.clamp(0.8, 1.2))
            expected = expected - weight * clipped / length / len(LENGTHS)
    close(loss, expected.item())
    gradient, slow = (torch.autograd.grad(each, new)[0] for each in (loss, expected))
    close(gradient, slow)
    count = sum(LENGTHS)
    sums = {"kl": sum(kl), "ratio": sum(ratios), "ratio_squared": sum(r * r for r in ratios), "limited": num_limited}
    for name, value in sums.items():
        assert terms[f"mismatch/{name}"].item() == pytest.approx(value / count, rel=1e-12)
    assert num_limited or correction == "none"


def stale_run(model, run_dir, age=0, handed=True, **flags):
    flags = {"total_episodes": 84, "rollout": partial(stale.episode, age=age, handed=handed)} | flags
    return log(run_grpo(model, run_dir, **flags)[1])


@pytest.mark.parametrize("steps", [1, 3])
def test_the_policy_itself_needs_no_correction(gpt2_dir, tmp_path, steps):
    """Without the column no flag changes a byte. With that of the policy itself, only rounding does."""
    flags = {"batch_size": 21 // steps, "total_episodes": 42}
    folders = [tmp_path / correction for correction in CORRECTIONS]
    for folder, correction in zip(folders, CORRECTIONS, strict=True):
        run_grpo(gpt2_dir, folder, correction=correction, **flags)
    plain = [(folder / "metrics.jsonl").read_bytes() for folder in folders]
    assert len({*plain}) == 1
    expected = log(folders[0])
    for correction in CORRECTIONS:
        found = stale_run(gpt2_dir, tmp_path / f"{correction}-0", correction=correction, **flags)
        for record, other in zip(found, expected, strict=True):
            shared = {name: value for name, value in record.items() if not name.startswith("mismatch/")}
            assert shared == pytest.approx(other, rel=1e-9, abs=1e-12)
            assert abs(record["mismatch/kl"]) < 1e-20 and record["mismatch/limited"] == 0
            assert record["mismatch/ess"] == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("age", [1, 2, None])
def test_the_sampler_has_the_weights_of_so_many_iterations_ago(monkeypatch, gpt2_dir, tmp_path, age):
    """None: those of the start. The draws are those of a run whose policy has these weights."""
    weights = []
    rollout = grpo.rollout

    def noted(accelerator, model, *rest):
        before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        result = rollout(accelerator, model, *rest)
        assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
        weights.append((before, result[0]))
        return result

    monkeypatch.setattr(grpo, "rollout", noted)
    records = stale_run(gpt2_dir, tmp_path / "run", age=age or 0, handed=age is not None)
    lm, _ = load_model(args_of(dtype="float64"), gpt2_dir)
    distances = []
    for number, (_, episodes) in enumerate(weights):
        source = 0 if age is None else max(0, number - age)
        lm.load_state_dict(weights[source][0], strict=False)
        for episode in episodes:
            ids = torch.tensor([episode.query + episode.response])
            logits = lm(ids).logits[0, len(episode.query) - 1 : -1].double() / 0.7
            slow = logits.log_softmax(-1)[range(len(episode.response)), episode.response]
            close(torch.tensor(episode.row["sampler_logprobs"], dtype=torch.float64), slow.detach(), 1e-10)
        distances.append(records[number]["mismatch/kl"])
    assert abs(distances[0]) < 1e-20 and min(distances[1:]) > 1e-6


@pytest.mark.parametrize(("precision", "largest"), [("bfloat16", 2**-8), ("float16", 2**-11), ("int8", 1 / 254)])
def test_rounded_weights(precision, largest):
    """By at most half a unit in the last place; in int8, of the largest weight of the row."""
    weight = random(5, 7)
    unit = weight.abs()
    if precision == "int8":
        unit = weight.abs().amax(1, keepdim=True)
        assert torch.equal(stale.rounded(weight[0], precision), weight[0])  # a vector
    error = (stale.rounded(weight, precision) - weight).abs() / unit
    assert largest / 4 < error.max() <= largest * (1 + 1e-9)
    assert torch.equal(stale.rounded(weight, None), weight)


# ---- What a rollout function gets ------------------------------------------------------------------------------------


@pytest.mark.parametrize("algo", ["grpo", "ppo"])
def test_stop_strings_reach_a_function(algo, gpt2_dir, tmp_path):
    """As if the script sampled itself: the same bytes, also of a response that a stop string ends at the limit."""
    flags = {"stop": ("a", "i"), "max_new_tokens": 3, "eval_every": 2}
    given = []

    def noted(sample, prompt_ids, stop_strings):
        given.append(stop_strings)
        return once(sample, prompt_ids)

    plain = run(algo, gpt2_dir, tmp_path / "plain", rollout=None, **flags)
    own = run(algo, gpt2_dir, tmp_path / "own", rollout=noted, **flags)
    assert (own / "metrics.jsonl").read_bytes() == (plain / "metrics.jsonl").read_bytes()
    assert {*given} == {("a", "i")}
    assert 0 < min(record["tokens/truncated_rate"] for record in log(own) if "tokens/truncated_rate" in record)


def test_log_probabilities_are_cut_with_the_ids(monkeypatch, gpt2_dir, tmp_path):
    """An engine that draws more tokens than --max-new-tokens, and reads some between them."""

    def engine(prompt_ids, iteration):
        iterations.append(iteration)
        responses = [[([1, 2, 3], True), ([4, 5], False), ([6, 7, 8, 9, 10, 11], True)] for _ in prompt_ids]
        return responses, {"sampler_logprobs": [[-1.0 - t for t in range(9)] for _ in prompt_ids]}

    iterations = []
    rollouts = rolled(monkeypatch, grpo)
    records = log(run("grpo", gpt2_dir, tmp_path / "run", rollout=engine, eval_every=4))
    assert iterations == [0, 1, 0, 2, 0]
    for _, episodes in rollouts:
        for episode in episodes:
            assert episode.row["sampler_logprobs"] == [-1, -2, -3, -4, -5, -6, -7] and episode.length == 7
    assert records[-1]["tokens/truncated_rate"] == 1


def test_a_function_gets_merged_adapters(gpt2_dir, tmp_path):
    """Under the names that an engine is given: the weight of a layer and what its adapter adds, in every iteration."""
    adapted = []

    def engine(sample, prompt_ids, model):
        weights = model.state_dict()
        layers = [name.removesuffix(".lora_A.default.weight") for name in weights if ".lora_A." in name]
        for layer in layers:
            product = weights[f"{layer}.lora_B.default.weight"] @ weights[f"{layer}.lora_A.default.weight"]
            weight = weights[f"{layer}.base_layer.weight"]
            added = (weight - start.setdefault(layer, weight.clone())).T
            close(added, product.double(), 1e-9)
            adapted.append(bool(product.abs().max() > 1e-3))
        return once(sample, prompt_ids)

    start = {}
    run("grpo", gpt2_dir, tmp_path / "run", rollout=engine, lora_r=2, lora_alpha=2, total_episodes=24)
    assert adapted[0] is False and adapted[-1] is True


def test_a_function_computes_in_its_own_precision(monkeypatch, gpt2_dir, tmp_path, bf16):
    """Autocast is for `sample` alone. The model has adapters in float32, which nothing has rounded yet."""
    found = []
    sampled = recorded(monkeypatch, own_rollouts, "sample", lambda _: torch.is_autocast_enabled("cpu"))

    def engine(sample, prompt_ids, model):
        found.append(torch.is_autocast_enabled("cpu"))
        found.append({weight.dtype for weight in model.parameters()} == {torch.float32})
        return once(sample, prompt_ids)

    flags = {"dtype": "float32", "rollout": engine, "lora_r": 2, "total_episodes": 12}
    run("grpo", gpt2_dir, tmp_path / "run", **flags, **bf16)
    assert found == [False, True] and [is_on for _, is_on in sampled] == [True]
