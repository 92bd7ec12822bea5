"""State-entropy maximisation in Maze 2, with and without SOFE. [SOFE fig:sofe_smax]

    python paper/fig_smax.py --small      # PPO, 6 runs of 500,000 steps
    python paper/fig_smax.py --small --algorithm a2c     # or dqn, ppo_lstm
    python paper/fig_smax.py --paper      # the paper's network and hyperparameters, for a GPU

Reward-free, the S-Max bonus, whose Gaussian is fitted to the cells of the episode; the arms differ
in --augment alone, which shows its mean and deviation. The paper does not say which algorithm its
figure is of. Drawn is, as there, the share of the reachable cells that an episode visits, over
training; the grey lines are a random walk and an explorer that knows the map and always walks to
the nearest unvisited cell. Writes paper/results/smax_ALGORITHM.csv, the coverage of the trained
agent's episodes, without learning, as ..._eval.csv, and the figure of that name in paper/figures/.
"""

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

from common.mazes import full_knowledge_coverage, random_walk_coverage

MAZE = "Maze2-v0"
CHOICES = {"algorithm": ("ppo", "a2c", "dqn", "ppo_lstm")}
SIZES = {  # flags of each algorithm, steps, seeds, length of an episode
    "smoke": (SMOKE, 80, 1, 8),
    "small": (SMALL, 500_000, 3, 1000),
    "paper": (PAPER, 10_000_000, 6, 1000),
}


def main():
    args = parse_size(__doc__, draw=True, **CHOICES)
    algorithm = args.algorithm
    flags, steps, seeds, limit = SIZES[args.size]
    seeds = args.seeds or seeds
    prefix = "" if args.size == "small" else f"{args.size}-"
    runs = {
        (algorithm, arm): [
            f"{prefix}smax-{algorithm}-{MAZE}-{arm}-seed{seed}" for seed in range(1, seeds + 1)
        ]
        for arm in ARMS
    }

    def line_of(algorithm: str, arm: str) -> list[str]:
        return [
            f"{algorithm}_sofe.py", "--env-id", MAZE, "--bonus", "smax", ARMS[arm][0],
            "--ext-coef", "0", *flags[algorithm],
            "--max-steps", str(limit), "--total-timesteps", str(steps),
        ]  # fmt: skip

    name, bins = f"{prefix}smax_{algorithm}", 4 if args.size == "smoke" else 15
    jobs, how = jobs_of(runs, line_of), {"panel": "algorithm"}
    how |= {"evals": ("greedy_coverage", "sampled_coverage")}
    edges, curves, picture = curves_of(args, name, jobs, runs, steps, bins, **how)
    caption = (
        f"{LABELS[algorithm]}, {MAZE}, reward-free, {setting(args.size, seeds, steps)}; arms "
        f"differ in --augment. {command_of('fig_smax.py', args, **CHOICES)}"
    )
    lines = {
        "full knowledge": full_knowledge_coverage(MAZE, limit)[-1],
        "random walk": random_walk_coverage(MAZE, limit)[-1],
    }
    draw_curves(picture, edges, curves, lines, caption, title="S-Max bonus")
    print_last(edges, curves)
    print(f"wrote {picture}")


if __name__ == "__main__":
    main()
