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

from experiments import (
    ARMS,
    SMALL,
    SMOKE,
    draw_curves,
    launch,
    parse_size,
    print_last,
    training_curves,
    write_curves,
)

from common.mazes import full_knowledge_coverage, random_walk_coverage

MAZE = "Maze1-v0"
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


def main():
    args = parse_size(__doc__, algorithm=("ppo", "a2c", "dqn"))
    _, steps, seeds, limit = SIZES[args.size]
    seeds = args.seeds or seeds
    prefix = "" if args.size == "small" else f"{args.size}-"
    bonuses = ("sqrt",) if args.size != "paper" and args.algorithm != "ppo" else BONUSES
    runs = names(args.algorithm, bonuses, seeds, prefix)
    launch(jobs(args.algorithm, args.size, steps, limit, runs), args.jobs)
    bins = 4 if args.size == "smoke" else 15  # each holds the ends of some episodes
    edges, curves = training_curves(runs, steps, bins)
    name = f"{prefix}coverage_{args.algorithm}_maze1"
    committed = args.size != "smoke" and not args.seeds
    path, picture = write_curves(name, edges, curves, committed)
    network = "paper's network" if args.size == "paper" else "16 channels, 128 features"
    caption = (
        f"{args.algorithm.upper()}, {MAZE}, reward-free, episodic counts, {network}, "
        f"{seeds} seeds, {steps:,} steps. IQM and 95% bootstrap interval (of 3 seeds: mean and "
        f"range); arms differ in --augment. "
        f"python paper/fig_coverage.py --{args.size} --algorithm {args.algorithm}"
    )
    lines = {
        "full knowledge": full_knowledge_coverage(MAZE, limit)[-1],
        "random walk": random_walk_coverage(MAZE, limit)[-1],
    }
    draw_curves(picture, edges, curves, lines, caption)
    print_last(curves)
    print(f"wrote {path} and {picture}")


if __name__ == "__main__":
    main()
