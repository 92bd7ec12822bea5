"""A goal 75 moves away in Maze 2: no bonus, counts, counts with SOFE. [SOFE fig:m2_ci]

    python paper/fig_sparse.py --small                       # PPO, 9 runs of 1,000,000 steps
    python paper/fig_sparse.py --small --algorithm a2c       # or dqn, ppo_lstm
    python paper/fig_sparse.py --small --counts global --view 5   # see 5 x 5 cells only
    python paper/fig_sparse.py --paper      # the paper's network and hyperparameters, for a GPU

The task's reward is 1 on the goal, which ends the episode; sqrt bonus. All of [SOFE
app:sparse-rewards] is the four algorithms, two counts and two views. Drawn is the return of an
episode, which is 1 or 0: the share of episodes that find the goal, over training; the grey line is
a random walk, of which not one in 1000 does. The paper's bars, of all algorithms and both counts,
are drawn anew after each of them: the return in the last tenth of training, as an interquartile
mean or (three seeds or fewer) a mean and each seed, and an empty place where runs are missing.

beta is 0.001 in all sizes: an endless walk over new cells, which pays beta a step, is then worth
beta / (1 - gamma) = 0.1, and the goal 0.99^75 = 0.47 from the start. With 0.01 the walk is worth
1, and an agent may do better to roam than to end the episode; docs/results.md tells what came of
it. The paper does not give its beta. In the small setting the weight of the entropy is a tenth of
that of the mazes without a goal, 0.001. A2C does not normalise its advantages, and with rewards so
small its policy stays uniform: its goal is worth 100 (--ext-coef), its beta is 0.1, and in the
small setting its entropy weighs 0.01, as in the mazes; returns are still 1 or 0. The runs without a
bonus are the same for both counts, and are run once.

Writes paper/results/sparse_ALGORITHM.csv, the trained agent's returns as ..._eval.csv, and
paper/figures/sparse_ALGORITHM.png, and the bars, paper/figures/sparse_bars.png; _global and _view5
are added to the names.
"""

import textwrap
from pathlib import Path

import numpy as np
from experiments import (
    ARMS,
    FEW,
    LABELS,
    PAPER,
    RESULTS,
    RUNS,
    SMALL,
    SMOKE,
    command_of,
    curves_of,
    draw_curves,
    iqm_interval,
    jobs_of,
    last_tenth,
    parse_size,
    print_last,
    read_curves,
    replace_flags,
    setting,
)

from common.mazes import ACTIONS, MazeVecEnv

MAZE = "Maze2-v0"
BETA = 0.001
SCALES = {"a2c": 100}  # what rewards are multiplied by, 1 for the others
CHOICES = {
    "algorithm": ("ppo", "a2c", "dqn", "ppo_lstm"),
    "counts": ("episodic", "global"),
    "view": ("full", "5"),
}
GOAL_ARMS = {  # flag, label and color, as in the paper's figure
    "sofe": (ARMS["sofe"][0], "counts with SOFE", "tab:red"),
    "plain": (ARMS["plain"][0], "counts", "tab:blue"),
    "none": (ARMS["plain"][0], "no bonus", "tab:green"),
}
SMALL_HERE = SMALL | {  # DQN has no entropy bonus; a gamma of 0.9 would not see the goal
    "ppo": replace_flags(SMALL["ppo"], ent_coef="0.001"),
    "ppo_lstm": replace_flags(SMALL["ppo_lstm"], ent_coef="0.001"),
    "dqn": replace_flags(SMALL["dqn"], gamma="0.99"),
}
SIZES = {  # flags of each algorithm, steps, seeds, length of an episode
    "smoke": (SMOKE, 80, 1, 8),
    "small": (SMALL_HERE, 1_000_000, 3, 1000),
    "paper": (PAPER, 10_000_000, 6, 1000),
}


def random_walk_success(limit: int) -> float:
    """Share of 1000 random walks that find the goal."""
    envs = MazeVecEnv(1000, MAZE, goal=True, max_steps=limit + 1, engine="numpy")
    envs.reset()
    random = np.random.default_rng(1)
    for _ in range(limit):
        envs.advance(random.integers(len(ACTIONS), size=envs.num_envs))
    return (envs.returns > 0).mean()


def names(algorithm: str, counts: str, view: str, seeds: int, size: str):
    """Names of the runs: (counts, arm) -> a list, one of each seed."""
    stem = "" if size == "small" else f"{size}-"
    stem += f"sparse-{algorithm}" + ("" if view == "full" else f"-view{view}")
    which = {arm: "-global" if counts == "global" and arm != "none" else "" for arm in GOAL_ARMS}
    return {
        (counts, arm): [f"{stem}{which[arm]}-{arm}-seed{seed}" for seed in range(1, seeds + 1)]
        for arm in GOAL_ARMS
    }


def jobs(algorithm: str, view: str, size: str, runs) -> dict[str, list[str]]:
    """Names and command lines of the runs."""
    flags, steps, _, limit = SIZES[size]
    scale = SCALES.get(algorithm, 1)
    flags = replace_flags(flags[algorithm], beta=f"{BETA * scale:g}", ext_coef=f"{scale}")
    flags += [] if view == "full" else ["--view", view]

    def line_of(counts: str, arm: str) -> list[str]:
        bonus = ["--bonus", "none"] if arm == "none" else ["--bonus", "sqrt", "--counts", counts]
        return [
            f"{algorithm}_sofe.py", "--env-id", MAZE, "--goal", *bonus, GOAL_ARMS[arm][0],
            *flags, "--max-steps", str(limit), "--total-timesteps", str(steps),
        ]  # fmt: skip

    return jobs_of(runs, line_of)


def file_name(size: str, algorithm: str, counts: str, view: str) -> str:
    """Name of the CSV file and of the figure of one choice, without the ending."""
    name = ("" if size == "small" else f"{size}-") + f"sparse_{algorithm}"
    name += "_global" if counts == "global" else ""
    return name + ("" if view == "full" else f"_view{view}")


def last_returns(path: Path) -> tuple[float, dict[str, np.ndarray]]:
    """Of a CSV file of curves: steps, and arm -> (seeds,) mean return in their last tenth."""
    edges, curves = read_curves(path, "return")
    return edges[-1], {arm: last_tenth(edges, curve) for (_, arm), curve in curves.items()}


def draw_bars(
    size: str, view: str, folder: Path, path: Path, steps: int, seeds: int, caption: str
) -> None:
    """Draw what all algorithms reach that a folder has a CSV file of, a panel for each counts.

    A file of another number of steps or seeds is left out. What the bars are is put before the
    caption.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    both, few = CHOICES["counts"], seeds <= FEW
    figure, axes = plt.subplots(1, len(both), figsize=(9, 4), sharey=True, layout="constrained")
    for ax, counts in zip(axes, both, strict=True):
        for place, algorithm in enumerate(CHOICES["algorithm"]):
            file = folder / f"{file_name(size, algorithm, counts, view)}.csv"
            trained, returns = last_returns(file) if file.exists() else (0, {})
            if trained != steps or any(len(values) != seeds for values in returns.values()):
                ax.text(place, 0.02, "not run", ha="center", fontsize=8, color="gray")
                continue
            for side, (arm, (_, _, color)) in zip((-0.27, 0, 0.27), GOAL_ARMS.items(), strict=True):
                middle, low, high = (float(x[0]) for x in iqm_interval(returns[arm][:, None]))
                at, error = place + side, [[max(0.0, middle - low)], [max(0.0, high - middle)]]
                ax.bar(at, middle, 0.25, yerr=None if few else error, color=color, capsize=3)
                if few:
                    ax.scatter([at] * len(returns[arm]), returns[arm], s=8, color="k", zorder=3)
                top = returns[arm].max() if few else high
                ax.text(at, top + 0.03, f"{middle:.2f}", ha="center", fontsize=7)
        ax.set(title=f"{counts} counts", ylim=(0, 1.12), xlim=(-0.5, 3.5))
        ax.set_xticks(range(4), [LABELS[algorithm] for algorithm in CHOICES["algorithm"]])
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for _, _, color in GOAL_ARMS.values()]
    labels = [label for _, label, _ in GOAL_ARMS.values()]
    figure.legend(handles, labels, loc="outside upper center", ncols=3)
    axes[0].set_ylabel("return of an episode")
    of_few = "Bars: mean of the seeds; dots: each of them."
    of_many = "Interquartile mean of the seeds and its 95% bootstrap interval."
    caption = f"{of_few if few else of_many} {caption}"
    figure.supxlabel("\n".join(textwrap.wrap(caption, 130)), fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main():
    args = parse_size(__doc__, draw=True, **CHOICES)
    _, steps, seeds, limit = SIZES[args.size]
    seeds = args.seeds or seeds
    runs = names(args.algorithm, args.counts, args.view, seeds, args.size)
    # A bin must hold an episode of full length of each env, else only those at the goal end in it.
    bins = 4 if args.size == "smoke" else 20
    name = file_name(args.size, args.algorithm, args.counts, args.view)
    lines_of = jobs(args.algorithm, args.view, args.size, runs)
    how = {"panel": "counts", "column": "return", "evals": ("greedy_return", "sampled_return")}
    edges, curves, picture = curves_of(args, name, lines_of, runs, steps, bins, **how)
    sees = "sees the maze" if args.view == "full" else f"sees {args.view} x {args.view} cells"
    scale = SCALES.get(args.algorithm, 1)
    weights = f"beta {BETA * scale:g}, goal worth {scale}"
    if args.size == "small" and args.algorithm != "dqn":
        flags = SMALL_HERE[args.algorithm]
        weights += f", entropy weight {flags[flags.index('--ent-coef') + 1]}"
    caption = (
        f"{LABELS[args.algorithm]}, {MAZE} with a goal, sqrt bonus, {weights}, {sees}, "
        f"{setting(args.size, seeds, steps)}. {command_of('fig_sparse.py', args, **CHOICES)}"
    )
    lines = {"random walk": random_walk_success(limit)}
    style = {"title": "Maze 2 with a goal, {} counts", "ylabel": "return of an episode"}
    draw_curves(picture, edges, curves, lines, caption, GOAL_ARMS, **style)
    print_last(edges, curves, "return")
    bars = picture.with_name(f"{file_name(args.size, 'bars', 'episodic', args.view)}.png")
    results = RUNS if args.size == "smoke" or args.seeds else RESULTS
    about = (
        f"{MAZE} with a goal, sqrt bonus, beta {BETA} of the goal's worth, {sees}. Last tenth of "
        f"training. {setting(args.size, seeds, steps)}. "
        f"python paper/fig_sparse.py --{args.size}, with each --algorithm and --counts"
    )
    draw_bars(args.size, args.view, results, bars, steps, seeds, about)
    print(f"wrote {picture} and {bars}")


if __name__ == "__main__":
    main()
