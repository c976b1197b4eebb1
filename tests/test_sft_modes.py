"""How sft.py packs: `python -m pytest tests/test_sft_modes.py`"""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import PAD

from common.data import collate, line_length, pack
from common.scoring import split_lines


@pytest.mark.parametrize(
    ("lengths", "max_length", "lines"),
    [
        ([4, 2, 3, 1], 4, [[0], [2, 3], [1]]),  # TRL's example for best-fit decreasing
        ([2, 7, 3, 5, 3], 10, [[1, 2], [3, 4, 0]]),
        ([7, 5, 4, 1], 10, [[0], [1, 2, 3]]),  # the fullest line that fits, not the first
        ([3] * 7, 9, [[0, 1, 2], [3, 4, 5], [6]]),
    ],
)
def test_pack(lengths, max_length, lines):
    assert pack(lengths, max_length) == lines


def test_pack_keeps_every_row_once():
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


@pytest.mark.parametrize(("packing", "processes"), [(True, 1), (True, 2), (True, 5), (False, 5)])
def test_every_process_has_equally_many_micro_batches(packing, processes):
    """Else FSDP, which gathers the weights in each forward pass, would wait forever. What fills up has no labels."""
    lengths = [3, 11, 5, 7, 3, 2, 7, 9, 2, 5, 4]
    batch = [([place] * length, [-100] + [place] * (length - 1)) for place, length in enumerate(lengths)]
    parts = []
    for process in range(processes):
        accelerator = SimpleNamespace(process_index=process, num_processes=processes)
        parts.append(split_lines(accelerator, batch, 2, packing))
    assert len({len(part) for part in parts}) == 1
    micro_batches = [*itertools.chain(*parts)]
    assert all(len(lines) * max(map(line_length, lines)) <= 2 * 11 for lines in micro_batches)
    lines = [*itertools.chain(*micro_batches)]
    assert len(lines) % processes == 0
    labelled = [example for example in itertools.chain(*lines) if set(example[1]) != {-100}]
    assert sorted(labelled) == batch
    assert max(map(line_length, lines)) == 11
    needed = 6 if packing else 11  # lines of at most 11 tokens, of 58
    assert len(lines) < needed + processes
