"""What `pytest --script` says of edited copies: three edits, each right and with a typical mistake.

The edits are tests/edits: an entropy bonus in ppo, KTO from dpo, two rewards in grpo. The mistakes: a mean over each
micro-batch, a sign, a state that no checkpoint keeps.
"""

import re
import subprocess
import sys

import pytest
from harness import ROOT
from test_recipes import changed

SCRIPTS = {"entropy_bonus": "ppo", "kto": "dpo", "two_rewards": "grpo"}
MISTAKES = {  # edit: what is right, what is wrong, the checks that find it
    "entropy_bonus": (
        "entropies.sum()",
        "entropies.mean()",
        {"test_micro_batches_change_nothing", "test_two_processes_change_nothing"},
    ),
    "kto": ("state.kl - rejected", "rejected - state.kl", {"test_it_learns_its_embedded_task_a_little"}),
    "two_rewards": (
        "scores, state.moments = combine(scores, brevity, state.moments)",
        "scores, data.moments = combine(scores, brevity, getattr(data, 'moments', [0, 0.0, 0.0]))",
        {"test_killed_and_continued_it_ends_with_the_same_bytes"},
    ),
}


def edited(name):
    return changed((ROOT / f"tests/edits/{name}.diff").read_text(), SCRIPTS[name])


def mistaken(name):
    right, wrong, _ = MISTAKES[name]
    source = edited(name)
    assert source.count(right) == 1
    return source.replace(right, wrong)


def ask(source, folder):
    """(names of checks that failed, of those that passed, what was printed) by a copy with this source."""
    (folder / "mine.py").write_text(source)
    command = [sys.executable, "-m", "pytest", f"--script={folder}/mine.py", "-n0", "-vv"]  # pyproject.toml has a -q
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    failed, passed = ({*re.findall(rf"::(\w+)\S* {word}", result.stdout)} for word in ("FAILED", "PASSED"))
    return failed, passed, result.stdout


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_edit_follows_its_script(name):
    """The text of the edit and of its mistake stands there once."""
    compile(mistaken(name), name, "exec")


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_right_edit_passes_and_a_mistake_is_found(name, tmp_path):
    failed, passed, printed = ask(edited(name), tmp_path)
    assert not failed and len(passed) >= 7, printed
    failed, _, printed = ask(mistaken(name), tmp_path)
    assert failed == MISTAKES[name][2], printed
