"""A stand-in for common/godot.py's environment: a point on a map, in numpy, with no engine.

For what needs a known or a fast environment: parity, records of each step, speed.
"""

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode

SIDE, BIN, BINS = 120.0, 5.0, 24  # metres, metres, bins


class StubVecEnv(gym.vector.VectorEnv):
    """N points on 120 x 120 m with the spaces and the infos of `common.godot.GodotVecEnv`.

    Action        speed and turn as in the 3D map, and a jump that does nothing
    Observation   (obs_dim,) float32: position, direction, speed; the rest is padding
    Reward        the number of the step, times N, plus that of the agent: each is a name
    End           east of `lava` metres (terminated), after `max_steps` (truncated)
    """

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}

    def __init__(self, num_envs=8, max_steps=1000, action_repeat=8, obs_dim=5, lava=SIDE, speed=5):
        self.num_envs, self.max_steps, self.lava, self.speed = num_envs, max_steps, lava, speed
        self.single_observation_space = gym.spaces.Box(-np.inf, np.inf, (obs_dim,), np.float32)
        self.single_action_space = gym.spaces.Box(-1, 1, (3,), np.float32)
        self.reachable = np.ones((BINS, BINS), bool)
        self.map = {name: [] for name in ("walls", "lava", "water", "pads", "platforms")}
        self.map |= {"size": SIDE, "bin": BIN, "spawn": [0, 0]}
        self.state = {
            "places": np.zeros((num_envs, 2)),  # x east and z south, metres
            "headings": np.zeros(num_envs),
            "lengths": np.zeros(num_envs, np.int64),
            "returns": np.zeros(num_envs),
            "visited": np.zeros((num_envs, BINS, BINS), bool),
            "steps": np.zeros((), np.int64),
        }

    @property
    def cells(self):
        return (self.state["places"][:, ::-1] / BIN).astype(np.int64)  # (row, column): south, east

    def _mark(self):
        cells = self.cells
        self.state["visited"][np.arange(self.num_envs), cells[:, 0], cells[:, 1]] = True

    def _start(self, env_ids):
        for name in ("headings", "lengths", "returns", "visited"):
            self.state[name][env_ids] = 0
        self.state["places"][env_ids] = 0.3 * SIDE
        self._mark()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._start(np.arange(self.num_envs))
        return self.observe(), {"cell": self.cells}

    def observe(self):
        obs = np.zeros((self.num_envs, *self.single_observation_space.shape), np.float32)
        headings = self.state["headings"]
        obs[:, :2] = self.state["places"] / SIDE
        obs[:, 2], obs[:, 3] = np.cos(headings), np.sin(headings)
        obs[:, 4] = self.state["lengths"] / self.max_steps
        return obs

    def step(self, actions):
        state = self.state
        assert actions.shape == (self.num_envs, 3) and np.abs(actions).max() <= 1
        assert actions.dtype == np.float32
        state["headings"] += actions[:, 1]
        towards = np.stack([np.cos(state["headings"]), np.sin(state["headings"])], axis=1)
        state["places"] += self.speed * actions[:, :1] * towards
        np.clip(state["places"], 0, SIDE - 1e-6, out=state["places"])
        state["lengths"] += 1
        rewards = (state["steps"] * self.num_envs + np.arange(self.num_envs)).astype(np.float64)
        state["steps"] += 1
        state["returns"] += rewards
        self._mark()
        terminated = state["places"][:, 0] >= self.lava
        truncated = (state["lengths"] >= self.max_steps) & ~terminated
        dones, info = terminated | truncated, {}
        if dones.any():
            info["final_obs"] = np.full(self.num_envs, None, object)
            for env, obs in enumerate(self.observe()):
                info["final_obs"][env] = obs if dones[env] else None
            episode = {"r": state["returns"].copy(), "l": state["lengths"].copy()}
            episode["coverage"] = state["visited"].mean((1, 2))
            info["final_info"] = {"cell": self.cells, "episode": episode}
            self._start(np.flatnonzero(dones))
        info["cell"] = self.cells
        return self.observe(), rewards, terminated, truncated, info

    def get_state(self):
        return {name: value.copy() for name, value in self.state.items()}

    def set_state(self, state):
        for name, value in self.state.items():
            value[...] = np.asarray(state[name])
