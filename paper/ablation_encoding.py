"""How should the counts enter the network? Four encodings of the same table. [not in the paper]

    python paper/ablation_encoding.py --small

SOFE with the sqrt bonus, everything else alike: Maze 1 reward-free with episodic counts, measured
by the coverage of the last 100,000 of 300,000 steps, and DeepSea-14 with global counts, measured by
the episodes until the greedy policy earns 0.95. Writes paper/results/ablation_encoding.csv.

The scripts have the winner built in, so a run of this file replaces `augment` of ppo_sofe.py:

    python paper/ablation_encoding.py worker log [flags of ppo_sofe.py]
"""

import sys

import numpy as np
import table_deepsea
from experiments import RESULTS, RUNS, SMALL, SMOKE, launch, parse_size, read, write_csv

import ppo_sofe

ENCODINGS = {
    "isqrt": lambda counts: (counts + 1).rsqrt(),
    "log": lambda counts: counts.float().log1p(),
    "max": lambda counts: counts / counts.amax((1, 2), keepdim=True).clamp(min=1),
    "raw": lambda counts: counts.float(),
}
SIZES = {  # flags for the maze, steps in the maze, episodes in DeepSea, seeds
    "smoke": ([*SMOKE["ppo"], "--max-steps", "8"], 64, 4, 1),
    "small": (SMALL["ppo"], 300_000, 20_000, 3),
    "paper": ([], 10_000_000, 100_000, 6),
}
DEEPSEA_SIZE = 14


def train_with(encoding: str, flags: list[str]) -> None:
    """Train ppo_sofe.py with another encoding of the counts."""

    def augment(counts, tables, args):
        phi = ENCODINGS[encoding](counts).unsqueeze(1)[tables]
        return phi / (phi[0].numel() ** 0.5 if args.network == "mlp" else 1)

    ppo_sofe.augment = augment
    ppo_sofe.main(ppo_sofe.tyro.cli(ppo_sofe.Args, args=flags))


def jobs(size: str, seeds: int, prefix: str) -> dict[str, list[str]]:
    flags, steps, episodes, _ = SIZES[size]
    maze = ["--env-id", "Maze1-v0", "--ext-coef", "0", *flags, "--total-timesteps", str(steps)]
    deepsea = table_deepsea.flags(size, DEEPSEA_SIZE, episodes)
    return {
        f"{prefix}encoding-{place}-{encoding}-seed{seed}": [
            "paper/ablation_encoding.py", "worker", encoding,
            "--bonus", "sqrt", "--augment", "--seed", str(seed), *line,
        ]
        for seed in range(1, seeds + 1)
        for place, line in (("maze1", maze), ("deepsea14", deepsea))
        for encoding in ENCODINGS
    }  # fmt: skip


def main():
    args = parse_size(__doc__)
    _, steps, _, seeds = SIZES[args.size]
    seeds = args.seeds or seeds
    prefix = "" if args.size == "small" else f"{args.size}-"
    launch(jobs(args.size, seeds, prefix), args.jobs)
    rows = []
    for encoding in ENCODINGS:
        for seed in range(1, seeds + 1):
            maze = read(f"{prefix}encoding-maze1-{encoding}-seed{seed}")
            last = maze["coverage"][maze["step"] > steps * 2 / 3]
            name = f"{prefix}encoding-deepsea14-{encoding}-seed{seed}"
            greedy, _, solved = table_deepsea.result(name, DEEPSEA_SIZE)
            rows.append([encoding, seed, f"{last.mean():.4f}", f"{greedy:.4f}", solved])
    header = ["encoding", "seed", "maze1_coverage", "deepsea14_greedy_return", "deepsea14_episodes"]
    folder = RUNS if args.size == "smoke" or args.seeds else RESULTS
    path = write_csv(f"{prefix}ablation_encoding", header, rows, folder)
    print("| encoding | Maze 1 coverage | DeepSea-14 greedy return | episodes to 0.95 |")
    print("|---|---|---|---|")
    for encoding in ENCODINGS:
        values = [row for row in rows if row[0] == encoding]
        coverage = np.array([float(row[2]) for row in values])
        greedy = np.mean([float(row[3]) for row in values])
        solved = ", ".join("never" if row[4] is None else f"{row[4]:,}" for row in values)
        text = f"{coverage.mean():.3f} ± {coverage.std():.3f} | {greedy:.2f} | {solved}"
        print(f"| {encoding} | {text} |")
    print(f"wrote {path}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        train_with(sys.argv[2], sys.argv[3:])
    else:
        main()
