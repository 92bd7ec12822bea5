"""The peers of benchmarks/ play the same game as ours: the ratios compare like with like."""

import sys
from collections import Counter
from importlib import import_module
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


@pytest.mark.parametrize("algorithm", ["ppo", "a2c", "dqn", "ppo_lstm"])
def test_the_peers_have_the_same_network_and_hyperparameters(algorithm):
    from train_speed import SETTINGS, make_peer

    script = import_module(f"{algorithm}_sofe")
    args = script.Args(**SETTINGS[algorithm]["cpu"][0], augment=True, total_timesteps=10_000)
    peer, envs = make_peer(algorithm, args), MazeVecEnv(1, engine="numpy")
    network = script.QNetwork if algorithm == "dqn" else script.Agent
    sizes = [p.numel() for p in network(envs, (1, 32, 32), args).parameters()]
    theirs = peer.q_net if algorithm == "dqn" else peer.policy
    assert sum(sizes) == sum(p.numel() for p in theirs.parameters())
    assert peer.n_envs == args.num_envs and peer.learning_rate == args.learning_rate
    same = {"gamma": "gamma", "max_grad_norm": "max_grad_norm"}
    if algorithm == "dqn":
        same |= {"batch_size": "minibatch_size", "gradient_steps": "gradient_steps"}
        same |= {"buffer_size": "buffer_size", "learning_starts": "learning_starts"}
        assert peer.train_freq.frequency == args.train_frequency == 4
        same |= {"target_update_interval": "target_interval", "tau": "tau"}
    else:
        same |= {"n_steps": "num_steps", "gae_lambda": "gae_lambda", "vf_coef": "vf_coef"}
        same |= {"ent_coef": "ent_coef"}
    if algorithm in ("ppo", "ppo_lstm"):
        same |= {"n_epochs": "update_epochs"}
        parts = getattr(args, "num_minibatches", 0)
        assert peer.batch_size == (args.batch_size // parts if parts else args.minibatch_size)
    for theirs, ours in same.items():
        assert getattr(peer, theirs) == getattr(args, ours), theirs
    peer.env.close()


@pytest.mark.parametrize("augment", [False, True])
def test_the_peer_of_sac_has_the_same_networks_and_hyperparameters(augment):
    from train_speed import make_args, make_peer, make_world

    args = make_args("sac", "cpu", augment=augment, total_timesteps=10_000)
    peer, world = make_peer("sac", args), make_world(args)
    script = import_module("sac_sofe_godot")
    for network, theirs in ((script.Actor, peer.actor), (script.Critic, peer.critic)):
        ours = network(world, (int(augment), 24, 24), args)
        sizes = [sum(p.numel() for p in x.parameters()) for x in (ours, theirs)]
        assert sizes[0] == sizes[1]
    assert peer.n_envs == args.num_envs and peer.learning_rate == args.learning_rate
    assert peer.batch_size == args.minibatch_size and peer.gradient_steps == args.gradient_steps
    assert peer.train_freq.frequency == 1 and peer.tau == args.tau and peer.gamma == args.gamma
    peer.env.close()


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
