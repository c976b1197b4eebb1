"""Encoder-decoders in sft, ppo, grpo and ilql: `python -m pytest tests/test_seq2seq.py`

Tiny random T5 (tied; gated and untied) and BART, each with a tokenizer that ends texts in its own way. Everything is
held against plain transformers on one row at a time: the query into the encoder, the start token and the response into
the decoder, no padding, no mask, no cache (`alone`). What rows become is in test_rows.py.
"""

import copy
import math

import pytest
import torch
import transformers as tf
from helpers import BOS, EOS, PAD, add_specials, encoded, lines_of, log, recorded, rolled, save
from test_ilql import LOSSES, slow_action
from test_ilql_runs import lengths
from test_models import more_vowels, reload
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional as F
from torch.testing import assert_close
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from algos import grpo, ilql, ppo, sft
from benchmarks.tasks import randomwalks
from common.errors import InputError
from common.lm import evaluation, tokens
from common.lm.structure import as_decoder, freeze

T5 = {"d_model": 12, "d_kv": 5, "d_ff": 20, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 3}
T5 |= {"relative_attention_num_buckets": 6, "relative_attention_max_distance": 9, "dropout_rate": 0.3}
GATED = {"decoder_start_token_id": BOS, "tie_word_embeddings": False, "feed_forward_proj": "gated-gelu"}
BART = {"d_model": 12, "encoder_layers": 3, "decoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 20}
BART |= {"decoder_attention_heads": 3, "decoder_ffn_dim": 28, "max_position_embeddings": 32, "dropout": 0.3}
BART |= {"decoder_layerdrop": 0.3, "forced_eos_token_id": None, "decoder_start_token_id": EOS}
FAMILIES = {  # configuration, its settings, what the tokenizer makes of a text
    "t5": (tf.T5Config, T5 | {"decoder_start_token_id": PAD}, "$A <eos>"),
    "t5_gated": (tf.T5Config, T5 | GATED, "$A"),
    "bart": (tf.BartConfig, BART, "<bos> $A <eos>"),
}
TEXTS = [("b", "cda"), ("cde", "fgfcq"), ("fg", ""), ("hijkl", "mnopa"), ("", "st"), ("m", "hij<eos>")]
PROMPTS = [{"prompt": prompt} for prompt, _ in TEXTS]
ROWS = [{"prompt": prompt, "completion": completion} for prompt, completion in TEXTS]


def random_seq2seq(family):
    """Matrices have a standard deviation of 0.5, shared embeddings of 1."""
    ids = {"vocab_size": 25, "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    config, settings, _ = FAMILIES[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        lm = AutoModelForSeq2SeqLM.from_config(config(**ids | settings))
        for name, weight in [*lm.named_parameters(), *lm.named_buffers()]:  # a buffer of BART: a bias
            if weight.ndim > 1:
                weight.data.normal_(0, 1 if "shared" in name else 0.5)
    return lm


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def folder(family, tmp_path_factory):
    """Directory of the random model of a family and its tokenizer."""
    directory = tmp_path_factory.mktemp(family)
    return save(directory, random_seq2seq(family), add_specials(randomwalks.tokenizer(), FAMILIES[family][2]))


@pytest.fixture
def pairs(family):
    before, behind = {"t5": ([], [EOS]), "t5_gated": ([], []), "bart": ([BOS], [EOS])}[family]
    found = []
    for prompt, completion in TEXTS:
        query, response = ([ord(x) - ord("a") for x in text] for text in (prompt, completion.removesuffix("<eos>")))
        found.append(([*before, *query, *behind] or [BOS], [*before, *response, EOS]))
    return found


@pytest.fixture
def run(monkeypatch, folder, tmp_path):
    """run(script, **flags): metrics, directory and trained model of one run of main."""

    def main(script, **flags):
        made = recorded(monkeypatch, script, "make_optimizer")
        settings = {"model": folder, "threads": 1, "save_every": 0, "lr": 1e-2, "dtype": "float64", "eval_every": 0}
        settings |= {"run_dir": str(tmp_path / f"{len(list(tmp_path.iterdir()))}"), "warmup_steps": 0}
        settings |= {"batch_size": 6, "micro_batch_size": 4} | ({"total_steps": 1} if script in (sft, ilql) else {})
        metrics, run_dir = script.main(script.Args(**settings | flags))
        for record in log(run_dir):
            assert all(map(math.isfinite, record.values()))
        return metrics, run_dir, made[0][0][0].eval()

    return main


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


def batch(random=0):
    """query, query_mask (4, 9), response, response_mask (4, 7); random: a seed for what lies under the masks, too."""
    ids = torch.randint(0, 21, (4, 16), generator=torch.Generator().manual_seed(0))
    other = torch.randint(0, 25, (4, 16), generator=torch.Generator().manual_seed(random))
    query_mask = torch.arange(9) >= 9 - torch.tensor([[5], [1], [3], [8]])
    mask = torch.arange(7) < torch.tensor([[4], [7], [1], [6]])
    ids = torch.where(torch.cat([query_mask, mask], 1), ids, other)
    return ids[:, :9], query_mask, ids[:, 9:], mask


def test_logits_are_those_of_each_row_alone(folder):
    """For any tokens under the masks; without a mask, too. A call without logits_to_keep is the model's own."""
    lm = reload(folder, AutoModelForSeq2SeqLM, torch.float64)
    lm.set_attn_implementation("sdpa")
    plain = copy.deepcopy(lm)
    lm = as_decoder(lm)
    assert as_decoder(lm) is lm
    assert isinstance(lm, type(plain)) and type(lm).__name__ == type(plain).__name__
    options = {"use_cache": False, "logits_to_keep": 7}
    with torch.no_grad():
        for seed in (1, 2):
            query, query_mask, response, mask = batch(seed)
            tokens = torch.cat([query, response], 1)[:, :-1]
            attended = torch.cat([query_mask, mask], 1)[:, :-1]
            logits = lm(input_ids=tokens, attention_mask=attended.long(), **options).logits
            for found, x, seen, y, kept in zip(logits, query, query_mask, response, mask, strict=True):
                expected = alone(plain, x[seen].tolist(), y[kept].tolist())[1]
                assert_close(found[: len(expected)], expected, rtol=0, atol=1e-10 * expected.abs().max())
            assert expected.softmax(-1).amax(-1).mean() > 0.12  # a uniform distribution has 0.04
        unmasked = lm(input_ids=tokens, **options).logits[3]
        assert_close(unmasked, alone(plain, query[3].tolist(), response[3].tolist())[1], rtol=0, atol=1e-9)
        own = {"input_ids": query, "attention_mask": query_mask.long(), "labels": response.contiguous()}
        assert_close(lm(**own).loss, plain(**own).loss, rtol=0, atol=0)
    options = {"num_beams": 3, "attention_mask": query_mask.long()}
    assert torch.equal(lm.generate(query, **options), plain.generate(query, **options))


SAMPLED = {"dataset": PROMPTS, "max_new_tokens": 6, "rollout_batch_size": 12, "batch_size": 12, "total_episodes": 24}
SAMPLED |= {"kl_coef": 0.1, "temperature": 0.7, "reward": more_vowels}
PPO = SAMPLED | {"ppo_epochs": 1, "value_head_init": "normal"}
GRPO = SAMPLED | {"ppo_epochs": 2, "group_size": 4}


@pytest.mark.parametrize(
    ("family", "script"),
    [("t5", ppo), ("bart", grpo), pytest.param("bart", ppo, marks=pytest.mark.slow)],
    indirect=["family"],
)
def test_ppo_and_grpo(monkeypatch, run, folder, pairs, script):
    """Log-probabilities and values are those of plain forwards, ratio 1 and KL 0 before the first update, the reference
    is the initial model also after it, the first token is trained."""
    rollouts = rolled(monkeypatch, script)
    initial = reload(folder, AutoModelForSeq2SeqLM, torch.float64)
    queries = [query for query, _ in pairs]
    metrics, run_dir, model = run(script, decode_batch_size=5, **PPO if script is ppo else GRPO)
    start = log(run_dir)[0]
    assert start["objective/kl"] == pytest.approx(0, abs=1e-9)
    assert abs(metrics["objective/kl"]) > 1e-3
    (_, first), (_, second) = rollouts
    for found in (first, second):
        for episode in found:
            assert episode.query in queries
            logps = (alone(initial, episode.query, episode.response)[1] / 0.7).log_softmax(-1)
            expected = logps[range(episode.length), episode.response]
            assert_close(episode.ref_logprobs, expected, rtol=1e-9, atol=1e-9)
            if found is first:
                assert_close(episode.logprobs, expected, rtol=1e-9, atol=1e-9)
    if script is grpo:
        return
    assert start["policy/ratio"] == pytest.approx(1, abs=1e-9)
    assert torch.stack([each.values[0] for each in first]).std() > 0.01  # before the first token: of the query alone
    head = ppo.PolicyWithValue(initial, "mlp", "normal", 1).value_head
    for episode in first:
        values = head(alone(initial, episode.query, episode.response)[0])[:, 0].detach()
        assert_close(episode.values, values, rtol=1e-9, atol=1e-9)
    flags = PPO | {"max_new_tokens": 1, "vf_coef": 0.0, "kl_coef": 0.0, "total_episodes": 12}
    assert run(ppo, **flags)[0]["optim/grad_norm"] > 1e-3

    back = ppo.PolicyWithValue.load(run_dir / "hf_model").eval()
    with torch.no_grad():
        assert_close(back(lines_of(second))[:2], model(lines_of(second))[:2], rtol=1e-9, atol=1e-9)


def test_the_top_block_is_the_decoders():
    """And the norm behind it. A reference of frozen blocks: test_ppo_modes.py."""
    lm = as_decoder(random_seq2seq("t5"))
    freeze(lm, 1)
    for name, weight in lm.named_parameters():
        assert weight.requires_grad == name.startswith(("decoder.block.1.", "decoder.final_layer_norm.")), name


@pytest.mark.parametrize("script", [ppo, grpo], ids=lambda script: script.__name__)
def test_an_encoder_answers_once(script):
    with pytest.raises(InputError, match="--rollout does not work"):
        encoded(script, [{"prompt": "b"}], random_seq2seq("t5"), None, rollout=lengths)


@torch.no_grad()
def own_loss(lm, pairs):
    total = 0.0
    for query, response in pairs:
        total += lm(input_ids=torch.tensor([query]), labels=torch.tensor([response])).loss.item() * len(response)
    return total / sum(len(response) for _, response in pairs)


def greedy(lm, folder, pairs):
    made = [lm.generate(torch.tensor([query]), do_sample=False, max_new_tokens=6)[0] for query, _ in pairs]
    return AutoTokenizer.from_pretrained(folder).batch_decode(made, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("family", "lora_r"), [("t5", 3), ("bart", 0), pytest.param("t5", 0, marks=pytest.mark.slow)], indirect=["family"]
)
def test_sft(monkeypatch, run, folder, pairs, lora_r):
    """The loss is transformers' own; samples of the evaluation are what its generate makes of the export, which goes
    on in another run. An adapter loads in plain transformers."""
    decoded = recorded(monkeypatch, evaluation, "decode")
    flags = {"dataset": ROWS, "eval_dataset": ROWS, "metric": lengths, "eval_every": 1, "eval_temperature": 0}
    flags |= {"max_new_tokens": 6, "lora_r": lora_r}
    metrics, run_dir, model = run(sft, total_steps=3, **flags)
    start, first, *_ = log(run_dir)
    initial = reload(folder, AutoModelForSeq2SeqLM, torch.float64)
    assert start["eval/loss"] == pytest.approx(own_loss(initial, pairs), rel=1e-9)
    assert first["train/loss"] == pytest.approx(start["eval/loss"], rel=1e-9)
    assert metrics["eval/loss"] < start["eval/loss"] - 0.01
    if lora_r:
        assert all(weight.requires_grad == ("lora_" in name) for name, weight in model.named_parameters())
        back = AutoModelForSeq2SeqLM.from_pretrained(run_dir / "hf_model").eval().double()
    else:
        back = reload(run_dir / "hf_model", AutoModelForSeq2SeqLM, torch.float64)
        assert_close(model.state_dict(), back.state_dict(), rtol=0, atol=0)
    assert metrics["eval/loss"] == pytest.approx(own_loss(back, pairs), rel=1e-5 if lora_r else 1e-9)
    assert decoded[0][1] == greedy(initial, folder, pairs)
    assert decoded[-1][1] == greedy(back, folder, pairs)
    assert decoded[0][1] != decoded[-1][1]
    _, next_dir, _ = run(sft, **flags | {"model": str(run_dir / "hf_model"), "lora_r": 0})
    assert log(next_dir)[0]["eval/loss"] == pytest.approx(metrics["eval/loss"], rel=1e-5 if lora_r else 1e-9)


REWARDED = [row | {"reward": [0.5, -1.0, 2.0][i % 3], "truncated": i == 3} for i, row in enumerate(ROWS)]


@torch.no_grad()
def slow_ilql(policy, query, response, row, args):
    actions = response[: len(response) - row["truncated"]]
    states, logits = alone(policy.lm, query, [*actions, 0])  # also behind the last action
    found = []
    for place, action in enumerate(actions):
        is_last = place + 1 == len(actions)
        is_end = is_last and not row["truncated"]
        goal = row["reward"] if is_last else 0.0
        if not is_end:
            goal += args.gamma * policy.v_head(states[place + 1]).item()
        nll = -logits[place].log_softmax(-1)[action]
        found.append(slow_action(policy, states[place], action, nll, goal, is_end, args))
    return found


@pytest.mark.parametrize("family", ["t5", pytest.param("bart", marks=pytest.mark.slow)], indirect=True)
def test_ilql(monkeypatch, run, folder, pairs):
    """The losses of the first step are those of each row alone; what is sampled with a beta is the shaped policy."""
    decoded = recorded(monkeypatch, evaluation, "decode")
    betas = (0.0, 3.0)
    flags = {"dataset": REWARDED, "eval_dataset": REWARDED, "metric": lengths, "betas": betas, "eval_temperature": 0}
    flags |= {"awac_beta": 0.7, "normalize_rewards": False, "eval_every": 1, "max_new_tokens": 6, "cql_scale": 0.3}
    _, run_dir, model = run(ilql, top_k=0, **flags)
    args = ilql.Args(model=folder, **flags)
    first = ilql.PolicyWithQ(reload(folder, AutoModelForSeq2SeqLM, torch.float64), seed=1)
    rows = []
    for (query, response), row in zip(pairs, REWARDED, strict=True):
        rows += slow_ilql(first, query, response, row, args)
    start, step = log(run_dir)
    for name in ("loss", *LOSSES):
        expected = torch.stack([terms[name] for terms in rows]).mean().item()
        assert start[f"eval/{name}"] == pytest.approx(expected, rel=1e-9)
        assert step[f"losses/{name}"] == pytest.approx(expected, rel=1e-9)

    back = ilql.PolicyWithQ.load(run_dir / "hf_model", dtype=torch.float64).eval()
    assert_close(back.head_weights(), model.head_weights(), rtol=0, atol=0)
    texts = [outputs for _, outputs in decoded[2:4]]
    assert texts[0] != texts[1]
    for beta, outputs in zip(betas, texts, strict=True):
        with back.guided(beta):
            assert outputs == greedy(back.lm, folder, pairs)


def test_what_it_writes_is_a_text_of_its_own():
    """A sentencepiece tokenizer keeps a space ahead of a word only behind others. It also cleans up none."""
    words = {word: number for number, word in enumerate(["<pad>", "</s>", "\u2581what", "\u25814", "\u2581?"])}
    backend = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    tokenizer = tf.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>")
    tokenizer.clean_up_tokenization_spaces = True
    for apart, text in ((True, "4 ?"), (False, " 4 ?")):
        tokenizer.answers_apart = apart
        assert tokens.decode(tokenizer, [[2, 1]], [[3, 4, 1]], ()) == [text]
        given = evaluation.text_arguments(tokenizer, [{"prompt": "what"}], [[3, 4, 1]], [text])
        assert given["samples"] == ["what 4 ?"]
