"""Procgen, with the real games: seeds, levels, ends of episodes, state."""

import numpy as np
import pytest

from common import procgen
from common.procgen import LEVELS, ProcgenVecEnv

pytestmark = pytest.mark.skipif(not procgen.procgen_installed(), reason="Procgen has no wheel here")

N = 8


@pytest.fixture
def make():
    made = []

    def make(num_envs=N, **kwargs):
        made.append(ProcgenVecEnv("maze", num_envs, **kwargs))
        return made[-1]

    yield make
    for envs in made:
        envs.close()


def play(envs, steps, seed=0):
    """What comes of random actions: obs, rewards, terminations, truncations, info of each step."""
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        yield envs.step(rng.integers(15, size=envs.num_envs))


def image(observation):
    return observation["image"]


def same(left, right):
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    return left.dtype == right.dtype and np.array_equal(left, right, equal_nan=left.dtype == float)


def test_a_seed_fixes_everything_whatever_the_threads(make):
    one, two, other = make(), make(num_threads=1), make()
    for envs, seed in ((one, 3), (two, 3), (other, 4)):
        envs.reset(seed=99)  # what was before does not count
        envs.step(np.ones(N, int))
        envs.reset(seed=seed)
    assert not same(one.observe(), other.observe())
    ended = 0
    for left, right in zip(play(one, 520), play(two, 520), strict=True):
        ended += (left[2] | left[3]).sum()
        assert all(same(a, b) for a, b in zip(left, right, strict=True))
    assert ended >= N


def test_a_reset_without_a_seed_goes_on_at_random_but_fixed(make):
    envs = make()
    envs.reset(seed=1)
    second = envs.reset()[0]
    envs.reset(seed=1)
    assert same(envs.reset()[0], second) and not same(envs.reset()[0], second)


def test_a_seed_of_more_than_31_bits(make):
    envs = make(1)
    assert same(envs.reset(seed=2**31 + 5)[0], make(1).reset(seed=5)[0])


def levels(envs, steps=1010):
    seen = []
    envs.reset(seed=1)
    for _, _, terminations, truncations, info in play(envs, steps):
        if "final_info" in info:
            seen += info["final_info"]["episode"]["level"][terminations | truncations].tolist()
    return seen


def test_levels_of_training_and_evaluation_are_apart(make):
    train, held_out = levels(make(16)), levels(make(16, split="eval"))
    assert len(set(train)) == len(train) > 20 and len(set(held_out)) == len(held_out) > 20
    assert min(train) >= 0 and max(held_out) < 2 * LEVELS < 2**31
    assert max(train) < LEVELS <= min(held_out)
    assert max(train) > LEVELS / 2 and min(held_out) < 1.5 * LEVELS


def test_few_levels_can_be_chosen(make):
    assert set(levels(make(8, num_levels=3, start_level=5))) == {5, 6, 7}
    assert set(levels(make(2, num_levels=1, split="eval"), 510)) == {LEVELS}
    assert make(start_level=7).settings["num_levels"] == LEVELS - 7


def test_a_goal_is_a_success_and_the_limit_a_truncation(make):
    envs = make(16)
    before, info = envs.reset(seed=2)
    lengths, totals = np.zeros(16), np.zeros(16)
    goals = limits = 0
    assert (info["cell"] == -1).all() and not envs.has_final_obs
    for observation, rewards, terminations, truncations, info in play(envs, 1100):
        dones = terminations | truncations
        assert rewards.dtype == np.float32 and not (terminations & truncations).any()
        lengths += 1
        totals += rewards
        assert ("final_info" in info) == dones.any()
        if dones.any():
            episode = info["final_info"]["episode"]
            assert (episode["l"][dones] == lengths[dones]).all()
            assert (episode["r"][dones] == totals[dones]).all()
            assert (truncations == (dones & (lengths == 500) & (totals == 0))).all()
            assert (terminations == (dones & (totals == 10))).all()
            assert (episode["success"] == terminations).all()
            assert np.isnan(episode["coverage"]).all()
            for masks in (info, info["final_info"], episode):
                assert all(
                    (mask == dones).all()
                    for key, mask in masks.items()
                    if key.startswith("_") and key != "_cell"
                )
            # the last that was shown, where a new episode has begun
            final, shown, last = image(info["final_obs"]), image(observation), image(before)
            assert (final[dones] == last[dones]).all()
            assert (final[~dones] == shown[~dones]).all()
            assert (shown[dones] != last[dones]).any((1, 2, 3)).all()
            goals, limits = goals + terminations.sum(), limits + truncations.sum()
        assert (lengths <= 500).all()
        lengths[dones] = totals[dones] = 0
        before = observation
    assert goals > 3 and limits > 15


@pytest.mark.parametrize("max_steps", [1, 10_000])
def test_the_goal_comes_before_the_limit_and_an_end_before_it_is_none(make, max_steps):
    """As if each episode had reached its time limit, goal or not, and as if none had."""
    envs = make(16)
    envs.reset(seed=2)
    envs.max_steps = max_steps
    goals = others = 0
    for _, rewards, terminations, truncations, _ in play(envs, 510):
        dones = terminations | truncations
        assert (truncations == (dones & (rewards == 0) & (max_steps == 1))).all()
        goals, others = goals + (rewards == 10).sum(), others + (dones & (rewards == 0)).sum()
    assert goals > 0 and others > 0


def test_shapes_copies_and_axes(make):
    envs = make(2)
    observation, _ = envs.reset(seed=1)
    assert envs.observation_space.contains(observation) and image(observation).flags.c_contiguous
    assert envs.single_action_space.n == 15 and envs.reachable.shape == (1, 1)
    raw = envs.games.observe()[1]["rgb"]
    assert (image(observation)[1, 2, 10, 20] == raw[1, 10, 20, 2]).all()
    assert (image(observation) == raw.transpose(0, 3, 1, 2)).all()
    kept = [(image(observation), image(observation).copy())]
    for step in play(envs, 600):
        arrays = [image(step[0]), *step[1:4]]
        arrays += [image(step[4]["final_obs"])] if "final_obs" in step[4] else []
        kept += [(array, array.copy()) for array in arrays]
    assert all(np.array_equal(now, then) for now, then in kept)
    image(envs.observe())[:] = 0
    assert image(envs.observe()).any()
    assert same(step[0], envs.observe())
    image(step[0])[:] = 0
    assert image(envs.observe()).any()
    picture = envs.render()[1]
    assert picture.shape == (256, 256, 3)
    assert (picture[40:44, 80:84] == image(envs.observe())[1, :, 10, 20]).all()


def test_moves_and_their_opposites(make):
    """Every maze starts in its lower left corner: up and right are open or walled, each undone."""
    envs = make(16)
    start = image(envs.reset(seed=1)[0])
    for idle in (3, 4, *range(9, 15)):
        assert (image(envs.step(np.full(16, idle))[0]) == start).all()
    for there, back in ((5, 3), (7, 1)):  # up and down, right and left
        changed = (image(envs.step(np.full(16, there))[0]) != start).any((1, 2, 3))
        assert changed.any()
        assert (image(envs.step(np.full(16, back))[0]) == start).all()


def test_a_saved_state_goes_on_alike(make):
    envs, other = make(), make()
    envs.reset(seed=1)
    for _ in play(envs, 300):
        pass
    state = envs.get_state()
    other.set_state(state)
    assert same(other.observe(), envs.observe())
    ended = 0
    for left, right in zip(play(envs, 300, seed=1), play(other, 300, seed=1), strict=True):
        ended += (left[2] | left[3]).sum()
        assert all(same(a, b) for a, b in zip(left, right, strict=True))
    assert ended >= N


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_envs": 0}, "at least 1"),
        ({"num_threads": -1}, "at least 0"),
        ({"env_name": "chess"}, "no game 'chess'"),
        ({"distribution_mode": "huge"}, "'huge'"),
        ({"split": "test"}, "train or eval"),
        ({"num_levels": -1}, "levels are 0 to"),
        ({"start_level": -1}, "levels are 0 to"),
        ({"start_level": LEVELS}, "levels are 0 to"),
        ({"num_levels": LEVELS, "start_level": 1}, "levels are 0 to"),
    ],
)
def test_bad_arguments_are_named(kwargs, message):
    with pytest.raises(ValueError, match=message):
        ProcgenVecEnv(**kwargs)


@pytest.mark.parametrize("actions", [[15, 0], [-1, 0], [0]])
def test_bad_actions_are_refused(make, actions):
    envs = make(2)
    envs.reset(seed=1)
    with pytest.raises(ValueError, match=r"actions must be \(2,\) integers in 0..14"):
        envs.step(np.array(actions))


def test_a_step_before_the_first_reset_is_refused(make):
    with pytest.raises(RuntimeError, match="reset before step"):
        make(2).step(np.zeros(2, int))


def test_the_old_gym_says_nothing(make, capfd):
    make(1).reset(seed=1)
    out, err = capfd.readouterr()
    assert not out and "unmaintained" not in err


def test_without_the_package_the_remedy_is_named(monkeypatch):
    monkeypatch.setattr(procgen.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install -r requirements\.txt"):
        ProcgenVecEnv()


def test_without_a_library_of_the_system_the_remedy_is_named(make, monkeypatch):
    """What the loader says on a system without libGL, which cannot be taken away from this one."""
    import procgen as package

    def load(**kwargs):
        raise OSError("libGL.so.1: cannot open shared object file")

    monkeypatch.setattr(package, "ProcgenGym3Env", load)
    with pytest.raises(ModuleNotFoundError, match=r"libGL\.so\.1: .*apt-get install libgl1"):
        make(1).reset(seed=1)
