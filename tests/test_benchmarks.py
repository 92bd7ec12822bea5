"""The peers of benchmarks/ play the same game as ours: the ratios compare like with like."""

import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from common.mazes import GDY, LEVELS, MazeVecEnv, griddly_installed, parse_level
from ppo_sofe import Args

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
pytestmark = pytest.mark.skipif(not griddly_installed(), reason="Griddly has no wheel here")


def test_the_wrapped_griddly_is_the_same_maze(tmp_path):
    from env_speed import WrappedGriddly

    level = parse_level(LEVELS["Maze1-v0"])
    row, column = np.argwhere(level == "A")[0]
    rows = "\n".join("      " + " ".join(line) for line in level)
    path = tmp_path / "maze.yaml"
    path.write_text(GDY.format(level=rows, start_row=row, start_column=column, view=5))
    peer, ours = WrappedGriddly(path, 50, informed=True), MazeVecEnv(1, max_steps=60)
    first, second = peer.reset()[0], ours.reset()[0]
    random = np.random.default_rng(0)
    for _ in range(50):
        assert (first[[0, 3]] == second[0]).all()  # Griddly sorts: avatar, door, goal, wall
        action = random.integers(4)
        first, _, _, truncated, info = peer.step(action)
        second, *_, our_info = ours.step(np.array([action]))
        assert (info["cell"] == our_info["cell"][0]).all()
    assert truncated and info["coverage"] == pytest.approx(ours.coverage()[0])


def test_the_vec_env_for_stable_baselines3_pays_the_same_bonus():
    from train_speed import CountingVecEnv

    envs = CountingVecEnv(Args(augment=True, num_envs=3, beta=0.5))
    envs.envs.max_steps = 9
    observation = envs.reset()
    tables = [Counter({(1, 1): 1}) for _ in range(3)]
    random, ended = np.random.default_rng(0), 0
    for _ in range(40):
        for i, table in enumerate(tables):
            counts = np.zeros((32, 32))
            for cell, visits in table.items():
                counts[cell] = visits
            assert observation["phi"][i, 0] == pytest.approx(1 / np.sqrt(counts + 1))
        observation, rewards, dones, infos = envs.step(random.integers(4, size=3))
        for i, table in enumerate(tables):
            last = infos[i]["terminal_observation"]["obs"] if dones[i] else observation["obs"][i]
            cell = tuple(np.argwhere(last[0])[0].tolist())
            assert rewards[i] == pytest.approx(0.5 / np.sqrt(table[cell] + 1))
            table[cell] += 1
            if dones[i]:
                ended += 1
                assert infos[i]["TimeLimit.truncated"]
                tables[i] = Counter({(1, 1): 1})
    assert ended == 12
