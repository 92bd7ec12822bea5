"""Reward-free exploration of Maze 1 by PPO, with and without SOFE. [SOFE app:reward-free]

    python paper/fig_coverage.py --small      # what is committed: half an hour on two cores
    python paper/fig_coverage.py --paper      # the paper's network and hyperparameters, for a GPU

Two bonuses, sqrt and salesman, with episodic counts; the arms differ in --augment alone. Drawn is
the share of the reachable cells that an episode visits, over training; the grey lines are a random
walk and an explorer that knows the map and always walks to the nearest unvisited cell. Writes
paper/results/coverage_ppo_maze1.csv and paper/figures/coverage_ppo_maze1.png.
"""

import numpy as np
from experiments import (
    FIGURES,
    RESULTS,
    RUNS,
    SMALL,
    SMOKE,
    bin_means,
    iqm_interval,
    launch,
    parse_size,
    read,
    write_csv,
)

from common.mazes import full_knowledge_coverage, random_walk_coverage

MAZE = "Maze1-v0"
ARMS = {
    "sofe": ("--augment", "with SOFE", "tab:red"),
    "plain": ("--no-augment", "without", "tab:blue"),
}
BONUSES = ("sqrt", "salesman")
SIZES = {  # flags, steps, seeds, length of an episode
    "smoke": (SMOKE, 64, 1, 8),
    "small": (SMALL, 500_000, 3, 1000),
    "paper": ([], 10_000_000, 6, 1000),
}


def jobs(size: str, steps: int, seeds: int, limit: int, prefix: str = "") -> dict[str, list[str]]:
    """Names and command lines of the runs."""
    flags = [*SIZES[size][0], "--max-steps", str(limit), "--total-timesteps", str(steps)]
    return {
        f"{prefix}coverage-ppo-{MAZE}-{bonus}-{arm}-seed{seed}": [
            "ppo_sofe.py", "--env-id", MAZE, "--bonus", bonus, ARMS[arm][0],
            "--seed", str(seed), "--ext-coef", "0", *flags,
        ]
        for seed in range(1, seeds + 1)
        for bonus in BONUSES
        for arm in ARMS
    }  # fmt: skip


def collect(steps: int, seeds: int, bins: int, prefix: str, runs=RUNS):
    """Curves (bonus, arm) -> (seeds, bins) of coverage, and the right edges of the bins."""
    edges = np.linspace(0, steps, bins + 1)
    curves = {}
    for bonus in BONUSES:
        for arm in ARMS:
            seed_curves = []
            for seed in range(1, seeds + 1):
                episodes = read(f"{prefix}coverage-ppo-{MAZE}-{bonus}-{arm}-seed{seed}", runs=runs)
                seed_curves.append(bin_means(episodes["step"], episodes["coverage"], edges))
            curves[bonus, arm] = np.array(seed_curves)
    return edges[1:], curves


def draw(path, edges, curves, limit, caption):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 4.2), sharey=True, layout="constrained")
    lines = {
        "full knowledge": full_knowledge_coverage(MAZE, limit)[-1],
        "random walk": random_walk_coverage(MAZE, limit)[-1],
    }
    for ax, bonus in zip(axes, BONUSES, strict=True):
        for arm, (_, label, color) in ARMS.items():
            shown = ~np.isnan(curves[bonus, arm]).any(0)
            middle, low, high = iqm_interval(curves[bonus, arm][:, shown])
            ax.plot(edges[shown], middle, color=color, label=label)
            ax.fill_between(edges[shown], low, high, color=color, alpha=0.2, linewidth=0)
        for style, (label, value) in zip(("--", ":"), lines.items(), strict=True):
            ax.axhline(value, color="gray", linestyle=style, label=label)
        ax.set(title=f"{bonus} bonus", xlabel="environment steps", ylim=(0, 1.05))
        ax.xaxis.set_major_formatter(lambda step, _: f"{step / 1000:g}k")
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("coverage of an episode")
    axes[0].legend(loc="upper left")
    figure.supxlabel(caption, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main():
    args = parse_size(__doc__)
    _, steps, seeds, limit = SIZES[args.size]
    seeds = args.seeds or seeds
    prefix = "" if args.size == "small" else f"{args.size}-"
    launch(jobs(args.size, steps, seeds, limit, prefix), args.jobs)
    bins = 4 if args.size == "smoke" else 15  # each holds the ends of some episodes
    edges, curves = collect(steps, seeds, bins, prefix)
    rows = [
        [bonus, arm, seed + 1, int(edge), f"{value:.5f}"]
        for (bonus, arm), array in curves.items()
        for seed, curve in enumerate(array)
        for edge, value in zip(edges, curve, strict=True)
    ]
    name = f"{prefix}coverage_ppo_maze1"
    folders = (RESULTS, FIGURES) if args.size != "smoke" and not args.seeds else (RUNS, RUNS)
    path = write_csv(name, ["bonus", "arm", "seed", "step", "coverage"], rows, folders[0])
    network = "paper's network" if args.size == "paper" else "16 channels, 128 features"
    caption = (
        f"PPO, {MAZE}, reward-free, episodic counts, {network}, {seeds} seeds, {steps:,} steps.\n"
        f"IQM and 95% bootstrap interval (of 3 seeds: mean and range); arms differ in --augment.  "
        f"python paper/fig_coverage.py --{args.size}"
    )
    draw(folders[1] / f"{name}.png", edges, curves, limit, caption)
    for (bonus, arm), array in curves.items():
        middle, low, high = iqm_interval(
            np.nanmean(array[:, -max(1, bins // 10) :], axis=1)[:, None]
        )
        print(f"{bonus:9s} {arm:6s} coverage {middle[0]:.3f} [{low[0]:.3f}, {high[0]:.3f}]")
    print(f"wrote {path} and {folders[1] / (name + '.png')}")


if __name__ == "__main__":
    main()
