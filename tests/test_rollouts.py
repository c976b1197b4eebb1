"""--rollout: responses of several segments, by a function of the user: `python -m pytest tests/test_rollouts.py`

The function of most tests writes "zq" behind every sampled vowel, and goes on: `tool`. Layouts are in float64, with two
processes in test_fsdp.py. The embedded task with a calculator is in test_tasks.py.
"""

import asyncio
import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
from harness import ROOT, launch, torchrun
from helpers import EOS, close, log, recorded, rolled, same_run, samples, write
from test_invariants import PROMPTS, weights
from test_rows import TOOLS, TURN_END, build_tokenizer
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from algos import grpo, ppo
from common.cli import InputError
from common.forward import response_logprobs
from common.functions import call_function, sampled_part

SPEC = f"{__file__}:tool"
WRITTEN = [25 % 21, 16]  # the tool's "eq"
NAMED = {"ppo": ppo, "grpo": grpo}


def tool(sample, prompt_ids, tokenizer, stop=("a", "i", "o", "u")):
    turns = [[] for _ in prompt_ids]
    contexts = [list(ids) for ids in prompt_ids]
    going = list(range(len(prompt_ids)))
    while going:
        called = []
        for row, ids in zip(going, sample([contexts[row] for row in going], going, stop=stop), strict=True):
            turns[row].append((ids, True))
            if tokenizer.decode(ids).endswith(stop):
                turns[row].append((WRITTEN, False))
                contexts[row] += ids + WRITTEN
                called.append(row)
        going = called
    return turns


def once(sample, prompt_ids):
    return [[(ids, True)] for ids in sample(prompt_ids, range(len(prompt_ids)))]


def cut(sample, prompt_ids, tokenizer):
    """Stops at vowels, and goes on without a word."""
    done = [[] for _ in prompt_ids]
    going = list(range(len(prompt_ids)))
    while going:
        new = sample([prompt_ids[row] + done[row] for row in going], going, stop=("a", "i"))
        for row, ids in zip(going, new, strict=True):
            done[row] += ids
        going = [row for row, ids in zip(going, new, strict=True) if ids and ids[-1] != EOS]
    return [[(ids, True)] for ids in done]


def vowels(outputs, output_ids, **columns):
    return [
        0.3 * sum(letter in "aeiou" for letter in text) + 0.01 * len(ids)
        for text, ids in zip(outputs, output_ids, strict=True)
    ]


def by_token(outputs, output_ids, **columns):
    return [[0.1 * token for token in ids] for ids in output_ids]


def run(algo, model, run_dir, **flags):
    settings = {
        "dataset": [{"prompt": p} for p in PROMPTS], "reward": vowels, "dtype": "float64", "eval_every": 0,
        "total_episodes": 24, "rollout_batch_size": 12, "batch_size": 6, "micro_batch_size": 6, "ppo_epochs": 2,
        "max_new_tokens": 9, "lr": 1e-2, "kl_coef": 0.1, "save_every": 2, "threads": 1, "adam_eps": 1e-6,
        "rollout": tool,
    }  # fmt: skip
    settings |= {"group_size": 3} if algo == "grpo" else {"vf_coef": 1.0}
    script = NAMED[algo]
    return script.main(script.Args(model=model, run_dir=str(run_dir), **settings | flags))[1]


both = pytest.mark.parametrize("algo", NAMED)


# ---- The same as without ---------------------------------------------------------------------------------------------


@both
def test_a_function_that_samples_once_changes_no_byte(algo, gpt2_dir, tmp_path):
    """So does one that stops and goes on: the n-th token of a row takes the n-th uniform."""
    plain = run(algo, gpt2_dir, tmp_path / "plain", rollout=None, eval_every=2)
    for function in (once, cut):
        found = run(algo, gpt2_dir, tmp_path / function.__name__, rollout=function, eval_every=2)
        assert (found / "metrics.jsonl").read_bytes() == (plain / "metrics.jsonl").read_bytes()
        assert all(x.equal(y) for x, y in zip(weights(found).values(), weights(plain).values(), strict=True))


@both
def test_micro_batches_and_decode_batches_change_nothing(algo, gpt2_dir, tmp_path):
    flags = {"eval_every": 2, "ppo_epochs": 1}
    whole = run(algo, gpt2_dir, tmp_path / "whole", **flags)
    same_run(run(algo, gpt2_dir, tmp_path / "parts", micro_batch_size=2, decode_batch_size=5, **flags), whole)


@both
def test_a_killed_run_ends_with_the_same_bytes(algo, gpt2_dir, tmp_path, capsys):
    flags = {"rollout": SPEC, "save_every": 1, "keep_checkpoints": 9}
    whole = run(algo, gpt2_dir, tmp_path / "whole", **flags)
    killed = shutil.copytree(whole, tmp_path / "killed")
    (killed / "README.md").unlink()
    shutil.rmtree(killed / "checkpoints/step_00000008")
    run(algo, gpt2_dir, killed, **flags)
    assert "from step 4" in capsys.readouterr().out
    for name in ("metrics.jsonl", "hf_model/model.safetensors"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes()


# ---- What is trained -------------------------------------------------------------------------------------------------


@both
def test_only_what_was_sampled_is_trained(algo, gpt2_dir, tmp_path, monkeypatch):
    """The mask leaves out what the tool wrote, which reward and evaluations see; the first ratio is 1."""
    calls = rolled(monkeypatch, NAMED[algo])
    losses = recorded(monkeypatch, NAMED[algo], "policy_loss" if algo == "ppo" else "grpo_loss")
    seen = []
    returned = []

    def reward(output_ids, **columns):
        seen.extend(output_ids)
        return vowels([""] * len(output_ids), output_ids)

    def noted(sample, prompt_ids, tokenizer):
        turns = tool(sample, prompt_ids, tokenizer)
        returned.extend(turns)
        return turns

    flags = {"rollout": noted, "reward": reward, "total_episodes": 12, "eval_every": 4}
    run_dir = run(algo, gpt2_dir, tmp_path / "run", **flags)
    assert seen == [[token for ids, _ in turns for token in ids][:9] for turns in returned]
    ((_, batch),) = calls
    assert sum(WRITTEN[0] in ids for ids in seen) > 6
    seen = seen[len(PROMPTS) : len(PROMPTS) + 12]  # between two evaluations
    for ids, response, mask in zip(seen, batch.response.tolist(), batch.response_mask.tolist(), strict=True):
        kept = [token for token, keep in zip(response, mask, strict=True) if keep]
        assert [token for token in ids if token not in WRITTEN] == [x for x in kept if x not in WRITTEN]
        for place, (token, keep) in enumerate(zip(response, mask, strict=True)):
            if place and token in (0, 8, 14, 20) and keep:  # behind a vowel
                assert not any(mask[place + 1 : place + 3])
    first, _ = losses[0]
    assert batch.response_mask.sum() < sum(map(len, seen))
    close((first[0] - first[1]).exp(), torch.ones(first[0].shape))
    assert any("[eq]" in row["output"] for row in samples(run_dir))


def test_the_gradient_is_that_of_the_sampled_tokens(build_model):
    """Of a sum of log-probabilities, against a whole forward pass; exactly zero at the states before other tokens."""
    lm = build_model(dtype=torch.float64)
    lm.plain_output = True
    generator = torch.Generator().manual_seed(0)
    query, response = (torch.randint(0, 21, (3, n), generator=generator) for n in (5, 7))
    query_mask = torch.arange(5) >= torch.tensor([[0], [2], [3]])
    mask = torch.tensor([[1, 1, 0, 0, 1, 1, 1], [1, 0, 1, 0, 0, 0, 0], [0, 0, 1, 1, 1, 0, 0]], dtype=torch.bool)
    logprobs, states, _ = response_logprobs(lm, query, query_mask, response, mask)
    states.retain_grad()
    logprobs.sum().backward()
    found = [weight.grad.clone() for weight in lm.parameters()]
    assert states.grad[~mask].abs().max() == 0 and states.grad[mask].abs().sum(1).min() > 0
    lm.zero_grad()
    naive = 0.0
    for row in range(3):
        ids = torch.cat([query[row, query_mask[row]], response[row]])
        logits = lm(ids[None]).logits[0].log_softmax(-1)
        begin = int(query_mask[row].sum())
        for place in mask[row].nonzero()[:, 0].tolist():
            naive = naive + logits[begin + place - 1, response[row, place]]
    naive.backward()
    for one, weight in zip(found, lm.parameters(), strict=True):
        close(one, weight.grad, 1e-10)


def test_advantages_are_those_of_the_groups(gpt2_dir, tmp_path, monkeypatch):
    updates = recorded(monkeypatch, grpo, "update")
    run("grpo", gpt2_dir, tmp_path / "run", total_episodes=12)
    ((arguments, _),) = updates
    batch = arguments[3]
    groups = batch.scores.view(4, 3)
    expected = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    close(batch.advantages, torch.where(groups.std(1, keepdim=True) == 0, 0.0, expected).flatten())
    assert groups.std() > 0


def test_scores_of_what_was_read_go_to_the_sampled_token_before(gpt2_dir, tmp_path, monkeypatch):
    calls = rolled(monkeypatch, ppo)
    run("ppo", gpt2_dir, tmp_path / "run", reward=by_token, total_episodes=12)
    ((_, batch),) = calls
    for scores, ids, mask in zip(batch.raw_scores, batch.response, batch.response_mask, strict=True):
        close(scores[~mask], torch.zeros(int((~mask).sum())))
        places = mask.nonzero()[:, 0].tolist()
        for place, after in zip(places[:-1], places[1:], strict=True):
            assert float(scores[place]) == pytest.approx(0.1 * ids[place:after].sum().item())


@pytest.mark.parametrize("algo", ["ppo"])
def test_adapters(algo, gpt2_dir, tmp_path):
    metrics = log(run(algo, gpt2_dir, tmp_path / "run", lora_r=3, ppo_epochs=1, batch_size=12))
    assert metrics[0]["policy/ratio"] == pytest.approx(1, abs=1e-12)
    assert abs(metrics[0]["objective/kl"]) < 1e-12


# ---- What a function gets and returns --------------------------------------------------------------------------------


@both
def test_columns_and_seeds(algo, gpt2_dir, tmp_path):
    """Columns of the function reach reward and metric, beside those of the rows; seeds are of the row alone."""
    seen = []

    async def game(sample, prompt_ids, seeds, goal, prompts, temperature, max_new_tokens, model, **columns):
        await asyncio.sleep(0)
        seen.append((seeds, temperature))
        assert len(goal) == len(prompts) == len(prompt_ids) and max_new_tokens == 9 and model.config.vocab_size
        goal[0] = "changed"  # a copy
        return once(sample, prompt_ids), {"won": [seed % 2 for seed in seeds], "asked": prompts}

    async def reward(won, goal, asked, prompts, **columns):
        await asyncio.sleep(0)
        assert asked == prompts and {*goal} == {"g"}
        return [float(x) for x in won]

    async def metric(won, **columns):
        return {"won": won}

    rows = [{"prompt": p, "goal": "g"} for p in PROMPTS]
    flags = {"rollout": game, "reward": reward, "metric": metric, "eval_every": 4, "total_episodes": 24}
    run_dir = run(algo, gpt2_dir, tmp_path / "run", dataset=rows, temperature=0.7, eval_temperature=0.5, **flags)
    first, *_ = log(run_dir)
    assert first["eval/reward"] == first["eval/won"]
    rolled = [seeds for seeds, temperature in seen if temperature == 0.7]
    evaluated = [seeds for seeds, temperature in seen if temperature == 0.5]
    assert len({*rolled[0], *rolled[1]}) == 24 and evaluated[0] == evaluated[1] != rolled[0][:7]


@both
def test_another_engine(algo, gpt2_dir, tmp_path):
    """Rows for which nothing was sampled are not compared with anything. Too long ones are cut."""

    def engine(model, prompt_ids, temperature, max_new_tokens, tokenizer):
        responses = []
        for ids in prompt_ids:
            new = model.generate(
                torch.tensor([ids]), max_new_tokens=max_new_tokens, do_sample=True, temperature=temperature,
                pad_token_id=tokenizer.pad_token_id,
            )  # fmt: skip
            responses.append([(new[0, len(ids) :], True), ([3] * 9, False)])
        return responses

    metrics = log(run(algo, gpt2_dir, tmp_path / "run", rollout=engine))
    assert all(math.isfinite(value) for record in metrics for value in record.values())
    assert metrics[0]["tokens/truncated_rate"] > 0.8  # the limit is reached by what is not trained, too


def byte_pairs():
    """The tokenizer of characters and markers with a token for some pairs, so that a text has several readings."""
    plain = build_tokenizer(TOOLS)
    letters = [chr(number) for number in range(97, 123)]
    merges = [*zip(letters, letters[1:], strict=False), *zip(letters[1:], letters, strict=False)]
    vocabulary = {token: i for i, token in enumerate([*plain.get_vocab(), *map("".join, merges)])}
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>"))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    names = {"eos_token": "<|im_end|>", "pad_token": "<pad>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    tokenizer.chat_template = TOOLS
    return tokenizer


@pytest.mark.parametrize("tokenizer", [build_tokenizer(TOOLS), byte_pairs()], ids=["characters", "byte pairs"])
def test_a_call_of_a_tool_in_a_chat(build_model, tmp_path, tokenizer):
    """A template with tools. The call is trained, its result and the header of the next turn are not, and the response
    is what the template writes."""
    lm = build_model(vocab_size=len(tokenizer), n_positions=256, eos_token_id=tokenizer.eos_token_id)
    question = [{"role": "user", "content": "2+2?"}]
    seen = []

    def episode(sample, prompt_ids, prompts, tokenizer):
        calls = sample(prompt_ids, range(len(prompt_ids)))
        result = tokenizer(f"{TURN_END[-1]}<|im_start|>user\nresult 4{TURN_END}<|im_start|>assistant\n")["input_ids"]
        contexts = [prompt + call + result for prompt, call in zip(prompt_ids, calls, strict=True)]
        answers = sample(contexts, range(len(contexts)))
        seen.extend(zip(prompts, calls, answers, strict=True))
        return [[(call, True), (result, False), (new, True)] for call, new in zip(calls, answers, strict=True)]

    settings = {"tokenizer": tokenizer, "dataset": [{"prompt": question, "tools": [{"name": "add"}]}] * 2}
    run_dir = run("grpo", lm, tmp_path / "run", rollout=episode, max_new_tokens=90, eval_every=4, **settings)
    prompt, call, new = seen[0]
    called = tokenizer.decode(call).removesuffix("<|im_end|>")
    chat = [*question, {"role": "assistant", "content": called}, {"role": "tool", "content": "4"}]
    if call[-1] == tokenizer.eos_token_id:
        text = tokenizer.apply_chat_template(chat, tools=[{"name": "add"}], tokenize=False, add_generation_prompt=True)
        result = tokenizer(f"\n<|im_start|>user\nresult 4{TURN_END}<|im_start|>assistant\n")["input_ids"]
        assert prompt + tokenizer.decode(call + result) == text
    assert any("[\\n<|im_start|>user\\nresult 4<|im_end|>" in row["output"] for row in samples(run_dir))
    several = [ids for _, ids, _ in seen if ids != tokenizer(tokenizer.decode(ids))["input_ids"]]
    assert bool(several) == (len(tokenizer) > 110)  # what was sampled is kept, not tokenised again


@both
def test_parts_of_a_reward_and_the_first_rows(algo, gpt2_dir, tmp_path):
    """Other columns of a reward are logged by name; the first rows of every rollout can be read, and stand there once
    where a run goes on."""

    def reward(outputs, output_ids, **columns):
        return {"score": vowels(outputs, output_ids), "length": [len(ids) for ids in output_ids]}

    flags = {"reward": reward, "eval_every": 4, "save_every": 1, "keep_checkpoints": 9}
    run_dir = run(algo, gpt2_dir, tmp_path / "run", **flags)
    first, second, last = log(run_dir)
    assert 3 < first["eval/length"] < 9 and 3 < second["reward/length"] < 9 and "reward/length" in last
    path = run_dir / "rollouts.jsonl"
    text = path.read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    assert [row["step"] for row in rows] == [4] * 4 + [8] * 4
    assert rows[0].keys() == {"step", "prompt", "output", "score", "advantage"}
    assert any("[eq]" in row["output"] for row in rows)
    if algo == "grpo":
        assert sum(row["advantage"] for row in rows[:3]) == pytest.approx(0, abs=1e-9)
    (run_dir / "README.md").unlink()
    shutil.rmtree(run_dir / "checkpoints/step_00000008")
    run(algo, gpt2_dir, run_dir, **flags)
    assert path.read_text() == text


def test_options_of_the_template_reach_every_text(build_model, tmp_path, monkeypatch):
    tokenizer = build_tokenizer(TOOLS.replace("'Be good.'", "('Think.' if think else 'Be ' + mood)"))
    lm = build_model(vocab_size=len(tokenizer), n_positions=256, eos_token_id=tokenizer.eos_token_id)
    seen = []

    def episode(sample, prompt_ids, prompts, tokenizer):
        chat = [{"role": "user", "content": "b?"}]
        assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == prompts[0]
        seen.extend(prompts)
        return once(sample, prompt_ids)

    flags = {"tokenizer": tokenizer, "dataset": [{"prompt": [{"role": "user", "content": "b?"}]}], "rollout": episode}
    run("grpo", lm, tmp_path / "run", template_options=("think=false", "mood=quick"), total_episodes=12, **flags)
    assert all("system\nBe quick<|im_end|>" in prompt for prompt in seen)
    with pytest.raises(InputError, match="--template-options .* must be key=value"):
        run("grpo", lm, tmp_path / "run", template_options=("think",), **flags)
    with pytest.raises(InputError, match="--template-options .*: a value is not YAML"):
        run("grpo", lm, tmp_path / "other", template_options=("think=[a/b/c",), **flags)


# ---- What is refused -------------------------------------------------------------------------------------------------


def retokenised(sample, prompt_ids, tokenizer):
    new = sample(prompt_ids, range(len(prompt_ids)))
    return [[(tokenizer(tokenizer.decode(ids[:-1]) + "b")["input_ids"], True)] for ids in new]


def forgets_a_turn(sample, prompt_ids):
    places = range(len(prompt_ids))
    first = sample(prompt_ids, places, stop=("a", "b", "c", "d", "e"))
    second = sample([ids + new + WRITTEN for ids, new in zip(prompt_ids, first, strict=True)], places)
    return [[(new, True), (more, True)] for new, more in zip(first, second, strict=True)]


WRONG = {
    "must return a list of 12 lists of": lambda sample, prompt_ids: once(sample, prompt_ids)[1:],
    "for prompt '.*': \\[3": lambda prompt_ids: [[3, 4] for _ in prompt_ids],
    "the column 'won' has not one": lambda sample, prompt_ids: (once(sample, prompt_ids), {"won": [1]}),
    "the column 'lost' has not one": lambda sample, prompt_ids: (once(sample, prompt_ids), {"lost": 1.0}),
    "a column 'prompt', which the rows": lambda sample, prompt_ids: (once(sample, prompt_ids), {"prompt": [1] * 12}),
    "for prompt '.*': \\[1": lambda prompt_ids: ([[1]] * 12, {}),
    "of 12 lists of .* returned \\(\\[": lambda sample, prompt_ids: tuple(once(sample, prompt_ids)),
    "an id is not one of the model's 25": lambda prompt_ids: [[([25], True)] for _ in prompt_ids],
    "no trained ids within --max-new": lambda prompt_ids: [[([1] * 9, False), ([2], True)] for _ in prompt_ids],
    "did not return behind exactly": retokenised,
    "behind exactly the ids before": forgets_a_turn,
    "a row stands twice in one call": lambda sample, prompt_ids: sample(prompt_ids[:2], [0, 0]),
    "needs 'price', which is neither": lambda price: None,
}


@pytest.mark.parametrize("message", WRONG)
def test_what_is_refused(message, gpt2_dir, tmp_path):
    with pytest.raises(InputError, match=message):
        run("grpo", gpt2_dir, tmp_path / "run", rollout=WRONG[message])


def fails_in_one(sample, prompt_ids, seeds, tokenizer):
    """In the second process, in the first rollout."""
    if os.environ["RANK"] == "1":
        raise ValueError("the game is over")
    return tool(sample, prompt_ids, tokenizer)


def test_an_error_in_one_process_ends_all(gpt2_dir, tmp_path):
    rows = write(tmp_path / "rows.jsonl", [{"prompt": p} for p in PROMPTS])
    argv = [ROOT / "algos/grpo.py", "--model", gpt2_dir, "--dataset", rows, "--reward", f"{__file__}:vowels"]
    argv += ["--rollout", f"{__file__}:fails_in_one", "--total-episodes", 16, "--max-new-tokens", 5, "--run-dir", "run"]
    done = launch(torchrun(2), argv, tmp_path, tmp_path, PYTHONPATH=str(ROOT / "tests"))
    assert done.returncode != 0 and "the game is over" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_stop_string_may_stand_alone(gpt2_dir, tmp_path):
    """It is not taken for a list of letters."""
    seen = []

    def stops(sample, prompt_ids, tokenizer, stop="ab"):
        new = sample(prompt_ids, range(len(prompt_ids)), stop=stop)
        seen.extend(tokenizer.batch_decode(new))
        return [[(ids, True)] for ids in new]

    run("grpo", gpt2_dir, tmp_path / "run", rollout=stops, total_episodes=12)
    assert any(letter in text[:-1] for text in seen for letter in "ab")


def test_scores_that_are_not_finite_end_with_a_sentence(gpt2_dir, tmp_path):
    """A score beyond float32 is found at the update, in all processes."""
    flags = {"reward": lambda outputs, **_: [1e39] * len(outputs), "dtype": "float32", "rollout": once}
    with pytest.raises(FloatingPointError, match="12 episodes|6 episodes"):
        run("ppo", gpt2_dir, tmp_path / "run", **flags)


def test_coroutines_share_a_loop_and_may_be_cancelled():
    held = []

    async def waits(outputs):
        held or held.append(asyncio.Queue(1))
        await held[0].put(1)
        return [await held[0].get()]

    async def cancelled(outputs):
        task = asyncio.ensure_future(asyncio.sleep(9))
        task.cancel()
        await task

    assert [call_function(waits, "f", [{"prompt": ""}], {"outputs": [""]}) for _ in range(3)] == [[1]] * 3
    with pytest.raises(RuntimeError, match="f was cancelled"):
        call_function(cancelled, "f", [{"prompt": ""}], {"outputs": [""]})


def test_parts_of_what_was_sampled():
    once = [([1], [2, 3, 4])]
    assert sampled_part([1], [1, 2, 3], once) == [1, 2, 3]
    assert sampled_part([1, 2], [1, 2, 3], once) == [1, 2, 3]  # behind another part
    assert sampled_part([1], [1, 2, 5], once) == [1, 2]  # something else
    assert sampled_part([1, 5], [1, 5, 3], once) == [1, 5]  # behind others
    assert sampled_part([], [1, 2], once) == []  # before it
    twice = [*once, ([1, 2], [5, 6])]  # the first was cut
    assert sampled_part([1], [1, 2, 5, 6], twice) == [1, 2, 5, 6]
    assert sampled_part([1], [1, 2, 3, 5], twice) == [1, 2, 3]


def test_flags_that_do_not_go_together(gpt2_dir, tmp_path, monkeypatch):
    with pytest.raises(InputError, match="--stop is not used with --rollout"):
        run("grpo", gpt2_dir, tmp_path / "run", stop=("a",))
    with pytest.raises(InputError, match="--min-length-limit is not used with --rollout"):
        run("ppo", gpt2_dir, tmp_path / "run", min_length_limit=3)


def test_where_no_room_is_left_nothing_is_sampled(gpt2_dir, tmp_path):
    lengths = []

    def greedy_for_more(sample, prompt_ids):
        places = range(len(prompt_ids))
        first = sample(prompt_ids, places)
        whole = [ids + new for ids, new in zip(prompt_ids, first, strict=True)]
        for new, more in zip(first, sample(whole, places), strict=True):
            lengths.append((len(new), len(more)))
        return [[(new, True)] for new in first]

    run("grpo", gpt2_dir, tmp_path / "run", rollout=greedy_for_more, total_episodes=12)
    assert all(more == 0 for new, more in lengths if new == 9) and any(more for _, more in lengths)
    assert all(new + more <= 9 for new, more in lengths)


def test_the_file_of_the_function_is_part_of_the_run(gpt2_dir, tmp_path):
    path = Path(write(tmp_path / "hook.py", []))
    path.write_text("def once(sample, prompt_ids):\n    return [[(x, True)] for x in sample(prompt_ids, range(12))]\n")
    run_dir = run("grpo", gpt2_dir, tmp_path / "run", rollout=f"{path}:once", total_episodes=12)
    assert "rollout" in json.loads((run_dir / "env.json").read_text())["files"]
    path.write_text(path.read_text() + "# edited\n")
    with pytest.raises(InputError, match="the file of --rollout has changed"):
        run("grpo", gpt2_dir, tmp_path / "run", rollout=f"{path}:once", total_episodes=12)
