"""Bad settings are one sentence with key, value and what would be valid; good ones survive a round trip."""

import tomllib
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from fedprotip import settings as module
from fedprotip.errors import UsageError
from fedprotip.settings import MethodSettings, Settings, documentation, load, parse_ids, to_toml


def refusal(source=None, overrides=()):
    """The sentence with which these settings are refused."""
    with pytest.raises(UsageError) as caught:
        load(source, overrides)
    sentence = str(caught.value)
    assert sentence.endswith(".")
    assert "\n" not in sentence
    assert not sentence.endswith(("..", "?.", " ."))
    assert len(sentence) < 700
    return sentence


IMPOSSIBLE = [
    # unknown keys and sections
    ({"train": {"round": 5}}, ["train.round ", "'train.rounds'"]),
    ({"trian": {"rounds": 5}}, ["trian ", "'train'"]),
    ({"rounds": 5}, ["rounds ", "'train.rounds'"]),
    ({"method": {"threshhold": 0.5}}, ["method.threshhold ", "'method.threshold'"]),
    ({"method": {"name": "fedavg", "nmae": 1}}, ["method.nmae ", "'method.name'"]),
    ({"method": "fedavg", "data": {"nam": "digits"}}, ["data.nam ", "'data.name'"]),
    ({1: {}}, ["1 is not a setting"]),
    ({"train": {1: 2}}, ["train.1 is not a setting"]),
    ({"": {"rounds": 1}}, [" is not a setting"]),
    # wrong types
    ({"train": {"rounds": "many"}}, ["train.rounds = 'many'", "integer"]),
    ({"train": {"rounds": "5"}}, ["train.rounds = '5'", "integer"]),
    ({"train": {"rounds": 5.5}}, ["train.rounds = 5.5", "integer"]),
    ({"train": {"rounds": True}}, ["train.rounds = True", "integer"]),
    ({"clients": {"count": False}}, ["clients.count = False", "integer"]),
    ({"train": {"lr": True}}, ["train.lr = True", "number"]),
    ({"train": {"lr": [0.1]}}, ["train.lr = [0.1]", "number"]),
    ({"train": {"lr": {"a": 1}}}, ["train.lr = {'a': 1}", "number"]),
    ({"train": {"lr": None}}, ["train.lr = None", "number"]),
    ({"data": {"name": 3}}, ["data.name = 3", "string"]),
    ({"run": {"out": ["a"]}}, ["run.out = ['a']", "string"]),
    ({"train": 5}, ["train = 5", "table"]),
    ({"train": [{"rounds": 5}]}, ["train = [{'rounds': 5}]", "table"]),
    ({"method": "fedavg"}, ["method = 'fedavg'", "table"]),
    ({"train": {"optimizer_options": 5}}, ["train.optimizer_options = 5", "dictionary"]),
    ({"train": {"optimizer_options": {"a": "x"}}}, ["train.optimizer_options = {'a': 'x'}"]),
    ({"train": {"optimizer_options": {"betas": [float("nan")]}}}, ["train.optimizer_options", "finite"]),
    # not finite, out of range
    ({"train": {"lr": float("nan")}}, ["train.lr = nan", "finite"]),
    ({"train": {"lr": float("inf")}}, ["train.lr = inf", "finite"]),
    ({"train": {"rounds": float("inf")}}, ["train.rounds = inf", "integer"]),
    ({"clients": {"alpha": float("-inf")}}, ["clients.alpha = -inf"]),
    ({"clients": {"alpha": 0}}, ["clients.alpha = 0", "just above 0"]),
    ({"clients": {"alpha": -1.5}}, ["clients.alpha = -1.5", "just above 0"]),
    ({"clients": {"count": 0}}, ["clients.count = 0", "nearest valid value is 1"]),
    ({"clients": {"fraction": 1.5}}, ["clients.fraction = 1.5", "nearest valid value is 1"]),
    ({"train": {"momentum": 1.0}}, ["train.momentum = 1.0", "just below 1"]),
    ({"run": {"seed": -1}}, ["run.seed = -1", "nearest valid value is 0"]),
    ({"stream": {"tasks": 0}}, ["stream.tasks = 0", "nearest valid value is 1"]),
    ({"stream": {"task_size": -1}}, ["stream.task_size = -1", "0 (share evenly) or more"]),
    ({"stream": {"task_size": [2, 0]}}, ["stream.task_size = [2, 0]", "nearest valid value is 1"]),
    ({"stream": {"task_size": [2, True]}}, ["stream.task_size = [2, True]", "integer"]),
    ({"stream": {"task_size": "two"}}, ["stream.task_size = 'two'", "integer"]),
    ({"method": {"threshold": 1.2}}, ["method.threshold = 1.2", "nearest valid value is 1"]),
    ({"method": {"layer_thresholds": {"0.*": 0.0}}}, ["method.layer_thresholds", "'0.*'", "above 0"]),
    # not a choice
    ({"stream": {"scenario": "klass"}}, ["stream.scenario = 'klass'", "'class'", "domain"]),
    ({"stream": {"order": "sedeed"}}, ["stream.order = 'sedeed'", "'seeded'"]),
    ({"stream": {"order": [1]}}, ["stream.order = [1]", "string"]),
    ({"method": {"rank_rule": "enrgy"}}, ["method.rank_rule = 'enrgy'", "'energy'"]),
    ({"run": {"engine": "flowr"}}, ["run.engine = 'flowr'", "local"]),
    ({"method": {"name": "fedav"}}, ["method.name = 'fedav'", "'fedavg'"]),
    ({"method": {"name": 5}}, ["method.name = '5'", "known: fedavg"]),
    ({"method": {"name": ["fedavg"]}}, ["method.name = ", "did you mean"]),
    ({"data": {"name": "digit"}}, ["data.name = 'digit'", "'digits'"]),
    ({"model": {"name": "mpl"}}, ["model.name = 'mpl'", "'mlp'"]),
    # rosters
    ({"clients": {"roster": {"x": "0"}}}, ["clients.roster = {'x': '0'}", "counted from 0"]),
    ({"clients": {"roster": {"1": "a-b"}}}, ["clients.roster = {'1': 'a-b'}", "'0-2,7'"]),
    ({"clients": {"roster": {"1": 3}}}, ["clients.roster = {'1': 3}", "string"]),
    ({"clients": {"roster": {"3": "0", "03": "1"}}}, ["clients.roster", "twice"]),
    # possible, but absurd
    ({"run": {"threads": 1_000_003}}, ["run.threads = 1000003", "nearest valid value is 1024"]),
    ({"run": {"workers": 10**6}}, ["run.workers = 1000000", "nearest valid value is 1024"]),
    ({"data": {"workers": 10**6}}, ["data.workers = 1000000", "nearest valid value is 1024"]),
    ({"data": {"size": 2**31}}, ["data.size = 2147483648", "nearest valid value is 65536"]),
    ({"evaluate": {"group": 2**63 - 1}}, ["evaluate.group = 9223372036854775807", "nearest valid value is 1000000"]),
    ({"evaluate": {"draws": 10**29}}, ["evaluate.draws = 1", "nearest valid value is 1000000"]),
    ({"model": {"width": 1_000_003}}, ["model.width = 1000003", "nearest valid value is 1000000"]),
    ({"model": {"depth": 10**6}}, ["model.depth = 1000000", "nearest valid value is 1000"]),
    ({"clients": {"count": 3 * 10**9}}, ["clients.count = 3000000000", "nearest valid value is 1000000"]),
    ({"clients": {"roster": {"0": "0-2999999999"}}}, ["clients.roster", "ids are below 1,000,000,000"]),
    ({"clients": {"roster": {"0": "0-299999999"}}}, ["clients.roster", "more than 1,000,000 clients"]),
    ({"clients": {"roster": {"0": "9" * 5000}}}, ["clients.roster", "ids are below"]),
    ({"clients": {"roster": {"9" * 5000: "0"}}}, ["clients.roster", "counted from 0"]),
    ({"clients": {"alpha": 1e300}}, ["clients.alpha = 1e+300", "nearest valid value is 1e+30"]),
    ({"stream": {"tasks": 10**8}}, ["stream.tasks = 100000000", "nearest valid value is 100000"]),
    ({"stream": {"task_size": 10**20}}, ["stream.task_size", "nearest valid value is 1000000000"]),
    ({"stream": {"task_size": [2, 10**20]}}, ["stream.task_size", "nearest valid value is 1000000000"]),
    ({"train": {"lr": 1e300}}, ["train.lr = 1e+300", "nearest valid value is 1e+30"]),
    ({"train": {"optimizer_options": {"betas": [0.1, 1e200]}}}, ["train.optimizer_options", "1e+30"]),
    ({"method": {"name": "fedprox", "mu": 1e300}}, ["method.mu = 1e+300", "1e+30"]),
    ({"run": {"seed": 10**4000}}, ["run.seed = 1", "just below"]),
    ({"run": {"out": "a\0b"}}, ["run.out", "NUL"]),
    ({"run": {"out": "x" * 5000}}, ["run.out", "less than 4,096 bytes"]),
    ({"data": {"source": "a\0b"}}, ["data.source", "NUL"]),
    ({"data": {"root": "\0"}}, ["data.root", "NUL"]),
    ({"model": {"weights": "\0"}}, ["model.weights", "NUL"]),
    ({"data": {"name": "x" * 10**6}}, ["data.name", "digits"]),
    ({"method": {"name": "x" * 10**6}}, ["method.name", "known: fedavg"]),
    ({"x" * 10**6: {"a": 1}}, ["is not a setting"]),
    ({"train": {"x" * 10**6: 1}}, ["is not a setting"]),
    # cannot be saved
    ({"run": {"out": "a\udc80"}}, [r"run.out = 'a\udc80'", "UTF-8"]),
]


@pytest.mark.parametrize(("raw", "parts"), IMPOSSIBLE, ids=lambda value: repr(value)[:50])
def test_impossible_settings_are_refused_in_one_sentence(raw, parts):
    sentence = refusal(raw)
    for part in parts:
        assert part in sentence


HONEST = [
    {"clients": {"count": 1000, "roster": {"3": "0-999,123456789"}}, "stream": {"tasks": 100}},
    {"run": {"seed": 2**64 - 1, "threads": 256, "cache_mb": 10**6}, "data": {"size": 8192, "seed": 2**32}},
    {"model": {"width": 65536, "depth": 200}, "train": {"lr": 30.0, "rounds": 10**5, "batch": 10**6}},
    {"evaluate": {"group": 4096, "draws": 10_000}, "clients": {"alpha": 1e9}, "method": {"columns": 10**6}},
]


@pytest.mark.parametrize("raw", HONEST, ids=str)
def test_no_bound_refuses_what_honest_users_do(raw):
    load(raw)


def test_every_number_has_an_upper_bound():
    """Also one that is added later, and those of methods: its own, or the common one."""
    sections = [(name, type(getattr(load(), name))) for name in Settings.model_fields if name != "method"]
    sections += [("method", cls) for cls in module.KNOWN["method.name"].values()]
    checked = 0
    for name, section in sections:
        for key, field in section.model_fields.items():
            for value, kind in ((10**40, int), (1e40, float)):
                if field.annotation is kind:
                    raw = {name: {key: value}}
                    if name == "method":
                        raw["method"]["name"] = section.model_fields["name"].default
                    assert f"{name}.{key} = 1" in refusal(raw)
                    checked += 1
    assert checked > 50


@pytest.mark.parametrize(
    ("assignment", "parts"),
    [
        ("train.rounds", ["--set 'train.rounds'", "train.rounds=5"]),
        ("train=5", ["--set 'train=5'", "section.key=value"]),
        (".rounds=5", ["--set '.rounds=5'"]),
        ("train.=5", ["--set 'train.=5'"]),
        ("=5", ["--set '=5'"]),
        ("", ["--set ''"]),
        ("train.rounds=", ["train.rounds = ''", "integer"]),
        ("train.rounds=five", ["train.rounds = 'five'", "integer"]),
        ("train.rounds=true", ["train.rounds = True", "integer"]),
        ("train.rounds=5\nepochs=3", ["train.rounds = ", "integer"]),
        ("train.rounds=" + 4400 * "9", ["train.rounds = ", "integer"]),
        ("train.lr=nan", ["train.lr = nan", "finite"]),
        ("train.x=" + 3000 * "[", ["train.x is not a setting"]),
        ("train.optimizer_options.nesterov=true", ["train.optimizer_options.nesterov", "'train.optimizer_options'"]),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_impossible_assignments_are_refused_in_one_sentence(assignment, parts):
    sentence = refusal(None, [assignment])
    for part in parts:
        assert part in sentence


def test_an_assignment_into_a_scalar_is_refused():
    assert "train = 5" in refusal({"train": 5}, ["train.rounds=3"])


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"[train\nrounds = 5", "not valid TOML"),
        (b"[train]\nrounds = 5\nrounds = 6", "not valid TOML"),
        (b"a = " + 3000 * b"[", "not valid TOML"),
        (b"a = " + 5000 * b"9", "not valid TOML"),
        (b"train" + 20_000 * b".a" + b" = 1", "a key of more than 20 parts"),
        (b"[train" + 20_000 * b" . 'a b'" + b"]", "a key of more than 20 parts"),
        (b"train = {rounds" + 20_000 * b'."\\"a"' + b" = 1}", "a key of more than 20 parts"),
        (b"[data]\nname = '" + 2**22 * b"a" + b"'", "more than 4,194,304"),
        (b"\x80\xff\x00PK", "UTF-8"),
        (b"\x00\x01", "not valid TOML"),
        (b"train = 5", "train = 5 must be a table"),
        (b"[[train]]\nrounds = 5", "must be a table"),
    ],
    ids=["open", "twice", "deep", "long", "dots", "header", "table", "large", "binary", "zeros", "scalar", "array"],
)
def test_malformed_files_are_refused(tmp_path, content, part):
    path = tmp_path / "settings.toml"
    path.write_bytes(content)
    sentence = refusal(path)
    assert part in sentence
    if "TOML" in part or "UTF" in part:
        assert str(path) in sentence


def test_dots_that_are_no_key_are_read(tmp_path):
    """In text, in comments, and where a quote stands in either; keys of a few parts are fine."""
    dots, path = ".".join("a" * 40), tmp_path / "settings.toml"
    path.write_text(
        f"# don't count {dots}\ndata . 'root' = \"say \\\"{dots}\" # {dots}\n"
        f"[stream]\norder = [{', '.join(map(repr, [dots, *'bcdefghij']))}]\n[train]\nlr = 0.5\n"
        f'[run]\nout = """{dots}\'"""\n'
    )
    found = load(path)
    assert (found.stream.order[0], found.train.lr, found.run.out) == (dots, 0.5, dots + "'")
    assert found.data.root.endswith(f'say "{dots}')


def test_missing_files_and_folders_are_refused(tmp_path):
    assert "No such file" in refusal(tmp_path / "absent.toml")
    assert "is no settings file; to learn from images there: --set data.source=" in refusal(str(tmp_path))
    assert "null byte" in refusal("a\0b")


def test_overrides_win_over_the_file_and_are_typed(tmp_path):
    path = tmp_path / "settings.toml"
    path.write_text('[train]\nrounds = 9\nlr = 0.5\n[method]\nname = "fedavg"\n', encoding="utf-8")
    overrides = [
        "train.rounds = 3",
        "run.out=runs/a b#c",
        "stream.task_size=[2, 3]",
        "stream.tasks=2",
        "train.optimizer_options={nesterov = true, eps = 1}",
        'data.name="digits"',
    ]
    settings = load(path, overrides)
    assert (settings.train.rounds, settings.train.lr, settings.method.name) == (3, 0.5, "fedavg")
    assert settings.run.out == "runs/a b#c"
    assert settings.stream.task_size == [2, 3]
    assert settings.train.optimizer_options == {"nesterov": True, "eps": 1}


@pytest.mark.parametrize("name", ["2024-01-01", "2024-01-01T10:00:00", "10:00:00", "runs/x", "'quoted'", '"a\\tb"'])
def test_a_folder_may_be_called_after_a_date(name):
    out = load(None, [f"run.out={name}"]).run.out
    assert out == {"'quoted'": "quoted", '"a\\tb"': "a\tb"}.get(name, name)


def test_a_whole_number_is_a_number():
    assert load({"train": {"lr": 1}}).train.lr == 1.0


def test_the_source_is_left_as_it_was():
    raw = {"train": {"rounds": 3}, "method": {"name": "fedavg", "threshold": 0.5}}
    settings = load(raw, ["train.rounds=4"])
    assert raw == {"train": {"rounds": 3}, "method": {"name": "fedavg", "threshold": 0.5}}
    assert load(settings, ["train.rounds=5"]).train.rounds == 5
    assert settings.train.rounds == 4
    assert load(settings) == settings


def test_settings_are_immutable():
    with pytest.raises(ValueError, match="frozen"):
        load().train.rounds = 3


def test_options_of_another_method_are_set_aside_with_a_note():
    notes = []
    settings = load({"method": {"name": "fedavg", "threshold": 0.5, "voters": 3}}, note=notes.append)
    assert settings.method == load({"method": {"name": "fedavg"}}).method
    assert len(notes) == 1
    for part in ("'fedavg'", "method.threshold", "method.voters"):
        assert part in notes[0]


def test_options_of_another_method_are_set_aside_for_the_default_method(monkeypatch):
    class Other(MethodSettings):
        strength: float = Field(1.0, description="Of another method.")

    monkeypatch.setitem(module.KNOWN["method.name"], "other", Other)
    notes = []
    assert load({"method": {"strength": 2.0}}, note=notes.append).method.name == "fedprotip"
    assert len(notes) == 1
    assert "'fedprotip'" in notes[0]
    assert "method.strength" in notes[0]
    assert load({"method": {"name": "other", "strength": 2.0}}).method.strength == 2.0


def test_a_bad_value_of_another_method_does_no_harm_but_an_unknown_key_does():
    assert load({"method": {"name": "fedavg", "threshold": "much"}}).method.name == "fedavg"
    assert "method.treshold" in refusal({"method": {"name": "fedavg", "treshold": 0.5}})


def test_the_papers_own_settings_are_one_word_away():
    """Section 6 and appendix E; what the user states lies above them."""
    settings = load(preset="paper")
    chosen = settings.method
    assert (chosen.threshold, chosen.increment, chosen.rank_rule, chosen.merge) == (0.7, 0.001, "mass", "union")
    assert (chosen.router, chosen.statistics, settings.train.lr, settings.train.fall) == ("cosine", False, 0.01, "none")
    assert load({"method": {"threshold": 0.8}}, preset="paper").method.threshold == 0.8
    assert load({}, ["train.fall=cosine"], preset="paper").train.fall == "cosine"
    assert load({"method": {"name": "fedavg"}}, preset="paper").train.head_start == "random"
    with pytest.raises(UsageError, match="--preset 'papr' is unknown"):
        load(preset="papr")


def test_a_union_has_no_budget_unless_one_is_asked_for():
    assert load({"method": {"merge": "union"}}).method.budget == "none"
    assert load(to_toml_again(load({"method": {"merge": "union"}}))).method.budget == "none"
    with pytest.raises(UsageError, match="budget = 'tasks' needs merge = 'energy'"):
        load({"method": {"merge": "union", "budget": "tasks"}})


def to_toml_again(settings):
    return tomllib.loads(to_toml(settings))


def test_nothing_said_is_the_defaults():
    settings = Settings()
    assert settings == load() == load({}) == load({"train": {}})
    assert (settings.clients.partition, settings.train.average, settings.evaluate.group) == (
        "dirichlet",
        "weighted",
        64,
    )


# Round trips

words = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
paths = words.filter(lambda text: "\0" not in text)
shares = st.floats(0, 1, exclude_min=True)
positive = st.floats(0, 1e30, exclude_min=True)
options = st.one_of(st.booleans(), st.integers(-(10**9), 10**9), positive, st.lists(positive, min_size=1, max_size=3))
ids = st.lists(st.integers(0, 50), min_size=1, max_size=3).map(lambda numbers: ",".join(map(str, numbers)))
methods = st.one_of(
    st.fixed_dictionaries({"name": st.just("fedavg")}),
    st.fixed_dictionaries(
        {
            "name": st.sampled_from(["fedprotip", "gpm"]),
            "threshold": shares,
            "layer_thresholds": st.dictionaries(words, shares, max_size=3),
            "columns": st.integers(1, 10**9),
            "router": st.just("cosine"),
        }
    ),
)
raws = st.fixed_dictionaries(
    {
        "stream": st.fixed_dictionaries(
            {
                "task_size": st.one_of(st.integers(0, 9), st.lists(st.integers(1, 9))),
                "order": st.one_of(st.sampled_from(["natural", "seeded"]), st.lists(words, max_size=4)),
            }
        ),
        "clients": st.fixed_dictionaries(
            {"alpha": positive, "roster": st.dictionaries(st.integers(0, 9).map(str), ids, max_size=3)}
        ),
        "train": st.fixed_dictionaries(
            {"lr": positive, "optimizer": words, "optimizer_options": st.dictionaries(words, options, max_size=3)}
        ),
        "run": st.fixed_dictionaries({"out": paths, "seed": st.integers(0, 2**80)}),
        "method": methods,
    }
)


@given(raws, st.booleans())
def test_settings_survive_a_round_trip_through_toml(raw, documented):
    settings = load(raw)
    again = load(tomllib.loads(to_toml(settings, documented)))
    assert again == settings
    assert to_toml(again) == to_toml(settings)
    assert type(again.method) is type(settings.method)


@pytest.mark.parametrize("text", ["é😀", "\x7f", "\x00\x1f\x85\u2028", '"quo\'te"', "line\nbreak\r\n", "back\\slash\\"])
def test_difficult_strings_survive_a_file(tmp_path, text):
    path_text = text.replace("\0", "")  # no file system knows it
    settings = load({"run": {"out": path_text}, "method": {"layer_thresholds": {text: 0.5}}})
    path = Path(tmp_path, "settings.toml")
    path.write_bytes(to_toml(settings).encode())
    assert load(path) == settings


@given(st.text(max_size=30), st.text(max_size=30))
def test_no_assignment_ends_in_a_traceback(key, value):
    for assignment in (f"{key}={value}", f"run.{key}={value}", f"train.lr={value}", f"run.out={value}"):
        with suppress(UsageError):
            settings = load(None, [assignment])
            assert load(tomllib.loads(to_toml(settings))) == settings


@pytest.mark.parametrize(
    ("former", "columns"),
    [({"images": 1280}, 512), ({"images": 1280, "columns": 2048}, 1280), ({"images": 125, "name": "gpm"}, 125)],
)
def test_files_from_before_may_name_images(former, columns):
    """No more images than columns were looked at."""
    assert load({"method": former}).method.columns == columns


@pytest.mark.parametrize("method", ["fedavg", "fedprotip", "gpm"])
def test_the_documentation_covers_every_key(method):
    settings = load({"method": {"name": method}})
    rows = [row for row in documentation() if row["method"] in ("", method)]
    expected = {f"{name}.{key}" for name, section in settings for key in type(section).model_fields}
    assert {row["key"] for row in rows} == expected
    assert len(rows) == len(expected)
    for row in rows:
        section, key = row["key"].split(".")
        assert row["doc"], row["key"]
        assert "\n" not in row["doc"]
        assert row["default"] == getattr(getattr(settings, section), key)


def test_documented_toml_has_a_comment_above_every_key():
    lines = to_toml(load(), documented=True).splitlines()
    for place, line in enumerate(lines):
        if " = " in line and not line.startswith("#"):
            assert lines[place - 1].startswith("# "), line
    assert "# one of: class, domain" in lines


# Clients


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0", [0]), ("0-2,7", [0, 1, 2, 7]), (" 3 , 1-1 ", [1, 3]), ("2,2,1-3", [1, 2, 3])],
)
def test_lists_of_ids(text, expected):
    assert parse_ids(text) == expected


@pytest.mark.parametrize("text", ["", ",", "1,", "-1", "1-", "3-1", "a", "1-2-3", "1.5", "²", "1 2"])
def test_lists_of_ids_that_are_none(text):
    with pytest.raises(ValueError, match="list of client ids"):
        parse_ids(text)


def test_the_roster_says_who_takes_part_from_a_task_on():
    clients = load({"clients": {"count": 3, "roster": {"2": "0,5", "04": "1-2"}}}).clients
    assert [clients.active(task) for task in range(6)] == [[0, 1, 2]] * 2 + [[0, 5]] * 2 + [[1, 2]] * 2
