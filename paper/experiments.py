"""What the files of paper/ share: launch runs, read their CSV, summarise over seeds.

A file of paper/ describes its runs as a dict of names and command lines. `launch` starts those that
are not finished, `read` gives what they wrote, and only that goes into tables and figures.
"""

import argparse
import csv
import dataclasses
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tyro

try:
    from rliable import library
except ImportError:
    raise SystemExit("error: paper/ needs pip install -r requirements-dev.txt") from None

ROOT = Path(__file__).resolve().parent.parent
RUNS = Path(os.environ.get("SOFE_RUNS", ROOT / "paper" / "runs"))  # the tests keep theirs apart
RESULTS, FIGURES = ROOT / "paper" / "results", ROOT / "paper" / "figures"
sys.path.insert(0, str(ROOT))

from common.runs import RESUMABLE, process_in  # noqa: E402

ARMS = {  # flag, label and color of the arms of a figure
    "sofe": ("--augment", "with SOFE", "tab:red"),
    "plain": ("--no-augment", "without", "tab:blue"),
}
LABELS = {"ppo": "PPO", "a2c": "A2C", "dqn": "DQN", "ppo_lstm": "PPO with LSTM"}
# The CPU setting of README.md for the mazes; the paper's own is what the scripts have as defaults.
SMALL_NETWORK = ["--beta", "0.1", "--channels", "16", "--embedding-dim", "128"]
SMALL = {
    "ppo": [
        *["--num-envs", "32", "--num-steps", "128", "--minibatch-size", "256"],
        *["--update-epochs", "4", "--ent-coef", "0.01", *SMALL_NETWORK],
    ],
    "a2c": ["--ent-coef", "0.01", *SMALL_NETWORK],
    "dqn": [
        *["--gamma", "0.9", "--learning-rate", "0.001", "--double-q", "--n-step", "10"],
        *["--target-interval", "16", "--tau", "0.005", "--learning-starts", "20000"],
        *["--buffer-size", "50000", *SMALL_NETWORK],
    ],
    "ppo_lstm": [
        *["--num-envs", "32", "--num-minibatches", "16"],
        *["--update-epochs", "4", "--ent-coef", "0.01", *SMALL_NETWORK],
    ],
}
PAPER: dict[str, list[str]] = {algorithm: [] for algorithm in SMALL}
SMOKE_NETWORK = ["--channels", "4", "--embedding-dim", "8", "--eval-episodes", "1"]
SMOKE = {
    "ppo": [
        *["--num-envs", "2", "--num-steps", "8", "--minibatch-size", "8"],
        *["--update-epochs", "1", *SMOKE_NETWORK],
    ],
    "a2c": ["--num-envs", "2", "--log-every", "1", *SMOKE_NETWORK],
    "dqn": [
        *["--num-envs", "2", "--log-every", "1", "--learning-starts", "8"],
        *["--buffer-size", "64", *SMOKE_NETWORK],
    ],
    "ppo_lstm": [
        *["--num-envs", "2", "--num-steps", "8", "--num-minibatches", "1"],
        *["--lstm-size", "8", "--update-epochs", "1", *SMOKE_NETWORK],
    ],
}


def parse_size(
    description: str, draw: bool = False, **choices: tuple[str, ...]
) -> argparse.Namespace:
    """The command line of every file here: --smoke, --small or --paper, --seeds and --jobs.

    draw      whether there is --draw as well, see `curves_of`
    choices   flags of the file's own, each a choice among names, the first of them by default:
              algorithm=("ppo", "a2c")
    """
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=raw)
    for flag, names in choices.items():
        parser.add_argument(f"--{flag}", choices=names, default=names[0])
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--smoke", action="store_const", dest="size", const="smoke", help="seconds")
    size.add_argument("--small", action="store_const", dest="size", const="small", help="a CPU")
    size.add_argument("--paper", action="store_const", dest="size", const="paper", help="a GPU")
    parser.add_argument(
        "--seeds", type=int, help="how many seeds, from 1 on; the results then go to paper/runs/"
    )
    parser.add_argument("--jobs", type=int, default=2, help="how many runs at the same time")
    if draw:
        text = "train nothing: draw the numbers that are in paper/results/"
        parser.add_argument("--draw", action="store_true", help=text)
    parser.set_defaults(size="small")
    args = parser.parse_args()
    if args.jobs < 1 or (args.seeds is not None and args.seeds < 1):
        parser.error("--jobs and --seeds must be at least 1")
    return args


def command_of(file: str, args: argparse.Namespace, **choices: tuple[str, ...]) -> str:
    """The command that makes a figure, for its caption; `choices` as in `parse_size`."""
    flags = [
        f"--{flag} {getattr(args, flag)}"
        for flag, names in choices.items()
        if getattr(args, flag) != names[0]
    ]
    return " ".join([f"python paper/{file} --{args.size}", *flags])


def replace_flags(line: list[str], **flags: str) -> list[str]:
    """A command line in which flags have other values; those that it lacks are added."""
    for name, value in flags.items():
        word = "--" + name.replace("_", "-")
        if word in line:
            at = line.index(word)
            line = [*line[:at], *line[at + 2 :]]
        line = [*line, word, value]
    return line


def jobs_of(
    runs: dict[tuple[str, str], list[str]], line_of: Callable[[str, str], list[str]]
) -> dict[str, list[str]]:
    """What `launch` takes: names and command lines of runs, those of the first seed first.

    runs      (panel, arm) -> names of the runs, one of each seed
    line_of   (panel, arm) -> script and flags, without --seed
    """
    lines = {
        (seed, name): [*line_of(*key), "--seed", str(seed)]
        for key, of_seeds in runs.items()
        for seed, name in enumerate(of_seeds, 1)
    }
    return {name: lines[seed, name] for seed, name in sorted(lines, key=lambda key: key[0])}


def last_step(folder: Path, file: str) -> int:
    """The step of the last row of a CSV file of a run, 0 where there is none."""
    try:
        return int((folder / file).read_text().strip().splitlines()[-1].split(",")[0])
    except (FileNotFoundError, IndexError, ValueError):
        return 0


def is_finished(name: str, line: list[str], runs: Path = RUNS) -> bool:
    """Whether a run has been evaluated at the end, which is the last that it does."""
    total = int(line[line.index("--total-timesteps") + 1])
    return last_step(runs / name, "evals.csv") >= total


def flags_at(line: list[str]) -> int:
    """Where the flags of a command line begin, after the script and its words."""
    return next(place for place, word in enumerate(line) if word.startswith("--"))


def arguments(line: list[str], script: str | None = None) -> dict[str, Any]:
    """All arguments of a command line, also those at their default; script: whose (None: its)."""
    module = importlib.import_module(script or Path(line[0]).stem)
    return dataclasses.asdict(tyro.cli(module.Args, args=line[flags_at(line) :]))


def check_args(folder: Path, line: list[str]) -> None:
    """End the program if a run was made with other arguments than a command line has.

    A flag that the script got after the run was made counts as left at its default. Of those that
    --resume may change, --eval-every must agree: the first evaluation to be solved is a result.
    """
    record = json.loads((folder / "args.json").read_text())
    script = importlib.import_module(record["script"])
    saved = {field.name: field.default for field in dataclasses.fields(script.Args)}
    saved |= record["args"]
    asked = arguments(line, record["script"])
    free = set(RESUMABLE) - {"eval_every"} | {"runs_dir", "run_name"}
    for name, value in asked.items():
        was = saved[name]
        if name not in free and was != value:
            raise SystemExit(f"error: {folder} was made with {name}={was}, not {value}: move it")
    had, total = saved["total_timesteps"], asked["total_timesteps"]
    if had > total or (
        had < total and (saved.get("anneal_beta") or record["script"] == "dqn_sofe")
    ):
        raise SystemExit(  # epsilon of DQN falls over a share of the steps
            f"error: {folder} was made for {had} steps, not {total}, and that is part of its "
            f"schedules or results: move it"
        )


def command_for(name: str, line: list[str], runs: Path) -> list[str] | None:
    """The command that starts a run or goes on with it; None where it is finished.

    line   script and flags, with --total-timesteps; a finished run goes on where that is raised
    """
    folder, total = runs / name, line[line.index("--total-timesteps") + 1]
    if process_in(folder) is not None:
        raise SystemExit(f"error: {folder} belongs to a run that is going on: wait for it")
    if (folder / "args.json").exists():
        check_args(folder, line)
    if is_finished(name, line, runs):
        return None
    if (folder / "checkpoint.pt").exists():
        rest = ["--resume", str(folder), "--total-timesteps", total]
        return [sys.executable, *line[: flags_at(line)], *rest]
    if folder.exists():
        print(f"{name} ended before its first checkpoint: it is started anew", flush=True)
        shutil.rmtree(folder)
    return [sys.executable, *line, "--runs-dir", str(runs), "--run-name", name]


def launch(jobs: dict[str, list[str]], parallel: int, runs: Path = RUNS) -> None:
    """Run the jobs that are not finished, `parallel` at a time; exit status 1 if one failed."""
    runs.mkdir(parents=True, exist_ok=True)
    commands = {name: command_for(name, line, runs) for name, line in jobs.items()}
    commands = {name: command for name, command in commands.items() if command}
    print(f"{len(jobs) - len(commands)} of {len(jobs)} runs are finished", flush=True)
    run(commands, parallel, runs)


def run(commands: dict[str, list[str]], parallel: int, runs: Path) -> None:
    """Run all commands, `parallel` at a time, each with a log file; exit status 1 if one failed."""
    waiting = list(commands.items())
    running: dict[str, subprocess.Popen] = {}
    failed: list[str] = []
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        while waiting or running:
            while waiting and len(running) < parallel:
                name, command = waiting.pop(0)
                print(f"start {name}", flush=True)
                with open(runs / f"{name}.log", "a") as log:
                    running[name] = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
            time.sleep(0.2)
            for name, process in list(running.items()):
                if process.poll() is not None:
                    del running[name]
                    if process.returncode != 0:
                        failed.append(name)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    finally:
        for process in running.values():
            process.terminate()  # the scripts save and can be resumed
        for process in running.values():
            process.wait()
    if failed:
        logs = ", ".join(str(runs / f"{name}.log") for name in failed)
        raise SystemExit(f"error: {len(failed)} runs failed, see {logs}; start again to go on")


def read(name: str, file: str = "episodes.csv", runs: Path = RUNS) -> dict[str, np.ndarray]:
    """The columns of a CSV file of a run, each (rows,) float64."""
    with open(runs / name / file) as lines:
        reader = csv.DictReader(lines)
        rows = list(reader)
    return {key: np.array([float(row[key]) for row in rows]) for key in reader.fieldnames or ()}


def in_bins(steps: np.ndarray, values: np.ndarray, edges: np.ndarray, summary) -> np.ndarray:
    """A summary of the values at steps in (edges[k], edges[k + 1]] for each k; nan for none."""
    results = np.full(len(edges) - 1, np.nan)
    for k in range(len(results)):
        inside = (steps > edges[k]) & (steps <= edges[k + 1])
        if inside.any():
            results[k] = summary(values[inside])
    return results


def iqm_interval(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Interquartile mean over seeds and its 95% stratified bootstrap interval. [rliable]

    scores    (seeds, points) float64
    returns   iqm, low, high, each (points,)
    """

    def aggregate(sample: np.ndarray) -> np.ndarray:  # rliable's own takes a column at a time
        cut = len(sample) // 4
        return np.sort(sample, axis=0)[cut : len(sample) - cut].mean(0)

    with warnings.catch_warnings():  # arch is about to rename an argument that rliable passes
        warnings.simplefilter("ignore", FutureWarning)
        points, intervals = library.get_interval_estimates(
            {"scores": scores}, aggregate, reps=2000, random_state=np.random.RandomState(0)
        )
    return points["scores"], intervals["scores"][0], intervals["scores"][1]


def write_csv(name: str, header: list[str], rows: list[list], folder: Path = RESULTS) -> Path:
    """Write paper/results/NAME.csv."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{name}.csv", "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)
    return folder / f"{name}.csv"


def write_records(
    name: str, jobs: dict[str, list[str]], folder: Path = RESULTS, keep: bool = False
) -> None:
    """Write paper/results/records/NAME.csv: when and with what each run of a figure was begun.

    jobs   as for `launch`, which has compared the command lines with those of the runs
    keep   whether the runs that are in the file already stay there
    """
    path, kept = folder / "records" / f"{name}.csv", {}
    if keep and path.exists():
        with open(path) as lines:
            kept = {row["run"]: list(row.values()) for row in csv.DictReader(lines)}
    for run_name, line in jobs.items():
        record = json.loads((RUNS / run_name / "args.json").read_text())
        kept[run_name] = [
            *[run_name, record["started"], record["git_commit"], record["versions"]["torch"]],
            *[record["device"], " ".join(["python", *line])],
        ]
    header = ["run", "started", "git_commit", "torch", "device", "command"]
    write_csv(name, header, [kept[run_name] for run_name in sorted(kept)], path.parent)


FEW = 3  # of so many seeds or fewer each is drawn: an interval over them would say little


def setting(size: str, seeds: int, steps: int) -> str:
    """What the caption of a figure says: network and budget."""
    network = "paper's network" if size == "paper" else "16 channels, 128 features"
    return f"{network}, {seeds} seeds, {steps:,} steps"


def training_curves(
    runs: dict[tuple[str, str], list[str]],
    steps: int,
    bins: int,
    column: str = "coverage",
    file: str = "episodes.csv",
    summary: Callable[[np.ndarray], float] = np.mean,
) -> tuple[np.ndarray, dict[tuple[str, str], np.ndarray]]:
    """What the episodes of each run reached over training, or another of its files.

    runs      (panel, arm) -> names of the runs, one of each seed
    column    of the file
    summary   what is drawn of the values in a bin
    returns   right edges of the bins in steps (bins,), and (panel, arm) -> (seeds, bins) float64
    """
    edges = np.linspace(0, steps, bins + 1)
    curves = {}
    for key, of_seeds in runs.items():
        logs = [read(name, file) for name in of_seeds]
        curves[key] = np.array([in_bins(log["step"], log[column], edges, summary) for log in logs])
    return edges[1:], curves


def read_curves(path: Path, column: str) -> tuple[np.ndarray, dict[tuple[str, str], np.ndarray]]:
    """What `training_curves` returned, from the CSV file that `curves_of` wrote of it."""
    edges: dict[float, None] = {}
    curves: dict[tuple[str, str], dict[str, list[float]]] = {}
    with open(path) as lines:
        for row in csv.DictReader(lines):
            panel, arm, seed, step, *_ = row.values()
            edges[float(step)] = None
            curves.setdefault((panel, arm), {}).setdefault(seed, []).append(float(row[column]))
    return np.array(list(edges)), {key: np.array([*curves[key].values()]) for key in curves}


def curves_of(
    args: argparse.Namespace,
    name: str,
    jobs: dict[str, list[str]],
    runs: dict[tuple[str, str], list[str]],
    steps: int,
    bins: int,
    panel: str = "bonus",
    column: str = "coverage",
    evals: tuple[str, ...] = (),
    **how,
) -> tuple[np.ndarray, dict[tuple[str, str], np.ndarray], Path]:
    """Launch runs and write their curves as NAME.csv; with --draw, take the file as it is.

    jobs      as for `launch`
    panel     what the first of the keys of `runs` is
    column    what the curves show; beside it the file says of how many rows each value is made
    evals     columns of the evaluation at the end of each run, for NAME_eval.csv
    how       file and summary, as for `training_curves`
    returns   what `training_curves` returns, as it is in the file, and the path of the figure
    """
    committed = args.size != "smoke" and not args.seeds
    results, figures = (RESULTS, FIGURES) if committed else (RUNS, RUNS)
    path = results / f"{name}.csv"
    if not args.draw:
        launch(jobs, args.jobs)
        edges, curves = training_curves(runs, steps, bins, column, **how)
        _, counts = training_curves(runs, steps, bins, column, **how | {"summary": len})
        rows = [
            [*key, seed, int(edges[k]), f"{curve[k]:.5f}", int(np.nan_to_num(count[k]))]
            for key in runs
            for seed, (curve, count) in enumerate(zip(curves[key], counts[key], strict=True), 1)
            for k in range(bins)
        ]
        write_csv(name, [panel, "arm", "seed", "step", column, "rows"], rows, results)
        write_records(name, jobs, results)
        print(f"wrote {path}")
        rows = [
            [*key, seed, *(f"{read(run, 'evals.csv')[word][-1]:.4f}" for word in evals)]
            for key, of_seeds in runs.items()
            for seed, run in enumerate(of_seeds, 1)
        ]
        if evals:
            evals_path = write_csv(f"{name}_eval", [panel, "arm", "seed", *evals], rows, results)
            print(f"wrote {evals_path}")
    elif not path.exists():
        raise SystemExit(f"error: there is no {path} to draw: leave out --draw, and it is made")
    return *read_curves(path, column), figures / f"{name}.png"


def draw_curves(
    path: Path,
    edges,
    curves,
    lines: dict[str, float],
    caption: str,
    arms=ARMS,
    title: str = "{} bonus",
    ylabel: str = "coverage of an episode",
    legend: str = "upper left",
    top: float = 1.05,
) -> None:
    """Draw curves over training, a panel for each first key of theirs.

    caption  below the figure; what the lines and bands are is put before it
    lines   what else to compare with: label -> value
    arms    second key -> (flag, label, color)
    title   of a panel, with {} for its key
    legend  where it is
    top     where the axis ends
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = list(dict.fromkeys(panel for panel, _ in curves))
    size = {"figsize": (max(5.5, 4.5 * len(panels)), 4.2), "sharey": True, "layout": "constrained"}
    figure, axes = plt.subplots(1, len(panels), squeeze=False, **size)
    axes = axes[0]
    for ax, panel in zip(axes, panels, strict=True):
        for arm, (_, label, color) in arms.items():
            if (panel, arm) not in curves:
                continue
            shown = ~np.isnan(curves[panel, arm]).any(0)
            values = curves[panel, arm][:, shown]
            middle, low, high = iqm_interval(values)  # the mean of three seeds or fewer
            ax.plot(edges[shown], middle, color=color, linewidth=2, label=label)
            if len(values) > FEW:
                ax.fill_between(edges[shown], low, high, color=color, alpha=0.2, linewidth=0)
            else:
                ax.plot(edges[shown], values.T, color=color, linewidth=0.8, alpha=0.5)
        for style, (label, value) in zip(("--", ":"), lines.items(), strict=False):
            ax.axhline(value, color="gray", linestyle=style, label=label)
        ax.set(title=title.format(panel), xlabel="environment steps", ylim=(-0.02 * top, top))
        ax.xaxis.set_major_formatter(lambda step, _: f"{step / 1000:g}k")
        ax.grid(alpha=0.3)
    axes[0].set_ylabel(ylabel)
    axes[0].legend(loc=legend)
    few = "Thick: mean of the seeds; thin: each of them."
    many = "Line: interquartile mean of the seeds; band: its 95% bootstrap interval."
    caption = f"{few if all(len(x) <= FEW for x in curves.values()) else many} {caption}"
    words = textwrap.wrap(caption, 78 * len(panels), break_on_hyphens=False)
    figure.supxlabel("\n".join(words), fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def last_tenth(edges: np.ndarray, curve: np.ndarray) -> np.ndarray:
    """Mean of a curve over the bins that end in the last tenth of training, those with no nan.

    edges     (bins,)   right edges; with 10 or 20 bins it is the last tenth, with 15 two of them
    curve     (..., bins)
    returns   (...)
    """
    return np.nanmean(curve[..., edges > 0.9 * edges[-1] + 0.5], axis=-1)


def print_last(edges, curves, column: str = "coverage") -> None:
    """Print what each arm reaches at the end of training, see `last_tenth`."""
    first = edges[edges <= 0.9 * edges[-1] + 0.5][-1] if len(edges) > 1 else 0
    print(f"from step {first:,.0f} on:")
    for (panel, arm), array in curves.items():
        middle, low, high = iqm_interval(last_tenth(edges, array)[:, None])
        print(f"{panel:9s} {arm:8s} {column} {middle[0]:.3f} [{low[0]:.3f}, {high[0]:.3f}]")
