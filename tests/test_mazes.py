"""The mazes: layouts, both engines, gymnasium's contracts, reference lines, bad input."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from common import mazes
from common.mazes import (
    LEVELS,
    MAZE_3_DOORS,
    MazeEnv,
    MazeVecEnv,
    parse_level,
    path_to,
    shortest_paths,
)

ENGINES = [
    pytest.param(
        "griddly",
        marks=pytest.mark.skipif(not mazes.griddly_installed(), reason="Griddly has no wheel here"),
    ),
    "numpy",
]
SETTINGS = [
    {"maze": "Maze1-v0"},
    {"maze": "Maze1-v0", "view": 5},
    {"maze": "Maze2-v0"},
    {"maze": "Maze2-v0", "goal": True},
    {"maze": "Maze2-v0", "goal": True, "view": 5},
    {"maze": "Maze3-v0"},
    {"maze": "Maze3-v0", "view": 5},
]
SMALL = "WWWWW\nWA..W\nW.W.W\nW..GW\nWWWWW"


@pytest.mark.parametrize("engine", ENGINES)
def test_the_example_of_the_paper(engine):
    level = "WWWWW\nWA..W\nW...W\nW..GW\nWWWWW"
    observation, info = MazeEnv(level=level, goal=True, engine=engine).reset()
    avatar, wall, goal = np.zeros((3, 5, 5), int)
    avatar[1, 1] = 1
    wall[[0, 4]] = wall[:, [0, 4]] = 1
    goal[3, 3] = 1
    assert observation.shape == (3, 5, 5)
    assert (observation == np.stack([avatar, wall, goal])).all()
    assert info["cell"].tolist() == [1, 1]


@pytest.mark.parametrize("maze", LEVELS)
def test_every_floor_cell_can_be_reached(maze):
    envs = MazeVecEnv(maze=maze, engine="numpy")
    assert envs.level.shape == (32, 32)
    assert (envs.reachable == (envs.level != "W")).all()


def test_the_goal_of_maze_2_is_75_moves_away():
    level = parse_level(LEVELS["Maze2-v0"])
    start, goal = (tuple(np.argwhere(level == symbol)[0]) for symbol in "AG")
    assert shortest_paths(level == "W", start)[0][goal] == 75


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("others_open", [True, False])
def test_each_door_of_maze_3_is_a_short_cut_of_100_moves_or_more(number, others_open):
    level = parse_level(LEVELS["Maze3-v0"])
    walls = level == "W"
    doors = [tuple(cell) for cell in np.argwhere(level == "D")]
    assert len(doors) == 3
    if not others_open:
        for other in doors:
            walls[other] = True
    row, column = door = doors[number]
    vertical = not walls[row - 1, column] and not walls[row + 1, column]
    sides = (
        [(row - 1, column), (row + 1, column)]
        if vertical
        else [(row, column - 1), (row, column + 1)]
    )
    walls[door] = True
    assert shortest_paths(walls, sides[0])[0][sides[1]] - 2 >= 100


def test_maze_3_is_maze_1_with_three_doors():
    first, third = parse_level(LEVELS["Maze1-v0"]), parse_level(LEVELS["Maze3-v0"])
    changed = np.argwhere(first != third)
    assert len(changed) == 3
    assert [tuple(cell) for cell in changed] == sorted(MAZE_3_DOORS)
    assert (third[tuple(changed.T)] == "D").all() and (first[tuple(changed.T)] == "W").all()


@pytest.mark.skipif(not mazes.griddly_installed(), reason="Griddly has no wheel here")
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_griddly_and_numpy_agree_over_20000_steps(setting):
    """Half of the envs walk at random, the others along shortest paths, some to the goal."""
    both = [
        MazeVecEnv(20, **setting, max_steps=300, engine=engine) for engine in ("griddly", "numpy")
    ]
    griddly, twin = both
    observations = [envs.reset()[0] for envs in both]
    assert (observations[0] == observations[1]).all()
    random, floor = np.random.default_rng(0), np.argwhere(twin.reachable)
    goals = np.argwhere(twin.level == "G")
    paths = [[] for _ in range(20)]
    ends = {"terminated": 0, "truncated": 0}
    for step in range(1000):
        actions = random.integers(4, size=20)
        for i in range(10, 20):
            if not paths[i]:
                target = (
                    goals[0]
                    if len(goals) and random.random() < 0.5
                    else floor[random.integers(len(floor))]
                )
                _, arrivals = shortest_paths(twin.walls, tuple(twin.engine.cells[i]))
                paths[i] = path_to(arrivals, tuple(target)) or [0]
            actions[i] = paths[i].pop(0)
        first, second = (envs.step(actions) for envs in both)
        for left, right in zip(first[:4], second[:4], strict=True):
            assert left.dtype == right.dtype and (left == right).all()
        assert_same_info(first[4], second[4])
        ends["terminated"] += first[2].sum()
        ends["truncated"] += first[3].sum()
        for i in np.flatnonzero(first[2] | first[3]):
            paths[i] = []
        if step % 50 == 0:  # what our engine shows is all that Griddly shows
            players, order = griddly.engine.players, griddly.engine.order
            raw = [np.asarray(player.observe())[order].transpose(0, 2, 1) for player in players]
            assert (np.stack(raw) == first[0]).all()
    assert ends["truncated"] > 0
    assert (ends["terminated"] > 0) == bool(setting.get("goal"))
    for envs in both:
        envs.close()


def assert_same_info(left, right):
    assert left.keys() == right.keys()
    for key, value in left.items():
        if isinstance(value, dict):
            assert_same_info(value, right[key])
            continue
        assert value.dtype == right[key].dtype and value.shape == right[key].shape, key
        for a, b in zip(value, right[key], strict=True):
            assert (a is None and b is None) or np.array_equal(a, b), key


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_gymnasium_accepts_the_single_environment(engine, setting):
    setting = setting | {"engine": engine, "max_steps": 50}
    maze = setting.pop("maze")
    check_env(gym.make(f"sofe/{maze}", render_mode="rgb_array", **setting).unwrapped)


@pytest.mark.parametrize("engine", ENGINES)
def test_same_as_a_sync_vector_env_of_single_mazes(engine):
    """Autoreset, final_obs, final_info and their masks are those of gymnasium's own vector env."""
    kwargs = {"level": SMALL, "goal": True, "engine": engine, "max_steps": 5}
    ours = MazeVecEnv(3, **kwargs)
    theirs = SyncVectorEnv([lambda: MazeEnv(**kwargs)] * 3, autoreset_mode=AutoresetMode.SAME_STEP)
    a, b = ours.reset()[0], theirs.reset()[0]
    assert (a == b).all()
    random, ended = np.random.default_rng(1), 0
    for _ in range(200):
        first, second = ours.step(actions := random.integers(4, size=3)), theirs.step(actions)
        for left, right in zip(first[:4], second[:4], strict=True):
            assert (left == right).all()
        assert (first[4]["cell"] == second[4]["cell"]).all()
        dones = first[2] | first[3]
        assert ("final_info" in first[4]) == ("final_info" in second[4]) == dones.any()
        for i in np.flatnonzero(dones):
            ended += 1
            assert (first[4]["final_obs"][i] == second[4]["final_obs"][i]).all()
            final = [info[4]["final_info"] for info in (first, second)]
            assert (final[0]["cell"][i] == final[1]["cell"][i]).all()
            for key in ("r", "l", "coverage"):
                assert final[0]["episode"][key][i] == final[1]["episode"][key][i]
    assert ended > 50


def test_make_vec_gives_the_native_vector_env():
    envs = gym.make_vec(
        "sofe/Maze1-v0",
        num_envs=3,
        vectorization_mode="vector_entry_point",
        engine="numpy",
        max_steps=9,
    )
    assert isinstance(envs.unwrapped, MazeVecEnv)
    assert envs.reset()[0].shape == (3, 2, 32, 32)
    assert envs.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP


@pytest.mark.parametrize("engine", ENGINES)
def test_moving_right_raises_the_column(engine):
    """Axes are [row][column] in the observation and in the cell alike."""
    envs = MazeVecEnv(1, "Maze2-v0", engine=engine)
    envs.reset()
    observation, _, _, _, info = envs.step(np.array([1]))
    assert info["cell"].tolist() == [[1, 2]]
    assert np.argwhere(observation[0, 0]).tolist() == [[1, 2]]
    observation, _, _, _, info = envs.step(np.array([0]))  # up, into the wall
    assert info["cell"].tolist() == [[1, 2]]


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_returned_is_never_changed_later(engine):
    envs = MazeVecEnv(2, level=SMALL, goal=True, engine=engine, max_steps=3)
    kept = [(envs.reset()[0], None)]
    kept[0] = (kept[0][0], kept[0][0].copy())
    random = np.random.default_rng(0)
    for _ in range(20):
        observation, _, _, _, info = envs.step(random.integers(4, size=2))
        kept += [(observation, observation.copy()), (info["cell"], info["cell"].copy())]
        for final in info.get("final_obs", ()):
            if final is not None:
                kept.append((final, final.copy()))
    assert all((now == then).all() for now, then in kept)


@pytest.mark.parametrize("engine", ENGINES)
def test_episode_statistics_against_sets_of_positions(engine):
    envs = MazeVecEnv(4, level=SMALL, goal=True, engine=engine, max_steps=7)
    _, info = envs.reset()
    seen = [{tuple(cell)} for cell in info["cell"]]
    length, total, ended = [0] * 4, [0.0] * 4, 0
    random = np.random.default_rng(3)
    for _ in range(300):
        _, rewards, terminations, truncations, info = envs.step(random.integers(4, size=4))
        dones = terminations | truncations
        for i in range(4):
            cell = info["final_info"]["cell"][i] if dones[i] else info["cell"][i]
            seen[i].add(tuple(cell))
            length[i] += 1
            total[i] += rewards[i]
            if dones[i]:
                ended += 1
                episode = info["final_info"]["episode"]
                assert episode["coverage"][i] == len(seen[i]) / 8
                assert episode["l"][i] == length[i] and episode["r"][i] == total[i]
                assert terminations[i] == (total[i] == 1.0) and truncations[i] == (total[i] == 0.0)
                assert info["cell"][i].tolist() == [1, 1]
                seen[i], length[i], total[i] = {(1, 1)}, 0, 0.0
    assert ended > 100


@pytest.mark.parametrize("engine", ENGINES)
def test_a_saved_state_goes_on_alike(engine):
    envs, other = (MazeVecEnv(3, "Maze3-v0", engine=engine, max_steps=60) for _ in range(2))
    envs.reset()
    random = np.random.default_rng(0)
    for _ in range(100):
        envs.step(random.integers(4, size=3))
    other.reset()
    other.set_state(envs.get_state())
    assert (other.observe() == envs.observe()).all()
    for _ in range(100):
        actions = random.integers(4, size=3)
        first, second = envs.step(actions), other.step(actions)
        for left, right in zip(first[:4], second[:4], strict=True):
            assert (left == right).all()
        assert_same_info(first[4], second[4])


def test_a_reset_in_mid_episode_starts_afresh():
    envs = MazeVecEnv(2, "Maze2-v0", engine="numpy", max_steps=10)
    envs.reset()
    for _ in range(15):
        envs.step(np.array([1, 1]))
    envs.reset()
    for step in range(10):
        _, _, _, truncations, info = envs.step(np.array([1, 1]))
        assert truncations.all() or info["cell"][0, 1] == min(2 + step, 9)
        assert truncations.all() == (step == 9)


def test_reference_lines():
    """Maze 1 is a hard-exploration maze: a random walk sees little, full knowledge all of it."""
    random_walk, explorer = (
        mazes.random_walk_coverage("Maze1-v0"),
        mazes.full_knowledge_coverage("Maze1-v0"),
    )
    assert random_walk[-1] == pytest.approx(0.06, abs=0.01)
    assert explorer[-1] == 1
    for curve in (random_walk, explorer):
        assert curve.shape == (1000,) and (np.diff(curve) >= 0).all() and curve[0] > 0


def test_render_shows_every_object_where_it_is():
    image = MazeVecEnv(2, level=SMALL, goal=True, engine="numpy").render()[1]
    assert image.shape == (40, 40, 3)
    assert tuple(image[12, 12]) == mazes.COLORS["avatar"]
    assert tuple(image[28, 28]) == mazes.COLORS["goal"]
    assert tuple(image[0, 0]) == mazes.COLORS["wall"]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"maze": "Maze9-v0"}, "unknown maze"),
        ({"view": 4}, "odd"),
        ({"maze": "Maze1-v0", "goal": True}, "has none"),
        ({"num_envs": 0}, "at least 1"),
        ({"max_steps": 0}, "at least 1"),
        ({"level": "WWW\nW.W\nWWW"}, "exactly one start"),
        ({"level": "WWWW\nWAAW\nWWWW"}, "exactly one start"),
        ({"level": "WWW\nWA.\nWWW"}, "closed border"),
        ({"level": "WWW\nWA\nWWW"}, "equal length"),
        ({"level": "WWWW\nWAxW\nWWWW"}, "characters"),
    ],
)
def test_bad_arguments_are_named(kwargs, message):
    with pytest.raises(ValueError, match=message):
        MazeVecEnv(engine="numpy", **kwargs)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("actions", [[4, 0], [-1, 0], [0]])
def test_bad_actions_are_refused(engine, actions):
    envs = MazeVecEnv(2, engine=engine)
    envs.reset()
    with pytest.raises(ValueError, match="actions must be"):
        envs.step(np.array(actions))


def test_without_griddly_auto_takes_numpy_and_griddly_says_what_to_do(monkeypatch, capsys):
    monkeypatch.setattr(mazes.importlib.util, "find_spec", lambda name: None)
    mazes.say_fallback.cache_clear()
    assert MazeVecEnv().engine_name == "numpy"
    assert MazeVecEnv().engine_name == "numpy"
    assert capsys.readouterr().out.count("numpy engine") == 1
    with pytest.raises(ModuleNotFoundError, match="pip install griddly"):
        MazeVecEnv(engine="griddly")
