"""DeepSea against bsuite itself, and gymnasium's contracts."""

import gymnasium as gym
import numpy as np
import pytest
from bsuite.environments.deep_sea import DeepSea
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from common.deepsea import DeepSeaEnv, DeepSeaVecEnv


@pytest.mark.parametrize("size", [1, 2, 3, 10, 30])
@pytest.mark.parametrize("mapping_seed", [42, 7])
@pytest.mark.parametrize("randomize_actions", [True, False])
def test_same_as_bsuite_step_by_step(size, mapping_seed, randomize_actions):
    N = 8
    envs = DeepSeaVecEnv(N, size, mapping_seed, randomize_actions)
    kwargs = {"mapping_seed": mapping_seed, "randomize_actions": randomize_actions}
    peers = [DeepSea(size, **kwargs) for _ in range(N)]
    observations, _ = envs.reset()
    for i, peer in enumerate(peers):
        assert (peer.reset().observation == observations[i, 0]).all()
    random = np.random.default_rng(size)
    for episode in range(20):
        for _ in range(size):
            actions = random.integers(2, size=N)
            if episode % 2:  # the way to the reward, and ways that leave it
                leave = random.random(N) < 1 / size
                actions = np.where(leave, actions, envs.right[envs.rows, envs.columns])
            observations, rewards, terminations, truncations, info = envs.step(actions)
            for i, peer in enumerate(peers):
                step = peer.step(int(actions[i]))
                assert step.last() == terminations[i] and not truncations[i]
                assert step.reward == pytest.approx(rewards[i], abs=1e-12)
                seen = info["final_obs"][i] if terminations[i] else observations[i]
                assert (step.observation == seen[0]).all()
                if step.last():
                    assert info["final_info"]["cell"][i].tolist() == [-1, -1]
                    assert (peer.reset().observation == observations[i, 0]).all()
                else:
                    assert np.argwhere(step.observation)[0].tolist() == info["cell"][i].tolist()


def test_always_right_earns_the_optimal_return():
    envs = DeepSeaVecEnv(3, 14, mapping_seed=5)
    envs.reset()
    for _ in range(14):
        *_, info = envs.step(envs.right[envs.rows, envs.columns])
    assert info["final_info"]["episode"]["r"] == pytest.approx([0.99] * 3)
    assert info["final_info"]["episode"]["l"].tolist() == [14] * 3


def test_the_action_map_belongs_to_its_seed_and_outlives_resets():
    maps = [DeepSeaVecEnv(1, 10, mapping_seed=seed).right for seed in range(20)]
    assert len({array.tobytes() for array in maps}) == 20
    assert 0.4 < np.mean(maps) < 0.6
    envs = DeepSeaVecEnv(1, 10, mapping_seed=3)
    for _ in range(5):
        envs.reset()
        assert (envs.right == maps[3]).all()


def test_only_the_triangle_is_reachable():
    envs = DeepSeaVecEnv(64, 6)
    assert envs.reachable.sum() == 6 * 7 / 2
    _, info = envs.reset()
    random, seen = np.random.default_rng(0), np.zeros((6, 6), bool)
    for _ in range(600):
        seen[tuple(info["cell"].T)] = True
        *_, info = envs.step(random.integers(2, size=64))
    assert (seen == envs.reachable).all()


def test_gymnasium_accepts_the_single_environment():
    check_env(gym.make("sofe/DeepSea-v0", render_mode="rgb_array", size=7).unwrapped)


def test_same_as_a_sync_vector_env_of_single_deepseas():
    ours = gym.make_vec(
        "sofe/DeepSea-v0", num_envs=2, vectorization_mode="vector_entry_point", size=4
    ).unwrapped
    assert isinstance(ours, DeepSeaVecEnv)
    theirs = SyncVectorEnv([lambda: DeepSeaEnv(size=4)] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
    assert (ours.reset()[0] == theirs.reset()[0]).all()
    random = np.random.default_rng(0)
    for _ in range(40):
        first, second = ours.step(actions := random.integers(2, size=2)), theirs.step(actions)
        for left, right in zip(first[:4], second[:4], strict=True):
            assert (left == right).all()
        assert (first[4]["cell"] == second[4]["cell"]).all()
        if first[2].any():
            for i in range(2):
                assert (first[4]["final_obs"][i] == second[4]["final_obs"][i]).all()
            final = [step[4]["final_info"] for step in (first, second)]
            assert (final[0]["cell"] == final[1]["cell"]).all()
            for key in ("r", "l", "coverage"):
                assert (final[0]["episode"][key] == final[1]["episode"][key]).all()


def test_a_saved_state_goes_on_alike():
    envs, other = DeepSeaVecEnv(3, 8), DeepSeaVecEnv(3, 8)
    envs.reset()
    random = np.random.default_rng(0)
    for _ in range(13):
        envs.step(random.integers(2, size=3))
    other.reset()
    other.set_state(envs.get_state())
    assert (other.observe() == envs.observe()).all()
    for _ in range(13):
        actions = random.integers(2, size=3)
        for left, right in zip(envs.step(actions)[:4], other.step(actions)[:4], strict=True):
            assert (left == right).all()


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="size must be at least 1"):
        DeepSeaVecEnv(1, 0)
    envs = DeepSeaVecEnv(2, 3)
    envs.reset()
    for actions in ([2, 0], [0], [-1, 0], [0.5, 0], [np.nan, 0]):
        with pytest.raises(ValueError, match="actions must be"):
            envs.step(np.array(actions))
