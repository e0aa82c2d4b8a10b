"""From a declaration to answers: the experts and routers that a plan names, made of what is known."""

from collections.abc import Sequence

from fedprotip.inference import experts, prototypes, routers, students
from fedprotip.inference.answers import Inference, Way
from fedprotip.inference.calibration import Calibration, best_way
from fedprotip.inference.candidates import Candidates
from fedprotip.inference.parts import EXPERTS, ROUTERS, Context, builder_of
from fedprotip.models import Network
from fedprotip.store.files import Tensors
from fedprotip.stream.plan import Answering, Options

__all__ = ["assemble", "experts", "prototypes", "routers", "students"]  # the last four register what is built in


def assemble(answering: Answering, network: Network, knowledge: Tensors, classes: Sequence[Sequence[int]]) -> Inference:
    """How samples are answered, given the classes of every task so far."""
    candidates = Candidates.of(classes)

    def given(options: Options) -> Context:
        return Context(network, knowledge, classes, candidates, options)

    chosen = best_way(answering, knowledge, classes)
    return Inference(
        candidates,
        {name: builder_of("expert", name, EXPERTS)(given(options)) for name, options in answering.experts.items()},
        {
            name: Way(builder_of("router", way.router, ROUTERS)(given(way.options)), way.expert, way.hard)
            for name, way in answering.ways.items()
        },
        chosen,
        Calibration.recall(knowledge, answering, chosen),
    )
