"""Two runs that are started on one path at the same moment: one gets it, whole; the other is told."""

import multiprocessing
import time

from fedprotip.errors import FedprotipError
from fedprotip.store.folder import RunFolder

TIMES = 40


def create(place, number, barrier, results):
    """Create folder after folder, each at the same moment as the other process; hold each until both have tried."""
    for time_ in range(TIMES):
        barrier.wait(60)
        try:
            run = RunFolder.create(place / str(time_), f"[run]\nseed = {number}\n")
            with run.locked():
                barrier.wait(60)
                results.put((time_, number, ""))
        except FedprotipError as error:
            barrier.wait(60)
            results.put((time_, number, str(error)))


def test_two_processes_do_not_mix_in_one_folder(tmp_path):
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(2), context.Queue()
    processes = [context.Process(target=create, args=(tmp_path, number, barrier, results)) for number in (1, 2)]
    for process in processes:
        process.start()
    found = [results.get(timeout=60) for _ in range(2 * TIMES)]
    for process in processes:
        process.join(60)
    for turn in range(TIMES):
        outcomes = {number: said for time_, number, said in found if time_ == turn}
        (winner,) = (number for number, said in outcomes.items() if not said)
        loser = outcomes[3 - winner]
        assert "is in use by another fedprotip process" in loser or "is not empty" in loser
        run = RunFolder.open(tmp_path / str(turn))
        assert run.settings() == {"run": {"seed": winner}}
        assert (run.path / "settings.toml").read_text() == f"[run]\nseed = {winner}\n"
        assert set(run.verify().values()) == {"intact"}


def test_a_new_run_is_locked_from_its_first_file_on(tmp_path):
    """A `resume` that comes between creating a run and working on it waits its turn."""
    run = RunFolder.create(tmp_path / "run", "[run]\n")
    start = time.monotonic()
    try:
        with RunFolder.open(run.path).locked():
            raise AssertionError("two hold the lock")
    except FedprotipError as error:
        said = str(error)
    assert "is in use by another" in said
    assert time.monotonic() - start < 10
    with run.locked():
        pass
    with RunFolder.open(run.path).locked():
        pass
