"""Reward-free exploration of a maze, with and without SOFE. [SOFE app:reward-free]

    python paper/fig_coverage.py --small      # what is committed: half an hour on two cores
    python paper/fig_coverage.py --small --algorithm a2c     # or dqn, ppo_lstm; the default is ppo
    python paper/fig_coverage.py --small --maze 3 --counts global      # 1 and episodic by default
    python paper/fig_coverage.py --paper      # the paper's network and hyperparameters, for a GPU

PPO with two bonuses, sqrt and salesman, the others with sqrt in the small setting and with both in
the paper's; --bonuses sqrt or both decides otherwise. The arms differ in --augment alone.

With episodic counts, drawn is the share of the reachable cells that an episode visits, over
training; the grey lines are a random walk and an explorer that knows the map and always walks to
the nearest unvisited cell. With global counts an episode is not paid for cells that others have
seen, so its own coverage says little: drawn is the share of the reachable cells that the run has
visited by then, in all episodes of all its environments; the grey line is what random walks of as
many steps have seen in the end. Writes paper/results/coverage_ALGORITHM_mazeN.csv, the coverage of
the trained agent's episodes, without learning, as ..._eval.csv, and the figure of that name in
paper/figures/; _global and the choice of bonuses are added to the name.
"""

import numpy as np
from experiments import (
    ARMS,
    LABELS,
    PAPER,
    SMALL,
    SMOKE,
    command_of,
    curves_of,
    draw_curves,
    jobs_of,
    parse_size,
    print_last,
    setting,
)

from common.mazes import ACTIONS, MazeVecEnv, full_knowledge_coverage, random_walk_coverage

CHOICES = {
    "algorithm": ("ppo", "a2c", "dqn", "ppo_lstm"),
    "maze": ("1", "2", "3"),
    "counts": ("episodic", "global"),
    "bonuses": ("usual", "sqrt", "both"),
}
BONUSES = ("sqrt", "salesman")
SIZES = {  # flags of each algorithm, steps, seeds, length of an episode
    "smoke": (SMOKE, 80, 1, 8),
    "small": (SMALL, 500_000, 3, 1000),
    "paper": (PAPER, 10_000_000, 6, 1000),
}


def names(algorithm: str, maze: str, counts: str, bonuses: tuple[str, ...], seeds: int, size: str):
    """Names of the runs: (bonus, arm) -> a list, one of each seed."""
    stem = "" if size == "small" else f"{size}-"
    stem += f"coverage-{algorithm}-Maze{maze}-v0" + ("-global" if counts == "global" else "")
    return {
        (bonus, arm): [f"{stem}-{bonus}-{arm}-seed{seed}" for seed in range(1, seeds + 1)]
        for bonus in bonuses
        for arm in ARMS
    }


def jobs(algorithm: str, maze: str, counts: str, size: str, runs) -> dict[str, list[str]]:
    """Names and command lines of the runs."""
    flags, steps, _, limit = SIZES[size]

    def line_of(bonus: str, arm: str) -> list[str]:
        return [
            f"{algorithm}_sofe.py", "--env-id", f"Maze{maze}-v0", "--bonus", bonus, ARMS[arm][0],
            "--counts", counts, "--ext-coef", "0", *flags[algorithm],
            "--max-steps", str(limit), "--total-timesteps", str(steps),
        ]  # fmt: skip

    return jobs_of(runs, line_of)


def random_walks_coverage(maze: str, steps: int, limit: int) -> float:
    """Share of the reachable cells that random walks of `limit` steps see together."""
    envs = MazeVecEnv(max(1, steps // limit), maze, max_steps=limit + 1, engine="numpy")
    envs.reset()
    random = np.random.default_rng(1)
    for _ in range(limit):
        envs.advance(random.integers(len(ACTIONS), size=envs.num_envs))
    return envs.visited.any(0).sum() / envs.reachable.sum()


def main():
    args = parse_size(__doc__, draw=True, **CHOICES)
    _, steps, seeds, limit = SIZES[args.size]
    seeds = args.seeds or seeds
    both = args.bonuses == "both" or args.algorithm == "ppo" or args.size == "paper"
    bonuses = BONUSES if both and args.bonuses != "sqrt" else BONUSES[:1]
    which = (args.algorithm, args.maze, args.counts)
    runs = names(*which, bonuses, seeds, args.size)
    name = "" if args.size == "small" else f"{args.size}-"
    name += f"coverage_{args.algorithm}_maze{args.maze}"
    name += "_global" if args.counts == "global" else ""
    name += "" if args.bonuses == "usual" else f"_{args.bonuses}"
    maze, smoke = f"Maze{args.maze}-v0", args.size == "smoke"
    if args.counts == "global":
        column, bins = "global_coverage", 4 if smoke else 25
        # It never falls: the last value in a bin is what was reached by then.
        how = {"file": "updates.csv", "summary": lambda values: values[-1]}
        lines = {"random walks, in the end": random_walks_coverage(maze, steps, limit)}
        style = {"ylabel": "coverage of the run so far", "legend": "best"}
    else:
        column, style, how = "coverage", {}, {}
        bins = 4 if smoke else 15  # each holds the ends of some episodes
        lines = {
            "full knowledge": full_knowledge_coverage(maze, limit)[-1],
            "random walk": random_walk_coverage(maze, limit)[-1],
        }
    how |= {"column": column, "evals": ("greedy_coverage", "sampled_coverage")}
    lines_of = jobs(*which, args.size, runs)
    edges, curves, picture = curves_of(args, name, lines_of, runs, steps, bins, **how)
    caption = (
        f"{LABELS[args.algorithm]}, {maze}, reward-free, {args.counts} counts, "
        f"{setting(args.size, seeds, steps)}; arms differ in --augment. "
        f"{command_of('fig_coverage.py', args, **CHOICES)}"
    )
    draw_curves(picture, edges, curves, lines, caption, **style)
    print_last(edges, curves, column)
    print(f"wrote {picture}")


if __name__ == "__main__":
    main()
