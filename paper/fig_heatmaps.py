"""Where A2C goes during training in Maze 1, with and without SOFE. [SOFE fig:a2c_heatmaps]

    python paper/fig_heatmaps.py --small      # 2 runs of 500,000 steps
    python paper/fig_heatmaps.py --paper      # the paper's network and hyperparameters, for a GPU

Reward-free, sqrt bonus, episodic counts, the arms differ in --augment alone; the runs are those of
fig_coverage.py --algorithm a2c, started anew to record the visits eight times. Training is cut into
eighths, and drawn is how often each cell was visited in each of them, by all environments in all
episodes; below it is how much of the maze an episode that ended then visited, on average. It is
seed 1, for better or worse; --seeds N adds up the visits of seeds 1 to N. Writes
paper/results/heatmaps_a2c.csv and paper/figures/heatmaps_a2c.png.
"""

import numpy as np
from experiments import (
    ARMS,
    FIGURES,
    RESULTS,
    RUNS,
    SMALL,
    SMOKE,
    command_of,
    jobs_of,
    launch,
    parse_size,
    read,
    training_curves,
    write_csv,
    write_records,
)

from common.mazes import MazeVecEnv

MAZE, BONUS, PARTS = "Maze1-v0", "sqrt", 8
SIZES = {  # flags, steps, seeds, length of an episode
    "smoke": (SMOKE["a2c"], 80, 1, 8),
    "small": (SMALL["a2c"], 500_000, 1, 1000),
    "paper": ([], 10_000_000, 1, 1000),
}


def visits_by_part(name: str, edges: np.ndarray, shape: tuple[int, int], runs=RUNS) -> np.ndarray:
    """How often a run visited each cell in each part of training, from its visits.csv.

    edges     (parts,) int64   the step at which each part ends
    returns   (parts, H, W) int64
    """
    log = {
        column: values.astype(np.int64) for column, values in read(name, "visits.csv", runs).items()
    }
    totals = np.zeros((len(edges), *shape), np.int64)
    for part, edge in enumerate(edges):
        at = log["step"] == edge
        if not at.any():
            raise SystemExit(f"error: {runs / name / 'visits.csv'} has no row of step {edge}")
        totals[part, log["row"][at], log["column"][at]] = log["visits"][at]
    return np.diff(totals, axis=0, prepend=0)


def draw(path, edges, visits, coverage, reachable, caption: str) -> None:
    """A row of maps for each arm.

    visits     arm -> (parts, H, W) int64
    coverage   arm -> (parts,) float64    of an episode
    """
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    size = {"figsize": (1.7 * len(edges), 4.4), "layout": "constrained"}
    figure = Figure(**size)
    axes = figure.subplots(len(visits), len(edges), squeeze=False)
    norm = LogNorm(1, max(2, *(int(array.max()) for array in visits.values())))
    for row, arm in zip(axes, visits, strict=True):
        for part, ax in enumerate(row):
            ax.imshow(np.where(reachable, 1.0, 0.0), cmap="gray", vmin=0, vmax=1)
            seen = np.ma.masked_where(visits[arm][part] == 0, visits[arm][part])
            image = ax.imshow(seen, norm=norm, cmap="viridis")
            ax.set(xticks=[], yticks=[], xlabel=f"{coverage[arm][part]:.2f}")
        row[0].set_ylabel(ARMS[arm][1])
    for ax, edge in zip(axes[0], edges, strict=True):
        ax.set_title(f"to {edge / 1000:g}k", fontsize=9)
    figure.colorbar(image, ax=axes, label="visits")
    figure.supxlabel(caption, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main():
    args = parse_size(__doc__)
    flags, steps, seeds, limit = SIZES[args.size]
    seeds = args.seeds or seeds
    prefix = "" if args.size == "small" else f"{args.size}-"
    runs = {
        (BONUS, arm): [
            f"{prefix}heatmaps-a2c-{MAZE}-{BONUS}-{arm}-seed{seed}" for seed in range(1, seeds + 1)
        ]
        for arm in ARMS
    }

    def line_of(bonus: str, arm: str) -> list[str]:
        return [
            "a2c_sofe.py", "--env-id", MAZE, "--bonus", bonus, ARMS[arm][0], "--ext-coef", "0",
            *flags, "--max-steps", str(limit), "--checkpoint-every", str(steps // PARTS),
            "--total-timesteps", str(steps),
        ]  # fmt: skip

    jobs = jobs_of(runs, line_of)
    launch(jobs, args.jobs)
    reachable = MazeVecEnv(1, MAZE, engine="numpy").reachable
    edges, curves = training_curves(runs, steps, PARTS)
    edges = edges.astype(np.int64)
    coverage = {arm: array.mean(0) for (_, arm), array in curves.items()}
    visits, rows = {}, []
    for (_, arm), of_seeds in runs.items():
        of_seeds = [visits_by_part(name, edges, reachable.shape) for name in of_seeds]
        visits[arm] = sum(of_seeds)
        for seed, array in enumerate(of_seeds, 1):
            for part, row, column in np.argwhere(array).tolist():
                rows.append([arm, seed, edges[part], row, column, array[part, row, column]])
    committed = args.size != "smoke" and not args.seeds
    results, figures = (RESULTS, FIGURES) if committed else (RUNS, RUNS)
    header = ["arm", "seed", "step", "row", "column", "visits"]
    path = write_csv(f"{prefix}heatmaps_a2c", header, rows, results)
    write_records(path.stem, jobs, results)
    network = "paper's network" if args.size == "paper" else "16 channels, 128 features"
    caption = (
        f"A2C, {MAZE}, reward-free, {BONUS} bonus, episodic counts, {network}, seed "
        f"{'1' if seeds == 1 else f'1 to {seeds}'}. Visits in each eighth of training, white "
        f"for none; below a map, the coverage of an episode.\n{command_of('fig_heatmaps.py', args)}"
    )
    picture = figures / f"{prefix}heatmaps_a2c.png"
    draw(picture, edges, visits, coverage, reachable, caption)
    for arm, array in visits.items():
        print(f"{arm:8s} cells visited in the last eighth: {(array[-1] > 0).sum()}")
    print(f"wrote {path} and {picture}")


if __name__ == "__main__":
    main()
