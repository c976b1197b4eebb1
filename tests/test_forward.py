"""The output layer in chunks is the output layer: `python -m pytest tests/test_forward.py`

Values and gradients against whole logits in float64, for models whose logits are a plain product and for those that
change them; and what is in memory meanwhile, counted in tensors.
"""

import weakref
from types import SimpleNamespace

import peft
import pytest
import torch
from helpers import close, random
from torch import nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, Gemma2Config, GraniteConfig

from common import forward
from common.forward import has_plain_output, in_chunks, token_logprobs, token_nll, true_places

V, H, N = 25, 12, 7  # words as of build_model, width, rows
SIZES = {"vocab_size": V, "hidden_size": H, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 1, "max_position_embeddings": 32, "initializer_range": 0.3, "pad_token_id": 23}
SIZES |= {"bos_token_id": 21, "eos_token_id": 22}
CHANGED = {  # families that change the logits of their output layer
    "gemma2": Gemma2Config(**SIZES, head_dim=6, final_logit_softcapping=5.0, attn_logit_softcapping=4.0),
    "granite": GraniteConfig(**SIZES, logits_scaling=1.3),
}
IDS = torch.tensor([[3, 9, 4, 17, 5, 8, 0, 11], [1, 2, 11, 20, 6, 22, 13, 3], [5, 5, 1, 0, 9, 14, 7, 2]])


def entropies(logits, ids):
    return logits.logsumexp(-1) - (logits.softmax(-1) * logits).sum(-1)


def nll_and_entropy(logits, ids):
    return torch.stack([token_nll(logits, ids), entropies(logits, ids)])


# ---- Chunks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("function", "bias"), [(token_nll, True), (nll_and_entropy, False)])
@pytest.mark.parametrize("size", [1, 3, 4])
def test_chunks_are_the_whole(monkeypatch, function, bias, size):
    """Values and gradients of states, weights and bias, whatever the weights of the tokens in the loss. Two chunks are
    computed at once, and not again in the backward pass."""
    monkeypatch.setattr(forward, "CHUNK", size * V + V - 1)  # rounded down to whole rows
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
        monkeypatch.setattr(forward, "CHUNK", limit)
        with torch.autocast("cpu", torch.bfloat16):
            loss = in_chunks(token_nll, layer, 101, states, ids).sum()
        (gradient,) = torch.autograd.grad(loss, layer.weight)
        assert gradient.dtype == torch.float32
        errors.append(((gradient - exact).norm() / exact.norm()).item())
    whole, chunked = errors
    assert chunked < 1.2 * whole < 0.01


def test_no_rows_and_no_gradients(monkeypatch):
    """No row gives no term, of which gradients are zero; under no_grad nothing is kept for a backward pass."""
    monkeypatch.setattr(forward, "CHUNK", 2 * V)
    layer = nn.Linear(H, V).double()
    ids = torch.zeros(N, dtype=torch.long)

    empty = in_chunks(nll_and_entropy, layer, V, random(0, H).requires_grad_(), ids[:0])
    assert empty.shape == (2, 0)
    empty.sum().backward()
    assert layer.weight.grad is not None and not layer.weight.grad.any()
    with torch.no_grad():
        chunked = in_chunks(nll_and_entropy, layer, V, random(N, H), ids)
    assert not chunked.requires_grad
    close(chunked, nll_and_entropy(layer(random(N, H)), ids).data)


class Memory(TorchDispatchMode):
    """Counts the elements of all tensors that are made within it and still alive: the most at a time, and the largest
    tensor."""

    def __init__(self):
        super().__init__()
        self.sizes = {}
        self.most = 0
        self.largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.add((args, kwargs), made_here=False)  # the result may be a view of them
        result = function(*args, **(kwargs or {}))
        self.add(result, made_here=True)
        self.most = max(self.most, sum(self.sizes.values()))
        return result

    def add(self, tensors, made_here):
        for tensor in tree_leaves(tensors):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in self.sizes:
                self.sizes[storage._cdata] = storage.nbytes() // tensor.element_size() if made_here else 0
                self.largest = max(self.largest, self.sizes[storage._cdata])
                weakref.finalize(storage, self.sizes.pop, storage._cdata)


def test_memory_of_a_loss(monkeypatch):
    """With 101 words and 153 rows of width 31 of which 5 are computed at a time: no tensor but the gradient of the
    weight is larger than 5 x 101, forward and backward; of such there are never more than four, and one gradient."""
    words, rows, width = 101, 153, 31
    chunk = 5 * words
    layer = nn.Linear(width, words, bias=False)
    states = torch.randn(rows, width, requires_grad=True)
    ids = torch.arange(rows) % words

    def memory(limit):
        monkeypatch.setattr(forward, "CHUNK", limit)
        with Memory() as seen:
            in_chunks(token_nll, layer, words, states, ids).sum().backward()
        layer.weight.grad = None
        states.grad = None
        return seen

    whole = memory(rows * words)
    assert whole.largest == rows * words and whole.most > 3 * rows * words
    seen = memory(chunk)
    others = layer.weight.numel() + 2 * states.numel() + 8 * rows  # gradients, terms and their weights
    assert seen.largest == max(layer.weight.numel(), states.numel())
    assert seen.most <= 4 * chunk + others < whole.most / 2


# ---- In place of the output layer ------------------------------------------------------------------------------------


def check(monkeypatch, model, lm, plain, tolerance=1e-12):
    """Terms, and gradients of all weights, against those of the logits that the model returns."""
    places = torch.rand(IDS.shape, generator=torch.Generator().manual_seed(1)) < 0.6
    targets = IDS.roll(-1, 1)
    lm.plain_output = has_plain_output(lm)
    assert lm.plain_output == plain
    widths = []

    def watched(function, layer, vocabulary, states, *columns):
        widths.append(states.shape[-1])
        return in_chunks(function, layer, vocabulary, states, *columns)

    monkeypatch.setattr(forward, "in_chunks", watched)
    read = []
    hook = lm.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
    logprobs, states, others = token_logprobs(model, targets, true_places(places), 0.7, entropies, input_ids=IDS)
    hook.remove()
    assert widths == [H if plain else V]
    assert torch.equal(states, read[0]) and states.shape == (*IDS.shape, H)
    assert "forward" not in vars(lm.get_output_embeddings())
    terms = torch.stack([-logprobs, others])
    logits = lm(IDS).logits
    whole = nll_and_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32))[places] / 0.7, targets[places])
    assert terms.shape == whole.shape == (2, int(places.sum()))
    assert_close(terms, whole, rtol=tolerance, atol=tolerance)
    weights = [weight for weight in lm.parameters() if weight.requires_grad]
    gradients = []
    for found in (terms, whole):
        weighed = (found * random(*found.shape)).sum()
        gradients.append(torch.autograd.grad(weighed, weights, allow_unused=True))
    for a, b in zip(*gradients, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert_close(a, b, rtol=tolerance, atol=tolerance)
    assert any(gradient is not None and gradient.any() for gradient in gradients[0])


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Two rows at a time, where a test does not say otherwise."""
    monkeypatch.setattr(forward, "CHUNK", 2 * V)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_plain_products(monkeypatch, build_model, kind):
    """Of GPT-2 the output layer is that of the embeddings, of Llama it is not."""
    lm = build_model(kind, torch.float64)
    check(monkeypatch, lm, lm, plain=True)


@pytest.mark.parametrize("kind", CHANGED)
def test_changed_logits_stay_whole(monkeypatch, kind):
    """Scaled or capped logits are taken as the model returns them."""
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(CHANGED[kind], dtype=torch.float64, attn_implementation="eager").eval()
    check(monkeypatch, lm, lm, plain=False)


def test_adapter_on_the_output_layer(monkeypatch, build_model):
    """Counts, and is trained."""
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=["lm_head", "q_proj"], init_lora_weights=False)
    lm = peft.get_peft_model(build_model("qwen3", torch.float64), config).base_model.model.double()
    assert any("lm_head.lora_A" in name for name, weight in lm.named_parameters() if weight.requires_grad)
    check(monkeypatch, lm, lm, plain=True)


def test_autocast(monkeypatch, build_model):
    """Logits have the type of autocast; terms and gradients are float32, and equal to rounding in bfloat16."""
    lm = build_model("qwen3", torch.float32, initializer_range=0.05)
    types = []

    def logits_type(logits, labels):
        types.append(logits.dtype)
        return labels

    with torch.autocast("cpu", torch.bfloat16):
        check(monkeypatch, lm, lm, plain=True, tolerance=0.02)
        in_chunks(logits_type, lm.get_output_embeddings(), V, random(3, H).float(), IDS[0, :3])
        logprobs, _, _ = token_logprobs(lm, IDS, true_places(IDS > 3), input_ids=IDS)
    assert types == [torch.bfloat16] and logprobs.dtype == torch.float32


class Wrapped(nn.Module):
    """As DistributedDataParallel wraps a model."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        self.calls = 0

    def forward(self, **inputs):
        self.calls += 1
        return self.module(**inputs)


def test_wrapper_of_several_processes_is_called(monkeypatch, build_model):
    """Else gradients would not be averaged."""
    lm = build_model("gpt2", torch.float64)
    wrapper = Wrapped(lm)
    check(monkeypatch, wrapper, lm, plain=True)
    assert wrapper.calls == 1


def test_output_layer_is_back_after_an_error(monkeypatch, build_model):
    lm = build_model("gpt2", torch.float64)
    logits = lm(IDS).logits
    lm.plain_output = has_plain_output(lm)

    def broken(logits, labels):
        raise KeyError("in the loss")

    with pytest.raises(KeyError, match="in the loss"):
        token_logprobs(lm, IDS, true_places(IDS > 3), also=broken, input_ids=IDS)
    assert torch.equal(lm(IDS).logits, logits)


# ---- Episodes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "processes", "process"), [(2, 1, 0), (1, 2, 1), (99, 3, 2), (2, 4, 3)])
def test_rows_are_scored_by_length_and_come_back_in_order(size, processes, process):
    """Of queries of 1 to 5 tokens and responses of 2 to 7, some with holes; 5 rows among up to 4 processes."""
    query_mask = torch.arange(5) >= torch.tensor([[4], [2], [0], [3], [1]])
    mask = torch.arange(7) < torch.tensor([[2], [7], [4], [5], [3]])
    mask[1, 2] = False
    episodes = forward.Episodes(random(5, 5), query_mask, random(5, 7), mask)
    share = -(-5 // processes)
    gathered = []
    scored = []

    def gather(column):
        gathered.append(column)
        return torch.cat([torch.zeros(process * share, 7), column, torch.zeros(9, 7)])

    def score(part):
        assert len(part.query) <= size
        scored.append(part.lengths().tolist())
        return {"twice": torch.where(part.response_mask, 2 * part.response, 0.0)}

    device = torch.device("cpu")
    accelerator = SimpleNamespace(num_processes=processes, process_index=process, device=device, gather=gather)
    found = forward.score_all(accelerator, episodes, size, score)["twice"]
    assert found.shape == (5, 7)
    local = [min(row, 4) for row in range(process * share, process * share + share)]
    expected = torch.where(mask, 2 * episodes.response, 0.0)
    [column] = gathered
    assert torch.equal(column.double(), expected[local])
    assert len(scored) == -(-share // size)
    assert sum(scored, []) == sorted(episodes.lengths()[local].tolist())
    here = [row for row in range(5) if row // share == process]
    assert torch.equal(found[here].double(), expected[here])
