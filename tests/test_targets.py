"""Advantages against the slow sum of their paper, and PPO's update against stable-baselines3's."""

import copy

import gymnasium as gym
import numpy as np
import pytest
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.logger import configure
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import DummyVecEnv

import ppo_sofe
from common.mazes import MazeVecEnv
from ppo_sofe import Agent, Args, compute_gae, ppo_loss

PHI = (1, 32, 32)


def random_rollout(seed, T=12, N=4):
    generator = torch.Generator().manual_seed(seed)
    rewards, final_values = torch.randn((2, T, N), generator=generator)
    values = torch.randn((T + 1, N), generator=generator)
    ends = torch.rand((T, N), generator=generator)
    return rewards, values, final_values, ends < 0.15, (ends > 0.15) & (ends < 0.35)


def slow_advantages(rewards, values, final_values, terminations, truncations, gamma, lam):
    """A_t = sum over l of (gamma lambda)^l delta_{t+l}, the sum stopping where an episode ends."""
    T, N = rewards.shape
    advantages = np.zeros((T, N))
    for n in range(N):
        for t in range(T):
            for k in range(t, T):
                following = values[k + 1, n].item()
                if truncations[k, n]:
                    following = final_values[k, n].item()
                if terminations[k, n]:
                    following = 0.0
                delta = rewards[k, n].item() + gamma * following - values[k, n].item()
                advantages[t, n] += (gamma * lam) ** (k - t) * delta
                if terminations[k, n] or truncations[k, n]:
                    break
    return advantages


@pytest.mark.parametrize("gae_lambda", [0.0, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("seed", range(5))
def test_gae_is_the_slow_sum(gae_lambda, seed):
    rollout = random_rollout(seed)
    fast = compute_gae(*rollout, 0.9, gae_lambda)
    assert fast.numpy() == pytest.approx(slow_advantages(*rollout, 0.9, gae_lambda), abs=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_gae_is_that_of_stable_baselines3(seed):
    rewards, values, final_values, terminations, truncations = random_rollout(seed)
    T, N = rewards.shape
    buffer = RolloutBuffer(
        T, gym.spaces.Box(0, 1, (1,)), gym.spaces.Discrete(2), "cpu", 0.95, 0.9, N
    )
    dones = (terminations | truncations).float()
    starts = torch.cat([torch.ones(1, N), dones[:-1]])
    for t in range(T):  # SB3 adds the bootstrap of a time limit to the reward
        paid = rewards[t] + 0.9 * final_values[t] * truncations[t]
        zeros = np.zeros((N, 1))
        buffer.add(zeros, zeros, paid.numpy(), starts[t].numpy(), values[t], torch.zeros(N))
    buffer.compute_returns_and_advantage(values[T], dones[-1].numpy())
    ours = compute_gae(rewards, values, final_values, terminations, truncations, 0.9, 0.95)
    assert ours.numpy() == pytest.approx(buffer.advantages, abs=1e-5)


def test_a_perfect_critic_gives_no_advantage_across_truncations_and_terminations():
    """Where V is exactly the discounted sum, every advantage is 0, for each lambda."""
    _, values, final_values, terminations, truncations = random_rollout(0)
    following = torch.where(truncations, final_values, values[1:])
    rewards = values[:-1] - 0.99 * torch.where(terminations, 0.0, following)
    assert truncations.sum() > 5 and terminations.sum() > 3
    for gae_lambda in (0.0, 0.95, 1.0):
        rollout = (rewards, values, final_values, terminations, truncations)
        assert compute_gae(*rollout, 0.99, gae_lambda).abs().max() < 1e-6


def test_ending_an_episode_is_not_made_profitable():
    """Terminated at t = 1, reward 1 a step, V = 5 but 100 after the reset: the advantage is -4."""
    rewards, no = torch.ones(3, 1), torch.zeros((3, 1), dtype=torch.bool)
    values = torch.tensor([[5.0], [5.0], [100.0], [5.0]])
    terminations = torch.tensor([[False], [True], [False]])
    advantages = compute_gae(rewards, values, torch.zeros(3, 1), terminations, no, 1.0, 0.95)
    assert advantages[1].item() == -4.0


def test_only_the_env_that_is_cut_off_is_bootstrapped():
    """The target has V(s') = 10 of the true next state, not V(s) = 3; other envs are untouched."""
    rewards, values = torch.ones(2, 2), torch.full((3, 2), 3.0)
    no = torch.zeros((2, 2), dtype=torch.bool)
    cut = torch.tensor([[False, True], [False, False]])
    plain = compute_gae(rewards, values, torch.zeros(2, 2), no, no, 1.0, 1.0)
    bootstrapped = compute_gae(rewards, values, torch.full((2, 2), 10.0), no, cut, 1.0, 1.0)
    assert torch.equal(plain[:, 0], bootstrapped[:, 0])
    assert bootstrapped[0, 1].item() == 1 + 10 - 3


# --- PPO against stable-baselines3 ---------------------------------------------------------------


class OurTowers(BaseFeaturesExtractor):
    """Our two towers as a features extractor of stable-baselines3."""

    def __init__(self, space, agent):
        super().__init__(space, 2 * agent.obs_tower[-2].out_features)
        self.obs_tower, self.phi_tower = copy.deepcopy([agent.obs_tower, agent.phi_tower])

    def forward(self, observations):
        towers = self.obs_tower(observations["obs"].float()), self.phi_tower(observations["phi"])
        return torch.cat(towers, dim=1)


class StubEnv(gym.Env):
    """The spaces of an augmented maze."""

    def __init__(self, envs):
        self.action_space = envs.single_action_space
        phi = gym.spaces.Box(0, 1, (1, *envs.reachable.shape), np.float32)
        self.observation_space = gym.spaces.Dict({"obs": envs.single_observation_space, "phi": phi})

    def reset(self, *, seed=None, options=None):
        return self.observation_space.sample(), {}


def make_peer(args, envs, agent):
    policy_kwargs = {
        "features_extractor_class": OurTowers,
        "features_extractor_kwargs": {"agent": agent},
        "normalize_images": False,
    }
    peer = PPO(
        "MultiInputPolicy",
        DummyVecEnv([lambda: StubEnv(envs)]),
        learning_rate=args.learning_rate,
        n_steps=args.num_steps,
        batch_size=args.minibatch_size,
        n_epochs=1,
        ent_coef=args.ent_coef,
        policy_kwargs=policy_kwargs,
        device="cpu",
    )
    policy = peer.policy
    for ours, theirs in (
        (agent.obs_tower, policy.features_extractor.obs_tower),
        (agent.phi_tower, policy.features_extractor.phi_tower),
        (agent.actor[:4], policy.mlp_extractor.policy_net),
        (agent.critic[:4], policy.mlp_extractor.value_net),
        (agent.actor[4], policy.action_net),
        (agent.critic[4], policy.value_net),
    ):
        theirs.load_state_dict(ours.state_dict())
    return peer


def pairs(agent, policy):
    """Our parameters beside those of the peer."""
    theirs = [
        *policy.features_extractor.obs_tower.parameters(),
        *policy.features_extractor.phi_tower.parameters(),
        *policy.mlp_extractor.policy_net.parameters(),
        *policy.action_net.parameters(),
        *policy.mlp_extractor.value_net.parameters(),
        *policy.value_net.parameters(),
    ]
    ours = list(agent.parameters())
    assert sum(p.numel() for p in policy.parameters()) == sum(p.numel() for p in ours)
    return list(zip(ours, theirs, strict=True))


def fill_and_train(peer, batch, values):
    """One epoch of stable-baselines3's own PPO.train on one minibatch of M samples."""
    buffer = peer.rollout_buffer
    maps = {"obs": batch["obs"], "phi": batch["phi"]}
    buffer.observations = {name: tensor[:, None].numpy() for name, tensor in maps.items()}
    buffer.actions = batch["actions"][:, None, None].float().numpy()
    for name, tensor in (
        ("log_probs", batch["logprobs"]),
        ("values", values),
        ("advantages", batch["advantages"]),
        ("returns", batch["returns"]),
    ):
        setattr(buffer, name, tensor[:, None].numpy().copy())
    buffer.full, buffer.generator_ready = True, False
    peer.set_logger(configure(None, []))
    peer.train()


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_loss_gradient_and_step_are_those_of_stable_baselines3(memory_format):
    torch.manual_seed(0)
    M = 32
    args = Args(
        augment=True, num_envs=1, num_steps=M, minibatch_size=M, channels=8, embedding_dim=16
    )
    args.ent_coef = 0.01
    envs = MazeVecEnv(1, engine="numpy")
    agent = Agent(envs, PHI, args)
    peer = make_peer(args, envs, agent)
    agent = agent.to(memory_format=memory_format)
    batch = {
        "obs": torch.randint(0, 2, (M, 2, 32, 32), dtype=torch.uint8),
        "phi": torch.rand(M, 1, 32, 32),
        "actions": torch.randint(0, 4, (M,)),
        "advantages": torch.randn(M) * 3 + 1,
        "returns": torch.randn(M),
    }
    with torch.no_grad():  # an older policy, so that some ratios are clipped
        policy, values = agent(batch["obs"], batch["phi"])
        batch["logprobs"] = policy.log_prob(batch["actions"]) + 0.3 * torch.randn(M)

    fill_and_train(peer, batch, values)

    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    loss, terms = ppo_loss(agent, batch, args)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
    optimizer.step()

    logged = peer.logger.name_to_value
    assert loss.item() == pytest.approx(logged["train/loss"], abs=1e-5)
    assert terms["policy_loss"].item() == pytest.approx(
        logged["train/policy_gradient_loss"], abs=1e-5
    )
    assert terms["value_loss"].item() == pytest.approx(logged["train/value_loss"], abs=1e-5)
    assert terms["entropy"].item() == pytest.approx(-logged["train/entropy_loss"], abs=1e-5)
    assert terms["approx_kl"].item() == pytest.approx(logged["train/approx_kl"], abs=1e-5)
    assert terms["clipfrac"].item() == pytest.approx(logged["train/clip_fraction"], abs=1e-5)
    assert 0 < terms["clipfrac"].item() < 1
    for ours, theirs in pairs(agent, peer.policy):
        assert torch.allclose(ours.grad, theirs.grad, atol=1e-5)
        assert torch.allclose(ours, theirs, atol=1e-5)


def test_a_whole_update_of_main_is_that_of_stable_baselines3(monkeypatch, tmp_path):
    """The optimiser, its epsilon, the clipping and the order of calls as they stand in `main`."""
    seen = {}
    compute_gae, loss_of, make_agent = ppo_sofe.compute_gae, ppo_sofe.ppo_loss, ppo_sofe.Agent

    def agent_kept(*args):
        seen["agent"] = make_agent(*args)
        return seen["agent"]

    def before_the_update(*args):
        before = copy.deepcopy(seen["agent"])
        seen["before"] = before.to(memory_format=torch.contiguous_format)
        return compute_gae(*args)

    def loss_kept(agent, batch, args):
        seen["batch"] = {name: tensor.clone() for name, tensor in batch.items()}
        return loss_of(agent, batch, args)

    monkeypatch.setattr(ppo_sofe, "Agent", agent_kept)
    monkeypatch.setattr(ppo_sofe, "compute_gae", before_the_update)
    monkeypatch.setattr(ppo_sofe, "ppo_loss", loss_kept)
    M = 48
    args = Args(augment=True, num_envs=4, num_steps=12, minibatch_size=M, update_epochs=1)
    args.channels, args.embedding_dim, args.ent_coef, args.total_timesteps = 8, 16, 0.01, M
    args.eval_episodes, args.runs_dir, args.max_steps, args.device = 0, str(tmp_path), 7, "cpu"
    ppo_sofe.main(args)

    args.num_envs, args.num_steps = 1, M
    peer = make_peer(args, MazeVecEnv(1, engine="numpy"), seen["before"])
    fill_and_train(peer, seen["batch"], torch.zeros(M))
    moved = False
    for ours, theirs, first in zip(
        *zip(*pairs(seen["agent"], peer.policy), strict=True),
        seen["before"].parameters(),
        strict=True,
    ):
        assert torch.allclose(ours, theirs, atol=1e-5)
        moved |= not torch.allclose(ours, first, atol=1e-5)
    assert moved


def test_initialisation_has_the_scale_of_stable_baselines3():
    args = Args(augment=True, channels=16, embedding_dim=128)
    envs = MazeVecEnv(1, engine="numpy")
    agent = Agent(envs, PHI, args)
    fresh = PPO(
        "MultiInputPolicy",
        DummyVecEnv([lambda: StubEnv(envs)]),
        policy_kwargs={
            "features_extractor_class": OurTowers,
            "features_extractor_kwargs": {"agent": Agent(envs, PHI, args)},
            "normalize_images": False,
        },
        device="cpu",
    )
    for ours, theirs in pairs(agent, fresh.policy):
        assert ours.norm().item() == pytest.approx(theirs.norm().item(), rel=1e-3, abs=1e-6)


def test_a_last_minibatch_of_one_sample_gives_no_nan():
    args = Args(channels=4, embedding_dim=8)
    agent = Agent(MazeVecEnv(1, engine="numpy"), PHI, args)
    batch = {
        "obs": torch.zeros(1, 2, 32, 32, dtype=torch.uint8),
        "phi": torch.zeros(1, 0, 32, 32),
        "actions": torch.zeros(1, dtype=torch.int64),
        "logprobs": torch.zeros(1),
        "advantages": torch.ones(1),
        "returns": torch.ones(1),
    }
    assert torch.isfinite(ppo_loss(agent, batch, args)[0])


def test_without_norm_adv_the_advantages_are_used_as_they_are():
    args = Args(channels=4, embedding_dim=8, norm_adv=False)
    agent = Agent(MazeVecEnv(1, engine="numpy"), PHI, args)
    batch = {
        "obs": torch.zeros(4, 2, 32, 32, dtype=torch.uint8),
        "phi": torch.zeros(4, 0, 32, 32),
        "actions": torch.zeros(4, dtype=torch.int64),
        "advantages": torch.tensor([1.0, 2.0, 3.0, 6.0]),
        "returns": torch.zeros(4),
    }
    batch["logprobs"] = agent(batch["obs"], batch["phi"])[0].log_prob(batch["actions"]).detach()
    assert ppo_loss(agent, batch, args)[1]["policy_loss"].item() == pytest.approx(-3.0)
    args.norm_adv = True
    assert ppo_loss(agent, batch, args)[1]["policy_loss"].item() == pytest.approx(0.0, abs=1e-6)


def test_the_two_arms_differ_by_the_phi_tower_alone():
    """Same observation tower and heads but for the input width; the plain agent never reads phi."""
    envs = MazeVecEnv(1, engine="numpy")
    plain = Agent(envs, PHI, Args(channels=4, embedding_dim=8))
    sofe = Agent(envs, PHI, Args(channels=4, embedding_dim=8, augment=True))
    assert plain.phi_tower is None
    for left, right in zip(plain.obs_tower.parameters(), sofe.obs_tower.parameters(), strict=True):
        assert left.shape == right.shape
    assert plain.actor[0].in_features * 2 == sofe.actor[0].in_features
    obs = torch.zeros(2, 2, 32, 32, dtype=torch.uint8)
    values = plain(obs, torch.zeros(2, 0, 32, 32))[1]
    assert torch.equal(values, plain(obs, torch.rand(2, 1, 32, 32))[1])
    phi = torch.stack([torch.zeros(1, 32, 32), torch.ones(1, 32, 32)])
    assert sofe(obs, phi)[1][0] != sofe(obs, phi)[1][1]


def test_the_memory_format_changes_nothing():
    envs = MazeVecEnv(1, engine="numpy")
    agent = ppo_sofe.Agent(envs, PHI, Args(channels=8, embedding_dim=16, augment=True))
    other = copy.deepcopy(agent).to(memory_format=torch.channels_last)
    obs, phi = torch.randint(0, 2, (5, 2, 32, 32), dtype=torch.uint8), torch.rand(5, 1, 32, 32)
    (left, v), (right, w) = agent(obs, phi), other(obs, phi)
    assert torch.allclose(left.logits, right.logits, atol=1e-5)
    assert torch.allclose(v, w, atol=1e-5)
