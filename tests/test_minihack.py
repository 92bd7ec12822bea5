"""MiniHack, with the real NetHack: seeds, ends of episodes, workers, and what the package gives."""

import gc
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import psutil
import pytest

from common import minihack
from common.minihack import LEVELS, MiniHackVecEnv, level_seed, make_game

pytestmark = pytest.mark.skipif(
    not minihack.minihack_installed(), reason="MiniHack has no wheel here"
)

ROOT = Path(__file__).resolve().parent.parent
ROOM, MULTIROOM, LAVA = (
    f"MiniHack-{name}-v0" for name in ("Room-5x5", "MultiRoom-N2", "MultiRoom-N2-Lava")
)
NORTH, SOUTH_EAST = 0, 5


@pytest.fixture
def make():
    """MiniHackVecEnv in this process, closed at the end; num_workers for the others."""
    made = []

    def make(env_id=ROOM, num_envs=1, num_workers=0, **kwargs):
        made.append(MiniHackVecEnv(env_id, num_envs, num_workers, **kwargs))
        return made[-1]

    yield make
    for envs in made:
        envs.close()


def flatten(value, path=""):
    """Name -> array of nested dicts of arrays."""
    if not isinstance(value, dict):
        return {path: np.asarray(value)}
    return {k: v for key, item in value.items() for k, v in flatten(item, f"{path}/{key}").items()}


def assert_same(left, right):
    left, right = flatten(left), flatten(right)
    assert left.keys() == right.keys()
    for key, value in left.items():
        assert value.dtype == right[key].dtype and np.array_equal(value, right[key]), key


def play(envs, steps, seed=0):
    """What comes of random actions, as one dict of each step."""
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        names = ("obs", "rewards", "terminations", "truncations", "info")
        actions = rng.integers(envs.single_action_space.n, size=envs.num_envs)
        yield dict(zip(names, envs.step(actions), strict=True))


def message(observation, i=0):
    return bytes(observation["message"][i]).split(b"\0")[0].decode()


def layout(game):
    return game.get_env_map(game.minigrid_env)


# -- seeds ---------------------------------------------------------------------------------------


def test_the_number_of_workers_changes_nothing(make):
    """Two runs of one seed in other processes, other slices of envs: the same bits throughout."""
    contenders = [make(MULTIROOM, 5, workers) for workers in (0, 1, 2)]
    starts = [envs.reset(seed=7) for envs in contenders]
    ended = 0
    for other in starts[1:]:
        assert_same(starts[0][0], other[0])
        assert_same(starts[0][1], other[1])
    for first, *others in zip(*(play(envs, 90) for envs in contenders), strict=True):
        ended += (first["terminations"] | first["truncations"]).sum()
        for other in others:
            assert_same(first, other)
    assert ended >= 10


def test_an_episode_depends_on_its_place_alone(make):
    """Env i is the same among more envs; reset to the same seed, it is the same again."""
    few, many = make(MULTIROOM, 2), make(MULTIROOM, 3)
    few.reset(seed=3)
    for _ in play(few, 25):
        pass
    few.reset(seed=3)
    many.reset(seed=3)
    rng = np.random.default_rng(1)
    for _ in range(60):
        actions = rng.integers(8, size=3)
        left, right = few.step(actions[:2])[0], many.step(actions)[0]
        assert_same(left, {key: value[:2] for key, value in right.items()})


def test_seeds_envs_and_episodes_differ(make):
    envs = make(MULTIROOM, 3, max_steps=1)
    maps = [envs.reset(seed=1)[0]["glyphs"]]
    maps += [envs.step(np.full(3, NORTH))[0]["glyphs"] for _ in range(2)]
    maps += [envs.reset(seed=2)[0]["glyphs"]]
    assert len({array.tobytes() for array in np.concatenate(maps)}) == 12


def test_level_seeds_of_training_and_evaluation_are_apart(make):
    places = [(seed, env, episode) for seed in (0, 1) for env in range(8) for episode in range(50)]
    train = {level_seed(*place, "train") for place in places}
    held_out = {level_seed(*place, "eval") for place in places}
    assert len(train) == len(held_out) == len(places)
    assert min(train) >= 0 and max(held_out) < 2 * LEVELS
    assert max(train) < LEVELS <= min(held_out)
    assert {level_seed(*place, "train", 3) for place in places} == {0, 1, 2}
    assert {level_seed(*place, "eval", 2) for place in places} == {LEVELS, LEVELS + 1}

    starts = [make(MULTIROOM, 1, split=split).reset(seed=1)[0] for split in ("train", "eval")]
    assert (starts[0]["glyphs"] != starts[1]["glyphs"]).any()
    one = make(MULTIROOM, 3, num_levels=1).reset(seed=1)[0]["glyphs"]
    assert (one == one[0]).all()


def test_the_layout_is_what_minigrid_makes_of_the_seed(make):
    envs = make(MULTIROOM, 1, max_steps=1)
    envs.reset(seed=5)
    for episode in range(3):
        game = envs._games.games[0]
        ours = layout(game)
        game.minigrid_env.reset(seed=level_seed(5, 0, episode))
        assert ours == layout(game)
        envs.step(np.array([NORTH]))


def test_chance_within_a_level_is_seeded_too(make):
    """Monsters move, traps are hidden, stairs and start are drawn: all alike in two runs."""
    one, two = (make("MiniHack-Room-Ultimate-15x15-v0", 2) for _ in range(2))
    assert_same(one.reset(seed=4)[0], two.reset(seed=4)[0])
    seed = level_seed(4, 0, 0)
    core, disp, reseed, _ = one._games.games[0].get_seeds()
    assert (core, disp) == (seed, seed) and not reseed  # else it draws a seed of its own at times
    for left, right in zip(play(one, 150), play(two, 150), strict=True):
        assert_same(left, right)


def test_the_moon_comes_from_the_seed_and_not_from_the_calendar(make):
    envs = make(ROOM, 1)
    moons = {"moon" in message(envs.reset(seed=seed)[0]) for seed in range(40)}
    assert moons == {True, False}


def test_a_reset_without_a_seed_goes_on_with_the_next_episodes(make):
    envs, other = make(MULTIROOM, 2, max_steps=3), make(MULTIROOM, 2, max_steps=3)
    first = envs.reset(seed=1)[0]
    second = envs.reset()[0]
    assert (first["glyphs"] != second["glyphs"]).any()
    other.reset(seed=1)
    for _ in range(3):
        ended = other.step(np.array([NORTH, NORTH]))
    assert_same(second, ended[0])
    fresh = make(MULTIROOM, 1)
    assert fresh.reset()[0]["glyphs"].shape == (1, 21, 79) and fresh.seed is not None


def test_python_s_own_generator_is_left_alone(make):
    random.seed(3)
    expected = random.random()
    random.seed(3)
    make(ROOM).reset(seed=1)
    assert random.random() == expected


# -- as the package has it -----------------------------------------------------------------------


def test_same_observations_and_rewards_as_the_package(make):
    """Beside a game of the package with its own ways, as long as no episode has ended."""
    envs = make(MULTIROOM, 1, penalty_step=-0.01)
    envs.reset(seed=1)
    keys = ("glyphs", "blstats", "message")
    theirs = gym.make(MULTIROOM, observation_keys=keys, penalty_step=-0.01, fix_moon_phase=True)
    game = theirs.unwrapped
    penalised = 0
    for episode in range(4):
        seed = level_seed(1, 0, episode)
        game.minigrid_env.unwrapped.np_random, _ = gym.utils.seeding.np_random(seed)
        game.nethack.set_initial_seeds(seed, seed, False)
        observation = theirs.reset()[0]
        rng = np.random.default_rng(episode)
        for step in range(40):
            ours = {key: value[0] for key, value in envs.observe().items()}
            assert_same(ours, {key: observation[key] for key in keys})
            action = int(rng.integers(8))
            observation, reward, done, _, info = theirs.step(action)
            _, rewards, terminations, truncations, _ = envs.step(np.array([action]))
            assert rewards[0] == np.float32(reward)
            penalised += reward < 0
            assert done == (terminations[0] or truncations[0]), step
            if done:
                assert truncations[0] == (info["end_status"].name == "ABORTED")
                break
    assert penalised > 10
    theirs.close()


def test_only_what_is_asked_for_is_made_unless_a_level_s_rewards_need_more(make):
    """Descriptions of all cells in words take half of a step; some skills read the inventory."""
    for env_id, size in ((ROOM, 0), ("MiniHack-Eat-v0", 21 * 79 * 80)):
        envs = make(env_id, 1, max_steps=10)
        game = envs._games.games[0]
        place = game._observation_keys.index("screen_descriptions")
        assert (game.reward_manager is None) == (size == 0)
        envs.reset(seed=1)
        for _ in play(envs, 12):
            assert game.last_observation[place].size == size


def test_compiled_levels_have_the_bytes_of_the_package():
    game = make_game(MULTIROOM)
    folder = Path(game.nethack._vardir)
    for seed in range(3):
        game.minigrid_env.unwrapped.np_random, _ = gym.utils.seeding.np_random(seed)
        text = game.get_env_desc()
        type(game)._patch_nhdat(game, text)
        theirs = (folder / "nhdat").read_bytes()
        (folder / "nhdat").write_bytes(b"")
        game._patch_nhdat(text)
        assert (folder / "nhdat").read_bytes() == theirs
    assert sorted(os.listdir(folder / "lib")) == ["dungeon", "mylevel.lev", "quest.dat"]
    game.close()


def test_where_the_programs_are_missing_the_package_compiles(monkeypatch):
    game = make_game(MULTIROOM)
    calls = []
    monkeypatch.setattr(type(game), "_patch_nhdat", lambda self, text: calls.append(text))
    game._patch_nhdat("some.des")  # a file: the package knows where to look for it
    monkeypatch.setattr("minihack.base.HACKDIR", "/nowhere")
    game._patch_nhdat(text := game.get_env_desc())
    assert calls == ["some.des", text]
    game.close()


def test_a_level_that_does_not_compile_is_an_error():
    game = make_game(MULTIROOM)
    with pytest.raises(RuntimeError, match=r"lev_comp failed on a level: .*syntax error"):
        game._patch_nhdat("MAZE: nonsense\n")
    game.close()


# -- ends of episodes ----------------------------------------------------------------------------


@pytest.mark.parametrize("max_steps", [None, 4])
def test_reaching_the_stairs_is_a_success(make, max_steps):
    """From the corner of the room to the opposite one, also in the last step that there is."""
    envs = make(ROOM, 1, max_steps=max_steps)
    start, info = envs.reset(seed=1)
    corner = info["cell"][0]
    agent, stairs = start["glyphs"][0, corner[0], corner[1]], tuple(corner + 4)
    stairs_glyph = start["glyphs"][0][stairs]
    for step in range(1, 5):
        observation, rewards, terminations, truncations, info = envs.step(np.array([SOUTH_EAST]))
        assert terminations[0] == (step == 4) and not truncations[0]
        assert rewards[0] == (step == 4)
        if step < 4:
            assert (info["cell"][0] == corner + step).all() and "final_info" not in info
    final, last = info["final_obs"], info["final_info"]
    assert final["glyphs"][0][stairs] == agent != stairs_glyph  # on the map as the agent left it
    assert (final["blstats"][0, 1::-1] == stairs).all() and final["blstats"][0, 20] == 5  # turn
    assert (last["cell"][0] == stairs).all()
    episode = {key: value[0] for key, value in last["episode"].items()}
    coverage = pytest.approx(5 / (21 * 79))
    assert {"r": 1, "l": 4, "success": True, "coverage": coverage}.items() <= episode.items()
    assert all(last["episode"][f"_{key}"][0] for key in ("r", "l", "success", "coverage"))
    assert (info["cell"][0] == corner).all()  # of the new episode
    assert observation["glyphs"][0][stairs] == stairs_glyph
    assert observation["blstats"][0, 20] == 1


def test_the_time_limit_is_a_truncation_with_the_true_last_observation(make):
    limited, longer = make(MULTIROOM, 2, max_steps=9), make(MULTIROOM, 2, max_steps=12)
    limited.reset(seed=2)
    longer.reset(seed=2)
    for step, (short, long) in enumerate(
        zip(play(limited, 9), play(longer, 9), strict=True), start=1
    ):
        assert not short["terminations"].any()
        assert (short["truncations"] == (step == 9)).all() and not long["truncations"].any()
        if step < 9:
            assert "final_obs" not in short["info"]
            assert_same(short["obs"], long["obs"])
    assert_same(short["info"]["final_obs"], long["obs"])
    assert (short["info"]["final_info"]["cell"] == long["info"]["cell"]).all()
    assert (short["info"]["final_info"]["episode"]["l"] == 9).all()
    assert not short["info"]["final_info"]["episode"]["success"].any()


@pytest.mark.parametrize("workers", [0, 3])
def test_the_first_episodes_end_one_after_the_other(make, workers):
    """Without, as long as no goal is reached, all episodes would begin in the same step."""
    envs, ends = make(MULTIROOM, 4, workers, max_steps=10, stagger=True), [[], [], [], []]
    state = None
    envs.reset(seed=0)
    for step in range(1, 31):
        *_, truncated, info = envs.step(np.full(4, NORTH))
        for env in np.flatnonzero(truncated):
            ends[env].append((step, int(info["final_info"]["episode"]["l"][env])))
        if step == 6:
            state = envs.get_state()
    first = [3, 5, 8, 10]  # rounded up
    expected = [[(t, t), (t + 10, 10), (t + 20, 10)] for t in first]
    assert ends == [[end for end in of_env if end[0] <= 30] for of_env in expected]
    other = make(MULTIROOM, 4, 2 - workers // 3, max_steps=10, stagger=True)
    other.set_state(state)  # two envs are in their first episode, two in their second
    lengths = [other.step(np.full(4, NORTH))[3].tolist() for _ in range(4)]
    assert lengths == [
        [False] * 4,
        [False, False, True, False],
        [False] * 4,
        [False, False, False, True],
    ]
    plain = make(MULTIROOM, 4, workers, max_steps=10)
    plain.reset(seed=0)
    assert [plain.step(np.full(4, NORTH))[3].sum() for _ in range(10)] == [0] * 9 + [4]


def test_the_limit_is_the_level_s_own_unless_told():
    for env_id, limit in ((ROOM, 100), (MULTIROOM, 40), ("MiniHack-MultiRoom-N6-v0", 240)):
        envs = MiniHackVecEnv(env_id, 1, num_workers=0)
        assert envs.max_steps == limit and envs.single_action_space.n == 8
        envs.close()


def test_death_ends_an_episode_without_success(make):
    envs = make(LAVA, 3)
    _, info = envs.reset(seed=1)
    deaths, cells = 0, info["cell"]
    for step in play(envs, 40):
        info, died = step["info"], step["terminations"]
        if died.any():
            deaths += died.sum()
            assert not info["final_obs"]["blstats"][died].any()
            assert (info["final_info"]["cell"][died] == cells[died]).all()
            assert not info["final_info"]["episode"]["success"][died].any()
            assert not step["truncations"][died].any() and (step["rewards"][died] == 0).all()
        cells = info["cell"]
    assert deaths > 3


def test_statistics_of_episodes_against_sets_of_cells(make):
    envs = make(LAVA, 3, max_steps=12, penalty_step=-0.01)
    _, info = envs.reset(seed=3)
    seen = [{tuple(cell)} for cell in info["cell"]]
    lengths, totals, ended, least = np.zeros(3), np.zeros(3), 0, 0.0
    for step in play(envs, 60):
        info, dones = step["info"], step["terminations"] | step["truncations"]
        lengths += 1
        totals += step["rewards"]
        assert (step["obs"]["blstats"][:, 1::-1] == info["cell"]).all()
        for i in range(3):
            if not dones[i]:
                seen[i].add(tuple(info["cell"][i]))
                continue
            ended += 1
            seen[i].add(tuple(info["final_info"]["cell"][i]))
            episode = info["final_info"]["episode"]
            assert episode["l"][i] == lengths[i] and episode["r"][i] == pytest.approx(totals[i])
            assert episode["coverage"][i] == pytest.approx(len(seen[i]) / (21 * 79))
            least = min(least, totals[i])
            seen[i], lengths[i], totals[i] = {tuple(info["cell"][i])}, 0, 0
        if dones.any() and not dones.all():
            for key, final in info["final_obs"].items():
                assert (final[~dones] == step["obs"][key][~dones]).all()
            assert (info["_final_obs"] == dones).all() and (info["_final_info"] == dones).all()
    assert ended > 20 and least < 0


def test_no_time_passes_against_a_wall_which_may_cost_something(make):
    for penalty in (0.0, -0.01):
        envs = make(ROOM, 1, penalty_step=penalty)
        envs.reset(seed=1)
        assert envs.step(np.array([NORTH]))[1] == np.float32(penalty)  # the start is in a corner
        assert envs.step(np.array([SOUTH_EAST]))[1] == 0


# -- observations --------------------------------------------------------------------------------


def test_what_is_returned_is_never_changed_later(make):
    for workers in (0, 1):
        envs = make(MULTIROOM, 2, workers, max_steps=5, crop=3)
        kept = [flatten(dict(zip(("obs", "info"), envs.reset(seed=1), strict=True)))]
        kept += [flatten(step) for step in play(envs, 30)]
        copies = [{key: value.copy() for key, value in step.items()} for step in kept]
        for step in play(envs, 30, seed=1):
            kept.append(flatten(step))
            kept[-1]["/obs/glyphs"][:] = 0  # nor does a change of theirs change ours
        envs.set_state(envs.get_state())
        assert all(
            np.array_equal(now[key], then[key])
            for now, then in zip(kept, copies, strict=False)
            for key in then
        )
        assert envs.observe()["glyphs"].any()


def test_shapes_and_the_agent_on_the_map(make):
    envs = make(MULTIROOM, 2, crop=5)
    observation, info = envs.reset(seed=1)
    assert envs.observation_space.contains(observation)
    assert {key: (value.shape, str(value.dtype)) for key, value in observation.items()} == {
        "glyphs": ((2, 21, 79), "int16"),
        "blstats": ((2, 27), "int64"),
        "message": ((2, 256), "uint8"),
        "glyphs_crop": ((2, 5, 5), "int16"),
    }
    assert envs.reachable.shape == (21, 79) and info["cell"].dtype == np.int64
    agents = observation["glyphs"][[0, 1], info["cell"][:, 0], info["cell"][:, 1]]
    assert agents[0] == agents[1] and (observation["glyphs"] == agents[0]).sum() == 2


def test_the_crop_is_round_the_agent_and_zero_outside(make):
    envs = make(MULTIROOM, 2, crop=25, max_steps=10)
    envs.reset(seed=1)
    outside = 0
    for step in play(envs, 30):
        pairs = [(step["obs"], step["info"]["cell"])]
        if "final_obs" in step["info"]:
            pairs.append((step["info"]["final_obs"], step["info"]["final_info"]["cell"]))
        for observation, cells in pairs:
            for i, (row, column) in enumerate(cells):
                for down in range(-12, 13):
                    y = row + down
                    line = observation["glyphs_crop"][i, down + 12]
                    if not 0 <= y < 21:
                        outside += 1
                        assert not line.any()
                    else:
                        low, high = max(0, column - 12), min(79, column + 13)
                        inside = line[low - column + 12 : high - column + 12]
                        assert (inside == observation["glyphs"][i, y, low:high]).all()
                        assert line.any() and line.size - inside.size == (line == 0).sum()
    assert outside > 0


# -- state ---------------------------------------------------------------------------------------


def test_a_saved_state_goes_on_alike_with_other_workers(make):
    envs, other = make(MULTIROOM, 3, 0), make(MULTIROOM, 3, 2)
    envs.reset(seed=1)
    for _ in play(envs, 70):
        pass
    state = envs.get_state()
    assert state["lengths"].any() and state["episodes"].all()
    other.set_state(state)
    assert_same(envs.observe(), other.observe())
    for left, right in zip(play(envs, 60, seed=2), play(other, 60, seed=2), strict=True):
        assert_same(left, right)


# -- workers -------------------------------------------------------------------------------------


def test_a_killed_worker_is_named_within_seconds(make):
    envs = make(ROOM, 3, 2)
    envs.reset(seed=1)
    processes = [psutil.Process(worker.process.pid) for worker in envs._workers]
    folders = [worker.folder for worker in envs._workers]
    processes[1].kill()
    start = time.monotonic()
    pid = processes[1].pid
    with pytest.raises(RuntimeError, match=rf"worker 1 \(process {pid}, envs 1 to 2\) died .*9\)"):
        for _ in range(2):
            envs.step(np.zeros(3, int))
    assert time.monotonic() - start < 5
    assert not any(process.is_running() for process in processes)
    assert not any(Path(folder).exists() for folder in folders)
    with pytest.raises(RuntimeError, match="make the environments anew"):
        envs.step(np.zeros(3, int))


def test_a_stopped_worker_is_named(make, monkeypatch):
    envs = make(ROOM, 1, 1)
    envs.reset(seed=1)
    process = envs._workers[0].process
    process.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(minihack, "DEAD_AFTER", 1)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"worker 0 \(process \d+, env 0\) has not answered"):
        envs.step(np.zeros(1, int))
    assert process.poll() is not None and time.monotonic() - start < 4


def test_an_error_in_a_worker_comes_in_one_line(make):
    envs = make(ROOM, 1, 1)
    envs.reset(seed=1)
    process = envs._workers[0].process
    with pytest.raises(RuntimeError) as caught:
        envs._call("reset", [(1, np.zeros(1, np.int64), [np.array([99])])])
    line = str(caught.value)
    assert "worker 0" in line and "failed: IndexError" in line and "base.py:" in line
    assert "\n" not in line and process.poll() is not None


def test_an_unknown_level_is_named_by_the_worker():
    for workers in (0, 1):
        for env_id in ("MiniHack-Nowhere-v0", "CartPole-v1"):
            with pytest.raises(ValueError, match=f"no MiniHack level '{env_id}'"):
                MiniHackVecEnv(env_id, 1, workers)


@pytest.mark.parametrize(
    ("env_id", "reason"),
    [("Boxoban-Hard", "download maps"), ("SimpleCrossingS9N1", "AssertionError")],
)
def test_a_level_that_the_package_cannot_make_says_why(env_id, reason):
    with pytest.raises(ValueError, match=f"cannot make MiniHack-{env_id}-v0: .*{reason}"):
        MiniHackVecEnv(f"MiniHack-{env_id}-v0", 1, 0)


def test_a_step_that_was_interrupted_cannot_be_mended(make, monkeypatch):
    envs = make(ROOM, 1, 1)
    envs.reset(seed=1)

    def interrupt(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(minihack.Worker, "receive", interrupt)
        with pytest.raises(KeyboardInterrupt):
            envs.step(np.zeros(1, int))
    with pytest.raises(RuntimeError, match="interrupted in a step"):
        envs.step(np.zeros(1, int))


PARENT = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
sys.path.insert(0, {root!r})
import numpy as np
from common.minihack import MiniHackVecEnv
envs = MiniHackVecEnv("{room}", 2, 2)
envs.reset(seed=1)
try:
    print(*(word for w in envs._workers for word in (w.process.pid, w.folder)), flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    for _ in range(3):
        envs.step(np.zeros(2, int))
    print("the workers are alive", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_workers_end_with_their_parent_and_leave_nothing(number):
    """The signal goes to the whole process group, as that of Ctrl-C does."""
    code = PARENT.format(root=str(ROOT), room=ROOM)
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    words = parent.stdout.readline().split()
    pids, folders = [int(word) for word in words[::2]], words[1::2]
    workers = [psutil.Process(pid) for pid in pids]
    assert all(os.listdir(folder) for folder in folders)
    mapped = [area.path for worker in workers for area in worker.memory_maps()]
    assert any("memfd:sofe" in path for path in mapped)  # it has no name that could stay behind
    assert not any(path.startswith("/dev/shm") for path in mapped)
    os.killpg(parent.pid, number)
    out = parent.communicate(timeout=20)[0]
    assert ("alive" in out) == (number == signal.SIGINT)
    gone, alive = psutil.wait_procs(workers, timeout=10)
    assert len(gone) == 2 and not alive
    assert not any(Path(folder).exists() for folder in folders)


def test_closing_ends_the_workers_and_a_lost_object_too():
    for how in ("close", "lose"):
        envs = MiniHackVecEnv(ROOM, 1, 1)
        worker = envs._workers[0]
        if how == "close":
            envs.close()
            envs.close()
        else:
            del envs
            gc.collect()
        assert worker.process.poll() == 0 and not Path(worker.folder).exists()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_step_after_the_end_is_refused(make, workers):
    envs = make(ROOM, 1, workers)
    envs.reset(seed=1)
    envs.close()
    with pytest.raises(RuntimeError, match="closed"):
        envs.step(np.zeros(1, int))


def test_thousands_of_steps_and_hundreds_of_games_cost_no_memory(make):
    envs = make(ROOM, 1, 1, max_steps=2)
    envs.reset(seed=1)
    worker = psutil.Process(envs._workers[0].process.pid)

    def go_on(steps):
        for _ in play(envs, steps):
            pass
        return worker.memory_info().rss / 2**20, worker.num_fds()

    go_on(300)
    before, files = go_on(100)
    after, files_after = go_on(800)  # 400 games; without quitting 0.7 MiB are lost
    assert after - before < 0.35 and files_after == files
    folder = Path(envs._workers[0].folder)
    assert max(file.stat().st_size for file in folder.rglob("*logfile")) < 2000


# -- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_envs": 0}, "at least 1"),
        ({"max_steps": 0}, "at least 1"),
        ({"num_workers": -1}, "at least 0"),
        ({"crop": 4}, "odd"),
        ({"split": "test"}, "train or eval"),
        ({"num_levels": -1}, "num_levels"),
    ],
)
def test_bad_arguments_are_named(kwargs, message):
    with pytest.raises(ValueError, match=message):
        MiniHackVecEnv(ROOM, **kwargs)


@pytest.mark.parametrize("actions", [[8, 0], [-1, 0], [0]])
def test_bad_actions_are_refused(make, actions):
    envs = make(ROOM, 2)
    envs.reset(seed=1)
    with pytest.raises(ValueError, match=r"actions must be \(2,\) integers in 0..7"):
        envs.step(np.array(actions))


def test_a_step_before_the_first_reset_is_refused(make):
    with pytest.raises(RuntimeError, match="reset before step"):
        make(ROOM).step(np.zeros(1, int))


def test_without_the_packages_the_remedy_is_named(monkeypatch):
    monkeypatch.setattr(minihack.importlib.util, "find_spec", lambda name: None)
    for build in (MiniHackVecEnv, lambda: make_game(ROOM)):
        with pytest.raises(ModuleNotFoundError, match=r"pip install -r requirements\.txt"):
            build()
