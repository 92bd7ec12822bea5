"""The plumbing of a run: its folder, log files, progress line, checkpoints, resume and signals.

A run's folder holds

    args.json        arguments, versions, git commit, device, command
    episodes.csv     step, return, length, bonus, coverage; one row per finished episode
    updates.csv      step and the losses; one row per iteration of training
    evals.csv        step and the results of evaluation
    visits.csv       step, row, column, visits: how often each cell of the map had been visited by
                     then, every --checkpoint-every steps and at the end
    events.*         the same for TensorBoard, and the speed
    checkpoint.pt    everything needed to go on; tensors and plain values only
    visits.png       how often each cell of the map was visited in the run, where there is one map
    traceback.txt    of an error that ended the run
    lock             the process that the run belongs to, while it is going on
    *.gif            with --capture-video

`Run.checkpoint` is called where the state is complete, at the top of each iteration. It keeps the
state in memory, so that a signal, a NaN or a crash can save the last complete state at any moment;
`--resume` cuts the CSV files back to that state and goes on as if nothing had happened.
"""

import atexit
import contextlib
import csv
import ctypes
import dataclasses
import errno
import importlib.util
import io
import json
import math
import os
import platform
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import psutil
import torch
from gymnasium.vector import VectorEnv, VectorWrapper
from PIL import Image
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

# What may differ between a run and its continuation; all other arguments are the run's own.
RESUMABLE = (
    "resume",
    "total_timesteps",
    "device",
    "num_threads",
    "num_workers",
    "checkpoint_every",
    "eval_every",
    "eval_episodes",
    "track",
    "capture_video",
)
PACKAGES = ("torch", "gymnasium", "numpy", "griddly", "nle", "minihack", "tensorboard", "tyro")
CODE = (":/*.py", ":/godot")  # from the root of the checkout, as git names it
SHOWN = ("explore/bonus", "losses/entropy", "explore/epsilon")  # in the progress line
TRACKER_SECONDS = "20"  # that Weights & Biases may take to start
PROGRESS_SECONDS = 10.0  # between two plain lines where the output is not a terminal


def fail(message: str) -> NoReturn:
    """End the program with one line on standard error and exit status 1."""
    raise SystemExit(f"error: {message}")


def git_commit() -> str | None:
    """The commit of this checkout, with -dirty where its code is not that; None without git."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *words]
        try:
            return subprocess.run(
                command, capture_output=True, text=True, timeout=10
            ).stdout.strip()
        except (OSError, subprocess.TimeoutExpired):
            return ""

    commit = git("rev-parse", "--verify", "--quiet", "HEAD")
    changed = commit and git("status", "--porcelain", "--untracked-files=all", "--", *CODE)
    return f"{commit}-dirty" if changed else commit or None


@contextlib.contextmanager
def in_one_line(kind: type[Exception]):
    """Decorate a script's main: an error of this kind ends the program with one line.

    The run, where there is one by then, saves its last complete state first.
    """
    Run.going_on = None
    try:
        yield
    except kind as error:
        line = " ".join(str(error).split())
        if Run.going_on is not None:
            Run.going_on._leave(f"error: {line}")
        fail(line)


def check_args(
    args: Any, but_zero_is_fine_for: str, at_most_1: str, *rules: tuple[str, bool]
) -> None:
    """Raise ValueError, which the command line shows as a message, for arguments that cannot be.

    args                   dataclass   every number in it must be greater than 0
    but_zero_is_fine_for   str         names of fields, separated by spaces, that may also be 0
    at_most_1              str         names of fields that may not be greater than 1
    rules                              a message, and whether what it complains of is the case
    """
    for name, value in dataclasses.asdict(args).items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            least = "at least 0" if name in but_zero_is_fine_for.split() else "greater than 0"
            too_small = value < 0 or (value == 0 and least == "greater than 0")
            if too_small or not math.isfinite(value):
                raise ValueError(f"--{name.replace('_', '-')} {value} must be {least} and finite")
            if name in at_most_1.split() and value > 1:
                raise ValueError(f"--{name.replace('_', '-')} {value} must be at most 1")
    for message, holds in rules:
        if holds:
            raise ValueError(message)


def resume_args(args: Any, script: str) -> Any:
    """With `--resume RUN_DIR`, take the arguments of that run.

    args      dataclass   a field that differs from its default, or whose flag stands on the command
                          line, must agree with the run's; those in RESUMABLE replace the run's
    returns   dataclass   the arguments to train with
    Ends the program with one line if the folder is not a run of `script`.
    """
    if args.resume is None:
        return args
    folder = Path(args.resume)
    try:
        record = json.loads((folder / "args.json").read_text())
    except FileNotFoundError:
        fail(f"--resume {folder}: there is no run here (no args.json); name the folder of a run")
    except (OSError, ValueError) as error:
        fail(f"--resume {folder}: args.json cannot be read ({error})")
    if record.get("script") != script:
        fail(f"--resume {folder}: this is a run of {record.get('script')}.py, not of {script}.py")
    saved = record["args"]
    written = {word.partition("=")[0].replace("_", "-") for word in sys.argv[1:]}
    for field in dataclasses.fields(args):
        name, value = field.name, getattr(args, field.name)
        flag = "--" + name.replace("_", "-")
        given = value != field.default or bool({flag, flag.replace("--", "--no-")} & written)
        if name == "resume" or name not in saved or (given and name in RESUMABLE):
            continue
        if given and value != saved[name]:
            fail(f"--resume {folder}: {flag} {value} differs from the run's {saved[name]}")
        setattr(args, name, saved[name])
    if args.total_timesteps != saved["total_timesteps"] and saved.get("anneal_beta"):
        fail(f"--resume {folder}: --anneal-beta fixes --total-timesteps {saved['total_timesteps']}")
    if hasattr(args, "__post_init__"):
        try:
            args.__post_init__()  # the run's own and those that may differ, together
        except ValueError as error:
            fail(f"--resume {folder}: {error}")
    return args


def process_in(folder: Path) -> int | None:
    """The id of another process whose run is writing to a folder, None if there is none."""
    lock = folder / "lock"
    try:
        process = psutil.Process(int(lock.read_text()))
        alive = process.create_time() <= lock.stat().st_mtime + 1  # else its number was given anew
    except (FileNotFoundError, ValueError, psutil.Error):
        return None
    return process.pid if alive and process.pid != os.getpid() else None


def set_up(args: Any) -> torch.device:
    """Set PyTorch's threads and seed from num_threads and seed; return the device to compute on.

    All randomness of the scripts is PyTorch's, and is saved in checkpoints (not that of MPS).
    """
    keep_freed_memory()
    torch.set_num_threads(args.num_threads)
    torch.manual_seed(args.seed)
    return select_device(args.device)


def keep_freed_memory() -> None:
    """Tell the C library of Linux to keep freed memory for the next allocation.

    By default it hands the activations of a training step back to the system and asks for them
    again in the next step, which takes about a quarter of the time on a CPU.
    """
    with contextlib.suppress(OSError, AttributeError):  # another system, another C library
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-1, 2**30)  # M_TRIM_THRESHOLD, bytes
        libc.mallopt(-3, 2**25)  # M_MMAP_THRESHOLD, its largest value


def select_device(name: str) -> torch.device:
    """Turn auto, cpu, cuda or mps into a device; auto is CUDA where there is one, else the CPU."""
    available = {
        "cpu": True,
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
    }
    if name == "auto":
        name = "cuda" if available["cuda"] else "cpu"
    if not available[name]:
        fail(f"--device {name}: PyTorch finds no such device here; take --device cpu")
    return torch.device(name)


def check_memory(what: str, num_bytes: int, device: torch.device) -> None:
    """Print the size of a buffer, in bytes, before it is made; end the program if it cannot fit."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = psutil.virtual_memory().available
    print(f"{what}: {num_bytes / 2**20:.0f} MiB of {free / 2**20:.0f} MiB free", flush=True)
    if num_bytes > free:
        fail(f"the {what} needs {num_bytes / 2**30:.1f} GiB and {free / 2**30:.1f} GiB are free")


def check_training_memory(networks: list[torch.nn.Module], device: torch.device) -> None:
    """Print the memory that training these networks takes; end the program if it cannot fit.

    networks   on any device, best on "meta", where they take none
    Counted are, of every weight, the learner's and the actor's, its gradient, one number of the
    optimizer's state and one of its step; and in the computer's memory weight and state in the
    last checkpoint, which is kept there, and in the next. What a rollout takes is not.
    """
    numbers = sum(weight.numel() for network in networks for weight in network.parameters())
    on_device, in_checkpoints = 5, 4
    if device.type == "cuda":
        check_memory("training of the networks", 4 * on_device * numbers, device)
        check_memory("checkpoints of it", 4 * in_checkpoints * numbers, torch.device("cpu"))
    else:
        check_memory("training of the networks", 4 * (on_device + in_checkpoints) * numbers, device)


def to_tensors(state: Any) -> Any:
    """Turn arrays in nested dicts and lists into tensors, which `weights_only=True` can load.

    The tensors share the memory of the arrays.
    """
    if isinstance(state, dict):
        return {key: to_tensors(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [to_tensors(value) for value in state]
    if isinstance(state, np.ndarray):
        return torch.from_numpy(np.ascontiguousarray(state))
    return state.item() if isinstance(state, np.generic) else state


def stack_steps(steps: list[dict[str, Any]], last: dict[str, Any]) -> dict[str, Any]:
    """A rollout, time first, from its steps.

    steps     T dicts of (N, ...) tensors, or of dicts of these
    last      what is there after the last step, row T; of other names than the steps' is not read
    returns   dict of (T, N, ...), or where `last` has the name (T + 1, N, ...)
    """
    rollout = {}
    for name, value in steps[0].items():
        rows = [step[name] for step in steps] + ([last[name]] if name in last else [])
        if isinstance(value, dict):
            rollout[name] = {key: torch.stack([row[key] for row in rows]) for key in value}
        else:
            rollout[name] = torch.stack(rows)
    return rollout


class FirstEpisodes:
    """The first episode of each of N environments, for an evaluation: later ones do not count.

    Episodes that end early would else be counted more often than those that take long.

    keys      names of numbers in final_info["episode"]
    results   (len(keys), N) float64   NaN until the env's first episode has ended
    playing   (N,) bool                which envs are in it still
    """

    def __init__(self, num_envs: int, keys: tuple[str, ...]):
        self.keys = keys
        self.results = np.full((len(keys), num_envs), np.nan)
        self.playing = np.ones(num_envs, bool)

    def record(self, info: dict[str, Any], ended: np.ndarray) -> None:
        """Take the results of a step: its info, and the envs (K,) int whose episode ended in it."""
        first = ended[self.playing[ended]]
        if len(first):
            episode = info["final_info"]["episode"]
            self.results[:, first] = [episode[key][first] for key in self.keys]
            self.playing[first] = False


class Stopwatch:
    """Seconds by what they were spent on; each lap ends where the next begins."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self.start()

    def start(self) -> None:
        self._since = time.perf_counter()

    def lap(self, name: str) -> None:
        since = self._since
        self.start()
        self.seconds[name] = self.seconds.get(name, 0.0) + self._since - since


class Producer:
    """Calls a function again and again: in a thread of its own, one result ahead, or when asked.

    `get_state` and `set_state` are those of its source, for a checkpoint, which must not hold what
    came of results that nobody has taken: the state is the one after the last that was.

    waited   float   seconds that `get` has taken in all
    """

    def __init__(self, function: Callable[[], Any], threaded: bool, source: Any):
        """
        function   makes the results, and may change the source
        threaded   in a thread of its own, which the first `get` starts; else when asked
        source     has get_state, whose result is never written afterwards, and set_state
        """
        self.function, self.source, self._stop = function, source, threading.Event()
        self._state: Any = None  # None: no result was taken yet
        self._results: queue.Queue[Any] = queue.Queue(1)
        self.waited = 0.0
        self._thread = threading.Thread(target=self._produce, daemon=True) if threaded else None

    def _try(self) -> tuple[Any, Any]:
        """A result and the state after it, or an exception and None."""
        try:
            return self.function(), self.source.get_state()
        except BaseException as error:
            if self._thread is None and not isinstance(error, Exception):
                raise  # a signal, or an end that somebody else has announced
            return error, None

    def _produce(self) -> None:
        result = None, None
        while not self._stop.is_set() and not isinstance(result[0], BaseException):
            result = self._try()
            while not self._stop.is_set():
                with contextlib.suppress(queue.Full):
                    self._results.put(result, timeout=0.1)
                    break

    def get(self, on_error: Callable[[BaseException], NoReturn]) -> Any:
        """The next result; calls on_error, here in the caller's thread, if the function raised."""
        since = time.perf_counter()
        if self._thread is not None and self._thread.ident is None:
            self._thread.start()
        result, state = self._try() if self._thread is None else self._results.get()
        self.waited += time.perf_counter() - since
        if isinstance(result, BaseException):
            on_error(result)
        self._state = state
        return result

    def get_state(self) -> Any:
        return self.source.get_state() if self._state is None else self._state

    def set_state(self, state: Any) -> None:
        self.source.set_state(state)
        self._state = state

    def close(self) -> bool:
        """Wait until the function has returned, 10 seconds at most; whether it has."""
        self._stop.set()
        if self._thread is None or self._thread.ident is None:
            return True
        self._thread.join(10)
        return not self._thread.is_alive()


class GifRecorder(VectorWrapper):
    """Record the first episode of one of N environments and write it as an animation on close."""

    def __init__(self, envs: VectorEnv, index: int, path: Path):
        super().__init__(envs)
        self.index, self.path = index, path
        self.frames: list[Image.Image] = []
        self.over = False

    def _shoot(self) -> None:
        self.frames.append(Image.fromarray(self.env.render()[self.index]))

    def reset(self, **kwargs: Any):
        result = self.env.reset(**kwargs)
        self._shoot()
        return result

    def step(self, actions: np.ndarray):
        result = self.env.step(actions)
        self.over |= bool(result[2][self.index] or result[3][self.index])
        if not self.over:
            self._shoot()
        return result

    def close(self, **kwargs: Any) -> None:
        if self.frames:
            first, *rest = self.frames
            first.save(self.path, save_all=True, append_images=rest, duration=33, loop=0)
        self.env.close(**kwargs)


def draw_visits(
    path: Path,
    visits: np.ndarray,
    reachable: np.ndarray,
    title: str,
    draw_map: Callable[[Any], None] | None = None,
) -> None:
    """Draw how often each cell was visited as a heatmap over the map.

    visits      (H, W) int
    reachable   (H, W) bool
    draw_map    draws the map on matplotlib Axes and sets their limits, x along the columns and y
                down the rows (None: cells that cannot be reached are black, unvisited ones white)
    """
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 5), layout="constrained")
    axes = figure.subplots()
    style = {"cmap": "viridis", "norm": LogNorm(1, max(2, int(visits.max())))}
    if draw_map is None:
        axes.imshow(np.where(reachable, 1.0, 0.0), cmap="gray", vmin=0, vmax=1)
        axes.set(xlabel="column", ylabel="row")
    else:
        draw_map(axes)
        style |= {"extent": (*axes.get_xlim(), *axes.get_ylim()), "alpha": 0.6, "zorder": 1.5}
    image = axes.imshow(np.ma.masked_where(visits == 0, visits), **style)
    figure.colorbar(image, label="visits in the run")
    axes.set(title=title)
    figure.savefig(path, dpi=120)


class Run:
    """The folder of one run and all that is written there.

    folder    Path           absolute: an environment that changes the working directory is harmless
    visits    (H, W) int64   how often each cell was reached or started from in the whole run
    start_step  int          env steps done before: 0, or where --resume goes on
    going_on  Run | None     of the class: the run of this process that has not ended
    """

    going_on: "Run | None" = None

    def __init__(
        self,
        args: Any,
        script: str,
        reachable: np.ndarray | None,
        kept: dict[str, Any],
        ring: tuple[np.ndarray, dict[str, np.ndarray]] | None = None,
        more: tuple[str, ...] = (),
    ):
        """
        args        dataclass      the arguments of the script
        script      str            name of the script without .py
        reachable   (H, W) bool    the cells of the map that count (None: every episode has a map
                                   of its own, and there is no picture of the visits)
        kept        dict           what a checkpoint holds: modules and optimisers (state_dict),
                                   environments (get_state, set_state) and tensors, which must be
                                   changed in place only
        ring        a replay buffer, too large to be copied in each iteration: how many rows were
                    ever written, () int64 changed in place, and arrays (L, ...) in which row k is
                    at k modulo L. They are read when a checkpoint is written: rows that belong to
                    the state at the last call of `checkpoint` must not be overwritten by then.
        more        tuple of str   further columns of episodes.csv, from final_info["episode"]
        """
        self.args, self.script, self.reachable, self.kept = args, script, reachable, kept
        self.ring, self.more = ring, more
        self.visits = np.zeros((0, 0) if reachable is None else reachable.shape, np.int64)
        self._tracker = None
        if args.track and importlib.util.find_spec("wandb") is None:
            fail("--track needs Weights & Biases: pip install wandb, or --no-track")
        self.folder = Path(args.resume).resolve() if args.resume else self._make_folder()
        if (pid := process_in(self.folder)) is not None:
            fail(
                f"{self.folder} belongs to a run that is going on (process {pid}): stop that first"
            )
        self.finished = False
        self.start_step = 0
        self._handlers: dict[int, Any] = {}
        self._snapshot: bytes | None = None
        self._on_disk = self._amid_save = False  # of the snapshot
        self._signal: int | None = None  # that came amid a save
        self._eval_due = False  # at the last step that was asked about
        self._next_save = 0
        self._next_copy, self._copied = 0.0, False
        self._sizes: dict[str, int] = {}  # of the CSV files at the checkpoint
        self._files: dict[str, io.TextIOWrapper] = {}
        self._columns: dict[str, list[str]] = {}
        record = self._restore() if args.resume else self._record()
        self._next_visits = max(1, -(-self.start_step // args.checkpoint_every))
        self._next_visits *= args.checkpoint_every  # the step whose table of visits is due
        with self._writing():
            (self.folder / "lock").write_text(str(os.getpid()))
            if args.track:  # before anything changes, and before the writer, to which it listens
                self._start_tracking()
            self._write_whole("args.json", json.dumps(record, indent=2).encode() + b"\n")
            for name in self._sizes:
                self._open(name, [])
            if "episodes.csv" not in self._files:
                columns = ["step", "return", "length", "bonus", "coverage", *more]
                self._open("episodes.csv", columns)
            purge = self.start_step + 1 if self.start_step else None
            self.writer = SummaryWriter(str(self.folder), purge_step=purge)
        self._bar: tqdm | None = None
        self._start_time = self._line_time = time.monotonic()
        self._shown = ""
        with contextlib.suppress(ValueError):  # only the main thread may handle signals
            for number in (signal.SIGINT, signal.SIGTERM):
                self._handlers[number] = signal.signal(number, self._on_signal)
        atexit.register(self._at_exit)
        Run.going_on = self
        print(f"run folder: {self.folder}", flush=True)
        if self.start_step:
            print(f"resumed at step {self.start_step}", flush=True)
        if sys.stderr.isatty():
            total, done = args.total_timesteps, self.start_step
            self._bar = tqdm(total=total, initial=done, unit="step", dynamic_ncols=True)

    # -- folder and record ---------------------------------------------------------------------

    def _make_folder(self) -> Path:
        runs_dir = Path(self.args.runs_dir).resolve()
        if self.args.run_name:
            stems = [re.sub(r"[^A-Za-z0-9._-]+", "-", self.args.run_name)[:79]]
        else:
            arm = "plain" if self.args.augment in (False, "none") else "sofe"
            words = [self.script.replace("_sofe", ""), getattr(self.args, "env_id", "")]
            name = "-".join([*filter(None, words), self.args.bonus, arm])
            name = re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:45]
            stem = f"{name}-seed{self.args.seed}" + time.strftime("-%Y%m%d-%H%M%S")
            stems = [stem] + [f"{stem}-{count}" for count in range(2, 1000)]
        try:
            runs_dir.mkdir(parents=True, exist_ok=True)
            for stem in stems:
                with contextlib.suppress(FileExistsError):
                    (runs_dir / stem).mkdir()
                    return runs_dir / stem
        except OSError as error:
            fail(f"cannot make a folder in {runs_dir} ({error.strerror}): take another --runs-dir")
        folder = runs_dir / stem
        fail(f"{folder} exists: take another --run-name, or --resume {folder} to go on with it")

    def _record(self) -> dict[str, Any]:
        versions = {"python": platform.python_version()}
        for package in PACKAGES:
            with contextlib.suppress(metadata.PackageNotFoundError):
                versions[package] = metadata.version(package)
        device = select_device(self.args.device)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
        return {
            "script": self.script,
            "args": dataclasses.asdict(self.args),
            "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
            "versions": versions,
            "git_commit": git_commit(),
            "device": f"{device} ({name})",
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }

    def _start_tracking(self) -> None:
        """Mirror the run to Weights & Biases; a new run that cannot leaves no folder."""
        import wandb

        os.environ.setdefault("WANDB_INIT_TIMEOUT", TRACKER_SECONDS)
        try:
            self._tracker = wandb.init(
                project="sofe",
                name=self.folder.name,
                config=dataclasses.asdict(self.args),
                dir=str(self.folder),
                sync_tensorboard=True,
            )
        except Exception as error:  # no login, no network: it has many kinds
            self._let_go()
            if not self.args.resume:
                shutil.rmtree(self.folder, ignore_errors=True)
            reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
            remedy = "wandb login, WANDB_MODE=offline, WANDB_INIT_TIMEOUT=90, or --no-track"
            fail(f"Weights & Biases does not start ({reason}): {remedy}")

    # -- writing -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _writing(self):
        """Turn a full disk into one line; the checkpoint that is there stays."""
        try:
            yield
        except OSError as error:
            self.finished = True  # there is no use in writing more
            self._let_go()
            full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            remedy = ": make room" if full else ""
            kept = f"; continue with --resume {self.folder}" if self._saved() else ""
            reason = error.strerror or error
            fail(f"cannot write to {self.folder} ({reason}){remedy}{kept}")

    def _saved(self) -> bool:
        return (self.folder / "checkpoint.pt").exists()

    def _open(self, name: str, columns: list[str]) -> None:
        """Open a CSV file: anew, or cut back to where the checkpoint left it, columns and all."""
        path = self.folder / name
        size = self._sizes.get(name, 0)
        with open(path, "ab") as file:
            file.truncate(size)
        self._files[name] = open(path, "a", newline="")  # noqa: SIM115, closed by close()
        if size == 0:
            csv.writer(self._files[name], lineterminator="\n").writerow(columns)
        else:
            columns = path.read_text().partition("\n")[0].split(",")
        self._columns[name] = columns

    def _write_row(self, name: str, row: dict[str, float]) -> None:
        if name not in self._files:
            self._open(name, list(row))
        values = [
            f"{row[c]:.6g}" if isinstance(row[c], float) else row[c] for c in self._columns[name]
        ]
        csv.writer(self._files[name], lineterminator="\n").writerow(values)

    def log_step(self, step: int, cells: np.ndarray) -> None:
        """Count the cells reached in a step, and keep the progress line alive.

        step      int             env steps summed over envs
        cells     (K, 2) int64    row and column; (-1, -1) is no cell
        """
        if self.reachable is not None:
            if step > self._next_visits:  # all visits until then have been counted
                self._log_visits(self._next_visits)
                every = self.args.checkpoint_every
                self._next_visits = -(-step // every) * every
            cells = cells[cells[:, 0] >= 0]
            np.add.at(self.visits, (cells[:, 0], cells[:, 1]), 1)
        if self._bar is not None and step - self._bar.n >= self._bar.miniters:
            self._bar.update(step - self._bar.n)
        elif self._bar is None and time.monotonic() - self._line_time >= PROGRESS_SECONDS:
            self._print_progress(step)

    def log_episodes(
        self, step: int, info: dict[str, Any], ended: np.ndarray, bonuses: list[float]
    ) -> None:
        """Record the episodes that ended in this step: each in the CSV, their mean in TensorBoard.

        step      int         env steps summed over envs
        info      dict        of the step, with final_info["episode"] and the new start in "cell"
        ended     (K,) int    the envs whose episode ended
        bonuses   (K,)        sum of the bonus in each of these episodes
        """
        episode = info["final_info"]["episode"]
        columns = (
            [episode[key][ended] for key in ("r", "l")]
            + [
                bonuses,
                episode["coverage"][ended],
            ]
            + [episode[key][ended] for key in self.more]
        )
        names = self._columns["episodes.csv"]
        tags = ("charts/episodic_return", "charts/episodic_length")
        tags += ("explore/episodic_bonus", "explore/coverage")
        tags += tuple(f"charts/episodic_{key}" for key in self.more)
        with self._writing():
            for r, length, *rest in zip(*columns, strict=True):
                row = (step, float(r), int(length), *map(float, rest))
                self._write_row("episodes.csv", dict(zip(names, row, strict=True)))
            for tag, column in zip(tags, columns, strict=True):
                if math.isfinite(np.mean(column)):  # Procgen has no coverage
                    self.writer.add_scalar(tag, float(np.mean(column)), step)
        self.log_step(step, info["cell"][ended])

    def log_update(self, step: int, metrics: dict[str, float]) -> None:
        """Record an iteration and show the progress; end the program if a loss is not finite.

        step      int    env steps summed over envs
        metrics   dict   losses/* and explore/*; those in SHOWN are part of the progress line
        """
        bad = [name for name, value in metrics.items() if not math.isfinite(value)]
        if bad:
            self._leave(
                f"error: {bad[0]} is {metrics[bad[0]]} in the update at step {step}: lower "
                f"--learning-rate or --beta; the last good state is kept"
            )
        if self.reachable is not None:
            seen = ((self.visits > 0) & self.reachable).sum() / self.reachable.sum()
            metrics = metrics | {"explore/global_coverage": float(seen)}
        self._write("updates.csv", step, metrics)
        shown = [key for key in SHOWN if key in metrics]
        self._shown = "  ".join(f"{key.split('/')[-1]} {metrics[key]:.3g}" for key in shown)
        now = time.monotonic()
        speed = (step - self.start_step) / max(now - self._start_time, 1e-9)
        with self._writing():
            self.writer.add_scalar("charts/SPS", speed, step)
            self.writer.add_scalar("charts/learning_rate", self.args.learning_rate, step)
        if self._bar is not None:
            self._bar.set_postfix_str(self._shown, refresh=False)
            self._bar.update(step - self._bar.n)
        elif now - self._line_time >= PROGRESS_SECONDS or step >= self.args.total_timesteps:
            self._print_progress(step)

    def log_times(self, step: int, seconds: dict[str, float]) -> None:
        """Show shares of the time since the start, in TensorBoard only: they are never alike."""
        with self._writing():
            for name, spent in seconds.items():
                share = spent / (time.monotonic() - self._start_time)
                self.writer.add_scalar(f"charts/time_{name}", share, step)

    def eval_due(self, step: int, row_steps: int) -> bool:
        """Whether --eval-every asks for an evaluation at a step, once in so many steps.

        step        int    env steps done, at the end of a row of updates.csv
        row_steps   int    env steps from row to row
        """
        every = self.args.eval_every
        self._eval_due = bool(every and step % every < row_steps)
        return self._eval_due

    def log_eval(self, step: int, metrics: dict[str, float]) -> None:
        """Record an evaluation."""
        if metrics:
            self._write("evals.csv", step, metrics)

    def _log_visits(self, step: int) -> None:
        """Record how often each cell has been visited so far, a row for each that has."""
        with self._writing():
            for row, column in np.argwhere(self.visits).tolist():
                line = {"step": step, "row": row, "column": column}
                line |= {"visits": int(self.visits[row, column])}
                self._write_row("visits.csv", line)

    def _write(self, name: str, step: int, metrics: dict[str, float]) -> None:
        row = {"step": step} | {key.split("/")[-1]: value for key, value in metrics.items()}
        with self._writing():
            self._write_row(name, row)
            for tag, value in metrics.items():
                self.writer.add_scalar(tag, value, step)

    def _print_progress(self, step: int) -> None:
        """A plain line, where the output is not a terminal."""
        self._line_time, total = time.monotonic(), self.args.total_timesteps
        speed = (step - self.start_step) / max(self._line_time - self._start_time, 1e-9)
        left = tqdm.format_interval(max(total - step, 0) / max(speed, 1e-9))
        line = f"step {step}/{total}  {speed:.0f} steps/s  {left} left  {self._shown}"
        print(line.rstrip(), flush=True)

    # -- checkpoints ---------------------------------------------------------------------------

    def checkpoint(self, step: int, write: bool = False, share: float = 1.0) -> None:
        """Remember the complete state of training, and write it every --checkpoint-every steps.

        step     int     env steps done
        write    bool    write it now
        share    float   of the time, that this may take: else the call is passed over
        """
        since = time.monotonic()
        if since < self._next_copy and not write:
            return
        with self._writing():
            for file in self._files.values():
                file.flush()
            sizes = {name: os.path.getsize(self.folder / name) for name in self._files}
        state = {}
        for name, item in self.kept.items():
            tensors = item.state_dict().values() if isinstance(item, torch.nn.Module) else ()
            if not all(tensor.isfinite().all() for tensor in tensors):
                self._leave(
                    f"error: weights of the {name} are not finite at step {step}: lower "
                    f"--learning-rate or --beta; the last good state is kept"
                )
            if hasattr(item, "get_state"):
                state[name] = item.get_state()
            else:
                state[name] = item.state_dict() if hasattr(item, "state_dict") else item
        content = {
            "script": self.script,
            "args": dataclasses.asdict(self.args),
            "global_step": step,
            "files": sizes,
            "visits": self.visits,
            "eval_due": self._eval_due,
            "torch_rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state_all() if self._on_cuda() else [],
            "state": state,
        }
        if self.ring is not None:
            content["rows"] = int(self.ring[0])
        buffer = io.BytesIO()
        torch.save(to_tensors(content), buffer)
        self._on_disk = False
        self._snapshot = buffer.getvalue()
        if write or step >= self._next_save > 0:
            self._save()
            if self._signal is not None:
                self._on_signal(self._signal, None)
        every = self.args.checkpoint_every
        self._next_save = (step // every + 1) * every
        now = time.monotonic()
        if self._copied:  # the first copy, with all that is loaded for it, says nothing of the next
            self._next_copy = now + (now - since) * (1 / share - 1)
        self._copied = True

    def _save(self) -> None:
        """Write the state in memory, if it is not on disk; a signal meanwhile waits for the end."""
        if self._snapshot is None or self._on_disk:
            return
        self._amid_save = True
        try:
            with self._writing():
                if self.ring is None:
                    self._write_whole("checkpoint.pt", self._snapshot)
                else:
                    content = torch.load(io.BytesIO(self._snapshot), weights_only=True)
                    rows = {name: array[: content["rows"]] for name, array in self.ring[1].items()}
                    self._write_whole("checkpoint.pt", content | {"ring": to_tensors(rows)})
            self._on_disk = True
        finally:
            self._amid_save = False

    def _write_whole(self, name: str, content: bytes | dict[str, Any]) -> None:
        """Write a file under a temporary name, then rename it: never half a file."""
        temporary = self.folder / f"{name}.tmp"
        try:
            with open(temporary, "wb") as file:
                if isinstance(content, bytes):
                    file.write(content)
                else:
                    torch.save(content, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.folder / name)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise

    def _read_checkpoint(self) -> dict[str, Any]:
        path = self.folder / "checkpoint.pt"
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
            script, saved = content["script"], content["args"]
            [content[key] for key in ("state", "files", "visits", "torch_rng", "global_step")]
        except FileNotFoundError:
            fail(f"{path} does not exist: the run ended before its first checkpoint; start it anew")
        except Exception as error:  # a damaged file can fail in any way
            reason = (str(error).splitlines() or [type(error).__name__])[0][:100]
            if isinstance(error, MemoryError | OSError) or "allocate memory" in str(error):
                fail(f"{path} cannot be read ({reason}); mend that and start it again")
            fail(
                f"{path} is damaged or no checkpoint of this project ({reason}); start the run anew"
            )
        if script != self.script:
            fail(f"{path} is a checkpoint of {script}.py, not of {self.script}.py")
        for key, value in dataclasses.asdict(self.args).items():
            if key not in RESUMABLE and key in saved and saved[key] != value:
                fail(f"{path} was made with {key}={saved[key]}, but args.json has {key}={value}")
        return content

    def _on_cuda(self) -> bool:
        return select_device(self.args.device).type == "cuda"

    def _restore(self) -> dict[str, Any]:
        """Put everything in `kept` and the random generators back; return the record of the run."""
        content = self._read_checkpoint()
        path = self.folder / "checkpoint.pt"
        for name, size in content["files"].items():
            if not (self.folder / name).exists() or os.path.getsize(self.folder / name) < size:
                fail(f"{self.folder / name} is shorter than at the checkpoint: start the run anew")
        for name, item in self.kept.items():
            try:
                saved = content["state"][name]
                if hasattr(item, "set_state"):
                    item.set_state(saved)
                elif hasattr(item, "load_state_dict"):
                    item.load_state_dict(saved)
                elif item.shape == saved.shape:
                    item.copy_(saved)
                else:
                    raise ValueError(f"shape {list(saved.shape)}, not {list(item.shape)}")
            except (KeyError, ValueError, RuntimeError) as error:
                if type(error) not in (KeyError, ValueError, RuntimeError):
                    raise  # a dead engine's: the state is not to blame
                reason = " ".join(str(error).split())[:200]
                fail(f"{path} does not fit this script, {name}: {reason}; start the run anew")
        if self.ring is not None:
            try:
                self.ring[0][...] = content["rows"]
                for name, array in self.ring[1].items():
                    saved, array = content["ring"][name], array[: content["rows"]]
                    if saved.shape != array.shape:  # NumPy would broadcast some
                        raise ValueError(f"{name} {list(saved.shape)}, not {list(array.shape)}")
                    array[...] = saved.numpy()
            except (KeyError, ValueError) as error:
                fail(f"{path} does not fit this script, replay buffer: {error}; start the run anew")
        self._sizes, self.start_step = content["files"], content["global_step"]
        if content.get("eval_due"):
            self._keep_due_evaluation()
        self.visits[:] = content["visits"].numpy()
        torch.set_rng_state(content["torch_rng"])
        if self._on_cuda() and len(content["cuda_rng"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(content["cuda_rng"])
        record = json.loads((self.folder / "args.json").read_text())
        return record | {"args": dataclasses.asdict(self.args)}  # what may differ is remembered

    def _keep_due_evaluation(self) -> None:
        """Let the evaluation at the end stand where a longer run makes one at that step as well."""
        size, file = self._sizes.get("evals.csv", 0), self.folder / "evals.csv"
        if self.args.total_timesteps <= self.start_step or not file.exists():
            return
        lines = file.read_bytes()[size:].splitlines(keepends=True)
        header = b"" if size or not lines else lines.pop(0)
        row = lines[0] if lines and lines[0].endswith(b"\n") else b""
        if row.startswith(b"%d," % self.start_step):
            self._sizes["evals.csv"] = size + len(header) + len(row)

    # -- ends ----------------------------------------------------------------------------------

    def _leave(self, line: str, status: int = 1) -> NoReturn:
        """Save the last complete state, print one line, end the program."""
        self._save()
        self.finished = True
        saved = f"; continue with --resume {self.folder}" if self._saved() else ""
        newline = "\n" if self._bar is not None else ""
        os.write(2, f"{newline}{line}{saved}\n".encode())  # safe inside a signal handler
        self._let_go()
        raise SystemExit(status)

    def crash(self, what: str, error: BaseException) -> NoReturn:
        """An error that ends the run: keep what there is, one line, the rest in a file."""
        with self._writing():
            lines = traceback.format_exception(type(error), error, error.__traceback__)
            (self.folder / "traceback.txt").write_text("".join(lines))
        reason = (str(error).splitlines() or [""])[0] or type(error).__name__
        self._leave(f"error: {what}: {reason} ({self.folder / 'traceback.txt'})")

    def _let_go(self) -> None:
        """Give back the signals and the folder, to which nothing is written any more."""
        for file in self._files.values():
            with contextlib.suppress(RuntimeError, OSError):  # a signal may come amid a write
                file.close()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}
        Run.going_on = None
        (self.folder / "lock").unlink(missing_ok=True)

    def _on_signal(self, number: int, frame: Any) -> None:
        signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C changes nothing
        if self._amid_save:  # two writers of one file would tear it
            self._signal = self._signal or number
            return
        step = "before the first iteration" if self._snapshot is None else "state saved"
        self._leave(f"stopped by {signal.Signals(number).name}, {step}", 128 + number)

    def _at_exit(self) -> None:
        """A crash: keep what there is."""
        if not self.finished:
            self._save()
            self.close()
            if self._saved():
                print(f"the last complete state is saved: --resume {self.folder}", file=sys.stderr)

    def finish(
        self,
        step: int,
        metrics: dict[str, float],
        draw_map: Callable[[Any], None] | None = None,
    ) -> None:
        """Record the last evaluation, draw the visits, close the files, print the summary.

        draw_map    of `draw_visits`
        """
        self.log_eval(step, metrics)
        picture = self.folder / "visits.png"
        if self.reachable is not None:
            self._log_visits(step)
            with self._writing():
                title = f"{self.script}.py, {step} steps"
                draw_visits(picture, self.visits, self.reachable, title, draw_map)
        self.close()
        results = metrics or {"step": step}
        print("done: " + "  ".join(f"{k.split('/')[-1]} {v:.4g}" for k, v in results.items()))
        print(f"curves: tensorboard --logdir {self.folder}", flush=True)
        if self.reachable is not None:
            print(f"picture of the visits: {picture}", flush=True)

    def close(self) -> None:
        self.finished = True
        atexit.unregister(self._at_exit)
        if self._bar is not None:
            self._bar.close()
        with self._writing():
            for file in self._files.values():
                file.close()
            self.writer.close()
        if self._tracker is not None:
            self._tracker.finish()
        self._let_go()
