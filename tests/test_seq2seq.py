"""Encoder-decoders in sft, ppo, grpo and ilql: `python -m pytest tests/test_seq2seq.py`

Tiny random T5 (tied; gated and untied) and BART, each with a tokenizer that ends texts in its own way. Everything is
held against plain transformers on one row at a time: the query into the encoder, the start token and the response into
the decoder, no padding, no mask, no cache (`alone`). Two small models learn to write three letters backwards.
"""

import copy
import itertools
import math
import re

import pytest
import torch
import transformers as tf
from test_invariants import log, recorded
from test_models import more_vowels
from tokenizers.processors import TemplateProcessing
from torch.nn import functional as F
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoTokenizer

from algos import dpo, grpo, ilql, ppo, reward, sft
from benchmarks.tasks import randomwalks
from common import sampling
from common.cli import InputError
from common.models import as_decoder
from common.seeding import draw
from common.tokens import encode_prompts

BOS, EOS, PAD = 21, 22, 23
T5 = {"d_model": 12, "d_kv": 5, "d_ff": 20, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 3}
T5 |= {"relative_attention_num_buckets": 6, "relative_attention_max_distance": 9, "dropout_rate": 0.3}
GATED = {"decoder_start_token_id": BOS, "tie_word_embeddings": False, "feed_forward_proj": "gated-gelu"}
BART = {"d_model": 12, "encoder_layers": 3, "decoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 20}
BART |= {"decoder_attention_heads": 3, "decoder_ffn_dim": 28, "max_position_embeddings": 32, "dropout": 0.3}
BART |= {"decoder_layerdrop": 0.3, "forced_eos_token_id": None, "decoder_start_token_id": EOS}
FAMILIES = {"t5": (tf.T5Config, T5 | {"decoder_start_token_id": PAD}), "t5_gated": (tf.T5Config, T5 | GATED)}
FAMILIES["bart"] = (tf.BartConfig, BART)
ADDED = {"t5": ([], [EOS]), "t5_gated": ([], []), "bart": ([BOS], [EOS])}  # by the tokenizer, before and behind a text
TOP = r"(model\.)?decoder\.((block|layers)\.1|final_layer_norm)\."  # the last of two decoder blocks, the norm behind
TEXTS = [("b", "cda"), ("cde", "fgfcq"), ("fg", ""), ("hijkl", "mnopa"), ("", "st"), ("m", "hij<eos>")]
PROMPTS = [{"prompt": prompt} for prompt, _ in TEXTS]
ROWS = [{"prompt": prompt, "completion": completion} for prompt, completion in TEXTS]


def save_random(directory, config, settings, tokenizer, scale=0.0):
    """scale: standard deviation of the matrices, in place of the library's initial values; 1 in shared embeddings."""
    ids = {"vocab_size": 25, "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        lm = AutoModelForSeq2SeqLM.from_config(config(**ids | settings))
        for name, weight in [*lm.named_parameters(), *lm.named_buffers()] if scale else ():  # a buffer of BART: a bias
            if weight.ndim > 1:
                weight.data.normal_(0, 1 if "shared" in name else scale)
    lm.save_pretrained(directory), tokenizer.save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def folder(family, tmp_path_factory):
    """Directory of the random model of a family, and a tokenizer that ends texts as ADDED says."""
    directory, letters, (before, behind) = tmp_path_factory.mktemp(family), randomwalks.tokenizer(), ADDED[family]
    if before or behind:
        template, tokens = f"{'<bos> ' * len(before)}$A <eos>", [("<bos>", BOS), ("<eos>", EOS)]
        letters.backend_tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=tokens)
    return save_random(directory, *FAMILIES[family], letters, scale=0.5)


@pytest.fixture
def pairs(family):
    """(query, response) of TEXTS, as ids."""
    before, behind = ADDED[family]
    found = []
    for texts in TEXTS:
        query, response = ([ord(c) - 97 for c in text.removesuffix("<eos>")] for text in texts)
        found.append(([*before, *query, *behind] or [BOS], [*before, *response, EOS]))
    return found


@pytest.fixture
def run(monkeypatch, capsys, folder, tmp_path):
    """run(script, **flags): metrics, directory, trained model and what was printed of one run of main."""

    def main(script, **flags):
        made, number = recorded(monkeypatch, script, "make_optimizer"), len(list(tmp_path.iterdir()))
        settings = {"model": folder, "run_dir": str(tmp_path / f"{number}"), "threads": 1, "save_every": 0, "lr": 1e-2}
        settings |= {"eval_every": 0, "warmup_steps": 0, "batch_size": 6, "micro_batch_size": 4, "dtype": "float64"}
        settings |= {} if script in (ppo, grpo) else {"total_steps": 1}
        metrics, run_dir = script.main(script.Args(**settings | flags))
        assert all(value is not None and math.isfinite(value) for record in log(run_dir) for value in record.values())
        return metrics, run_dir, made[0][0][0].eval(), capsys.readouterr().out

    return main


def reload(folder, dtype=torch.float64):
    """The model by plain transformers, which found every key, expected every key, and missed none."""
    lm, report = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not any(report.values()), report
    return lm.eval()


@torch.no_grad()
def alone(lm, query, response):
    """(what the output layer reads (R, H), logits (R, V)) at each token of a response: the model's own forward."""
    hidden = []
    hook = lm.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: hidden.append(inputs[0]))
    start = lm.config.decoder_start_token_id
    inputs = {"input_ids": torch.tensor([query]), "decoder_input_ids": torch.tensor([[start, *response[:-1]]])}
    output = lm(**inputs, output_hidden_states=True)
    hook.remove()
    last = output.decoder_hidden_states[-1]  # which T5 scales, if its embeddings are tied
    assert_close(F.normalize(hidden[0], dim=-1), F.normalize(last, dim=-1))
    return hidden[0][0], output.logits[0]


def alone_logprobs(lm, query, response, temperature=1.0):
    """(R,) log-probabilities of the tokens of a response."""
    logits = alone(lm, query, response)[1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]


def rows_of(query, query_mask, response, mask):
    """(number, query, response) of each row, as lists without what is masked."""
    parts = zip(query, query_mask, response, mask, strict=True)
    return [(number, x[seen].tolist(), y[kept].tolist()) for number, (x, seen, y, kept) in enumerate(parts)]


def batch(random=0):
    """query, query_mask (4, 9), response, response_mask (4, 7); random: a seed for what lies under the masks, too."""
    ids = torch.randint(0, 21, (4, 16), generator=torch.Generator().manual_seed(0))
    other = torch.randint(0, 25, (4, 16), generator=torch.Generator().manual_seed(random))
    lengths, ends = torch.tensor([[5], [1], [3], [8]]), torch.tensor([[4], [7], [1], [6]])
    mask = torch.cat([torch.arange(9) >= 9 - lengths, torch.arange(7) < ends], 1)
    ids = torch.where(mask, ids, other)
    return ids[:, :9], mask[:, :9], ids[:, 9:], mask[:, 9:]


@pytest.mark.parametrize(("dtype", "attention"), [("float32", "eager"), ("float32", "sdpa"), ("float64", "sdpa")])
def test_logits_are_those_of_each_row_alone(folder, dtype, attention):
    """For any tokens under the masks; without a mask, too. A call without logits_to_keep is the model's own."""
    # 250 eps of float32: T5 does not scale its attention scores, so that the softmax sees their rounding whole
    lm, tolerance = reload(folder, getattr(torch, dtype)), 3e-5 if dtype == "float32" else 1e-10
    lm.set_attn_implementation(attention)
    plain, lm = copy.deepcopy(lm), as_decoder(lm)
    assert as_decoder(lm) is lm and isinstance(lm, type(plain)) and type(lm).__name__ == type(plain).__name__
    options = {"use_cache": False, "logits_to_keep": 7}
    with torch.no_grad():
        for seed in (1, 2):
            query, query_mask, response, mask = batch(seed)
            tokens, attended = (torch.cat(x, 1)[:, :-1] for x in ((query, response), (query_mask, mask)))
            logits = lm(input_ids=tokens, attention_mask=attended.long(), **options).logits
            for row, x, y in rows_of(*batch(seed)):
                expected = alone(plain, x, y)[1]
                assert_close(logits[row, : len(y)], expected, rtol=0, atol=tolerance * expected.abs().max())
            assert expected.softmax(-1).amax(-1).mean() > 0.12  # a uniform distribution has 0.04
        unmasked = lm(input_ids=tokens, **options).logits[3]
        assert_close(unmasked, alone(plain, query[3].tolist(), response[3].tolist())[1], rtol=0, atol=10 * tolerance)
        own = {"input_ids": query, "attention_mask": query_mask.long(), "labels": response.contiguous()}
        assert_close(lm(**own).loss, plain(**own).loss, rtol=0, atol=0)
    for options in ({"do_sample": False}, {"num_beams": 3}):
        assert torch.equal(*(x.generate(query, attention_mask=query_mask.long(), **options) for x in (lm, plain)))


def test_what_moves_a_log_probability(folder):
    """A response token moves its own and those behind, a query token moves all, what is masked moves none."""
    lm = as_decoder(reload(folder))
    query, query_mask, response, mask = batch()
    mask = torch.ones_like(mask)

    @torch.no_grad()
    def moved(other_query, other_response):
        first, second = ((query, query_mask, response, mask), (other_query, query_mask, other_response, mask))
        return (ppo.response_logprobs(lm, *first)[0] - ppo.response_logprobs(lm, *second)[0]).abs()

    for t in range(7):
        other = response.clone()
        other[:, t] = (other[:, t] + 1) % 21
        difference = moved(query, other)
        assert (difference[:, :t] < 1e-12).all() and (difference[:, t:] > 1e-5).all(), t
    for t in range(9):
        other, seen = query.clone(), query_mask[:, t]
        other[:, t] = (other[:, t] + 1) % 21
        difference = moved(other, response)
        assert (difference[~seen] < 1e-12).all() and (difference[seen] > 1e-5).all(), t
        assert not seen.any() or difference[seen].mean() > 0.1, t


def test_sampling_is_that_of_each_row_alone(folder):
    """With the cache, and rows that leave the batch one by one, by a limit or an end token."""
    plain, limits = reload(folder), torch.tensor([4, 7, 2, 7])
    lm, draws = as_decoder(reload(folder)), torch.rand(4, 7, generator=torch.Generator().manual_seed(5)).double()
    (query, query_mask, *_), free = batch(), torch.full((4, 7), 99)
    for place in [(0, 6), (0, 0), (0, 1), (3, 2), (1, 4)]:  # of the token that ends a response, after a run without one
        eos = free[place].item()
        arguments = lm, query, query_mask, draws, [eos], PAD, 0.7
        response, mask = ppo.sample(*arguments, ended=lambda rows, ids: ids.shape[1] >= limits[rows])
        for row, prompt, _ in rows_of(*batch()):
            ids = []
            while ids[-1:] != [eos] and len(ids) < limits[row]:
                logits = alone(plain, prompt, [*ids, 0])[1][-1:]
                ids += draw(logits, draws[row, len(ids)][None], 0.7).tolist()
            assert response[row].tolist() == ids + [PAD] * (7 - len(ids)) and mask[row].sum() == len(ids)
        assert mask[place[0]].sum() <= place[1] + 1
        free = response if eos == 99 else free


PPO = {"dataset": PROMPTS, "reward": more_vowels, "max_new_tokens": 6, "rollout_batch_size": 12, "batch_size": 12}
PPO |= {"total_episodes": 24, "ppo_epochs": 1, "kl_coef": 0.1, "value_head_init": "normal", "temperature": 0.7}


def test_ppo(monkeypatch, run, folder, pairs):
    """Log-probabilities and values are those of plain forwards, ratio 1 and KL 0 before the first update, the reference
    is the initial model also after it, the first token is trained, and batch sizes change nothing."""
    seen, initial = recorded(monkeypatch, ppo, "rollout"), reload(folder)
    head, queries = ppo.PolicyWithValue(initial, "mlp", "normal", 1).value_head, [query for query, _ in pairs]
    metrics, run_dir, model, _ = run(ppo, decode_batch_size=5, **PPO)
    start = log(run_dir)[0]
    assert start["objective/kl"] == pytest.approx(0, abs=1e-9) and start["policy/ratio"] == pytest.approx(1, abs=1e-9)
    assert len(seen) == 2 and abs(metrics["objective/kl"]) > 1e-3
    for number, (_, found) in enumerate(seen):
        for row, query, response in rows_of(*found.tokens()):
            columns = [x[row, : len(response)] for x in (found.ref_logprobs, found.logprobs, found.values)]
            assert query in queries
            expected = [alone_logprobs(initial, query, response, 0.7)] * 2
            expected += [head(alone(initial, query, response)[0])[:, 0].detach()]
            kept = 1 if number else 3  # the policy has moved on
            assert_close(columns[:kept], expected[:kept], rtol=1e-9, atol=1e-9)
    assert seen[0][1].values[:, 0].std() > 0.01  # before the first token: of the query alone
    assert run(ppo, **PPO | {"micro_batch_size": 12})[0] == pytest.approx(metrics, rel=1e-9, abs=1e-9)
    alone_trained = run(ppo, **PPO | {"max_new_tokens": 1, "vf_coef": 0.0, "kl_coef": 0.0, "total_episodes": 12})[0]
    assert alone_trained["optim/grad_norm"] > 1e-3 and alone_trained["tokens/responses_len"] == 1

    back, inputs = ppo.PolicyWithValue.load(run_dir / "hf_model").eval(), batch()
    with torch.no_grad():
        assert_close(back(*inputs)[:2], model(*inputs)[:2], rtol=1e-9, atol=1e-9)


GRPO = {"dataset": PROMPTS, "reward": more_vowels, "max_new_tokens": 6, "rollout_batch_size": 12, "batch_size": 12}
GRPO |= {"total_episodes": 24, "group_size": 4, "ppo_epochs": 2, "kl_coef": 0.1, "temperature": 0.7}


def test_grpo(monkeypatch, run, folder, pairs):
    """Log-probabilities of policy and reference are those of plain forwards, the reference is the initial model also
    after the first update, the first token is trained, and batch sizes change nothing."""
    seen, initial = recorded(monkeypatch, grpo, "all_logprobs"), reload(folder)
    queries = [query for query, _ in pairs]
    metrics, run_dir, model, _ = run(grpo, decode_batch_size=5, **GRPO)
    assert log(run_dir)[0]["objective/kl"] == pytest.approx(0, abs=1e-9) and abs(metrics["objective/kl"]) > 1e-3
    assert len(seen) == 4  # by the policy and by the reference, twice
    for number, ((*_, found, _), logprobs) in enumerate(seen):
        for row, query, response in rows_of(*found.tokens()):
            assert query in queries
            expected = alone_logprobs(initial, query, response, 0.7)
            if number != 2:  # the policy has moved on
                assert_close(logprobs[row, : len(response)], expected, rtol=1e-9, atol=1e-9)
    assert run(grpo, **GRPO | {"micro_batch_size": 12})[0] == pytest.approx(metrics, rel=1e-9, abs=1e-9)
    flags = GRPO | {"max_new_tokens": 1, "kl_coef": 0.0, "total_episodes": 12, "reward": letter, "temperature": 3.0}
    alone_trained = run(grpo, **flags)[0]
    assert alone_trained["optim/grad_norm"] > 1e-3 and alone_trained["tokens/responses_len"] == 1
    assert_close(model.state_dict(), reload(run_dir / "hf_model").state_dict(), rtol=0, atol=0)


def letter(output_ids, **columns):
    return [float(sum(ids) % 5) for ids in output_ids]


def test_ppo_of_the_top_block(monkeypatch, run, folder):
    """--num-layers-unfrozen 1 trains the top decoder block and the norm behind it; all else is the reference's, too."""
    seen, before = recorded(monkeypatch, ppo, "rollout"), reload(folder, torch.float32)
    metrics, run_dir, model, text = run(ppo, num_layers_unfrozen=1, **PPO | {"dtype": "float32", "total_episodes": 12})
    assert metrics["policy/ratio"] == pytest.approx(1, abs=1e-5) and abs(metrics["objective/kl"]) < 1e-5
    assert "reference: shares the frozen weights" in text
    old, reference = dict(before.named_parameters()), dict(seen[0][0][2].named_parameters())
    for name, weight in model.lm.named_parameters():
        trained = bool(re.match(TOP, name))
        assert weight.requires_grad == trained and (reference[name].data_ptr() == weight.data_ptr()) != trained, name
        assert torch.equal(reference[name], old[name]), name
        bias_of_keys = name.endswith("k_proj.bias")  # which has no gradient
        assert bias_of_keys or ((weight - old[name]).abs().max() > 1e-5) == trained, name
    for row, query, response in rows_of(*(found := seen[0][1]).tokens()):
        expected = alone_logprobs(before, query, response, 0.7)
        assert_close(found.ref_logprobs[row, : len(response)], expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(InputError, match="--num-layers-unfrozen 3: the model has 2 layers"):
        run(ppo, num_layers_unfrozen=3, **PPO)


def length(outputs, **columns):
    return {"length": [len(output) for output in outputs]}


@torch.no_grad()
def own_loss(lm, pairs):
    """The loss of transformers, row by row, weighted by the tokens of the responses."""
    sums = [lm(input_ids=torch.tensor([x]), labels=torch.tensor([y])).loss.item() * len(y) for x, y in pairs]
    return sum(sums) / sum(len(y) for _, y in pairs)


def greedy(lm, folder, pairs):
    """Texts that the generate of transformers makes of each query alone."""
    made = [lm.generate(torch.tensor([query]), do_sample=False, max_new_tokens=6)[0] for query, _ in pairs]
    return AutoTokenizer.from_pretrained(folder).batch_decode(made, skip_special_tokens=True)


def test_sft(monkeypatch, run, folder, pairs):
    """The loss is transformers' own; samples of the evaluation are what its generate makes of the export, which goes
    on in another run."""
    decoded = recorded(monkeypatch, sampling, "decode")
    flags = {"dataset": ROWS, "eval_dataset": ROWS, "metric": length, "eval_every": 1, "eval_temperature": 0}
    flags |= {"max_new_tokens": 6, "total_steps": 3}
    metrics, run_dir, model, _ = run(sft, **flags)
    start, first, *_ = log(run_dir)
    initial, back, sampled = reload(folder), reload(run_dir / "hf_model"), [outputs for _, outputs in decoded]
    assert start["eval/loss"] == pytest.approx(own_loss(initial, pairs), rel=1e-9)
    assert first["train/loss"] == pytest.approx(start["eval/loss"], rel=1e-9)
    assert metrics["eval/loss"] == pytest.approx(own_loss(back, pairs), rel=1e-9)
    assert sampled[0] == greedy(initial, folder, pairs) and sampled[-1] == greedy(back, folder, pairs)
    assert sampled[0] != sampled[-1] and len(set(sampled[-1])) > 1
    assert AutoConfig.from_pretrained(run_dir / "hf_model").architectures == [type(back).__name__]
    assert type(back).__module__.startswith("transformers.")
    assert_close(model.state_dict(), back.state_dict(), rtol=0, atol=0)
    assert run(sft, **flags | {"micro_batch_size": 6})[0] == pytest.approx(metrics, rel=1e-9, abs=1e-9)
    _, next_dir, *_ = run(sft, **flags | {"model": str(run_dir / "hf_model"), "total_steps": 1})
    assert log(next_dir)[0]["eval/loss"] == pytest.approx(metrics["eval/loss"], rel=1e-9)


def test_rows(folder, pairs):
    """The prompt as the tokenizer ends it, and one end token behind the output; a chat as its template has it."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    examples, _ = sft.encode_rows(ROWS, tokenizer, 99, True, "--dataset", encoder=True)
    episodes, _ = ilql.encode_episodes([row | {"reward": 1} for row in ROWS], tokenizer, 99, "--dataset", encoder=True)
    queries = encode_prompts(PROMPTS, tokenizer, 6, 32, "--dataset", encoder=True)[1]
    for (query, response), (ids, labels), episode, prompt in zip(pairs, examples, episodes, queries, strict=True):
        assert (ids, labels) == (query + response, [-100] * len(query) + response) and response.count(EOS) == 1
        assert episode.ids == ids and episode.actions == list(range(len(query), len(ids))) and prompt == query
    tokenizer.chat_template = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}"
    tokenizer.chat_template += "{% if add_generation_prompt %}a{% endif %}"
    chat = [{"role": "user", "content": "bc"}, {"role": "assistant", "content": "de"}]
    [(ids, labels)], _ = sft.encode_rows([{"messages": chat}], tokenizer, 99, True, "--dataset", encoder=True)
    assert ids == [20, 1, 2, 0, 3, 4, EOS] and labels == [-100] * 4 + [3, 4, EOS]
    assert encode_prompts([{"prompt": chat[:1]}], tokenizer, 6, 32, "", encoder=True)[1] == [ids[:4]]
    with pytest.raises(InputError, match="--dataset row 2: an encoder-decoder takes rows of one prompt and one output"):
        sft.encode_rows([{"messages": chat}, {"messages": chat * 2}], tokenizer, 99, True, "--dataset", encoder=True)


def test_prompt_and_output_have_room_of_their_own(folder):
    """--max-length is that of each: a long prompt is cut at its end, a long output, too, and loses its end token."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    row, options = {"prompt": "abcdefghij", "completion": "klmnopq"}, {"encoder": True}
    [(whole, _)], _ = sft.encode_rows([row], tokenizer, 99, True, "", **options)
    begin = len(whole) - len(tokenizer("klmnopq", add_special_tokens=False)["input_ids"]) - 1
    begin -= whole[begin - 1] == tokenizer.bos_token_id  # of the output
    for room, cut in ((12, 0), (9, 1), (5, 1)):
        over = max(0, begin - room)
        query, response = whole[: begin - 1 - over] + [whole[begin - 1]], whole[begin:][:room]
        [(ids, labels)], report = sft.encode_rows([row], tokenizer, room, True, "", **options)
        assert (ids, labels) == (query + response, [-100] * len(query) + response) and f"{cut} cut" in report
        [episode], report = ilql.encode_episodes([row | {"reward": 1.0}], tokenizer, room, "", **options)
        done = len(whole) - begin <= room  # else the row ends in the state before the first token that is cut
        assert episode.ids == query + whole[begin:][:room] and episode.done == done and f" {cut} cut" in report
        assert episode.actions == list(range(len(query), len(query) + len(response)))
        assert sum(episode.rewards) == (1.0 if done else 0.0)


REWARDED = [row | {"reward": [0.5, -1.0, 2.0][i % 3], "truncated": i == 3} for i, row in enumerate(ROWS)]
TERMS = ("loss_q", "loss_v", "loss_cql", "loss_awac", "loss")


def test_ilql(monkeypatch, run, folder, pairs):
    """The losses of the first step are those of each row alone; what is sampled with a beta is the shaped policy."""
    losses, first = ilql.ilql_losses, []
    monkeypatch.setattr(ilql, "ilql_losses", lambda *x: first.append(copy.deepcopy(x[0])) or losses(*x))
    decoded, betas = recorded(monkeypatch, sampling, "decode"), (0.0, 3.0)
    flags = {"dataset": REWARDED, "eval_dataset": REWARDED, "metric": length, "betas": betas, "eval_temperature": 0}
    flags |= {"awac_beta": 0.7, "normalize_rewards": False, "eval_every": 1, "max_new_tokens": 6, "cql_scale": 0.3,
              "top_k": 0}  # fmt: skip
    metrics, run_dir, model, _ = run(ilql, **flags)
    sampled = [outputs for _, outputs in decoded]
    args, plain, policy, sums, count = (
        ilql.Args(model=folder, **flags),
        reload(folder),
        first[0],
        dict.fromkeys(TERMS, 0.0),
        0,
    )
    for (query, response), row in zip(pairs, REWARDED, strict=True):
        actions = torch.tensor(response[: len(response) - row["truncated"]])
        with torch.no_grad():
            states, logits = alone(plain, query, [*actions.tolist(), 0])  # also behind the last action
            values = policy.v_head(states)[:, 0]
            values[-1] *= row["truncated"]  # 0 after the end
            at = torch.arange(len(actions)), actions
            q, target = ([head(states[:-1]) for head in heads] for heads in (policy.q_heads, policy.target_q_heads))
            goal = args.gamma * values[1:]
            goal[-1] += row["reward"]
            advantage = torch.minimum(*(x[at] for x in target)) - values[:-1]
            found = {"loss_q": sum((x[at] - goal) ** 2 for x in q)}
            found["loss_v"] = (args.tau - (advantage < 0).double()).abs() * advantage**2
            found["loss_cql"] = sum(x.logsumexp(-1) - x[at] for x in q)
            weights = (args.awac_beta * advantage).exp().clamp(max=args.awac_clip)
            found["loss_awac"] = -logits[:-1].log_softmax(-1)[at] * weights
            found["loss"] = found["loss_q"] + found["loss_v"] + 0.3 * found["loss_cql"] + found["loss_awac"]
        sums = {name: sums[name] + found[name].sum().item() for name in TERMS}
        count += len(actions)
    start, step = log(run_dir)
    for name in TERMS:
        expected = pytest.approx(sums[name] / count, rel=1e-9)
        assert (start[f"eval/{name}"], step[f"losses/{name}"]) == (expected, expected), name
    assert run(ilql, **flags | {"micro_batch_size": 6})[0] == pytest.approx(metrics, rel=1e-9, abs=1e-9)

    back = ilql.PolicyWithQ.load(run_dir / "hf_model", dtype=torch.float64).eval()
    assert_close(back.head_weights(), model.head_weights(), rtol=0, atol=0)
    for beta, outputs in zip(betas, sampled[2:4], strict=True):
        with back.guided(beta):
            assert outputs == greedy(back.lm, folder, pairs)
    assert sampled[2] != sampled[3]


def test_refusals(run):
    """What is not for encoder-decoders is said in a sentence."""
    off = "--no-completion-only-loss is not for encoder-decoders"
    refused = []
    parts, turns = "row 1: an encoder-decoder takes rows of one prompt and one output", {"dialogue": [*"abcd"]}
    refused += [(sft, off, {"completion_only_loss": False}), (sft, parts, {"dataset": [turns]})]
    refused += [(ilql, parts, {"dataset": [turns | {"reward": [1.0, 2.0]}]})]
    mask = torch.zeros(25, 25, dtype=torch.bool)
    refused += [(ilql, "--logit-mask is not for encoder-decoders", {"dataset": REWARDED, "logit_mask": mask})]
    compared = {"dataset": [{"prompt": "a", "chosen": "b", "rejected": "c"}]}
    refused += [(dpo, "--model is an encoder-decoder: dpo.py trains decoders; sft.py, ppo.py, grpo.py and", compared)]
    refused += [(reward, "--model is an encoder-decoder: reward.py reads the scores of decoders and of en", compared)]
    for script, sentence, flags in refused:
        with pytest.raises(InputError, match=sentence):
            run(script, **{"dataset": ROWS} | flags)


def test_lora(run, folder, pairs):
    """The adapter loads in plain transformers, and is trained further."""
    flags = {"dataset": ROWS, "eval_dataset": ROWS, "eval_every": 2, "total_steps": 2, "lora_r": 3}
    metrics, run_dir, model, _ = run(sft, **flags)
    assert all(weight.requires_grad == ("lora_" in name) for name, weight in model.named_parameters())
    names = " ".join(name for name, weight in model.named_parameters() if weight.requires_grad)
    assert "encoder." in names and "decoder." in names
    loss = own_loss(AutoModelForSeq2SeqLM.from_pretrained(run_dir / "hf_model").eval().double(), pairs)
    assert metrics["eval/loss"] == pytest.approx(loss, rel=1e-5)
    assert loss < log(run_dir)[0]["eval/loss"] - 0.01
    rest = {"dataset": ROWS, "eval_dataset": ROWS, "eval_every": 1}
    _, next_dir, *_ = run(sft, model=str(run_dir / "hf_model"), **rest)
    assert log(next_dir)[0]["eval/loss"] == pytest.approx(loss, rel=1e-5)
    metrics, run_dir, model, _ = run(ppo, lora_r=3, **PPO)
    assert abs(log(run_dir)[0]["objective/kl"]) < 1e-9 < abs(metrics["objective/kl"])
    back, inputs = ppo.PolicyWithValue.load(run_dir / "hf_model", dtype=torch.float64).eval(), batch()
    with torch.no_grad():
        assert_close(back(*inputs)[:2], model(*inputs)[:2], rtol=1e-4, atol=1e-4)


WORDS = ["".join(word) for word in itertools.product("abcde", repeat=3)]
ONE_LAYER = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
ONE_LAYER |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_start_token_id": PAD}
ONE_LAYER |= {"d_kv": 8, "d_ff": 64, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 4}
SMALL_T5, SMALL_BART = (tf.T5Config, T5 | ONE_LAYER), (tf.BartConfig, BART | ONE_LAYER)


def learn(script, model, run_dir, **flags):
    settings = {"threads": 1, "save_every": 0, "max_new_tokens": 4, "model": model, "run_dir": str(run_dir)}
    metrics, run_dir = script.main(script.Args(**settings | flags))
    return log(run_dir)[0], metrics, run_dir


def exact(prompts, outputs, **columns):
    return {"exact": [float(output == prompt[::-1]) for prompt, output in zip(prompts, outputs, strict=True)]}


def right(prompts, outputs, **columns):
    """The share of the places that hold the right letter."""
    pairs = zip(prompts, outputs, strict=True)
    return [sum(map(str.__eq__, prompt[::-1], output)) / max(3, len(output)) for prompt, output in pairs]


SFT = {"dataset": [{"prompt": word, "completion": word[::-1]} for word in WORDS], "batch_size": 64, "warmup_steps": 20}
SFT |= {"micro_batch_size": 64, "adam_betas": (0.9, 0.95)}
REVERSE = [{"prompt": word} for word in WORDS]


def test_sft_learns_to_reverse(tmp_path):
    model = save_random(tmp_path / "model", *SMALL_T5, randomwalks.tokenizer())
    flags = {"total_steps": 250, "lr": 1e-2, "metric": exact, "eval_prompts": REVERSE, "eval_every": 250}
    start, end, _ = learn(sft, model, tmp_path / "run", eval_temperature=0, **SFT | flags)
    assert start["eval/exact"] < 0.1 and end["eval/exact"] > 0.9


def test_ppo_learns_to_reverse(tmp_path):
    """From a model that has learnt little of it by sft."""
    model = save_random(tmp_path / "model", *SMALL_BART, randomwalks.tokenizer())
    *_, run_dir = learn(sft, model, tmp_path / "sft", total_steps=80, lr=5e-3, eval_every=0, **SFT)
    flags = {"dataset": REVERSE, "reward": right, "total_episodes": 30 * 512, "rollout_batch_size": 512, "lr": 5e-3}
    flags |= {"batch_size": 256, "micro_batch_size": 256, "ppo_epochs": 2, "kl_coef": 0.0, "vf_coef": 0.1}
    start, end, _ = learn(ppo, str(run_dir / "hf_model"), tmp_path / "ppo", eval_every=120, **flags)
    assert end["eval/reward"] > start["eval/reward"] + 0.3
