"""MiniHack levels on NetHack, N at a time, over a few worker processes. [SOFE sec:e3b_section]

`MiniHackVecEnv` runs any level of the package MiniHack: `MiniHack-MultiRoom-N6-v0` is the paper's.
What the package leaves to its user is done here:

- a seed fixes the whole episode, layout included, whatever the day and the number of workers
- the levels of training and of evaluation are apart
- a time limit is a truncation, and reaching the goal in the last step counts
- the observation in which an episode ended is the one that the agent reached (the package shows
  what NetHack prints while it quits)
- observations are copies, and those that nobody asked for are not made: a step takes half the time
- a level is compiled without a shell: a reset takes half the time

A worker is a process of its own that holds some of the N games. It shares the observations with
this one through anonymous memory, ends with this process however that ends, and if it dies itself,
the next step says so.
"""

import contextlib
import importlib.util
import mmap
import multiprocessing.connection
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import traceback
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

MAP = (21, 79)  # rows and columns of a NetHack level
OBSERVATIONS = {"glyphs": (MAP, np.int16), "blstats": ((27,), np.int64), "message": ((256,), "u1")}
NEEDED = (*OBSERVATIONS, "program_state", "internal")  # what NLE itself looks at in a step
NEVER = 2**31 - 1  # steps; the time limit is kept here, not by NLE
LEVELS = 2**30  # level seeds of a split; training has those below, evaluation the next
DEAD_AFTER = 120  # seconds without an answer of a worker
NO_MINIHACK = "no MiniHack (Linux on x86-64 only: pip install -r requirements.txt)"


def minihack_installed() -> bool:
    return all(importlib.util.find_spec(name) for name in ("nle", "minihack", "minigrid"))


def level_seed(seed: int, env: int, episode: int, split: str = "train", num_levels: int = 0) -> int:
    """The seed of a level: a function of the run's seed, the env's index and the episode's.

    num_levels   int   how many levels there are in the split (0: LEVELS)
    returns      int   in [0, LEVELS) for training, in [LEVELS, 2 LEVELS) for evaluation
    """
    words = np.random.SeedSequence([seed, env, episode]).generate_state(1, np.uint64).tolist()
    return words[0] % (num_levels or LEVELS) + (LEVELS if split == "eval" else 0)


@contextlib.contextmanager
def _python_random(seed: int) -> Iterator[None]:
    """Seed Python's own generator, which some levels draw from, and put it back."""
    state = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(state)


def make_game(env_id: str, penalty_step: float = 0.0) -> gym.Env:
    """One game of MiniHack without wrappers, of which only OBSERVATIONS are made where possible.

    Raises ModuleNotFoundError without the packages, ValueError for an unknown level.
    """
    if not minihack_installed():
        raise ModuleNotFoundError(NO_MINIHACK)
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")  # minigrid imports it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old packages, whose deprecations nobody here can mend
        import minihack  # noqa: F401  registers the levels

        if env_id not in gym.registry or "minihack" not in str(gym.spec(env_id).entry_point):
            raise ValueError(f"no MiniHack level {env_id!r}; MiniHack-MultiRoom-N6-v0 is one")
        spec = gym.spec(env_id)
        try:
            game = gym.envs.registration.load_env_creator(spec.entry_point)(
                **spec.kwargs,
                observation_keys=tuple(OBSERVATIONS),
                penalty_step=penalty_step,
                fix_moon_phase=True,  # else a full moon or a Friday 13th changes the game
            )
        except Exception as error:  # Boxoban wants maps, Crossing another minigrid, Custom a level
            reason = f"{type(error).__name__} {error}".strip()
            raise ValueError(f"MiniHack cannot make {env_id}: {reason}") from error
    # NLE would quit where an episode ends and overwrite the observation with that: see `restart`.
    game._quit_game = lambda observation, done: None
    game._patch_nhdat = lambda des_file: compile_level(game, des_file)
    if game.reward_manager is None:
        # A description of each cell in words takes half of a step. The positions of the others
        # in NLE's tuple stay as they are.
        nethack = game.nethack
        nethack._pynethack.set_buffers(**{key: nethack._obs_buffers[key] for key in NEEDED})
        nethack._obs = tuple(
            buffer if key in NEEDED else buffer[:0]
            for key, buffer in zip(game._observation_keys, nethack._obs, strict=True)
        )
    return game


def restart(game: gym.Env, seed: int, running: bool) -> dict[str, np.ndarray]:
    """Begin the episode that a seed fixes, layout and chance; return its first observation.

    running   bool   the game has been begun before: it is quit first, or some memory would be lost
    """
    if running and not game.nethack._pynethack.done():
        type(game)._quit_game(game, game.last_observation, False)
    for name in ("logfile", "xlogfile"):  # a line for each game ever played
        with contextlib.suppress(OSError):
            os.truncate(Path(game.nethack._vardir) / name, 0)
    if hasattr(game, "minigrid_env"):  # draws the rooms, in each reset
        game.minigrid_env.unwrapped.np_random, _ = gym.utils.seeding.np_random(seed)
    game.nethack.set_initial_seeds(seed, seed, False)
    with _python_random(seed):
        return game.reset()[0]


def compile_level(game: gym.Env, des_file: str) -> None:
    """Put a level into the files of a game, as MiniHack's shell script does, with the same bytes.

    game       a game of MiniHack, whose folder has been set up by the package itself
    des_file   str   the text of a level's description; the name of a file goes the package's way
    """
    from minihack.base import HACKDIR

    compiler, archiver = Path(HACKDIR) / "lev_comp", Path(HACKDIR) / "dlb"
    folder = Path(game.nethack._vardir)
    lib = folder / "lib"
    found = lib.is_dir() and all(os.access(program, os.X_OK) for program in (compiler, archiver))
    if des_file.endswith(".des") or not found:
        type(game)._patch_nhdat(game, des_file)
        return
    (lib / "mylevel.des").write_text(des_file)
    try:
        _call(lib, compiler, "mylevel.des")
    finally:
        (lib / "mylevel.des").unlink()
    _call(lib, archiver, "cf", "nhdat", *sorted(os.listdir(lib)))
    os.replace(lib / "nhdat", folder / "nhdat")


def _call(folder: Path, *command: str | Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        words = " ".join((done.stderr + done.stdout).split())[:300]
        raise RuntimeError(f"{Path(command[0]).name} failed on a level: {words}")


def _lay_out(num_envs: int, buffer: mmap.mmap | None = None) -> tuple[int, dict[str, np.ndarray]]:
    """The arrays that this process and the workers share: the bytes they take, and the arrays.

    final_*   the observation that an action led to, where the episode ended there
    """
    fields: dict[str, tuple[tuple[int, ...], Any]] = {
        "actions": ((), np.int64),
        "rewards": ((), np.float32),
        "terminations": ((), np.bool_),
        "truncations": ((), np.bool_),
        "successes": ((), np.bool_),
    }
    fields |= OBSERVATIONS | {f"final_{key}": field for key, field in OBSERVATIONS.items()}
    arrays, offset = {}, 0
    for name, (shape, dtype) in fields.items():
        size = int(num_envs * np.prod(shape, dtype=int)) * np.dtype(dtype).itemsize
        if buffer is not None:
            arrays[name] = np.ndarray((num_envs, *shape), dtype, buffer, offset)
        offset += -(-size // 64) * 64  # of one cache line each
    return offset, arrays


class Games:
    """The games of the envs first, first + 1, ..., in this process.

    A worker calls the methods on behalf of `MiniHackVecEnv`; without workers that does it itself.
    """

    def __init__(
        self,
        arrays: dict[str, np.ndarray],
        env_id: str,
        first: int,
        count: int,
        max_steps: int | None,
        split: str,
        num_levels: int,
        penalty_step: float,
        stagger: int,
    ):
        self.first, self.split, self.num_levels = first, split, num_levels
        self.arrays = {name: array[first : first + count] for name, array in arrays.items()}
        self.games = [make_game(env_id, penalty_step) for _ in range(count)]
        self.max_steps = max_steps or self.games[0]._max_episode_steps
        for game in self.games:
            game._max_episode_steps = NEVER
        ranks = np.arange(first + 1, first + count + 1)  # from 1 to N over all workers
        self.first_limits = np.full(count, self.max_steps)
        if stagger:
            self.first_limits = -(-ranks * self.max_steps // stagger)  # rounded up
        self.seed = 0
        self.episodes = np.zeros(count, np.int64)
        self.lengths = np.zeros(count, np.int64)
        self.running = [False] * count

    def describe(self) -> tuple[int, int]:
        """How many actions there are, and the time limit in steps."""
        return len(self.games[0].actions), self.max_steps

    def _write(self, i: int, observation: dict[str, np.ndarray], prefix: str = "") -> None:
        for key in OBSERVATIONS:
            self.arrays[prefix + key][i] = observation[key]

    def _start(self, i: int) -> None:
        """Begin the current episode of one env."""
        place = (self.seed, self.first + i, int(self.episodes[i]))
        seed = level_seed(*place, self.split, self.num_levels)
        self._write(i, restart(self.games[i], seed, self.running[i]))
        self.running[i] = True
        self.lengths[i] = 0

    def reset(self, seed: int, episodes: np.ndarray, actions: list[np.ndarray]) -> None:
        """Begin an episode in every env and take some actions in it.

        episodes   (count,) int64   which episode of each env
        actions    count arrays of integers
        """
        self.seed, self.episodes = seed, episodes.copy()
        for i, played in enumerate(actions):
            self._start(i)
            for action in played.tolist():
                observation = self.games[i].step(action)[0]
            if len(played):
                self._write(i, observation)
            self.lengths[i] = len(played)

    def step(self) -> None:
        """One step of every env; where an episode ends, begin the next."""
        arrays = self.arrays
        self.lengths += 1
        for i, action in enumerate(arrays["actions"].tolist()):
            observation, reward, terminated, _, info = self.games[i].step(action)
            limit = self.max_steps if self.episodes[i] else self.first_limits[i]
            truncated = not terminated and self.lengths[i] >= limit
            arrays["rewards"][i] = reward
            arrays["terminations"][i] = terminated
            arrays["truncations"][i] = truncated
            arrays["successes"][i] = info["end_status"].name == "TASK_SUCCESSFUL"
            if terminated or truncated:
                self._write(i, observation, "final_")
                self.episodes[i] += 1
                self._start(i)
            else:
                self._write(i, observation)

    def close(self) -> None:
        for game in self.games:
            game.close()


def serve(connection_fd: int, memory_fd: int, num_envs: int, folder: str) -> None:
    """What a worker does: obey until the other end is closed, which the end of its process does.

    folder   str   of this worker alone, for the files of NetHack; removed at the end
    """
    for fd in (connection_fd, memory_fd):
        os.set_inheritable(fd, False)
    connection = multiprocessing.connection.Connection(connection_fd)
    arrays = _lay_out(num_envs, mmap.mmap(memory_fd, _lay_out(num_envs)[0]))[1]
    games = None
    try:
        while True:
            name, *values = connection.recv()
            try:
                if name == "make":
                    games = Games(arrays, *values)
                    answer = games.describe()
                else:
                    answer = getattr(games, name)(*values)
                connection.send(("done", answer))
            except Exception as error:
                frame = traceback.extract_tb(error.__traceback__)[-1]
                place = f"{Path(frame.filename).name}:{frame.lineno}"
                text = " ".join(str(error).split()) or "no message"
                connection.send((type(error).__name__, f"{text} ({place})"))
    except (EOFError, OSError):  # the other process has gone, or wants no more
        pass
    finally:
        if games is not None:
            games.close()
        shutil.rmtree(folder, ignore_errors=True)


class WorkerError(RuntimeError):
    """A worker process died, fell silent or failed; one line says which and how."""


class Worker:
    """The process that plays the games of the envs first, ..., first + count - 1."""

    def __init__(self, index: int, first: int, count: int, num_envs: int, memory_fd: int):
        ours, theirs = socket.socketpair()
        self.folder = tempfile.mkdtemp(prefix="sofe-minihack-")
        root = str(Path(__file__).resolve().parent.parent)
        call = f"serve({theirs.fileno()}, {memory_fd}, {num_envs}, {self.folder!r})"
        # Not by the name of this file: its folder must not be where `import minihack` looks.
        code = (
            f"import sys; sys.path.insert(0, {root!r}); from common.minihack import serve; {call}"
        )
        threads = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
        with theirs:
            # A session of its own keeps Ctrl-C from it.
            self.process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-c", code],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), memory_fd),
                start_new_session=True,
                env=os.environ | threads | {"TMPDIR": self.folder},
            )
        self.connection = multiprocessing.connection.Connection(ours.detach())
        envs = f"env {first}" if count == 1 else f"envs {first} to {first + count - 1}"
        self.name = f"MiniHack worker {index} (process {self.process.pid}, {envs})"

    def send(self, *message: Any) -> None:
        with contextlib.suppress(OSError):  # it is dead: `receive` tells more
            self.connection.send(message)

    def receive(self) -> Any:
        # Not one long wait: a stopped process would find its time over when it is continued.
        if not any(self.connection.poll(1.0) for _ in range(DEAD_AFTER)):
            raise WorkerError(f"{self.name} has not answered for {DEAD_AFTER} s")
        try:
            status, answer = self.connection.recv()
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
            status = self.process.returncode
            how = f"signal {-status}" if status and status < 0 else f"exit status {status}"
            raise WorkerError(f"{self.name} died ({how}); its games are lost") from None
        if status in ("ModuleNotFoundError", "ValueError"):
            raise (ModuleNotFoundError if status == "ModuleNotFoundError" else ValueError)(answer)
        if status != "done":
            raise WorkerError(f"{self.name} failed: {status}: {answer}")
        return answer


def _stop(workers: list[Worker]) -> None:
    """End the workers, whatever they are doing, and remove what they left."""
    for worker in workers:
        worker.connection.close()
    for worker in workers:
        try:
            worker.process.wait(5)
        except subprocess.TimeoutExpired:
            worker.process.kill()
            worker.process.wait()
        shutil.rmtree(worker.folder, ignore_errors=True)
    workers.clear()


class MiniHackVecEnv(gym.vector.VectorEnv):
    """N games of a MiniHack level. [SOFE sec:e3b_section; Samvelyan et al. 2021, MiniHack]

    Source        the package MiniHack, on the NetHack Learning Environment
    Observation   dict of  glyphs   (21, 79) int16  what is seen on each cell, [row][column]
                           blstats  (27,) int64     numbers of the status line, column and row first
                           message  (256,) uint8    the text on top, padded with 0
                           glyphs_crop (crop, crop) int16, with `crop`: glyphs round the agent,
                           0 outside the map
    Actions       those of the level; a navigation level has 8 moves: N, E, S, W, NE, SE, SW, NW. A
                  closed door opens when it is walked into, not diagonally
    Reward        1 at the goal (levels with rewards of their own: those), and `penalty_step` where
                  no time passes in the game in a step; -0.01 is the package's own
    End           goal or death (terminated), or `max_steps` steps (truncated), not observed; after
                  a death NetHack shows an empty map and zeros
    Optimal       1
    Levels        see `level_seed`: an episode's level and chance are fixed by the run's seed, the
                  env's index and the number of the episode. Neither the number of workers nor the
                  number of envs, the day or another env change it. Training and evaluation draw
                  from disjoint halves of the seeds
    Autoreset     SAME_STEP: final_obs and final_info hold the end, obs and info the new start

    info["cell"]                       (N, 2) int64    row and column of the agent
    info["final_obs"]                  dict as obs, there in steps in which an episode ended: the
                                       true s' of all N envs, which is obs where no episode ended
    info["final_info"]["cell"]         (N, 2) int64    the last cell of the episodes that ended
    info["final_info"]["episode"]      r return, l length in steps, success (bool), coverage: share
                                       of the 21 x 79 cells of the map that the agent stood on; (N,)
    reachable                          (21, 79) bool   all True: it differs from level to level
    """

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP, "render_modes": []}

    def __init__(
        self,
        env_id: str = "MiniHack-MultiRoom-N6-v0",
        num_envs: int = 1,
        num_workers: int = 1,
        max_steps: int | None = None,
        penalty_step: float = 0.0,
        crop: int | None = None,
        split: Literal["train", "eval"] = "train",
        num_levels: int = 0,
        stagger: bool = False,
    ):
        """
        env_id        name of a level as MiniHack registers it
        num_envs      N
        num_workers   processes that play, at most N (0: this process does)
        max_steps     time limit of an episode in steps (None: the level's own)
        penalty_step  reward of a step in which no time passes in the game
        crop          odd side of the window round the agent (None: no window)
        split         whose level seeds to draw from
        num_levels    how many levels of the split to draw from (0: all 2^30)
        stagger       the time limit of env i's first episode is (i + 1) / N of the others', so that
                      not all episodes begin in the same step for as long as none is solved
        Raises ModuleNotFoundError without the packages, ValueError for a bad argument.
        """
        if not minihack_installed():
            raise ModuleNotFoundError(NO_MINIHACK)
        if num_envs < 1 or num_workers < 0 or (max_steps is not None and max_steps < 1):
            raise ValueError("num_envs and max_steps must be at least 1, num_workers at least 0")
        if crop is not None and (crop < 1 or crop % 2 == 0):
            raise ValueError(f"crop must be an odd number of cells, not {crop}")
        if split not in ("train", "eval") or not 0 <= num_levels <= LEVELS:
            raise ValueError(f"split is train or eval, and num_levels in 0..{LEVELS}")
        self.num_envs, self.crop, self.render_mode = num_envs, crop, None
        self.reachable = np.ones(MAP, bool)
        self.env_ids = np.arange(num_envs)
        self._busy = False

        size, _ = _lay_out(num_envs)
        self._workers: list[Worker] = []
        self._games: Games | None = None
        self._finalizer = weakref.finalize(self, _stop, self._workers)
        settings = (max_steps, split, num_levels, penalty_step, num_envs * stagger)
        if num_workers == 0:
            self._arrays = _lay_out(num_envs, mmap.mmap(-1, size))[1]
            self._games = Games(self._arrays, env_id, 0, num_envs, *settings)
            self._bounds = [(0, num_envs)]
            described = self._games.describe()
        else:
            with _anonymous_file(size) as memory:
                self._arrays = _lay_out(num_envs, mmap.mmap(memory.fileno(), size))[1]
                bounds = np.linspace(0, num_envs, min(num_workers, num_envs) + 1).astype(int)
                self._bounds = list(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True))
                for i, (low, high) in enumerate(self._bounds):
                    self._workers.append(Worker(i, low, high - low, num_envs, memory.fileno()))
            described = self._call(
                "make", [(env_id, low, high - low, *settings) for low, high in self._bounds]
            )[0]
        num_actions, self.max_steps = described

        spaces = {
            key: gym.spaces.Box(np.iinfo(dtype).min, np.iinfo(dtype).max, shape, dtype)
            for key, (shape, dtype) in OBSERVATIONS.items()
        }
        if crop:
            spaces["glyphs_crop"] = gym.spaces.Box(-32768, 32767, (crop, crop), np.int16)
        self.single_observation_space = gym.spaces.Dict(spaces)
        self.single_action_space = gym.spaces.Discrete(num_actions)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

        self.seed: int | None = None
        self.episodes = np.zeros(num_envs, np.int64)  # number of the current episode of each env
        self.lengths = np.zeros(num_envs, np.int64)
        self.returns = np.zeros(num_envs)
        self.actions = np.zeros((num_envs, self.max_steps), np.uint8)  # of the current episodes
        self.visited = np.zeros((num_envs, *MAP), bool)
        self.cells = np.zeros((num_envs, 2), np.int64)

    def _call(self, name: str, values: list[tuple]) -> list[Any]:
        """Have all workers call a method of their games at once, with the values for each."""
        if self._busy or not (self._workers or self._games):
            raise RuntimeError("closed, or interrupted in a step: make the environments anew")
        self._busy = True
        try:
            if self._games is not None:
                answers = [getattr(self._games, name)(*values[0])]
            else:
                for worker, of_worker in zip(self._workers, values, strict=True):
                    worker.send(name, *of_worker)
                answers = [worker.receive() for worker in self._workers]
        except Exception:
            for worker in self._workers:
                worker.process.kill()
            self._finalizer()
            raise
        self._busy = False
        return answers

    def _restart(self, actions: list[np.ndarray]) -> None:
        """Begin self.episodes, and take some actions in them."""
        slices = [slice(*bounds) for bounds in self._bounds]
        self._call("reset", [(self.seed, self.episodes[some], actions[some]) for some in slices])
        self.cells = self._cells("")

    def _cells(self, prefix: str) -> np.ndarray:
        return self._arrays[prefix + "blstats"][:, 1::-1].copy()

    def _observe(self, ended: np.ndarray | None = None) -> dict[str, np.ndarray]:
        """Copies of the observations; those of the ends of episodes where `ended`, (N,) bool."""
        observations = {key: self._arrays[key].copy() for key in OBSERVATIONS}
        if ended is not None:
            for key, array in observations.items():
                array[ended] = self._arrays[f"final_{key}"][ended]
        if self.crop:
            half = self.crop // 2
            padded = np.pad(observations["glyphs"], ((0, 0), (half, half), (half, half)))
            rows, columns = observations["blstats"][:, 1::-1].T[:, :, None] + np.arange(self.crop)
            observations["glyphs_crop"] = padded[
                self.env_ids[:, None, None], rows[:, :, None], columns[:, None, :]
            ]
        return observations

    def observe(self) -> dict[str, np.ndarray]:
        """The observations as they stand, a copy."""
        return self._observe()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        """Begin new episodes: with a seed, those that it fixes; without, the next ones."""
        super().reset(seed=seed)
        if seed is None and self.seed is not None:
            self.episodes += 1
        else:
            self.seed = int(self.np_random.integers(2**31)) if seed is None else seed
            self.episodes[:] = 0
        self._restart([np.zeros(0, np.uint8)] * self.num_envs)
        self._begin(np.ones(self.num_envs, bool))
        return self.observe(), {"cell": self.cells, "_cell": np.ones(self.num_envs, bool)}

    def _begin(self, starting: np.ndarray) -> None:
        self.lengths[starting] = 0
        self.returns[starting] = 0
        self.visited[starting] = False
        cells = self.cells[starting]
        self.visited[self.env_ids[starting], cells[:, 0], cells[:, 1]] = True

    def step(self, actions: np.ndarray):
        actions = np.asarray(actions)
        last = self.single_action_space.n - 1
        in_range = actions.size and actions.min() >= 0 and actions.max() <= last
        if actions.shape != (self.num_envs,) or not in_range:
            raise ValueError(
                f"actions must be ({self.num_envs},) integers in 0..{last}, got {actions}"
            )
        if self.seed is None:
            raise RuntimeError("call reset before step")
        self._arrays["actions"][:] = actions
        self.actions[self.env_ids, self.lengths] = actions
        self._call("step", [()] * len(self._bounds))
        rewards, terminations, truncations = (
            self._arrays[name].copy() for name in ("rewards", "terminations", "truncations")
        )
        dones = terminations | truncations
        cells = np.where(dones[:, None], self._cells("final_"), self._cells(""))
        dead = dones & ~self._arrays["final_blstats"].any(1)  # NetHack has cleared them
        cells[dead] = self.cells[dead]
        self.lengths += 1
        self.returns += rewards
        self.visited[self.env_ids, cells[:, 0], cells[:, 1]] = True
        info: dict[str, Any] = {}
        if dones.any():
            info["final_obs"], info["_final_obs"] = self._observe(dones), dones.copy()
            episode = {
                "r": self.returns.copy(),
                "l": self.lengths.copy(),
                "success": self._arrays["successes"].copy(),
                "coverage": self.visited.mean((1, 2)),
            }
            episode |= {f"_{key}": dones.copy() for key in tuple(episode)}
            info["final_info"] = {
                "cell": cells,
                "_cell": dones.copy(),
                "episode": episode,
                "_episode": dones.copy(),
            }
            info["_final_info"] = dones.copy()
            self.episodes += dones
            cells = np.where(dones[:, None], self._cells(""), cells)
        self.cells = cells
        self._begin(dones)
        info["cell"], info["_cell"] = cells, np.ones(self.num_envs, bool)
        return self.observe(), rewards, terminations, truncations, info

    def get_state(self) -> dict[str, Any]:
        """Everything that `set_state` needs to go on from here in another process.

        NetHack cannot be copied, but it can be played again: the seeds and the actions since the
        start of each episode lead to the same place, in about 0.1 ms per action.
        """
        return {
            "seed": self.seed,
            "episodes": self.episodes.copy(),
            "lengths": self.lengths.copy(),
            "actions": self.actions.copy(),
            "returns": self.returns.copy(),
            "visited": self.visited.copy(),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Put every env where `get_state` found it, with any number of workers."""
        for name in ("episodes", "lengths", "actions", "returns", "visited"):
            getattr(self, name)[:] = np.asarray(state[name])
        self.seed = state["seed"]
        pairs = zip(self.actions, self.lengths.tolist(), strict=True)
        self._restart([actions[:length].copy() for actions, length in pairs])

    def close_extras(self, **kwargs: Any) -> None:
        if hasattr(self, "_finalizer"):  # not where the constructor refused its arguments
            self._finalizer()
            if self._games is not None:
                self._games.close()
                self._games = None


def _anonymous_file(size: int):
    """An open file without a name, which is gone when the last process has closed it."""
    if hasattr(os, "memfd_create"):
        file = os.fdopen(os.memfd_create("sofe-minihack"), "r+b")
    else:
        file = tempfile.TemporaryFile()  # noqa: SIM115, closed by the caller
    file.truncate(size)
    return file
