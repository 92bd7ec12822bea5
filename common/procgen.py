"""Procgen games, N at a time, in the shape of the other environments. [SOFE sec:e3b_section]

`ProcgenVecEnv` runs a game of the package procgen through gym3, which steps all N games natively.
The paper's is the maze with `distribution_mode="memory"`: a maze of 3 to 31 cells a side, random in
each episode, of which the agent sees what is near it.

gym3 begins the next episode in the step in which one ends and never shows the last observation of
the old one. `has_final_obs` is False for that reason, and `final_obs` holds the last observation
that was shown, the one on which the last action was chosen. A bonus made of observations then pays
for the last transition what that state is worth on a second visit, which is little, and a value
that is bootstrapped at the time limit is the one of a step earlier.
"""

import contextlib
import importlib.util
import io
from typing import Any, Literal

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

TIME_LIMITS = {"maze": 500}  # steps, set in the games themselves
LEVELS = 2**30 - 1  # level seeds of a split; training has those below, evaluation the next
NUM_ACTIONS = 15
LIBRARIES = "install libGL and GLib, with Debian: apt-get install libgl1 libglib2.0-0"
NO_PROCGEN = "no Procgen (Linux on x86-64 only: pip install -r requirements.txt)"


def procgen_installed() -> bool:
    return all(importlib.util.find_spec(name) for name in ("procgen", "gym3"))


class ProcgenVecEnv(gym.vector.VectorEnv):
    """N games of Procgen. [SOFE sec:e3b_section; Cobbe et al. 2020, Procgen]

    Source        the package procgen, through gym3
    Observation   dict: image (3, 64, 64) uint8, red, green, blue, [row][column]
    Actions       15, the same for all games; in a maze 1 left, 3 down, 5 up, 7 right, 0, 2, 6 and 8
                  the diagonals, the others nothing
    Reward        10 at the goal of a maze
    End           at the goal (terminated) or after 500 steps (truncated), not observed
    Optimal       10
    Levels        drawn anew for each episode; the seed of `reset` fixes them and everything else.
                  Training and evaluation draw from disjoint halves of the level seeds
    Autoreset     SAME_STEP, but the last observation of an episode is not to be had, see above

    has_final_obs                      False
    info["cell"]                       (N, 2) int64   (-1, -1): Procgen does not tell a position
    info["final_obs"]                  like obs, in steps in which an episode ended: obs where none
                                       did, else the observation before the last action
    info["final_info"]["episode"]      r return, l length in steps, success (bool), level its seed,
                                       coverage NaN, each (N,)
    """

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP, "render_modes": ["rgb_array"]}
    has_final_obs = False

    def __init__(
        self,
        env_name: str = "maze",
        num_envs: int = 1,
        distribution_mode: Literal["easy", "hard", "memory"] = "memory",
        num_levels: int = 0,
        start_level: int = 0,
        split: Literal["train", "eval"] = "train",
        num_threads: int = 0,
        render_mode: str | None = None,
    ):
        """
        env_name           a name in TIME_LIMITS
        num_envs           N
        distribution_mode  Procgen's: how large the mazes are and whether all of them is seen
        num_levels         how many levels of the split to draw from (0: all from start_level on)
        start_level        the first of them, counted in the split
        split              whose level seeds to draw from
        num_threads        threads of gym3 beside this one, which change no result
        Raises ModuleNotFoundError without the package, ValueError for a bad argument.
        """
        if not procgen_installed():
            raise ModuleNotFoundError(NO_PROCGEN)
        if env_name not in TIME_LIMITS:
            raise ValueError(
                f"no game {env_name!r} of Procgen here, there is {', '.join(TIME_LIMITS)}"
            )
        if distribution_mode not in ("easy", "hard", "memory"):
            raise ValueError(
                f"distribution_mode is easy, hard or memory, not {distribution_mode!r}"
            )
        if num_envs < 1 or num_threads < 0:
            raise ValueError("num_envs must be at least 1, num_threads at least 0")
        num_levels = num_levels or LEVELS - start_level
        if (
            split not in ("train", "eval")
            or start_level < 0
            or not (0 < num_levels <= LEVELS - start_level)
        ):
            raise ValueError(f"split is train or eval, its levels are 0 to {LEVELS - 1}")
        self.num_envs, self.max_steps = num_envs, TIME_LIMITS[env_name]
        self.render_mode = render_mode
        self.reachable = np.ones((1, 1), bool)
        self.settings = {
            "num": num_envs,
            "env_name": env_name,
            "distribution_mode": distribution_mode,
            "num_levels": num_levels,
            "start_level": start_level + (LEVELS if split == "eval" else 0),
            "num_threads": num_threads,
        }
        image = gym.spaces.Box(0, 255, (3, 64, 64), np.uint8)
        self.single_observation_space = gym.spaces.Dict({"image": image})
        self.single_action_space = gym.spaces.Discrete(NUM_ACTIONS)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.games: Any = None
        self.lengths = np.zeros(num_envs, np.int64)
        self.returns = np.zeros(num_envs)
        self.images = np.zeros((num_envs, 3, 64, 64), np.uint8)
        self.cells = np.full((num_envs, 2), -1)

    def _make(self, seed: int) -> None:
        with contextlib.redirect_stderr(io.StringIO()):  # the notice of the old gym
            from procgen import ProcgenGym3Env
        self.close_extras()
        try:
            self.games = ProcgenGym3Env(rand_seed=seed % 2**31, **self.settings)
        except OSError as error:
            raise ModuleNotFoundError(f"Procgen cannot be loaded ({error}): {LIBRARIES}") from None

    def _read(self) -> tuple[np.ndarray, np.ndarray]:
        """Fetch the observations; return the rewards and where an episode has just begun."""
        rewards, observation, first = self.games.observe()
        self.images = np.ascontiguousarray(observation["rgb"].transpose(0, 3, 1, 2))
        return rewards.copy(), first.copy()

    def observe(self) -> dict[str, np.ndarray]:
        """The observations as they stand, a copy."""
        return {"image": self.images.copy()}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        """Begin new episodes; the seed fixes all that follow."""
        super().reset(seed=seed)
        self._make(int(self.np_random.integers(2**31)) if seed is None else seed)
        self._read()
        self.lengths[:] = 0
        self.returns[:] = 0
        return self.observe(), {"cell": self.cells.copy(), "_cell": np.ones(self.num_envs, bool)}

    def step(self, actions: np.ndarray):
        actions = np.asarray(actions)
        in_range = actions.size and actions.min() >= 0 and actions.max() < NUM_ACTIONS
        if actions.shape != (self.num_envs,) or not in_range:
            raise ValueError(f"actions must be ({self.num_envs},) integers in 0..14, got {actions}")
        if self.games is None:
            raise RuntimeError("call reset before step")
        before = self.images
        self.games.act(actions.astype(np.int32))
        rewards, dones = self._read()
        self.lengths += 1
        self.returns += rewards
        terminations, truncations = dones, np.zeros(self.num_envs, bool)
        info: dict[str, Any] = {}
        if dones.any():
            games = self.games.get_info()
            successes = np.array([bool(game["prev_level_complete"]) for game in games]) & dones
            truncations = dones & ~successes & (self.lengths >= self.max_steps)
            terminations = dones & ~truncations
            final = np.where(dones[:, None, None, None], before, self.images)
            info["final_obs"], info["_final_obs"] = {"image": final}, dones.copy()
            episode = {
                "r": self.returns.copy(),
                "l": self.lengths.copy(),
                "success": successes,
                "level": np.array([game["prev_level_seed"] for game in games]),
                "coverage": np.full(self.num_envs, np.nan),
            }
            episode |= {f"_{key}": dones.copy() for key in tuple(episode)}
            info["final_info"] = {
                "cell": self.cells.copy(),
                "_cell": dones.copy(),
                "episode": episode,
                "_episode": dones.copy(),
            }
            info["_final_info"] = dones.copy()
            self.lengths[dones] = 0
            self.returns[dones] = 0
        info["cell"], info["_cell"] = self.cells.copy(), np.ones(self.num_envs, bool)
        return self.observe(), rewards, terminations, truncations, info

    def get_state(self) -> dict[str, Any]:
        """Everything that `set_state` needs to go on from here in another process."""
        games = [np.frombuffer(state, np.uint8).copy() for state in self.games.get_state()]
        return {"games": games, "lengths": self.lengths.copy(), "returns": self.returns.copy()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Put every env where `get_state` found it."""
        self._make(0)
        self.games.set_state([np.asarray(game).tobytes() for game in state["games"]])
        self._read()
        self.lengths[:], self.returns[:] = (
            np.asarray(state["lengths"]),
            np.asarray(state["returns"]),
        )

    def render(self) -> tuple[np.ndarray, ...]:
        """The observation of each env as N images of (256, 256, 3) uint8."""
        images = self.images.transpose(0, 2, 3, 1)
        return tuple(images.repeat(4, 1).repeat(4, 2))

    def close_extras(self, **kwargs: Any) -> None:
        if getattr(self, "games", None) is not None:
            self.games.close()
            self.games = None
