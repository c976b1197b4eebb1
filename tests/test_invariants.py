"""What must not change a result, and what must hold from the first step: `python -m pytest tests/test_invariants.py`

Ratio 1 and KL 0 at the start; the same weights (to 1e-9, float64) for any content of the masked positions and with
pad == eos (layouts are in tests/test_layout.py); gradients clipped at every step; the end token trained. Most tests run
the `main` of a script in-process on a tiny model, with a library function or one of the script's replaced to look
inside.
"""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.torch
import torch

from algos import ppo, sft
from common import seeding
from common.cli import InputError, from_task
from common.models import load_model
from common.tokens import collate

EOS, PAD, NAN = 22, 23, math.nan
PROMPTS = ["b", "cde", "fg", "hijkl", "m", "nopqrst", "ba"]


def vowels(samples, outputs, **columns):
    """A reward that depends on the whole text, in steps of 0.1."""
    return [
        0.3 * sum(c in "aeiou" for c in o) + 0.1 * (len(s) % 4) - 0.5 for s, o in zip(samples, outputs, strict=True)
    ]


def dense(output_ids, **columns):
    return [[(i % 5) / 5 for i in ids] for ids in output_ids]


def run_ppo(model, run_dir, **flags):
    """Two iterations of 10 episodes in steps of 5, two epochs, unless flags say otherwise."""
    settings = {
        "dataset": [{"prompt": p} for p in PROMPTS], "reward": vowels, "dtype": "float64", "eval_every": 0,
        "total_episodes": 20, "rollout_batch_size": 10, "batch_size": 5, "micro_batch_size": 5, "ppo_epochs": 2,
        "temperature": 0.7, "max_new_tokens": 7, "lr": 1e-2, "kl_coef": 0.1, "kl_target": 0.5, "kl_horizon": 100,
        "save_every": 0, "threads": 1, "value_head": "linear", "value_head_init": "normal", "cliprange_value": 0.05,
        "adam_betas": (0.9, 0.95), "vf_coef": 10.0,
    }  # fmt: skip
    return ppo.main(ppo.Args(model=model, run_dir=str(run_dir), **settings | flags))


def run_sft(model, run_dir, rows, **flags):
    """Three steps of 7 rows, unless flags say otherwise."""
    settings = {"eval_every": 0, "total_steps": 3, "batch_size": 7, "micro_batch_size": 7, "lr": 1e-2, "threads": 1}
    settings |= {"dtype": "float64", "save_every": 0, "metric": None, "eval_dataset": None, "eval_prompts": None}
    settings |= {"warmup_steps": 0, "adam_betas": (0.9, 0.999)}
    return sft.main(sft.Args(model=model, run_dir=str(run_dir), dataset=rows, **settings | flags))


def weights(run_dir):
    """{file.name: tensor} of an export."""
    files = sorted((run_dir / "hf_model").glob("*.safetensors"))
    return {f"{f.stem}.{k}": v for f in files for k, v in safetensors.torch.load_file(f).items()}


# A bias of keys has no gradient but the rounding errors of sums of about 1; Adam divides these by its epsilon.
ROUNDING_OF_ADAM = torch.finfo(torch.float64).eps / 1e-8


def assert_same_result(a, b):
    """(metrics, run_dir) of two runs: weights equal to 2e-8 of the largest of each tensor, metrics to 1e-9."""
    x, y = weights(a[1]), weights(b[1])
    assert x.keys() == y.keys()
    for name in x:
        difference = (x[name] - y[name]).abs().max() / x[name].abs().max()
        assert difference < ROUNDING_OF_ADAM, f"{name} differs by {difference:.1e}"
    assert a[0] == pytest.approx(b[0], rel=1e-9, abs=1e-9, nan_ok=True)


def log(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def recorded(monkeypatch, module, name):
    """Replaces a function by one that keeps (arguments, result) of every call in the returned list."""
    calls, function = [], getattr(module, name)

    def recording(*args, **options):
        result = function(*args, **options)
        calls.append((args, result))
        return result

    monkeypatch.setattr(module, name, recording)
    return calls


def pad_is_eos(tokenizer):
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


# ---- PPO: the start --------------------------------------------------------------------------------------------------


def start(accelerator, directory, tokenizer, dtype, reward=vowels, **flags):
    """A rollout of 7 prompts of different lengths by a tiny model, as main does it, in micro-batches of 3."""
    flags |= {"model": directory, "dataset": PROMPTS, "reward": reward, "tokenizer": tokenizer}
    args = ppo.Args(dtype=dtype, temperature=0.7, max_new_tokens=11, micro_batch_size=3, **flags)
    lm, tokenizer = load_model(args, directory)
    ref, _ = load_model(args, directory)
    model = ppo.PolicyWithValue(lm, init="normal").to(accelerator.device)
    rows = [{"prompt": p} for p in PROMPTS]
    queries = tokenizer(PROMPTS)["input_ids"]

    models = model.eval(), ref.eval()
    return model, ppo.rollout(accelerator, *models, tokenizer, rows, queries, reward, 1, args)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float64", 1e-12)])
def test_first_ratio_is_one_and_kl_zero(accelerator, letters, tiny_dir, dtype, tolerance):
    """In training mode, rows in another order and in other micro-batches, at temperature 0.7, with pad == eos; the
    checkpoint of GPT-2 asks for dropout."""
    model, batch = start(accelerator, tiny_dir, pad_is_eos(letters), dtype)
    kl = (batch.logprobs - batch.ref_logprobs)[batch.response_mask]
    assert kl.abs().max() < tolerance and len(kl) > 40
    model.train()
    for rows in ([6, 0], [3], [5, 1, 4, 2]):
        part = batch.take(torch.tensor(rows))
        new_logprobs, new_values, _ = model(*part.tokens(), temperature=0.7)
        keep = part.response_mask
        assert ((new_logprobs - part.logprobs).exp() - 1)[keep].abs().max() < tolerance
        assert (new_values - part.values)[keep].abs().max() < tolerance


def test_ratio_is_one_at_the_first_step_of_every_iteration(monkeypatch, gpt2_dir, tmp_path):
    calls = recorded(monkeypatch, ppo, "policy_loss")
    run_ppo(gpt2_dir, tmp_path / "run", micro_batch_size=2)
    ratios = [(args[0] - args[1]).exp() for args, _ in calls]
    assert len(ratios) == 2 * 2 * 2 * 3  # iterations, epochs, steps, micro-batches
    first = [*ratios[0:3], *ratios[12:15]]
    assert max((ratio - 1).abs().max() for ratio in first) < 1e-12
    assert min((ratio - 1).abs().max() for ratio in ratios[3:12]) > 1e-3


def test_all_ratios_are_one_without_learning(monkeypatch, gpt2_dir, tmp_path):
    calls = recorded(monkeypatch, ppo, "policy_loss")
    metrics, _ = run_ppo(gpt2_dir, tmp_path / "run", lr=1e-30, micro_batch_size=3)
    assert max(((args[0] - args[1]).exp() - 1).abs().max() for args, _ in calls) < 1e-12
    assert metrics["policy/ratio"] == pytest.approx(1, abs=1e-12) and metrics["policy/clipfrac"] == 0
    assert abs(metrics["objective/kl"]) < 1e-12 and abs(metrics["objective/kl_k3"]) < 1e-12
    assert metrics["val/clipfrac"] == 0 and metrics["policy/approxkl"] < 1e-24


def test_the_end_token_counts_where_it_is_the_padding(accelerator, letters, gpt2_dir):
    model, batch = start(accelerator, gpt2_dir, pad_is_eos(letters), "float64", seed=5)
    plain = start(accelerator, gpt2_dir, None, "float64", seed=5)[1]
    assert torch.equal(batch.response_mask, plain.response_mask)
    ended = [row for row in range(7) if batch.response[row, batch.response_mask[row].sum() - 1] == EOS]
    assert 0 < len(ended) < 7
    # its log-probability gets a gradient, its score arrives on it, and what follows it gets neither
    logprobs, _, _ = model(*batch.tokens(), temperature=0.7)
    logprobs.retain_grad()
    kept = logprobs[batch.response_mask]
    ppo.policy_loss(kept, kept.detach(), torch.ones_like(kept), 0.2).sum().backward()
    rewards = ppo.token_rewards(batch.raw_scores, torch.zeros_like(logprobs), batch.response_mask, 0.1)
    ids = [row[keep].tolist() for row, keep in zip(batch.response, batch.response_mask, strict=True)]
    outputs = letters.batch_decode(ids, skip_special_tokens=True)
    scores = vowels([p + o for p, o in zip(PROMPTS, outputs, strict=True)], outputs)
    assert [row not in ended for row in range(7)] == batch.truncated.tolist()
    for row in ended:
        end = batch.response[row].tolist().index(EOS)
        assert batch.response_mask[row].tolist() == [t <= end for t in range(batch.response.shape[1])]
        assert logprobs.grad[row, end] == -1 and not logprobs.grad[row, end + 1 :].any()
        assert rewards[row, end] == pytest.approx(scores[row]) and rewards[row].count_nonzero() == 1


def test_dense_and_single_scores_may_be_mixed(accelerator, gpt2_dir):
    """A list has a number per token, end token included; a single number belongs to the last token."""

    def mixed(output_ids, **columns):
        return [[i + 0.5 for i in ids] if n % 2 else 7 for n, ids in enumerate(output_ids)]

    _, batch = start(accelerator, gpt2_dir, None, "float64", reward=mixed)
    for row, (ids, mask, scores) in enumerate(zip(batch.response, batch.response_mask, batch.raw_scores, strict=True)):
        expected = ids[mask] + 0.5 if row % 2 else torch.tensor([0.0] * (int(mask.sum()) - 1) + [7.0])
        assert scores[mask].tolist() == expected.tolist() and not scores[~mask].any()


# ---- PPO: what must not change the result ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain_ppo(tiny_dirs, tmp_path_factory):
    """The run with which the others are compared."""
    return run_ppo(tiny_dirs["gpt2"], tmp_path_factory.mktemp("ppo") / "run")


def test_the_plain_run_is_worth_comparing(plain_ppo, gpt2_dir):
    before = safetensors.torch.load_file(f"{gpt2_dir}/model.safetensors")
    after = weights(plain_ppo[1])
    assert all((after[f"model.{k}"] - w).abs().max() > 1e-3 for k, w in before.items() if "attn.bias" not in k)
    assert 0 < plain_ppo[0]["tokens/eos_rate"] < 1 and plain_ppo[0]["objective/kl"] > 0.01
    assert plain_ppo[0]["policy/clipfrac"] > 0 and plain_ppo[0]["val/clipfrac"] > 0


@pytest.mark.parametrize("reward", [vowels, dense])
def test_ppo_ignores_nan_in_masked_positions(monkeypatch, plain_ppo, gpt2_dir, tmp_path, reward):
    plain = plain_ppo if reward is vowels else run_ppo(gpt2_dir, tmp_path / "plain", reward=reward)
    rollout, garbage = ppo.rollout, []

    def dirty(*args):
        batch = rollout(*args)
        garbage.append(int((~batch.response_mask).sum()))
        for name in ("logprobs", "values", "entropies", "ref_logprobs"):
            setattr(batch, name, torch.where(batch.response_mask, getattr(batch, name), NAN))
        return batch

    def dirty_scores(scores, mask, *args, shape_scores=ppo.shape_scores):
        scores, moments = shape_scores(scores, mask, *args)
        return torch.where(mask, scores, NAN), moments

    monkeypatch.setattr(ppo, "rollout", dirty)
    monkeypatch.setattr(ppo, "shape_scores", dirty_scores)
    assert_same_result(run_ppo(gpt2_dir, tmp_path / "run", reward=reward), plain)
    assert max(garbage) > 0


def test_ppo_does_not_depend_on_the_padding_token(plain_ppo, letters, gpt2_dir, tmp_path):
    assert_same_result(run_ppo(gpt2_dir, tmp_path / "run", tokenizer=pad_is_eos(letters)), plain_ppo)


def test_every_family_is_independent_of_the_micro_batch(family, tiny_dirs, tmp_path):
    if family != "gpt2":  # see above
        a, b = (run_ppo(tiny_dirs[family], tmp_path / f"{n}", micro_batch_size=n, total_episodes=10) for n in (5, 2))
        assert_same_result(a, b)


def test_ppo_update_is_the_slow_definition(monkeypatch, gpt2_dir, tmp_path):
    """All four steps of an iteration, the losses row by row without padding, the formulas written out once more."""
    stored, rollout = [], ppo.rollout

    def keep(*args):
        stored.append((args[1], rollout(*args)))
        return stored[0][1]

    before, rates = [], [1e-2, 7.5e-3, 5e-3, 2.5e-3]  # linear to 0 at a fifth step
    monkeypatch.setattr(ppo, "rollout", keep)
    minibatches = ppo.minibatches

    def first_weights(*args):
        before.append({k: w.clone() for k, w in stored[0][0].state_dict().items()})
        return minibatches(*args)

    monkeypatch.setattr(ppo, "minibatches", first_weights)
    flags = {"total_episodes": 10, "micro_batch_size": 2, "vf_coef": 0.7, "max_grad_norm": 0.3, "weight_decay": 0.1}
    metrics, run_dir = run_ppo(gpt2_dir, tmp_path / "run", min_length_limit=2, **flags)
    _, batch = stored[0]
    assert len(set(batch.response_mask.sum(1).tolist())) > 3  # so there is padding
    lm, _ = load_model(from_task(ppo.Args, ppo.TASK, dtype="float64"), gpt2_dir)
    model = ppo.PolicyWithValue(lm, "linear", "normal", seed=1)
    assert all(torch.equal(w, before[0][k]) for k, w in model.state_dict().items())
    everything = set(map(tuple, batch.response_mask.nonzero().tolist()))
    advantage, value_target = {}, {}
    for b in range(10):
        a, next_value = 0.0, 0.0
        for t in reversed(range(int(batch.response_mask[b].sum()))):
            last = (b, t + 1) not in everything
            kl = (batch.logprobs - batch.ref_logprobs)[b, t].item()
            reward = -0.1 * kl + (batch.scores[b].sum().item() if last else 0)
            value = batch.values[b, t].item()
            a = reward + next_value - value + 0.95 * a
            advantage[b, t], value_target[b, t], next_value = a, a + value, value
    mean, deviation = np.mean(list(advantage.values())), np.std(list(advantage.values()))
    optimizer = torch.optim.AdamW(
        [{"params": [w for w in model.parameters() if w.ndim > 1], "weight_decay": 0.1},
         {"params": [w for w in model.parameters() if w.ndim < 2], "weight_decay": 0.0}],
        betas=(0.9, 0.95), eps=1e-5, foreach=False,
    )  # fmt: skip
    orders = [seeding.rng(1, "minibatches", 1, epoch).permutation(10) for epoch in range(2)]
    for lr, rows in zip(rates, [order[part] for order in orders for part in (slice(5), slice(5, 10))], strict=True):
        losses = []
        for b in rows.tolist():
            query = batch.query[b, batch.query_mask[b]]
            response = batch.response[b, batch.response_mask[b]]
            output = model.lm(torch.cat([query, response])[None], output_hidden_states=True)
            for t, token in enumerate(response.tolist()):
                at = len(query) - 1 + t
                ratio = ((output.logits[0, at] / 0.7).log_softmax(-1)[token] - batch.logprobs[b, t]).exp()
                a = (advantage[b, t] - mean) / (deviation**2 + 1e-8) ** 0.5
                value, old = model.value_head(output.hidden_states[-1][0, at])[0], batch.values[b, t]
                target = value_target[b, t]
                near = torch.minimum(torch.maximum(value, old - 0.05), old + 0.05)
                losses += [-torch.minimum(a * ratio, a * ratio.clamp(0.8, 1.2))]
                losses[-1] = losses[-1] + 0.7 * torch.maximum((value - target) ** 2, (near - target) ** 2) / 2
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        norm = torch.cat([w.grad.flatten() for w in model.parameters()]).norm()
        for weight in model.parameters():
            weight.grad *= min(1.0, 0.3 / (norm + 1e-6))
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    assert metrics["optim/grad_norm"] == pytest.approx(norm.item(), rel=1e-6)
    after = weights(run_dir)
    for name, weight in model.named_parameters():
        name = name if name.startswith("value_head") else "model." + name.removeprefix("lm.")
        torch.testing.assert_close(after[name], weight.detach(), rtol=1e-7, atol=1e-8)


# ---- PPO: the loop ---------------------------------------------------------------------------------------------------


def test_gradients_are_clipped_at_every_step(monkeypatch, gpt2_dir, tmp_path):
    """TRL kept its parameters in an iterator that was empty from the second step on."""
    norms, make_optimizer = [], ppo.make_optimizer

    def watched(model, args):
        optimizer = make_optimizer(model, args)

        def measure(*_):
            gradients = [w.grad for group in optimizer.param_groups for w in group["params"] if w.grad is not None]
            norms.append(torch.cat([g.flatten() for g in gradients]).norm().item())

        optimizer.register_step_pre_hook(measure)
        return optimizer

    monkeypatch.setattr(ppo, "make_optimizer", watched)
    _, run_dir = run_ppo(gpt2_dir, tmp_path / "run", vf_coef=1e4, max_grad_norm=0.5)
    assert len(norms) == 8 and norms == pytest.approx([0.5] * 8, rel=1e-5)
    assert all(record["optim/grad_norm"] > 1 for record in log(run_dir))  # logged before the clip
    norms.clear()
    _, run_dir = run_ppo(gpt2_dir, tmp_path / "unclipped", vf_coef=1e4, max_grad_norm=0)
    assert len(norms) == 8 and min(norms) > 1
    assert [record["optim/grad_norm"] for record in log(run_dir)] == pytest.approx([norms[3], norms[7]])


def test_metrics_are_those_of_numpy(monkeypatch, gpt2_dir, tmp_path):
    """Masked, over the whole iteration; objective/kl is the KL also where the penalty is another one."""
    rollouts = recorded(monkeypatch, ppo, "rollout")
    _, run_dir = run_ppo(gpt2_dir, tmp_path / "run", kl_kind="mse", micro_batch_size=3)
    beta = 0.1
    for record, (_, batch) in zip(log(run_dir), rollouts, strict=True):
        mask = batch.response_mask.numpy()
        kept = [
            {k: x[i].numpy()[mask[i]] for k, x in vars(batch).items() if x is not None and k in PER_TOKEN}
            for i in range(10)
        ]
        x = [row["logprobs"] - row["ref_logprobs"] for row in kept]
        scores = batch.scores.sum(1).numpy()
        penalties = [-beta * np.sum(k**2) / 2 for k in x]
        returns, values = (np.concatenate([row[name] for row in kept]) for name in ("returns", "values"))
        ends = [EOS in row["response"] for row in kept]
        expected = {
            "objective/kl": np.mean([k.sum() for k in x]), "objective/kl_coef": beta,
            "objective/kl_k3": np.mean([np.sum(np.exp(-k) - 1 + k) for k in x]),
            "objective/entropy": np.mean([-row["logprobs"].sum() for row in kept]),
            "objective/scores": scores.mean(), "objective/scores_std": scores.std(),
            "objective/non_score_reward": np.mean(penalties),
            "objective/rlhf_reward": scores.mean() + np.mean(penalties),
            "policy/entropy": np.concatenate([row["entropies"] for row in kept]).mean(),
            "val/explained_variance": 1 - np.var(returns - values) / np.var(returns),
            "val/error": np.mean((returns - values) ** 2), "tokens/responses_len": mask.sum(1).mean(),
            "tokens/eos_rate": np.mean(ends), "tokens/truncated_rate": 1 - np.mean(ends),
            "tokens/queries_len": batch.query_mask.sum(1).double().mean().item(),
        }  # fmt: skip
        counts = {name for name in expected if name.startswith("tokens/")}  # averaged in float32
        for names, tolerance in ((expected.keys() - counts, 1e-9), (counts, 1e-6)):
            found = {name: record[name] for name in names}
            assert found == pytest.approx({name: expected[name] for name in names}, rel=tolerance, abs=1e-12)
        beta *= 1 + np.clip(expected["objective/kl"] / 0.5 - 1, -0.2, 0.2) * 10 / 100
    assert beta != 0.1 and log(run_dir)[1]["objective/kl"] > 0.01


PER_TOKEN = "response logprobs values entropies ref_logprobs returns".split()


@pytest.mark.parametrize("epochs", [1, 3])
def test_the_kl_coefficient_moves_once_an_iteration(gpt2_dir, tmp_path, epochs):
    _, run_dir = run_ppo(gpt2_dir, tmp_path / "run", ppo_epochs=epochs, total_episodes=40, lr=1e-4, kl_target=9)
    assert [record["objective/kl_coef"] for record in log(run_dir)] == pytest.approx([0.1 * 0.98**i for i in range(4)])


def test_the_score_and_the_texts_of_a_rollout(monkeypatch, gpt2_dir, tmp_path):
    """The reward sees what was sampled, in training as in evaluation, and cannot change the rows."""
    calls, rows = [], [{"prompt": p, "answer": [p]} for p in PROMPTS]

    def reward(samples, prompts, outputs, answer, output_ids, tokenizer):
        calls.append((samples, prompts, outputs, answer, output_ids, tokenizer))
        answers = [list(a) for a in answer]
        prompts[0] = outputs[0] = "spoilt"
        return [float(a[0] == s[: len(a[0])]) for a, s in zip(answers, samples, strict=True)]

    metrics, _ = run_ppo(gpt2_dir, tmp_path / "run", dataset=rows, reward=reward, eval_every=1)
    assert rows == [{"prompt": p, "answer": [p]} for p in PROMPTS]
    assert len(calls) == 2 + 3 and metrics["objective/scores"] == metrics["eval/reward"] == 1
    for samples, prompts, outputs, answer, output_ids, tokenizer in calls:
        assert [[p] for p in prompts[1:]] == answer[1:] and len(prompts) in (7, 10)
        assert samples[1:] == [p + o for p, o in zip(prompts, outputs, strict=True)][1:]
        assert outputs[1:] == tokenizer.batch_decode(output_ids, skip_special_tokens=True)[1:]
        for ids in output_ids:
            assert 1 <= len(ids) <= 7 and EOS not in ids[:-1]


def test_ending_early_is_learned_with_pad_as_eos(letters, gpt2_dir, tmp_path):
    """A bandit that pays for short responses: a script that masks the end token out learns nothing."""

    def brevity(output_ids, **columns):
        return [-len(ids) / 7 for ids in output_ids]

    flags = {"total_episodes": 640, "rollout_batch_size": 32, "batch_size": 32, "micro_batch_size": 32, "kl_coef": 0.0}
    flags |= {"temperature": 1.0, "kl_target": None, "reward": brevity, "tokenizer": pad_is_eos(letters)}
    _, run_dir = run_ppo(gpt2_dir, tmp_path / "run", **flags)
    lengths = [record["tokens/responses_len"] for record in log(run_dir)]
    assert lengths[0] > 5 and lengths[-1] < 3, lengths


# ---- The end token with id 0 -----------------------------------------------------------------------------------------


@pytest.fixture
def zero_eos():
    """A tokenizer as Pythia's: the end token has id 0, there is no other special token, and no padding."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(["<eos>", *"abcdefghijklmnopqrstu"])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


def test_ppo_with_an_end_token_of_id_zero(monkeypatch, zero_eos, gpt2_dir, tmp_path):
    rollouts = recorded(monkeypatch, ppo, "rollout")
    metrics, run_dir = run_ppo(gpt2_dir, tmp_path / "run", tokenizer=zero_eos, total_episodes=40)
    for _, batch in rollouts:
        for ids, mask in zip(batch.response.tolist(), batch.response_mask.tolist(), strict=True):
            ends = [place for place, token in enumerate(ids) if token in (0, 22)]  # the model's own, too
            assert sum(mask) == (ends[0] + 1 if ends else batch.response.shape[1])
    assert any(0 < record["tokens/eos_rate"] < 1 for record in log(run_dir))


def test_sft_with_an_end_token_of_id_zero(zero_eos, gpt2_dir, tmp_path):
    assert sft.encode_rows([{"text": "ab"}], zero_eos, 9, True, "")[0] == [([1, 2, 0], [-100, 2, 0])]
    metrics, _ = run_sft(gpt2_dir, tmp_path / "run", ROWS, tokenizer=zero_eos)
    assert math.isfinite(metrics["train/loss"])


# ---- SFT: what must not change the result ----------------------------------------------------------------------------

ROWS = [
    {"prompt": p, "completion": c} for p, c in zip(PROMPTS, ["cdefgh", "a", "hij", "kl", "", "u", "abab"], strict=True)
]


@pytest.fixture(scope="module")
def plain_sft(tiny_dirs, tmp_path_factory):
    return run_sft(tiny_dirs["gpt2"], tmp_path_factory.mktemp("sft") / "run", ROWS)


def test_sft_does_not_depend_on_the_padding_token(plain_sft, letters, gpt2_dir, tmp_path):
    assert_same_result(run_sft(gpt2_dir, tmp_path / "run", ROWS, tokenizer=pad_is_eos(letters)), plain_sft)


def test_sft_steps_are_the_slow_definition(letters, gpt2_dir, tmp_path):
    """The loss is the mean over all labelled tokens, one row at a time without padding; gradients clipped to 0.1."""
    flags = {"total_steps": 2, "batch_size": 5, "micro_batch_size": 2, "lr_schedule": "linear", "max_grad_norm": 0.1}
    metrics, run_dir = run_sft(gpt2_dir, tmp_path / "run", ROWS, **flags)
    model, _ = load_model(from_task(sft.Args, sft.TASK, dtype="float64"), gpt2_dir)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0, foreach=False)
    order = seeding.stream_rows(1, "data", 7, 0, 10)
    for lr, rows in ((1e-2, order[:5]), (5e-3, order[5:])):
        nll = []
        for row in (ROWS[i] for i in rows):
            ids = letters(row["prompt"] + row["completion"])["input_ids"] + [EOS]
            logps = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            nll += [-logps[t - 1, ids[t]] for t in range(len(row["prompt"]), len(ids))]
        optimizer.zero_grad()
        torch.stack(nll).mean().backward()
        norm = torch.cat([w.grad.flatten() for w in model.parameters()]).norm()
        for weight in model.parameters():
            weight.grad *= min(1.0, 0.1 / (norm + 1e-6))
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    assert metrics["train/loss"] == pytest.approx(torch.stack(nll).mean().item(), rel=1e-9)
    assert metrics["optim/grad_norm"] == pytest.approx(norm.item(), rel=1e-9) and norm > 0.5
    after = weights(run_dir)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(after[f"model.{name}"], weight.detach(), rtol=1e-7, atol=1e-9)


def test_sft_trains_the_end_token_with_pad_as_eos(letters, gpt2_dir, tmp_path):
    tokenizer = pad_is_eos(letters)
    _, run_dir = run_sft(
        gpt2_dir, tmp_path / "run", [{"prompt": p, "completion": "a"} for p in PROMPTS], tokenizer=tokenizer
    )
    before, after = (
        load_model(from_task(sft.Args, sft.TASK, dtype="float64"), str(d))[0] for d in (gpt2_dir, run_dir / "hf_model")
    )
    ids = torch.tensor(tokenizer(["ba", "ma"])["input_ids"])
    with torch.no_grad():
        gain = [(m(ids).logits[:, -1].log_softmax(-1)[:, EOS]).mean() for m in (before, after)]
    assert gain[1] > gain[0] + 0.5


# ---- SFT: rows -------------------------------------------------------------------------------------------------------


def encode(rows, tokenizer, max_length=99, completion_only_loss=True):
    return sft.encode_rows(rows, tokenizer, max_length, completion_only_loss, "--dataset")


@pytest.mark.parametrize("same", [False, True])
def test_the_end_token_is_appended_once_and_labelled(letters, same):
    tokenizer = pad_is_eos(letters) if same else letters
    rows = [{"text": "abc"}, {"text": "ab<eos>"}, {"text": "a"}]
    examples, report = encode(rows, tokenizer)
    assert examples == [
        ([0, 1, 2, EOS], [-100, 1, 2, EOS]),
        ([0, 1, EOS], [-100, 1, EOS]),
        ([0, EOS], [-100, EOS]),
    ]
    assert report == (
        "3 rows, 0 cut at the end, 0 dropped without a label left; labels on 66.7% of 9 tokens, a row 1 to 3, median 2"
    )
    ids, positions, labels = collate([[example] for example in examples], tokenizer.pad_token_id)
    assert positions.tolist() == [[0, 1, 2, 3]] * 3
    assert labels.tolist() == [[-100, 1, 2, EOS], [-100, 1, EOS, -100], [-100, EOS, -100, -100]]
    assert ids[2, 2:].tolist() == [tokenizer.pad_token_id] * 2


def test_rows_that_are_cut_get_no_end_token(letters):
    rows = [{"text": "abcdefg"}, {"text": "abcd"}, {"text": "abc"}, {"text": "abcde<eos>"}]
    examples, report = encode(rows, letters, max_length=4)
    assert [ids for ids, _ in examples] == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, EOS], [0, 1, 2, 3]]
    assert report == (
        "4 rows, 3 cut at the end, 0 dropped without a label left; labels on 75.0% of 16 tokens, a row 3 to 3, median 3"
    )


def test_labels_are_those_of_the_completion(letters):
    rows = [
        {"prompt": "abc", "completion": "de"},
        {"prompt": "", "completion": "ab"},
        {"prompt": "ab", "completion": ""},
    ]
    assert encode(rows, letters)[0] == [
        ([0, 1, 2, 3, 4, EOS], [-100, -100, -100, 3, 4, EOS]),
        ([21, 0, 1, EOS], [-100, 0, 1, EOS]),  # an empty prompt is the beginning token
        ([0, 1, EOS], [-100, -100, EOS]),
    ]
    everywhere = encode(rows, letters, completion_only_loss=False)[0]
    assert everywhere[:2] == [([0, 1, 2, 3, 4, EOS], [-100, 1, 2, 3, 4, EOS]), ([21, 0, 1, EOS], [-100, 0, 1, EOS])]
    letters.bos_token = None
    assert encode(rows, letters)[0][1] == ([0, 1, EOS], [-100, 1, EOS])


def test_rows_without_a_label_are_dropped_and_counted(letters):
    rows = [
        {"prompt": "abcd", "completion": "e"},
        {"prompt": "ab", "completion": "cdef"},
        {"prompt": "cdefg", "completion": ""},
    ]
    examples, report = encode(rows, letters, max_length=4)
    assert examples == [([0, 1, 2, 3], [-100, -100, 2, 3])]
    assert "0 cut at the end, 2 dropped" in encode([{"text": ""}, {"text": "a"}, {"text": ""}], letters)[1]
    assert report == (
        "3 rows, 3 cut at the end, 2 dropped without a label left; labels on 50.0% of 4 tokens, a row 2 to 2, median 2"
    )
    with pytest.raises(InputError, match="no row has a label left within --max-length 3"):
        encode(rows[:1], letters, max_length=3)


def test_a_merge_across_the_boundary_belongs_to_the_completion():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"a": 0, "b": 1, "c": 2, "ab": 3, "</s>": 4}
    backend = Tokenizer(models.BPE(vocabulary, [("a", "b")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    rows = [
        {"prompt": "ca", "completion": "bc"},
        {"prompt": "a", "completion": "b"},
        {"prompt": "c", "completion": "ab"},
    ]
    assert encode(rows, tokenizer)[0] == [
        ([2, 3, 2, 4], [-100, 3, 2, 4]),
        ([3, 4], [-100, 4]),  # nothing predicts a first token
        ([2, 3, 4], [-100, 3, 4]),
    ]


def test_a_beginning_token_comes_once():
    """Of tokenizers that add special tokens themselves, one beginning token, and one end token, remain."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<s>": 2, "</s>": 3}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    rows = [{"prompt": "a", "completion": "b"}]
    for template in ("<s> $A", "<s> $A </s>"):
        backend.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[("<s>", 2), ("</s>", 3)]
        )
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
        assert encode(rows, tokenizer)[0] == [([2, 0, 1, 3], [-100, -100, 1, 3])]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64])
def test_evaluation_is_the_mean_over_labels_for_any_micro_batch(accelerator, letters, build_model, size):
    model, (examples, _) = build_model(dtype=torch.float64).to(accelerator.device), encode(ROWS, letters)
    args = SimpleNamespace(micro_batch_size=size)
    metrics = sft.evaluate_loss(accelerator, model, examples, args, PAD)
    nll, hits = [], []
    with torch.no_grad():
        for ids, labels in examples:
            logits = model(torch.tensor([ids]).to(accelerator.device)).logits[0]
            for t, label in enumerate(labels):
                if label >= 0:
                    nll.append(-float(logits[t - 1].log_softmax(-1)[label]))
                    hits.append(int(logits[t - 1].argmax()) == label)
    expected = {"loss": np.mean(nll), "perplexity": np.exp(np.mean(nll)), "accuracy": np.mean(hits)}
    assert metrics == pytest.approx(expected, rel=1e-9)
    assert np.mean(nll) != pytest.approx(np.mean([np.mean(x) for x in np.array_split(nll, 7)]), rel=1e-3)
