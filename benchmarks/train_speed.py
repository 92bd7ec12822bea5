"""Training speed of the scripts beside stable-baselines3.

    python benchmarks/train_speed.py                       # all five, 40 minutes
    python benchmarks/train_speed.py --algorithms a2c dqn --rounds 1

The peer is PPO, A2C, DQN or SAC of stable-baselines3, or RecurrentPPO of sb3-contrib, with the same
network, hyperparameters, mazes, bonus and (with SOFE) statistics, which it gets as a second key of
its observation from a vector environment written the usual way, in numpy. For SAC an empty plain in
numpy (tests/stub_world.py) stands in for the 3D map: no engine is timed. Both train with one
thread, in turn, each time in a process of its own; the first part of each run is not timed. The
unit is environment steps per second of processor time, which other programs disturb less than the
clock; leave the machine alone all the same. The ratio is the median over the rounds. Writes
benchmarks/train_speed_ALGORITHM.csv.
"""

import argparse
import csv
import sys
import tempfile
import time
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from statistics import median

import gymnasium
import numpy as np
import torch
from sb3_contrib import RecurrentPPO
from stable_baselines3 import A2C, DQN, PPO, SAC
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import VecEnv

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from stub_world import StubVecEnv  # noqa: E402

from common import runs  # noqa: E402
from common.mazes import MazeVecEnv  # noqa: E402

SCRIPTS = {name: f"{name}_sofe" for name in ("ppo", "ppo_lstm", "a2c", "dqn")}
SCRIPTS |= {"sac": "sac_sofe_godot"}
COMMON = {"ext_coef": 0.0, "num_threads": 1, "device": "cpu", "eval_episodes": 0}
OBS_DIM = 129  # that of the 3D map
SMALL = {"channels": 16, "embedding_dim": 128, "beta": 0.1}
DQN_COMMON = {"buffer_size": 20_000, "log_every": 5}  # the peer's buffer takes 12 kB a transition
# Flags, and steps that are not timed and that are: the paper's network and batches (PPO with a
# shorter rollout), and README.md's CPU setting.
SETTINGS = {
    "ppo": {
        "paper": ({"num_steps": 64}, 1024, 3 * 1024),
        "cpu": (
            {"num_envs": 32, "num_steps": 128, "minibatch_size": 256, "update_epochs": 4}
            | {"ent_coef": 0.01, **SMALL},
            4096,
            3 * 4096,
        ),
    },
    "ppo_lstm": {
        "paper": ({"num_steps": 64}, 1024, 1024),
        "cpu": (
            {"num_envs": 32, "num_steps": 128, "num_minibatches": 16, "update_epochs": 4}
            | {"ent_coef": 0.01, **SMALL},
            4096,
            2 * 4096,
        ),
    },
    "a2c": {
        "paper": ({"log_every": 5}, 400, 2400),
        "cpu": ({"log_every": 5, "ent_coef": 0.01, **SMALL}, 800, 8000),
    },
    "dqn": {
        "paper": ({"learning_starts": 320, **DQN_COMMON}, 640, 2560),
        "cpu": ({"learning_starts": 320, **SMALL, **DQN_COMMON}, 960, 9600),
    },
    "sac": {
        "paper": ({"learning_starts": 320, **DQN_COMMON}, 480, 480),
        "cpu": (
            {"num_envs": 16, "minibatch_size": 64, "gradient_steps": 4, "learning_rate": 1e-3}
            | {"gamma": 0.97, "channels": 16, "embedding_dim": 64, "hidden_dim": 128}
            | {"learning_starts": 320, **DQN_COMMON},
            800,
            2400,
        ),
    },
}


def make_args(algorithm, setting, **settings):
    """The arguments of our script, which the peer is given as well."""
    engine = {} if algorithm == "sac" else {"engine": "griddly"}
    flags = COMMON | engine | SETTINGS[algorithm][setting][0] | settings
    return import_module(SCRIPTS[algorithm]).Args(**flags)


def make_world(args):
    """The mazes, or the stand-in for the 3D map."""
    if hasattr(args, "engine"):
        return MazeVecEnv(args.num_envs, args.env_id, engine="griddly")
    return StubVecEnv(args.num_envs, obs_dim=OBS_DIM)


class CountingVecEnv(VecEnv):
    """A world with the sqrt bonus as reward and, with SOFE, the counts in the observation."""

    def __init__(self, args):
        self.envs = make_world(args)
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
    """The towers of a script as a features extractor."""

    def __init__(self, space, args, make_tower):
        super().__init__(space, args.embedding_dim * len(space))
        towers = {key: make_tower(space[key].shape, args) for key in space}
        self.towers = torch.nn.ModuleDict(towers)

    def forward(self, observations):
        features = [tower(observations[key].float()) for key, tower in self.towers.items()]
        return torch.cat(features, dim=1)


class Clock(BaseCallback):
    """The steps done and the time at which each rollout begins."""

    def _on_training_start(self):
        self.times = []

    def _on_rollout_start(self):
        self.times.append((self.num_timesteps, time.process_time()))

    def _on_step(self):
        return True


def make_peer(algorithm, args):
    """The algorithm of stable-baselines3 or sb3-contrib with the arguments of our script."""
    extractor = {"args": args, "make_tower": import_module(SCRIPTS[algorithm]).make_tower}
    policy = {"features_extractor_class": Towers, "features_extractor_kwargs": extractor}
    common = {"policy_kwargs": policy | {"normalize_images": False}, "device": "cpu"}
    common |= {"learning_rate": args.learning_rate, "gamma": args.gamma, "seed": args.seed}
    common |= {"env": CountingVecEnv(args), "policy": "MultiInputPolicy"}
    if algorithm == "dqn":
        return DQN(
            **common,
            buffer_size=args.buffer_size,
            learning_starts=args.learning_starts,
            batch_size=args.minibatch_size,
            tau=args.tau,
            train_freq=args.train_frequency,
            gradient_steps=args.gradient_steps,
            target_update_interval=args.target_interval,
            exploration_fraction=args.exploration_fraction,
            exploration_final_eps=args.epsilon_end,
            max_grad_norm=args.max_grad_norm,
        )
    if algorithm == "sac":
        layers = [args.hidden_dim] * 2
        common["policy_kwargs"] |= {"share_features_extractor": False, "net_arch": layers}
        return SAC(
            **common,
            buffer_size=args.buffer_size,
            learning_starts=args.learning_starts,
            batch_size=args.minibatch_size,
            tau=args.tau,
            gradient_steps=args.gradient_steps,
        )
    common |= {"n_steps": args.num_steps, "ent_coef": args.ent_coef, "vf_coef": args.vf_coef}
    common |= {"gae_lambda": args.gae_lambda, "max_grad_norm": args.max_grad_norm}
    if algorithm == "a2c":
        return A2C(**common, rms_prop_eps=args.rms_prop_eps, normalize_advantage=args.norm_adv)
    common |= {"n_epochs": args.update_epochs, "clip_range": args.clip_coef}
    if algorithm == "ppo":
        return PPO(**common, batch_size=args.minibatch_size)
    common |= {"policy": "MultiInputLstmPolicy"}
    common["policy_kwargs"] |= {"lstm_hidden_size": args.lstm_size}
    return RecurrentPPO(**common, batch_size=args.batch_size // args.num_minibatches)


def time_peer(algorithm, args, untimed):
    torch.set_num_threads(1)
    peer, clock = make_peer(algorithm, args), Clock()
    peer.learn(args.total_timesteps, callback=clock)
    begin, start = next((step, at) for step, at in clock.times if step >= untimed)
    return (peer.num_timesteps - begin) / (time.process_time() - start)


def time_ours(algorithm, args, untimed):
    times = []
    log_update = runs.Run.log_update

    def log_and_time(self, step, metrics):
        log_update(self, step, metrics)
        times.append((step, time.process_time()))

    runs.Run.log_update = log_and_time
    script = import_module(SCRIPTS[algorithm])
    if algorithm == "sac":  # this process is for the one run
        script.make_envs = lambda args, num_envs: make_world(args)
    try:
        script.main(args)
    finally:
        runs.Run.log_update = log_update
    begin, start = next((step, at) for step, at in times if step >= untimed)
    return (times[-1][0] - begin) / (times[-1][1] - start)


def compare(algorithm, setting, augment, rounds):
    """Median steps per second of both sides and median of their ratio."""
    _, untimed, timed = SETTINGS[algorithm][setting]
    speeds = {"ours": [], "peer": []}
    for seed in range(1, rounds + 1):
        with tempfile.TemporaryDirectory() as folder:
            run = {"augment": augment, "seed": seed, "total_timesteps": untimed + timed}
            args = make_args(algorithm, setting, **run)
            args.runs_dir = folder
            for name, clocked in (("peer", time_peer), ("ours", time_ours)):
                with get_context("spawn").Pool(1) as pool:
                    speeds[name].append(pool.apply(clocked, (algorithm, args, untimed)))
    ratio = median(o / p for o, p in zip(speeds["ours"], speeds["peer"], strict=True))
    return round(median(speeds["ours"])), round(median(speeds["peer"])), round(ratio, 2)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--algorithms", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    args = parser.parse_args()
    for algorithm in args.algorithms:
        table = []
        for setting in SETTINGS[algorithm]:
            for augment in (False, True):
                arm = "sofe" if augment else "plain"
                table.append([setting, arm, *compare(algorithm, setting, augment, args.rounds)])
                line = "{:6s} {:6s} ours {:5d}  peer {:5d}  {:.2f} x".format(*table[-1])
                print(f"{algorithm:9s}{line}", flush=True)
        with open(ROOT / "benchmarks" / f"train_speed_{algorithm}.csv", "w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["setting", "arm", SCRIPTS[algorithm], "stable_baselines3", "ratio"])
            writer.writerows(table)


if __name__ == "__main__":
    main()
