"""What the server can know without seeing any sample: replies that cannot be true are refused."""

from types import SimpleNamespace

import pytest
import torch

from fedprotip.federation.aggregate import combine
from fedprotip.inference.calibration import MEASURES
from fedprotip.inference.statistics import FeatureMap, Sums, pack
from fedprotip.messages import BadMessage, Message
from fedprotip.methods.exchange import Sender
from fedprotip.methods.parts import statistics
from fedprotip.methods.parts.calibration import BINS, CALIBRATION, SURE, TEMPERATURES, Calibrating, held_back
from fedprotip.methods.parts.references import References
from fedprotip.methods.parts.training import Training
from tests.sites import Ends
from tests.small import small

MAP = FeatureMap(6, columns=2)


def told(counts=(30, 20), seed=0):
    """Statistics of features that are not negative."""
    chance = torch.Generator().manual_seed(seed)
    rows = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    sums = Sums.zeros(len(counts), MAP.d, MAP.columns)
    sums.add(torch.rand(len(rows), MAP.d, generator=chance), rows, MAP.omega)
    tensors = {"counts": sums.counts.long(), "sums": sums.sums.float(), "moment": pack(sums.moment).float()}
    tensors["sketches"] = sums.sketches.float()
    return Message(statistics.KIND, tensors, {"withheld": 0})


def changed(message, **tensors):
    return Message(message.kind, message.tensors | tensors, message.meta)


def test_honest_statistics_pass():
    statistics.check(told(), statistics.KIND, 2, MAP)
    statistics.check(told((1, 1)), statistics.KIND, 2, MAP)
    statistics.check(told((0, 5)), statistics.KIND, 2, MAP)
    statistics.check_signs(told(), positive=True)


@pytest.mark.parametrize("factor", [1e-3, 1e-12, 1e-20])
def test_features_that_are_almost_dead_pass(factor):
    """Rounding of tiny numbers is absolute."""
    honest = told()
    powers = {"sums": 1, "moment": 2, "sketches": 2}
    tensors = {name: honest.tensors[name] * factor**power for name, power in powers.items()}
    statistics.check(changed(honest, **tensors), statistics.KIND, 2, MAP)


def test_a_moment_must_fit_sums_and_counts():
    honest = told()
    moment = honest.tensors["moment"]
    products = moment.clone()
    products[1] *= 3  # above what the two variances allow
    for tensors in (
        {"moment": products},
        {"moment": -moment},
        {"moment": moment / 4},
        {"sums": honest.tensors["sums"] * 3},
    ):
        with pytest.raises(BadMessage, match="second moment is none"):
            statistics.check(changed(honest, **tensors), statistics.KIND, 2, MAP)


def test_there_are_no_products_of_no_samples():
    """They would be in line with everybody's: nothing has a length of no samples."""
    nothing = told((0, 0))
    statistics.check(nothing, statistics.KIND, 2, MAP)
    huge = changed(nothing, moment=pack(1e9 * torch.eye(MAP.d)))
    plain = FeatureMap(MAP.d)  # without sketches, as at the start of a head
    with pytest.raises(BadMessage, match="products of no samples"):
        statistics.check(changed(huge, sketches=torch.zeros(2, MAP.d, 0)), statistics.KIND, 2, plain)
    few = {"factor": torch.ones(MAP.d, 1), "rest": torch.zeros(MAP.d), "sketches": torch.zeros(2, MAP.d, 0)}
    few |= {name: nothing.tensors[name] for name in ("counts", "sums")}
    with pytest.raises(BadMessage, match="products of no samples"):
        statistics.check(Message(statistics.KIND, few, {"withheld": 2}), statistics.KIND, 2, plain, rank=1)


def test_features_of_a_relu_have_no_negative_sums():
    negated = changed(told(), sums=-told().tensors["sums"])
    statistics.check(negated, statistics.KIND, 2, MAP)  # its moment and sketches fit
    statistics.check_signs(negated, positive=False)
    with pytest.raises(BadMessage, match="cannot be negative"):
        statistics.check_signs(negated, positive=True)


def test_counts_are_those_of_the_samples_it_has():
    statistics.check_counts(told(), Sender(0, 50), 5)
    few = Message(statistics.KIND, told((30, 0)).tensors, {"withheld": 1})
    for samples in (31, 34):
        statistics.check_counts(few, Sender(0, samples), 5)
    for message, samples in ((told(), 49), (told(), 5000), (told(), None), (few, 30), (few, 35), (told((30, 3)), 33)):
        with pytest.raises(BadMessage):
            statistics.check_counts(message, Sender(0, samples), 5)


def test_the_length_of_features_and_its_inverse_are_compared():
    sizes = statistics.sizes(told())
    assert sizes["length of features"] == pytest.approx(1 / sizes["inverse length of features"])
    assert statistics.sizes(Message(statistics.KIND, told((0, 0)).tensors, {"withheld": 2})) == {}


@pytest.mark.parametrize("how", ["each", "sum"])
def test_sums_of_too_many_samples_count_for_as_many_as_a_client_can(how):
    """A client of ten times the samples, all of the first class, beside one that has two classes."""
    settings, many = small(), told((500, 0), seed=1)
    exchange = statistics.Statistics(settings)
    site = SimpleNamespace(most=100, settings=settings)
    if how == "sum":
        whole = combine(exchange, [(0, told()), (1, many)], site)
        assert whole.tensors["counts"].tolist() == [130, 20]
        found = statistics.summed(whole, settings.train, MAP.omega, site.most)
    else:
        found = statistics.summed([(0, told()), (1, many)], settings.train, MAP.omega, site.most)
    assert found.counts.tolist() == [130, 20]
    expected = told().tensors["sums"].double() + many.tensors["sums"].double() / 5
    assert torch.allclose(found.sums, expected)
    for least in (50, torch.inf):  # its own 50 samples are not too many
        assert statistics.weight(told(), least) == 1


def test_numbers_of_samples_stay_what_they_were():
    message = Message("model", meta={"samples": 10, "loss": 1.0})
    Training().check_sender(message, None, Sender(0, 10))
    for samples in (9, None):
        with pytest.raises(BadMessage, match="are stated"):
            Training().check_sender(message, None, Sender(0, samples))


def scored(count, right=0, loss=1.0):
    """What a client says about one way to answer."""
    distances = torch.zeros(len(MEASURES), BINS, dtype=torch.int64)
    distances[:, 3] = count
    losses = torch.full((1, len(TEMPERATURES)), loss * count, dtype=torch.float64)
    hits = torch.zeros(1, len(TEMPERATURES), 2, SURE, dtype=torch.int64)
    hits[:, :, 0, 5], hits[:, :, 1, 5] = count, min(right, count)
    counts = torch.tensor([right])
    told = {"right": counts, "still": 2 * counts, "loss": losses, "hits": hits, "distances": distances}
    return Message("calibration", told | {"apart": torch.zeros(1, 1, dtype=torch.int64)})


def test_no_more_is_scored_than_can_be_held_back(tmp_path):
    settings = small(clients={"held_back": 0.2})
    site = Ends(settings, tmp_path).site()
    exchange = Calibrating(statistics.answering(settings), settings.train)  # one way

    exchange.check(scored(10), site)
    exchange.check(scored(10, right=10, loss=50.0), site)
    exchange.check_sender(scored(10), site, Sender(0, 40))  # of 50
    with pytest.raises(BadMessage, match="held back"):
        exchange.check_sender(scored(11), site, Sender(0, 40))
    with pytest.raises(BadMessage, match="larger than so many samples"):
        exchange.check(scored(10, loss=50.1), site)
    with pytest.raises(BadMessage, match="more answers are right"):
        exchange.check(scored(10, right=11), site)
    lasting = scored(10, right=5)
    lasting.tensors["still"] += 11  # of 10 samples on two ways
    with pytest.raises(BadMessage, match="still right"):
        exchange.check(lasting, site)
    otherwise = scored(10, right=5)
    otherwise.tensors["apart"] += 1
    with pytest.raises(BadMessage, match="not apart as often"):
        exchange.check(otherwise, site)
    for part, place in ((0, 6), (1, 4)):  # a sample too many, or a right answer that nobody gave
        strange = scored(10)
        strange.tensors["hits"][0, 7, part, place] = 1
        with pytest.raises(BadMessage, match="at a sureness"):
            exchange.check(strange, site)
    wrapped = scored(10)  # adds up to 10 beyond the largest integer
    wrapped.tensors["hits"][0, 7, 0, 5:8] = torch.tensor([2**63 - 1, 2**63 - 1, 12])
    with pytest.raises(BadMessage, match="at a sureness"):
        exchange.check(wrapped, site)
    uneven = scored(10)
    uneven.tensors["distances"][1, 4] = 1  # another number of samples by the second measure
    with pytest.raises(BadMessage, match="a count is impossible"):
        exchange.check(uneven, site)


def test_held_back_samples_count_as_far_as_they_are_believed(tmp_path):
    """Of a client that states ten times the samples of the other and says that all were wrong."""
    settings = small(clients={"held_back": 0.2})
    site = Ends(settings, tmp_path).site()
    site.known.declared[CALIBRATION.name] = CALIBRATION
    exchange, site.most = Calibrating(statistics.answering(settings), settings.train), 79
    exchange.digest([(0, scored(10, right=10, loss=0.1)), (1, scored(200, loss=0.2))], site)
    assert held_back(site, 79) == 20
    assert site.known["calibration/distances"].sum(1).tolist() == [30, 30]
    assert site.known["calibration/right"].tolist() == [30]  # wrong answers that only one found do not count
    assert site.known["calibration/hits"][0, 0, :, 5].tolist() == [30, 10]
    assert site.known["calibration/loss"][0, 0].item() == pytest.approx(10 * 0.1 + 20 * 0.2)


def test_references_to_earlier_tasks_stay(tmp_path):
    site = Ends(small(), tmp_path).site(task=1)
    first = {"values": torch.tensor([[[1.0]]]), "variances": torch.zeros(1, 1, 1), "counts": torch.tensor([[20]])}
    known = {"references/clients": torch.tensor([4])} | {f"references/{name}": part for name, part in first.items()}
    site.known.update(known)

    def reply(value=1.0, counts=(20, 30)):
        values = torch.tensor([[value, 0.3], [0.2, 0.9]])
        return Message("reference", {"values": values, "variances": torch.zeros(2, 2), "counts": torch.tensor(counts)})

    exchange = References()
    exchange.check(reply(), site)
    for fine in (reply(), reply(counts=(0, 30)), reply(counts=(20, 0))):
        exchange.check_sender(fine, site, Sender(4, 30))
    exchange.check_sender(reply(value=5.0), site, Sender(2, 30))  # of another client nothing is known
    for bad in (reply(value=1.1), reply(counts=(21, 30)), reply(counts=(20, 31))):
        with pytest.raises(BadMessage):
            exchange.check_sender(bad, site, Sender(4, 30))


def test_whether_features_can_be_negative_is_found_by_noise(tmp_path):
    ends = Ends(small(), tmp_path)
    assert ends.site().positive_features()  # a perceptron ends with a ReLU
    ends.network.backbone.append(torch.nn.Linear(24, 24))
    assert not ends.site().positive_features()
