"""Pairs of texts as tokens: (ids of chosen, ids of rejected, what a script has beside them)."""

import itertools
import math

import torch

from common.forward import packing_problem
from common.report import screen
from common.tokens import fill_lines


def can_pack(run, lm, args):
    """Whether texts stand side by side in lines: by --packing, and where the model's layers keep them apart."""
    if not args.packing or lm.config.is_encoder_decoder:
        return False
    problem = packing_problem(lm)
    if problem is not None:
        run.say(f"--packing is off: {problem}")
    return problem is None


def in_lines(packing, examples, lengths):
    """(lines, places): the examples in lines, one each or with packing several (`fill_lines`), and the place (N,) of
    every example when the lines stand one behind the other."""
    groups = fill_lines(lengths, packing)
    lines = [[examples[i] for i in group] for group in groups]
    return lines, torch.tensor([*itertools.chain(*groups)]).argsort()


def split_rows(accelerator, rows, pairs, packing, batch_size):
    """The micro-batches of this process: its share of a batch of row numbers, in lists of at most batch_size rows."""
    local = rows[accelerator.process_index :: accelerator.num_processes]
    if not packing:  # in rows of similar length there is little padding
        local = sorted(local, key=lambda row: pair_length(pairs[row]))
    return [local[i : i + batch_size] for i in range(0, len(local), batch_size)]


def pair_length(pair):
    """Tokens of both sides of a pair."""
    return len(pair[0]) + len(pair[1])


def longer_side(pair):
    """Tokens of the longer side of a pair."""
    return max(len(pair[0]), len(pair[1]))


def score_pairs(accelerator, score, pairs, batch_size):
    """score(pairs) -> (2, b) of all pairs, (2, N) in float64 on every process; each of them scores a share."""
    device = accelerator.device
    share = math.ceil(len(pairs) / accelerator.num_processes)
    begin = accelerator.process_index * share
    last = len(pairs) - 1
    # the last processes repeat the last pair where the pairs do not divide
    local = [pairs[min(place, last)] for place in range(begin, begin + share)]
    longest_first = torch.tensor([-pair_length(pair) for pair in local]).argsort(stable=True)
    scores = torch.empty(share, 2, dtype=torch.float64, device=device)
    screen.show("scoring pairs", share)
    for places in longest_first.split(batch_size):
        with torch.no_grad(), accelerator.autocast():
            scores[places.to(device)] = score([local[place] for place in places]).T.double()
        screen.advance(len(places))
    return accelerator.gather(scores)[: len(pairs)].T
