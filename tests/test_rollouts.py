"""--rollout: responses of several segments, by a function of the user: `python -m pytest tests/test_rollouts.py`

The function of most tests writes "eq" behind every sampled vowel, and goes on: `tool`. Layouts: test_layout.py and
test_fsdp.py. The embedded task with a calculator is in test_tasks.py.
"""

import asyncio
import os
import shutil
import signal

import pytest
import torch
from harness import ROOT, launch, lines, torchrun
from helpers import EOS, answer, close, log, recorded, rolled, samples, trained_ids, turn, user, weights, write
from test_grpo import run_grpo
from test_invariants import PROMPTS, run_ppo
from test_rows import TOOLS, TURN_END, build_tokenizer

from algos import grpo, ppo
from common.errors import InputError
from common.functions import call_reward

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
    counts = [sum(letter in "aeiou" for letter in text) for text in outputs]
    return [0.3 * count + 0.01 * len(ids) for count, ids in zip(counts, output_ids, strict=True)]


def run(algo, model, run_dir, **flags):
    settings = {"rollout": tool, "reward": vowels, "total_episodes": 24, "rollout_batch_size": 12, "batch_size": 6}
    settings |= {"micro_batch_size": 6, "ppo_epochs": 2, "max_new_tokens": 9, "temperature": 1.0, "kl_coef": 0.1}
    start = run_ppo if algo == "ppo" else run_grpo
    return start(model, run_dir, **settings | {"save_every": 2, "adam_eps": 1e-6} | flags)[1]


both = pytest.mark.parametrize("algo", NAMED)


@both
def test_a_function_that_samples_once_changes_no_byte(algo, gpt2_dir, tmp_path):
    """So does one that stops and goes on: the n-th token of a row takes the n-th uniform."""
    plain = run(algo, gpt2_dir, tmp_path / "plain", rollout=None, eval_every=2)
    for function in (once, cut):
        found = run(algo, gpt2_dir, tmp_path / function.__name__, rollout=function, eval_every=2)
        assert (found / "metrics.jsonl").read_bytes() == (plain / "metrics.jsonl").read_bytes()
        assert all(x.equal(y) for x, y in zip(weights(found).values(), weights(plain).values(), strict=True))


@both
def test_only_what_was_sampled_is_trained(algo, gpt2_dir, tmp_path, monkeypatch):
    """The mask leaves out what the tool wrote, which reward and evaluations see; the first ratio is 1."""
    calls = rolled(monkeypatch, NAMED[algo])
    losses = recorded(monkeypatch, NAMED[algo], "policy_loss" if algo == "ppo" else "clip_loss")
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
    [(_, episodes)] = calls
    assert sum(WRITTEN[0] in ids for ids in seen) > 6
    seen = seen[len(PROMPTS) : len(PROMPTS) + 12]  # between two evaluations
    for ids, kept, episode in zip(seen, trained_ids(episodes), episodes, strict=True):
        begin = len(episode.query)
        response = [*episode.ids[begin:]]
        mask = [label != -100 for label in episode.labels[begin:]]
        assert response == ids[: len(response)] and mask[-1]
        assert [token for token in ids if token not in WRITTEN] == [x for x in kept if x not in WRITTEN]
        for place, (token, keep) in enumerate(zip(response, mask, strict=True)):
            if place and token in (0, 8, 14, 20) and keep:  # behind a vowel
                assert not any(mask[place + 1 : place + 3])
    first, _ = losses[0]
    assert sum(episode.length for episode in episodes) < sum(map(len, seen))
    log_ratio = first[0] - first[1] if algo == "ppo" else first[0]
    close(log_ratio.exp(), torch.ones(len(log_ratio)))
    assert any("[eq]" in row["output"] for row in samples(run_dir))


@both
def test_columns_and_seeds(algo, gpt2_dir, tmp_path):
    """Columns of the function reach reward and metric, beside those of the rows; seeds are of the row alone. Coroutines
    share a loop, to which a client that they keep belongs."""
    seen = []
    loops = set()

    async def game(sample, prompt_ids, seeds, goal, prompts, temperature, max_new_tokens, model, **columns):
        loops.add(asyncio.get_running_loop())
        seen.append((seeds, temperature))
        assert len(goal) == len(prompts) == len(prompt_ids) and max_new_tokens == 9 and model.config.vocab_size
        goal[0] = "changed"  # a copy
        return once(sample, prompt_ids), {"won": [seed % 2 for seed in seeds], "asked": prompts}

    async def reward(won, goal, asked, prompts, **columns):
        loops.add(asyncio.get_running_loop())
        assert asked == prompts and {*goal} == {"g"}
        return [float(x) for x in won]

    async def metric(won, **columns):
        return {"won": won}

    rows = [{"prompt": p, "goal": "g"} for p in PROMPTS]
    flags = {"rollout": game, "reward": reward, "metric": metric, "eval_every": 4, "total_episodes": 24}
    run_dir = run(algo, gpt2_dir, tmp_path / "run", dataset=rows, temperature=0.7, eval_temperature=0.5, **flags)
    first, *_ = log(run_dir)
    assert first["eval/reward"] == first["eval/won"] and len(loops) == 1
    rolled = [seeds for seeds, temperature in seen if temperature == 0.7]
    evaluated = [seeds for seeds, temperature in seen if temperature == 0.5]
    assert len({*rolled[0], *rolled[1]}) == 24 and evaluated[0] == evaluated[1] != rolled[0][:7]


def test_a_call_of_a_tool_in_a_chat(build_model, tmp_path):
    """A template with tools. The call is trained, its result and the header of the next turn are not, and the response
    is what the template writes. Pairs of letters are tokens, so a text has several readings."""
    letters = [chr(number) for number in range(97, 123)]
    merges = [*zip(letters, letters[1:], strict=False), *zip(letters[1:], letters, strict=False)]
    tokenizer = build_tokenizer(TOOLS, merges=merges)
    lm = build_model(vocab_size=len(tokenizer), n_positions=256, eos_token_id=tokenizer.eos_token_id)
    question = [user("2+2?")]
    seen = []
    results = []

    def episode(sample, prompt_ids, prompts, tokenizer):
        calls = sample(prompt_ids, range(len(prompt_ids)))
        result = tokenizer(f"{TURN_END[-1]}<|im_start|>user\nresult 4{TURN_END}<|im_start|>assistant\n")["input_ids"]
        results.append(result)
        contexts = [prompt + call + result for prompt, call in zip(prompt_ids, calls, strict=True)]
        answers = sample(contexts, range(len(contexts)))
        seen.extend(zip(prompts, calls, answers, strict=True))
        return [[(call, True), (result, False), (new, True)] for call, new in zip(calls, answers, strict=True)]

    settings = {"tokenizer": tokenizer, "dataset": [{"prompt": question, "tools": [{"name": "add"}]}] * 12}
    run_dir = run("grpo", lm, tmp_path / "run", rollout=episode, max_new_tokens=90, eval_every=4, **settings)
    prompt, call, _ = next(row for row in seen if row[1][-1] == tokenizer.eos_token_id)
    called = tokenizer.decode(call).removesuffix("<|im_end|>")
    chat = [*question, answer(called), turn("tool", "4")]
    text = tokenizer.apply_chat_template(chat, tools=[{"name": "add"}], tokenize=False, add_generation_prompt=True)
    assert prompt + tokenizer.decode(call + results[0]) == text
    assert any("[\\n<|im_start|>user\\nresult 4<|im_end|>" in row["output"] for row in samples(run_dir))
    assert any(ids != tokenizer(tokenizer.decode(ids))["input_ids"] for _, ids, _ in seen)  # which is kept as sampled


@both
def test_parts_of_a_reward_and_the_first_rows(algo, gpt2_dir, tmp_path, capsys):
    """Other columns of a reward are logged by name; the first rows of every rollout can be read. A killed run ends with
    the same bytes, and these rows stand there once."""

    def reward(outputs, output_ids, **columns):
        return {"score": vowels(outputs, output_ids), "length": [len(ids) for ids in output_ids]}

    flags = {"reward": reward, "rollout": f"{__file__}:tool", "eval_every": 4, "save_every": 1, "keep_checkpoints": 9}
    run_dir = run(algo, gpt2_dir, tmp_path / "run", **flags)
    first, second, last = log(run_dir)
    assert 3 < first["eval/length"] < 9 and 3 < second["reward/length"] < 9 and "reward/length" in last
    rows = lines(run_dir / "rollouts.jsonl")
    first_rows = 6 if algo == "grpo" else 4  # two groups
    assert [row["step"] for row in rows] == [4] * first_rows + [8] * first_rows
    assert rows[0].keys() == {"step", "prompt", "output", "score", "advantage"}
    assert any("[eq]" in row["output"] for row in rows)
    if algo == "grpo":
        for group in rows[:3], rows[3:6]:
            assert sum(row["advantage"] for row in group) == pytest.approx(0, abs=1e-9)
    killed = shutil.copytree(run_dir, tmp_path / "killed")
    shutil.rmtree(killed / "hf_model")
    shutil.rmtree(killed / "checkpoints/step_00000008")
    run(algo, gpt2_dir, killed, **flags)
    assert "from step 4" in capsys.readouterr().out
    for name in ("metrics.jsonl", "rollouts.jsonl", "hf_model/model.safetensors"):
        assert (killed / name).read_bytes() == (run_dir / name).read_bytes()


def test_options_of_the_template_reach_every_text(build_model, tmp_path):
    tokenizer = build_tokenizer(TOOLS.replace("'Be good.'", "('Think.' if think else 'Be ' ~ mood)"))
    lm = build_model(vocab_size=len(tokenizer), n_positions=256, eos_token_id=tokenizer.eos_token_id)
    chat = [user("b?")]
    seen = []

    def episode(sample, prompt_ids, prompts, tokenizer):
        assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == prompts[0]
        seen.extend(prompts)
        return once(sample, prompt_ids)

    flags = {"tokenizer": tokenizer, "dataset": [{"prompt": chat}], "rollout": episode}
    run("grpo", lm, tmp_path / "run", template_options=("think=false", "mood=3"), total_episodes=12, **flags)
    assert all("system\nBe 3<|im_end|>" in prompt for prompt in seen)


def retokenised(sample, prompt_ids, tokenizer):
    new = sample(prompt_ids, range(len(prompt_ids)))
    return [[(tokenizer(tokenizer.decode(ids[:-1]) + "b")["input_ids"], True)] for ids in new]


def forgets_a_turn(sample, prompt_ids):
    places = range(len(prompt_ids))
    first = sample(prompt_ids, places, stop=("a", "b", "c", "d", "e"))
    second = sample([ids + new + WRITTEN for ids, new in zip(prompt_ids, first, strict=True)], places)
    return [[(new, True), (more, True)] for new, more in zip(first, second, strict=True)]


def adds_a_word(sample, prompt_ids):
    new = sample([[*ids, 1] for ids in prompt_ids], range(len(prompt_ids)))
    return [[([1, *ids], True)] for ids in new]


WRONG = {
    "returned 11 values, expected 12: one for each row": lambda sample, prompt_ids: once(sample, prompt_ids)[1:],
    "returned 1 values, expected": lambda sample, prompt_ids: (once(sample, prompt_ids), {"won": [1]}),
    "no trained ids within --max-new": lambda prompt_ids: [[([1] * 9, False), ([2], True)] for _ in prompt_ids],
    "did not return behind exactly": retokenised,
    "behind exactly the ids before": forgets_a_turn,
    "needs a number for each trained id": lambda prompt_ids: ([[([2], True)]] * 12, {"sampler_logprobs": [[]] * 12}),
    "trained ids that `sample` did not return": adds_a_word,
    # the last one twice
    "takes contexts \\(ids\\) for different rows": lambda sample, prompt_ids: sample(prompt_ids[:2], [11, -1]),
    "counted from 0": lambda sample, prompt_ids: sample([[], [1]], [0, 1]),
    "missing a required argument: 'price'. It gets sample, prompt_ids": lambda price: None,
}


@pytest.mark.parametrize("message", WRONG)
def test_what_is_refused(message, gpt2_dir, tmp_path):
    with pytest.raises(InputError, match=message):
        run("grpo", gpt2_dir, tmp_path / "run", rollout=WRONG[message])


def fails_in_one(sample, prompt_ids, seeds, tokenizer):
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


def test_where_no_room_is_left_nothing_is_sampled(gpt2_dir, tmp_path):
    """A stop string may stand alone: it is not taken for a list of letters."""
    lengths = []
    texts = []

    def greedy_for_more(sample, prompt_ids, tokenizer):
        places = range(len(prompt_ids))
        first = sample(prompt_ids, places, stop="ab")
        texts.extend(tokenizer.batch_decode(first))
        whole = [ids + new for ids, new in zip(prompt_ids, first, strict=True)]
        for new, more in zip(first, sample(whole, places), strict=True):
            lengths.append((len(new), len(more)))
        assert sample([], []) == []  # in a turn in which no row goes on
        return [[(new, True)] for new in first]

    run("grpo", gpt2_dir, tmp_path / "run", rollout=greedy_for_more, total_episodes=12)
    assert all(more == 0 for new, more in lengths if new == 9) and any(more for _, more in lengths)
    assert all(new + more <= 9 for new, more in lengths)
    assert any(letter in text[:-1] for text in texts for letter in "ab")


def test_ctrl_c_ends_a_coroutine():
    async def reward(prompts):
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(99)

    with pytest.raises(KeyboardInterrupt):
        call_reward(reward, "reward", [{"prompt": "a"}], {"prompts": ["a"]})


def test_a_coroutine_runs_beside_a_running_loop():
    """As in a notebook. All of them share a loop, as a client that a function keeps may need."""
    loops = set()

    async def reward(prompts):
        loops.add(asyncio.get_running_loop())
        return [1.0] * len(prompts)

    async def notebook():
        return [call_reward(reward, "reward", [{"prompt": "a"}], {"prompts": ["a"]}) for _ in range(2)]

    assert asyncio.run(notebook()) == [([1.0], {})] * 2 and len(loops) == 1
    assert call_reward(reward, "reward", [{"prompt": "a"}], {"prompts": ["a"]}) == ([1.0], {}) and len(loops) == 1
