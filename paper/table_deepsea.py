"""DeepSea with the sqrt bonus and global counts, PPO with and without SOFE. [SOFE tab:deepsea]

    python paper/table_deepsea.py --small

Sizes 10 and 20, the arms differ in --augment alone, one setting for all sizes: a rollout is one
episode of each of 32 envs. Writes paper/results/table_deepsea.csv: the greedy return at the end,
and the training episodes after which an evaluation first earned 0.95 or more.
"""

import numpy as np
from experiments import RESULTS, RUNS, launch, parse_size, read, write_csv

ARMS = {"sofe": "--augment", "plain": "--no-augment"}
ENVS = 32
SIZES = {  # sizes, episodes, seeds
    "smoke": ((4,), 64, 1),
    "small": ((10, 20), 20_000, 5),
    "paper": ((10, 14, 20, 24, 30), 100_000, 6),
}


def flags(size: str, deepsea_size: int, episodes: int) -> list[str]:
    """The DeepSea setting of ppo_sofe.py, the same for all sizes."""
    every = 4 if size == "smoke" else 1_000
    return [
        *["--env-id", "DeepSea-v0", "--deepsea-size", str(deepsea_size), "--counts", "global"],
        *["--network", "mlp", "--embedding-dim", "128"],
        *["--num-envs", str(ENVS), "--num-steps", str(deepsea_size), "--update-epochs", "4"],
        *["--minibatch-size", str(ENVS * deepsea_size // 2), "--ent-coef", "0.02"],
        *["--beta", "0.3", "--anneal-beta"],
        *["--eval-episodes", "2", "--eval-every", str(every * deepsea_size)],
        *["--total-timesteps", str(episodes * deepsea_size)],
    ]


def result(name: str, deepsea_size: int, runs=RUNS) -> tuple[float, int | None]:
    """Greedy return at the end, and training episodes to the first evaluation of 0.95 or more."""
    evals = read(name, "evals.csv", runs)
    solved = evals["step"][evals["greedy_return"] >= 0.95]
    return evals["greedy_return"][-1], int(solved[0] // deepsea_size) if len(solved) else None


def main():
    args = parse_size(__doc__)
    sizes, episodes, seeds = SIZES[args.size]
    seeds = args.seeds or seeds
    prefix = "" if args.size == "small" else f"{args.size}-"
    names = {
        (size, arm, seed): f"{prefix}deepsea{size}-ppo-{arm}-seed{seed}"
        for size in sizes
        for arm in ARMS
        for seed in range(1, seeds + 1)
    }
    jobs = {
        name: ["ppo_sofe.py", "--seed", str(seed), ARMS[arm], *flags(args.size, size, episodes)]
        for (size, arm, seed), name in names.items()
    }
    launch(jobs, args.jobs)
    rows = []
    for (size, arm, seed), name in names.items():
        greedy, solved = result(name, size)
        rows.append(["ppo", arm, size, seed, f"{greedy:.4f}", solved])
    header = ["algorithm", "arm", "size", "seed", "greedy_return", "episodes_to_0.95"]
    folder = RUNS if args.size == "smoke" or args.seeds else RESULTS
    path = write_csv(f"{prefix}table_deepsea", header, rows, folder)
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
