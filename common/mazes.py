"""Griddly mazes of 32 x 32 cells for exploration research. [SOFE app:env_details, Mazes]

Three levels of our own, two engines that give the same results bit for bit:

- `griddly`  the Griddly game engine through its direct binding, one process, one game per env
- `numpy`    batched arrays, for many envs at once and where Griddly has no wheel

`MazeEnv` is a single gymnasium environment, `MazeVecEnv` a natively vectorised one. Importing this
file registers both as `sofe/Maze1-v0`, `sofe/Maze2-v0` and `sofe/Maze3-v0`.

`random_walk_coverage` and `full_knowledge_coverage` are the two reference lines of coverage plots:
an agent that knows nothing, and one that knows the map and where it has been.
"""

import functools
import importlib.util
import sys
from collections import deque
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

# W wall, . floor, A start of the avatar, G goal, D door
MAZE_1 = """
WWWWWWWWWWWWWWWWWWWWWWWWWWWWWWWW
WAW...............W.......W...WW
W.WWWWWWWWWWW.W.WWW.WWW.W.W.W.WW
W...........W.W.....W...W...W.WW
WWWWWWWWWWW.WWWWWWWWW.WWWWWWW.WW
W...W.....W.........W.....W...WW
W.WWW.W.W.WWWWWWWWW.WWWWW.W.WWWW
W.....W.W.W.......W.....W.W.W.WW
W.WWWWW.W.W.W.WWW.WWWWW.W.W.W.WW
W...W...W.W.W.W...W...W.W.W...WW
WWW.W.WWW.WWW.W.WWW.W.W.W.WWWWWW
W.W.W.W.W.....W.W...W.W.W.....WW
W.W.W.W.W.WWWWW.W.WWW.W.WWWWW.WW
W.W.W.W...W...W...W...W.W.....WW
W.W.W.WWWWW.W.W.WWWWWWW.W.WWWWWW
W...W.W.....W.W.W...W...W.....WW
WWWWW.W.WWWWW.WWW.W.W.WWW.WWW.WW
W.....W.W...W.....W...W.W...W.WW
W.WWWWW.WWW.WWWWWWWWWWW.WWW.W.WW
W.....W.......W.....W...W.W.W.WW
W.WWW.WWWWWWW.W.WWW.W.W.W.W.W.WW
W.W.W.......W.W...W.W.W...W.W.WW
W.W.W.WWWWWWW.WWW.W.W.WWWWW.W.WW
W...W...W.....W...W.W.......W.WW
W.WWWWW.W.WWWWW.WWW.WWW.WWWWW.WW
W.W.....W.....W.W.W...W...W...WW
W.W.WWWWWWWWW.W.W.WWW.WWWWW.WWWW
W.W.........W...W...W.W...W...WW
W.WWWWWWWWW.WWWWW.W.W.W.W.WWW.WW
W.........W.......W.....W.....WW
WWWWWWWWWWWWWWWWWWWWWWWWWWWWWWWW
WWWWWWWWWWWWWWWWWWWWWWWWWWWWWWWW
"""

MAZE_2 = """
WWWWWWWWWWWWWWWWWWWWWWWWWWWWWWWW
WA........W....................W
W.........W..........W.........W
W.........W..........W.........W
W.........W..........W.........W
W.........W..........W.........W
W....................W.........W
W.........W..........W.........W
W.........W..........W.........W
W.........W..........W.........W
WWWWWWWWW.WWWWWWWWW.WWWWWWWWW.WW
W.........W....................W
W.........W..........W.........W
W.........W..........W.........W
W.........W..........W.........W
W.........W..........W.........W
W.........W..........W.........W
W.........W..........W.........W
W.........W..........W.........W
W.........W..........W.........W
W.........W..........W.........W
WWW.WWWWWWWWWWWWWWWWWWWWWWWWWWWW
W.........W..........W.........W
W.........W..........W.........W
W.........W..........W.......G.W
W....................W.........W
W.........W..........W.........W
W.........W..........W.........W
W.........W..........W.........W
W.........W..........W.........W
W.........W....................W
WWWWWWWWWWWWWWWWWWWWWWWWWWWWWWWW
"""

# Row and column of the three doors that turn Maze 1 into Maze 3.
MAZE_3_DOORS = ((2, 6), (13, 10), (16, 23))


def _with_doors(level: str, doors: tuple[tuple[int, int], ...]) -> str:
    rows = [list(row) for row in level.split()]
    for row, column in doors:
        rows[row][column] = "D"
    return "\n".join("".join(row) for row in rows)


LEVELS = {
    "Maze1-v0": MAZE_1,
    "Maze2-v0": MAZE_2,
    "Maze3-v0": _with_doors(MAZE_1, MAZE_3_DOORS),
}

OBJECTS = {"avatar": "A", "wall": "W", "goal": "G", "door": "D"}
COLORS = {
    "wall": (60, 60, 60),
    "goal": (0, 150, 60),
    "door": (170, 110, 40),
    "avatar": (210, 40, 40),
}
ACTIONS = ("up", "right", "down", "left")
MOVES = np.array([[-1, 0], [0, 1], [1, 0], [0, -1]])

# The avatar has a Z level of its own, so that it can stand on a goal or in a door. `restart` moves
# it back to the start: no other object ever changes, and a reset of the whole game takes 1000 times
# as long. The environment ends the episode at the reward; a termination of Griddly's own would
# refuse the restart.
GDY = """
Version: "0.1"
Environment:
  Name: Maze
  Observers:
    Vector: {{IncludePlayerId: false, IncludeVariables: false, IncludeRotation: false}}
    Window:
      {{Type: VECTOR, TrackAvatar: true, RotateWithAvatar: false, Height: {view}, Width: {view}}}
  Player: {{Count: 1, AvatarObject: avatar}}
  Levels:
    - |
{level}
Actions:
  - Name: move
    InputMapping:
      Inputs:
        1: {{Description: up, VectorToDest: [0, -1]}}
        2: {{Description: right, VectorToDest: [1, 0]}}
        3: {{Description: down, VectorToDest: [0, 1]}}
        4: {{Description: left, VectorToDest: [-1, 0]}}
    Behaviours:
      - Src: {{Object: avatar, Commands: [{{mov: _dest}}]}}
        Dst: {{Object: _empty}}
      - Src: {{Object: avatar, Commands: [{{mov: _dest}}]}}
        Dst: {{Object: door}}
      - Src: {{Object: avatar, Commands: [{{mov: _dest}}, {{reward: 1}}]}}
        Dst: {{Object: goal}}
  - Name: restart
    InputMapping:
      Inputs:
        1: {{Description: back to the start, VectorToDest: [0, 0]}}
    Behaviours:
      - Src: {{Object: avatar, Commands: [{{mov: [{start_column}, {start_row}]}}]}}
        Dst: {{Object: avatar}}
Objects:
  - {{Name: avatar, MapCharacter: A, Z: 1}}
  - {{Name: wall, MapCharacter: W, Z: 0}}
  - {{Name: goal, MapCharacter: G, Z: 0}}
  - {{Name: door, MapCharacter: D, Z: 0}}
"""


NO_GRIDDLY = "no Griddly (Python 3.11, x86-64 only: pip install griddly==1.6.7): --engine numpy"


def griddly_installed() -> bool:
    return importlib.util.find_spec("griddly") is not None


@functools.cache
def say_fallback() -> None:
    """Say once per process that `auto` found no Griddly."""
    print("Griddly is not installed: the numpy engine runs the mazes, with the same results")


def parse_level(text: str, goal: bool = True) -> np.ndarray:
    """Turn a level's text into an array of its characters.

    text     str             one line per row of the characters W . A G D
    goal     bool            False: the goal cell becomes floor
    returns  (H, W) str      raises ValueError unless the level is a closed rectangle with one A
    """
    rows = text.split()
    if len({len(row) for row in rows}) != 1 or not set(text) <= set("W.AGD \n"):
        raise ValueError("a level needs rows of equal length made of the characters W . A G D")
    level = np.array([list(row) for row in rows])
    if (level == "A").sum() != 1:
        raise ValueError(f"a level needs exactly one start A, this one has {(level == 'A').sum()}")
    if (np.concatenate([level[[0, -1]].ravel(), level[:, [0, -1]].ravel()]) != "W").any():
        raise ValueError("a level needs a closed border of walls W")
    return level if goal else np.where(level == "G", ".", level)


def shortest_paths(walls: np.ndarray, cell: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Breadth-first search from one cell.

    walls    (H, W) bool     True where no one can walk
    returns  distances  (H, W) int64   moves from `cell`, -1 where it cannot be reached
             arrivals   (H, W) int64   the last action of a shortest path to each cell, -1 for none
    """
    distances = np.full(walls.shape, -1)
    arrivals = np.full(walls.shape, -1)
    distances[cell] = 0
    queue = deque([cell])
    while queue:
        row, column = queue.popleft()
        for action, (down, right) in enumerate(MOVES.tolist()):
            neighbour = row + down, column + right
            if not walls[neighbour] and distances[neighbour] < 0:
                distances[neighbour] = distances[row, column] + 1
                arrivals[neighbour] = action
                queue.append(neighbour)
    return distances, arrivals


def path_to(arrivals: np.ndarray, cell: tuple[int, int]) -> list[int]:
    """The actions of a shortest path to `cell`, from the `arrivals` of `shortest_paths`."""
    actions = []
    while (action := int(arrivals[cell])) >= 0:
        actions.append(action)
        cell = (cell[0] - MOVES[action, 0], cell[1] - MOVES[action, 1])
    return actions[::-1]


class GriddlyEngine:
    """N games of Griddly in this process. No threads: Griddly holds the interpreter's lock.

    cells    (N, 2) int64    row and column of each avatar
    """

    def __init__(
        self, level: np.ndarray, channels: tuple[str, ...], num_envs: int, view: int | None
    ):
        spec = importlib.util.find_spec("griddly")
        if spec is None:
            raise ModuleNotFoundError(NO_GRIDDLY)
        # The binding lies in a folder of the package; importing the package would load the old gym.
        package = Path(spec.origin).parent
        if str(package / "libs") not in sys.path:
            sys.path.append(str(package / "libs"))
        import python_griddly

        start_row, start_column = np.argwhere(level == "A")[0]
        text = GDY.format(
            level="\n".join("      " + " ".join(row) for row in level),
            start_row=start_row,
            start_column=start_column,
            view=view or 5,
        )
        resources = [str(package / "resources" / name) for name in ("games", "images", "shaders")]
        gdy = python_griddly.GDYReader(*resources).load_string(text)
        self.view = view
        self.games, self.players = [], []
        for _ in range(num_envs):
            # The game observes the whole map and the player what the agent may see.
            game = gdy.create_game("Vector" if view else "None")
            game.load_level(0)
            self.players.append(game.register_player("agent", "Window" if view else "Vector"))
            game.init(False)
            game.reset()
            self.games.append(game)
        # Griddly sorts channels by name and gives a map as [channel][x][y], which lies in memory as
        # [y][x][channel]. Each observer has one buffer, which every `observe` call overwrites.
        names = self.games[0].get_object_names()
        self.avatar, self.order = names.index("avatar"), [names.index(name) for name in channels]
        self.mappers = self.games if view else self.players
        self.maps = [np.asarray(mapper.observe()).transpose(2, 1, 0) for mapper in self.mappers]
        self.windows = [np.asarray(player.observe()).transpose(2, 1, 0) for player in self.players]
        self.actions = [np.array([[0, action + 1]], np.int32) for action in range(4)]
        self.restart_action = np.array([[1, 1]], np.int32)
        self.env_ids = np.arange(num_envs)
        self.send = [player.step_multi for player in self.players]
        self.refresh = [mapper.observe for mapper in self.mappers]
        self.copies = np.stack(self.maps)  # (N, H, W, objects)
        self.frames = np.stack(self.windows).transpose(0, 3, 1, 2)[:, self.order]  # (N, C, H, W)
        self.cells = np.repeat([[start_row, start_column]], num_envs, 0)

    def _act(self, env_ids: np.ndarray, actions: list[np.ndarray]) -> list[int]:
        """Send one action to each of some games, read them, return their rewards."""
        rewards = []
        for i, action in zip(env_ids.tolist(), actions, strict=True):
            rewards.append(self.send[i](action, True)[0])
            self.refresh[i]()
            self.copies[i] = self.maps[i]
            if self.view:
                self.players[i].observe()
                self.frames[i] = self.windows[i].transpose(2, 0, 1)[self.order]
        everyone = len(env_ids) == len(self.copies)
        copies = self.copies if everyone else self.copies[env_ids]
        places = copies[..., self.avatar].reshape(len(env_ids), -1).argmax(1)
        cells = np.empty((len(env_ids), 2), np.int64)
        np.divmod(places, copies.shape[2], out=(cells[:, 0], cells[:, 1]))
        if not self.view:  # on the whole map nothing but the avatar ever moves
            before = self.cells[env_ids]
            self.frames[env_ids, 0, before[:, 0], before[:, 1]] = 0
            self.frames[env_ids, 0, cells[:, 0], cells[:, 1]] = 1
        if not everyone:
            cells, some = self.cells.copy(), cells
            cells[env_ids] = some
        self.cells = cells  # a new array: what was handed out stays as it was
        return rewards

    def step(self, actions: np.ndarray) -> np.ndarray:
        """Move every avatar; return the rewards of Griddly, (N,) float64."""
        moves = [self.actions[action] for action in actions.tolist()]
        return np.array(self._act(self.env_ids, moves), np.float64)

    def restart(self, env_ids: np.ndarray) -> None:
        self._act(env_ids, [self.restart_action] * len(env_ids))

    def move_to(self, cells: np.ndarray, walls: np.ndarray) -> None:
        """Walk every avatar from the start to its cell; the rewards of the walk are dropped."""
        self.restart(self.env_ids)
        _, arrivals = shortest_paths(walls, tuple(self.cells[0]))
        for i, cell in enumerate(cells.tolist()):
            for action in path_to(arrivals, tuple(cell)):
                self._act(self.env_ids[[i]], [self.actions[action]])

    def observe(self) -> np.ndarray:
        return self.frames.copy()

    def close(self) -> None:
        games, self.games = self.games, []
        self.players, self.mappers, self.maps, self.windows = [], [], [], []
        self.send, self.refresh = [], []
        for game in games:
            game.release()


class NumpyEngine:
    """The same game on arrays, all envs at once.

    cells    (N, 2) int64    row and column of each avatar
    """

    def __init__(
        self, level: np.ndarray, channels: tuple[str, ...], num_envs: int, view: int | None
    ):
        self.height, self.width = level.shape
        self.view = view
        self.walls = (level == "W").ravel()
        self.goals = (level == "G").ravel()
        self.start = int((level == "A").ravel().argmax())
        self.offsets = MOVES @ np.array([self.width, 1])
        self.env_ids = np.arange(num_envs)
        self.places = np.full(num_envs, self.start)  # row * width + column
        objects = np.stack([level == OBJECTS[channel] for channel in channels]).astype(np.uint8)
        objects[0] = 0
        if view:
            margin = view // 2
            padded = np.pad(objects, ((0, 0), (margin, margin), (margin, margin)))
            windows = np.lib.stride_tricks.sliding_window_view(padded, (view, view), axis=(1, 2))
            self.windows = (
                windows.transpose(1, 2, 0, 3, 4).reshape(-1, len(channels), view, view).copy()
            )
            self.windows[:, 0, margin, margin] = 1  # the avatar is in the middle of its own view
        else:
            self.frames = np.repeat(objects[None], num_envs, 0)
            self.avatars = self.frames.reshape(num_envs, len(channels), -1)[:, 0]
            self.avatars[self.env_ids, self.places] = 1

    @property
    def cells(self) -> np.ndarray:
        return np.stack([self.places // self.width, self.places % self.width], 1)

    def _place(self, places: np.ndarray) -> None:
        if not self.view:
            self.avatars[self.env_ids, self.places] = 0
            self.avatars[self.env_ids, places] = 1
        self.places = places

    def step(self, actions: np.ndarray) -> np.ndarray:
        targets = self.places + self.offsets[actions]
        self._place(np.where(self.walls[targets], self.places, targets))
        moved = self.places == targets
        return (self.goals[self.places] & moved).astype(np.float64)

    def restart(self, env_ids: np.ndarray) -> None:
        places = self.places.copy()
        places[env_ids] = self.start
        self._place(places)

    def move_to(self, cells: np.ndarray, walls: np.ndarray) -> None:
        self._place(cells @ np.array([self.width, 1]))

    def observe(self) -> np.ndarray:
        return self.windows[self.places] if self.view else self.frames.copy()

    def close(self) -> None:
        pass


class MazeVecEnv(gym.vector.VectorEnv):
    """N copies of a 32 x 32 maze. [SOFE app:env_details, Mazes]

    Source        our own levels, after the descriptions in SOFE fig:mazes
    Observation   (C, 32, 32) uint8, one-hot maps of avatar, wall, goal, door (those the maze has),
                  [row][column]; with `view` an odd window of that size round the avatar, 0 outside
    Actions       0 up, 1 right, 2 down, 3 left; a move into a wall stays
    Reward        1 on the goal of Maze 2 (with `goal`), else 0
    End           on the goal (terminated) or after `max_steps` moves (truncated); the number of
                  moves so far is not observed
    Optimal       return 1 after 75 moves in Maze 2 with the goal; without a goal there is no
                  return, and the measure is coverage, the share of reachable cells visited
    Autoreset     SAME_STEP: final_obs and final_info hold the end, obs and info the new start

    info["cell"]                       (N, 2) int64    row and column of each avatar
    info["final_info"]["cell"]         (N, 2) int64    the last cell of the episodes that ended
    info["final_info"]["episode"]      r return, l length in steps, coverage in [0, 1], each (N,)
    reachable                          (H, W) bool     the cells that count for coverage
    """

    metadata = {
        "autoreset_mode": AutoresetMode.SAME_STEP,
        "render_modes": ["rgb_array"],
        "render_fps": 30,
    }

    def __init__(
        self,
        num_envs: int = 1,
        maze: str = "Maze1-v0",
        goal: bool = False,
        view: int | None = None,
        max_steps: int = 1000,
        engine: Literal["auto", "griddly", "numpy"] = "auto",
        level: str | None = None,
        render_mode: str | None = None,
    ):
        """
        num_envs     N
        maze         a name in LEVELS
        goal         keep the level's goal; ValueError where it has none
        view         odd side of the window that the agent sees (None: the whole map)
        max_steps    time limit of an episode in moves, > 0
        engine       griddly, numpy, or auto: griddly where it is installed
        level        text of a level of your own in place of `maze`, see `parse_level`
        """
        if maze not in LEVELS:
            raise ValueError(f"unknown maze {maze!r}, there are {', '.join(LEVELS)}")
        level = parse_level(level or LEVELS[maze], goal)
        if goal and not (level == "G").any():
            raise ValueError(f"goal=True needs a level with a goal, {maze} has none")
        if view is not None and (view < 1 or view % 2 == 0):
            raise ValueError(f"view must be an odd number of cells, not {view}")
        if num_envs < 1 or max_steps < 1:
            raise ValueError("num_envs and max_steps must be at least 1")
        channels = tuple(
            name for name, symbol in OBJECTS.items() if (level == symbol).any() or name == "avatar"
        )
        self.num_envs, self.max_steps, self.render_mode = num_envs, max_steps, render_mode
        self.level, self.channels, self.walls = level, channels, level == "W"
        start = tuple(np.argwhere(level == "A")[0])
        self.reachable = shortest_paths(self.walls, start)[0] >= 0  # (H, W)
        if engine == "auto":
            engine = "griddly" if griddly_installed() else "numpy"
            if engine == "numpy":
                say_fallback()
        self.engine_name = engine
        engines = {"griddly": GriddlyEngine, "numpy": NumpyEngine}
        self.engine = engines[engine](level, channels, num_envs, view)

        size = (view, view) if view else level.shape
        self.single_observation_space = gym.spaces.Box(0, 1, (len(channels), *size), np.uint8)
        self.single_action_space = gym.spaces.Discrete(len(ACTIONS))
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.env_ids = np.arange(num_envs)
        self.lengths = np.zeros(num_envs, np.int64)
        self.returns = np.zeros(num_envs)
        self.visited = np.zeros((num_envs, *level.shape), bool)  # (N, H, W)

    def _start(self, env_ids: np.ndarray) -> None:
        self.engine.restart(env_ids)
        self.lengths[env_ids] = 0
        self.returns[env_ids] = 0
        self.visited[env_ids] = False
        cells = self.engine.cells[env_ids]
        self.visited[env_ids, cells[:, 0], cells[:, 1]] = True

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        """Start every episode anew. Nothing in a maze is random: `seed` changes nothing."""
        super().reset(seed=seed)
        self._start(self.env_ids)
        return self.engine.observe(), {
            "cell": self.engine.cells,
            "_cell": np.ones(self.num_envs, bool),
        }

    def advance(self, actions: np.ndarray):
        """One move of every env without the autoreset: rewards, terminations, truncations, cells.

        Each is an array over the N envs; the cells are (N, 2).
        """
        actions = np.asarray(actions)
        in_range = actions.size and actions.min() >= 0 and actions.max() < len(ACTIONS)
        if actions.shape != (self.num_envs,) or not in_range:
            raise ValueError(f"actions must be ({self.num_envs},) integers in 0..3, got {actions}")
        rewards = self.engine.step(actions)
        cells = self.engine.cells
        self.lengths += 1
        self.returns += rewards
        self.visited[self.env_ids, cells[:, 0], cells[:, 1]] = True
        terminations = rewards > 0
        return rewards, terminations, (self.lengths >= self.max_steps) & ~terminations, cells

    def coverage(self) -> np.ndarray:
        """Share of the reachable cells that each env has visited in its episode, (N,) float64."""
        return self.visited.sum((1, 2)) / self.reachable.sum()

    def step(self, actions: np.ndarray):
        rewards, terminations, truncations, cells = self.advance(actions)
        info: dict[str, Any] = {}
        dones = terminations | truncations
        if dones.any():
            observations = self.engine.observe()
            final_obs = np.full(self.num_envs, None, object)
            for i in np.flatnonzero(dones):
                final_obs[i] = observations[i]
            info["final_obs"], info["_final_obs"] = final_obs, dones.copy()
            episode = {
                "r": self.returns.copy(),
                "l": self.lengths.copy(),
                "coverage": self.coverage(),
            }
            episode |= {f"_{key}": dones.copy() for key in ("r", "l", "coverage")}
            info["final_info"] = {
                "cell": cells,
                "_cell": dones.copy(),
                "episode": episode,
                "_episode": dones.copy(),
            }
            info["_final_info"] = dones.copy()
            self._start(np.flatnonzero(dones))
            cells = self.engine.cells
        info["cell"], info["_cell"] = cells, np.ones(self.num_envs, bool)
        return self.engine.observe(), rewards, terminations, truncations, info

    def observe(self) -> np.ndarray:
        """The observations as they stand, a copy."""
        return self.engine.observe()

    def get_state(self) -> dict[str, np.ndarray]:
        """Everything that `set_state` needs to go on from here in another process."""
        return {
            "cells": self.engine.cells,
            "lengths": self.lengths.copy(),
            "returns": self.returns.copy(),
            "visited": self.visited.copy(),
        }

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        """Put every env where `get_state` found it."""
        self.engine.move_to(np.asarray(state["cells"]), self.walls)
        for name in ("lengths", "returns", "visited"):
            getattr(self, name)[:] = np.asarray(state[name])

    def render(self) -> tuple[np.ndarray, ...]:
        """The map of each env as N images of (8 H, 8 W, 3) uint8."""
        images = []
        for row, column in self.engine.cells:
            image = np.full((*self.level.shape, 3), 235, np.uint8)
            for name in ("wall", "goal", "door"):
                image[self.level == OBJECTS[name]] = COLORS[name]
            image[row, column] = COLORS["avatar"]
            images.append(image.repeat(8, 0).repeat(8, 1))
        return tuple(images)

    def close_extras(self, **kwargs: Any) -> None:
        if hasattr(self, "engine"):  # not where the constructor refused its arguments
            self.engine.close()


class MazeEnv(gym.Env):
    """One maze with gymnasium's single-environment interface; see `MazeVecEnv` for everything else.

    info["cell"]     (2,) int64   row and column of the avatar
    info["episode"]  in the last step: r return, l length in steps, coverage in [0, 1]
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}

    def __init__(self, render_mode: str | None = None, **kwargs: Any):
        """kwargs: maze, level, goal, view, max_steps and engine as in `MazeVecEnv`."""
        self.vec = MazeVecEnv(num_envs=1, **kwargs)
        self.render_mode = render_mode
        self.reachable = self.vec.reachable
        self.observation_space = self.vec.single_observation_space
        self.action_space = self.vec.single_action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        observations, info = self.vec.reset(options=options)
        return observations[0], {"cell": info["cell"][0]}

    def step(self, action: int):
        rewards, terminations, truncations, cells = self.vec.advance(np.array([action]))
        info: dict[str, Any] = {"cell": cells[0]}
        if terminations[0] or truncations[0]:
            info["episode"] = {
                "r": float(self.vec.returns[0]),
                "l": int(self.vec.lengths[0]),
                "coverage": float(self.vec.coverage()[0]),
            }
        observation = self.vec.engine.observe()[0]
        return observation, float(rewards[0]), bool(terminations[0]), bool(truncations[0]), info

    def render(self) -> np.ndarray:
        return self.vec.render()[0]

    def close(self) -> None:
        self.vec.close()


def random_walk_coverage(
    maze: str = "Maze1-v0", max_steps: int = 1000, seed: int = 1
) -> np.ndarray:
    """Coverage after each step of random moves, mean of 100 episodes; (max_steps,) float64."""
    envs = MazeVecEnv(100, maze, max_steps=max_steps + 1, engine="numpy")
    envs.reset()
    random = np.random.default_rng(seed)
    curve = np.empty(max_steps)
    for step in range(max_steps):
        envs.advance(random.integers(len(ACTIONS), size=envs.num_envs))
        curve[step] = envs.coverage().mean()
    return curve


def full_knowledge_coverage(maze: str = "Maze1-v0", max_steps: int = 1000) -> np.ndarray:
    """Coverage after each step of an explorer that always walks to the nearest unvisited cell.

    It knows the map and where it has been, which is what SOFE's agent can see. Among equally near
    cells it takes the one closest to the start. A strong line, not the best possible: that would be
    the tour of a travelling salesman.

    returns  (max_steps,) float64
    """
    envs = MazeVecEnv(1, maze, max_steps=max_steps + 1, engine="numpy")
    envs.reset()
    from_start, _ = shortest_paths(envs.walls, tuple(envs.engine.cells[0]))
    curve = np.empty(max_steps)
    path: list[int] = []
    for step in range(max_steps):
        unvisited = envs.reachable & ~envs.visited[0]
        if not path and unvisited.any():
            distances, arrivals = shortest_paths(envs.walls, tuple(envs.engine.cells[0]))
            nearest = distances == distances[unvisited].min()
            candidates = np.argwhere(unvisited & nearest)
            depths = from_start[candidates[:, 0], candidates[:, 1]]
            path = path_to(arrivals, tuple(candidates[depths.argmin()]))
        if path:
            envs.advance(np.array([path.pop(0)]))
        curve[step] = envs.coverage()[0]
    return curve


for _maze in LEVELS:
    gym.register(
        id=f"sofe/{_maze}",
        entry_point="common.mazes:MazeEnv",
        vector_entry_point="common.mazes:MazeVecEnv",
        kwargs={"maze": _maze},
    )
