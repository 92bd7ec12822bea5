"""common/runs.py alone: names, checkpoints, files. The whole of it is run in test_scripts.py."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from common import runs
from common.mazes import MazeVecEnv

ROOT = Path(__file__).parent.parent


@dataclass
class Args:
    env_id: str = "Maze1-v0"
    bonus: str = "sqrt"
    augment: bool = True
    seed: int = 1
    device: str = "cpu"
    runs_dir: str = "runs"
    run_name: str | None = None
    resume: str | None = None
    total_timesteps: int = 100
    checkpoint_every: int = 10
    eval_every: int = 1000
    learning_rate: float = 0.1
    track: bool = False


@pytest.fixture
def start(tmp_path):
    """Make runs whose signals and files are put away afterwards."""
    made = []

    def make(kept=None, reachable=None, **settings):
        args = Args(**settings)
        if args.resume is None:
            args.runs_dir = str(tmp_path)
        args = runs.resume_args(args, "some_sofe")
        reachable = np.ones((3, 3), bool) if reachable is None else reachable
        made.append(runs.Run(args, "some_sofe", reachable, kept or {"x": torch.zeros(2)}))
        return made[-1]

    yield make
    for run in made:
        run.close()


def test_names_hold_no_odd_characters_and_never_collide(start):
    folders = [start(env_id="MiniHack:Multi/Room v0").folder for _ in range(3)]
    assert len(set(folders)) == 3
    for folder in folders:
        assert re.fullmatch(r"[A-Za-z0-9._-]{1,79}", folder.name)
        assert folder.is_absolute()
    assert start(run_name="a b/c" + 100 * "x").folder.name == ("a-b-c" + 100 * "x")[:79]


def test_a_flag_on_the_command_line_counts_also_where_it_is_the_default(start, monkeypatch):
    folder = str(start(total_timesteps=50, seed=3).folder)
    resumed = runs.resume_args(Args(resume=folder), "some_sofe")
    assert (resumed.total_timesteps, resumed.seed) == (50, 3)
    monkeypatch.setattr(sys, "argv", ["some_sofe.py", "--resume", folder, "--total_timesteps=100"])
    resumed = runs.resume_args(Args(resume=folder), "some_sofe")
    assert (resumed.total_timesteps, resumed.seed) == (100, 3)
    monkeypatch.setattr(sys, "argv", ["some_sofe.py", "--resume", folder, "--no-augment"])
    with pytest.raises(SystemExit, match="--augment False differs from the run's True"):
        runs.resume_args(Args(resume=folder, augment=False), "some_sofe")
    monkeypatch.setattr(sys, "argv", ["some_sofe.py", "--resume", folder, "--seed", "1"])
    with pytest.raises(SystemExit, match="--seed 1 differs from the run's 3"):
        runs.resume_args(Args(resume=folder), "some_sofe")


def test_a_checkpoint_gives_back_what_was_kept(start):
    def make_kept():
        model = torch.nn.Linear(2, 2)
        return {
            "model": model,
            "optimizer": torch.optim.Adam(model.parameters()),
            "envs": MazeVecEnv(2, engine="numpy", max_steps=5),
            "table": torch.zeros(4, dtype=torch.int64),
        }

    kept = make_kept()
    run = start(kept, run_name="run")
    kept["model"](torch.ones(2)).sum().backward()
    kept["optimizer"].step()
    kept["envs"].reset()
    kept["envs"].step(np.array([2, 2]))
    kept["table"][2] = 2**40
    run.log_step(0, np.array([[0, 1], [0, 1], [-1, -1]]))
    run.checkpoint(30, write=True)
    expected = torch.rand(3)
    run.close()

    other = make_kept()
    resumed = start(other, resume=str(run.folder))
    assert resumed.start_step == 30
    for name, value in kept["model"].state_dict().items():
        assert torch.equal(value, other["model"].state_dict()[name])
    state = other["optimizer"].state_dict()["state"][0]
    assert torch.equal(state["exp_avg"], kept["optimizer"].state_dict()["state"][0]["exp_avg"])
    assert (other["envs"].observe() == kept["envs"].observe()).all()
    assert torch.equal(other["table"], kept["table"])
    assert resumed.visits[0, 1] == 2 and resumed.visits.sum() == 2
    assert torch.equal(torch.rand(3), expected)  # the random generator goes on as well


def test_checkpoints_are_written_when_they_are_due(start):
    run = start(run_name="run")
    path, steps = run.folder / "checkpoint.pt", []
    for step in (0, 4, 8, 12, 16, 24):
        run.checkpoint(step)
        if path.exists():
            steps.append(torch.load(path, weights_only=True)["global_step"])
    assert steps == [12, 12, 24]


def test_killed_while_it_saves_the_old_checkpoint_is_whole(tmp_path):
    """SIGKILL just before the new file takes the place of the old one."""
    code = (
        "import os, signal, torch, sys\n"
        f"sys.path.insert(0, {str(ROOT / 'tests')!r})\n"
        "from test_runs import Args, runs\n"
        "import numpy as np\n"
        f"args = Args(runs_dir={str(tmp_path)!r}, run_name='run')\n"
        "run = runs.Run(args, 'some_sofe', np.ones((2, 2), bool), {'x': torch.ones(1000)})\n"
        "run.checkpoint(10, write=True)\n"
        "os.replace = lambda *paths: os.kill(os.getpid(), signal.SIGKILL)\n"
        "run.checkpoint(20, write=True)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert result.returncode == -signal.SIGKILL, result.stderr
    content = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    assert content["global_step"] == 10 and content["state"]["x"].sum() == 1000


@pytest.mark.parametrize(("ring", "writes"), [(False, 1), (True, 1), (True, 3), (True, 6)])
def test_a_signal_while_it_saves_waits_for_the_end(tmp_path, monkeypatch, capfd, ring, writes):
    """Two writers of one file would tear it: the state is whole, and written once."""

    class Interrupted:
        def __init__(self, file):
            self.file, self.count = file, 0

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.file.close()

        def __getattr__(self, name):
            return getattr(self.file, name)

        def write(self, content):
            self.count += 1
            if self.count == writes:
                signal.raise_signal(signal.SIGTERM)
                signal.raise_signal(signal.SIGINT)
            return self.file.write(content)

    opened = []

    def loud_open(path, mode="r", **rest):
        file = open(path, mode, **rest)  # noqa: SIM115
        if not str(path).endswith("checkpoint.pt.tmp"):
            return file
        opened.append(path)
        return Interrupted(file)

    arrays = {name: np.arange(5000).reshape(100, 50) for name in ("obs", "actions", "rewards")}
    buffer = (np.array(70), arrays) if ring else None
    before = signal.getsignal(signal.SIGTERM)
    args = Args(runs_dir=str(tmp_path), run_name="run")
    run = runs.Run(args, "some_sofe", np.ones((2, 2), bool), {"x": torch.ones(3000)}, buffer)
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(runs, "open", loud_open, raising=False)
        run.checkpoint(10, write=True)
    assert stop.value.code == 128 + signal.SIGTERM and len(opened) == 1  # the first of the two
    line = capfd.readouterr().err.strip()
    assert line.count("\n") == 0 and "state saved; continue with --resume" in line
    content = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    assert content["state"]["x"].sum() == 3000
    for name, array in arrays.items() if ring else ():
        assert np.array_equal(content["ring"][name].numpy(), array[:70])
    assert signal.getsignal(signal.SIGTERM) == before
    assert not (tmp_path / "run" / "lock").exists()


@pytest.mark.parametrize(
    ("every", "total", "kept"),
    [(10, 40, True), (10, 20, False), (25, 40, False), (0, 40, False), (7, 40, True)],
)
def test_a_longer_run_keeps_the_evaluation_that_was_due(start, every, total, kept):
    """The last row of evals.csv is cut off, but where --eval-every asks for one at that step."""
    run = start(run_name="run", total_timesteps=20, eval_every=every)
    for step in (4, 12, 20):
        run.log_update(step, {"losses/x": 1.0})
        run.eval_due(step, 8)
    run.checkpoint(20, write=True)
    run.finish(20, {"eval/greedy_return": 0.5})
    run = start(resume=str(run.folder), total_timesteps=total, eval_every=every)
    run.log_eval(40, {"eval/greedy_return": 0.75})
    run.close()
    rows = ["step,greedy_return", *["20,0.5"] * kept, "40,0.75"]
    assert (run.folder / "evals.csv").read_text().split() == rows


@pytest.mark.parametrize(
    ("every", "due"), [(0, []), (16, [16, 32, 48]), (20, [24, 40]), (5, [8, 16, 24, 32, 40, 48])]
)
def test_evaluations_are_due_once_in_every_so_many_steps(start, every, due):
    run = start(eval_every=every)
    assert [step for step in range(8, 49, 8) if run.eval_due(step, 8)] == due


def test_every_episode_is_logged_and_the_csv_is_short(start):
    run = start(run_name="run")
    episode = {"r": np.array([1.0, 0, 2]), "l": np.array([7, 0, 9])}
    episode["coverage"] = np.array([0.5, 0, 1 / 3])
    info = {"final_info": {"episode": episode}, "cell": np.array([[0, 0], [1, 1], [2, 2]])}
    run.log_episodes(40, info, np.array([0, 2]), [0.25, 0.125])
    run.close()
    lines = (run.folder / "episodes.csv").read_text().splitlines()
    assert lines == [
        "step,return,length,bonus,coverage",
        "40,1,7,0.25,0.5",
        "40,2,9,0.125,0.333333",
    ]
    assert run.visits[[0, 2], [0, 2]].tolist() == [1, 1] and run.visits[1, 1] == 0


def test_global_coverage_is_of_the_reachable_cells(start):
    reachable = np.array([[True, True, True, True], [False, False, False, False]])
    run = start(reachable=reachable, run_name="run")
    run.log_step(0, np.array([[0, 0], [0, 3], [0, 3]]))
    run.log_update(16, {"losses/entropy": 1.0, "explore/bonus": 0.5})
    run.close()
    lines = (run.folder / "updates.csv").read_text().splitlines()
    assert lines == ["step,entropy,bonus,global_coverage", "16,1,0.5,0.5"]


def test_the_visits_are_recorded_as_training_goes_on(start):
    """Every 10 steps and at the end, each cell that has been visited, also across a checkpoint."""

    def walk(run, steps):
        for step in steps:  # 4 steps each; the episode that ends at step 20 starts anew in 2, 2
            run.log_step(step, np.array([[0, step % 3], [-1, -1]]))
            if step == 20:
                run.log_step(step, np.array([[2, 2]]))

    def rows(run):
        lines = (run.folder / "visits.csv").read_text().splitlines()
        assert lines[0] == "step,row,column,visits"
        return [tuple(map(int, line.split(","))) for line in lines[1:]]

    whole = start(run_name="whole")
    walk(whole, range(0, 29, 4))
    whole.finish(28, {})
    by_step = {step: [row[1:] for row in rows(whole) if row[0] == step] for step in (10, 20, 28)}
    assert by_step[10] == [(0, 0, 1), (0, 1, 1), (0, 2, 1)]
    assert by_step[20] == [(0, 0, 2), (0, 1, 2), (0, 2, 2), (2, 2, 1)]
    assert by_step[28] == [(0, 0, 3), (0, 1, 3), (0, 2, 2), (2, 2, 1)]
    assert len(rows(whole)) == 11

    for cut in (8, 12, 20, 28):
        run = start(run_name=f"cut{cut}")
        walk(run, range(0, cut + 1, 4))
        run.checkpoint(cut, write=True)
        walk(run, range(cut + 4, 29, 4))  # what is lost
        run.close()
        resumed = start(resume=str(run.folder))
        walk(resumed, range(cut + 4, 29, 4))
        resumed.finish(28, {})
        assert rows(resumed) == rows(whole)


def test_signal_handlers_are_given_back(start):
    before = signal.getsignal(signal.SIGTERM)
    run = start()
    assert signal.getsignal(signal.SIGTERM) != before
    run.close()
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_terminal_gets_one_line_that_is_redrawn(start, monkeypatch, capfd):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    run = start()
    for step in (10, 20, 100):
        run.log_update(step, {"losses/entropy": 1.25, "explore/bonus": 0.5})
    run.close()
    error = capfd.readouterr().err
    assert "\r" in error and "100/100" in error and "entropy 1.25" in error


def test_arrays_become_tensors():
    state = {"a": [np.arange(3), np.float64(2.5)], "b": {"c": np.int64(4), "d": "text"}}
    result = runs.to_tensors(state)
    assert torch.equal(result["a"][0], torch.arange(3)) and result["a"][1] == 2.5
    assert type(result["b"]["c"]) is int and result["b"]["d"] == "text"


def test_numbers_and_rules_of_the_arguments():
    args = Args(total_timesteps=0)
    with pytest.raises(ValueError, match="--total-timesteps 0 must be greater than 0 and finite"):
        runs.check_args(args, "seed", "")
    with pytest.raises(ValueError, match="--seed -1 must be at least 0"):
        runs.check_args(Args(seed=-1), "seed", "")
    with pytest.raises(ValueError, match="second"):
        runs.check_args(Args(), "seed", "", ("first", False), ("second", True), ("third", True))
    with pytest.raises(ValueError, match="--learning-rate inf must be"):
        runs.check_args(Args(learning_rate=float("inf")), "seed", "")
    runs.check_args(Args(seed=0), "seed", "learning_rate", ("first", None))


def test_a_folder_belongs_to_one_running_process(start, tmp_path):
    """A second process is refused; a lock that its owner left behind is not heeded."""
    run = start(run_name="run")
    run.checkpoint(10, write=True)
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'tests')!r})\n"
        "from test_runs import Args, runs, torch\n"
        "import numpy as np\n"
        f"args = runs.resume_args(Args(resume={str(run.folder)!r}), 'some_sofe')\n"
        "runs.Run(args, 'some_sofe', np.ones((3, 3), bool), {'x': torch.zeros(2)})\n"
    )
    command = [sys.executable, "-c", code]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 1 and f"process {os.getpid()}" in result.stderr
    run.close()
    assert not (run.folder / "lock").exists()
    (run.folder / "lock").write_text("999999999")
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_an_error_is_not_hidden_by_a_signal_that_comes_while_its_state_is_saved(start, monkeypatch):
    run = start(run_name="run")
    run.checkpoint(10)
    write = runs.Run._write_whole

    def interrupted(self, *args):
        signal.raise_signal(signal.SIGTERM)
        write(self, *args)

    monkeypatch.setattr(runs.Run, "_write_whole", interrupted)
    with pytest.raises(SystemExit) as stop:
        run.log_update(12, {"losses/x": float("nan")})
    assert stop.value.code == 1
    content = torch.load(run.folder / "checkpoint.pt", weights_only=True)
    assert content["global_step"] == 10


def test_a_lock_whose_number_belongs_to_a_later_process_is_not_heeded(tmp_path):
    lock, other = tmp_path / "lock", subprocess.Popen(["sleep", "60"])
    try:
        lock.write_text(str(other.pid))
        assert runs.process_in(tmp_path) == other.pid
        before = time.time() - 100  # the lock is older than the process
        os.utime(lock, (before, before))
        assert runs.process_in(tmp_path) is None
    finally:
        other.kill()
        other.wait()


def test_tensorboard_forgets_what_came_after_the_checkpoint(start):
    run = start(run_name="run")
    for step in (10, 20, 30):
        run.log_update(step, {"losses/x": float(step)})
        if step == 10:
            run.checkpoint(step, write=True)
    run.close()  # as if it had been killed: the state is that of step 10
    time.sleep(1.1)  # TensorBoard reads files in the order of their names, which hold the second
    run = start(resume=str(run.folder))
    for step in (20, 30):
        run.log_update(step, {"losses/x": step + 0.5})
    run.close()
    events = EventAccumulator(str(run.folder))
    events.Reload()
    found = [(event.step, event.value) for event in events.Scalars("losses/x")]
    assert found == [(10, 10), (20, 20.5), (30, 30.5)]
    assert len(list(run.folder.glob("events.*"))) == 2


def test_a_state_that_does_not_fit_is_named(start):
    run = start({"model": torch.nn.Linear(2, 2), "table": torch.zeros(3)}, run_name="run")
    run.checkpoint(10, write=True)
    run.close()
    for kept, word in (
        ({"model": torch.nn.Linear(3, 2), "table": torch.zeros(3)}, "model"),
        ({"model": torch.nn.Linear(2, 2), "table": torch.zeros(1)}, "table"),
        ({"other": torch.zeros(3)}, "other"),
    ):
        with pytest.raises(SystemExit, match=f"does not fit this script, {word}"):
            start(kept, resume=str(run.folder))
    (run.folder / "episodes.csv").write_text("")
    with pytest.raises(SystemExit, match="is shorter than at the checkpoint"):
        start({"model": torch.nn.Linear(2, 2), "table": torch.zeros(3)}, resume=str(run.folder))


def test_weights_that_are_not_finite_never_reach_a_checkpoint(start, capfd):
    model = torch.nn.Linear(2, 2)
    run = start({"model": model}, run_name="run")
    run.checkpoint(10)
    torch.nn.init.constant_(model.bias, float("nan"))
    with pytest.raises(SystemExit):
        run.checkpoint(20)
    assert "weights of the model are not finite at step 20" in capfd.readouterr().err
    content = torch.load(run.folder / "checkpoint.pt", weights_only=True)
    assert content["global_step"] == 10 and content["state"]["model"]["bias"].isfinite().all()


def test_the_last_leg_of_a_resumed_run_is_remembered(start):
    run = start(run_name="run")
    run.checkpoint(10, write=True)
    run.close()
    start(resume=str(run.folder), total_timesteps=5000).close()
    assert runs.resume_args(Args(resume=str(run.folder)), "some_sofe").total_timesteps == 5000


# --- What only the script with an actor uses -----------------------------------------------------


class Source:
    """Counts up, and has the count as its state."""

    def __init__(self):
        self.count = 0

    def next(self):
        self.count += 1
        if self.count == 53:
            raise ZeroDivisionError("53")
        return self.count

    def get_state(self):
        return self.count

    def set_state(self, state):
        self.count = state


def never(error):
    raise AssertionError


@pytest.mark.parametrize("threaded", [False, True])
def test_a_producer_gives_every_result_once_and_stops(threaded):
    source, threads = Source(), set()

    def function():
        threads.add(threading.current_thread())
        return source.next()

    producer = runs.Producer(function, threaded, source)
    assert source.count == 0
    assert [producer.get(never) for _ in range(50)] == list(range(1, 51))
    assert producer.waited > 0 and len(threads) == 1
    assert (threading.main_thread() in threads) != threaded
    producer.close()
    assert not threaded or not threads.pop().is_alive()
    assert source.count <= 52  # one that waits, one in the making


@pytest.mark.parametrize("threaded", [False, True])
def test_the_state_of_a_producer_is_the_one_after_the_last_result_that_was_taken(threaded):
    source = Source()
    producer = runs.Producer(source.next, threaded, source)
    source.count = 5  # as an actor is reset after the producer was made
    assert producer.get_state() == 5
    for count in (6, 7, 8):
        assert producer.get(never) == count
        time.sleep(0.05)
        assert producer.get_state() == count
        assert (source.count > count) == threaded  # the source itself is ahead
    producer.close()
    other = Source()
    producer = runs.Producer(other.next, threaded, other)
    producer.set_state(8)
    assert producer.get_state() == other.count == 8 and producer.get(never) == 9
    producer.close()


@pytest.mark.parametrize("threaded", [False, True])
def test_an_error_of_a_producer_reaches_the_caller_after_the_results_before_it(threaded):
    source, raised = Source(), []
    source.count = 50

    def on_error(error):
        raised.append(error)
        raise SystemExit(1)

    producer = runs.Producer(source.next, threaded, source)
    assert [producer.get(on_error), producer.get(on_error)] == [51, 52]
    with pytest.raises(SystemExit):
        producer.get(on_error)
    assert isinstance(raised[0], ZeroDivisionError) and producer.get_state() == 52
    producer.close()


def test_a_program_that_ends_in_a_producers_thread_reaches_the_caller():
    def function():
        runs.fail("no room")

    ended = []
    producer = runs.Producer(function, True, Source())

    def on_error(error):
        ended.append(str(error))
        raise SystemExit(1)

    with pytest.raises(SystemExit):
        producer.get(on_error)
    assert ended == ["error: no room"] and producer.close()
    producer = runs.Producer(function, False, Source())
    with pytest.raises(SystemExit, match="no room"):
        producer.get(never)


def test_closing_a_producer_tells_whether_its_function_has_returned(monkeypatch):
    join = threading.Thread.join
    monkeypatch.setattr(threading.Thread, "join", lambda self, seconds: join(self, 0.1))
    go_on = threading.Event()
    producer = runs.Producer(lambda: go_on.wait(), True, Source())
    producer._thread.start()
    assert not producer.close()
    go_on.set()
    join(producer._thread, 10)
    assert producer.close()


def test_closing_a_producer_that_nobody_reads_or_that_never_ran_does_not_hang():
    producer = runs.Producer(lambda: 1, True, Source())
    producer.close()
    producer = runs.Producer(lambda: 1, True, Source())
    producer.get(never)
    time.sleep(0.2)
    since = time.monotonic()
    producer.close()
    assert time.monotonic() - since < 5


def test_the_steps_of_a_rollout_are_stacked_with_one_row_more_where_there_is_a_last():
    x = torch.arange(24.0).reshape(4, 2, 3)
    steps = [{"obs": {"a": x[t], "b": x[t, :, 0]}, "phi": x[t] + 1, "r": x[t, 0]} for t in range(3)]
    last = {"obs": {"a": x[3], "b": x[3, :, 0]}, "phi": x[3] + 1, "not in the steps": None}
    rollout = runs.stack_steps(steps, last)
    assert rollout.keys() == {"obs", "phi", "r"} and rollout["obs"].keys() == {"a", "b"}
    assert torch.equal(rollout["obs"]["a"], x) and torch.equal(rollout["obs"]["b"], x[:, :, 0])
    assert torch.equal(rollout["phi"], x + 1) and torch.equal(rollout["r"], x[:3, 0])


def test_only_the_first_episode_of_each_env_counts():
    episodes = runs.FirstEpisodes(3, ("r", "coverage"))
    for step, ended in enumerate(([], [2], [0, 2], [0], [1, 2])):
        assert episodes.playing.any()
        episode = {"r": 10.0 * step + np.arange(3), "coverage": np.full(3, np.nan)}
        info = {"final_info": {"episode": episode}} if ended else {}
        episodes.record(info, np.array(ended, int))
    assert not episodes.playing.any()
    assert episodes.results[0].tolist() == [20, 41, 12] and np.isnan(episodes.results[1]).all()


def test_a_stopwatch_sums_the_laps_and_leaves_out_what_is_before_a_start(monkeypatch):
    times = iter([0.0, 10.0, 11.0, 13.0, 100.0, 104.0])
    monkeypatch.setattr(runs.time, "perf_counter", lambda: next(times))
    clock = runs.Stopwatch()
    clock.start()
    clock.lap("act")
    clock.lap("step")
    clock.start()
    clock.lap("act")
    assert clock.seconds == {"act": 5.0, "step": 2.0}


@pytest.mark.parametrize(("free", "fits"), [(9 * 4 * 110, True), (9 * 4 * 110 - 1, False)])
def test_the_memory_of_training_is_checked_before_it_is_taken(monkeypatch, capsys, free, fits):
    monkeypatch.setattr(runs.psutil, "virtual_memory", lambda: SimpleNamespace(available=free))
    with torch.device("meta"):
        networks = [torch.nn.Linear(9, 10), torch.nn.Linear(10, 1, bias=False)]
    try:
        runs.check_training_memory(networks, torch.device("cpu"))
        message = None
    except SystemExit as end:
        message = str(end.code)
    assert (message is None) == fits and "training of the networks" in capsys.readouterr().out
    assert fits or ("needs" in message and "\n" not in message)


def test_a_share_of_the_time_limits_how_often_the_state_is_copied(start):
    x = torch.zeros(2)
    run = start({"x": x})
    for step in range(20):
        x += 1
        run.checkpoint(step, share=1e-6)
    run._save()
    # The first, in which modules are still loaded, does not hold back the second.
    assert torch.load(run.folder / "checkpoint.pt", weights_only=True)["state"]["x"][0] == 2
    run.checkpoint(20, write=True, share=1e-6)
    content = torch.load(run.folder / "checkpoint.pt", weights_only=True)
    assert content["state"]["x"][0] == 20 and content["global_step"] == 20


def test_a_crash_in_one_line_with_the_rest_in_a_file(start, capfd):
    run = start()
    run.checkpoint(0)
    with pytest.raises(SystemExit) as end:
        try:
            raise ValueError("first\nsecond")
        except ValueError as error:
            run.crash("the actor", error)
    assert end.value.code == 1
    line = capfd.readouterr().err
    assert line.count("\n") == 1 and "the actor: first" in line and "--resume" in line
    assert "ValueError: first\nsecond" in (run.folder / "traceback.txt").read_text()


def test_a_run_without_a_map_has_no_picture_and_more_columns(tmp_path, capsys):
    args = Args(runs_dir=str(tmp_path), augment="none")
    run = runs.Run(args, "some_sofe", None, {"x": torch.zeros(2)}, more=("success",))
    assert "-plain-" in run.folder.name
    episode = {"r": np.ones(2), "l": np.array([3, 4]), "coverage": np.full(2, np.nan)}
    info = {"final_info": {"episode": episode | {"success": np.array([True, False])}}}
    info["cell"] = np.full((2, 2), -1)
    run.log_episodes(8, info, np.array([0, 1]), [0.5, 0.25])
    run.log_update(8, {"losses/loss": 1.0})
    run.log_times(8, {"environment": 0.1})
    run.finish(8, {})
    lines = (run.folder / "episodes.csv").read_text().splitlines()
    assert lines == [
        "step,return,length,bonus,coverage,success",
        "8,1,3,0.5,nan,1",
        "8,1,4,0.25,nan,0",
    ]
    assert (run.folder / "updates.csv").read_text() == "step,loss\n8,1\n"
    assert not (run.folder / "visits.png").exists() and "picture" not in capsys.readouterr().out
