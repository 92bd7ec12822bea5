"""DeepSea, batched. [SOFE app:env_details, DeepSea; bsuite: Osband et al. 2020]

`DeepSeaVecEnv` steps N copies as arrays, `DeepSeaEnv` is one of them with gymnasium's interface for
single environments. Importing this file registers both as `sofe/DeepSea-v0`.
"""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

MOVE_COST = 0.01  # what a whole episode of moves to the right costs


class DeepSeaVecEnv(gym.vector.VectorEnv):
    """N copies of DeepSea of one size with one action map.

    Source        bsuite's `deep_sea` (deterministic), the same step by step for the same action map
    Observation   (1, size, size) uint8, one-hot map of the diver; all zeros in the terminal state
    Actions       2; which of them means right is drawn per cell by `mapping_seed`
    Reward        -0.01 / size for right, 0 for left, and 1 for right in the last column
    Dynamics      one row down per action, one column right or left, clipped at the edges
    End           after exactly `size` actions (terminated)
    Optimal       return 0.99: right everywhere, the only way to the reward
    Autoreset     SAME_STEP: final_obs and final_info hold the end, obs and info the new start

    info["cell"]                       (N, 2) int64    row and column
    info["final_info"]["cell"]         (N, 2) int64    (-1, -1): the terminal state is no cell
    info["final_info"]["episode"]      r return, l length in steps, coverage in [0, 1], each (N,)
    reachable                          (size, size) bool    the cells on and below the diagonal
    """

    metadata = {
        "autoreset_mode": AutoresetMode.SAME_STEP,
        "render_modes": ["rgb_array"],
        "render_fps": 10,
    }

    def __init__(
        self,
        num_envs: int = 1,
        size: int = 10,
        mapping_seed: int = 42,
        randomize_actions: bool = True,
        render_mode: str | None = None,
    ):
        """
        num_envs            N
        size                rows, columns and steps of an episode
        mapping_seed        seed of the action map (bsuite's sweep takes 42)
        randomize_actions   False: action 1 means right everywhere
        """
        if num_envs < 1 or size < 1:
            raise ValueError("num_envs and size must be at least 1")
        self.num_envs, self.size, self.render_mode = num_envs, size, render_mode
        self.right = np.ones((size, size), np.int64)
        if randomize_actions:  # the generator and the draw of bsuite
            self.right = np.random.RandomState(mapping_seed).binomial(1, 0.5, (size, size))
        self.reachable = np.tril(np.ones((size, size), bool))
        self.single_observation_space = gym.spaces.Box(0, 1, (1, size, size), np.uint8)
        self.single_action_space = gym.spaces.Discrete(2)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.rows = np.zeros(num_envs, np.int64)
        self.columns = np.zeros(num_envs, np.int64)
        self.returns = np.zeros(num_envs)

    def _start(self, env_ids: np.ndarray) -> None:
        self.rows[env_ids] = 0
        self.columns[env_ids] = 0
        self.returns[env_ids] = 0

    def observe(self) -> np.ndarray:
        observations = np.zeros((self.num_envs, 1, self.size, self.size), np.uint8)
        under_way = np.flatnonzero(self.rows < self.size)
        observations[under_way, 0, self.rows[under_way], self.columns[under_way]] = 1
        return observations

    @property
    def cells(self) -> np.ndarray:
        cells = np.stack([self.rows, self.columns], 1)
        cells[self.rows == self.size] = -1
        return cells

    def _info(self) -> dict[str, Any]:
        return {"cell": self.cells, "_cell": np.ones(self.num_envs, bool)}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        """Start every episode anew. Only the action map is random: `seed` changes nothing here."""
        super().reset(seed=seed)
        self._start(np.arange(self.num_envs))
        return self.observe(), self._info()

    def advance(self, actions: np.ndarray):
        """One step of every env without the autoreset: rewards (N,) and terminations (N,)."""
        actions = np.asarray(actions)
        if actions.shape != (self.num_envs,) or not np.isin(actions, (0, 1)).all():
            raise ValueError(f"actions must be ({self.num_envs},) integers in 0..1, got {actions}")
        right = actions == self.right[self.rows, self.columns]
        rewards = ((self.columns == self.size - 1) & right) - right * (MOVE_COST / self.size)
        self.columns = np.clip(self.columns + np.where(right, 1, -1), 0, self.size - 1)
        self.rows += 1
        self.returns += rewards
        return rewards, self.rows == self.size

    def coverage(self) -> float:
        """Share of the reachable cells that one whole episode visits: always one per row."""
        return self.size / self.reachable.sum()

    def step(self, actions: np.ndarray):
        rewards, terminations = self.advance(actions)
        info: dict[str, Any] = {}
        if terminations.any():
            ended = np.flatnonzero(terminations)
            final_obs = np.full(self.num_envs, None, object)
            for i in ended:
                final_obs[i] = np.zeros(self.single_observation_space.shape, np.uint8)
            mask = terminations.copy()
            coverage = np.where(mask, self.coverage(), 0.0)
            episode = {"r": self.returns.copy(), "_r": mask, "l": self.rows.copy(), "_l": mask}
            episode |= {"coverage": coverage, "_coverage": mask}
            final_info = {"cell": self.cells, "_cell": mask, "episode": episode, "_episode": mask}
            info = {
                "final_obs": final_obs,
                "_final_obs": mask,
                "final_info": final_info,
                "_final_info": mask,
            }
            self._start(ended)
        return (
            self.observe(),
            rewards,
            terminations,
            np.zeros(self.num_envs, bool),
            info | self._info(),
        )

    def get_state(self) -> dict[str, np.ndarray]:
        """Everything that `set_state` needs to go on from here in another process."""
        return {
            "rows": self.rows.copy(),
            "columns": self.columns.copy(),
            "returns": self.returns.copy(),
        }

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        """Put every env where `get_state` found it."""
        for name in ("rows", "columns", "returns"):
            getattr(self, name)[:] = np.asarray(state[name])

    def render(self) -> tuple[np.ndarray, ...]:
        """The map of each env as N images of (8 size, 8 size, 3) uint8."""
        image = np.where(self.reachable[..., None], 235, 60).astype(np.uint8).repeat(3, 2)
        image[-1, -1] = (0, 150, 60)
        images = [image.copy() for _ in range(self.num_envs)]
        for i in np.flatnonzero(self.rows < self.size):
            images[i][self.rows[i], self.columns[i]] = (210, 40, 40)
        return tuple(picture.repeat(8, 0).repeat(8, 1) for picture in images)


class DeepSeaEnv(gym.Env):
    """One DeepSea with gymnasium's single-environment interface; see `DeepSeaVecEnv` for the rest.

    info["cell"]     (2,) int64   row and column; (-1, -1) in the terminal state
    info["episode"]  in the last step: r return, l length in steps, coverage in [0, 1]
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(self, render_mode: str | None = None, **kwargs: Any):
        """kwargs: size, mapping_seed and randomize_actions as in `DeepSeaVecEnv`."""
        self.vec = DeepSeaVecEnv(num_envs=1, **kwargs)
        self.render_mode = render_mode
        self.reachable = self.vec.reachable
        self.observation_space = self.vec.single_observation_space
        self.action_space = self.vec.single_action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        observations, info = self.vec.reset()
        return observations[0], {"cell": info["cell"][0]}

    def step(self, action: int):
        rewards, terminations = self.vec.advance(np.array([action]))
        info: dict[str, Any] = {"cell": self.vec.cells[0]}
        if terminations[0]:
            coverage = self.vec.coverage()
            info["episode"] = {
                "r": float(self.vec.returns[0]),
                "l": self.vec.size,
                "coverage": coverage,
            }
        return self.vec.observe()[0], float(rewards[0]), bool(terminations[0]), False, info

    def render(self) -> np.ndarray:
        return self.vec.render()[0]

    def close(self) -> None:
        self.vec.close()


gym.register(
    id="sofe/DeepSea-v0",
    entry_point="common.deepsea:DeepSeaEnv",
    vector_entry_point="common.deepsea:DeepSeaVecEnv",
)
