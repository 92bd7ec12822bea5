"""Each file of paper/ in its --smoke size, and what the files share."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "paper"))
import experiments  # noqa: E402


@pytest.mark.parametrize(
    ("file", "flags", "table", "num_rows"),
    [
        ("fig_coverage.py", [], "coverage_ppo_maze1", 2 * 2 * 4),
        ("fig_coverage.py", ["--algorithm", "a2c"], "coverage_a2c_maze1", 2 * 4),
        ("table_deepsea.py", [], "table_deepsea_ppo", 2),
        ("table_deepsea.py", ["--algorithm", "dqn"], "table_deepsea_dqn", 2),
        ("table_deepsea.py", ["--algorithm", "ppo_lstm"], "table_deepsea_ppo_lstm", 2),
        ("ablation_encoding.py", [], "ablation_encoding", 4),
    ],
)
def test_smoke(file, flags, table, num_rows, tmp_path):
    """Launches its own runs, reads only their CSV, and a second start runs nothing again."""
    command = [sys.executable, str(ROOT / "paper" / file), "--smoke", "--jobs", "2", *flags]
    environment = {"SOFE_RUNS": str(tmp_path), "PATH": "/usr/bin:/bin"}
    for attempt in (1, 2):
        result = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )
        assert result.returncode == 0, result.stderr
        assert ("start" in result.stdout) == (attempt == 1)
    with open(tmp_path / f"smoke-{table}.csv") as lines:
        assert len(list(csv.DictReader(lines))) == num_rows
    if file.startswith("fig"):
        assert (tmp_path / f"smoke-{table}.png").stat().st_size > 10_000


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


def test_bins_hold_the_episodes_that_ended_in_them():
    steps, values = np.array([10, 20, 21, 40]), np.array([1.0, 3.0, 5.0, 7.0])
    means = experiments.bin_means(steps, values, np.array([0, 20, 30, 35, 40]))
    assert means[[0, 1, 3]].tolist() == [2.0, 5.0, 7.0] and np.isnan(means[2])
