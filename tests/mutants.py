"""Wrong programs that the tests must notice: one changed line each, in a copy of the source tree.

python -m tests.mutants            all of them; python -m tests.mutants NAME … only these
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
SOURCE = Path("src") / "fedprotip"
TOGETHER = 2
"""Mutants that are tested at a time, each in a process of its own."""
FAILED = 1
"""What pytest returns when tests ran and some failed; an import that breaks is something else."""


@dataclass(frozen=True)
class Mutant:
    """`right` stands exactly once in the file; with `wrong` in its place one of the tests must fail."""

    name: str
    file: str
    right: str
    wrong: str
    tests: tuple[str, ...]

    def apply(self, source: Path) -> None:
        """Change the file below this folder; a line that is gone, or is there twice, is an error."""
        path = source / self.file
        text = path.read_text(encoding="utf-8")
        if text.count(self.right) != 1:
            raise LookupError(
                f"mutant {self.name!r}: {self.right!r} stands {text.count(self.right)} times in {self.file}, not once; "
                "give the mutant the line that took its place"
            )
        path.write_text(text.replace(self.right, self.wrong), encoding="utf-8")


MUTANTS = [
    # Subspaces
    Mutant(
        "residual keeps the past",
        "subspace/basis.py",
        "else a - basis @ inside",
        "else a + basis @ inside",
        ("tests/subspace/test_basis.py::test_residual_is_idempotent_and_orthogonal",),
    ),
    Mutant(
        "no floor for the rounding of earlier bases",
        "subspace/basis.py",
        "(1 / DEPENDENT if earlier.room < d else 0)",
        "0",
        ("tests/subspace/test_noise.py::test_activations_inside_a_span_that_is_known_up_to_the_merge_add_nothing",),
    ),
    Mutant(
        "faint features do not count",
        "subspace/basis.py",
        "noise(known) * total**0.5, rank=samples",
        "FAINT * total**0.5, rank=samples",
        ("tests/subspace/test_noise.py::test_the_routing_basis_of_one_client_has_the_rank_of_eq_9",),
    ),
    Mutant(
        "every sine is a new direction",
        "subspace/merge.py",
        "(sines > DEPENDENT).sum()",
        "(sines > 1e-6).sum()",
        ("tests/subspace/test_merge.py::test_many_clients_of_one_space_do_not_leave_it",),
    ),
    Mutant(
        "clients' bases are not compared with each other",
        "subspace/merge.py",
        "*self._known, self._new)",
        "*self._known)",
        ("tests/subspace/test_merge.py::test_merged_span_is_the_union_in_every_order",),
    ),
    Mutant(
        "energies of earlier bases do not add up over clients",
        "subspace/merge.py",
        "self._captured += core.captured",
        "self._captured = core.captured",
        ("tests/subspace/test_merge.py::test_energy_merge_counts_what_earlier_bases_hold_of_every_client",),
    ),
    Mutant(
        "one direction too few",
        "subspace/rank.py",
        "int(reached.int().argmax()) + 1",
        "max(int(reached.int().argmax()), 1)",
        ("tests/subspace/test_rank.py::test_mass_is_eq_9",),
    ),
    Mutant(
        "mass of squares",
        "subspace/rank.py",
        "threshold * (sigma.double().sum().item() + tail)",
        "threshold * (sigma.double().square().sum().item() + tail)",
        ("tests/subspace/test_rank.py::test_mass_is_eq_9",),
    ),
    Mutant(
        "half a projection",
        "subspace/project.py",
        "return torch.addmm(g, g @ phi, phi.T, alpha=-1)",
        "return torch.addmm(g, g @ phi, phi.T, alpha=-0.5)",
        ("tests/subspace/test_project.py::test_projector_equals_the_dense_one_and_is_idempotent",),
    ),
    # Training and the end of a task
    Mutant(
        "steps are not pulled back",
        "methods/parts/projection.py",
        "            if not guard.by_inputs:\n",
        "            if guard.by_inputs:\n",
        (
            "tests/methods/parts/test_projected_inputs.py::test_projected_inputs_give_the_update_that_projected_weights_give",
        ),
    ),
    Mutant(
        "decay acts inside the past",
        "methods/parts/projection.py",
        "fixed_part, alpha=decay)",
        "fixed_part, alpha=0.0)",
        (
            "tests/methods/parts/test_projected_inputs.py::test_projected_inputs_give_the_update_that_projected_weights_give",
        ),
    ),
    Mutant(
        "the threshold grows a task too early",
        "methods/parts/bases.py",
        "self.options.increment * task, 1.0)",
        "self.options.increment * (task + 1), 1.0)",
        ("tests/methods/test_fedprotip.py::test_threshold_grows_by_task_and_follows_patterns",),
    ),
    Mutant(
        "moments count some images twice",
        "methods/parts/bases.py",
        "after=moments.samples)",
        "after=0)",
        ("tests/methods/test_fedprotip.py::test_every_image_passes_once_for_columns_and_moments",),
    ),
    Mutant(
        "references of clients that left are forgotten",
        "methods/parts/references.py",
        'if "references/values" in knowledge:',
        'if "references/values" not in knowledge:',
        ("tests/methods/test_fedprotip.py::test_references_of_clients_that_left_are_kept_with_gaps",),
    ),
    # The federation
    Mutant(
        "clients are drawn once a task",
        "federation/server.py",
        '"clients", task, round_)',
        '"clients", task)',
        ("tests/federation/test_server.py",),
    ),
    Mutant(
        "all clients weigh the same",
        "federation/aggregate.py",
        "add_(piece, alpha=weight)",
        "add_(piece)",
        ("tests/federation/test_aggregate.py::test_the_average_is_the_weighted_sum",),
    ),
    Mutant(
        "p_k is uniform",
        "methods/parts/training.py",
        'site.settings.train.average == "weighted"',
        'site.settings.train.average == "uniform"',
        ("tests/methods/parts/test_training.py::test_a_model_weighs_its_samples_unless_all_weigh_the_same",),
    ),
    Mutant(
        "rounds without an update do not count",
        "federation/server.py",
        "progress.barren, progress.failing = progress.barren + 1,",
        "progress.barren, progress.failing = 0,",
        ("tests/federation/test_loop.py::test_when_all_clients_fail_the_run_stops_with_the_reason_and_can_be_resumed",),
    ),
    Mutant(
        "the largest client bounds itself",
        "methods/parts/presence.py",
        "sorted(stated)[:-1]",
        "sorted(stated)",
        ("tests/federation/test_server.py",),
    ),
    Mutant(
        "one client decides which way answers",
        "methods/parts/calibration.py",
        "counts.topk(2, dim=0).values[1]",
        "counts.topk(2, dim=0).values[0]",
        ("tests/methods/parts/test_calibration.py",),
    ),
    Mutant(
        "ways are tried on samples that the statistics know",
        "methods/parts/calibration.py",
        "whole.without(own)",
        "whole.without(own.times(0))",
        ("tests/methods/parts/test_statistics.py",),
    ),
    Mutant(
        "unusual is what was unusual among fewer classes",
        "methods/parts/calibration.py",
        "shares.get(name, FADING)",
        "shares.get(name, 1)",
        ("tests/methods/parts/test_calibration.py",),
    ),
    Mutant(
        "statistics never rot",
        "methods/parts/wear.py",
        "yield True",
        "yield False",
        ("tests/methods/parts/test_wear.py",),
    ),
    # Task identity and metrics
    Mutant(
        "references grow with the number of samples",
        "inference/route.py",
        "(moments.double() @ whole) / n",
        "(moments.double() @ whole) / n.sqrt()",
        ("tests/inference/test_route.py::test_a_reference_needs_no_features",),
    ),
    Mutant(
        "borrowed references do not weigh samples",
        "inference/route.py",
        "weights = believed(counts)[:, :, None] * known",
        "weights = (counts[:, :, None] > 0) * known",
        ("tests/inference/test_route.py::test_gaps_are_filled_as_by_a_plain_loop",),
    ),
    Mutant(
        "the least similar task wins",
        "inference/route.py",
        "similarity.argmax(2)",
        "similarity.argmin(2)",
        ("tests/inference/test_route.py::test_routing_is_the_plain_vote",),
    ),
    Mutant(
        "forgetting is divided by T − 1",
        "evaluation/metrics.py",
        "if values) / len(last)",
        "if values) / max(len(last) - 1, 1)",
        ("tests/evaluation/test_metrics.py",),
    ),
    Mutant(
        "the last row is among the maxima",
        "evaluation/metrics.py",
        "for row in matrix[task:-1]]",
        "for row in matrix[task:]]",
        ("tests/evaluation/test_metrics.py",),
    ),
    # Defaults
    Mutant(
        "the way that was wrong most often answers",
        "inference/calibration.py",
        "+ apart.clamp_min(0).sqrt() >= right.max()",
        "- apart.clamp_min(0).sqrt() <= right.min()",
        ("tests/inference/test_calibration.py",),
    ),
    Mutant(
        "own directions without the class mean taken off",
        "inference/statistics.py",
        "return self.sketches - self.sums",
        "return self.sketches + 0 * self.sums",
        ("tests/inference/test_statistics.py",),
    ),
    Mutant(
        "masks between clients do not cancel out",
        "federation/secure/masks.py",
        "add_mask(vector, agreed, 1 if client == first else -1)",
        "add_mask(vector, agreed, 1)",
        ("tests/federation/secure/test_masks.py::test_as_many_may_be_lost_as_the_threshold_allows",),
    ),
    Mutant(
        "a changed vector goes unnoticed",
        "federation/secure/masks.py",
        "if check_of(vector, session) != check:",
        "if len(vector) < 0 != check:",
        ("tests/federation/secure/test_masks.py::test_a_changed_vector_is_noticed",),
    ),
    Mutant(
        "too few may make a sum",
        "federation/secure/masks.py",
        "return max(min(int(round(clients * share, 6)) + 1, clients), FEWEST)",
        "return FEWEST",
        ("tests/federation/secure/test_masks.py::test_below_the_threshold_nothing_is_revealed",),
    ),
    Mutant(
        "sums of many clients may overflow",
        "federation/secure/ring.py",
        "most, one = WHOLE / clients, 2.0**fraction",
        "most, one = WHOLE, 2.0**fraction",
        ("tests/federation/secure/test_ring.py",),
    ),
]


def copied(folder: Path) -> Path:
    """A tree of its own below this folder: the package and its tests."""
    for part in (SOURCE, Path("tests")):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__", ".hypothesis"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def outcome(tree: Path, tests: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """The tests of a tree, with its own package, up to the first that fails."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0", *tests]
    paths = os.pathsep.join([str(tree / "src"), str(tree)])
    settings = {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=tree, env=os.environ | settings, capture_output=True, text=True, check=False)


def caught(mutant: Mutant) -> str:
    """Empty when the tests fail with this mutant, else what happened."""
    with TemporaryDirectory(prefix="fedprotip-mutant-") as folder:
        tree = copied(Path(folder))
        mutant.apply(tree / SOURCE)
        found = outcome(tree, mutant.tests)
    if found.returncode == FAILED:
        return ""
    return f"{mutant.name}: pytest ended with {found.returncode}, not {FAILED}\n{found.stdout[-2000:]}{found.stderr}"


def judged(mutants: Iterable[Mutant]) -> Iterator[tuple[Mutant, str]]:
    """Every mutant with what `caught` says of it, as soon as it is known."""
    mutants = list(mutants)
    with ThreadPoolExecutor(TOGETHER) as pool:
        yield from zip(mutants, pool.map(caught, mutants), strict=True)


def main() -> None:
    wanted = [mutant for mutant in MUTANTS if not sys.argv[1:] or mutant.name in sys.argv[1:]]
    survivors = 0
    for mutant, problem in judged(wanted):
        survivors += bool(problem)
        print(f"{'SURVIVED' if problem else 'caught'}  {mutant.name}\n{problem}".rstrip(), flush=True)
    sys.exit(f"{survivors} of {len(wanted)} mutants survived" if survivors else 0)


if __name__ == "__main__":
    main()
