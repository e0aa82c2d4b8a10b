"""resume: what a checkpoint after every round costs, and that it gives back exactly what was saved."""

import json
import os
from collections.abc import Callable, Iterable
from copy import deepcopy
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import load_file

import fedprotip
from benchmarks import textbook
from benchmarks.harness import Agreement, Bench
from benchmarks.inside import Checkpoints, Tensors, move
from benchmarks.runs import Stop
from benchmarks.second_task import Size, cpu_scale


def resume(bench: Bench, size: Size) -> None:
    """A checkpoint after every round, ResNet-18 at scale cpu."""
    bench.say("resume: a run that is stopped in its second task")
    wanted, path = cpu_scale("fedprotip", bench.folder, size), bench.folder / "state.safetensors"
    round_ = _stopped_run(wanted, size.overrides, bench.folder / "run")
    mine = Checkpoints(bench.folder / "run")
    theirs = deepcopy(mine.groups)

    def ours() -> Callable[[], Tensors]:
        move(mine.groups)
        mine.write()
        return lambda: textbook.flat(Checkpoints(bench.folder / "run").groups)

    def plain() -> Callable[[], Tensors]:
        move(theirs)
        path.with_suffix(".json").write_text(json.dumps(mine.numbers))
        textbook.save_groups(theirs, path)
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        return lambda: load_file(path)

    case = bench.measure("second task", {"ours": ours, "textbook": plain}, _same_state, memory=True, least=0)
    bench.figure(case, "% of a round for its checkpoint", 100 * case.seconds["ours"] / round_, "≤", 3)
    bench.speedup(case)


def _stopped_run(wanted: dict[str, Any], overrides: Iterable[str], path: Path) -> float:
    """Seconds of a later round of the second task; in the first one the prefix cache is filled."""
    taken: list[float] = []

    def stop(event: Any) -> None:
        fields = dict(event)
        if (fields["event"], fields.get("task")) == ("round", 1):
            taken.append(fields["seconds"])
            if len(taken) == 3:
                raise Stop

    try:
        fedprotip.run(wanted, overrides, path, [stop])
    except Stop:
        return median(taken[1:])
    raise AssertionError("the second task has three rounds")


def _same_state(results: dict[str, Any]) -> Agreement:
    """Both ways give back the same tensors, bit by bit."""
    ours, plain = results["ours"](), results["textbook"]()
    different = sum(name not in ours or not torch.equal(ours[name], tensor) for name, tensor in plain.items())
    return "tensors that are not bit for bit the same", float(different), 0.0
