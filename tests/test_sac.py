"""SAC against stable-baselines3, its density, its replay buffer against lists; whole runs.

Runs in the 3D map need Godot 3; a stand-in (stub_world.py) is where steps must be known or many.
"""

import copy
import math
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import psutil
import pytest
import torch
from run_files import has_own_weights, quick, rows, texts  # noqa: F401, quick is a fixture
from stable_baselines3 import SAC
from stable_baselines3.common.logger import configure
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import DummyVecEnv
from stub_world import StubVecEnv
from test_bonuses import slow_bonus, slow_phi
from torch.distributions import Independent, Normal, TransformedDistribution
from torch.distributions.transforms import TanhTransform

import dqn_sofe
import sac_sofe_godot
from common import godot, runs
from sac_sofe_godot import Actor, Args, ReplayBuffer, squash

ROOT = Path(__file__).parent.parent
TINY = {
    "num_envs": 2,
    "minibatch_size": 4,
    "learning_starts": 8,
    "buffer_size": 40,
    "log_every": 2,
    "channels": 4,
    "embedding_dim": 8,
    "hidden_dim": 16,
    "max_steps": 6,
    "total_timesteps": 48,
    "eval_episodes": 2,
    "device": "cpu",
}
MAP = (24, 24)
try:
    ENGINE = godot.find_engine()
except godot.EngineError:
    ENGINE = None
needs_engine = pytest.mark.skipif(ENGINE is None, reason=godot.NO_ENGINE)


def train(tmp_path, name="run", **settings):
    args = Args(**(TINY | {"runs_dir": str(tmp_path), "run_name": name} | settings))
    return sac_sofe_godot.main(args), tmp_path / name


@pytest.fixture
def stub(monkeypatch):
    """Put the stand-in in place of the 3D map; what is given goes to its constructor."""

    def use(**settings):
        def make_envs(args, num_envs):
            return StubVecEnv(num_envs, args.max_steps, **settings)

        monkeypatch.setattr(sac_sofe_godot, "make_envs", make_envs)

    use(lava=40)
    return use


# --- Against stable-baselines3 -------------------------------------------------------------------


class OurTowers(BaseFeaturesExtractor):
    """Our towers as a features extractor of stable-baselines3."""

    def __init__(self, space, towers):
        super().__init__(space, towers.size)
        self.towers = copy.deepcopy(towers).to(memory_format=torch.contiguous_format)

    def forward(self, observations):
        return self.towers(observations["obs"], observations["phi"])


class Spaces(gym.Env):
    """The spaces of the stand-in with phi beside the observation."""

    def __init__(self):
        envs = StubVecEnv(1)
        self.action_space = envs.single_action_space
        phi = gym.spaces.Box(0, 1, (1, *MAP), np.float32)
        self.observation_space = gym.spaces.Dict({"obs": envs.single_observation_space, "phi": phi})


def make_peer(args, actor, critic, critic_target):
    """stable-baselines3's SAC with its own Adam, and the weights of our networks."""
    peer = SAC(
        "MultiInputPolicy",
        DummyVecEnv([Spaces]),
        buffer_size=10,
        policy_kwargs={
            "features_extractor_class": OurTowers,
            "features_extractor_kwargs": {"towers": actor.towers},
            "share_features_extractor": False,
            "normalize_images": False,
            "net_arch": [16, 16],
        },
        device="cpu",
    )
    peer.set_logger(configure(None, []))
    assert peer.target_entropy == -3 and peer.gamma == args.gamma and peer.tau == args.tau
    assert peer.learning_rate == args.learning_rate
    peer.actor.action_dist.epsilon = 0.0  # it adds 1e-6 to the slope of tanh; ours is exact
    with torch.no_grad():
        for left, right in pairs(actor, peer.actor) + pairs(critic, peer.critic):
            right.copy_(left)
        for left, right in pairs(critic_target, peer.critic_target):
            right.copy_(left)
    return peer


def ours_as_theirs(network, values):
    """Our tensors in the order of the peer's parameters: it has two last layers, we have one."""
    if not isinstance(network, Actor):
        return values
    *rest, weight, bias = values
    return [*rest, weight[:3], bias[:3], weight[3:], bias[3:]]


def pairs(network, theirs):
    """Our parameters beside those of the peer."""
    ours = ours_as_theirs(network, list(network.parameters()))
    towers = theirs.features_extractor.towers
    heads = [theirs.latent_pi, theirs.mu, theirs.log_std] if isinstance(network, Actor) else None
    parts = [towers, *(heads or theirs.q_networks)]
    right = [weights for part in parts for weights in part.parameters()]
    assert sum(p.numel() for p in theirs.parameters()) == sum(p.numel() for p in right)
    return list(zip(ours, right, strict=True))


@pytest.mark.parametrize("augment", [False, True])
def test_updates_of_main_are_those_of_stable_baselines3(monkeypatch, tmp_path, stub, augment):
    """Losses, gradients, steps of the three optimizers and of the target, with the same noise."""
    batches, noises, first, gradients = [], [], [], []
    sample, randn, descend = ReplayBuffer.sample, torch.randn, sac_sofe_godot.descend
    critic_loss = sac_sofe_godot.critic_loss

    def sample_kept(self, M, device):
        batches.append(sample(self, M, device))
        return {name: tensor.clone() for name, tensor in batches[-1].items()}

    def randn_kept(*shape, **settings):
        noise = randn(*shape, **settings)
        if shape == (2, 32, 3):
            noises.append(noise.clone())
        return noise

    def descend_kept(optimizer, loss):
        descend(optimizer, loss)
        gradients.append([p.grad.clone() for p in optimizer.param_groups[0]["params"]])

    def critic_loss_kept(critic, critic_target, actor, *rest):
        if not first:
            first.extend([*copy.deepcopy([actor, critic, critic_target])])
            first.extend([actor, critic, critic_target])
        return critic_loss(critic, critic_target, actor, *rest)

    monkeypatch.setattr(ReplayBuffer, "sample", sample_kept)
    monkeypatch.setattr(torch, "randn", randn_kept)
    monkeypatch.setattr(sac_sofe_godot, "descend", descend_kept)
    monkeypatch.setattr(sac_sofe_godot, "critic_loss", critic_loss_kept)
    settings = {"augment": augment, "minibatch_size": 32, "gradient_steps": 2, "log_every": 1}
    settings |= {"channels": 8, "embedding_dim": 16, "eval_episodes": 0, "total_timesteps": 24}
    settings |= {"ext_coef": 0.3, "learning_starts": 14}
    _, folder = train(tmp_path, **settings)
    monkeypatch.undo()

    steps = len(batches)
    assert steps == len(noises) == 2 * (24 - 14) // 2  # more than learning_starts steps
    peer = make_peer(Args(augment=augment), *first[:3])
    queue, theirs, logged = [], [], []
    monkeypatch.setattr(
        torch.distributions.normal, "_standard_normal", lambda *args, **kwargs: queue.pop(0)
    )

    def recorded(optimizer, parts):
        step = optimizer.step

        def kept(*args):
            theirs.append([p.grad.clone() for p in parts])
            return step(*args)

        optimizer.step = kept

    recorded(peer.ent_coef_optimizer, [peer.log_ent_coef])
    recorded(peer.critic.optimizer, [right for _, right in pairs(first[1], peer.critic)])
    recorded(peer.actor.optimizer, [right for _, right in pairs(first[0], peer.actor)])
    for batch, noise in zip(batches, noises, strict=True):
        dones = batch["discounts"] == 0
        assert torch.all(dones | (batch["discounts"] == np.float32(0.99)))
        sampled = SimpleNamespace(
            observations={name: batch[name] for name in ("obs", "phi")},
            next_observations={name: batch[f"next_{name}"] for name in ("obs", "phi")},
            actions=batch["actions"],
            rewards=batch["rewards"][:, None],
            dones=dones[:, None].float(),
            discounts=None,
        )
        queue[:] = list(noise)
        peer.replay_buffer.sample = lambda batch_size, env=None, sampled=sampled: sampled
        peer.train(1, 32)
        logged.append({k: float(v) for k, v in peer.logger.name_to_value.items()})
    assert any((batch["discounts"] == 0).any() for batch in batches)

    for i, (left, right) in enumerate(zip(gradients, theirs, strict=True)):
        left = ours_as_theirs(first[3], left) if i % 3 == 2 else left
        for ours, other in zip(left, right, strict=True):
            assert torch.allclose(ours.reshape(other.shape), other, atol=1e-5, rtol=1e-4)
    for mine, old, other in zip(
        first[3:], first[:3], (peer.actor, peer.critic, peer.critic_target), strict=True
    ):
        for left, right in pairs(mine, other):
            assert torch.allclose(left, right, atol=1e-5)
        moved = zip(mine.parameters(), old.parameters(), strict=True)
        assert any(not torch.allclose(left, right, atol=1e-5) for left, right in moved)
    content = torch.load(folder / "checkpoint.pt", weights_only=True)
    assert content["state"]["log_alpha"].item() == pytest.approx(peer.log_ent_coef.item(), abs=1e-7)
    names = dict(qf_loss="critic_loss", actor_loss="actor_loss", alpha="ent_coef")
    names |= dict(alpha_loss="ent_coef_loss")
    updates = rows(folder, "updates.csv")
    assert [int(row["step"]) for row in updates] == [16, 18, 20, 22, 24]
    for i, row in enumerate(updates):
        for ours, other in names.items():
            mean = np.mean([one[f"train/{other}"] for one in logged[2 * i : 2 * i + 2]])
            assert float(row[ours]) == pytest.approx(mean, rel=1e-4, abs=1e-5), ours


def test_networks_have_the_initial_weights_of_stable_baselines3():
    """Deviations of the weights of each layer; those of the two last layers together."""
    torch.manual_seed(0)
    args, envs = Args(augment=True, channels=16, embedding_dim=64), StubVecEnv(1)
    actor, critic = Actor(envs, (1, *MAP), args), sac_sofe_godot.Critic(envs, (1, *MAP), args)
    fresh = SAC(
        "MultiInputPolicy",
        DummyVecEnv([Spaces]),
        buffer_size=10,
        policy_kwargs={
            "features_extractor_class": OurTowers,
            "features_extractor_kwargs": {"towers": Actor(envs, (1, *MAP), args).towers},
            "share_features_extractor": False,
        },
    )
    for network in (actor, critic):
        has_own_weights(network.towers)  # the peer's towers are made by the same code
    compared = 0
    for left, right in pairs(actor, fresh.actor) + pairs(critic, fresh.critic):
        if left.numel() > 500:
            compared += 1
            assert left.std().item() == pytest.approx(right.std().item(), rel=0.1)
    assert compared == 14


# --- The squashed Gaussian -----------------------------------------------------------------------


@pytest.mark.parametrize(("mean", "log_std"), [(0.0, 0.0), (0.7, -1.0), (-1.5, 0.5), (0.2, 1.0)])
def test_the_density_integrates_to_one(mean, log_std):
    noise = torch.linspace(-9, 9, 40_001, dtype=torch.float64)[:, None]
    actions, logprobs = squash(torch.full_like(noise, mean), torch.full_like(noise, log_std), noise)
    area = torch.trapezoid(logprobs.exp(), actions[:, 0])
    assert area.item() == pytest.approx(1, abs=1e-5)


def test_the_density_is_that_of_torch_where_that_is_stable():
    generator = torch.Generator().manual_seed(0)
    mean, log_std, noise = (
        torch.randn(500, 3, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    log_std = 0.3 * log_std - 1
    normal = Independent(Normal(mean, log_std.exp()), 1)
    actions, logprobs = squash(mean, log_std, noise)
    assert actions.abs().max() < 1 - 1e-6
    assert torch.allclose(actions, torch.tanh(mean + log_std.exp() * noise))
    theirs = TransformedDistribution(normal, [TanhTransform()]).log_prob(actions)
    assert torch.allclose(logprobs, theirs, atol=1e-8)


@pytest.mark.parametrize("mean", [-1000.0, -30.0, -9.0, 0.0, 9.0, 30.0, 1000.0])
@pytest.mark.parametrize("log_std", [-20.0, 0.0, 2.0])
def test_saturated_actions_are_finite(mean, log_std):
    mean = torch.full((1, 1), mean, requires_grad=True)
    log_std = torch.full((1, 1), log_std, requires_grad=True)
    actions, logprobs = squash(mean, log_std, torch.full((1, 1), 0.5))
    assert actions.abs() <= 1
    (actions.sum() + logprobs.sum()).backward()
    assert all(x.isfinite().all() for x in (actions, logprobs, mean.grad, log_std.grad))
    # the slope of tanh falls as 4 exp(-2 |u|): written out for the far ends, its log is linear
    u = mean.item() + math.exp(log_std.item()) * 0.5
    log_slope = math.log(4) - 2 * abs(u) - 2 * math.log1p(math.exp(-2 * abs(u)))
    expected = -(0.25 + math.log(2 * math.pi)) / 2 - log_std.item() - log_slope
    assert logprobs.item() == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert mean.grad.item() == pytest.approx(2 * math.tanh(u) + 1 - math.tanh(u) ** 2, abs=1e-5)


def test_the_deviation_is_clamped_and_the_greedy_action_is_tanh_of_the_mean(monkeypatch):
    actor = Actor(StubVecEnv(1), (0, *MAP), Args(embedding_dim=8))
    last = actor.head[-1]
    with torch.no_grad():
        last.weight.zero_()
        last.bias[:] = torch.tensor([0.5, -2.0, 1.0, -50.0, 0.3, 7.0])
    mean, log_std = actor(torch.zeros(4, 5), torch.zeros(4, 0, *MAP))
    assert mean[0].tolist() == [0.5, -2.0, 1.0]
    assert log_std[0].tolist() == pytest.approx([-20, 0.3, 2])
    actions, _ = squash(mean, log_std, torch.zeros_like(mean))
    assert actions[0].tolist() == pytest.approx(np.tanh([0.5, -2.0, 1.0]))


# --- The bonus and the replay buffer -------------------------------------------------------------


def test_the_bonus_is_that_of_the_other_scripts():
    """In words and numbers, cells that are none included; S-Max is left out."""
    random = np.random.default_rng(0)
    counts = torch.from_numpy(random.integers(0, 3, (3, *MAP)))
    cells = torch.from_numpy(random.integers(0, 3, (40, 2)))
    cells[::7] = -1
    ids = torch.from_numpy(random.integers(0, 3, 40))
    for bonus in ("none", "sqrt", "salesman"):
        ours, theirs = (x.compute_bonus(counts, ids, cells, bonus) for x in SCRIPTS)
        assert ours.dtype == theirs.dtype == torch.float32 and torch.equal(ours, theirs)
        assert (ours[::7] == 0).all() and ours.any() == (bonus != "none")
        for augment in (False, True):
            args = SimpleNamespace(bonus=bonus, augment=augment, network="cnn")
            assert torch.equal(*(x.augment(counts, ids, args) for x in SCRIPTS))
    tables = [counts.clone(), counts.clone()]
    for script, table in zip(SCRIPTS, tables, strict=True):
        script.visit(table, ids, cells)
    assert torch.equal(*tables) and tables[0].sum() == counts.sum() + (cells[:, 0] >= 0).sum()


SCRIPTS = (sac_sofe_godot, dqn_sofe)
N = 3


@pytest.fixture
def recorded(monkeypatch, tmp_path):
    """Train in the stand-in, and write down by other means what the buffer should hold.

    The task pays a running number, from which a sampled transition is recognised. With no random
    actions all come from the actor, so that all phi that are acted on pass through it.
    """

    def run(**settings):
        log = SimpleNamespace(steps=[], acted=[], samples=[], replay=[], bonuses=[])
        sample, bonus_of = ReplayBuffer.sample, sac_sofe_godot.compute_bonus

        def make_envs(args, num_envs):
            envs = StubVecEnv(num_envs, args.max_steps, lava=40)
            step = envs.step

            def kept(actions):
                log.steps.append(copy.deepcopy((actions, *step(actions))))
                return copy.deepcopy(log.steps[-1][1:])

            envs.step = kept
            return envs

        class Kept(Actor):
            def forward(self, obs, phi):
                if len(obs) == N and not torch.is_grad_enabled():
                    log.acted.append((obs.clone(), phi.clone()))
                return super().forward(obs, phi)

        class KeptBuffer(ReplayBuffer):
            def __init__(self, *args):
                super().__init__(*args)
                log.replay.append(self)

            def sample(self, M, device):
                batch = sample(self, M, device)
                log.samples.append((int(self.total), {k: v.clone() for k, v in batch.items()}))
                return batch

        def bonus_kept(*args):
            log.bonuses.append(bonus_of(*args))
            return log.bonuses[-1]

        monkeypatch.setattr(sac_sofe_godot, "make_envs", make_envs)
        monkeypatch.setattr(sac_sofe_godot, "Actor", Kept)
        monkeypatch.setattr(sac_sofe_godot, "ReplayBuffer", KeptBuffer)
        monkeypatch.setattr(sac_sofe_godot, "compute_bonus", bonus_kept)
        fixed = {"num_envs": N, "learning_starts": 0, "minibatch_size": 16, "log_every": 3}
        fixed |= {"eval_episodes": 0, "augment": True, "buffer_size": 61, "total_timesteps": 252}
        fixed |= {"gradient_steps": 2, "max_steps": 7, "ext_coef": 1.0}
        _, folder = train(tmp_path, **(fixed | settings))
        log.episodes = rows(folder, "episodes.csv")
        log.replay = log.replay[0]
        return log

    return run


def expected_transitions(log, bonus, counts, beta, ext_coef=1.0):
    """A list of what each env did in each step, from positions, and what the actor was shown."""
    start = (7, 7)  # 36 m from the corner, in bins of 5
    tables = [Counter() for _ in range(N)] if counts == "episodic" else [Counter()] * N
    for env in range(N):
        tables[env][start] += 1
    transitions = []
    for t, (actions, next_obs, paid, terminated, truncated, info) in enumerate(log.steps):
        obs, phi = log.acted[t]
        ended = terminated | truncated
        ends = info["final_info"]["cell"] if ended.any() else info["cell"]
        cells = np.where(ended[:, None], ends, info["cell"]).tolist()
        for env in range(N):
            value = beta * slow_bonus(tables[env], tuple(cells[env]), bonus, MAP)
            assert np.abs(phi[env].numpy() - slow_phi(tables[env], bonus, MAP)).max() < 1e-6
            one = {"reward": ext_coef * paid[env] + value, "action": actions[env]}
            one |= {"obs": obs[env].numpy(), "phi": phi[env].numpy(), "ended": ended[env]}
            one |= {"terminated": terminated[env], "next_obs": next_obs[env], "bonus": value}
            transitions.append(one)
        for env in range(N):
            tables[env][tuple(cells[env])] += 1
        for env in range(N):  # before any episode begins; elsewhere with the others' new s_0
            transitions[env - N]["next_phi"] = slow_phi(tables[env], bonus, MAP)
        for env in np.flatnonzero(ended):
            transitions[env - N]["next_obs"] = info["final_obs"][env]
            if counts == "episodic":
                tables[env] = Counter()
            tables[env][start] += 1
        for env in np.flatnonzero(~ended):
            transitions[env - N]["next_phi"] = slow_phi(tables[env], bonus, MAP)
    return transitions


@pytest.mark.parametrize(
    ("bonus", "counts", "buffer_size"),
    [("sqrt", "episodic", 61), ("salesman", "global", 61), ("sqrt", "global", 1000)],
)
def test_every_transition_is_as_it_was_lived(recorded, bonus, counts, buffer_size):
    """All that is stored at the end, and all that was ever sampled, rings wrapped around or not."""
    log = recorded(bonus=bonus, counts=counts, beta=0.5, buffer_size=buffer_size)
    transitions, replay, total = expected_transitions(log, bonus, counts, 0.5), log.replay, 84
    assert len(transitions) == total * N and int(replay.total) == total
    assert replay.capacity == buffer_size // N and replay.capacity + 3 == replay.L
    ends = Counter((one["terminated"], one["ended"]) for one in transitions)
    assert ends[True, True] > 5 and ends[False, True] > 5

    sums, episodes = np.zeros(N), []
    for i, one in enumerate(transitions):
        sums[i % N] += one["bonus"]
        if one["ended"]:
            episodes.append(sums[i % N])
            sums[i % N] = 0
    assert [float(row["bonus"]) for row in log.episodes] == pytest.approx(episodes, rel=1e-4)

    def same(found, one):
        for name in ("obs", "next_obs", "phi"):
            assert np.array_equal(found[name], one[name]), name
        assert np.abs(found["next_phi"].numpy() - one["next_phi"]).max() < 1e-6
        assert abs(found["reward"] - one["reward"]) <= 1e-6 * abs(one["reward"])
        assert np.array_equal(found["action"], one["action"])

    for row in range(total - min(replay.L, total), total):
        at = np.full(N, row % replay.L), np.arange(N)
        phis = dict(phi=replay.phi(*at, False), next_phi=replay.phi(*at, True))
        stored = {name: column[row % replay.L] for name, column in replay.columns.items()}
        for env in range(N):
            one = transitions[row * N + env]
            found = {"obs": stored["obs"][env], "next_obs": stored["next_obs"][env]}
            found |= {"action": stored["actions"][env], "reward": stored["rewards"][env]}
            same(found | {name: phi[env] for name, phi in phis.items()}, one)
            assert stored["terminated"][env] == one["terminated"]

    seen, old = Counter(), 0
    assert len(log.samples) == 2 * total
    for rows_done, batch in log.samples:
        numbers = batch["rewards"].ceil().long() - 1  # the bonus is in (0, 1], or the number is it
        numbers = torch.where(
            batch["rewards"] == batch["rewards"].floor(), batch["rewards"], numbers
        )
        oldest = max(0, rows_done - buffer_size // N)
        assert min(numbers) >= oldest * N and max(numbers) < rows_done * N
        old += sum(number < (oldest + 2) * N for number in numbers.tolist()) if oldest else 0
        for i, number in enumerate(numbers.long().tolist()):
            seen[number] += 1
            one = transitions[number]
            found = {name: batch[name][i] for name in ("obs", "next_obs", "phi", "next_phi")}
            same(found | {"action": batch["actions"][i], "reward": batch["rewards"][i].item()}, one)
            assert batch["discounts"][i].item() == pytest.approx(0.99 * (not one["terminated"]))
    assert len(seen) > 0.9 * total * N
    assert old > 10 or buffer_size > 61


def test_the_bonus_is_stored_as_it_was_paid(recorded):
    """With the beta of its time; by default nothing of the task's reward is in it."""
    assert Args().ext_coef == 0
    log = recorded(anneal_beta=True, beta=0.7, ext_coef=0.0, counts="global", buffer_size=1000)
    assert len(log.bonuses) == 84
    for t, paid in enumerate(log.bonuses):
        expected = (0.7 * (1 - t / 84) * paid).numpy()
        assert log.replay.columns["rewards"][t] == pytest.approx(expected, rel=1e-5)


def test_more_visits_than_16_bits_are_refused():
    replay = ReplayBuffer(StubVecEnv(1), (1, *MAP), Args(augment=True, num_envs=1, buffer_size=9))
    counts = np.zeros((1, *MAP), np.int64)
    counts[0, 3, 3] = 65535
    replay.put(counts=counts)
    assert replay.columns["counts"][0, 0, 3, 3] == 65535
    with pytest.raises(SystemExit, match="--counts global"):
        replay.put(counts=counts + 1)


def test_a_buffer_larger_than_the_memory_is_refused(tmp_path, stub):
    with pytest.raises(SystemExit) as end:
        train(tmp_path, augment=True, buffer_size=10**12)
    assert re.fullmatch(
        r"error: the replay buffer needs [\d.]+ GiB and [\d.]+ GiB are free", str(end.value)
    )
    assert not list(tmp_path.iterdir())


def test_the_size_that_is_printed_is_what_a_million_transitions_take(monkeypatch, capsys):
    """The 3D map's 129 numbers, and counts of 16 bits: 2.3 GiB, and none of it taken here."""
    zeros = np.zeros
    monkeypatch.setattr(runs.psutil, "virtual_memory", lambda: SimpleNamespace(available=2**36))
    monkeypatch.setattr(np, "zeros", lambda shape, *kind: np.broadcast_to(zeros((), *kind), shape))
    replay = ReplayBuffer(StubVecEnv(8, obs_dim=129), (8, *MAP), Args(augment=True))
    assert replay.capacity * 8 == 1_000_000
    assert len({len(column) for column in replay.columns.values()}) == 1
    taken = sum(column.nbytes for column in replay.columns.values())
    assert f"replay buffer: {taken / 2**20:.0f} MiB of 65536 MiB free" in capsys.readouterr().out
    assert taken < 2.5e9


# --- Whole runs in the stand-in ------------------------------------------------------------------


def test_random_actions_come_first_and_are_uniform(monkeypatch, tmp_path):
    """512 envs: 4 steps of random actions, then those of a policy that is nearly always 1."""
    taken = []

    def make_envs(args, num_envs):
        envs = StubVecEnv(num_envs, args.max_steps)
        step = envs.step
        envs.step = lambda actions: taken.append(actions) or step(actions)
        return envs

    class Forward(Actor):
        def forward(self, obs, phi):
            mean, log_std = super().forward(obs, phi)
            return mean * 0 + 1, log_std * 0 - 3

    monkeypatch.setattr(sac_sofe_godot, "make_envs", make_envs)
    monkeypatch.setattr(sac_sofe_godot, "Actor", Forward)
    settings = {"num_envs": 512, "learning_starts": 2048, "total_timesteps": 3072, "log_every": 1}
    _, folder = train(tmp_path, **settings, buffer_size=4096, eval_episodes=0)
    random = np.concatenate(taken[:4])
    for column in random.T:
        assert np.abs(np.histogram(column, bins=8, range=(-1, 1))[0] - 256).max() < 5 * 16
    assert np.abs(np.corrcoef(random.T) - np.eye(3)).max() < 0.1
    acted = np.arctanh(np.concatenate(taken[4:]))
    assert acted.mean() == pytest.approx(1, abs=0.01)
    assert acted.std() == pytest.approx(math.exp(-3), rel=0.1)
    assert [int(row["step"]) for row in rows(folder, "updates.csv")] == [2560, 3072]


@pytest.mark.parametrize(
    ("bonus", "augment"),
    [("none", False)] + [(b, a) for b in ("sqrt", "salesman") for a in (False, True)],
)
@pytest.mark.parametrize("counts", ["episodic", "global"])
def test_every_bonus_with_and_without_sofe(tmp_path, stub, bonus, counts, augment):
    metrics, folder = train(tmp_path, bonus=bonus, counts=counts, augment=augment)
    assert {"eval/greedy_return", "eval/sampled_coverage"} <= metrics.keys()
    assert all(np.isfinite(value) for value in metrics.values())
    episodes = rows(folder, "episodes.csv")
    assert len(episodes) >= 48 // 6
    assert (sum(float(row["bonus"]) for row in episodes) > 0) == (bonus != "none")
    updates = rows(folder, "updates.csv")
    assert [int(row["step"]) for row in updates] == list(range(12, 49, 4))
    assert all(np.isfinite(float(value)) for row in updates for value in row.values())
    content = torch.load(folder / "checkpoint.pt", weights_only=True)
    assert content["global_step"] == 48 and content["script"] == "sac_sofe_godot"
    assert ("counts" in content["ring"]) == augment
    assert all(len(column) == 22 for column in content["ring"].values())  # 20 and 2 spare rows


def test_the_arms_differ_by_the_phi_towers_alone():
    envs, sizes = StubVecEnv(1), {}
    for augment in (False, True):
        args = Args(augment=augment, embedding_dim=8, channels=4)
        torch.manual_seed(0)
        actor = Actor(envs, (int(augment), *MAP), args)
        sizes[augment] = {name: tuple(p.shape) for name, p in actor.named_parameters()}
    extra = sizes[True].keys() - sizes[False].keys()
    assert len(extra) == 8 and all("phi_tower" in name for name in extra)
    assert {n for n in sizes[False] if sizes[True][n] != sizes[False][n]} == {"head.0.weight"}


def test_the_critic_and_the_actor_see_phi(stub):
    args = Args(augment=True, embedding_dim=8, channels=4)
    envs = StubVecEnv(1)
    actor, critic = Actor(envs, (1, *MAP), args), sac_sofe_godot.Critic(envs, (1, *MAP), args)
    obs, actions, phi = torch.rand(2, 5), torch.rand(2, 3), torch.ones(2, 1, *MAP)
    seen = phi.clone()
    seen[:, :, 3:9, 4] = 0.2
    assert not torch.allclose(actor(obs, phi)[0], actor(obs, seen)[0])
    assert not torch.allclose(critic(obs, phi, actions), critic(obs, seen, actions))
    assert not torch.allclose(critic(obs, phi, actions), critic(obs, phi, -actions))


def test_the_same_seed_gives_the_same_csv_and_evaluations_change_nothing(tmp_path, stub):
    settings = {"augment": True, "counts": "global"}
    first, second, other = (
        texts(train(tmp_path, name=f"run{i}", seed=seed, eval_every=every, **settings)[1])
        for i, (seed, every) in enumerate([(1, 0), (1, 16), (2, 0)])
    )
    assert first["updates.csv"] == second["updates.csv"] != other["updates.csv"]
    assert first["episodes.csv"] == second["episodes.csv"]
    evaluations = [int(line.split(",")[0]) for line in second["evals.csv"].splitlines()[1:]]
    assert evaluations == [16, 32, 48] and first["evals.csv"].count("\n") == 2


def test_the_greedy_half_of_an_evaluation_takes_tanh_of_the_mean(monkeypatch):
    """And the sampled half does not; the table of training is not written, the envs are closed."""
    args = Args(**TINY | {"counts": "global", "augment": True})
    actor, closed, taken = Actor(StubVecEnv(1), (1, *MAP), args), [], []

    def make_envs(args, num_envs):
        envs = StubVecEnv(num_envs, args.max_steps)
        step, envs.close = envs.step, lambda: closed.append(num_envs)

        def kept(actions):
            taken.append((torch.from_numpy(envs.observe()), actions))
            return step(actions)

        envs.step = kept
        return envs

    monkeypatch.setattr(sac_sofe_godot, "make_envs", make_envs)
    counts = torch.ones(1, *MAP).long()
    phis, augment = [], sac_sofe_godot.augment
    monkeypatch.setattr(
        sac_sofe_godot, "augment", lambda *args: phis.append(augment(*args)) or phis[-1]
    )
    metrics = sac_sofe_godot.evaluate(actor, counts, args)
    assert closed == [4] and (counts == 1).all()
    assert metrics["eval/greedy_length"] == metrics["eval/sampled_length"] == 6
    for (obs, actions), phi in zip(taken, phis, strict=True):
        with torch.no_grad():
            means = torch.tanh(actor(obs, phi)[0]).numpy()
        assert actions[:2] == pytest.approx(means[:2], abs=1e-6)
        assert np.abs(actions[2:] - means[2:]).max() > 1e-3
    assert phis[0].max() == pytest.approx(2**-0.5) and phis[0].min() == pytest.approx(3**-0.5)


@pytest.mark.parametrize("kind", ["episodic", "global"])
def test_an_evaluation_counts_on_in_a_table_of_each_env(monkeypatch, kind):
    """From the run's own table (global) or an empty one, s_0 included, step by step."""
    args, seen = Args(**TINY | {"counts": kind, "augment": True}), []
    actor = Actor(StubVecEnv(1), (1, *MAP), args)
    envs, augment = StubVecEnv(4, args.max_steps), sac_sofe_godot.augment

    def kept(*arguments):
        seen.append((envs.cells, augment(*arguments)))
        return seen[-1][1]

    monkeypatch.setattr(sac_sofe_godot, "make_envs", lambda args, num_envs: envs)
    monkeypatch.setattr(sac_sofe_godot, "augment", kept)
    trained = torch.zeros(4 if kind == "episodic" else 1, *MAP).long()
    trained[:, 7] = 3
    sac_sofe_godot.evaluate(actor, trained, args)
    tables = [trained[0].numpy() * (kind == "global") for _ in range(4)]
    assert len(seen) == 6
    for cells, phi in seen:
        for table, cell, shown in zip(tables, cells, phi, strict=True):
            table[tuple(cell)] += 1
            assert shown[0].numpy() == pytest.approx(1 / np.sqrt(1 + table))


@pytest.mark.parametrize(
    "settings",
    [{"counts": "global", "bonus": "salesman"}, {"log_every": 5}, {"augment": False}],
    ids=str,
)
def test_a_resumed_run_equals_one_that_never_stopped(tmp_path, stub, settings):
    settings = {"augment": True, "eval_every": 20} | settings
    metrics, whole = train(tmp_path, name="whole", total_timesteps=80, **settings)
    _, folder = train(tmp_path, name="parts", total_timesteps=40, **settings)
    assert sac_sofe_godot.main(Args(resume=str(folder), total_timesteps=80)) == metrics
    equal_runs(whole, folder)


def equal_runs(left, right):
    """CSV files, the replay buffer, weights and temperature."""
    assert texts(left) == texts(right)
    left, right = (torch.load(f / "checkpoint.pt", weights_only=True) for f in (left, right))
    assert left["rows"] == right["rows"] and len(left["ring"]) >= 6
    for name, column in left["ring"].items():
        assert torch.equal(column, right["ring"][name])
    assert left["state"]["log_alpha"] == right["state"]["log_alpha"] != 0
    for network in ("actor", "critic", "critic_target"):
        for name, weights in left["state"][network].items():
            assert torch.equal(weights, right["state"][network][name])


@pytest.mark.parametrize("buffer_size", [12, 40])
def test_a_stop_at_any_step_leaves_a_complete_state(tmp_path, monkeypatch, stub, buffer_size):
    """An interrupt late in a stretch of log_every updates: the rows of its start are all there."""
    settings = {"augment": True, "buffer_size": buffer_size, "log_every": 6, "eval_episodes": 0}
    settings |= {"total_timesteps": 96, "bonus": "salesman"}
    _, whole = train(tmp_path, name="whole", **settings)
    calls, loss_of = [], sac_sofe_godot.critic_loss

    def stopping(*args):
        calls.append(1)
        if len(calls) == 31:  # in update 35 of 48, the last of its stretch
            signal.raise_signal(signal.SIGINT)
        return loss_of(*args)

    with monkeypatch.context() as patch:
        patch.setattr(sac_sofe_godot, "critic_loss", stopping)
        with pytest.raises(SystemExit):
            train(tmp_path, name="cut", **settings)
    content = torch.load(tmp_path / "cut" / "checkpoint.pt", weights_only=True)
    assert content["global_step"] == 60
    sac_sofe_godot.main(Args(resume=str(tmp_path / "cut")))
    equal_runs(whole, tmp_path / "cut")


def test_a_loss_that_is_not_a_number_keeps_the_last_good_state(tmp_path, monkeypatch, stub, capfd):
    calls, loss_of = [], sac_sofe_godot.actor_loss

    def spoiled(*args):
        calls.append(1)
        return loss_of(*args) * (float("nan") if len(calls) > 11 else 1)

    with monkeypatch.context() as patch:
        patch.setattr(sac_sofe_godot, "actor_loss", spoiled)
        with pytest.raises(SystemExit) as end:
            train(tmp_path, augment=True)
    assert end.value.code == 1
    error = capfd.readouterr().err
    assert error.count("\n") == 1 and "is nan in the update at step 32" in error
    assert "--resume" in error
    content = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    assert content["global_step"] == 28
    for network in ("actor", "critic", "critic_target"):
        assert all(torch.isfinite(x).all() for x in content["state"][network].values())
    sac_sofe_godot.main(Args(resume=str(tmp_path / "run")))
    _, whole = train(tmp_path, name="whole", augment=True)
    equal_runs(whole, tmp_path / "run")


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"learning_starts": 1000, "total_timesteps": 1000}, "--learning-starts --total-timesteps"),
        ({"buffer_size": 7}, "--buffer-size --num-envs"),
        ({"tau": 1.1}, "--tau"),
        ({"tau": 0.0}, "--tau"),
        ({"gamma": 1.5}, "--gamma"),
        ({"gradient_steps": 0}, "--gradient-steps"),
        ({"minibatch_size": 0}, "--minibatch-size"),
        ({"num_envs": 0}, "--num-envs"),
        ({"max_steps": 0}, "--max-steps"),
        ({"action_repeat": 0}, "--action-repeat"),
        ({"log_every": 0}, "--log-every"),
        ({"beta": -1.0}, "--beta"),
        ({"learning_rate": float("nan")}, "--learning-rate"),
        ({"augment": True, "bonus": "none"}, "--augment --bonus"),
        ({"eval_every": 10, "eval_episodes": 0}, "--eval-every --eval-episodes"),
    ],
    ids=str,
)
def test_impossible_flags_are_refused_by_name(settings, names):
    with pytest.raises(ValueError) as error:
        Args(**settings)
    assert all(name in str(error.value) for name in names.split())


@pytest.mark.parametrize("line", ["--bonus smax", "--bonus srqt", "--total-timesteps 1e6"])
def test_unknown_values_end_with_a_message(line, capsys):
    with pytest.raises(SystemExit) as end:
        sac_sofe_godot.tyro.cli(Args, args=line.split())
    assert end.value.code == 2
    shown = capsys.readouterr()
    assert line.split()[0] in shown.out + shown.err


# --- Whole runs in the engine --------------------------------------------------------------------


def shell(**settings):
    line = [sys.executable, str(ROOT / "sac_sofe_godot.py")]
    for key, value in settings.items():
        flag = f"--{key.replace('_', '-')}"
        line += [flag] if value is True else [flag, str(value)]
    return line


def children_gone(children):
    _, alive = psutil.wait_procs(children, timeout=5)
    return not alive


def start_and_wait(tmp_path, name, lines, **settings):
    """A run in its own process, once it has written so many updates; and its engine."""
    process = subprocess.Popen(
        shell(**settings, runs_dir=tmp_path, run_name=name), stderr=subprocess.PIPE, text=True
    )
    updates = tmp_path / name / "updates.csv"
    deadline = time.monotonic() + 60
    while not (updates.exists() and updates.read_text().count("\n") > lines):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    return process, psutil.Process(process.pid).children(recursive=True)


@needs_engine
def test_a_run_in_the_map(tmp_path, monkeypatch):
    """Past the first update, with picture, evaluation and a resumed run that equals the whole."""
    drawn, draw_map = [], godot.draw_map
    monkeypatch.setattr(godot, "draw_map", lambda *args: drawn.append(args) or draw_map(*args))
    monkeypatch.setattr(runs, "draw_visits", DRAW_VISITS)
    settings = {"augment": True, "eval_episodes": 1, "max_steps": 9}
    metrics, whole = train(tmp_path, name="whole", total_timesteps=80, **settings)
    assert len(drawn) == 1 and (whole / "visits.png").stat().st_size > 10_000
    assert 0 < metrics["eval/greedy_coverage"] < 0.1
    _, folder = train(tmp_path, name="parts", total_timesteps=40, **settings)
    assert sac_sofe_godot.main(Args(resume=str(folder), total_timesteps=80)) == metrics
    equal_runs(whole, folder)
    assert not [c for c in psutil.Process().children() if "godot" in c.name()]


DRAW_VISITS = runs.draw_visits


@needs_engine
def test_a_stopped_run_saves_and_the_resumed_one_is_the_same(tmp_path):
    """SIGTERM to the run, or SIGKILL to its engine: one line, nothing left, and it goes on."""
    settings = TINY | {"total_timesteps": 240, "augment": True, "eval_episodes": 0}
    settings |= {"log_every": 4, "max_steps": 30}
    _, whole = train(tmp_path, name="whole", **settings)
    for who, status in (("python", 128 + signal.SIGTERM), ("engine", 1)):
        process, children = start_and_wait(tmp_path, who, 5, **settings)
        assert len(children) == 1 and "godot" in children[0].name()
        (process if who == "python" else children[0]).send_signal(
            signal.SIGTERM if who == "python" else signal.SIGKILL
        )
        _, error = process.communicate(timeout=20)
        assert process.returncode == status
        assert len(error.strip().splitlines()) == 1 and "--resume" in error
        assert who == "python" or "error: the engine has gone (killed by SIGKILL)" in error
        assert children_gone(children)
        content = torch.load(tmp_path / who / "checkpoint.pt", weights_only=True)
        assert 40 <= content["global_step"] < 240
        sac_sofe_godot.main(Args(resume=str(tmp_path / who)))
        equal_runs(whole, tmp_path / who)


def one_line(result, *words):
    lines = result.stderr.strip().splitlines()
    assert result.returncode == 1 and len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ") and all(word in lines[0] for word in words)


def test_a_missing_engine_is_one_line_before_a_folder_is_made(tmp_path):
    line = shell(**TINY, runs_dir=tmp_path, engine_path=tmp_path / "nothing")
    result = subprocess.run(line, capture_output=True, text=True, timeout=60)
    one_line(result, str(tmp_path / "nothing"), "apt-get install godot3-server", "--engine-path")
    assert not list(tmp_path.iterdir())


def test_a_program_that_is_no_engine_is_one_line(tmp_path):
    program = tmp_path / "engine"
    program.write_text("#!/bin/sh\necho I am no engine\nexit 3\n")
    program.chmod(0o755)
    with pytest.raises(SystemExit, match=r"^error: .*exit status 3.*I am no engine$"):
        train(tmp_path / "runs", engine_path=str(program))
    assert not (tmp_path / "runs").exists()


def test_an_engine_that_dies_in_the_evaluation_keeps_what_was_learned(
    tmp_path, monkeypatch, stub, capfd
):
    def dying(*args):
        raise godot.EngineError("the engine has gone (exit status 1)", "first\nsecond")

    with monkeypatch.context() as patch:
        patch.setattr(sac_sofe_godot, "evaluate", dying)
        with pytest.raises(SystemExit) as end:
            train(tmp_path)
    assert end.value.code == 1
    error = capfd.readouterr().err
    assert error.count("\n") == 1 and "first / second; continue with --resume" in error
    metrics = sac_sofe_godot.main(Args(resume=str(tmp_path / "run")))
    assert metrics == train(tmp_path, name="whole")[0]


def test_an_engine_that_dies_while_a_run_is_resumed_is_not_called_a_damaged_file(
    tmp_path, monkeypatch, stub, capfd
):
    _, folder = train(tmp_path)

    def dead(self, state):
        raise godot.EngineError("the engine has gone (exit status 1)")

    monkeypatch.setattr(StubVecEnv, "set_state", dead)
    with pytest.raises(SystemExit, match=r"^error: the engine has gone"):
        sac_sofe_godot.main(Args(resume=str(folder)))


# --- Learning ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_sofe_explores_the_plain_better_than_random_actions(tmp_path, stub):
    stub(speed=3)
    settings = {"max_steps": 100, "num_envs": 8, "minibatch_size": 64, "learning_starts": 800}
    settings |= {"learning_rate": 0.003}  # the temperature falls from 1 on at that pace
    settings |= {"channels": 8, "embedding_dim": 32, "hidden_dim": 64, "eval_episodes": 8}
    settings |= {
        "total_timesteps": 16_000,
        "augment": True,
        "buffer_size": 50_000,
        "log_every": 100,
    }
    metrics, folder = train(tmp_path, **settings)
    episodes = rows(folder, "episodes.csv")
    random = np.mean([float(row["coverage"]) for row in episodes if int(row["step"]) <= 800])
    assert metrics["eval/sampled_coverage"] > 1.5 * random


def test_the_temperature_starts_where_it_is_told(stub, tmp_path):
    stub()
    _, folder = train(tmp_path, init_alpha=0.02, log_every=1)
    assert float(rows(folder, "updates.csv")[0]["alpha"]) == pytest.approx(0.02, rel=1e-4)
