"""Resuming with an optimizer of one's own: `python -m pytest tests/test_optimizers.py`"""

import torch
from torch import nn

from common import checkpoint


class Normalised(torch.optim.Optimizer):
    """Steps of length lr along the sum of the gradients, without an epsilon. Its group counts the steps."""

    def __init__(self, weights, lr):
        super().__init__(weights, {"lr": lr, "steps": 0})

    @torch.no_grad()
    def step(self, closure=None):
        [group] = self.param_groups
        group["steps"] += 1
        for weight in group["params"]:
            total = self.state[weight].setdefault("sum", torch.zeros_like(weight)).add_(weight.grad)
            weight.sub_(group["lr"] * total / total.norm())


def trained(model, optimizer, steps):
    inputs = torch.arange(21.0).view(3, 7).sin()
    for _ in range(steps):
        model(inputs).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.weight.detach().clone()


def made():
    torch.manual_seed(0)
    model = nn.Linear(7, 5)
    return model, Normalised(model.parameters(), lr=0.1)


def test_an_optimizer_without_epsilon_that_counts_in_its_groups_continues_exactly(tmp_path):
    model, optimizer = made()
    first = checkpoint.settings_of(optimizer)
    trained(model, optimizer, 3)
    frozen = checkpoint.frozen_weights(model)
    files, state = checkpoint.pack_state(model, optimizer, frozen, first, step=3, best_step=None, run={})
    assert state["optimizer_settings"] == [{"steps": 3}]
    checkpoint.write_checkpoint(tmp_path, files, state, 1)
    expected = trained(model, optimizer, 2)
    model, optimizer = made()
    path = tmp_path / "checkpoints/step_00000003"
    state = checkpoint.read_checkpoint(path)
    checkpoint.unpack_state(path, state, model, optimizer, checkpoint.frozen_weights(model))
    assert optimizer.param_groups[0]["steps"] == 3
    assert torch.equal(trained(model, optimizer, 2), expected) and expected.isfinite().all()
