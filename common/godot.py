"""A 3D map in the Godot engine, to explore on foot. [SOFE app:env_details, Godot Map]

`GodotVecEnv` lets N avatars loose in one map, in one engine process; `GodotEnv` is one of them
with gymnasium's interface for single environments. Importing this file registers both as
`sofe/GodotMap-v0`. The engine is Debian's godot3-server; the project that it runs is godot/, and
godot/map.json is the map, from which `find_reachable` computes what can be reached and `draw_map`
draws a picture.
"""

import atexit
import contextlib
import functools
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

PROJECT = Path(__file__).resolve().parent.parent / "godot"
ENGINES = ("godot3-server", "godot3")  # the second needs a display
NO_ENGINE = "no Godot 3 engine (apt-get install godot3-server), or name one with --engine-path FILE"
ACTION_REPEAT = 8

# The protocol of godot/link.gd.
VERSION = 1
STEP, RESTART, PLACE = 0, 1, 2
STATE = 8  # floats: x, y, z, velocity x, y, z, yaw, grounded
POOL_REAL_ARRAY = 22  # Godot's number of that type
KINDS = np.eye(5, dtype=np.float32)[:, 1:]  # nothing, solid, lava, water, pad
FALL_SPEED = 20.0  # m/s, the unit of the vertical velocity in observations

# The engine quits by itself when the connection ends, with Python or before. An engine that is
# stopped cannot: Linux is told to kill it together with the thread that started it.
LAUNCHER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""

# A flood fill of the map on cells of this size, in metres.
CELL = 0.5
# Metres that the round lower end of an avatar slides up an edge that it runs into.
STEP_UP = 0.5

COLORS = {
    "wall": "#4a4a4a",
    "lava": "#e2562b",
    "water": "#6fa8dc",
    "pads": "#3aa655",
    "unreachable": "#d9d9d9",
}


class EngineError(RuntimeError):
    """There is no engine, or it ended, fell silent or never connected; one line says what and why.

    log    str    the end of what the engine printed
    """

    def __init__(self, message: str, log: str = ""):
        lines = [line.strip() for line in log.splitlines()]
        lines = [line for line in lines if line and not line.startswith("Godot Engine v")]
        last = " / ".join(lines[-6:])[-300:]
        super().__init__(f"{message}; it printed: {last}" if last else message)
        self.log = log


def find_engine(engine_path: str | None = None) -> str:
    """The full path of the engine: `engine_path`, or one of ENGINES on PATH; else EngineError."""
    for name in [engine_path] if engine_path else ENGINES:
        if found := shutil.which(name):
            return os.path.abspath(found)
    raise EngineError(f"{engine_path}: no such program; {NO_ENGINE}" if engine_path else NO_ENGINE)


class Engine:
    """One engine process and the connection to it: asks a question, waits for the answer.

    hello      dict     what the engine says of itself, with the map
    seconds    float    time spent waiting for answers
    """

    def __init__(
        self, num_agents: int, action_repeat: int, engine_path: str | None, timeout: float
    ):
        self.timeout, self.seconds = timeout, 0.0
        self.process: subprocess.Popen | None = None
        self.connection: socket.socket | None = None
        self.log = tempfile.TemporaryFile()  # noqa: SIM115, closed by close()
        self.holder: threading.Thread | None = None
        self.over = threading.Event()
        try:
            with socket.create_server(("127.0.0.1", 0), backlog=1) as server:
                self._launch(find_engine(engine_path), server, num_agents, action_repeat)
                atexit.register(self.close)
                self.connection = self._accept(server)
            self.connection.settimeout(timeout)
            self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.hello = json.loads(self._receive())
            if self.hello["version"] != VERSION:
                self._fail(f"godot/ speaks version {self.hello['version']}, not {VERSION}")
        except BaseException:
            self.close()
            raise

    def _launch(self, path: str, server: socket.socket, agents: int, repeat: int) -> None:
        command = [path, "--path", str(PROJECT), "--fixed-fps", "60", "--disable-render-loop"]
        command += [f"--port={server.getsockname()[1]}", f"--agents={agents}", f"--repeat={repeat}"]
        if sys.platform == "linux":
            command = [sys.executable, "-ISc", LAUNCHER, str(os.getpid()), *command]
        failures: list[OSError] = []
        started = threading.Event()

        def hold() -> None:
            """Start the engine and live as long as it: it ends with the thread that started it."""
            try:
                self.process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=self.log,
                    stderr=subprocess.STDOUT,
                    env=os.environ | {"LANG": "en_US.UTF-8"},
                    start_new_session=True,  # Ctrl-C is for Python, which ends the engine
                )
            except OSError as error:
                failures.append(error)
            started.set()
            self.over.wait()

        self.holder = threading.Thread(target=hold, name="engine", daemon=True)
        self.holder.start()
        started.wait()
        if failures:
            raise EngineError(f"{path} does not start ({failures[0].strerror}); {NO_ENGINE}")

    def _accept(self, server: socket.socket) -> socket.socket:
        server.settimeout(0.05)
        deadline = time.monotonic() + self.timeout
        while True:
            with contextlib.suppress(TimeoutError):
                return server.accept()[0]
            if self.process.poll() is not None:
                self._fail(f"the engine ended before it connected ({self._exit()})")
            if time.monotonic() > deadline:
                self._fail(f"the engine did not connect within {self.timeout:g} s and was ended")

    def _exit(self) -> str:
        code = self.process.returncode
        if code is None:
            return "still running"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"

    def _fail(self, message: str) -> None:
        self.log.seek(max(self.log.seek(0, os.SEEK_END) - 4000, 0))
        log = self.log.read().decode(errors="replace")
        self.close(kill=True)
        raise EngineError(message, log)

    def _receive(self) -> bytearray:
        return self._read(struct.unpack("<I", self._read(4))[0])

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        view, got = memoryview(data), 0
        while got < size:
            try:
                count = self.connection.recv_into(view[got:])
            except TimeoutError:
                self._fail(f"the engine gave no answer for {self.timeout:g} s and was ended")
            except OSError:
                count = 0
            if not count:
                self._lost()
            got += count
        return data

    def _lost(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(2)
        self._fail(f"the engine has gone ({self._exit()})")

    def ask(self, kind: int, values: np.ndarray) -> np.ndarray:
        """Send a question and return the engine's report of all avatars, a flat float32 array."""
        if self.connection is None:
            raise EngineError("the engine is closed")
        start = time.perf_counter()
        floats = np.append(np.float32(kind), values.astype("<f4").ravel()).tobytes()
        header = struct.pack("<III", 8 + len(floats), POOL_REAL_ARRAY, len(floats) // 4)
        try:
            self.connection.sendall(header + floats)
        except TimeoutError:
            self._fail(f"the engine read nothing for {self.timeout:g} s and was ended")
        except OSError:
            self._lost()
        report = np.frombuffer(self._receive(), "<f4", offset=8)
        self.seconds += time.perf_counter() - start
        return report

    def close(self, kill: bool = False) -> None:
        """End the engine: it leaves when the connection ends, and is killed where it does not."""
        atexit.unregister(self.close)
        if self.connection is not None:
            self.connection.close()
            self.connection = None
        if self.process is not None:
            if kill or not hasattr(self, "hello"):
                self.process.kill()
            try:
                self.process.wait(2)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.over.set()
        if self.holder is not None:
            self.holder.join()
        self.log.close()


def cells_of(places: np.ndarray, description: dict[str, Any]) -> np.ndarray:
    """The bins of places on the map: row counts along z, column along x.

    places    (N, 3)         x, y, z in metres
    returns   (N, 2) int64   (row, column)
    """
    size, bin_size = description["size"], description["bin"]
    cells = np.floor((places[:, [2, 0]] + size / 2) / bin_size).astype(np.int64)
    return cells.clip(0, int(size / bin_size) - 1)


def _highest_near(grid: np.ndarray, diagonal: bool) -> np.ndarray:
    """The largest value of each cell and its four neighbours, or all eight."""
    result = grid.copy()
    np.maximum(result[1:], grid[:-1], out=result[1:])
    np.maximum(result[:-1], grid[1:], out=result[:-1])
    rows = result.copy() if diagonal else grid
    np.maximum(result[:, 1:], rows[:, :-1], out=result[:, 1:])
    np.maximum(result[:, :-1], rows[:, 1:], out=result[:, :-1])
    return result


def load_map() -> dict[str, Any]:
    """The content of godot/map.json."""
    return json.loads((PROJECT / "map.json").read_text())


def find_reachable(description: dict[str, Any], slack: float = 0.0) -> np.ndarray:
    """The bins that an avatar can enter and live, by a flood fill from the spawn point.

    The map is cut into cells of 0.5 m; each has the height of the highest box that an avatar in its
    middle would touch. The rules:
      walk   to a neighbour that is at most STEP_UP higher or lower and not lava
      jump   from any cell, and from pads with the pad's speed. Along its parabola an avatar flies
             at up to full speed in any direction, and turns as it likes; it may pass wherever its
             feet are less than STEP_UP below the ground there, lava included, and land wherever
             there is no lava. Jumps out of water are weaker by the water's factor.
    Distances are counted along and across with every second step diagonal, which is exact along
    the axes and up to 12% too short between them: what is found is never too little.

    slack      float            add this share to all jump speeds, to try how firm the result is
    returns    (rows, columns) bool
    """
    rules, half = description["rules"], description["size"] / 2
    middles = np.arange(-half + CELL / 2, half, CELL)

    def inside(rectangle: list[float], margin: float) -> tuple[slice, slice]:
        x0, z0, x1, z1 = rectangle[:4]
        low = np.searchsorted(middles, [z0 - margin, x0 - margin])
        high = np.searchsorted(middles, [z1 + margin, x1 + margin])
        return slice(low[0], high[0]), slice(low[1], high[1])

    heights = np.full((len(middles),) * 2, 1e3, np.float32)  # at the outer walls: never
    heights[inside([-half, -half, half, half], -rules["radius"])] = 0
    solids = [[*wall, description["wall_height"]] for wall in description["walls"]]
    for solid in solids + description["platforms"]:
        place = inside(solid, rules["radius"])
        heights[place] = np.maximum(heights[place], solid[4])
    zones = {name: np.zeros(heights.shape, bool) for name in ("lava", "water", "pads")}
    for name, zone in zones.items():
        for rectangle in description[name]:
            zone[inside(rectangle, 0)] = True
        zone &= heights == 0

    seconds = CELL / rules["speed"]  # to cross a cell
    jump, pad = rules["jump_speed"], rules["pad_speed"]
    water = jump * rules["water_factor"]
    dry = ~zones["water"] & ~zones["pads"]
    takeoffs = [(jump, dry), (water, zones["water"]), (pad, zones["pads"])]

    # Whether one may walk from a cell to the next row or column, and back.
    level = [np.abs(np.diff(heights, axis=axis)) <= STEP_UP for axis in (0, 1)]
    down = level[0] & ~zones["lava"][1:], level[0] & ~zones["lava"][:-1]
    across = level[1] & ~zones["lava"][:, 1:], level[1] & ~zones["lava"][:, :-1]

    standing = np.zeros(heights.shape, bool)
    column, row = np.searchsorted(middles, description["spawn"])
    standing[row, column] = True
    entered = standing.copy()
    before = 0
    while (count := np.count_nonzero(standing)) > before:
        before, walked = count, 0
        while (count := np.count_nonzero(standing)) > walked:
            walked = count
            standing[1:] |= standing[:-1] & down[0]
            standing[:-1] |= standing[1:] & down[1]
            standing[:, 1:] |= standing[:, :-1] & across[0]
            standing[:, :-1] |= standing[:, 1:] & across[1]
        for speed, cells in takeoffs:
            flying = np.where(standing & cells, heights, -np.inf)  # the height it took off from
            step = 0
            while (flying > -np.inf).any():
                step += 1
                time_up = step * seconds
                rise = speed * (1 + slack) * time_up - rules["gravity"] * time_up**2 / 2
                flying = _highest_near(flying, diagonal=step % 2 == 0)
                flying[flying < heights - (rise + STEP_UP)] = -np.inf
                over = flying > -np.inf
                entered |= over
                standing |= over & ~zones["lava"]
    bins = int(description["size"] / description["bin"])
    entered |= standing
    return entered.reshape(bins, len(middles) // bins, bins, -1).any((1, 3))


@functools.cache
def _reachable_in(map_text: str) -> np.ndarray:
    """`find_reachable`, computed once per map and process; not to be changed."""
    reachable = find_reachable(json.loads(map_text))
    reachable.flags.writeable = False
    return reachable


def draw_map(axes: Any, description: dict[str, Any], reachable: np.ndarray | None = None) -> None:
    """Draw the map from above with matplotlib: x to the right, z down, in metres.

    axes          a matplotlib Axes; its legend() has a name for everything drawn
    description   dict                    `GodotVecEnv.map`, the content of godot/map.json
    reachable     (rows, columns) bool    the other bins are hatched (None: compute it)

    A heatmap of bins goes over it with `axes.imshow(..., extent=(-60, 60, 60, -60), zorder=2)`.
    """
    from matplotlib.patches import Rectangle

    half, bin_size = description["size"] / 2, description["bin"]

    def draw(rectangles: list[list[float]], label: str, **style: Any) -> None:
        for x0, z0, x1, z1, *_ in rectangles:
            axes.add_patch(Rectangle((x0, z0), x1 - x0, z1 - z0, label=label, **style))
            label = "_"  # the first is enough for a legend

    draw(description["water"], "water", facecolor=COLORS["water"])
    draw(description["lava"], "lava", facecolor=COLORS["lava"])
    highest = max((platform[4] for platform in description["platforms"]), default=1)
    label = "platform, height in m"
    for platform in sorted(description["platforms"], key=lambda platform: -platform[4]):
        shade = 0.95 - 0.3 * platform[4] / highest
        color = (shade, shade * 0.88, shade * 0.65)
        draw([platform], label, facecolor=color, edgecolor="#7a6a45", linewidth=0.6)
        x, z = (platform[0] + platform[2]) / 2, (platform[1] + platform[3]) / 2
        axes.text(x, z, f"{platform[4]:g}", ha="center", va="center", fontsize=7, clip_on=True)
        label = "_"
    draw(description["pads"], "jump pad", facecolor=COLORS["pads"], edgecolor="black")
    draw(description["walls"], "wall", facecolor=COLORS["wall"])
    reachable = find_reachable(description) if reachable is None else reachable
    corners = np.argwhere(~reachable)[:, ::-1] * bin_size - half
    bins = np.concatenate([corners, corners + bin_size], 1).tolist()
    style = {"facecolor": "none", "edgecolor": COLORS["unreachable"], "linewidth": 0}
    draw(bins, "bin out of reach", hatch="////", **style)
    axes.plot(*description["spawn"], "*", color="black", markersize=9, label="start")
    axes.set(xlim=(-half, half), ylim=(half, -half), aspect="equal", xlabel="x, m", ylabel="z, m")


class GodotVecEnv(gym.vector.VectorEnv):
    """N avatars in one 3D map of 120 x 120 m, each in an episode of its own. [SOFE app:env_details]

    Source        our own map (godot/map.json), after the description in SOFE app:env_details:
                  rooms, corridors, platforms that only jump pads reach, lava, water; Bullet
    Observation   (129,) float32 in about [-1, 1]: of 24 rays the distance to what they hit / 30 m
                  and whether it is solid, lava, water, pad (16 level ones all round from straight
                  ahead to the right, 8 that slope down to the ground 4 m away); velocity x, y, z
                  / (12, 20, 12 m/s); sin and cos of the yaw; place x, y, z / 60 m; on the ground
    Actions       3 in [-1, 1]: run forward or back at up to 12 m/s; turn right or left at up to
                  3 rad/s; jump where > 0 and on the ground. Each is held for `action_repeat` ticks
                  of 1/60 s. Values beyond are clipped.
    Dynamics      water slows running and jumping to 0.4; a pad throws whoever steps on it 5 m up,
                  an ordinary jump gets to 1.3 m; an avatar steers in the air as on the ground.
                  Avatars do not touch or see each other.
    Reward        0 everywhere: the measure is coverage, the share of reachable bins visited
    End           in lava (terminated) or after `max_steps` decisions (truncated), whose number so
                  far is not observed
    Start         one place, a heading drawn by seed, env and number of the episode
    Autoreset     SAME_STEP: final_obs and final_info hold the end, obs and info the new start

    info["cell"]                       (N, 2) int64    row (along z) and column (along x) of the bin
    info["final_info"]["cell"]         (N, 2) int64    the last bin of the episodes that ended
    info["final_info"]["episode"]      r return, l length in steps, coverage in [0, 1], each (N,)
    reachable                          (24, 24) bool   the bins that count for coverage
    map                                dict            the content of godot/map.json

    Any method may raise EngineError; after that only `close` is left. The same seed and actions
    give the same trajectory, bit for bit, in another process and after `set_state`.
    """

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP, "render_modes": []}

    def __init__(
        self,
        num_envs: int = 8,
        max_steps: int = 1000,
        action_repeat: int = ACTION_REPEAT,
        engine_path: str | None = None,
        timeout: float = 20.0,
        render_mode: str | None = None,
    ):
        """
        num_envs        N
        max_steps       time limit of an episode in decisions, > 0
        action_repeat   ticks of 1/60 s that an action is held for, > 0
        engine_path     a Godot 3 program (None: godot3-server or godot3 on PATH)
        timeout         seconds to wait for the engine to connect, and for each answer
        """
        if num_envs < 1 or max_steps < 1 or action_repeat < 1:
            raise ValueError("num_envs, max_steps and action_repeat must be at least 1")
        self.num_envs, self.max_steps, self.render_mode = num_envs, max_steps, render_mode
        self.engine = Engine(num_envs, action_repeat, engine_path, timeout)
        self.map, self.rays = self.engine.hello["map"], self.engine.hello["rays"]
        self.reachable = _reachable_in(json.dumps(self.map))  # (24, 24)
        size = self.rays * (1 + KINDS.shape[1]) + STATE + 1
        # Beyond 1 only where an avatar falls fast.
        self.single_observation_space = gym.spaces.Box(-2, 2, (size,), np.float32)
        self.single_action_space = gym.spaces.Box(-1, 1, (3,), np.float32)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.env_ids = np.arange(num_envs)
        self.seed = 0
        self.episodes = np.zeros(num_envs, np.int64)  # begun since `seed` was set
        self.lengths = np.zeros(num_envs, np.int64)
        self.returns = np.zeros(num_envs)
        self.visited = np.zeros((num_envs, *self.reachable.shape), bool)  # (N, 24, 24)

    def _ask(self, kind: int, values: np.ndarray) -> None:
        report = self.engine.ask(kind, values).reshape(self.num_envs, -1)
        self.states = report[:, :STATE]
        self.dead = report[:, STATE] > 0
        self.hits = report[:, STATE + 1 :].reshape(self.num_envs, self.rays, 2)
        self.cells = cells_of(self.states[:, :3], self.map)

    def _start(self, env_ids: np.ndarray) -> None:
        keys = [(self.seed, int(i), int(self.episodes[i])) for i in env_ids]
        headings = [np.random.default_rng(key).uniform(-np.pi, np.pi) for key in keys]
        self._ask(RESTART, np.stack([env_ids, headings], 1))
        self.episodes[env_ids] += 1
        self.lengths[env_ids] = 0
        self.returns[env_ids] = 0
        self.visited[env_ids] = False
        cells = self.cells[env_ids]
        self.visited[env_ids, cells[:, 0], cells[:, 1]] = True

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        """Start every episode anew; with a seed the headings are those that belong to it."""
        super().reset(seed=seed)
        if seed is not None:
            self.seed = seed
            self.episodes[:] = 0
        self._start(self.env_ids)
        return self.observe(), {"cell": self.cells, "_cell": np.ones(self.num_envs, bool)}

    def advance(self, actions: np.ndarray):
        """One decision of every env without the autoreset: rewards, terminations, truncations.

        Each is an array over the N envs.
        """
        actions = np.asarray(actions, np.float32)
        if actions.shape != (self.num_envs, 3) or not np.isfinite(actions).all():
            raise ValueError(f"actions must be ({self.num_envs}, 3) finite numbers, got {actions}")
        self._ask(STEP, actions.clip(-1, 1))
        self.lengths += 1
        self.visited[self.env_ids, self.cells[:, 0], self.cells[:, 1]] = True
        terminations = self.dead
        return (
            np.zeros(self.num_envs),
            terminations,
            (self.lengths >= self.max_steps) & ~terminations,
        )

    def coverage(self) -> np.ndarray:
        """Share of the reachable bins that each env has visited in its episode, (N,) float64."""
        return (self.visited & self.reachable).sum((1, 2)) / self.reachable.sum()

    def step(self, actions: np.ndarray):
        rewards, terminations, truncations = self.advance(actions)
        info: dict[str, Any] = {}
        dones = terminations | truncations
        if dones.any():
            observations = self.observe()
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
                "cell": self.cells,
                "_cell": dones.copy(),
                "episode": episode,
                "_episode": dones.copy(),
            }
            info["_final_info"] = dones.copy()
            self._start(np.flatnonzero(dones))
        info["cell"], info["_cell"] = self.cells, np.ones(self.num_envs, bool)
        return self.observe(), rewards, terminations, truncations, info

    def observe(self) -> np.ndarray:
        """The observations as they stand, a copy, (N, D) float32."""
        rules, states = self.map["rules"], self.states
        rays = np.empty((self.num_envs, self.rays, 5), np.float32)
        rays[..., 0] = self.hits[..., 0] / self.engine.hello["ray_length"]
        rays[..., 1:] = KINDS[self.hits[..., 1].astype(np.int64)]
        speeds = np.array([rules["speed"], FALL_SPEED, rules["speed"]], np.float32)
        yaw = states[:, 6:7]
        parts = [rays.reshape(self.num_envs, -1), states[:, 3:6] / speeds, np.sin(yaw), np.cos(yaw)]
        parts += [states[:, :3] / np.float32(self.map["size"] / 2), states[:, 7:8]]
        return np.concatenate(parts, 1)

    def get_state(self) -> dict[str, np.ndarray]:
        """Everything that `set_state` needs to go on from here in another process."""
        return {
            "states": self.states.copy(),
            "lengths": self.lengths.copy(),
            "returns": self.returns.copy(),
            "visited": self.visited.copy(),
            "episodes": self.episodes.copy(),
            "seed": np.array(self.seed),
        }

    def set_state(self, state: dict[str, np.ndarray]) -> None:
        """Put every env where `get_state` found it."""
        self._ask(PLACE, np.asarray(state["states"]))
        for name in ("lengths", "returns", "visited", "episodes"):
            getattr(self, name)[:] = np.asarray(state[name])
        self.seed = int(state["seed"])

    def close_extras(self, **kwargs: Any) -> None:
        if hasattr(self, "engine"):  # not where the constructor refused its arguments
            self.engine.close()


class GodotEnv(gym.Env):
    """One avatar with gymnasium's single-environment interface; see `GodotVecEnv` for the rest.

    info["cell"]     (2,) int64   row and column of the avatar's bin
    info["episode"]  in the last step: r return, l length in steps, coverage in [0, 1]
    """

    metadata = {"render_modes": []}

    def __init__(self, render_mode: str | None = None, **kwargs: Any):
        """kwargs: max_steps, action_repeat, engine_path and timeout as in `GodotVecEnv`."""
        self.vec = GodotVecEnv(num_envs=1, **kwargs)
        self.render_mode = render_mode
        self.reachable, self.map = self.vec.reachable, self.vec.map
        self.observation_space = self.vec.single_observation_space
        self.action_space = self.vec.single_action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        observations, info = self.vec.reset(seed=seed)
        return observations[0], {"cell": info["cell"][0]}

    def step(self, action: np.ndarray):
        rewards, terminations, truncations = self.vec.advance(np.asarray(action)[None])
        info: dict[str, Any] = {"cell": self.vec.cells[0]}
        if terminations[0] or truncations[0]:
            info["episode"] = {
                "r": float(self.vec.returns[0]),
                "l": int(self.vec.lengths[0]),
                "coverage": float(self.vec.coverage()[0]),
            }
        observation = self.vec.observe()[0]
        return observation, float(rewards[0]), bool(terminations[0]), bool(truncations[0]), info

    def close(self) -> None:
        self.vec.close()


gym.register(
    id="sofe/GodotMap-v0",
    entry_point="common.godot:GodotEnv",
    vector_entry_point="common.godot:GodotVecEnv",
)
