"""How sft.py packs: `python -m pytest tests/test_sft_modes.py`"""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import PAD

from common.lm.tokens import collate, line_length, pack, split_lines


def test_pack():
    assert pack([4, 2, 3, 1], 4) == [[0], [2, 3], [1]]  # TRL's example for best-fit decreasing
    assert pack([2, 7, 3, 5, 3], 10) == [[1, 2], [3, 4, 0]]
    assert pack([7, 5, 4, 1], 10) == [[0], [1, 2, 3]]  # the fullest line that fits, not the first
    assert pack([3] * 7, 9) == [[0, 1, 2], [3, 4, 5], [6]]
    generator = np.random.default_rng(0)
    for _ in range(200):
        max_length = int(generator.integers(1, 40))
        lengths = generator.integers(1, max_length + 1, generator.integers(1, 60)).tolist()
        lines = pack(lengths, max_length)
        assert sorted(itertools.chain(*lines)) == list(range(len(lengths)))
        sums = sorted(sum(lengths[i] for i in line) for line in lines)
        assert sums[-1] <= max_length
        assert len(sums) < 2 or sums[0] + sums[1] > max_length  # else the two lines would be one


def test_collate_counts_positions_in_each_row():
    lines = [[([4, 5, 6], [-100, 5, 6]), ([7, 8], [-100, 8])], [([9, 1], [-100, 1])]]
    ids, positions, labels = collate(lines, PAD)
    assert ids.tolist() == [[4, 5, 6, 7, 8], [9, 1, PAD, PAD, PAD]]
    assert positions.tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]]  # no row begins in the padding
    assert labels.tolist() == [[-100, 5, 6, -100, 8], [-100, 1, -100, -100, -100]]


@pytest.mark.parametrize("processes", [1, 2, 3, 5])
@pytest.mark.parametrize("packing", [True, False])
def test_processes_share_lines_of_similar_lengths(packing, processes):
    """Every row once, equally many micro-batches in each process: else FSDP, which gathers the weights in each forward
    pass, would wait forever. What fills up has no label. A micro-batch has no more tokens, with padding, than two of
    the longest, 26; after 13, a line of less than 3/4 of its longest begins another."""
    lengths = [5, 2, 11, 3, 7, 13, 4]
    batch = [([place] * length, [-100] + [place] * (length - 1)) for place, length in enumerate(lengths)]
    parts = []
    for process in range(processes):
        accelerator = SimpleNamespace(process_index=process, num_processes=processes)
        parts.append(split_lines(accelerator, batch, 2, packing))
    assert len({tuple(map(len, part)) for part in parts}) == 1
    micro_batches = [*itertools.chain(*parts)]
    assert all(len(lines) * max(map(line_length, lines)) <= 2 * 13 for lines in micro_batches)
    lines = [*itertools.chain(*micro_batches)]
    labelled = [example for example in itertools.chain(*lines) if set(example[1]) != {-100}]
    assert sorted(labelled) == batch
    num_lines = 4 if packing else 7  # of 45 tokens, at most 13 each
    assert len(lines) == processes * -(-num_lines // processes)
    first = [[*map(line_length, lines)] for lines in parts[0]]
    if not packing and processes < 5:
        assert first == {1: [[13, 11], [7, 5], [4, 3, 2]], 2: [[13], [7, 4], [2]], 3: [[13], [5, 2]]}[processes]
