"""DeepSea with the sqrt bonus and global counts, with and without SOFE. [SOFE tab:deepsea]

    python paper/table_deepsea.py --small --algorithm a2c             # or ppo, dqn, ppo_lstm
    python paper/table_deepsea.py --small --algorithm a2c --only 20   # the runs of one size

The arms differ in --augment alone, and an algorithm has one setting for all sizes, in which a
rollout, where there are rollouts, is one episode of each env. A run that is finished is evaluated
once more, on 10,000 or (--paper) 100,000 episodes, half of them greedy; all greedy ones are the
same, as DeepSea is deterministic. Writes paper/results/table_deepsea_ALGORITHM.csv: the mean return
of these episodes, and the training episodes after which an evaluation first earned 0.95 or more;
there is one every 1,000 episodes (DQN: 500). --only leaves the rows of the other sizes as they are,
which must be of the same setting by their records. Printed beside them are the numbers of the
paper's table, which ends at size 30, and "not run" for a size that has no rows.
"""

import csv
import json
import sys

import numpy as np
from experiments import (
    RESULTS,
    RUNS,
    arguments,
    launch,
    parse_size,
    read,
    run,
    write_csv,
    write_records,
)

ARMS = {"sofe": "--augment", "plain": "--no-augment"}
ALGORITHMS = ("ppo", "a2c", "dqn", "ppo_lstm")
DEEPSEAS = (10, 14, 20, 24, 30)
ALL_SIZES = (*DEEPSEAS, 40, 50)  # two more than the paper has
SIZES = {  # sizes, seeds and episodes of each algorithm
    "smoke": dict.fromkeys(ALGORITHMS, ((4,), 1, 64)) | {"dqn": ((4,), 1, 128)},
    "small": {
        "ppo": (ALL_SIZES, 5, 20_000),
        "a2c": (ALL_SIZES, 5, 20_000),
        "dqn": (ALL_SIZES, 5, 20_000),
        "ppo_lstm": ((10, 20), 3, 10_000),
    },
    "paper": dict.fromkeys(ALGORITHMS, (ALL_SIZES, 6, 100_000)),
}
EVALUATION = {"smoke": 8, "small": 10_000, "paper": 100_000}  # episodes, half of them greedy
PRINTED = {  # [SOFE tab:deepsea], in the order of DEEPSEAS
    "a2c": {
        "DeRL": "0.98 ± 0.10, 0.65 ± 0.23, 0.42 ± 0.16, 0.07 ± 0.10, 0.09 ± 0.08",
        "SOFE": "0.94 ± 0.19, 0.45 ± 0.31, 0.11 ± 0.25, 0.08 ± 0.14, 0.04 ± 0.09",
    },
    "ppo": {
        "DeRL": "0.61 ± 0.20, 0.92 ± 0.18, -0.01 ± 0.01, 0.63 ± 0.27, -0.01 ± 0.01",
        "SOFE": "0.77 ± 0.29, 0.67 ± 0.33, 0.13 ± 0.09, 0.07 ± 0.15, 0.09 ± 0.23",
    },
    "dqn": {
        "DeRL": "0.98 ± 0.09, 0.95 ± 0.17, 0.40 ± 0.08, 0.53 ± 0.27, 0.10 ± 0.10",
        "SOFE": "0.97 ± 0.29, 0.78 ± 0.21, 0.70 ± 0.28, 0.65 ± 0.26, 0.42 ± 0.33",
    },
}


def flags(size: str, deepsea_size: int, episodes: int, algorithm: str = "ppo") -> list[str]:
    """The DeepSea setting of a script, the same for all sizes."""
    n, every = deepsea_size, 4 if size == "smoke" else 500 if algorithm == "dqn" else 1_000
    ppo = ["--num-steps", str(n), "--update-epochs", "4", "--beta", "0.3", "--anneal-beta"]
    lstm = ["--ent-coef", "0.02", "--num-minibatches", "2", "--lstm-size", "64"]
    own = {
        "ppo": [
            *[*ppo, "--minibatch-size", str(16 * n)],  # all of a rollout
            *["--gae-lambda", "1", "--ent-coef", "0.05"],
        ],
        "ppo_lstm": [*ppo, "--num-envs", "32", *lstm],
        "a2c": [
            *["--num-steps", str(n), "--norm-adv", "--log-every", "10"],
            *["--ent-coef", "0.05", "--beta", "0.3", "--anneal-beta"],
        ],
        "dqn": [
            *["--learning-rate", "0.001", "--minibatch-size", "128", "--train-frequency", "1"],
            *["--gradient-steps", "1", "--target-interval", "16", "--tau", "0.02"],
            *["--learning-starts", "256" if size == "smoke" else "2000", "--log-every", "50"],
            *["--double-q", "--n-step", "10", "--buffer-size", "20000"],
            *["--exploration-fraction", "0.03", "--beta", "0.3"],
        ],
    }
    return [
        *["--env-id", "DeepSea-v0", "--deepsea-size", str(n), "--counts", "global"],
        *["--network", "mlp", "--embedding-dim", "128", *own[algorithm]],
        *["--eval-episodes", "2", "--eval-every", str(every * n)],
        *["--total-timesteps", str(episodes * n)],
    ]


def evaluate(names: list[str], algorithm: str, episodes: int, parallel: int, runs=RUNS) -> None:
    """Evaluate finished runs on so many episodes, where that is not their latest evaluation."""
    each = episodes // 2  # greedy, and as many sampled
    commands = {
        name: [
            *[sys.executable, f"{algorithm}_sofe.py", "--resume", str(runs / name)],
            *["--eval-episodes", str(each)],
        ]
        for name in names
        if json.loads((runs / name / "args.json").read_text())["args"]["eval_episodes"] != each
    }
    run(commands, parallel, runs)


def result(name: str, deepsea_size: int, runs=RUNS) -> tuple[float, float, int | None]:
    """Greedy and sampled return at the end; episodes to the first evaluation of 0.95 or more."""
    evals = read(name, "evals.csv", runs)
    solved = evals["step"][evals["greedy_return"] >= 0.95]
    first = int(solved[0] // deepsea_size) if len(solved) else None
    return evals["greedy_return"][-1], evals["sampled_return"][-1], first


def other_rows(path, only: str, command_of) -> list[list]:
    """The rows of a table that are not of the size `only`; none where there is no table.

    command_of   (size, arm, seed) -> name and command line of a run in the present setting; a table
                 with runs of another one, or of one that is not on record, ends the program
    """
    if not path.exists():
        return []
    record = path.parent / "records" / path.name
    commands = {}
    if record.exists():
        with open(record) as lines:
            commands = {row["run"]: row["command"] for row in csv.DictReader(lines)}
    with open(path) as lines:
        rows = [list(row.values()) for row in csv.DictReader(lines) if row["size"] != only]
    rows = [[*row[:2], int(row[2]), *row[3:]] for row in rows]
    for _, arm, size, seed, *_ in rows:
        name, line = command_of(size, arm, int(seed))
        words = commands.get(name, "").split()[1:]
        if not words or arguments(words) != arguments(line):
            raise SystemExit(
                f"error: in {path} size {size} is of another setting, or not on record: run all "
                f"sizes (without --only), or move it and {record} away first"
            )
    return rows


def summary(values: list[float]) -> str:
    """Mean and standard deviation over the seeds; the paper's is over evaluation episodes."""
    return f"{np.mean(values):.2f} ± {np.std(values):.2f}"


def main():
    args = parse_size(__doc__, algorithm=ALGORITHMS, only=("all", *map(str, ALL_SIZES)))
    algorithm = args.algorithm
    sizes, seeds, budget = SIZES[args.size][algorithm]
    seeds = args.seeds or seeds
    if args.only not in ("all", *map(str, sizes)):
        raise SystemExit(f"error: --{args.size} --algorithm {algorithm} has the sizes {sizes} only")
    prefix = "" if args.size == "small" else f"{args.size}-"
    table = f"{prefix}table_deepsea_{algorithm}"
    folder = RUNS if args.size == "smoke" or args.seeds else RESULTS

    def command_of(size: int, arm: str, seed: int) -> tuple[str, list[str]]:
        line = [f"{algorithm}_sofe.py", "--seed", str(seed), ARMS[arm]]
        line += flags(args.size, size, budget, algorithm)
        return f"{prefix}deepsea{size}-{algorithm}-{arm}-seed{seed}", line

    rows = []
    if args.only != "all":
        rows = other_rows(folder / f"{table}.csv", args.only, command_of)
    runs = [
        (size, arm, seed)
        for size in sizes
        if args.only in ("all", str(size))
        for arm in ARMS
        for seed in range(1, seeds + 1)
    ]
    jobs = dict(command_of(*run) for run in sorted(runs, key=lambda run: run[2]))
    launch(jobs, args.jobs)
    names = {run: command_of(*run)[0] for run in runs}
    evaluate(list(names.values()), algorithm, EVALUATION[args.size], args.jobs)
    for (size, arm, seed), name in names.items():
        greedy, sampled, solved = result(name, size)
        rows.append([algorithm, arm, size, seed, f"{greedy:.4f}", f"{sampled:.4f}", solved or ""])
    rows.sort(key=lambda row: row[2])  # by size, else in their order
    header = ["algorithm", "arm", "size", "seed", "greedy_return", "sampled_return"]
    path = write_csv(table, [*header, "episodes_to_0.95"], rows, folder)
    write_records(table, jobs, folder, keep=args.only != "all")
    print("| DeepSea | arm | greedy return | sampled | seeds at 0.95 | episodes to 0.95 |")
    print("|---|---|---|---|---|---|")
    for size in sizes:
        for arm in ARMS:
            chosen = [row for row in rows if row[1:3] == [arm, size]]
            if not chosen:
                print(f"| {size} | {arm} | not run | | | |")
                continue
            greedy, sampled = ([float(row[column]) for row in chosen] for column in (4, 5))
            reached = f"{sum(value >= 0.95 for value in greedy)} of {len(chosen)}"
            solved = ", ".join(f"{int(row[6]):,}" if row[6] else "never" for row in chosen)
            text = f"{summary(greedy)} | {summary(sampled)} | {reached} | {solved}"
            print(f"| {size} | {arm} | {text} |")
        for who, printed in PRINTED.get(algorithm, {}).items():
            if size in DEEPSEAS:
                value = printed.split(", ")[DEEPSEAS.index(size)]
                print(f"| {size} | {who}-{algorithm.upper()}, the paper | {value} | | | |")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
