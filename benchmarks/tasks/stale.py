"""A --rollout whose sampler is not the policy: it has older weights, rounded weights, or those of the start for ever.

    python algos/grpo.py --config benchmarks/tasks/arithmetic/grpo.yaml --correction truncate \\
        --rollout benchmarks/tasks/stale.py:episode:age=4,precision=bfloat16

age         samples with the weights of so many iterations ago; until there are such, with those of the start
precision   bfloat16, float16 or int8 (with a scale for each row of a matrix): rounds the sampler's weights. It still
            computes in the type of the model, so this shows what rounded weights cost, not what an engine does.
handed      false: samples with the weights of the start, as if nobody had handed over others

The function returns the sampler's log-probabilities as the column sampler_logprobs. Evaluations sample with the policy.
Weights are kept in memory, for each iteration of age: a run that was stopped cannot go on, use --resume never.
"""

import torch

from common.lm.logprobs import line_logprobs
from common.lm.tokens import longest_first

BATCH = 128  # rows that are scored at once
past = {}  # {iteration: {name: weight}}, of the run in this process


def rounded(weight, precision):
    """The weight with the values that it has in another type; of int8, those of matrices."""
    if precision is None or (precision == "int8" and weight.ndim < 2):
        return weight
    if precision == "int8":
        scale = weight.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
        return (weight / scale).round() * scale
    return weight.to(getattr(torch, precision)).to(weight.dtype)


def sampler_weights(model, iteration, age, precision, handed):
    """{name: weight} of the sampler. KeyError in a run that was stopped, whose past is gone."""
    if iteration == 1:
        past.clear()
    past[iteration] = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    source = max(1, iteration - age) if handed else 1
    weights = {name: rounded(weight, precision) for name, weight in past[source].items()}
    needed = range(source, iteration + 1) if handed else (1, iteration)
    for other in past.keys() - {*needed}:
        del past[other]
    return weights


@torch.no_grad()
def load(model, weights):
    for name, weight in model.named_parameters():
        weight.copy_(weights[name])


@torch.no_grad()
def score(model, prompt_ids, responses, temperature):
    """The log-probabilities of the tokens of each response, as lists."""
    found = {}
    for places in longest_first([len(ids) for ids in prompt_ids], BATCH):
        lines = []
        for place in places:
            labels = [-100] * len(prompt_ids[place]) + responses[place]
            lines.append([(prompt_ids[place] + responses[place], labels)])
        logprobs, _, _ = line_logprobs(model, lines, temperature)
        parts = logprobs.split([len(responses[place]) for place in places])
        found |= zip(places, [part.tolist() for part in parts], strict=True)
    return [found[place] for place in range(len(responses))]


def episode(sample, prompt_ids, model, temperature, iteration, age=0, precision=None, handed=True):
    places = range(len(prompt_ids))
    if iteration == 0:  # an evaluation
        return [[(ids, True)] for ids in sample(prompt_ids, places)]
    load(model, sampler_weights(model, iteration, age, precision, handed))
    try:
        responses = sample(prompt_ids, places)
        logprobs = score(model, prompt_ids, responses, temperature)
    finally:
        load(model, past[iteration])
    return [[(ids, True)] for ids in responses], {"sampler_logprobs": logprobs}
