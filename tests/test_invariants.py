"""What must not change a result, and what must hold from the first step: `python -m pytest tests/test_invariants.py`

Most tests run the `main` of a script in-process on a tiny model, with one of its functions replaced to look inside.
"""

import numpy as np
import pytest
import torch
from helpers import EOS, log, pad_is_eos, recorded, rolled, same_run, trained_ids, weights
from test_maths import slow_gae
from transformers import AutoModelForSequenceClassification

from algos import ppo, sft
from common import seeding
from common.cli import from_task
from common.lm.load import load_model

PROMPTS = ["b", "cde", "fg", "hijkl", "m", "nopqrst", "ba"]


def vowels(samples, outputs, **columns):
    """A reward that depends on the whole text, in steps of 0.1."""
    scores = []
    for sample, output in zip(samples, outputs, strict=True):
        found = sum(letter in "aeiou" for letter in output)
        scores.append(0.3 * found + 0.1 * (len(sample) % 4) - 0.5)
    return scores


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
    settings |= {"dtype": "float64", "save_every": 0, "warmup_steps": 0, "adam_betas": (0.9, 0.999)}
    return sft.main(sft.Args(model=model, run_dir=str(run_dir), dataset=rows, **settings | flags))


# A bias of keys has no gradient but the rounding errors of sums of about 1; Adam divides these by its epsilon.
ROUNDING_OF_ADAM = torch.finfo(torch.float64).eps / 1e-8


@pytest.mark.parametrize(
    ("family", "dtype", "tolerance"),
    [("gpt2", "float32", 1e-5), ("gpt2", "float64", 1e-12), ("llama", "float32", 1e-5), ("qwen3", "float64", 1e-12)],
)
def test_first_ratio_is_one_and_kl_zero(monkeypatch, letters, tiny_dirs, tmp_path, family, dtype, tolerance):
    """And values are those of the rollout: in training mode, in another order and other micro-batches. The checkpoint
    of GPT-2 asks for dropout."""
    rollouts = rolled(monkeypatch, ppo)
    calls = [recorded(monkeypatch, ppo, name) for name in ("policy_loss", "value_loss")]
    flags = {"total_episodes": 10, "batch_size": 10, "ppo_epochs": 1, "micro_batch_size": 3, "max_new_tokens": 11}
    run_ppo(tiny_dirs[family], tmp_path / "run", dtype=dtype, tokenizer=pad_is_eos(letters), **flags)
    [(_, episodes)] = rollouts
    kl = ppo.of_all(episodes, "logprobs") - ppo.of_all(episodes, "ref_logprobs")
    assert len(kl) > 40
    assert kl.abs().max() < tolerance
    for found in calls:
        assert len(found) >= 4  # micro-batches
        assert max((new - old).abs().max() for (new, old, *_), _ in found) < tolerance


def test_ratio_is_one_at_the_first_step_of_every_iteration(monkeypatch, gpt2_dir, tmp_path):
    calls = recorded(monkeypatch, ppo, "policy_loss")
    run_ppo(gpt2_dir, tmp_path / "run", micro_batch_size=2)
    ratios = [(args[0] - args[1]).exp() for args, _ in calls]
    assert len(ratios) == 2 * 2 * 2 * 3  # iterations, epochs, steps, micro-batches
    first = [*ratios[0:3], *ratios[12:15]]
    assert max((ratio - 1).abs().max() for ratio in first) < 1e-12
    assert min((ratio - 1).abs().max() for ratio in ratios[3:12]) > 1e-3


def adamw(model, weight_decay, **options):
    """AdamW with a decay of the matrices alone."""
    groups = [
        {"params": [w for w in model.parameters() if w.ndim > 1], "weight_decay": weight_decay},
        {"params": [w for w in model.parameters() if w.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, foreach=False, **options)


def slow_step(model, optimizer, loss, lr, max_grad_norm):
    """A step with clipped gradients; their norm before the clip."""
    optimizer.zero_grad()
    loss.backward()
    norm = torch.cat([w.grad.flatten() for w in model.parameters()]).norm().item()
    for weight in model.parameters():
        weight.grad *= min(1.0, max_grad_norm / (norm + 1e-6))
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("share", 1.0)
    optimizer.step()
    return norm


@pytest.mark.parametrize("value_model", [False, True], ids=["head", "own"])
def test_ppo_update_is_the_slow_definition(monkeypatch, gpt2_dir, tmp_path, value_model):
    """All four steps of an iteration, the losses row by row without padding, the formulas written out once more. The
    critic has a rate of its own, and a head on the policy or a trunk of its own, of which each state is read alone."""
    rollouts = rolled(monkeypatch, ppo)
    flags = {"total_episodes": 10, "micro_batch_size": 2, "vf_coef": 0.7, "max_grad_norm": 0.3, "weight_decay": 0.1}
    flags |= {"value_model": gpt2_dir if value_model else None, "value_lr": 2e-3, "min_length_limit": 2}
    metrics, run_dir = run_ppo(gpt2_dir, tmp_path / "run", **flags)
    [(_, episodes)] = rollouts
    assert len({episode.length for episode in episodes}) > 3  # so there is padding
    lm, _ = load_model(from_task(ppo.Args, ppo.TASK, dtype="float64"), gpt2_dir)
    model = ppo.PolicyWithValue(lm, "linear", "normal", seed=1)
    if value_model:
        critic = AutoModelForSequenceClassification.from_pretrained(gpt2_dir, dtype=torch.float64, num_labels=1).eval()
        critic.score.weight.data.zero_()
        critic.config.pad_token_id = None
        model = ppo.PolicyWithCritic(lm, critic)
    advantages = []
    for episode in episodes:
        rewards = -0.1 * (episode.logprobs - episode.ref_logprobs)
        rewards[-1] += episode.score
        mask = torch.ones(1, episode.length, dtype=torch.bool)
        advantages += slow_gae(rewards[None], episode.values[None], mask, 1.0, 0.95)
    whole = torch.cat(advantages)
    optimizer = adamw(model.lm, 0.1, betas=(0.9, 0.95), eps=1e-5)
    critic = model.critic if value_model else model.value_head
    for group in adamw(critic, 0.1).param_groups:
        optimizer.add_param_group({"params": group["params"], "weight_decay": group["weight_decay"], "share": 0.2})
    parts = []
    for epoch in range(2):
        order = seeding.rng(1, "minibatches", 1, epoch).permutation(10).tolist()
        parts += [order[:5], order[5:]]
    for lr, rows in zip([1e-2, 7.5e-3, 5e-3, 2.5e-3], parts, strict=True):  # linear to 0 at a fifth step
        losses = []
        for b in rows:
            episode = episodes[b]
            output = model.lm(torch.tensor([episode.query + episode.response]), output_hidden_states=True)
            for t, token in enumerate(episode.response):
                at = len(episode.query) - 1 + t
                target = advantages[b][t] + episode.values[t]
                a = (advantages[b][t] - whole.mean()) / (whole.var(correction=0) + 1e-8) ** 0.5
                ratio = ((output.logits[0, at] / 0.7).log_softmax(-1)[token] - episode.logprobs[t]).exp()
                policy_loss = -torch.minimum(a * ratio, a * ratio.clamp(0.8, 1.2))
                if value_model:
                    value = critic(torch.tensor([(episode.query + episode.response)[: at + 1]])).logits[0, 0]
                else:
                    value = critic(output.hidden_states[-1][0, at])[0]
                old = episode.values[t]
                near = torch.minimum(torch.maximum(value, old - 0.05), old + 0.05)
                value_loss = torch.maximum((value - target) ** 2, (near - target) ** 2) / 2
                losses.append(policy_loss + 0.7 * value_loss)
        norm = slow_step(model, optimizer, torch.stack(losses).mean(), lr, 0.3)
    assert metrics["optim/grad_norm"] == pytest.approx(norm, rel=1e-6)
    critic = weights(run_dir / "value_model")
    after = weights(run_dir) | {f"critic.{name[6:]}": weight for name, weight in critic.items()}
    for name, weight in model.named_parameters():
        if name.startswith("lm."):
            name = "model." + name.removeprefix("lm.")
        torch.testing.assert_close(after[name], weight.detach(), rtol=1e-7, atol=1e-8)


def test_metrics_are_those_of_numpy(monkeypatch, gpt2_dir, tmp_path):
    """Masked, over the whole iteration; objective/kl is the KL also where the penalty is another one."""
    rollouts = rolled(monkeypatch, ppo)
    _, run_dir = run_ppo(gpt2_dir, tmp_path / "run", kl_kind="mse", micro_batch_size=3)
    beta = 0.1
    for record, (_, episodes) in zip(log(run_dir), rollouts, strict=True):
        tokens = {name: ppo.of_all(episodes, name).numpy() for name in ("values", "entropies", "returns")}
        kls = [(episode.logprobs - episode.ref_logprobs).numpy() for episode in episodes]
        scores = np.array([episode.score for episode in episodes])
        penalty = np.mean([-beta * np.sum(kl**2) / 2 for kl in kls])
        errors = tokens["returns"] - tokens["values"]
        ends = [EOS in episode.response for episode in episodes]
        expected = {
            "objective/kl": np.mean([kl.sum() for kl in kls]),
            "objective/kl_coef": beta,
            "objective/kl_k3": np.mean([np.sum(np.exp(-kl) - 1 + kl) for kl in kls]),
            "objective/entropy": np.mean([-episode.logprobs.sum() for episode in episodes]),
            "objective/scores": scores.mean(),
            "objective/scores_std": scores.std(),
            "objective/non_score_reward": penalty,
            "objective/rlhf_reward": scores.mean() + penalty,
            "policy/entropy": tokens["entropies"].mean(),
            "val/explained_variance": 1 - np.var(errors) / np.var(tokens["returns"]),
            "val/error": np.mean(errors**2),
        }
        counts = {  # averaged in float32
            "tokens/responses_len": np.mean([len(episode.values) for episode in episodes]),
            "tokens/eos_rate": np.mean(ends),
            "tokens/truncated_rate": 1 - np.mean(ends),
            "tokens/queries_len": np.mean([len(episode.query) for episode in episodes]),
        }
        for values, tolerance in ((expected, 1e-9), (counts, 1e-6)):
            found = {name: record[name] for name in values}
            assert found == pytest.approx(values, rel=tolerance, abs=1e-12)
        beta *= 1 + np.clip(expected["objective/kl"] / 0.5 - 1, -0.2, 0.2) * 10 / 100
    assert beta != 0.1
    assert log(run_dir)[1]["objective/kl"] > 0.01


def test_the_kl_coefficient_moves_once_an_iteration(gpt2_dir, tmp_path):
    _, run_dir = run_ppo(gpt2_dir, tmp_path / "run", ppo_epochs=3, total_episodes=40, lr=1e-4, kl_target=9)
    assert [record["objective/kl_coef"] for record in log(run_dir)] == pytest.approx([0.1 * 0.98**i for i in range(4)])


def test_ppo_with_an_end_token_of_id_zero(monkeypatch, letters, gpt2_dir, tmp_path):
    """As Pythia's, without a padding token."""
    letters.eos_token = "a"
    letters.pad_token = None
    rollouts = rolled(monkeypatch, ppo)
    _, run_dir = run_ppo(gpt2_dir, tmp_path / "run", tokenizer=letters, total_episodes=40)
    for _, episodes in rollouts:
        for ids in trained_ids(episodes):
            ends = [place for place, token in enumerate(ids) if token in (0, EOS)]  # the model's own, too
            assert len(ids) == (ends[0] + 1 if ends else 7)
    assert any(0 < record["tokens/eos_rate"] < 1 for record in log(run_dir))


COMPLETIONS = ["cdefgh", "a", "hij", "kl", "", "u", "abab"]
ROWS = [{"prompt": p, "completion": c} for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]


def test_sft_does_not_depend_on_the_padding_token(letters, gpt2_dir, tmp_path):
    run_sft(gpt2_dir, tmp_path / "plain", ROWS)
    run_sft(gpt2_dir, tmp_path / "run", ROWS, tokenizer=pad_is_eos(letters))
    same_run(tmp_path / "run", tmp_path / "plain", ROUNDING_OF_ADAM)


def test_sft_steps_are_the_slow_definition(letters, gpt2_dir, tmp_path):
    """The loss is the mean over all labelled tokens, one row at a time without padding; gradients clipped to 0.1."""
    flags = {"total_steps": 2, "batch_size": 5, "micro_batch_size": 2, "lr_schedule": "linear", "max_grad_norm": 0.1}
    metrics, run_dir = run_sft(gpt2_dir, tmp_path / "run", ROWS, **flags)
    model, _ = load_model(from_task(sft.Args, sft.TASK, dtype="float64"), gpt2_dir)
    optimizer = adamw(model, 0.0)
    order = sft.draw_rows(1, 7, 0, 10)
    for lr, places in ((1e-2, order[:5]), (5e-3, order[5:])):
        nll = []
        for place in places:
            prompt = ROWS[place]["prompt"]
            ids = letters(prompt + ROWS[place]["completion"])["input_ids"] + [EOS]
            logps = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            nll += [-logps[t - 1, ids[t]] for t in range(len(prompt), len(ids))]
        loss = torch.stack(nll).mean()
        norm = slow_step(model, optimizer, loss, lr, 0.1)
    assert metrics["train/loss"] == pytest.approx(loss.item(), rel=1e-9)
    assert metrics["optim/grad_norm"] == pytest.approx(norm, rel=1e-9)
    assert norm > 0.5
    after = weights(run_dir)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(after[f"model.{name}"], weight.detach(), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("size", [3, 64])
def test_evaluation_is_the_mean_over_labels_for_any_micro_batch(accelerator, letters, build_model, size):
    model = build_model(dtype=torch.float64).to(accelerator.device)
    examples, _ = sft.encode_rows(ROWS, letters, 99, True, "--dataset")
    metrics = sft.evaluate_loss(accelerator, model, examples, size)
    nll = []
    hits = []
    with torch.no_grad():
        for ids, labels in examples:
            logits = model(torch.tensor([ids])).logits[0]
            for t, label in enumerate(labels):
                if label >= 0:
                    nll.append(-float(logits[t - 1].log_softmax(-1)[label]))
                    hits.append(int(logits[t - 1].argmax()) == label)
    loss = np.mean(nll)
    assert metrics == pytest.approx({"loss": loss, "perplexity": np.exp(loss), "accuracy": np.mean(hits)}, rel=1e-9)
