"""Tests that a wrong program passes are no tests: every mutant is caught (`tests/mutants.py`)."""

from dataclasses import replace

import pytest

from tests.mutants import MUTANTS, ROOT, SOURCE, Mutant, caught, judged

KNOWN = MUTANTS[0]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_finds_its_line(tmp_path, mutant):
    path = tmp_path / mutant.file
    path.parent.mkdir(parents=True)
    path.write_bytes((ROOT / SOURCE / mutant.file).read_bytes())
    mutant.apply(tmp_path)
    assert path.read_bytes() != (ROOT / SOURCE / mutant.file).read_bytes()
    compile(path.read_text(encoding="utf-8"), mutant.file, "exec")


@pytest.mark.parametrize("line", ["a line that nobody wrote", "import"])
def test_a_line_that_is_gone_or_not_alone_is_an_error(tmp_path, line):
    path = tmp_path / KNOWN.file
    path.parent.mkdir(parents=True)
    path.write_bytes((ROOT / SOURCE / KNOWN.file).read_bytes())
    with pytest.raises(LookupError, match="give the mutant the line"):
        replace(KNOWN, right=line).apply(tmp_path)


@pytest.mark.slow
def test_a_change_that_changes_nothing_and_one_that_breaks_the_import_are_not_caught():
    tests = ("tests/evaluation/test_metrics.py",)
    line = "return sum(known) / len(known)"
    same = Mutant("the same", "evaluation/metrics.py", line, line, tests)
    assert "ended with 0" in caught(same)
    assert "ended with 4" in caught(replace(same, wrong="return sum(known) /"))


@pytest.mark.slow
def test_every_mutant_is_caught():
    problems = [problem for _, problem in judged(MUTANTS) if problem]
    assert not problems, "\n".join(problems)
