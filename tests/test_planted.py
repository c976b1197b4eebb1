"""python -m pytest tests/test_planted.py

The planted bugs: each still fits its script, planting changes the file and nothing else, and the table is that of the
results.
"""

import shutil

import pytest

from benchmarks.planted import planted

BUGS = planted.bugs()


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: str(bug["number"]))
def test_a_bug_stands_once_in_its_script(bug):
    before = (planted.ROOT / bug["script"]).read_text()
    after = planted.planted(bug)
    begin = before.index(bug["old"])
    assert after != before
    assert after == before[:begin] + bug["new"] + before[begin + len(bug["old"]) :]


def test_bugs_and_names_differ():
    assert len(BUGS) >= 48
    assert len({(bug["script"], bug["name"]) for bug in BUGS}) == len(BUGS)
    assert len({(bug["script"], bug["old"], bug["new"]) for bug in BUGS}) == len(BUGS)
    assert {f"algos/{name}.py" for name in "sft ppo grpo ilql reward dpo ddpo".split()} < {b["script"] for b in BUGS}


@pytest.mark.parametrize("text", ["", "x = 1\n", "x = 12\nx = 12\n"])
def test_a_text_that_is_gone_or_there_twice_is_an_error(tmp_path, text):
    bug = {"number": 1, "name": "another sum", "script": "x.py", "old": "x = 12", "new": "x = 13"}
    (tmp_path / "x.py").write_text(text)
    with pytest.raises(ValueError, match="bug 1 .another sum.: its text stands [02] times in x.py"):
        planted.planted(bug, tmp_path)


def test_code_that_does_not_compile_is_an_error(tmp_path):
    (tmp_path / "x.py").write_text("x = 12\n")
    bug = {"number": 1, "name": "half a sum", "script": "x.py", "old": "12", "new": "12 +"}
    with pytest.raises(SyntaxError):
        planted.planted(bug, tmp_path)


def test_every_bug_is_caught_by_a_test_that_there_is():
    assert planted.problems() == []


def test_problems_are_told(tmp_path, monkeypatch):
    """Of a table with a row too few and a bug that nothing catches."""
    rows = planted.results()
    del rows[1]
    rows[2]["caught"] = "no"
    monkeypatch.setattr(planted, "RESULTS", tmp_path / "results.csv")
    planted.write_results(rows)
    first, second = planted.problems()
    assert "planted bug 1" in first and "has no result" in first
    assert "planted bug 2" in second and "caught by no test" in second
    shutil.copy(planted.FOLDER / "results.csv", tmp_path / "results.csv")
    assert planted.problems() == []
