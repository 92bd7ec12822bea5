"""Environment steps per second: our two engines beside gymnasium's SyncVectorEnv of Griddly games.

    python benchmarks/env_speed.py

The peers are what one would write without this project: Griddly's own gym wrapper in a gymnasium
environment, N of them in a SyncVectorEnv. `bare` is the least that runs, a time limit and nothing
more; `same information` adds what our environments also give, with gymnasium's usual wrappers:
the avatar's cell, return, length and coverage of an episode. All run Maze 1 with random actions in
one process, in turn, several rounds; the figures are medians over the rounds, per second of
processor time. Writes benchmarks/env_speed.csv.
"""

import csv
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, RecordEpisodeStatistics

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from common.mazes import GDY, LEVELS, MazeVecEnv, parse_level  # noqa: E402

ROUNDS, SECONDS = 5, 1.0
BASE = "SyncVectorEnv, same information"


class WrappedGriddly(gymnasium.Env):
    """One game of Griddly through its own gym wrapper, with four moves and a time limit."""

    def __init__(self, path: Path, max_steps: int = 1000, informed: bool = False):
        from griddly import GymWrapper, gd

        self.game = GymWrapper(str(path), player_observer_type=gd.ObserverType.VECTOR)
        self.game.reset()
        self.observation_space = gymnasium.spaces.Box(0, 1, (4, 32, 32), np.uint8)
        self.action_space = gymnasium.spaces.Discrete(4)
        self.max_steps, self.informed = max_steps, informed

    def reset(self, *, seed=None, options=None):
        self.elapsed = 0
        self.visited = np.zeros((32, 32), bool)
        observation = np.array(self.game.reset()).transpose(0, 2, 1)
        return observation, self.inform(observation)

    def inform(self, observation):
        if not self.informed:
            return {}
        cell = np.array(divmod(int(observation[0].argmax()), 32))
        self.visited[cell[0], cell[1]] = True
        if self.elapsed == self.max_steps:
            return {"cell": cell, "coverage": self.visited.sum() / 449}
        return {"cell": cell}

    def step(self, action):
        observation, reward, done, _ = self.game.step([0, action + 1])
        self.elapsed += 1
        observation = np.array(observation).transpose(0, 2, 1)
        truncated = self.elapsed >= self.max_steps
        return observation, float(reward), bool(done), truncated, self.inform(observation)


def usual_wrappers(path):
    """What gymnasium.make puts round an environment, and its episode statistics."""
    env = PassiveEnvChecker(WrappedGriddly(path, informed=True))
    return RecordEpisodeStatistics(OrderEnforcing(env))


def steps_per_second(envs, actions):
    """Steps of all envs per second of processor time, over about SECONDS."""
    done, start = 0, time.process_time()
    while time.process_time() - start < SECONDS:
        for row in actions:
            envs.step(row)
        done += actions.size
    return done / (time.process_time() - start)


def main():
    level = parse_level(LEVELS["Maze1-v0"])
    row, column = np.argwhere(level == "A")[0]
    rows = "\n".join("      " + " ".join(line) for line in level)
    text = GDY.format(level=rows, start_row=row, start_column=column, view=5)
    table = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "maze.yaml"
        path.write_text(text)
        for num_envs in (16, 64):
            mode = {"autoreset_mode": AutoresetMode.SAME_STEP}
            contenders = {
                BASE: SyncVectorEnv([lambda: usual_wrappers(path)] * num_envs, **mode),
                "SyncVectorEnv, bare": SyncVectorEnv(
                    [lambda: WrappedGriddly(path)] * num_envs, **mode
                ),
                "MazeVecEnv, griddly": MazeVecEnv(num_envs, engine="griddly"),
                "MazeVecEnv, numpy": MazeVecEnv(num_envs, engine="numpy"),
            }
            random = np.random.default_rng(0)
            actions = random.integers(4, size=(200, num_envs))
            speeds = {name: [] for name in contenders}
            for envs in contenders.values():
                envs.reset()
            for _ in range(ROUNDS):
                for name, envs in contenders.items():
                    speeds[name].append(steps_per_second(envs, actions))
            base = median(speeds[BASE])
            for name, values in speeds.items():
                table.append(
                    [num_envs, name, round(median(values)), round(median(values) / base, 1)]
                )
                print("{:3d} envs  {:36s} {:9,d} steps/s  {:5.1f} x".format(*table[-1]), flush=True)
    with open(ROOT / "benchmarks" / "env_speed.csv", "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["num_envs", "environment", "steps_per_cpu_second", "ratio"])
        writer.writerows(table)


if __name__ == "__main__":
    main()
