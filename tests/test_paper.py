"""Each file of paper/ in its --smoke size, and what the files share."""

import csv
import json
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rliable import metrics
from run_files import quick  # noqa: F401

import ppo_sofe
from common.godot import EngineError, find_engine

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "paper"))
import experiments  # noqa: E402

SMOKES = [  # file, flags, name of the table, its rows
    ("fig_coverage.py", [], "coverage_ppo_maze1", 2 * 2 * 4),
    ("fig_coverage.py", ["--algorithm", "a2c"], "coverage_a2c_maze1", 2 * 4),
    ("fig_coverage.py", ["--algorithm", "dqn"], "coverage_dqn_maze1", 2 * 4),
    ("table_deepsea.py", [], "table_deepsea_ppo", 2),
    ("table_deepsea.py", ["--algorithm", "a2c"], "table_deepsea_a2c", 2),
    ("table_deepsea.py", ["--algorithm", "dqn"], "table_deepsea_dqn", 2),
    ("table_deepsea.py", ["--algorithm", "ppo_lstm"], "table_deepsea_ppo_lstm", 2),
    ("ablation_encoding.py", [], "ablation_encoding", 4),
    ("fig_godot.py", [], "coverage_sac_godot", 2 * 2 * 4),
    ("fig_e3b.py", [], "e3b_multiroom", 4 * 4),
]


class RunHere:
    """In place of a script's process, which takes longer to start than a smoke run to end."""

    def __init__(self, command, cwd, **kwargs):
        _, script, *flags = command
        sys.argv = [script, *flags]
        runpy.run_path(str(cwd / script), run_name="__main__")
        self.returncode = 0

    def poll(self):
        return self.returncode


@pytest.mark.parametrize(("file", "flags", "table", "num_rows"), SMOKES)
def test_smoke(file, flags, table, num_rows, tmp_path, monkeypatch, capsys):
    """The runs of a file end, and their CSV files make its table and figure."""
    if file == "fig_godot.py":
        try:
            find_engine()
        except EngineError as error:
            pytest.skip(str(error))
    monkeypatch.setenv("SOFE_RUNS", str(tmp_path))
    monkeypatch.delitem(sys.modules, "experiments")  # it reads SOFE_RUNS when it is imported
    monkeypatch.delitem(sys.modules, "table_deepsea", raising=False)
    process = subprocess.Popen  # the engine's and git's stay processes

    def popen(command, **kwargs):
        script = command[0] == sys.executable and command[1].endswith(".py")
        return (RunHere if script else process)(command, **kwargs)

    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setattr(ppo_sofe, "augment", ppo_sofe.augment)  # the ablation replaces it
    monkeypatch.setattr(sys, "argv", [file, "--smoke", *flags])
    handler = signal.getsignal(signal.SIGTERM)
    try:
        runpy.run_path(str(ROOT / "paper" / file), run_name="__main__")
    finally:
        signal.signal(signal.SIGTERM, handler)
    with open(tmp_path / f"smoke-{table}.csv") as lines:
        assert len(list(csv.DictReader(lines))) == num_rows
    if file.startswith("fig"):
        assert (tmp_path / f"smoke-{table}.png").stat().st_size > 10_000


def test_runs_are_processes_and_a_second_start_runs_nothing_again(tmp_path):
    command = [sys.executable, str(ROOT / "paper" / "table_deepsea.py"), "--smoke", "--jobs", "2"]
    environment = {"SOFE_RUNS": str(tmp_path), "PATH": os.environ["PATH"]}
    for attempt in (1, 2):
        result = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )
        assert result.returncode == 0, result.stderr
        assert ("start" in result.stdout) == (attempt == 1)
    with open(tmp_path / "smoke-table_deepsea_ppo.csv") as lines:
        assert len(list(csv.DictReader(lines))) == 2


def test_a_finished_run_is_left_alone_and_a_broken_one_goes_on(tmp_path):
    line = ["ppo_sofe.py", *experiments.SMOKE["ppo"], "--max-steps", "8", "--total-timesteps", "32"]
    experiments.launch({"run": line}, 1, tmp_path)
    assert experiments.command_for("run", line, tmp_path) is None
    longer = [*line[:-1], "64"]
    assert "--resume" in experiments.command_for("run", longer, tmp_path)
    experiments.launch({"run": longer}, 1, tmp_path)
    assert experiments.last_step(tmp_path / "run") == 64
    assert json.loads((tmp_path / "run" / "args.json").read_text())["args"]["max_steps"] == 8
    (tmp_path / "started").mkdir()
    assert "--run-name" in experiments.command_for("started", line, tmp_path)
    assert not (tmp_path / "started").exists()


def test_a_failed_run_is_reported(tmp_path):
    line = ["ppo_sofe.py", "--bonus", "none", "--augment", "--total-timesteps", "32"]
    with pytest.raises(SystemExit, match=r"1 runs failed.*broken\.log"):
        experiments.launch({"broken": line}, 1, tmp_path)
    assert "--augment and --bonus none" in (tmp_path / "broken.log").read_text()


def test_the_interquartile_mean():
    middle, low, high = experiments.iqm_interval(np.arange(8.0)[:, None])
    assert middle[0] == 3.5 and low[0] < 3.5 < high[0]
    scores = np.random.default_rng(0).normal(size=(7, 3))
    expected = [metrics.aggregate_iqm(scores[:, [k]]) for k in range(3)]
    assert np.allclose(experiments.iqm_interval(scores)[0], expected)


def test_bins_hold_the_episodes_that_ended_in_them():
    steps, values = np.array([10, 20, 21, 40]), np.array([1.0, 3.0, 5.0, 7.0])
    means = experiments.bin_means(steps, values, np.array([0, 20, 30, 35, 40]))
    assert means[[0, 1, 3]].tolist() == [2.0, 5.0, 7.0] and np.isnan(means[2])


def test_a_random_policy_in_a_procgen_maze_sometimes_reaches_the_goal():
    file = runpy.run_path(str(ROOT / "paper" / "fig_e3b.py"))
    assert 0.05 < file["random_policy_success"]("procgen-maze", 64) < 0.45
