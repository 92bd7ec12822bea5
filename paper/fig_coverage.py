"""Reward-free exploration of Maze 1, with and without SOFE. [SOFE app:reward-free]

    python paper/fig_coverage.py --small      # what is committed: half an hour on two cores
    python paper/fig_coverage.py --small --algorithm a2c     # or dqn; the default is ppo
    python paper/fig_coverage.py --paper      # the paper's network and hyperparameters, for a GPU

Episodic counts; PPO with two bonuses, sqrt and salesman, A2C and DQN with sqrt in the small
setting and with both in the paper's; the arms differ in --augment alone. Drawn is
the share of the reachable cells that an episode visits, over training; the grey lines are a random
walk and an explorer that knows the map and always walks to the nearest unvisited cell. Writes
paper/results/coverage_ALGORITHM_maze1.csv and paper/figures/coverage_ALGORITHM_maze1.png.
"""

import textwrap

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
SIZES = {  # flags of each algorithm, steps, seeds, length of an episode
    "smoke": (SMOKE, 80, 1, 8),
    "small": (SMALL, 500_000, 3, 1000),
    "paper": ({"ppo": [], "a2c": [], "dqn": []}, 10_000_000, 6, 1000),
}


def names(algorithm: str, bonuses: tuple[str, ...], seeds: int, prefix: str):
    """Names of the runs: (bonus, arm) -> a list, one of each seed."""
    stem = f"{prefix}coverage-{algorithm}-{MAZE}"
    return {
        (bonus, arm): [f"{stem}-{bonus}-{arm}-seed{seed}" for seed in range(1, seeds + 1)]
        for bonus in bonuses
        for arm in ARMS
    }


def jobs(algorithm: str, size: str, steps: int, limit: int, runs) -> dict[str, list[str]]:
    """Names and command lines of the runs, those of the first seed first."""
    flags = [*SIZES[size][0][algorithm], "--max-steps", str(limit)]
    lines = {
        (seed, name): [
            f"{algorithm}_sofe.py", "--env-id", MAZE, "--bonus", bonus, ARMS[arm][0],
            "--seed", str(seed), "--ext-coef", "0", *flags, "--total-timesteps", str(steps),
        ]
        for (bonus, arm), of_seeds in runs.items()
        for seed, name in enumerate(of_seeds, 1)
    }  # fmt: skip
    return {name: lines[seed, name] for seed, name in sorted(lines, key=lambda key: key[0])}


def collect(runs, steps: int, bins: int):
    """Curves (bonus, arm) -> (seeds, bins) of coverage, and the right edges of the bins."""
    edges = np.linspace(0, steps, bins + 1)
    curves = {}
    for key, of_seeds in runs.items():
        episodes = [read(name) for name in of_seeds]
        curves[key] = np.array([bin_means(e["step"], e["coverage"], edges) for e in episodes])
    return edges[1:], curves


def draw(path, edges, curves, limit, caption):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    bonuses = list(dict.fromkeys(bonus for bonus, _ in curves))
    size = {"figsize": (4.5 * len(bonuses), 4.2), "sharey": True, "layout": "constrained"}
    figure, axes = plt.subplots(1, len(bonuses), squeeze=False, **size)
    axes = axes[0]
    lines = {
        "full knowledge": full_knowledge_coverage(MAZE, limit)[-1],
        "random walk": random_walk_coverage(MAZE, limit)[-1],
    }
    for ax, bonus in zip(axes, bonuses, strict=True):
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
    words = textwrap.wrap(caption, 78 * len(bonuses), break_on_hyphens=False)
    figure.supxlabel("\n".join(words), fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main():
    args = parse_size(__doc__, ("ppo", "a2c", "dqn"))
    _, steps, seeds, limit = SIZES[args.size]
    seeds = args.seeds or seeds
    prefix = "" if args.size == "small" else f"{args.size}-"
    bonuses = ("sqrt",) if args.size != "paper" and args.algorithm != "ppo" else BONUSES
    runs = names(args.algorithm, bonuses, seeds, prefix)
    launch(jobs(args.algorithm, args.size, steps, limit, runs), args.jobs)
    bins = 4 if args.size == "smoke" else 15  # each holds the ends of some episodes
    edges, curves = collect(runs, steps, bins)
    rows = [
        [bonus, arm, seed + 1, int(edge), f"{value:.5f}"]
        for (bonus, arm), array in curves.items()
        for seed, curve in enumerate(array)
        for edge, value in zip(edges, curve, strict=True)
    ]
    name = f"{prefix}coverage_{args.algorithm}_maze1"
    folders = (RESULTS, FIGURES) if args.size != "smoke" and not args.seeds else (RUNS, RUNS)
    path = write_csv(name, ["bonus", "arm", "seed", "step", "coverage"], rows, folders[0])
    network = "paper's network" if args.size == "paper" else "16 channels, 128 features"
    caption = (
        f"{args.algorithm.upper()}, {MAZE}, reward-free, episodic counts, {network}, "
        f"{seeds} seeds, {steps:,} steps. IQM and 95% bootstrap interval (of 3 seeds: mean and "
        f"range); arms differ in --augment. "
        f"python paper/fig_coverage.py --{args.size} --algorithm {args.algorithm}"
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
