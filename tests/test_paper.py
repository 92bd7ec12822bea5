"""Each file of paper/ in its --smoke size, and what the files share."""

import argparse
import csv
import importlib
import json
import os
import runpy
import shlex
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rliable import metrics
from run_files import quick  # noqa: F401

import ppo_sofe
from common.godot import EngineError, find_engine
from common.mazes import MOVES, MazeVecEnv, shortest_paths

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "paper"))
import experiments  # noqa: E402
import fig_coverage  # noqa: E402
import fig_goal_reaching  # noqa: E402
import fig_heatmaps  # noqa: E402
import fig_sparse  # noqa: E402
import table_deepsea  # noqa: E402

SMOKES = [  # file, flags, name of the table, its rows (None: as many as cells were visited)
    ("fig_coverage.py", [], "coverage_ppo_maze1", 2 * 2 * 4),
    ("fig_coverage.py", ["--algorithm", "a2c"], "coverage_a2c_maze1", 2 * 4),
    ("fig_coverage.py", ["--algorithm", "dqn"], "coverage_dqn_maze1", 2 * 4),
    ("fig_coverage.py", ["--algorithm", "ppo_lstm"], "coverage_ppo_lstm_maze1", 2 * 4),
    (
        "fig_coverage.py",
        ["--algorithm", "dqn", "--maze", "3", "--counts", "global", "--bonuses", "both"],
        "coverage_dqn_maze3_global_both",
        2 * 2 * 4,
    ),
    ("fig_heatmaps.py", [], "heatmaps_a2c", None),
    ("fig_smax.py", ["--algorithm", "a2c"], "smax_a2c", 2 * 4),
    ("fig_sparse.py", [], "sparse_ppo", 3 * 4),
    (
        "fig_sparse.py",
        ["--algorithm", "ppo_lstm", "--counts", "global", "--view", "5"],
        "sparse_ppo_lstm_global_view5",
        3 * 4,
    ),
    ("fig_goal_reaching.py", [], "goal_reaching", 448),
    ("table_deepsea.py", [], "table_deepsea_ppo", 2),
    ("table_deepsea.py", ["--algorithm", "a2c"], "table_deepsea_a2c", 2),
    ("table_deepsea.py", ["--algorithm", "dqn"], "table_deepsea_dqn", 2),
    ("table_deepsea.py", ["--algorithm", "ppo_lstm"], "table_deepsea_ppo_lstm", 2),
    ("ablation_encoding.py", [], "ablation_encoding_maze1", 4),
    ("ablation_encoding.py", ["--task", "deepsea14"], "ablation_encoding_deepsea14", 4),
    ("fig_godot.py", [], "coverage_sac_godot", 2 * 2 * 4),
    ("fig_e3b.py", [], "e3b_multiroom", 4 * 4),
    ("fig_e3b.py", ["--task", "procgen"], "e3b_procgen", 3 * 4),
]


class RunHere:
    """In place of a script's process, which takes longer to start than a smoke run to end."""

    lines: dict[str, list[str]] = {}  # name of a run -> its flags
    commands: dict[str, str] = {}  # the same, with the script, as a record has it

    def __init__(self, command, cwd, **kwargs):
        _, script, *flags = command
        if "--run-name" in flags:
            name, at = flags[flags.index("--run-name") + 1], flags.index("--runs-dir")
            self.lines[name] = flags
            self.commands[name] = " ".join(["python", script, *flags[:at], *flags[at + 4 :]])
        sys.argv = [script, *flags]
        runpy.run_path(str(cwd / script), run_name="__main__")
        self.returncode = 0

    def poll(self):
        return self.returncode


@pytest.fixture
def scripts_here(monkeypatch):
    """The scripts run in this process; the engine and git stay processes."""
    process = subprocess.Popen

    def popen(command, **kwargs):
        script = command[0] == sys.executable and command[1].endswith(".py")
        return (RunHere if script else process)(command, **kwargs)

    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setattr(sys, "argv", sys.argv)
    handler = signal.getsignal(signal.SIGTERM)
    yield RunHere
    signal.signal(signal.SIGTERM, handler)
    RunHere.lines.clear()
    RunHere.commands.clear()


def differ_in_augment_alone(lines: dict[str, list[str]]) -> bool:
    """Whether each run with SOFE has a twin without that differs in --augment and its name."""
    for name in (names := [name for name in lines if "-sofe-" in name]):
        twin = name.replace("-sofe-", "-plain-")
        words = {name: twin, "--augment": "--no-augment"}
        if [words.get(word, word) for word in lines[name]] != lines.get(twin):
            return False
    return len(names) > 0


@pytest.mark.parametrize(("file", "flags", "table", "num_rows"), SMOKES)
def test_smoke(file, flags, table, num_rows, tmp_path, monkeypatch, capsys, scripts_here):
    """The runs of a file end, and their CSV files make its table and figure."""
    if file == "fig_godot.py":
        try:
            find_engine()
        except EngineError as error:
            pytest.skip(str(error))
    monkeypatch.setenv("SOFE_RUNS", str(tmp_path))
    monkeypatch.delitem(sys.modules, "experiments")  # it reads SOFE_RUNS when it is imported
    for module in ("table_deepsea", "fig_coverage"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr(ppo_sofe, "augment", ppo_sofe.augment)  # the ablation replaces it
    monkeypatch.setattr(sys, "argv", [file, "--smoke", *flags])
    runpy.run_path(str(ROOT / "paper" / file), run_name="__main__")
    with open(tmp_path / f"smoke-{table}.csv") as lines:
        count = len(list(csv.DictReader(lines)))
    assert count == num_rows if num_rows else count > 2 * 8
    with open(tmp_path / "records" / f"smoke-{table}.csv") as lines:
        assert {row["run"]: row["command"] for row in csv.DictReader(lines)} == RunHere.commands
    if file in ("fig_coverage.py", "fig_smax.py", "fig_e3b.py", "fig_godot.py"):
        with open(tmp_path / f"smoke-{table}_eval.csv") as lines:
            assert len(list(csv.DictReader(lines))) == num_rows // 4  # the curves have four bins
    if file.startswith("fig"):
        assert (tmp_path / f"smoke-{table}.png").stat().st_size > 10_000
    if file not in ("ablation_encoding.py", "fig_goal_reaching.py", "fig_e3b.py"):
        assert differ_in_augment_alone(scripts_here.lines)


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


def test_a_finished_run_is_left_alone_and_a_broken_one_goes_on(tmp_path, scripts_here):
    line = ["ppo_sofe.py", *experiments.SMOKE["ppo"], "--max-steps", "8", "--total-timesteps", "32"]
    experiments.launch({"run": line}, 1, tmp_path)
    assert experiments.command_for("run", line, tmp_path) is None
    longer = [*line[:-1], "64"]
    assert "--resume" in experiments.command_for("run", longer, tmp_path)
    experiments.launch({"run": longer}, 1, tmp_path)
    assert experiments.last_step(tmp_path / "run", "updates.csv") == 64
    with pytest.raises(SystemExit, match="was made for 64 steps, not 32"):
        experiments.command_for("run", line, tmp_path)
    assert json.loads((tmp_path / "run" / "args.json").read_text())["args"]["max_steps"] == 8
    (tmp_path / "started").mkdir()
    assert "--run-name" in experiments.command_for("started", line, tmp_path)
    assert not (tmp_path / "started").exists()


def test_a_run_without_a_map_is_finished_after_its_last_evaluation(tmp_path):
    line = ["impala_e3b_sofe.py", "--total-timesteps", "100"]
    (tmp_path / "run").mkdir()
    args = '{"script": "impala_e3b_sofe", "args": {"total_timesteps": 100}}'
    for file, text in (("args.json", args), ("updates.csv", "step\n50\n100\n")):
        (tmp_path / "run" / file).write_text(text)
    (tmp_path / "run" / "checkpoint.pt").touch()
    (tmp_path / "run" / "evals.csv").write_text("step,greedy_return\n50,1\n")
    assert "--resume" in experiments.command_for("run", line, tmp_path)
    (tmp_path / "run" / "evals.csv").write_text("step,greedy_return\n50,1\n100,1\n")
    assert experiments.command_for("run", line, tmp_path) is None


def test_a_run_goes_on_with_the_words_before_its_flags(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoint.pt").touch()
    record = {"script": "ppo_sofe", "args": {"total_timesteps": 32, "num_envs": 8}}
    (tmp_path / "run" / "args.json").write_text(json.dumps(record))
    line = ["paper/ablation_encoding.py", "worker", "log", "--num-envs", "8"]
    line += ["--total-timesteps", "32"]
    command = experiments.command_for("run", line, tmp_path)
    assert command[1:5] == [*line[:3], "--resume"] and command[-1] == "32"


def test_a_stopped_evaluation_of_a_finished_run_is_made_again(tmp_path, scripts_here):
    """Resuming cuts evals.csv back to the checkpoint, so the evaluation at the end is missing."""
    line = ["ppo_sofe.py", *experiments.SMOKE["ppo"], "--max-steps", "8", "--total-timesteps", "32"]
    line += ["--eval-every", "16"]
    experiments.launch({"run": line}, 1, tmp_path)
    evals = tmp_path / "run" / "evals.csv"
    evals.write_text("".join(evals.read_text().splitlines(keepends=True)[:-1]))
    assert experiments.last_step(tmp_path / "run", "evals.csv") == 16
    experiments.launch({"run": line}, 1, tmp_path)
    assert experiments.last_step(tmp_path / "run", "evals.csv") == 32


@pytest.mark.parametrize(
    ("saved", "flags", "message"),
    [
        ({"crop_only": False}, ["--crop-only"], "crop_only=False, not True"),
        ({"image_pool": 4}, [], None),  # a flag that is no more
        ({"beta": 0.5}, [], "beta=0.5, not 1.0"),  # one that the line does not have
        ({"bonus": "rnd"}, ["--bonus", "e3b"], "bonus=rnd, not e3b"),
        ({"seed": 3}, ["--seed", "3"], None),
        ({}, ["--crop-only"], "crop_only=False, not True"),  # a run of before this flag
        ({"eval_every": 10}, [], "eval_every=10, not 0"),  # when DeepSea was solved
        ({"eval_episodes": 10}, [], None),  # more of them are asked for later
        ({}, ["--total-timesteps", "99"], "made for 100 steps, not 99"),
        ({"num_workers": 7}, [], None),  # changes no result
    ],
)
def test_a_run_with_other_arguments_is_not_taken(tmp_path, saved, flags, message):
    line = ["impala_e3b_sofe.py", *flags]
    line += [] if "--total-timesteps" in flags else ["--total-timesteps", "200"]
    saved = {"script": "impala_e3b_sofe", "args": {"total_timesteps": 100} | saved}
    (tmp_path / "args.json").write_text(json.dumps(saved))
    if message is None:
        return experiments.check_args(tmp_path, line)
    with pytest.raises(SystemExit, match=message):
        experiments.check_args(tmp_path, line)


@pytest.mark.parametrize(
    "line", [["dqn_sofe.py", "--learning-starts", "8"], ["a2c_sofe.py", "--anneal-beta"]]
)
def test_a_run_whose_schedule_ends_with_it_is_not_made_longer(tmp_path, line):
    """The arms of a figure would have had different schedules."""
    args = {"total_timesteps": 100, "anneal_beta": "--anneal-beta" in line}
    args |= {"learning_starts": 8} if "--learning-starts" in line else {}
    saved = {"script": Path(line[0]).stem, "args": args}
    (tmp_path / "args.json").write_text(json.dumps(saved))
    experiments.check_args(tmp_path, [*line, "--total-timesteps", "100"])
    with pytest.raises(SystemExit, match="made for 100 steps, not 200"):
        experiments.check_args(tmp_path, [*line, "--total-timesteps", "200"])


@pytest.mark.parametrize("flags", [["--jobs", "0"], ["--seeds", "0"]])
def test_none_of_nothing_is_refused(monkeypatch, capsys, flags):
    monkeypatch.setattr(sys, "argv", ["fig.py", *flags])
    with pytest.raises(SystemExit):
        experiments.parse_size("a figure")
    assert "--jobs and --seeds must be at least 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("bins", "expected"), [(10, [9]), (20, [18, 19]), (15, [13, 14]), (4, [3])]
)
def test_the_last_tenth(bins, expected):
    edges = np.linspace(0, 500_000, bins + 1)[1:]
    curves = np.stack([np.arange(bins), np.arange(bins) * 2.0])
    assert experiments.last_tenth(edges, curves).tolist() == [
        np.mean(expected),
        2 * np.mean(expected),
    ]
    curves[0, -1] = np.nan  # no episode ended there
    if len(expected) == 2:
        assert experiments.last_tenth(edges, curves)[0] == expected[0]


def test_a_failed_run_is_reported(tmp_path):
    line = ["ppo_sofe.py", "--bonus", "none", "--augment", "--total-timesteps", "32"]
    with pytest.raises(SystemExit, match=r"1 runs failed.*broken\.log"):
        experiments.launch({"broken": line}, 1, tmp_path)
    assert "--augment and --bonus none" in (tmp_path / "broken.log").read_text()


@pytest.fixture
def files_in(tmp_path, monkeypatch):
    """Folders of its own for what the files of paper/ read and write."""
    for folder in ("RUNS", "RESULTS", "FIGURES"):
        monkeypatch.setattr(experiments, folder, tmp_path / folder)
        (tmp_path / folder).mkdir()
    return tmp_path


def test_curves_are_those_of_their_file(files_in, monkeypatch):
    """A value is written with the number of episodes that it is the mean of."""
    for name, rows in (("a", ["4,0.25", "10,0.75"]), ("b", ["11,0.5", "20,1", "20,0"])):
        (files_in / "RUNS" / name).mkdir()
        (files_in / "RUNS" / name / "episodes.csv").write_text("\n".join(["step,coverage", *rows]))
        (files_in / "RUNS" / name / "evals.csv").write_text(f"step,reach\n10,9\n20,0.{len(rows)}\n")
    monkeypatch.setattr(experiments, "read", partial(experiments.read, runs=files_in / "RUNS"))
    monkeypatch.setattr(experiments, "launch", lambda jobs, parallel: launched.append(jobs))
    monkeypatch.setattr(experiments, "write_records", lambda name, jobs, folder: None)
    args, runs, launched = argparse.Namespace(size="small", seeds=None, jobs=2, draw=False), {}, []
    runs["sqrt", "sofe"] = ["a", "b"]
    made = experiments.curves_of(args, "x", {"a": []}, runs, 20, 2, evals=("reach",))
    rows = ["1,10,0.50000,2", "1,20,nan,0", "2,10,nan,0", "2,20,0.50000,3"]
    header = "bonus,arm,seed,step,coverage,rows"
    text = (files_in / "RESULTS" / "x.csv").read_text().splitlines()
    assert text == [header, *(f"sqrt,sofe,{row}" for row in rows)]
    text = (files_in / "RESULTS" / "x_eval.csv").read_text()
    assert text == "bonus,arm,seed,reach\nsqrt,sofe,1,0.2000\nsqrt,sofe,2,0.3000\n"

    args.draw = True
    drawn = experiments.curves_of(args, "x", {"a": []}, runs, 20, 2, evals=("reach",))
    assert launched == [{"a": []}]
    for edges, curves, picture in (made, drawn):
        assert edges.tolist() == [10, 20] and picture == files_in / "FIGURES" / "x.png"
        values = curves["sqrt", "sofe"]
        np.testing.assert_equal(values, [[0.5, np.nan], [np.nan, 0.5]])
    args.draw = False  # rows are counted, whatever is drawn of them
    how = {"file": "episodes.csv", "summary": lambda values: values[-1]}
    _, curves, _ = experiments.curves_of(args, "x", {}, runs, 20, 2, **how)
    np.testing.assert_equal(curves["sqrt", "sofe"], [[0.75, np.nan], [np.nan, 0]])
    text = (files_in / "RESULTS" / "x.csv").read_text().splitlines()
    assert [row.split(",")[-1] for row in text[1:]] == ["2", "0", "0", "3"]
    args.draw = True
    args.seeds = 2  # these go to paper/runs/
    with pytest.raises(SystemExit, match=r"there is no .*RUNS/x\.csv to draw"):
        experiments.curves_of(args, "x", {"a": []}, runs, 20, 2)


@pytest.mark.parametrize(("seeds", "lines", "bands"), [(3, 4, 0), (4, 1, 1)])
def test_few_seeds_are_drawn_one_by_one(tmp_path, monkeypatch, seeds, lines, bands):
    """And the caption says which it is."""

    def look(figure, path, dpi):
        (ax,) = figure.axes
        found["lines"], found["bands"] = ax.lines, ax.collections
        found["caption"] = " ".join(figure.get_supxlabel().split())

    found: dict = {}
    monkeypatch.setattr(Figure, "savefig", look)
    curves = {("sqrt", "sofe"): np.arange(2.0 * seeds).reshape(seeds, 2)}
    experiments.draw_curves(tmp_path / "x.png", np.array([1, 2]), curves, {}, "the caption")
    assert (len(found["lines"]), len(found["bands"])) == (lines, bands)
    middle = np.arange(2.0 * seeds).reshape(seeds, 2).mean(0)  # the interquartile mean as well
    np.testing.assert_allclose(found["lines"][0].get_ydata(), middle)
    words = "thin: each of them" if seeds == 3 else "95% bootstrap interval"
    assert words in found["caption"] and "the caption" in found["caption"]


def test_the_records_of_runs(files_in):
    """Where a run is made anew, its record is; others stay where they are asked to."""

    def write_record(name: str, commit: str) -> None:
        record = {"started": "now", "git_commit": commit, "versions": {"torch": "2"}}
        record |= {"device": "cpu (x86_64)"}
        (files_in / "RUNS" / name / "args.json").write_text(json.dumps(record))

    a, b = ({name: ["ppo_sofe.py", "--seed", "3", "--beta", "1"]} for name in ("a", "b"))
    for name, commit in (("a", "1f"), ("b", "2f-dirty")):
        (files_in / "RUNS" / name).mkdir()
        write_record(name, commit)
    path = files_in / "RESULTS" / "records" / "x.csv"
    row = "{},now,{},2,cpu (x86_64),python ppo_sofe.py --seed 3 --beta 1"
    header = "run,started,git_commit,torch,device,command"
    experiments.write_records("x", b, files_in / "RESULTS")
    assert path.read_text().splitlines() == [header, row.format("b", "2f-dirty")]
    experiments.write_records("x", a, files_in / "RESULTS", keep=True)
    assert path.read_text().splitlines()[1:] == [row.format("a", "1f"), row.format("b", "2f-dirty")]
    write_record("b", "3f")
    experiments.write_records("x", b, files_in / "RESULTS", keep=True)
    assert path.read_text().splitlines()[1:] == [row.format("a", "1f"), row.format("b", "3f")]
    experiments.write_records("x", a, files_in / "RESULTS")
    assert path.read_text().splitlines() == [header, row.format("a", "1f")]


def test_a_figure_is_drawn_anew_from_its_file(files_in, monkeypatch):
    """The CSV files of a clone are enough."""
    table = ROOT / "paper" / "results" / "sparse_ppo.csv"
    (files_in / "RESULTS" / "sparse_ppo.csv").write_text(table.read_text())
    monkeypatch.setattr(fig_sparse, "random_walk_success", lambda limit: 0.0)
    for folder in ("RUNS", "RESULTS"):
        monkeypatch.setattr(fig_sparse, folder, files_in / folder)
    monkeypatch.setattr(sys, "argv", ["fig_sparse.py", "--draw"])
    fig_sparse.main()
    for picture in ("sparse_ppo.png", "sparse_bars.png"):
        assert (files_in / "FIGURES" / picture).stat().st_size > 10_000
    assert not list((files_in / "RUNS").iterdir())


def test_the_interquartile_mean():
    middle, low, high = experiments.iqm_interval(np.arange(8.0)[:, None])
    assert middle[0] == 3.5 and low[0] < 3.5 < high[0]
    scores = np.random.default_rng(0).normal(size=(7, 3))
    expected = [metrics.aggregate_iqm(scores[:, [k]]) for k in range(3)]
    assert np.allclose(experiments.iqm_interval(scores)[0], expected)


def test_bins_hold_the_episodes_that_ended_in_them():
    steps, values = np.array([10, 20, 21, 40]), np.array([1.0, 3.0, 5.0, 7.0])
    edges = np.array([0, 20, 30, 35, 40])
    means = experiments.in_bins(steps, values, edges, np.mean)
    assert means[[0, 1, 3]].tolist() == [2.0, 5.0, 7.0] and np.isnan(means[2])
    last = experiments.in_bins(steps, values, edges, lambda inside: inside[-1])
    assert last[[0, 1, 3]].tolist() == [3.0, 5.0, 7.0] and np.isnan(last[2])


@pytest.mark.parametrize("task", ["multiroom", "procgen"])
def test_the_papers_size_has_all_arms_of_its_figure(task):
    file = runpy.run_path(str(ROOT / "paper" / "fig_e3b.py"))
    assert {*file["settings"](task, "paper")[-1]} == {
        "none",
        "icm",
        "rnd",
        "e3b",
        "diagonal",
        "full",
    }
    assert "icm" not in file["settings"](task, "small")[-1]


def test_a_random_policy_in_a_procgen_maze_sometimes_reaches_the_goal():
    file = runpy.run_path(str(ROOT / "paper" / "fig_e3b.py"))
    assert 0.05 < file["random_policy_success"]("procgen-maze", 64) < 0.45


def test_runs_of_maze_1_with_episodic_counts_keep_their_names_and_others_have_their_own():
    names = fig_coverage.names("ppo", "1", "episodic", ("sqrt", "salesman"), 3, "small")
    assert names["sqrt", "sofe"][0] == "coverage-ppo-Maze1-v0-sqrt-sofe-seed1"
    assert names["salesman", "plain"][2] == "coverage-ppo-Maze1-v0-salesman-plain-seed3"
    seen = set()
    for algorithm in fig_coverage.CHOICES["algorithm"]:
        for maze in fig_coverage.CHOICES["maze"]:
            for counts in fig_coverage.CHOICES["counts"]:
                for size in fig_coverage.SIZES:
                    runs = fig_coverage.names(algorithm, maze, counts, ("sqrt",), 2, size)
                    jobs = fig_coverage.jobs(algorithm, maze, counts, size, runs)
                    assert len(jobs) == 4 and not seen & jobs.keys()
                    seen |= jobs.keys()


def test_jobs_begin_with_the_first_seed_of_every_arm():
    runs = {("sqrt", arm): [f"{arm}{seed}" for seed in (1, 2)] for arm in ("sofe", "plain")}
    jobs = experiments.jobs_of(runs, lambda bonus, arm: ["ppo_sofe.py", bonus, arm])
    assert list(jobs) == ["sofe1", "plain1", "sofe2", "plain2"]
    assert jobs["plain2"] == ["ppo_sofe.py", "sqrt", "plain", "--seed", "2"]


def test_flags_are_replaced_and_added_and_the_line_stays_as_it_was():
    line = ["--beta", "0.1", "--channels", "16"]
    changed = experiments.replace_flags(line, beta="0.01", ent_coef="0.001")
    assert changed == ["--channels", "16", "--beta", "0.01", "--ent-coef", "0.001"]
    assert line == ["--beta", "0.1", "--channels", "16"]


@pytest.mark.parametrize(
    ("algorithm", "beta", "goal", "entropy"),
    [("ppo", "0.001", "1", "0.001"), ("a2c", "0.1", "100", "0.01")],
)
def test_the_arms_of_the_sparse_task_differ_in_the_bonus_and_augment_alone(
    algorithm, beta, goal, entropy
):
    runs = fig_sparse.names(algorithm, "global", "5", 1, "small")
    lines = fig_sparse.jobs(algorithm, "5", "small", runs)
    words = {arm: lines[runs["global", arm][0]] for arm in fig_sparse.GOAL_ARMS}
    for line in words.values():
        weights = {"--beta": beta, "--ext-coef": goal, "--ent-coef": entropy, "--view": "5"}
        for flag, value in weights.items():
            assert line.count(flag) == 1 and line[line.index(flag) + 1] == value
    assert set(words["sofe"]) ^ set(words["plain"]) == {"--augment", "--no-augment"}
    assert set(words["plain"]) ^ set(words["none"]) == {"sqrt", "none", "--counts", "global"}
    episodic = fig_sparse.names(algorithm, "episodic", "5", 1, "small")
    assert episodic["episodic", "none"] == runs["global", "none"]  # the same run
    assert episodic["episodic", "sofe"] != runs["global", "sofe"]


def test_deepsea_is_solved_by_the_greedy_policy(tmp_path):
    (tmp_path / "run").mkdir()
    rows = ["step,greedy_return,sampled_return", "100,0.2,0.99", "200,0.95,0.3", "300,0.99,0.5"]
    (tmp_path / "run" / "evals.csv").write_text("\n".join([*rows, "400,0.1,0.97"]))
    assert table_deepsea.result("run", 10, tmp_path) == (0.1, 0.97, 20)
    (tmp_path / "run" / "evals.csv").write_text("\n".join(rows[:2]))
    assert table_deepsea.result("run", 10, tmp_path) == (0.2, 0.99, None)


@pytest.mark.parametrize("seeds", [3, 4])
def test_the_bars_are_of_the_last_tenth_and_a_missing_file_is_an_empty_place(
    seeds, tmp_path, monkeypatch
):
    rows = [
        f"global,{arm},{seed},{step},{seed * level if step > 90 else 0.9}"
        for arm, level in (("sofe", 0.2), ("plain", 0.1), ("none", 0.0))
        for seed in range(1, seeds + 1)
        for step in (25, 50, 90, 95, 100)
    ]
    rows[-1] = f"global,none,{seeds},100,nan"  # no episode ended there
    name = fig_sparse.file_name("small", "a2c", "global", "5")
    assert name == "sparse_a2c_global_view5"
    path = tmp_path / f"{name}.csv"
    path.write_text("\n".join(["counts,arm,seed,step,return", *rows]))
    steps, returns = fig_sparse.last_returns(path)
    assert steps == 100
    assert {arm: values.tolist() for arm, values in returns.items()} == {
        "sofe": pytest.approx([0.2, 0.4, 0.6, 0.8][:seeds]),
        "plain": pytest.approx([0.1, 0.2, 0.3, 0.4][:seeds]),
        "none": [0] * seeds,
    }
    words = []
    text = Axes.text
    monkeypatch.setattr(Axes, "text", lambda ax, *at, **how: words.append(at[2]) or text(ax, *at))
    save, figures = Figure.savefig, []
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *a, **how: figures.append(self) or save(self, *a, **how)
    )
    bars = tmp_path / "bars.png"
    fig_sparse.draw_bars("small", "5", tmp_path, bars, 100, seeds, "a caption")
    middles = ["0.00", "0.20", "0.40"] if seeds == 3 else ["0.00", "0.25", "0.50"]
    assert sorted(words) == [*middles, *7 * ["not run"]]
    ax, (caption, _) = figures[0].axes[1], figures[0].get_supxlabel().split("a caption")
    kinds = [type(each).__name__ for each in ax.containers]
    dots = [len(each.get_offsets()) for each in ax.collections if hasattr(each, "get_sizes")]
    if seeds == 3:
        assert dots == [3, 3, 3] and "ErrorbarContainer" not in kinds and "dots" in caption
    else:
        assert not dots and kinds.count("ErrorbarContainer") == 3 and "interval" in caption
    for other in ((200, seeds), (100, seeds + 1)):
        words.clear()  # what is there is of other runs
        fig_sparse.draw_bars("small", "5", tmp_path, bars, *other, "a caption")
        assert words == 8 * ["not run"]
    assert (tmp_path / "bars.png").stat().st_size > 10_000


def test_the_table_of_one_size_keeps_the_rows_of_the_others(tmp_path, monkeypatch, capsys):
    """A run of another size, made with other flags, does not enter it either."""
    table = {"smoke": dict.fromkeys(table_deepsea.ALGORITHMS, ((10, 14), 1, 64))}
    monkeypatch.setattr(table_deepsea, "SIZES", table)
    monkeypatch.setattr(table_deepsea, "RUNS", tmp_path)
    monkeypatch.setattr(table_deepsea, "launch", lambda jobs, parallel: launched.extend(jobs))
    monkeypatch.setattr(table_deepsea, "evaluate", lambda names, *_: evaluated.extend(names))
    monkeypatch.setattr(table_deepsea, "write_records", lambda *_, keep: kept.append(keep))
    results = {"smoke-deepsea14-ppo-sofe-seed1": (0.99, 0.5, 20)}
    monkeypatch.setattr(
        table_deepsea, "result", lambda name, size: results.get(name, (0.1, 0.2, None))
    )
    path, launched, evaluated, kept = tmp_path / "smoke-table_deepsea_ppo.csv", [], [], []
    header = "algorithm,arm,size,seed,greedy_return,sampled_return,episodes_to_0.95"
    old = ["ppo,sofe,10,1,0.7000,0.6000,1024", "ppo,plain,14,9,0,0,7", "ppo,sofe,30,1,0.5,0.5,"]
    path.write_text("\n".join([header, *old, ""]))
    records = {}
    for size in (10, 30):
        line = ["python", "ppo_sofe.py", "--seed", "1", "--augment"]
        line += table_deepsea.flags("smoke", size, 64)
        records[size] = f"smoke-deepsea{size}-ppo-sofe-seed1,{' '.join(line)}"
    record = tmp_path / "records" / path.name
    record.parent.mkdir()
    monkeypatch.setattr(sys, "argv", ["table_deepsea.py", "--smoke", "--only", "14"])
    other = records[10].replace("--beta 0.3", "--beta 1")
    for lines, wrong in (([records[10]], 30), ([other, records[30]], 10)):
        record.write_text("\n".join(["run,command", *lines]))
        with pytest.raises(SystemExit, match=f"size {wrong} is of another setting"):
            table_deepsea.main()
        assert not launched and path.read_text().splitlines() == [header, *old]
    # A flag that is left at its default is no other setting.
    same = records[10].replace("--beta 0.3", "--gamma 0.99 --beta 0.3")
    record.write_text("\n".join(["run,command", same, records[30]]))
    table_deepsea.main()
    chosen = ["smoke-deepsea14-ppo-sofe-seed1", "smoke-deepsea14-ppo-plain-seed1"]
    assert launched == evaluated == chosen and kept == [True]
    new = ["ppo,sofe,14,1,0.9900,0.5000,20", "ppo,plain,14,1,0.1000,0.2000,"]
    assert path.read_text().splitlines() == [header, old[0], *new, old[2]]
    assert "| 10 | sofe | 0.70 ± 0.00 | 0.60 ± 0.00 | 0 of 1 | 1,024 |" in capsys.readouterr().out

    monkeypatch.setattr(sys, "argv", ["table_deepsea.py", "--smoke", "--only", "20"])
    with pytest.raises(SystemExit, match=r"ppo has the sizes \(10, 14\) only"):
        table_deepsea.main()


@pytest.mark.parametrize("algorithm", ["ppo", "a2c", "dqn"])
def test_the_tables_of_deepsea_are_of_the_present_setting(algorithm):
    """By their records; the runs of PPO with LSTM were not kept."""

    def command_of(size, arm, seed):
        line = [f"{algorithm}_sofe.py", "--seed", str(seed), table_deepsea.ARMS[arm]]
        budget = table_deepsea.SIZES["small"][algorithm][2]
        line += table_deepsea.flags("small", size, budget, algorithm)
        return f"deepsea{size}-{algorithm}-{arm}-seed{seed}", line

    path = ROOT / "paper" / "results" / f"table_deepsea_{algorithm}.csv"
    assert len(table_deepsea.other_rows(path, "none", command_of)) >= 50


@pytest.mark.parametrize("algorithm", table_deepsea.ALGORITHMS)
def test_the_readmes_commands_for_deepsea_are_those_of_the_table(algorithm):
    text = (ROOT / "README.md").read_text().replace("\\\n", " ")
    (line,) = [
        shlex.split(line)[2:]
        for line in text.splitlines()
        if line.startswith(f"    python {algorithm}_sofe.py --env-id DeepSea-v0")
    ]
    script = importlib.import_module(f"{algorithm}_sofe")
    written = tyro.cli(script.Args, args=line)
    size, episodes = written.deepsea_size, written.total_timesteps // written.deepsea_size
    budget = table_deepsea.SIZES["small"][algorithm][2]
    assert episodes == budget
    flags = table_deepsea.flags("small", size, episodes, algorithm)
    made = tyro.cli(script.Args, args=[*flags, "--augment"])
    made.eval_every, made.eval_episodes = written.eval_every, written.eval_episodes
    assert made == written


class Stop(Exception):
    """In place of the launch of runs."""


CHOSEN = [  # each file, with each algorithm and task
    *[
        ("fig_coverage.py", algorithm, "--maze 3 --counts global")
        for algorithm in fig_sparse.LABELS
    ],
    *[("fig_sparse.py", algorithm, "--counts global --view 5") for algorithm in fig_sparse.LABELS],
    *[("fig_smax.py", algorithm, "") for algorithm in fig_sparse.LABELS],
    *[("table_deepsea.py", algorithm, "") for algorithm in fig_sparse.LABELS],
    *[("fig_e3b.py", None, f"--task {task}") for task in ("multiroom", "room", "procgen")],
    *[("ablation_encoding.py", None, f"--task {task}") for task in ("maze1", "deepsea14")],
    *[(file, None, "") for file in ("fig_heatmaps.py", "fig_goal_reaching.py", "fig_godot.py")],
]


def test_all_files_are_among_the_chosen():
    files = {path.name for path in (ROOT / "paper").glob("*.py")} - {"experiments.py"}
    assert files == {file for file, *_ in CHOSEN}


@pytest.mark.parametrize("size", ["small", "paper"])
@pytest.mark.parametrize(("file", "algorithm", "flags"), CHOSEN)
def test_the_scripts_take_the_command_lines(file, algorithm, flags, size, monkeypatch):
    """Those of --small and --paper, which no other test reads."""

    def launch(jobs, parallel):
        launched.update(jobs)
        raise Stop

    launched = {}
    monkeypatch.setattr(experiments, "launch", launch)
    for module in ("table_deepsea", "fig_coverage"):  # they import `launch` anew
        monkeypatch.delitem(sys.modules, module, raising=False)
    flags = [*flags.split(), *(["--algorithm", algorithm] if algorithm else [])]
    monkeypatch.setattr(sys, "argv", [file, f"--{size}", *flags])
    with pytest.raises(Stop):
        runpy.run_path(str(ROOT / "paper" / file), run_name="__main__")
    first = {name: line for name, line in launched.items() if name.endswith("-seed1")}
    assert first
    arms = {}
    for name, line in first.items():
        script = "ppo_sofe" if line[1] == "worker" else Path(line[0]).stem
        words = line[experiments.flags_at(line) :]
        arms[name] = tyro.cli(importlib.import_module(script).Args, args=words)
    if file == "fig_e3b.py":
        for args in arms.values():
            args.bonus, args.augment = "none", "none"
        assert all(args == next(iter(arms.values())) for args in arms.values())
    elif file == "ablation_encoding.py":
        assert all(args == next(iter(arms.values())) for args in arms.values())
    elif file != "fig_goal_reaching.py":  # it has one arm
        assert differ_in_augment_alone(launched)


def test_visits_of_each_part_of_training_add_up(tmp_path):
    table = "step,row,column,visits\n10,0,1,3\n20,0,1,3\n20,1,0,2\n30,0,1,9\n30,1,0,2\n"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "visits.csv").write_text(table)
    visits = fig_heatmaps.visits_by_part("run", np.array([10, 20, 30]), (2, 2), tmp_path)
    assert visits.tolist() == [[[0, 3], [0, 0]], [[0, 0], [2, 0]], [[0, 6], [0, 0]]]
    with pytest.raises(SystemExit, match=r"visits\.csv has no row of step 25"):
        fig_heatmaps.visits_by_part("run", np.array([10, 25, 30]), (2, 2), tmp_path)


def follow_shortest_paths(maze):
    """Walks to the one cell that the table says was not visited."""
    envs = MazeVecEnv(1, maze, engine="numpy")
    from_goal = {}

    def choose(obs, counts):
        actions = []
        for avatar, table in zip(obs[:, 0].numpy(), counts.numpy(), strict=True):
            (goal,) = map(tuple, np.argwhere(envs.reachable & (table == 0)))
            if goal not in from_goal:
                from_goal[goal] = shortest_paths(envs.walls, goal)[0]
            around = np.argwhere(avatar)[0] + MOVES
            distances = from_goal[goal][tuple(around.T)]
            actions.append(np.where(distances < 0, 1000, distances).argmin())
        return np.array(actions)

    return choose


def test_a_walker_that_knows_the_way_reaches_every_goal_by_a_shortest_path():
    envs = MazeVecEnv(1, "Maze2-v0", goal=True, engine="numpy")
    distances, _ = shortest_paths(envs.walls, tuple(envs.engine.cells[0]))
    goals = np.argwhere(distances > 0)[::15]
    goals = np.concatenate([goals, np.argwhere(envs.level == "G")])
    walker = follow_shortest_paths("Maze2-v0")
    lengths, paths = fig_goal_reaching.walk(walker, goals, 80, "Maze2-v0")
    assert lengths[-1] == 75
    assert (lengths == distances[tuple(goals.T)]).all()
    assert (paths[0] == paths[0, 0]).all() and (paths[-1] == goals).all()
    assert (np.abs(np.diff(paths, axis=0)).sum(2) <= 1).all()

    lengths, paths = fig_goal_reaching.walk(walker, goals[-1:], 74, "Maze2-v0")
    assert np.isnan(lengths[0]) and np.abs(paths[-1, 0] - goals[-1]).sum() == 1


def test_the_table_that_is_shown_counts_on_and_walks_that_arrived_are_not_asked():
    goals, shown = np.array([[1, 2], [1, 3], [-1, -1]]), []

    def right(obs, counts):
        shown.append(counts.clone())
        return np.ones(len(counts), np.int64)

    lengths, paths = fig_goal_reaching.walk(right, goals, 3, "Maze2-v0")
    assert lengths[:2].tolist() == [1, 2] and np.isnan(lengths[2])
    assert [len(counts) for counts in shown] == [3, 2, 1]
    assert paths[:, 0].tolist() == [[1, 1], [1, 2], [1, 2], [1, 2]]
    reachable = MazeVecEnv(1, "Maze2-v0", engine="numpy").reachable
    assert [(reachable & (table == 0)).sum() for table in shown[0].numpy()] == [1, 1, 0]
    assert shown[0].max() == 1 and not shown[0].numpy()[:, ~reachable].any()
    assert shown[2][0, 1, :5].tolist() == [0, 1, 2, 2, 1]
    share = fig_goal_reaching.visited_share(paths, reachable.shape)
    assert share[1, 1:5].tolist() == [1, 1, 2 / 3, 1 / 3] and share.sum() == 3
