"""The repository stays small: `python -m pytest tests/test_size.py`"""

from benchmarks import size

# Lines at most. These numbers only fall: who needs more lines somewhere takes as many away there in the same commit.
LIMITS = {
    "common/": 3906,
    "common/, code": 2901,
    "algos/": 4997,
    "ppo.py in one file": 4521,
    "tests/": 15395,
    "benchmarks/, with .sh": 7016,
}


def test_sizes():
    found = size.sizes()
    assert found.keys() == LIMITS.keys()
    above = {name: f"{found[name]} lines, at most {limit}" for name, limit in LIMITS.items() if found[name] > limit}
    assert not above, "see CONTRIBUTING.md, Size"
