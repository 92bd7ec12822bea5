"""Reward-free exploration of the 3D map by SAC, with and without SOFE. [SOFE fig:sac_godot]

    python paper/fig_godot.py --small      # two to three hours on two cores
    python paper/fig_godot.py --paper      # the paper's network, for a GPU

Episodic counts, two bonuses, sqrt and salesman; the arms differ in --augment alone. Drawn is the
share of the reachable bins that an episode visits, over training; the grey line is a policy that
acts at random. Writes paper/results/coverage_sac_godot.csv, the coverage of the trained agent's
episodes as ..._eval.csv, and the figure coverage_sac_godot.png in paper/figures/.
"""

import numpy as np
from experiments import (
    ARMS,
    command_of,
    curves_of,
    draw_curves,
    jobs_of,
    parse_size,
    print_last,
)

from common.godot import GodotVecEnv
from common.runs import FirstEpisodes

BONUSES = ("sqrt", "salesman")
SIZES = {  # flags, steps, seeds, length of an episode
    "smoke": (
        [
            *["--num-envs", "2", "--minibatch-size", "4", "--learning-starts", "8"],
            *["--channels", "4", "--embedding-dim", "8", "--hidden-dim", "8", "--log-every", "2"],
            *["--buffer-size", "64", "--eval-episodes", "1"],
        ],
        80,
        1,
        8,
    ),
    "small": (
        [
            *["--num-envs", "16", "--minibatch-size", "64", "--learning-starts", "2000"],
            *["--gradient-steps", "4", "--learning-rate", "0.001", "--gamma", "0.97"],
            *["--channels", "16", "--embedding-dim", "64", "--hidden-dim", "128"],
            *["--buffer-size", "200000", "--init-alpha", "0.02"],
        ],
        200_000,
        3,
        1000,
    ),
    "paper": ([], 1_000_000, 6, 1000),
}


def random_policy_coverage(limit: int, episodes: int = 16) -> float:
    """Mean coverage of episodes with actions drawn uniformly."""
    envs, generator = GodotVecEnv(episodes, limit), np.random.default_rng(0)
    envs.reset(seed=0)
    first = FirstEpisodes(episodes, ("coverage",))
    while first.playing.any():
        actions = generator.uniform(-1, 1, (episodes, 3)).astype(np.float32)
        _, _, terminated, truncated, info = envs.step(actions)
        first.record(info, np.flatnonzero(terminated | truncated))
    envs.close()
    return first.results.mean()


def main():
    args = parse_size(__doc__, draw=True)
    flags, steps, seeds, limit = SIZES[args.size]
    seeds = args.seeds or seeds
    prefix = "" if args.size == "small" else f"{args.size}-"
    runs = {
        (bonus, arm): [f"{prefix}godot-{bonus}-{arm}-seed{seed}" for seed in range(1, seeds + 1)]
        for bonus in BONUSES
        for arm in ARMS
    }

    def line_of(bonus: str, arm: str) -> list[str]:
        return [
            "sac_sofe_godot.py", "--bonus", bonus, ARMS[arm][0], *flags,
            "--max-steps", str(limit), "--total-timesteps", str(steps),
        ]  # fmt: skip

    name, bins = f"{prefix}coverage_sac_godot", 4 if args.size == "smoke" else 10
    jobs, how = jobs_of(runs, line_of), {"evals": ("greedy_coverage", "sampled_coverage")}
    edges, curves, picture = curves_of(args, name, jobs, runs, steps, bins, **how)
    network = "paper's network" if args.size == "paper" else "small networks"
    caption = (
        f"SAC, 3D map, reward-free, episodic counts, {network}, {seeds} seeds, {steps:,} steps; "
        f"arms differ in --augment. "
        f"{command_of('fig_godot.py', args)}"
    )
    lines = {"random policy": random_policy_coverage(limit)}
    top = 0.3 if args.size == "small" else 1.05
    draw_curves(picture, edges, curves, lines, caption, top=top)
    print_last(edges, curves)
    print(f"wrote {picture}")


if __name__ == "__main__":
    main()
