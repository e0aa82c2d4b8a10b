"""Hints name the nearest word, and exit codes tell a wrong request from a failed run."""

import pytest

from fedprotip.errors import FedprotipError, RunError, UsageError, nearest


@pytest.mark.parametrize(("kind", "code"), [(FedprotipError, 1), (RunError, 1), (UsageError, 2)])
def test_exit_codes(kind, code):
    assert kind("sentence").exit_code == code
    assert isinstance(kind("sentence"), FedprotipError)


def test_few_words_are_all_listed():
    assert nearest("digit", ["mnist", "digits"]) == "did you mean 'digits' (known: digits, mnist)"
    assert nearest("zzz", ["b", "a"]) == "known: a, b"
    assert nearest("zzz", []) == "known: none"


def test_of_many_words_only_the_nearest_is_named():
    words = [f"train.key{number}" for number in range(30)]
    assert nearest("train.kye7", [*words, "run.seed"]) == "did you mean 'train.key7'"


def test_of_many_words_the_nearest_is_named_even_when_it_is_far():
    hint = nearest("", [f"word{number}" for number in range(30)])
    assert hint.startswith("did you mean 'word")
    assert hint.count("word") == 1
