"""python -m pytest tests/test_planted.py

The planted bugs: each stands once in its script, and the table is that of the results. benchmarks/check.py says what is
wrong with them.
"""

import mutants
import pytest

from benchmarks.planted import planted

BUGS = planted.bugs()


def test_every_bug_stands_once_and_is_caught_by_a_test_that_there_is():
    assert planted.problems() == []
    assert len(BUGS) >= 48
    assert len({(bug["script"], bug["name"]) for bug in BUGS}) == len(BUGS)
    assert len({(bug["script"], bug["old"], bug["new"]) for bug in BUGS}) == len(BUGS)
    assert {f"algos/{name}.py" for name in "sft ppo grpo ilql reward dpo ddpo".split()} < {b["script"] for b in BUGS}


def test_what_cannot_be_planted_is_an_error(tmp_path):
    for text, new, error in (
        ("x = 1\n", "13", "bug 1 .a sum.: its text stands 0 times in x.py"),
        ("x = 12\ny = 12\n", "13", "bug 1 .a sum.: its text stands 2 times in x.py"),
        ("x = 12\n", "12 +", "invalid syntax"),
    ):
        bug = {"number": 1, "name": "a sum", "script": "x.py", "old": "12", "new": new}
        (tmp_path / "x.py").write_text(text)
        with pytest.raises((ValueError, SyntaxError), match=error):
            planted.planted(bug, tmp_path)


def test_problems_and_older_code_are_told(tmp_path, monkeypatch):
    """Of a table with a row too few, a bug that nothing catches, a test that is no more and a bug of other code."""
    monkeypatch.setattr(planted, "bugs", lambda: BUGS[:4])
    rows = planted.results()
    rows[4]["digest"] = "0" * 16
    monkeypatch.setattr(planted, "RESULTS", tmp_path / "results.csv")
    planted.write_results(rows)
    assert planted.problems() == [] and 4 in planted.older()
    del rows[1]
    rows[2]["caught"] = "no"
    rows[3]["test"] = "tests/test_maths.py::test_that_is_no_more"
    planted.write_results(rows)
    first, second, third = planted.problems()
    assert "planted bug 1" in first and "has no result" in first
    assert "planted bug 2" in second and "caught by no test" in second
    assert "planted bug 3" in third and "which is no more" in third


def test_mutants_of_a_file_with_few_places(tmp_path):
    (tmp_path / "x.py").write_text("x = 1 + 2\n")
    found = [changed for *_, changed in mutants.mutants(tmp_path / "x.py")]
    assert sorted(found) == ["x = (1 - 2)\n", "x = (2) + 2\n", "x = 1 + (3)\n"]
