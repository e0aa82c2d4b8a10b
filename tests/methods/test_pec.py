"""Fed+PEC: one teacher for all, a student for every class, and what becomes of them in a federation."""

import tomllib
from importlib.resources import files

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedprotip
from fedprotip.errors import UsageError
from fedprotip.federation.aggregate import combine
from fedprotip.inference import students
from fedprotip.inference.assemble import assemble
from fedprotip.inference.students import new_teacher
from fedprotip.messages import BadMessage, Message
from fedprotip.methods import create_method
from fedprotip.methods.exchange import Sender
from fedprotip.methods.parts.students import filled, fit
from fedprotip.methods.pec import Handing, Students, new_student, options_of, recalled, remember, taught
from fedprotip.models.heads import Features
from tests.sites import Ends
from tests.small import quick, results, small, tensors

OPTIONS = {"name": "pec", "width": 3, "outputs": 5, "teacher": 4, "lr": 0.01}
SIZE = students.Size(channels=1, width=3, outputs=5)


def settings(*overrides, **sections):
    return small(*overrides, **{"method": OPTIONS, "train": {"rounds": 2}, **sections})


def chance(seed=0):
    return torch.Generator().manual_seed(seed)


def stack(count, seed=0):
    """Students that differ."""
    return {name: torch.randn(shape, generator=chance(seed)) for name, shape in SIZE.shapes(count).items()}


def one_of(stack, index):
    """A student as torch would build it; the bias of a convolution before a norm has no effect."""
    kernel = stack["kernel"][index]
    width, channels = kernel.shape[:2]
    module = nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1, bias=False),
        nn.InstanceNorm2d(width, affine=True),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(16 * width, stack["bias"].shape[1]),
    )
    parts = {"0.weight": "kernel", "1.weight": "gain", "1.bias": "shift", "5.weight": "weight", "5.bias": "bias"}
    module.load_state_dict({name: stack[part][index] for name, part in parts.items()})
    return module


@torch.no_grad()
def test_all_students_in_one_pass_are_the_students_one_by_one():
    made, images = stack(4), torch.randn(7, 1, 8, 8, generator=chance(1))
    together = students.outputs(made, images)
    own = students.outputs(made, torch.stack([images.roll(c, 0) for c in range(4)], 1))
    for c in range(4):
        module = one_of(made, c)
        assert torch.allclose(together[:, c], module(images), atol=1e-4)
        assert torch.allclose(own[:, c], module(images.roll(c, 0)), atol=1e-4)
    teacher = stack(1, seed=2)
    errors = [F.mse_loss(one_of(made, c)(images[:1]), one_of(teacher, 0)(images[:1])).item() for c in range(4)]
    assert students.scores(made, teacher, images)[0].tolist() == pytest.approx([-error for error in errors], rel=1e-3)


def test_small_parts_give_the_same(monkeypatch):
    made, images = stack(3), torch.randn(7, 1, 8, 8, generator=chance(1))
    whole = students.outputs_in_parts(made, images), students.scores(made, stack(1, 2), images)
    monkeypatch.setattr(students, "AT_ONCE", 1)
    monkeypatch.setattr(students, "TOGETHER", 3)
    assert torch.allclose(students.outputs_in_parts(made, images), whole[0], atol=1e-5)
    assert torch.allclose(students.scores(made, stack(1, 2), images), whole[1], atol=1e-5)


def test_side_by_side_every_student_makes_the_steps_of_adam_on_its_own_samples():
    """With other numbers of steps, and a last batch that is smaller."""
    made, images, targets = (
        stack(3),
        torch.randn(9, 1, 8, 8, generator=chance(1)),
        torch.randn(9, 5, generator=chance(2)),
    )
    batches = [
        [torch.tensor([0, 1]), torch.tensor([2])],
        [torch.tensor([8])],
        [torch.tensor([3, 4]), torch.tensor([5]), torch.tensor([6, 7])],
    ]
    rates = [0.01 * (1 - torch.arange(len(steps)) / 4) for steps in batches]
    learned, error = fit(made, images, targets, batches, rates)
    first = []
    for c, steps in enumerate(batches):
        module = one_of(made, c)
        optimizer = torch.optim.Adam(module.parameters())
        for part, rate in zip(steps, rates[c], strict=True):
            optimizer.param_groups[0]["lr"] = float(rate)
            loss = F.mse_loss(module(images[part]), targets[part])
            first.append(loss.item() * len(part))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        wanted = one_of(learned, c).state_dict()
        for name, tensor in module.state_dict().items():
            assert torch.allclose(wanted[name], tensor, atol=1e-4), name
    assert error == pytest.approx(sum(first) / 9, rel=1e-3)


def begin(ends, task=0, known=()):
    site = ends.site(known, task)
    handing = Handing()
    handing.receive(handing.digest(None, site), site)
    return site


def answer(ends, client, site, round_=0):
    local = ends.local(client, site)
    object.__setattr__(local, "round", round_)
    with torch.no_grad():
        return Students().answer(local)


def averaged(site, *messages):
    exchange = Students()
    total = {name: sum(message.tensors[name].double() for message in messages) for name in messages[0].tensors}
    exchange.receive(exchange.digest(Message("students", total), site), site)
    return recalled(site.known, "students")


@pytest.fixture
def ends(tmp_path):
    return Ends(settings(), tmp_path)


def test_the_teacher_is_the_same_for_every_client_and_is_not_sent(ends, tmp_path):
    site, other = begin(ends), Ends(settings(), tmp_path / "other")
    images = torch.randn(6, 1, 8, 8, generator=chance())
    targets = [taught(ends.local(client, site), images) for client in range(2)]
    targets.append(taught(other.local(0, begin(other)), images))
    teacher = one_of(new_teacher(1, 12, 5, seed=0), 0)
    with torch.no_grad():
        assert all(torch.allclose(found, teacher(images), atol=1e-5) for found in targets)
    sizes = {tuple(tensor.shape) for tensor in answer(ends, 2, site).tensors.values()}
    assert (2, 3, 1, 3, 3) in sizes
    assert not any(12 in shape for shape in sizes)
    assert not torch.equal(new_teacher(1, 12, 5, seed=1)["weight"], new_teacher(1, 12, 5, seed=0)["weight"])


def test_what_the_teacher_says_is_worked_out_once_in_a_task(ends):
    site = begin(ends)
    images = torch.randn(6, 1, 8, 8, generator=chance())
    first = taught(ends.local(0, site), images)
    assert torch.equal(taught(ends.local(0, site), images * 0), first)
    assert not torch.equal(taught(ends.local(0, begin(ends, 1)), images * 0), first)


def test_one_client_is_the_centralised_form(tmp_path):
    """Its only client holds everything: each student is the one that is trained alone, by torch's own modules."""
    one = settings("clients.count=1", "stream.tasks=1", "train.rounds=1")
    ends = Ends(one, tmp_path)
    site = begin(ends)
    found = averaged(site, answer(ends, 0, site))
    local = ends.local(0, site)
    object.__setattr__(local, "round", 0)
    images, labels = (torch.cat(part) for part in zip(*local.labelled(64), strict=True))
    order, teacher = local.chance("students"), one_of(new_teacher(1, 12, 5, 0), 0)
    for row, label in enumerate(site.classes[0]):
        own, module = (labels == label).nonzero()[:, 0], one_of(new_student(site), 0)
        optimizer = torch.optim.Adam(module.parameters())
        for step, sample in enumerate(own[torch.randperm(len(own), generator=order)]):
            optimizer.param_groups[0]["lr"] = 0.01 * (1 - step / len(own))
            loss = F.mse_loss(module(images[sample][None]), teacher(images[sample][None]).detach())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        wanted = one_of(found, row).state_dict()
        for name, tensor in module.state_dict().items():
            assert torch.allclose(wanted[name], tensor, atol=5e-3), name


def test_the_rate_falls_to_nothing_over_all_rounds_of_a_task(ends, monkeypatch):
    from fedprotip.methods import pec

    seen, original = [], pec.fit
    monkeypatch.setattr(pec, "fit", lambda *given: seen.append(given[-1]) or original(*given))
    site = begin(ends)
    for round_ in range(2):
        answer(ends, 0, site, round_)
    for first, second in zip(*seen, strict=True):
        falling = torch.cat([first, second])
        assert torch.allclose(falling, 0.01 * (1 - torch.arange(len(falling)) / len(falling)).double(), atol=1e-9)


def asked(ends, monkeypatch, rounds, known=()):
    """What a client's students are trained with: the stack they begin as, and the batches of each, round by round."""
    from fedprotip.methods import pec

    seen, original = [], pec.fit
    monkeypatch.setattr(pec, "fit", lambda *given: seen.append((given[0], given[3])) or original(*given))
    site = begin(ends, known=known)
    for round_ in range(rounds):
        averaged(site, answer(ends, 0, site, round_))
    return site, seen


def test_every_epoch_sees_all_samples_of_a_class_in_another_order(tmp_path, monkeypatch):
    ends = Ends(settings("method.epochs=2", "method.batch=4"), tmp_path)
    _, ((_, batches),) = asked(ends, monkeypatch, 1)
    labels = torch.cat([labels for _, labels in ends.local(0).labelled(64)])
    assert len(batches) == 2
    for steps in batches:
        first, second = torch.cat(steps).chunk(2)
        assert torch.equal(first.sort().values, second.sort().values)
        assert not torch.equal(first, second)
        assert len(labels[first].unique()) == 1
        assert [len(part) for part in steps].count(4) >= len(steps) - 2


def test_a_round_goes_on_from_the_mean_of_the_round_before(ends, monkeypatch):
    site, seen = asked(ends, monkeypatch, 2)
    (first, _), (second, _) = seen
    new = new_student(site)
    for row in range(2):
        assert torch.equal(first["weight"][row], new["weight"][0])
        assert not torch.equal(second["weight"][row], new["weight"][0])
    found = recalled(site.known, "students")
    assert found["weight"].shape == second["weight"].shape
    assert not torch.equal(found["weight"], second["weight"])


def test_rounds_are_its_own_or_those_of_all_methods():
    assert [create_method(settings(f"method.rounds={rounds}")).rounds(0) for rounds in (0, 5)] == [2, 5]


def test_answers_are_judged_by_the_teacher_that_students_learned_from(ends):
    site = begin(ends)
    averaged(site, answer(ends, 0, site), answer(ends, 1, site))
    found = recalled(site.known, "students")
    images = torch.randn(6, 1, 8, 8, generator=chance())
    wanted = taught(ends.local(2, site), images)
    with torch.no_grad():
        said = [one_of(found, row)(images) for row in range(2)]
    expected = torch.stack([-(out - wanted).square().mean(1) for out in said], 1)
    answers = assemble(ends.method.answering(), ends.network, site.known, site.classes[:1])
    scores = answers.experts["students"](Features.none(images))
    torch.testing.assert_close(scores, expected, rtol=1e-3, atol=1e-4)


def told(site, weights, fill):
    """A reply whose students of class c are full of fill[c]."""
    tensors = {"weights": torch.tensor(weights)}
    for name, shape in SIZE.shapes(len(weights)).items():
        factors = (torch.tensor(weights) * torch.tensor(fill)).view(-1, *[1] * (len(shape) - 1))
        tensors[name] = torch.ones(shape) * factors
    return Message("students", tensors, {"samples": sum(weights), "loss": 1.0})


def test_the_mean_is_over_those_that_hold_a_class_by_their_samples(ends):
    site = begin(ends)
    found = averaged(site, told(site, [3, 0], [1.0, 0.0]), told(site, [1, 5], [5.0, 7.0]))
    assert found["labels"].tolist() == list(site.classes[0])
    assert (found["weight"][0] == 2).all()
    assert (found["weight"][1] == 7).all()  # held by one client alone: its own student


def test_a_student_that_nobody_trained_never_wins(ends):
    """It would be as good as any other at first; so it is not there at all."""
    site = begin(ends)
    averaged(site, told(site, [3, 0], [1.0, 0.0]))
    learned, unlearned = site.classes[0]
    assert recalled(site.known, "students")["labels"].tolist() == [learned]
    answers = assemble(ends.method.answering(), ends.network, site.known, site.classes[:2])
    assert answers.on_images
    heard = answers.hear(Features.none(torch.randn(20, 1, 8, 8, generator=chance())))
    assert (answers.agnostic(heard) == learned).all()
    assert (answers.aware(heard, torch.zeros(20, dtype=torch.int64)) == learned).all()
    assert (answers.aware(heard, torch.ones(20, dtype=torch.int64)) == -1).all()  # nothing is known of that task
    assert unlearned != learned


def test_a_class_that_comes_again_goes_on_from_its_student(ends):
    """As with domains; other classes begin anew, and students of the past do not travel."""
    again = {"labels": torch.tensor([2, 9]), **stack(2)}
    site = ends.site(task=1)  # classes 2 and 3
    remember(site.known, "students", again)
    handed = Handing().digest(None, site)
    Handing().receive(handed, site)
    assert handed.tensors["labels"].tolist() == [2]
    start = filled(new_student(site), recalled(site.known, "current"), torch.tensor([2, 3]))
    assert torch.equal(start["weight"][0], again["weight"][0])
    assert torch.equal(start["weight"][1], new_student(site)["weight"][0])
    found = averaged(site, told(site, [2, 2], [1.0, 1.0]))
    assert sorted(found["labels"].tolist()) == [2, 3, 9]
    assert torch.equal(found["weight"][found["labels"] == 9][0], again["weight"][1])


def test_old_students_are_never_touched_and_the_folder_answers(tmp_path, monkeypatch):
    quick(monkeypatch)
    for tasks in (1, 2):
        fedprotip.run(settings(f"stream.tasks={tasks}"), out=tmp_path / f"{tasks}")
    one, two = (tensors(tmp_path / f"{tasks}", "students") for tasks in (1, 2))
    assert one["labels"].tolist() == [0, 1]
    for name, tensor in one.items():
        assert torch.equal(two[name][:2], tensor)
    assert results(tmp_path / "2")["summary"]["forgetting"]["aware"] == 0
    answer = fedprotip.load(tmp_path / "2").predict(torch.zeros(1, 1, 8, 8))[0]
    assert answer.label in "0123"


def test_no_weights_of_the_model_travel_and_only_the_newest_students(tmp_path, monkeypatch):
    """Also to clients that were not asked in every round."""
    quick(monkeypatch)
    some = settings("clients.count=4", "clients.fraction=0.5", "stream.tasks=1", "train.rounds=4", "run.engine=apart")
    sent = fedprotip.run(some, out=tmp_path / "r")["bytes"]
    assert "model" not in {**sent["up"], **sent["down"]}
    a_student = sum(torch.Size(shape).numel() * 4 for shape in SIZE.shapes(1).values())
    assert sent["down"]["students"] <= 4 * 2 * 2 * (a_student + 8)  # rounds, clients, classes


def changed(message, meta=(), **changes):
    found = {name: changes.get(name, lambda same: same)(tensor) for name, tensor in message.tensors.items()}
    return Message(message.kind, found, message.meta | dict(meta))


def test_replies_that_cannot_be_are_refused(ends):
    site, exchange = begin(ends), Students()
    honest = answer(ends, 0, site)
    sender = Sender(0, honest.meta["samples"])
    exchange.check(honest, site)
    exchange.check_sender(honest, site, sender)
    for bad in (
        changed(honest, weights=lambda w: -w),
        changed(honest, weights=lambda w: w * 0),
        changed(honest, weights=lambda w: w.double()),
        changed(honest, kernel=lambda k: k * torch.inf),
        changed(honest, bias=lambda b: b[:, :1]),
        changed(honest, {"loss": None}),
        changed(honest, {"samples": 0}),
        changed(honest, {"more": 1}),
    ):
        with pytest.raises(BadMessage):
            exchange.check(bad, site)
    for bad in (changed(honest, weights=lambda w: w + 1), changed(honest, {"samples": sender.samples + 1})):
        with pytest.raises(BadMessage):
            exchange.check_sender(bad, site, sender)


def test_a_student_that_moved_far_is_seen(ends):
    site, exchange = begin(ends), Students()
    honest = answer(ends, 0, site)
    (far,) = exchange.sizes(changed(honest, weight=lambda w: w * 50), site).values()
    (near,) = exchange.sizes(honest, site).values()
    assert far > exchange.slack * near


def test_stated_samples_count_as_far_as_they_are_believed(ends):
    site, exchange = begin(ends), Students()
    messages = [answer(ends, client, site) for client in (0, 1)]
    samples = messages[0].meta["samples"]
    assert exchange.weight(messages[0], site) == 1
    site.most = samples / 4
    assert exchange.weight(messages[0], site) == 0.25
    assert exchange.effort(messages[0], site, Sender(0, samples)) == -(-samples // 4 // options_of(site).batch)
    told = exchange.digest(combine(exchange, enumerate(messages), site), site).tensors
    parts = [m.tensors["kernel"] * exchange.weight(m, site) for m in messages]
    weights = [m.tensors["weights"] * exchange.weight(m, site) for m in messages]
    expected = sum(parts) / sum(weights)[:, None, None, None, None]
    assert torch.allclose(told["kernel"], expected.float(), atol=1e-6)


def test_a_uniform_mean_counts_every_holder_once(tmp_path):
    ends = Ends(settings("train.average=uniform"), tmp_path)
    site = begin(ends)
    message = answer(ends, 0, site)
    assert set(message.tensors["weights"].tolist()) <= {0, 1}
    Students().check_sender(message, site, Sender(0, message.meta["samples"]))
    with pytest.raises(BadMessage):
        Students().check_sender(changed(message, weights=lambda w: w * 2), site, Sender(0, message.meta["samples"]))


def test_other_means_are_refused_before_the_run():
    with pytest.raises(UsageError, match="'median' is not possible with"):
        create_method(settings("train.aggregate=median"))


def test_a_plan_cannot_ask_for_a_teacher_without_end():
    with pytest.raises(ValueError, match="more than"):
        new_teacher(1, 10**9, 100, seed=0)


@pytest.mark.parametrize("name", ["pec", "scr"])
def test_the_smaller_size_is_possible_and_smaller(name):
    text = (files("fedprotip") / "configs" / "rivals-cpu.toml").read_text(encoding="utf-8")
    reduced = tomllib.loads(text)[name]
    full = fedprotip.load_settings({"method": {"name": name}}).method
    chosen = fedprotip.load_settings({"method": {"name": name, **reduced}}).method
    assert {key for key in reduced if getattr(chosen, key) != getattr(full, key)} == reduced.keys()


def test_with_domains_a_student_goes_on_and_there_are_no_more_of_them(tmp_path, monkeypatch):
    quick(monkeypatch)
    domains = {"scenario": "domain", "domains": "permute", "task_size": 0, "tasks": 2}
    fedprotip.run(settings("train.rounds=1", "method.batch=16", stream=domains), out=tmp_path / "r")
    assert sorted(tensors(tmp_path / "r", "students")["labels"].tolist()) == list(range(10))
    assert results(tmp_path / "r")["summary"]["bytes"]["down"]["knowledge"] > 0  # with the students to go on from
