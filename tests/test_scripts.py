"""Every script end to end: each bonus and environment, repeatability, resume, signals, failures."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from run_files import rows
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import ppo_sofe
from common import mazes, runs
from ppo_sofe import Args

ROOT = Path(__file__).parent.parent
TINY = {
    "num_envs": 2,
    "num_steps": 8,
    "minibatch_size": 8,
    "update_epochs": 2,
    "channels": 4,
    "embedding_dim": 8,
    "max_steps": 6,
    "total_timesteps": 48,
    "eval_episodes": 2,
    "device": "cpu",
}
ENGINES = ["griddly", "numpy"] if mazes.griddly_installed() else ["numpy"]


def train(tmp_path, name="run", **settings):
    args = Args(**(TINY | {"runs_dir": str(tmp_path), "run_name": name} | settings))
    return ppo_sofe.main(args), tmp_path / name


def flags(**settings):
    for key, value in settings.items():
        flag = key.replace("_", "-")
        if value is False:
            yield f"--no-{flag}"
        else:
            yield from [f"--{flag}"] if value is True else [f"--{flag}", str(value)]


def command(**settings):
    return [sys.executable, str(ROOT / "ppo_sofe.py"), *flags(**settings)]


def shell(cwd, timeout=60, **settings):
    return subprocess.run(
        command(**settings), cwd=cwd, capture_output=True, text=True, timeout=timeout
    )


# --- What a run does and writes ------------------------------------------------------------------


@pytest.mark.parametrize("env_id", ["Maze1-v0", "DeepSea-v0"])
@pytest.mark.parametrize("counts", ["episodic", "global"])
@pytest.mark.parametrize(
    ("bonus", "augment"),
    [("none", False)] + [(b, a) for b in ("sqrt", "salesman", "smax") for a in (False, True)],
)
def test_every_bonus_with_and_without_sofe(tmp_path, env_id, counts, bonus, augment):
    before = torch.get_num_threads()
    metrics, folder = train(
        tmp_path, env_id=env_id, counts=counts, bonus=bonus, augment=augment, deepsea_size=4
    )
    torch.set_num_threads(before)
    assert {"eval/greedy_return", "eval/sampled_coverage"} <= metrics.keys()
    assert all(np.isfinite(value) for value in metrics.values())
    for name in ("args.json", "episodes.csv", "updates.csv", "evals.csv", "visits.png"):
        assert (folder / name).stat().st_size > 0
    episodes = rows(folder, "episodes.csv")
    assert list(episodes[0]) == ["step", "return", "length", "bonus", "coverage"]
    assert len(episodes) == (48 // 4 if env_id == "DeepSea-v0" else 48 // 6)
    assert (sum(float(row["bonus"]) for row in episodes) > 0) == (bonus != "none")
    assert [int(row["step"]) for row in rows(folder, "updates.csv")] == [16, 32, 48]
    content = torch.load(folder / "checkpoint.pt", weights_only=True)
    assert content["global_step"] == 48 and content["script"] == "ppo_sofe"


@pytest.mark.parametrize("env_id", ["Maze2-v0", "Maze3-v0"])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("network", ["cnn", "mlp"])
def test_views_goals_doors_and_networks(tmp_path, env_id, engine, network):
    goal, view = env_id == "Maze2-v0", 5 if network == "cnn" else None
    metrics, _ = train(
        tmp_path, env_id=env_id, engine=engine, goal=goal, view=view, network=network, augment=True
    )
    assert metrics["eval/sampled_length"] == 6


@pytest.mark.parametrize(
    "settings",
    [
        {"num_envs": 1, "minibatch_size": 3},
        {"num_envs": 3, "minibatch_size": 7},
        {"num_steps": 1, "minibatch_size": 2},
        {"total_timesteps": 1},
        {"total_timesteps": 17},
    ],
    ids=str,
)
def test_odd_sizes_work(tmp_path, settings):
    _, folder = train(tmp_path, augment=True, counts="global", **settings)
    batch = Args(**(TINY | settings)).batch_size
    last = int(rows(folder, "updates.csv")[-1]["step"])
    assert last % batch == 0 and 0 <= last - settings.get("total_timesteps", 48) < batch


def test_every_sample_is_used_once_per_epoch(tmp_path, monkeypatch):
    """Sizes of the minibatches of an iteration, and that an epoch is a permutation of the batch."""
    seen, ppo_loss = [], ppo_sofe.ppo_loss

    def kept(agent, batch, args):
        seen.append(batch["returns"].clone())
        return ppo_loss(agent, batch, args)

    monkeypatch.setattr(ppo_sofe, "ppo_loss", kept)
    train(tmp_path, minibatch_size=7, update_epochs=3, total_timesteps=16, num_threads=2)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
    assert [len(returns) for returns in seen] == [7, 7, 2] * 3
    epochs = [torch.cat(seen[i : i + 3]) for i in (0, 3, 6)]
    assert all(torch.equal(epoch.sort()[0], epochs[0].sort()[0]) for epoch in epochs)
    assert not torch.equal(epochs[0], epochs[1])


def test_the_record_of_a_run(tmp_path):
    _, folder = train(tmp_path, beta=0.25)
    record = json.loads((folder / "args.json").read_text())
    assert record["args"]["beta"] == 0.25
    assert record["versions"]["torch"] == torch.__version__
    assert {"git_commit", "device", "started", "command"} <= record.keys()


def test_the_commit_of_a_run_says_whether_its_code_is_that(tmp_path, monkeypatch):
    def git(*words):
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.check_output(["git", "-C", str(tmp_path), *who, *words], text=True)

    (tmp_path / "common").mkdir()
    monkeypatch.setattr(runs, "__file__", str(tmp_path / "common" / "runs.py"))
    assert runs.git_commit() is None  # no repository
    git("init", "--quiet")
    assert runs.git_commit() is None  # no commit
    for path in ("common/runs.py", "a_sofe.py", "README.md"):
        (tmp_path / path).write_text("1\n")
    git("add", ".")
    git("commit", "--quiet", "--message", "first")
    head = git("rev-parse", "HEAD").strip()
    assert runs.git_commit() == head
    (tmp_path / "README.md").write_text("2\n")
    assert runs.git_commit() == head
    for path in ("a_sofe.py", "my_copy_sofe.py"):
        (tmp_path / path).write_text("2\n")
        assert runs.git_commit() == f"{head}-dirty"
        git("stash", "--quiet", "--include-untracked")
        assert runs.git_commit() == head
    monkeypatch.setenv("PATH", "")
    assert runs.git_commit() is None  # no git


def test_no_scalar_is_nan_and_all_metrics_are_there(tmp_path):
    _, folder = train(tmp_path, bonus="none", eval_every=16)
    events = EventAccumulator(str(folder))
    events.Reload()
    tags = events.Tags()["scalars"]
    assert {
        "charts/episodic_return",
        "charts/episodic_length",
        "charts/SPS",
        "losses/policy_loss",
        "losses/explained_variance",
        "charts/learning_rate",
        "explore/bonus",
        "explore/raw_bonus",
        "explore/episodic_bonus",
        "explore/coverage",
        "explore/global_coverage",
        "eval/greedy_return",
    } <= set(tags)
    assert all(np.isfinite(event.value) for tag in tags for event in events.Scalars(tag))
    assert [int(row["step"]) for row in rows(folder, "evals.csv")] == [16, 32, 48]


def test_the_task_reward_that_is_logged_does_not_depend_on_the_bonus(tmp_path):
    """With a policy that does not learn, returns are alike whatever beta is."""
    settings = {"env_id": "DeepSea-v0", "deepsea_size": 4, "learning_rate": 1e-30}
    returns = []
    for beta in (0.1, 5.0):
        _, folder = train(tmp_path, name=f"beta{beta}", beta=beta, **settings)
        returns.append([row["return"] for row in rows(folder, "episodes.csv")])
    assert returns[0] == returns[1] and len(set(returns[0])) > 1


def test_reward_free_never_sees_the_task_reward(tmp_path, monkeypatch):
    """--ext-coef 0 gives the same losses, to the bit, whatever the environment pays."""
    losses = []
    for scale in (1.0, 0.0, 7.0):
        with monkeypatch.context() as patch:
            step = ppo_sofe.deepsea.DeepSeaVecEnv.step

            def scaled(self, actions, step=step, scale=scale):
                obs, rewards, *rest = step(self, actions)
                return obs, scale * rewards, *rest

            patch.setattr(ppo_sofe.deepsea.DeepSeaVecEnv, "step", scaled)
            _, folder = train(tmp_path, name=f"s{scale}", env_id="DeepSea-v0", ext_coef=0.0)
        losses.append((folder / "updates.csv").read_bytes())
    assert losses[0] == losses[1] == losses[2]


def test_pictures_and_videos(tmp_path):
    from PIL import Image

    _, folder = train(tmp_path, capture_video=True, max_steps=30, env_id="Maze2-v0")
    frames = []
    with Image.open(folder / "evaluation.gif") as video:
        for index in range(video.n_frames):
            video.seek(index)
            frames.append(np.asarray(video.convert("RGB")).tobytes())
    assert len(set(frames)) > 1
    with Image.open(folder / "visits.png") as picture:
        assert np.asarray(picture.convert("RGB")).std() > 10


def test_a_change_of_the_working_directory_does_no_harm(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    reset = mazes.MazeVecEnv.reset

    def moving_reset(self, **kwargs):
        os.chdir("/")
        return reset(self, **kwargs)

    monkeypatch.setattr(mazes.MazeVecEnv, "reset", moving_reset)
    ppo_sofe.main(Args(**TINY, runs_dir="here", run_name="run"))
    assert (tmp_path / "here" / "run" / "checkpoint.pt").exists()


# --- Repeatability, evaluation, resume -----------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_the_same_seed_gives_the_same_csv(tmp_path, engine):
    settings = {"engine": engine, "augment": True, "counts": "global", "bonus": "smax"}
    folders = [train(tmp_path, name=f"run{i}", **settings)[1] for i in (1, 2)]
    other = train(tmp_path, name="other", seed=2, **settings)[1]
    for name in ("episodes.csv", "updates.csv", "evals.csv"):
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()
    assert (folders[0] / "updates.csv").read_bytes() != (other / "updates.csv").read_bytes()


def test_both_engines_give_the_same_csv(tmp_path):
    if len(ENGINES) < 2:
        pytest.skip("Griddly has no wheel here")
    folders = [train(tmp_path, name=e, engine=e, augment=True)[1] for e in ENGINES]
    for name in ("episodes.csv", "updates.csv", "evals.csv"):
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()


def test_evaluations_do_not_change_the_training(tmp_path):
    settings = {"augment": True, "counts": "global"}
    _, with_evaluation = train(tmp_path, name="with", eval_every=16, **settings)
    _, without = train(tmp_path, name="without", eval_episodes=0, **settings)
    for name in ("episodes.csv", "updates.csv"):
        assert (with_evaluation / name).read_bytes() == (without / name).read_bytes()


@pytest.mark.parametrize("counts", ["episodic", "global"])
def test_evaluation_never_writes_the_table_of_training(counts):
    args = Args(**TINY, augment=True, counts=counts)
    envs = ppo_sofe.make_envs(args, 2)
    table = torch.randint(1, 9, (2 if counts == "episodic" else 1, 32, 32))
    kept = table.clone()
    agent = ppo_sofe.Agent(envs, (1, 32, 32), args)
    first = ppo_sofe.evaluate(agent, table, args)
    assert torch.equal(table, kept)
    assert first == ppo_sofe.evaluate(agent, table, args)


SETTINGS_TO_RESUME = [
    {"engine": engine, "env_id": "Maze3-v0", "max_steps": 7, "counts": counts}
    for engine in ENGINES
    for counts in ("episodic", "global")
] + [{"env_id": "DeepSea-v0", "deepsea_size": 5, "counts": "global"}]


@pytest.mark.parametrize("settings", SETTINGS_TO_RESUME, ids=str)
def test_a_resumed_run_equals_one_that_never_stopped(tmp_path, settings):
    settings = settings | {"augment": True, "eval_every": 16}
    whole, whole_folder = train(tmp_path, name="whole", total_timesteps=96, **settings)
    _, folder = train(tmp_path, name="parts", total_timesteps=32, **settings)
    args = Args(resume=str(folder), total_timesteps=96)
    resumed = ppo_sofe.main(args)
    assert resumed == whole
    for name in ("episodes.csv", "updates.csv", "evals.csv"):
        assert (folder / name).read_text() == (whole_folder / name).read_text()
    assert len(rows(folder, "evals.csv")) == 6
    left, right = (
        torch.load(f / "checkpoint.pt", weights_only=True)["visits"] for f in (whole_folder, folder)
    )
    assert torch.equal(left, right)


def test_an_annealed_run_keeps_its_length(tmp_path):
    _, folder = train(tmp_path, anneal_beta=True)
    with pytest.raises(SystemExit, match="--anneal-beta fixes --total-timesteps 48"):
        ppo_sofe.main(Args(resume=str(folder), total_timesteps=96))


def test_a_finished_run_can_be_evaluated_again(tmp_path):
    metrics, folder = train(tmp_path, augment=True, counts="global")
    assert ppo_sofe.main(Args(resume=str(folder))) == metrics


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_the_resumed_run_is_the_same(tmp_path, number):
    settings = TINY | {
        "total_timesteps": 1600,
        "augment": True,
        "engine": "auto",
        "eval_episodes": 0,
    }
    process = subprocess.Popen(
        command(**settings, runs_dir=tmp_path, run_name="cut"),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    updates = tmp_path / "cut" / "updates.csv"
    deadline = time.monotonic() + 60
    while not (updates.exists() and updates.read_text().count("\n") > 20):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(number)
    start = time.monotonic()
    _, error = process.communicate(timeout=20)
    assert time.monotonic() - start < 10
    assert process.returncode == 128 + number
    assert len(error.strip().splitlines()) == 1 and "--resume" in error
    done = torch.load(tmp_path / "cut" / "checkpoint.pt", weights_only=True)["global_step"]
    assert 0 < done < 1600

    resumed = shell(tmp_path, resume=tmp_path / "cut")
    assert resumed.returncode == 0, resumed.stderr
    _, whole = train(tmp_path, name="whole", **settings)
    for name in ("episodes.csv", "updates.csv"):
        assert (tmp_path / "cut" / name).read_text() == (whole / name).read_text()


def test_a_killed_run_goes_on_from_its_last_checkpoint(tmp_path):
    settings = TINY | {"total_timesteps": 1600, "checkpoint_every": 160, "eval_episodes": 0}
    process = subprocess.Popen(
        command(**settings, runs_dir=tmp_path, run_name="cut"),
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "cut" / "checkpoint.pt").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    process.wait()
    assert shell(tmp_path, resume=tmp_path / "cut").returncode == 0
    _, whole = train(tmp_path, name="whole", **settings)
    for name in ("episodes.csv", "updates.csv"):
        assert (tmp_path / "cut" / name).read_text() == (whole / name).read_text()


# --- Command line --------------------------------------------------------------------------------


def test_help_prints_no_warning(tmp_path):
    result = subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / "ppo_sofe.py"), "--help"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0 and result.stderr == ""
    for name in Args.__dataclass_fields__:
        assert "--" + name.replace("_", "-") in result.stdout


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (["--augment"], 0),
        (["--no-augment"], 0),
        (["--augment", "True"], 2),
        (["--ent_coef", "0.1", "--view", "None"], 0),
        (["--bonus", "srqt"], 2),
        (["--total-timesteps", "1e6"], 2),
        (["--no-such-flag"], 2),
        (["--augment", "--bonus", "none"], 2),
        (["--goal"], 2),
        (["--env-id", "DeepSea-v0", "--view", "5"], 2),
        (["--view", "4"], 2),
        (["--deepsea-size", "0"], 2),
        (["--num-envs", "0"], 2),
        (["--eval-every", "9", "--eval-episodes", "0"], 2),
        (["--capture-video", "--eval-episodes", "0"], 2),
        (["--gamma", "1.5"], 2),
        (["--beta", "inf"], 2),
        (["--num-steps", "2", "--num-envs", "2"], 2),
    ],
    ids=str,
)
def test_command_lines(line, status, capsys):
    try:
        ppo_sofe.tyro.cli(Args, args=line)
        result = 0
    except SystemExit as end:
        result = end.code
    assert result == status
    error = capsys.readouterr().err
    assert bool(error) == bool(status) and "Traceback" not in error


def test_two_names_of_an_impossible_pair_are_in_the_message():
    for settings, names in (
        ({"augment": True, "bonus": "none"}, ("--augment", "--bonus")),
        ({"goal": True}, ("--goal", "--env-id")),
        ({"view": 5, "env_id": "DeepSea-v0"}, ("--view", "--env-id")),
        (
            {"minibatch_size": 64, "num_steps": 8, "num_envs": 2},
            ("--minibatch-size", "--num-steps"),
        ),
    ):
        with pytest.raises(ValueError) as error:
            Args(**settings)
        assert all(name in str(error.value) for name in names)


def test_output_that_is_piped_has_no_carriage_returns_and_ends_with_what_to_do(tmp_path):
    result = shell(tmp_path, **TINY, augment=True)
    assert result.returncode == 0, result.stderr
    assert "\r" not in result.stdout + result.stderr
    assert "steps/s" in result.stdout and "left" in result.stdout
    folder = re.search(r"tensorboard --logdir (\S+)", result.stdout).group(1)
    assert Path(folder).is_absolute() and list(Path(folder).glob("events.*"))
    assert re.fullmatch(r"[A-Za-z0-9._-]{1,79}", Path(folder).name)


def test_runs_of_the_same_second_get_folders_of_their_own(tmp_path):
    line = command(**(TINY | {"eval_episodes": 0}))
    together = [subprocess.Popen(line, cwd=tmp_path, stdout=subprocess.DEVNULL) for _ in range(3)]
    assert [process.wait(timeout=60) for process in together] == [0, 0, 0]
    assert len(list((tmp_path / "runs").iterdir())) == 3


# --- Failures: one line, status not 0, nothing lost ----------------------------------------------


def ends_with_one_line(result, *words):
    assert result.returncode not in (0, None)
    assert "Traceback" not in result.stderr
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1 and all(word in lines[0] for word in words), result.stderr


def test_a_run_folder_that_exists_is_not_touched(tmp_path):
    _, folder = train(tmp_path)
    before = (folder / "episodes.csv").read_bytes()
    result = shell(tmp_path, **TINY, runs_dir=tmp_path, run_name="run")
    ends_with_one_line(result, "exists", "--run-name", "--resume")
    assert (folder / "episodes.csv").read_bytes() == before


def test_resume_names_what_is_wrong(tmp_path):
    ends_with_one_line(shell(tmp_path, resume=tmp_path / "nowhere"), "no run here", "args.json")
    _, folder = train(tmp_path)
    result = shell(tmp_path, resume=folder, beta=0.5)
    ends_with_one_line(result, "--beta 0.5", "1.0")

    record = json.loads((folder / "args.json").read_text())
    (folder / "args.json").write_text(json.dumps(record | {"script": "a2c_sofe"}))
    ends_with_one_line(shell(tmp_path, resume=folder), "a2c_sofe.py", "ppo_sofe.py")
    record["args"]["channels"] = 8
    (folder / "args.json").write_text(json.dumps(record))
    ends_with_one_line(shell(tmp_path, resume=folder), "channels=4", "channels=8")
    (folder / "args.json").write_text("{")
    ends_with_one_line(shell(tmp_path, resume=folder), "args.json cannot be read")


def test_a_damaged_checkpoint_is_named(tmp_path):
    _, folder = train(tmp_path)
    path = folder / "checkpoint.pt"
    whole = path.read_bytes()
    torch.save(torch.load(path, weights_only=True) | {"script": "a2c_sofe"}, path)
    ends_with_one_line(shell(tmp_path, resume=folder), "a2c_sofe.py")
    torch.save({"something": "else"}, path)
    ends_with_one_line(shell(tmp_path, resume=folder), "no checkpoint of this project")
    for content in (whole[: len(whole) // 2], b""):
        path.write_bytes(content)
        ends_with_one_line(shell(tmp_path, resume=folder), "checkpoint.pt", "damaged")
    path.unlink()
    ends_with_one_line(shell(tmp_path, resume=folder), "does not exist")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "MemoryError"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"), "allocate"),
        (PermissionError(13, "Permission denied"), "Permission denied"),
    ],
    ids=["memory", "allocator", "permission"],
)
def test_a_checkpoint_that_cannot_be_read_is_not_called_damaged(tmp_path, monkeypatch, error, said):
    def load(*args, **kwargs):
        raise error

    _, folder = train(tmp_path)
    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(SystemExit) as end:
        ppo_sofe.main(Args(resume=str(folder)))
    message = str(end.value)
    assert "cannot be read" in message and said in message and "anew" not in message


def test_the_files_are_closed_before_the_folder_is_given_back(tmp_path, monkeypatch):
    """Else the next run of the folder would cut them, and then get rows of this one."""
    unlink, seen = Path.unlink, []

    def look(self, **kwargs):
        if self.name == "lock":
            seen.append((self.parent / "updates.csv").read_text())
        unlink(self, **kwargs)

    def stop(self, *row):
        log_update(self, *row)
        signal.raise_signal(signal.SIGTERM)

    log_update = runs.Run.log_update
    monkeypatch.setattr(runs.Run, "log_update", stop)
    monkeypatch.setattr(Path, "unlink", look)
    with pytest.raises(SystemExit):
        train(tmp_path)
    assert len(seen) == 1 and seen[0].count("\n") == 2, seen


def test_only_a_full_disk_asks_for_room(tmp_path, monkeypatch):
    def write(self, *args):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(runs.Run, "_write_whole", write)
    with pytest.raises(SystemExit, match=r"cannot write to .* \(Permission denied\)$"):
        train(tmp_path)


def test_missing_packages_are_named(tmp_path):
    """Weights & Biases is not installed with the project."""
    ends_with_one_line(shell(tmp_path, **TINY, track=True), "pip install wandb")
    assert not (tmp_path / "runs").exists()


def test_a_tracker_that_does_not_start_changes_no_run(tmp_path, monkeypatch):
    """The real one does so where nobody is logged in; it is not installed with the project."""
    _, folder = train(tmp_path, eval_every=8, checkpoint_every=8)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert {"evals.csv", "visits.csv"} <= before.keys()
    fake = "def init(**settings):\n    raise RuntimeError('nobody is logged in.\\nmore')\n"
    (tmp_path / "wandb.py").write_text(fake)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    new = shell(tmp_path, **TINY, track=True, runs_dir=tmp_path / "new", run_name="new")
    longer = shell(tmp_path, resume=folder, track=True, total_timesteps=10**6)
    for result in (new, longer):
        ends_with_one_line(result, "(nobody is logged in)", "wandb login", "--no-track")
    assert not list((tmp_path / "new").iterdir())
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_device_that_is_not_there(tmp_path):
    name = "mps" if not torch.backends.mps.is_available() else "cuda"
    ends_with_one_line(shell(tmp_path, **(TINY | {"device": name})), f"--device {name}", "cpu")


def test_too_little_memory_is_found_before_it_is_taken(tmp_path):
    result = shell(tmp_path, **(TINY | {"num_steps": 10**9}))
    ends_with_one_line(result, "rollout", "GiB")
    assert "MiB" in result.stdout


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    ends_with_one_line(shell(tmp_path, **TINY, runs_dir=tmp_path / "file"), "--runs-dir")


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path):
    """A limit on the size of files stands in for the disk: writing fails in the same calls."""
    resource = pytest.importorskip("resource")

    def small_files(limit):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    settings = TINY | {"checkpoint_every": 16, "eval_episodes": 0}
    _, folder = train(tmp_path, **settings)
    before = (folder / "checkpoint.pt").read_bytes()
    for limit in (len(before) // 2, 1_000):
        result = subprocess.run(
            command(resume=folder, total_timesteps=100_000),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            preexec_fn=lambda limit=limit: small_files(limit),
        )
        ends_with_one_line(result, "cannot write", "make room", "--resume")
        assert (folder / "checkpoint.pt").read_bytes() == before
        assert not (folder / "lock").exists()


def test_a_loss_that_is_not_a_number_keeps_the_last_good_state(tmp_path, monkeypatch, capfd):
    calls = []
    ppo_loss = ppo_sofe.ppo_loss

    def spoiled(*args):
        loss, terms = ppo_loss(*args)
        calls.append(1)
        if len(calls) > 8:  # in the third iteration of 4 minibatches each
            loss = loss * float("nan")
            terms["value_loss"] = loss.detach()
        return loss, terms

    monkeypatch.setattr(ppo_sofe, "ppo_loss", spoiled)
    with pytest.raises(SystemExit) as end:
        train(tmp_path, total_timesteps=160)
    assert end.value.code == 1
    error = capfd.readouterr().err
    assert (
        error.count("\n") == 1
        and " is nan in the update at step 48" in error
        and "--resume" in error
    )
    content = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    assert content["global_step"] == 32
    assert all(torch.isfinite(value).all() for value in content["state"]["agent"].values())
    monkeypatch.undo()
    ppo_sofe.main(Args(resume=str(tmp_path / "run")))
    _, whole = train(tmp_path, name="whole", total_timesteps=160)
    assert (tmp_path / "run" / "updates.csv").read_text() == (whole / "updates.csv").read_text()


def test_a_crash_saves_the_last_complete_state(tmp_path):
    """An error in the middle of a rollout, in its own process: a traceback, and a checkpoint."""
    code = (
        "import ppo_sofe, common.mazes as m\n"
        "step, calls = m.MazeVecEnv.step, []\n"
        "def broken(self, actions):\n"
        "    calls.append(1)\n"
        "    assert len(calls) < 20, 'the engine is dead'\n"
        "    return step(self, actions)\n"
        "m.MazeVecEnv.step = broken\n"
        f"ppo_sofe.main(ppo_sofe.Args(**{TINY!r}, runs_dir={str(tmp_path)!r}, run_name='run'))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 1 and "the engine is dead" in result.stderr
    assert result.stderr.strip().splitlines()[-1].startswith("the last complete state is saved")
    content = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    assert content["global_step"] == 32


# --- Learning ------------------------------------------------------------------------------------


def test_sofe_solves_deepsea_10(tmp_path):
    """The setting of the README for 10 rows, cut to 3,000 episodes."""
    metrics, _ = train(
        tmp_path,
        env_id="DeepSea-v0",
        network="mlp",
        counts="global",
        augment=True,
        num_envs=32,
        num_steps=10,
        minibatch_size=160,
        update_epochs=4,
        ent_coef=0.05,
        beta=0.3,
        anneal_beta=True,
        embedding_dim=128,
        total_timesteps=30_000,
    )
    assert metrics["eval/greedy_return"] >= 0.95


@pytest.mark.slow
def test_sofe_explores_maze_1_better_than_a_random_walk(tmp_path):
    """The setting of `make run`: coverage of the last episodes against the random walk's."""
    _, folder = train(
        tmp_path,
        augment=True,
        ext_coef=0.0,
        num_envs=32,
        num_steps=128,
        minibatch_size=256,
        update_epochs=4,
        channels=16,
        embedding_dim=128,
        ent_coef=0.01,
        beta=0.1,
        max_steps=1000,
        total_timesteps=200_000,
        eval_episodes=0,
    )
    coverage = np.mean([float(row["coverage"]) for row in rows(folder, "episodes.csv")[-64:]])
    assert coverage > 2 * mazes.random_walk_coverage("Maze1-v0")[-1]
