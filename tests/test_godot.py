"""The Godot map on the real engine: what can be reached, gymnasium's contracts, failures."""

import gc
import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import psutil
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode
from matplotlib.figure import Figure

from common import godot
from common.godot import (
    EngineError,
    GodotEnv,
    GodotVecEnv,
    cells_of,
    draw_map,
    find_reachable,
    load_map,
)
from common.runs import to_tensors

ROOT = Path(__file__).parent.parent
MAP = load_map()
STAND = MAP["rules"]["height"] / 2  # height of an avatar's middle above what it stands on
pytestmark = pytest.mark.skipif(
    not any(shutil.which(name) for name in godot.ENGINES),
    reason="no Godot 3 engine here: apt-get install godot3-server",
)


@pytest.fixture(scope="module")
def shared():
    """Six avatars without a time limit, for tests that place them where they want."""
    envs = GodotVecEnv(6, max_steps=10**6)
    yield envs
    envs.close()


@pytest.fixture
def make():
    """Make vector environments that are closed after the test."""
    made = []

    def make_one(num_envs=2, **kwargs):
        made.append(GodotVecEnv(num_envs, **kwargs))
        return made[-1]

    yield make_one
    for envs in made:
        envs.close()


def place(envs, places, yaws=0.0):
    """Put all avatars at rest on the ground at (x, z) or (x, z, height of the ground)."""
    envs.reset(seed=0)
    state = envs.get_state()
    state["states"][:] = 0
    for row, spot in zip(state["states"], places, strict=True):
        x, z, height = (*spot, 0)[:3]
        row[:3] = x, height + STAND, z
    state["states"][:, 6], state["states"][:, 7] = yaws, 1
    envs.set_state(state)


def actions_for(envs, action):
    return np.tile(np.float32(action), (envs.num_envs, 1))


def is_gone(pid):
    """Whether a process has ended; one that nobody has asked for its status yet has, too."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


# -- the map -------------------------------------------------------------------------------------


def bins(*cells):
    wanted = np.zeros((24, 24), bool)
    for rows, columns in cells:
        wanted[rows, columns] = True
    return wanted


def test_what_the_flood_fill_reaches():
    """All bins but those inside thick walls; some by pads alone, some by water or not at all."""
    reachable = find_reachable(MAP)
    inside_walls = bins(
        (2, slice(0, 7)), (4, slice(1, 8)), (6, slice(0, 7)), (9, 1), (slice(10, 12), [10, 11]),
        (13, 5), (13, 14), (14, 9), (14, 20),
    )  # fmt: skip
    assert (reachable == ~inside_walls).all()
    for slack in (-0.1, 0.1):  # nothing hangs on a jump that is only just far or high enough
        assert (find_reachable(MAP, slack) == reachable).all()
    without_pads = find_reachable(MAP | {"pads": []})
    by_pads = bins(
        (slice(1, 3), slice(18, 21)), (slice(2, 5), [22, 23]), (12, 0), (slice(16, 24), [22, 23])
    )
    assert (reachable & ~without_pads == by_pads).all()
    dry = find_reachable(MAP | {"lava": MAP["lava"] + MAP["water"], "water": []})
    assert not dry[11:13, 20:22].any()  # the island


def test_the_flood_fill_on_maps_that_one_can_check_by_hand():
    empty = {"walls": [], "platforms": [], "lava": [], "water": [], "pads": []}
    wall, ledge = [-60, -20, 60, -19], [-60, -20, 60, -10]
    assert find_reachable(MAP | empty).all()
    assert find_reachable(MAP | empty | {"walls": [wall]}).sum() == 16 * 24
    for height, climbed in ((1.5, True), (1.7, True), (1.9, False), (3, False)):  # 1.28 + 0.5
        rows = find_reachable(MAP | empty | {"platforms": [[*ledge, height]]}).all(1)
        assert rows[10:].all() and rows[:10].all() == climbed
    for width, crossed in ((7, True), (12, False)):
        lava = [[-60, -20 - width, 60, -20]]
        assert find_reachable(MAP | empty | {"lava": lava}).all(1)[0] == crossed
    pads = [[-52, -16, -50, -14]]  # 16 m/s up: 5.1 m high and 15 m far
    assert find_reachable(MAP | empty | {"platforms": [[*ledge, 4]], "pads": []})[:9].sum() == 0
    pads = [[-52, -6, -50, -4]]
    assert find_reachable(MAP | empty | {"platforms": [[*ledge, 4]], "pads": pads}).all()
    assert not find_reachable(MAP | empty | {"platforms": [[*ledge, 6]], "pads": pads})[:9].any()
    deep = {"water": [[-60, -20, 60, 30]], "lava": [[-60, -25, 60, -20]]}
    assert find_reachable(MAP | empty | deep)[:6].sum() == 0  # a jump out of water is weak
    for gap, crossed in ((5.5, True), (6.5, False)):  # along and across: 7.8 and 9.2 m
        x, z = -50 + gap, 50 - gap  # between two places, all else is lava
        lava = [[-60, -60, x, 50], [-60, 50, -55, 60], [-55, 55, -50, 60], [-50, 50, x, 60]]
        reachable = find_reachable(MAP | empty | {"lava": [*lava, [x, z, 60, 60]]})
        assert reachable[0, 23] == crossed and reachable[22, 1]


# From the start to somewhere that walking alone does not lead: (x, z) to walk to, and whether to
# jump on the way, for four avatars side by side.
WALK, JUMP = False, True
TO_THE_SOUTH = [
    (-42, 43.5, WALK), (-37, 43.5, WALK), (-23, 50, WALK), (-12.8, 50, WALK), (-5.5, 50, JUMP),
    (-2.8, 50, WALK), (4.5, 50, JUMP), (15, 45, WALK),
]  # fmt: skip
TO_THE_LAKE = [
    *TO_THE_SOUTH, (15, 37, WALK), (15, 23, WALK), (-10, 23, WALK), (-10, 17, WALK),
    (5, 17.5, WALK), (17.5, 14, WALK), (17.5, 10, WALK), (22.5, 10, WALK),
]  # fmt: skip
ROUTES = {
    "the island in the lake": [*TO_THE_LAKE, (23, 0, WALK), (45, 0, WALK)],
    "behind the lava in the south-east": [
        *TO_THE_SOUTH, (23, 45, WALK), (33, 40, WALK), (54, 40, WALK)
    ],
    "from a high platform to the next": [
        *TO_THE_LAKE, (22.5, -17.5, WALK), (50, -17.5, WALK), (50, -23, WALK), (40, -38, WALK),
        (23, -42, WALK), (22.5, -50, WALK), (33, -50, WALK), (43.5, -48, WALK), (54, -48, JUMP),
    ],
    "the small platform in the west": [
        (-42, 43.5, WALK), (-25, 43.5, WALK), (-25, 36, WALK), (-42, 36, WALK), (-42, 22, WALK),
        (-50, 22, WALK), (-50, 14, WALK), (-50, 3, WALK), (-57.5, 3, WALK),
    ],
}  # fmt: skip
ENDS = [(12, 21, 0), (20, 22, 0), (2, 22, 4), (12, 0, 4)]  # row, column, height of the ground


def steer(state, target, jump):
    """Turn to a place and run there."""
    x, z = target[0] - state[0], target[1] - state[2]
    error = (np.arctan2(-x, -z) - state[6] + np.pi) % (2 * np.pi) - np.pi
    forward = min(1.0, np.hypot(x, z) / 1.6) if abs(error) < 0.4 else 0.0
    return [forward, np.clip(-error / 0.4, -1, 1), 1.0 if jump else -1.0]


def test_a_walker_gets_where_the_flood_fill_says(make):
    """No teleports: from the start by water, by pads by jumps over lava and between platforms."""
    envs = make(4)
    envs.reset(seed=3)
    routes, left = list(ROUTES.values()), [0] * 4
    for _ in range(600):
        actions = np.zeros((4, 3), np.float32)
        actions[:, 2] = -1
        for i, route in enumerate(routes):
            if left[i] < len(route):
                x, z, jump = route[left[i]]
                actions[i] = steer(envs.states[i], (x, z), jump)
        _, _, terminations, _, info = envs.step(actions)
        assert not terminations.any()
        for i, route in enumerate(routes):
            if left[i] < len(route):
                x, z, _ = route[left[i]]
                state = envs.states[i]
                left[i] += np.hypot(x - state[0], z - state[2]) < 0.8
        if left == [len(route) for route in routes] and envs.states[:, 7].all():
            break
    assert left == [len(route) for route in routes]
    assert info["cell"].tolist() == [list(end[:2]) for end in ENDS]
    heights = envs.states[:, 1] - STAND
    assert heights == pytest.approx([end[2] for end in ENDS], abs=0.1)


def test_no_one_gets_where_the_flood_fill_says_no_one_can(shared):
    """Avatars that run, jump and turn anywhere, put near whatever there is, stay in its bins."""
    random = np.random.default_rng(0)
    spots = [(28, -42), (47, -42), (-52, 8), (-12, -2), (22, 12), (40, 40), (-30, -22), (8, -3)]
    for start in range(8):
        place(shared, [spots[(start + i) % 8] for i in range(6)], random.uniform(-3, 3, 6))
        alive = np.ones(6, bool)
        for _ in range(12):
            actions = random.uniform(-1, 1, (6, 3))
            actions[:, 0] = 1
            for _ in range(3):
                _, terminations, _ = shared.advance(actions)
                rows, columns = shared.cells[alive].T
                assert shared.reachable[rows, columns].all()
                alive &= ~terminations


def test_only_the_pad_gets_onto_a_high_platform(shared):
    """A jump beside it, at full speed against its side, does not; nor over the wide lava."""
    against = np.pi / 2 + np.array([np.pi, np.pi, np.pi, 0, 0, np.pi])  # yaw: to +x or to -x
    spots = [(28.9, -53), (28.9, -48), (48.9, -40), (46, -47), (46, -53), (39, 30)]
    place(shared, spots, against)
    highest, died = np.zeros(6), np.zeros(6, bool)
    for _ in range(40):
        _, terminations, _ = shared.advance(actions_for(shared, [1, 0, 1]))
        died |= terminations
        highest = np.maximum(highest, shared.states[:, 1] - STAND)
        assert (shared.states[:5, 1] < STAND + 2).all()
    assert highest[:5] == pytest.approx(8**2 / 50, abs=0.15)  # v^2 / 2g
    assert died.tolist() == [False] * 5 + [True]
    place(shared, [(24.5, -50)] * 6, -np.pi / 2)
    highest[:] = 0
    for _ in range(8):
        shared.advance(actions_for(shared, [1, 0, -1]))
        highest = np.maximum(highest, shared.states[:, 1] - STAND)
    assert highest == pytest.approx(16**2 / 50, abs=0.3)
    assert shared.states[:, 1] == pytest.approx(4 + STAND, abs=0.1)


def test_water_slows(shared):
    place(shared, [(30, -10), (30, 8), (23, -10), (0, 15), (-30, 45), (-30, 45)])
    before = shared.states.copy()
    shared.advance(actions_for(shared, [0.5, 0, -1]))
    moved = np.hypot(*(shared.states - before)[:, [0, 2]].T)
    assert moved == pytest.approx(np.array([0.4, 0.4, 1, 1, 1, 1]) * 6 * 8 / 60, rel=0.01)
    for _ in range(2):
        shared.advance(actions_for(shared, [0, 0, -1]))
    shared.advance(actions_for(shared, [0, 0, 1]))
    assert (shared.states[:2, 1] < shared.states[2:, 1].min() - 0.5).all()


def test_the_actions_do_what_they_say(shared):
    """Forward is where the yaw looks, turning right is clockwise from above, jumps need ground."""
    place(shared, [(0, 15)] * 6, [0, np.pi / 2, 0, 0, 0, 0])
    turns = np.array([0, 0, 1, -1, 0, 0])
    actions = np.stack([[1, 1, 0, 0, -1, 0.25], turns, [-1, -1, -1, -1, -1, 0.01]], 1)
    shared.advance(actions)
    x, y, z = shared.states[:, :3].T
    assert x == pytest.approx([0, -1.6, 0, 0, 0, 0], abs=0.02)
    assert z == pytest.approx([15 - 1.6, 15, 15, 15, 15 + 1.6, 15 - 0.4], abs=0.02)
    assert shared.states[:, 6] == pytest.approx([0, np.pi / 2, -0.4, 0.4, 0, 0], abs=1e-4)
    assert (y[:5] < STAND + 0.05).all() and y[5] > STAND + 0.5
    assert shared.states[:, 7].tolist() == [1, 1, 1, 1, 1, 0]
    shared.advance(actions_for(shared, [0, 0, 1]))
    assert shared.states[5, 4] == pytest.approx(8 - 16 * 25 / 60, abs=0.5)  # no jump in the air


def test_what_an_avatar_sees(shared):
    """Rays: index 0 ahead, 4 to the right, 16 ahead and down; distance, solid, lava, water, pad."""
    place(
        shared,
        [(-52.5, 52.5), (23, 0), (36, 30), (22, -50), (0, 15), (35, -57)],
        [0, -np.pi / 2, -np.pi / 2, -np.pi / 2, 0, np.pi],
    )
    observations = shared.observe()
    assert observations.shape == (6, 129) and observations.dtype == np.float32
    rays = observations[:, :120].reshape(6, 24, 5)
    assert rays[0, 0] == pytest.approx([(52.5 - 40.5) / 30, 1, 0, 0, 0], abs=0.01)
    assert rays[0, 4] == pytest.approx([12 / 30, 1, 0, 0, 0], abs=0.01)  # a wall at x = -40.5
    assert rays[0, 12] == pytest.approx([7.5 / 30, 1, 0, 0, 0], abs=0.01)
    assert rays[1, 16, 1:].tolist() == [0, 0, 1, 0]
    assert rays[1, 20, 1:].tolist() == [1, 0, 0, 0]  # behind: the ground or the wall
    assert rays[1, 16, 0] == pytest.approx((STAND - 0.05) / 0.2 * np.hypot(1, 0.2) / 30, abs=0.01)
    assert rays[2, 0, 1:].tolist() == [1, 0, 0, 0]  # a level ray passes over the lava
    place(shared, [(38, 30), (23.2, -50), (-30, 45), (35, -50, 4), (0, 15), (0, 15)], -np.pi / 2)
    observations = shared.observe()
    rays = observations[:, :120].reshape(6, 24, 5)
    assert rays[0, 16, 1:].tolist() == [0, 1, 0, 0]
    assert rays[1, 16, 1:].tolist() == [0, 0, 0, 1] or rays[1, 16, 0] > 0.1
    assert observations[3, 120:] == pytest.approx(
        [0, 0, 0, -1, 0, 35 / 60, (4 + STAND) / 60, -50 / 60, 1], abs=1e-5
    )
    shared.advance(actions_for(shared, [1, 0, 1]))
    velocity = shared.observe()[4, 120:123]
    assert velocity == pytest.approx([1, (8 - 7 * 25 / 60) / 20, 0], abs=1e-4)


def test_a_random_policy_sees_little_of_the_map(make):
    envs = make(4)
    envs.reset(seed=0)
    random = np.random.default_rng(0)
    coverages = []
    while len(coverages) < 4:
        *_, terminations, truncations, info = envs.step(random.uniform(-1, 1, (4, 3)))
        dones = terminations | truncations
        if dones.any():
            coverages += info["final_info"]["episode"]["coverage"][dones].tolist()
    assert 0.005 < np.mean(coverages) < 0.1 and max(coverages) < 0.15


def test_the_picture_of_the_map(tmp_path):
    figure = Figure(figsize=(4.8, 4.8), dpi=50)
    axes = figure.add_axes((0, 0, 1, 1))  # 2 pixels a metre
    draw_map(axes, MAP)
    assert axes.get_xlim() == (-60, 60) and axes.get_ylim() == (60, -60)
    names = axes.get_legend_handles_labels()[1]
    assert names == sorted(set(names), key=names.index) and len(names) == 7
    figure.savefig(tmp_path / "map.png")
    from PIL import Image

    pixels = np.asarray(Image.open(tmp_path / "map.png").convert("RGB"))
    for (x, z), name in (
        ((45, 40), "lava"), ((30, 0), "water"), ((37, 40), "pads"), ((-20, 0), "wall"),
    ):  # fmt: skip
        color = tuple(int(godot.COLORS[name][i : i + 2], 16) for i in (1, 3, 5))
        assert tuple(pixels[2 * (z + 60), 2 * (x + 60)]) == color, name


# -- gymnasium's contracts -----------------------------------------------------------------------


def test_gymnasium_accepts_the_single_environment():
    env = gym.make("sofe/GodotMap-v0", max_steps=50)
    check_env(env.unwrapped)
    env.close()


def test_make_vec_gives_the_native_vector_env():
    envs = gym.make_vec(
        "sofe/GodotMap-v0", num_envs=3, vectorization_mode="vector_entry_point", max_steps=9
    )
    assert isinstance(envs.unwrapped, GodotVecEnv)
    observation, info = envs.reset(seed=1)
    assert observation.shape == (3, 129) and observation.dtype == np.float32
    assert info["cell"].shape == (3, 2) and info["cell"].dtype == np.int64
    assert envs.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP
    assert envs.single_action_space == gym.spaces.Box(-1, 1, (3,), np.float32)
    assert envs.unwrapped.map == MAP
    envs.close()


def test_ends_agree_with_a_single_environment_that_does_not_start_anew(make):
    """Final observation, cell and statistics, and the new start, for truncations and lava."""
    envs, single = make(1, max_steps=30), GodotEnv(max_steps=30)
    observation, info = envs.reset(seed=7)
    ours, our_info = single.reset(seed=7)
    assert (observation[0] == ours).all() and (info["cell"][0] == our_info["cell"]).all()
    random = np.random.default_rng(1)
    ends = []
    for step in range(150):
        if step == 70:  # to the lava, in the middle of an episode
            state = envs.get_state()
            state["states"][0] = [37, STAND, 30, 0, 0, 0, -np.pi / 2, 1]
            envs.set_state(state)
            single.vec.set_state(state)
        action = random.uniform(-1, 1, 3).astype(np.float32)
        if 70 <= step < 80:
            action = np.array([1, 0, -1], np.float32)
        observation, rewards, terminations, truncations, info = envs.step(action[None])
        ours, reward, terminated, truncated, our_info = single.step(action)
        assert rewards.tolist() == [reward] == [0.0] and rewards.dtype == np.float64
        assert (terminations.tolist(), truncations.tolist()) == ([terminated], [truncated])
        assert ("final_info" in info) == ("final_obs" in info) == (terminated or truncated)
        if terminated or truncated:
            ends.append(("lava" if terminated else "time", our_info["episode"]["l"]))
            assert (info["final_obs"][0] == ours).all() and not (observation[0] == ours).all()
            final = info["final_info"]
            assert (final["cell"][0] == our_info["cell"]).all()
            assert {key: final["episode"][key][0] for key in ("r", "l", "coverage")} == (
                our_info["episode"]
            )
            for mask in ("_final_obs", "_final_info"):
                assert info[mask].tolist() == [True]
            assert final["_cell"].tolist() == final["episode"]["_l"].tolist() == [True]
            ours, our_info = single.reset()
        assert (observation[0] == ours).all()
        assert (info["cell"][0] == our_info["cell"]).all() and info["_cell"].all()
    assert ends == [("time", 30), ("time", 30), ("lava", 13), ("time", 30), ("time", 30)]
    single.close()


def test_lava_ends_one_episode_once(make):
    """The others go on as they were, and the masks name the one that ended."""
    envs = make(3)
    envs.reset(seed=0)
    state = envs.get_state()
    state["states"][1] = [37, STAND, 30, 0, 0, 0, -np.pi / 2, 1]
    envs.set_state(state)
    ended = []
    for step in range(60):
        before = envs.get_state()["states"]
        action = actions_for(envs, [0, 0, -1])
        action[1, 0] = 1 if step < 20 and not ended else 0
        _, _, terminations, truncations, info = envs.step(action)
        assert not truncations.any()
        if terminations.any():
            ended.append(step)
            assert terminations.tolist() == info["_final_obs"].tolist() == [False, True, False]
            assert info["final_obs"][0] is None and info["final_obs"][2] is None
            assert info["final_info"]["cell"][1].tolist() == [18, 20]
            x = info["final_obs"][1][125] * 60
            assert 40.5 <= x < 40.5 + 0.2  # stopped in the tick that it got there
            assert (envs.states[[0, 2]] == before[[0, 2]]).all()
            assert info["cell"][1].tolist() == [22, 1]
            assert info["final_info"]["episode"]["l"][1] == step + 1
    assert len(ended) == 1 and envs.lengths.tolist() == [60, 59 - ended[0], 60]


def test_coverage_against_sets_of_positions(make):
    envs = make(4, max_steps=60)
    observation, info = envs.reset(seed=2)
    assert info["cell"].tolist() == [[22, 1]] * 4
    seen, length, ended = [{(22, 1)} for _ in range(4)], [0] * 4, 0
    random = np.random.default_rng(3)
    for step in range(200):
        actions = random.uniform(-1, 1, (4, 3))
        actions[:, 0] = 1
        observation, _, terminations, truncations, info = envs.step(actions)
        dones = terminations | truncations
        for i in range(4):
            last = info["final_obs"][i] if dones[i] else observation[i]
            cell = tuple(int((last[125 + axis] * 60 + 60) // 5) for axis in (2, 0))
            assert tuple((info["final_info"]["cell"] if dones[i] else info["cell"])[i]) == cell
            seen[i].add(cell)
            length[i] += 1
            if dones[i]:
                ended += 1
                episode = info["final_info"]["episode"]
                assert episode["coverage"][i] == len(seen[i]) / envs.reachable.sum()
                assert episode["l"][i] == length[i] and episode["r"][i] == 0
                assert truncations[i] == (length[i] == 60)
                seen[i], length[i] = {(22, 1)}, 0
        if step == 30:  # a reset in mid-episode starts afresh
            envs.reset()
            seen, length = [{(22, 1)} for _ in range(4)], [0] * 4
    assert ended >= 4 * ((200 - 31) // 60)


def test_what_is_returned_is_never_changed_later(make):
    envs = make(2, max_steps=3)
    kept = [(array, array.copy()) for array in envs.reset(seed=0)[:1]]
    random = np.random.default_rng(0)
    for _ in range(10):
        observation, rewards, terminations, _, info = envs.step(random.uniform(-1, 1, (2, 3)))
        arrays = [observation, rewards, terminations, info["cell"]]
        arrays += [final for final in info.get("final_obs", ()) if final is not None]
        arrays += list(envs.get_state().values())
        kept += [(array, array.copy()) for array in arrays]
    assert all((now == then).all() for now, then in kept)


def test_rows_count_z_and_columns_count_x():
    places = np.array([[-60, 1, -60], [59.9, 1, -59], [-59, 1, 59.9], [2, 1, -0.1], [60, 1, 60]])
    assert cells_of(places, MAP).tolist() == [[0, 0], [0, 23], [23, 0], [11, 12], [23, 23]]


@pytest.mark.parametrize("kwargs", [{"num_envs": 0}, {"max_steps": 0}, {"action_repeat": 0}])
def test_bad_arguments_are_named(kwargs):
    with pytest.raises(ValueError, match="at least 1"):
        GodotVecEnv(**kwargs)


@pytest.mark.parametrize("actions", [np.zeros(3), np.zeros((2, 3)), np.full((6, 3), np.nan)])
def test_bad_actions_are_refused(shared, actions):
    with pytest.raises(ValueError, match="actions must be"):
        shared.step(actions)


def test_actions_beyond_1_are_clipped(shared):
    place(shared, [(0, 15)] * 6)
    actions = actions_for(shared, [1, 1, -1])
    actions[:3] *= 5
    shared.advance(actions)
    assert (shared.states == shared.states[0]).all()


# -- the same again ------------------------------------------------------------------------------

TRAJECTORY = """
import hashlib
import numpy as np
from common.godot import GodotVecEnv

def trajectory(envs, steps, digest):
    '''Mostly forward, in curves: into walls and corners, over platforms, into the water.'''
    random = np.random.default_rng(0)
    drawn = random.uniform(-1, 1, (1000, envs.num_envs, 3))
    drawn[..., 0] = 1 - drawn[..., 0] ** 2 / 2
    drawn[..., 1] = drawn[::10, :, 1].repeat(10, 0)
    for actions in drawn[steps]:
        observation, _, terminations, truncations, info = envs.step(actions)
        for array in (observation, terminations, truncations, info["cell"], envs.states):
            digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
"""


def test_the_same_seed_gives_the_same_trajectory_in_another_process(make):
    script = TRAJECTORY + (
        "envs = GodotVecEnv(4, max_steps=200)\n"
        "envs.reset(seed=11)\n"
        "print(trajectory(envs, slice(0, 520), hashlib.sha256()))\n"
    )
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    scope = {}
    exec(TRAJECTORY, scope)
    envs = make(4, max_steps=200)
    envs.reset(seed=5)  # what came before does not matter
    scope["trajectory"](envs, slice(0, 50), hashlib.sha256())
    envs.reset(seed=11)
    ours = scope["trajectory"](envs, slice(0, 520), hashlib.sha256())
    assert ours == result.stdout.strip()
    headings = []
    for seed in (11, 12, 11, None):
        envs.reset(seed=seed)
        headings.append(envs.states[:, 6].tolist())
    assert headings[0] == headings[2] and len({tuple(h) for h in headings}) == 3
    assert len(set(headings[0])) == 4


def test_a_saved_state_goes_on_alike(make):
    """In a fresh engine, by way of tensors as in a checkpoint, some avatars in the air."""
    scope = {}
    exec(TRAJECTORY, scope)
    envs, other = make(4, max_steps=150), make(4, max_steps=150)
    envs.reset(seed=3)
    scope["trajectory"](envs, slice(0, 260), hashlib.sha256())
    state = envs.get_state()
    assert 0 < state["states"][:, 7].sum() < 4 and state["lengths"].min() > 0
    other.reset(seed=99)
    other.set_state(to_tensors(state))
    assert (other.observe() == envs.observe()).all()
    digests = [
        scope["trajectory"](each, slice(260, 560), hashlib.sha256()) for each in (envs, other)
    ]
    assert digests[0] == digests[1]
    for name, value in envs.get_state().items():
        assert (value == other.get_state()[name]).all(), name


# -- failures ------------------------------------------------------------------------------------


def test_an_engine_that_is_killed(make):
    envs = make()
    envs.reset(seed=0)
    os.kill(envs.engine.process.pid, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(EngineError, match=r"the engine has gone .killed by SIGKILL"):
        envs.step(np.zeros((2, 3)))
    assert time.monotonic() - start < 3
    with pytest.raises(EngineError, match="closed"):
        envs.step(np.zeros((2, 3)))


def test_the_engine_goes_with_environments_that_nobody_holds():
    """As after an error in a script that was imported, whose `main` closes nothing."""
    envs = GodotVecEnv(1)
    process = envs.engine.process
    assert process.poll() is None
    del envs
    gc.collect()
    assert process.poll() is not None


def test_an_engine_that_is_stopped(make):
    envs = make(timeout=1.0)
    envs.reset(seed=0)
    pid = envs.engine.process.pid
    os.kill(pid, signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(EngineError, match="no answer for 1 s"):
        envs.step(np.zeros((2, 3)))
    assert 0.9 < time.monotonic() - start < 3 and is_gone(pid)


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A copy of godot/ to change, in a folder with spaces in its name, and used from there."""
    folder = tmp_path / "a folder" / "with spaces"
    shutil.copytree(godot.PROJECT, folder)
    monkeypatch.setattr(godot, "PROJECT", folder)
    return folder


def test_a_path_with_spaces(project, make):
    assert make().reset(seed=0)[0].shape == (2, 129)


def children():
    return {child.pid for child in psutil.Process().children(recursive=True)}


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("link.gd", "extends Node", "extends Nodes", "not connect within 1.5 s.*Parse Error"),
        ("map.json", '"size": 120', '"size" 120', "before it connected .exit status 1.*map.json"),
        ("link.gd", "const VERSION = 1", "const VERSION = 9", "speaks version 9, not 1"),
        ("link.gd", 'connect_to_host("127.0.0.1", port)', 'connect_to_host("127.0.0.1", 1)',
         "exit status 3.*cannot connect to port"),
    ],
)  # fmt: skip
def test_an_engine_that_never_gets_ready(project, file, old, new, message):
    """A script that does not parse leaves the engine running; nothing listens on port 1."""
    text = (project / file).read_text()
    assert old in text
    (project / file).write_text(text.replace(old, new))
    before, start = children(), time.monotonic()
    with pytest.raises(EngineError, match=message) as error:
        GodotVecEnv(2, timeout=1.5 if "Parse" in message else 20)
    assert time.monotonic() - start < 15 and children() == before
    assert "\n" not in str(error.value)
    assert "speaks" in message or "ERROR" in error.value.log or "link.gd" in error.value.log


def test_without_an_engine_there_is_one_line(monkeypatch, tmp_path):
    with pytest.raises(EngineError, match=r"no/such: no such program; .*apt-get install"):
        GodotVecEnv(2, engine_path="no/such")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EngineError, match=r"apt-get install godot3-server.*--engine-path") as error:
        GodotVecEnv(2)
    assert "\n" not in str(error.value)


def test_something_else_in_place_of_the_engine():
    with pytest.raises(EngineError, match=r"ended before it connected .exit status 0"):
        GodotVecEnv(2, engine_path="true")


def test_the_engine_is_found_by_its_path(make):
    path = next(filter(None, map(shutil.which, godot.ENGINES)))
    envs = make(engine_path=path)
    assert psutil.Process(envs.engine.process.pid).cmdline()[0] == path


SCRIPT = """
import signal, sys, threading, time
import numpy as np
from common.godot import GodotVecEnv
made = []
def make(): made.append(GodotVecEnv(2))
if "thread" in sys.argv:
    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
else:
    make()
envs = made[0]
envs.reset(seed=0)
time.sleep(0.3)
envs.step(np.zeros((2, 3)))
print(envs.engine.process.pid, flush=True)
if "ctrl-c" in sys.argv:
    signal.signal(signal.SIGINT, lambda *_: None)
    print("ready", flush=True)
    signal.pause()
    envs.step(np.zeros((2, 3)))
    print("still here", flush=True)
if "leave" in sys.argv: sys.exit()
if "error" in sys.argv: raise RuntimeError
time.sleep(60)
"""


def run_script(*words):
    python = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    return python, int(python.stdout.readline())


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
def test_the_engine_goes_with_a_python_that_is_killed(stopped):
    """Also one that was made in a thread which has ended since, and one that cannot see it."""
    python, pid = run_script("thread")
    assert not is_gone(pid)
    if stopped:
        if sys.platform != "linux":
            pytest.skip("only Linux ends a stopped process with its parent")
        os.kill(pid, signal.SIGSTOP)
    python.kill()
    python.communicate()
    assert wait_until(lambda: is_gone(pid), 3)


@pytest.mark.parametrize("way", ["leave", "error", "SIGTERM"])
def test_the_engine_goes_with_python_by_any_way(way):
    python, pid = run_script(way)
    if way.startswith("SIG"):
        python.send_signal(getattr(signal, way))
    python.communicate(timeout=10)
    assert wait_until(lambda: is_gone(pid), 3)


def test_ctrl_c_is_for_python_alone():
    """A terminal sends it to all processes of the group; a run still has to save its state."""
    python, pid = run_script("ctrl-c", "leave")
    assert python.stdout.readline() == "ready\n"
    time.sleep(0.1)
    os.killpg(python.pid, signal.SIGINT)
    assert python.communicate(timeout=10)[0] == "still here\n"
    assert wait_until(lambda: is_gone(pid), 3)


def test_twenty_starts_and_stops_leave_nothing_behind():
    us = psutil.Process()

    def held():
        return us.num_fds(), threading.active_count(), children(), len(us.net_connections())

    GodotVecEnv(1).close()
    before, pids = held(), []
    for count in range(20):
        envs = GodotVecEnv(1)
        pids.append(envs.engine.process.pid)
        if count % 4 == 0:
            envs.reset(seed=0)
        if count % 2:
            envs.close()
            envs.close()
        else:
            del envs  # nobody closed it
    assert held() == before and all(is_gone(pid) for pid in pids)


def test_the_port_is_open_to_this_machine_alone_and_closed_once_connected(make, monkeypatch):
    addresses, create_server = [], socket.create_server

    def recorder(*args, **kwargs):
        server = create_server(*args, **kwargs)
        addresses.append(server.getsockname())
        return server

    monkeypatch.setattr(socket, "create_server", recorder)
    make()
    [(host, port)] = addresses
    assert host == "127.0.0.1"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, port), timeout=1)
