"""The output layer in chunks is the output layer: `python -m pytest tests/test_forward.py`"""

import peft
import pytest
import torch
from helpers import close, random, recorded
from torch import nn
from torch.testing import assert_close

from common.lm import logprobs as scoring
from common.lm.logprobs import in_chunks, token_logprobs, token_nll
from common.lm.structure import has_plain_output

V, H, N = 25, 12, 7  # words as of build_model, width, rows
IDS = torch.tensor([[3, 9, 4, 17, 5, 8, 0, 11], [1, 2, 11, 20, 6, 22, 13, 3], [5, 5, 1, 0, 9, 14, 7, 2]])


def entropies(logits, ids):
    return logits.logsumexp(-1) - (logits.softmax(-1) * logits).sum(-1)


def nll_and_entropy(logits, ids):
    return torch.stack([token_nll(logits, ids), entropies(logits, ids)])


@pytest.mark.parametrize(("function", "bias"), [(token_nll, True), (nll_and_entropy, False)])
@pytest.mark.parametrize("size", [1, 3, 4])
def test_chunks_are_the_whole(monkeypatch, function, bias, size):
    """Two chunks are computed at once, and not again in the backward pass."""
    monkeypatch.setattr(scoring, "CHUNK", size * V + V - 1)  # rounded down to whole rows
    layer = nn.Linear(H, V, bias=bias).double()
    states = random(N, H).requires_grad_()
    ids = torch.tensor([0, 3, 3, 24, 5, 9, 1])
    weighed = random(N, seed=1)
    rows = []

    def terms(logits, ids, factors):
        rows.append(len(logits))
        return function(logits, ids) * factors

    whole = terms(layer(states), ids, weighed)
    rows.clear()
    chunked = in_chunks(terms, layer.forward, V, states, ids, weighed)
    at_once = N <= 2 * size
    assert rows == ([N] if at_once else [min(size, N - i) for i in range(0, N, size)])
    assert chunked.shape == whole.shape == ((N,) if function is token_nll else (2, N))
    close(chunked.data, whole.data)
    factors = random(*whole.shape, seed=2)
    inputs = [states, *layer.parameters()]
    for a, b in zip(*(torch.autograd.grad((x * factors).sum(), inputs) for x in (chunked, whole)), strict=True):
        assert b.any()
        close(a, b)
    again = rows[-(-N // size) :]  # in the backward pass; checkpoints come in reverse order
    assert sorted(again) == ([] if at_once else sorted(rows)[::2])


def test_gradients_are_added_up_in_float32(monkeypatch):
    """Under autocast, where the sum of many chunks in bfloat16 would lose digits."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 101, bias=False)
    states = torch.randn(997, 64)
    ids = torch.randint(0, 101, (997,))
    (exact,) = torch.autograd.grad(token_nll(layer(states), ids).sum(), layer.weight)
    errors = []
    for limit in (997 * 101, 3 * 101):
        monkeypatch.setattr(scoring, "CHUNK", limit)
        with torch.autocast("cpu", torch.bfloat16):
            loss = in_chunks(token_nll, layer, 101, states, ids).sum()
        (gradient,) = torch.autograd.grad(loss, layer.weight)
        assert gradient.dtype == torch.float32
        errors.append(((gradient - exact).norm() / exact.norm()).item())
    whole, chunked = errors
    assert chunked < 1.2 * whole < 0.01


def check(monkeypatch, model, lm, tolerance=1e-12):
    """Terms, and gradients of all weights, against those of the logits that the model returns."""
    monkeypatch.setattr(scoring, "CHUNK", 2 * V)
    places = torch.rand(IDS.shape, generator=torch.Generator().manual_seed(1)) < 0.6
    targets = IDS.roll(-1, 1)
    lm.plain_output = has_plain_output(lm)
    assert lm.plain_output
    widths = []

    def watched(function, layer, vocabulary, states, *columns):
        widths.append(states.shape[-1])
        return in_chunks(function, layer, vocabulary, states, *columns)

    monkeypatch.setattr(scoring, "in_chunks", watched)
    read = []
    hook = lm.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
    kept = places.flatten().nonzero()[:, 0]
    logprobs, states, others = token_logprobs(model, targets, kept, 0.7, entropies, input_ids=IDS)
    hook.remove()
    assert widths == [H]
    assert torch.equal(states, read[0]) and states.shape == (*IDS.shape, H)
    assert "forward" not in vars(lm.get_output_embeddings())
    terms = torch.stack([-logprobs, others])
    logits = lm(IDS).logits
    whole = nll_and_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32))[places] / 0.7, targets[places])
    assert_close(terms, whole, rtol=tolerance, atol=tolerance)
    weights = [weight for weight in lm.parameters() if weight.requires_grad]
    gradients = []
    for found in (terms, whole):
        weighed = (found * random(*found.shape)).sum()
        gradients.append(torch.autograd.grad(weighed, weights, allow_unused=True))
    assert_close(*gradients, rtol=tolerance, atol=tolerance)  # None beside None
    assert any(gradient is not None and gradient.any() for gradient in gradients[0])


def test_adapter_on_the_output_layer(monkeypatch, build_model):
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=["lm_head", "q_proj"], init_lora_weights=False)
    lm = peft.get_peft_model(build_model("qwen3", torch.float64), config).base_model.model.double()
    assert any("lm_head.lora_A" in name for name, weight in lm.named_parameters() if weight.requires_grad)
    check(monkeypatch, lm, lm)


def test_autocast(monkeypatch, build_model):
    """Logits have the type of autocast; terms and gradients are float32, and equal to rounding in bfloat16."""
    lm = build_model("qwen3", torch.float32, initializer_range=0.05)
    types = []

    def logits_type(logits, labels):
        types.append(logits.dtype)
        return labels

    with torch.autocast("cpu", torch.bfloat16):
        check(monkeypatch, lm, lm, tolerance=0.02)
        in_chunks(logits_type, lm.get_output_embeddings(), V, random(3, H).float(), IDS[0, :3])
        logprobs, _, _ = token_logprobs(lm, IDS, (IDS > 3).flatten().nonzero()[:, 0], input_ids=IDS)
    assert types == [torch.bfloat16] and logprobs.dtype == torch.float32


@pytest.mark.parametrize("kind", ["gpt2", "llama"])  # tied and not
def test_wrapped_models(monkeypatch, build_model, kind):
    """As by DistributedDataParallel: the wrapper must be called, or gradients would not be averaged."""
    lm = build_model(kind, torch.float64)
    wrapper = nn.DataParallel(lm)
    calls = recorded(monkeypatch, wrapper, "forward")
    check(monkeypatch, wrapper, lm)
    assert len(calls) == 1
