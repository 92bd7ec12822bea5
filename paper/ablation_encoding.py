"""How should the counts enter the network? Four encodings of the same table. [not in the paper]

    python paper/ablation_encoding.py --small                     # Maze 1
    python paper/ablation_encoding.py --small --task deepsea14

SOFE with the sqrt bonus, everything else alike: Maze 1 reward-free with episodic counts, measured
by the coverage of the last 100,000 of 300,000 steps, and DeepSea-14 with global counts, measured by
the episodes until the greedy policy earns 0.95. Writes paper/results/ablation_encoding_TASK.csv.

The scripts have the winner built in, so a run of this file replaces `augment` of ppo_sofe.py:

    python paper/ablation_encoding.py worker log [flags of ppo_sofe.py]
"""

import sys

import table_deepsea
from experiments import (
    RESULTS,
    RUNS,
    SMALL,
    SMOKE,
    launch,
    parse_size,
    read,
    write_csv,
    write_records,
)

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
TASKS = ("maze1", f"deepsea{DEEPSEA_SIZE}")


def train_with(encoding: str, flags: list[str]) -> None:
    """Train ppo_sofe.py with another encoding of the counts."""

    def augment(counts, tables, args):
        phi = ENCODINGS[encoding](counts).unsqueeze(1)[tables]
        return phi / (phi[0].numel() ** 0.5 if args.network == "mlp" else 1)

    ppo_sofe.augment = augment
    ppo_sofe.main(ppo_sofe.tyro.cli(ppo_sofe.Args, args=flags))


def jobs(task: str, size: str, seeds: int, prefix: str) -> dict[str, list[str]]:
    """Names and command lines of the runs."""
    maze_flags, steps, episodes, _ = SIZES[size]
    maze = ["--env-id", "Maze1-v0", "--ext-coef", "0", *maze_flags, "--total-timesteps", str(steps)]
    flags = maze if task == "maze1" else table_deepsea.flags(size, DEEPSEA_SIZE, episodes)
    return {
        f"{prefix}encoding-{task}-{encoding}-seed{seed}": [
            "paper/ablation_encoding.py", "worker", encoding,
            "--bonus", "sqrt", "--augment", "--seed", str(seed), *flags,
        ]
        for seed in range(1, seeds + 1)
        for encoding in ENCODINGS
    }  # fmt: skip


def main():
    args = parse_size(__doc__, task=TASKS)
    _, steps, _, seeds = SIZES[args.size]
    seeds = args.seeds or seeds
    prefix = "" if args.size == "small" else f"{args.size}-"
    runs = jobs(args.task, args.size, seeds, prefix)
    launch(runs, args.jobs)
    rows = []
    for encoding in ENCODINGS:
        for seed in range(1, seeds + 1):
            name = f"{prefix}encoding-{args.task}-{encoding}-seed{seed}"
            if args.task == "maze1":
                episodes = read(name)
                last = episodes["coverage"][episodes["step"] > steps * 2 / 3]
                rows.append([encoding, seed, f"{last.mean():.4f}"])
            else:
                greedy, _, solved = table_deepsea.result(name, DEEPSEA_SIZE)
                rows.append([encoding, seed, f"{greedy:.4f}", solved])
    value = "coverage" if args.task == "maze1" else "greedy_return"
    header = ["encoding", "seed", value, "episodes_to_0.95"][: len(rows[0])]
    folder = RUNS if args.size == "smoke" or args.seeds else RESULTS
    path = write_csv(f"{prefix}ablation_encoding_{args.task}", header, rows, folder)
    write_records(path.stem, runs, folder)
    print(f"| encoding | {value} |" + " episodes to 0.95 |" * (len(header) - 3))
    print("|---" * (len(header) - 1) + "|")
    for encoding in ENCODINGS:
        chosen = [row for row in rows if row[0] == encoding]
        cells = [encoding, table_deepsea.summary([float(row[2]) for row in chosen])]
        if args.task == "deepsea14":
            cells += [", ".join("never" if row[3] is None else f"{row[3]:,}" for row in chosen)]
        print(f"| {' | '.join(cells)} |")
    print(f"wrote {path}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        train_with(sys.argv[2], sys.argv[3:])
    else:
        main()
