"""Time of one bonus of E3B and the update after it, for our two forms and what one would write.

    python benchmarks/e3b_speed.py

The peers are the textbook: a rank-1 update of all inverses at once (two batched products), and a
Cholesky solve of C, which is inverted anew in each step. Ours are the two forms of common/e3b.py;
the factored one gets slower as an episode goes on, so it is timed over whole episodes of EPISODE
updates. All run in one process with one thread, in turn, several rounds; the figures are medians
over the rounds, in microseconds of processor time for one step of one env. Writes
benchmarks/e3b_speed.csv.
"""

import csv
import sys
import time
from pathlib import Path
from statistics import median

import torch
from torch.nn.functional import normalize

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from common.e3b import Ellipsoids  # noqa: E402

ROUNDS, SECONDS, EPISODE, RIDGE = 3, 0.5, 240, 0.1
BASE = "batched rank-1"


class BatchedRank1:
    """C^-1 of all envs at once, changed by one batched product of vectors."""

    def __init__(self, num_envs, dim):
        self.inv_cov = torch.eye(dim).repeat(num_envs, 1, 1) / RIDGE

    def update(self, embedding):
        u = torch.bmm(self.inv_cov, embedding.unsqueeze(2))  # (N, d, 1)
        bonus = torch.bmm(embedding.unsqueeze(1), u)  # (N, 1, 1)
        self.inv_cov.baddbmm_(u / (1 + bonus), u.transpose(1, 2), alpha=-1)
        return bonus.flatten()


class CholeskySolve:
    """C itself, and a factorisation of it for each bonus."""

    def __init__(self, num_envs, dim):
        self.cov = torch.eye(dim).repeat(num_envs, 1, 1) * RIDGE

    def update(self, embedding):
        column = embedding.unsqueeze(2)
        solved = torch.cholesky_solve(column, torch.linalg.cholesky(self.cov))
        self.cov.baddbmm_(column, column.transpose(1, 2))
        return (column * solved).sum((1, 2))


def make_contenders(num_envs, dim):
    """Name -> something with `update`, each at the start of an episode."""
    return {
        BASE: BatchedRank1(num_envs, dim),
        "Cholesky solve": CholeskySolve(num_envs, dim),
        "Ellipsoids, dense": Ellipsoids(num_envs, dim, RIDGE, form="dense"),
        "Ellipsoids, factored": Ellipsoids(num_envs, dim, RIDGE, form="factored"),
    }


def microseconds(contender, embeddings):
    """Processor time of one step of one env."""
    whole = isinstance(contender, Ellipsoids) and contender.form == "factored"
    if whole:
        contender.reset(range(contender.num_envs))
    steps, start = 0, time.process_time()
    while steps < EPISODE if whole else time.process_time() - start < SECONDS:
        contender.update(embeddings[steps % len(embeddings)])
        steps += 1
    return (time.process_time() - start) / (steps * embeddings.shape[1]) * 1e6


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    table = []
    for dim in (128, 512, 1024):
        for num_envs in (8, 32):
            embeddings = normalize(torch.randn(EPISODE, num_envs, dim), dim=2)
            contenders = make_contenders(num_envs, dim)
            times = {name: [] for name in contenders}
            for contender in contenders.values():
                contender.update(embeddings[0])
            for _ in range(ROUNDS):
                for name, contender in contenders.items():
                    times[name].append(microseconds(contender, embeddings))
            base = median(times[BASE])
            for name, values in times.items():
                time_each = median(values)
                row = [dim, num_envs, name, round(time_each, 1), round(base / time_each, 2)]
                table.append(row)
                print("d {:4d}  {:2d} envs  {:22s} {:9.1f} us  {:6.2f} x".format(*row), flush=True)
    with open(ROOT / "benchmarks" / "e3b_speed.csv", "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["dim", "num_envs", "method", "microseconds_per_env_step", "speed_up"])
        writer.writerows(table)


if __name__ == "__main__":
    main()
