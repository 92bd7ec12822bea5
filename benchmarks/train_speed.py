"""Training speed of ppo_sofe.py beside stable-baselines3, in environment steps per second.

    python benchmarks/train_speed.py              # both settings, about ten minutes
    python benchmarks/train_speed.py --rounds 1   # a first impression

The peer is PPO of stable-baselines3 with the same network, hyperparameters, mazes, bonus and (with
SOFE) statistics, which it gets as a second key of its observation from a vector environment written
the usual way, in numpy. Both train with one thread, in turn, each time in a process of its own; the
first iteration is not timed. The ratio is the median over the rounds. Leave the machine
alone meanwhile. Writes benchmarks/train_speed.csv.
"""

import argparse
import csv
import sys
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path
from statistics import median

import gymnasium
import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import VecEnv

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import ppo_sofe  # noqa: E402
from common import runs  # noqa: E402
from common.mazes import MazeVecEnv  # noqa: E402

COMMON = {"ext_coef": 0.0, "num_threads": 1, "device": "cpu", "eval_episodes": 0}
SETTINGS = {  # the paper's network and batches with a shorter rollout; README.md's CPU setting
    "paper": {"num_envs": 16, "num_steps": 64, "minibatch_size": 64, "update_epochs": 10},
    "cpu": {
        **{"num_envs": 32, "num_steps": 128, "minibatch_size": 256, "update_epochs": 4},
        **{"channels": 16, "embedding_dim": 128, "beta": 0.1, "ent_coef": 0.01},
    },
}
ITERATIONS = 3  # timed, after one that is not


class CountingVecEnv(VecEnv):
    """Mazes with the sqrt bonus as reward and, with SOFE, the counts in the observation."""

    def __init__(self, args):
        self.envs = MazeVecEnv(args.num_envs, args.env_id, engine="griddly")
        self.args = args
        spaces = {"obs": self.envs.single_observation_space}
        if args.augment:
            shape = (1, *self.envs.reachable.shape)
            spaces["phi"] = gymnasium.spaces.Box(0, 1, shape, np.float32)
        self.counts = np.zeros((args.num_envs, *self.envs.reachable.shape), np.int64)
        self.rows = np.arange(args.num_envs)
        super().__init__(
            args.num_envs, gymnasium.spaces.Dict(spaces), self.envs.single_action_space
        )

    def observe(self, obs):
        phi = (1 / np.sqrt(self.counts + 1)).astype(np.float32)[:, None]
        return {"obs": obs, "phi": phi} if self.args.augment else {"obs": obs}

    def reset(self):
        obs, info = self.envs.reset()
        self.counts[:] = 0
        self.counts[self.rows, info["cell"][:, 0], info["cell"][:, 1]] += 1
        return self.observe(obs)

    def step_async(self, actions):
        self.actions = actions

    def step_wait(self):
        obs, _, terminated, truncated, info = self.envs.step(self.actions)
        dones = terminated | truncated
        cells = info["cell"]
        if dones.any():
            cells = np.where(dones[:, None], info["final_info"]["cell"], cells)
        visits = self.counts[self.rows, cells[:, 0], cells[:, 1]]
        self.counts[self.rows, cells[:, 0], cells[:, 1]] += 1
        infos = [{} for _ in self.rows]
        for i in np.flatnonzero(dones):
            last = self.observe(np.stack([info["final_obs"][i]]))
            last = {"obs": last["obs"][0]} | ({"phi": last["phi"][i]} if self.args.augment else {})
            infos[i] = {"terminal_observation": last, "TimeLimit.truncated": bool(truncated[i])}
            self.counts[i] = 0
            self.counts[i, info["cell"][i, 0], info["cell"][i, 1]] = 1
        return self.observe(obs), self.args.beta / np.sqrt(visits + 1), dones, infos

    def close(self):
        self.envs.close()

    def get_attr(self, name, indices=None):
        return [None] * self.num_envs

    def set_attr(self, name, value, indices=None):
        raise AttributeError(name)

    def env_method(self, name, *args, indices=None, **kwargs):
        raise AttributeError(name)

    def env_is_wrapped(self, wrapper, indices=None):
        return [False] * self.num_envs


class Towers(BaseFeaturesExtractor):
    """The towers of ppo_sofe.py as a features extractor."""

    def __init__(self, space, args):
        super().__init__(space, args.embedding_dim * len(space))
        towers = {key: ppo_sofe.make_tower(space[key].shape, args) for key in space}
        self.towers = torch.nn.ModuleDict(towers)

    def forward(self, observations):
        features = [tower(observations[key].float()) for key, tower in self.towers.items()]
        return torch.cat(features, dim=1)


class Clock(BaseCallback):
    """The time at which each iteration begins."""

    def _on_training_start(self):
        self.times = []

    def _on_rollout_start(self):
        self.times.append(time.perf_counter())

    def _on_step(self):
        return True


def time_peer(args):
    torch.set_num_threads(1)
    peer = PPO(
        "MultiInputPolicy",
        CountingVecEnv(args),
        learning_rate=args.learning_rate,
        n_steps=args.num_steps,
        batch_size=args.minibatch_size,
        n_epochs=args.update_epochs,
        ent_coef=args.ent_coef,
        policy_kwargs={
            "features_extractor_class": Towers,
            "features_extractor_kwargs": {"args": args},
            "normalize_images": False,
        },
        device="cpu",
        seed=args.seed,
    )
    clock = Clock()
    peer.learn(args.total_timesteps, callback=clock)
    return ITERATIONS * args.batch_size / (time.perf_counter() - clock.times[1])


def time_ours(args):
    times = []
    log_update = runs.Run.log_update

    def log_and_time(self, step, metrics):
        log_update(self, step, metrics)
        times.append(time.perf_counter())

    runs.Run.log_update = log_and_time
    try:
        ppo_sofe.main(args)
    finally:
        runs.Run.log_update = log_update
    return ITERATIONS * args.batch_size / (times[-1] - times[0])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    table = []
    for setting, flags in SETTINGS.items():
        for augment in (False, True):
            speeds = {"ours": [], "peer": []}
            for seed in range(1, rounds + 1):
                with tempfile.TemporaryDirectory() as folder:
                    args = ppo_sofe.Args(**COMMON, **flags, augment=augment, seed=seed)
                    args.engine, args.runs_dir = "griddly", folder
                    args.total_timesteps = (ITERATIONS + 1) * args.batch_size
                    for name, timed in (("peer", time_peer), ("ours", time_ours)):
                        with get_context("spawn").Pool(1) as pool:
                            speeds[name].append(pool.apply(timed, (args,)))
            ratio = median(o / p for o, p in zip(speeds["ours"], speeds["peer"], strict=True))
            ours, peer = (round(median(speeds[name])) for name in ("ours", "peer"))
            table.append([setting, "sofe" if augment else "plain", ours, peer, round(ratio, 2)])
            print("{:6s} {:6s} ours {:5d}  stable-baselines3 {:5d}  {:.2f} x".format(*table[-1]))
    with open(ROOT / "benchmarks" / "train_speed.csv", "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["setting", "arm", "ppo_sofe", "stable_baselines3", "ratio"])
        writer.writerows(table)


if __name__ == "__main__":
    main()
