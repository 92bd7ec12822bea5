"""E3B in MiniHack and Procgen, with and without SOFE on its ellipsoid. [SOFE fig:e3b_exps]

    python paper/fig_e3b.py --small                      # MultiRoom-N4: four arms, a CPU
    python paper/fig_e3b.py --small --shown diagonal     # three of them, in half of the time
    python paper/fig_e3b.py --small --task room          # Room-5x5, solved without a bonus
    python paper/fig_e3b.py --small --task procgen       # Procgen-Maze
    python paper/fig_e3b.py --paper                      # MultiRoom-N6, published sizes, a GPU

The arms: no bonus, E3B, E3B with the diagonal of the ellipsoid shown to the agent, E3B with all of
it, and in --paper ICM and RND; they differ in --bonus and --augment alone. Drawn is the share of
the episodes of training that reach the goal; the grey line is a policy that acts at random, on the
levels of the evaluation. Writes paper/results/e3b_TASK.csv, e3b_TASK_eval.csv, the evaluation at
the end on levels that are not trained on, and the figure paper/figures/e3b_TASK.png; --shown
diagonal adds _diagonal to the names.

In --small the bonus weighs 0.02 instead of 1, or an episode of 120 steps would earn more by it than
by the goal, which ends it; the weights of entropy and value loss go with it. This was found on seed
101, with E3B and without SOFE, in MultiRoom; Procgen has the same and the shallow network.
"""

import numpy as np
from experiments import (
    command_of,
    curves_of,
    draw_curves,
    jobs_of,
    parse_size,
    print_last,
)

from common.minihack import MiniHackVecEnv
from common.procgen import ProcgenVecEnv

ARMS = {  # flags, label and color
    "none": (["--bonus", "none"], "no bonus", "black"),
    "e3b": (["--bonus", "e3b"], "E3B", "tab:blue"),
    "diagonal": (["--bonus", "e3b", "--augment", "diagonal"], "E3B, diagonal shown", "tab:orange"),
    "full": (["--bonus", "e3b", "--augment", "full"], "E3B, ellipsoid shown", "tab:red"),
    "icm": (["--bonus", "icm"], "ICM", "tab:green"),
    "rnd": (["--bonus", "rnd"], "RND", "tab:purple"),
}
CPU = [  # small networks, many updates, and a bonus that an episode does not live on
    *["--num-envs", "16", "--num-steps", "20", "--hidden-dim", "128", "--embedding-dim", "64"],
    *["--phi-dim", "128", "--phi-channels", "4", "--learning-rate", "0.0005", "--beta", "0.02"],
    *["--ent-coef", "0.0004", "--vf-coef", "0.1", "--num-workers", "0", "--eval-episodes", "100"],
    *["--checkpoint-every", "50000"],
]
MINIHACK = [*CPU, "--glyph-dim", "16", "--crop-only"]
SMOKE = [
    *["--num-envs", "2", "--num-steps", "8", "--hidden-dim", "8", "--glyph-dim", "4"],
    *["--embedding-dim", "32", "--phi-dim", "8", "--num-workers", "0"],
    *["--eval-episodes", "1"],
]
COLUMNS = ("greedy_success", "sampled_success", "greedy_length", "sampled_length")
TASKS = {  # environment; flags, steps, seeds and arms of --small; the environment of --paper
    "multiroom": (
        "MiniHack-MultiRoom-N4-v0",
        (MINIHACK, 300_000, 3, ("none", "e3b", "diagonal", "full")),
        "MiniHack-MultiRoom-N6-v0",
    ),
    "room": (
        "MiniHack-Room-5x5-v0",
        (MINIHACK, 50_000, 3, ("none",)),
        "MiniHack-Room-5x5-v0",
    ),
    "procgen": (
        "procgen-maze",
        ([*CPU, "--shallow"], 300_000, 3, ("none", "e3b", "diagonal")),
        "procgen-maze",
    ),
}


CHOICES = {"task": tuple(TASKS), "shown": ("both", "diagonal")}  # what SOFE shows, in the arms


def settings(task: str, size: str):
    """Environment, flags, steps, seeds and names of the arms of a size."""
    env_id, (flags, steps, seeds, arms), paper_env_id = TASKS[task]
    if size == "smoke":
        crop = [] if task == "procgen" else ["--crop-only"]
        return env_id, [*SMOKE, *crop], 160, 1, arms
    if size == "paper":
        hidden = ["--hidden-dim", "256"] if task == "procgen" else []
        return paper_env_id, hidden, 100_000_000, 6, tuple(ARMS)
    return env_id, flags, steps, seeds, arms


def random_policy_success(env_id: str, episodes: int) -> float:
    """Share of episodes that reach the goal with actions drawn uniformly."""
    N, generator = min(episodes, 16), np.random.default_rng(0)
    if env_id == "procgen-maze":
        envs = ProcgenVecEnv("maze", N, split="eval")
    else:
        envs = MiniHackVecEnv(env_id, N, 0, split="eval")
    envs.reset(seed=0)
    successes = [[] for _ in range(N)]  # as many of each env: short episodes count no more
    while min(map(len, successes)) < episodes // N:
        *_, info = envs.step(generator.integers(envs.single_action_space.n, size=N))
        if "final_info" in info:
            for env in np.flatnonzero(info["_final_info"]):
                successes[env].append(info["final_info"]["episode"]["success"][env])
    envs.close()
    return float(np.mean([of_env[: episodes // N] for of_env in successes]))


def main():
    args = parse_size(__doc__, draw=True, **CHOICES)
    env_id, flags, steps, seeds, arms = settings(args.task, args.size)
    arms = [arm for arm in arms if arm != "full" or args.shown == "both"]
    seeds = args.seeds or seeds
    prefix = "" if args.size == "small" else f"{args.size}-"
    names = {
        (env_id, arm): [f"{prefix}e3b-{env_id}-{arm}-seed{seed}" for seed in range(1, seeds + 1)]
        for arm in arms
    }

    def line_of(env_id: str, arm: str) -> list[str]:
        script = ["impala_e3b_sofe.py", "--env-id", env_id, *ARMS[arm][0]]
        return [*script, *flags, "--total-timesteps", str(steps)]

    name = f"{prefix}e3b_{args.task}" + ("_diagonal" if args.shown == "diagonal" else "")
    how = {"panel": "env", "column": "success", "evals": COLUMNS}
    jobs, bins = jobs_of(names, line_of), 4 if args.size == "smoke" else 20
    edges, curves, picture = curves_of(args, name, jobs, names, steps, bins, **how)
    sizes = "published sizes" if args.size == "paper" else f"{steps:,} steps, small networks"
    caption = (
        f"IMPALA, {env_id}, {sizes}, {seeds} seeds. {command_of('fig_e3b.py', args, **CHOICES)}"
    )
    lines = {"random policy": random_policy_success(env_id, 16 if args.size == "smoke" else 400)}
    ylabel = "share of episodes that reach the goal"
    legend = "lower right" if args.task == "room" else "upper left"
    draw_curves(picture, edges, curves, lines, caption, ARMS, "{}", ylabel, legend)
    print_last(edges, curves, "success")
    print(f"random policy: success {lines['random policy']:.3f}")
    print(f"wrote {picture}")


if __name__ == "__main__":
    main()
