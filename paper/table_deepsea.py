"""DeepSea with the sqrt bonus and global counts, with and without SOFE. [SOFE tab:deepsea]

    python paper/table_deepsea.py --small --algorithm ppo      # or a2c, dqn, ppo_lstm

Sizes 10 and 20, the arms differ in --augment alone, one setting of each algorithm for all sizes; a
rollout is one episode of each env. Writes paper/results/table_deepsea_ALGORITHM.csv: the greedy
return at the end, and the training episodes after which an evaluation first earned 0.95 or more.
"""

import numpy as np
from experiments import RESULTS, RUNS, launch, parse_size, read, write_csv

ARMS = {"sofe": "--augment", "plain": "--no-augment"}
ALGORITHMS = ("ppo", "a2c", "dqn", "ppo_lstm")
SIZES = {  # sizes; episodes (of all sizes or each) and seeds of each algorithm
    "smoke": ((4,), dict(ppo=64, a2c=64, dqn=128, ppo_lstm=64), dict.fromkeys(ALGORITHMS, 1)),
    "small": (
        (10, 20),
        dict(ppo=20_000, a2c=10_000, dqn={10: 6_000, 20: 12_000}, ppo_lstm=10_000),
        dict(ppo=5, a2c=5, dqn=5, ppo_lstm=3),
    ),
    "paper": (
        (10, 14, 20, 24, 30),
        dict.fromkeys(ALGORITHMS, 100_000),
        dict.fromkeys(ALGORITHMS, 6),
    ),
}


def flags(size: str, deepsea_size: int, episodes: int, algorithm: str = "ppo") -> list[str]:
    """The DeepSea setting of a script, the same for all sizes."""
    n, every = deepsea_size, 4 if size == "smoke" else 500 if algorithm == "dqn" else 1_000
    ppo = ["--num-envs", "32", "--num-steps", str(n), "--update-epochs", "4"]
    ppo += ["--ent-coef", "0.02", "--beta", "0.3", "--anneal-beta"]
    own = {
        "ppo": [*ppo, "--minibatch-size", str(16 * n)],
        "ppo_lstm": [*ppo, "--num-minibatches", "2", "--lstm-size", "64"],
        "a2c": [
            *["--num-steps", str(n), "--norm-adv", "--gae-lambda", "0.95", "--log-every", "10"],
            *["--ent-coef", "0.02", "--beta", "0.3", "--anneal-beta"],
        ],
        "dqn": [
            *["--learning-rate", "0.001", "--minibatch-size", "128", "--train-frequency", "1"],
            *["--gradient-steps", "1", "--target-interval", "16", "--tau", "0.02"],
            *["--learning-starts", "256" if size == "smoke" else "2000", "--log-every", "50"],
            *["--exploration-fraction", "0.05", "--buffer-size", "200000", "--beta", "0.3"],
        ],
    }
    return [
        *["--env-id", "DeepSea-v0", "--deepsea-size", str(n), "--counts", "global"],
        *["--network", "mlp", "--embedding-dim", "128", *own[algorithm]],
        *["--eval-episodes", "2", "--eval-every", str(every * n)],
        *["--total-timesteps", str(episodes * n)],
    ]


def result(name: str, deepsea_size: int, runs=RUNS) -> tuple[float, int | None]:
    """Greedy return at the end, and training episodes to the first evaluation of 0.95 or more."""
    evals = read(name, "evals.csv", runs)
    solved = evals["step"][evals["greedy_return"] >= 0.95]
    return evals["greedy_return"][-1], int(solved[0] // deepsea_size) if len(solved) else None


def main():
    args = parse_size(__doc__, algorithm=ALGORITHMS)
    sizes, episodes, seeds = SIZES[args.size]
    seeds = args.seeds or seeds[args.algorithm]
    prefix = "" if args.size == "small" else f"{args.size}-"
    names = {
        (size, arm, seed): f"{prefix}deepsea{size}-{args.algorithm}-{arm}-seed{seed}"
        for size in sizes
        for arm in ARMS
        for seed in range(1, seeds + 1)
    }
    budget = episodes[args.algorithm]
    budget = budget if isinstance(budget, dict) else dict.fromkeys(sizes, budget)
    jobs = {
        name: [
            *[f"{args.algorithm}_sofe.py", "--seed", str(seed), ARMS[arm]],
            *flags(args.size, size, budget[size], args.algorithm),
        ]
        for (size, arm, seed), name in sorted(names.items(), key=lambda item: item[0][2])
    }
    launch(jobs, args.jobs)
    rows = []
    for (size, arm, seed), name in names.items():
        greedy, solved = result(name, size)
        rows.append([args.algorithm, arm, size, seed, f"{greedy:.4f}", solved])
    header = ["algorithm", "arm", "size", "seed", "greedy_return", "episodes_to_0.95"]
    folder = RUNS if args.size == "smoke" or args.seeds else RESULTS
    path = write_csv(f"{prefix}table_deepsea_{args.algorithm}", header, rows, folder)
    print("| DeepSea | arm | greedy return | seeds at 0.95 | episodes to 0.95 |")
    print("|---|---|---|---|---|")
    for size in sizes:
        for arm in ARMS:
            chosen = [row for row in rows if row[1:3] == [arm, size]]
            greedy = np.array([float(row[4]) for row in chosen])
            solved = ", ".join("never" if row[5] is None else f"{row[5]:,}" for row in chosen)
            text = f"{greedy.mean():.2f} ± {greedy.std():.2f} | {(greedy >= 0.95).sum()} of {seeds}"
            print(f"| {size} | {arm} | {text} | {solved} |")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
