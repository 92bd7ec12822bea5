"""DQN against stable-baselines3, its replay buffer against lists, its schedules; whole runs."""

import copy
import math
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from run_files import CSVS, has_own_weights, quick, rows, texts  # noqa: F401, quick is a fixture
from stable_baselines3 import DQN
from stable_baselines3.common.logger import configure
from stable_baselines3.common.vec_env import DummyVecEnv
from test_bonuses import LEVEL, slow_bonus, slow_phi
from test_targets import PHI, OurTowers, StubEnv

import dqn_sofe
from common import runs
from common.mazes import MazeVecEnv
from dqn_sofe import Args, QNetwork, ReplayBuffer, dqn_loss

ROOT = Path(__file__).parent.parent
TINY = {
    "num_envs": 2,
    "train_frequency": 2,
    "gradient_steps": 2,
    "minibatch_size": 4,
    "learning_starts": 16,
    "buffer_size": 40,
    "target_interval": 16,
    "log_every": 2,
    "network": "mlp",
    "channels": 4,
    "embedding_dim": 8,
    "max_steps": 6,
    "engine": "numpy",
    "total_timesteps": 96,
    "eval_episodes": 2,
    "device": "cpu",
}


def train(tmp_path, name="run", **settings):
    args = Args(**(TINY | {"runs_dir": str(tmp_path), "run_name": name} | settings))
    return dqn_sofe.main(args), tmp_path / name


# --- Against stable-baselines3 -------------------------------------------------------------------


def make_peer(args, envs, q_network, target_network):
    """stable-baselines3's DQN with its own Adam, and the weights of our networks."""
    peer = DQN(
        "MultiInputPolicy",
        DummyVecEnv([lambda: StubEnv(envs)]),
        buffer_size=10,
        gamma=args.gamma,
        tau=args.tau,
        target_update_interval=args.target_interval,
        exploration_fraction=args.exploration_fraction,
        policy_kwargs={
            "features_extractor_class": OurTowers,
            "features_extractor_kwargs": {"agent": q_network},
            "normalize_images": False,
        },
        device="cpu",
    )
    peer.set_logger(configure(None, []))
    peer.n_envs = args.num_envs
    with torch.no_grad():
        for network, theirs in ((q_network, peer.q_net), (target_network, peer.q_net_target)):
            for left, right in pairs(network, theirs):
                right.copy_(left)
    return peer


def pairs(network, theirs):
    """Our parameters beside those of the peer."""
    towers = theirs.features_extractor
    parts = (towers.obs_tower, towers.phi_tower, theirs.q_net)
    right = [weights for part in parts for weights in part.parameters()]
    assert sum(p.numel() for p in theirs.parameters()) == sum(p.numel() for p in right)
    return list(zip(network.parameters(), right, strict=True))


def train_peer(peer, batch, gamma):
    """One gradient step of stable-baselines3's own DQN.train on our batch."""
    dones = (batch["discounts"] == 0).float()
    discounts = torch.where(batch["discounts"] == 0, gamma, batch["discounts"])
    sampled = SimpleNamespace(
        observations={name: batch[name] for name in ("obs", "phi")},
        next_observations={name: batch[f"next_{name}"] for name in ("obs", "phi")},
        actions=batch["actions"][:, None],
        rewards=batch["rewards"][:, None],
        dones=dones[:, None],
        discounts=None if torch.all(discounts == gamma) else discounts[:, None],
    )
    peer.replay_buffer.sample = lambda batch_size, env=None: sampled
    peer.train(1, len(dones))
    return peer.logger.name_to_value["train/loss"]


def random_batch(M, scale=3.0):
    maps = {name: torch.randint(0, 2, (M, 2, 32, 32)).byte() for name in ("obs", "next_obs")}
    maps |= {name: torch.rand(M, 1, 32, 32) for name in ("phi", "next_phi")}
    return maps | {
        "actions": torch.randint(0, 4, (M,)),
        "rewards": torch.randn(M) * scale,
        "discounts": torch.where(torch.rand(M) < 0.3, 0.0, 0.99),
    }


def test_loss_gradient_and_steps_are_those_of_stable_baselines3():
    """Three steps with rewards on both sides of the knee of the Huber loss, some clipped."""
    torch.manual_seed(0)
    args = Args(augment=True, num_envs=1, channels=8, embedding_dim=16, max_grad_norm=0.2)
    envs = MazeVecEnv(1, engine="numpy")
    network, target = QNetwork(envs, PHI, args), QNetwork(envs, PHI, args)
    peer = make_peer(args, envs, network, target)
    peer.max_grad_norm = 0.2
    network, target = (x.to(memory_format=torch.channels_last) for x in (network, target))
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-4, eps=1e-8)
    norms = []
    for scale in (3.0, 0.3, 10.0):
        batch = random_batch(32, scale)
        theirs = train_peer(peer, batch, args.gamma)
        loss, terms = dqn_loss(network, target, batch, args)
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(network.parameters(), 0.2))
        optimizer.step()
        assert loss.item() == pytest.approx(theirs, rel=1e-5)
        assert terms["td_loss"] == loss
        for ours, other in pairs(network, peer.q_net):
            assert torch.allclose(ours.grad, other.grad, atol=1e-5)
            assert torch.allclose(ours, other, atol=1e-5)
    assert max(norms) > 0.2


@pytest.mark.parametrize("double_q", [False, True])
def test_the_loss_is_the_slow_one(double_q):
    """One transition after the other, with the definition of the Huber loss."""
    torch.manual_seed(1)
    args = Args(augment=True, channels=4, embedding_dim=8, double_q=double_q)
    envs = MazeVecEnv(1, engine="numpy")
    network, target = QNetwork(envs, PHI, args), QNetwork(envs, PHI, args)
    batch = random_batch(24, 1.0)
    losses, values, differ = [], [], 0
    with torch.no_grad():
        for i in range(24):
            now = network(batch["obs"][i : i + 1], batch["phi"][i : i + 1])[0].tolist()
            then = [
                x(batch["next_obs"][i : i + 1], batch["next_phi"][i : i + 1])[0].tolist()
                for x in (network, target)
            ]
            best = [max(range(4), key=lambda a, q=q: q[a]) for q in then]
            differ += best[0] != best[1]
            following = then[1][best[0 if double_q else 1]]
            goal = batch["rewards"][i].item() + batch["discounts"][i].item() * following
            error = abs(now[batch["actions"][i]] - goal)
            losses.append(error**2 / 2 if error < 1 else error - 0.5)
            values.append(now[batch["actions"][i]])
    assert differ > 3
    loss, terms = dqn_loss(network, target, batch, args)
    assert loss.item() == pytest.approx(np.mean(losses), rel=1e-5)
    assert terms["q_values"].item() == pytest.approx(np.mean(values), rel=1e-4)


@pytest.mark.parametrize(("tau", "n_step"), [(1.0, 1), (0.3, 1), (1.0, 3)])
def test_updates_of_main_are_those_of_stable_baselines3(monkeypatch, tmp_path, tau, n_step):
    """Adam, clipping, when and how the target moves, and epsilon, as they stand in `main`."""
    events, ours = [], []
    step, sample, loss_of = MazeVecEnv.step, ReplayBuffer.sample, dqn_sofe.dqn_loss

    def step_kept(self, actions):
        events.append("step")
        return step(self, actions)

    def sample_kept(self, M, device):
        batch = sample(self, M, device)
        events.append({name: tensor.clone() for name, tensor in batch.items()})
        return batch

    def loss_kept(*args):
        if not ours:
            ours.extend([*args[:2], *copy.deepcopy(args[:2])])
        loss, terms = loss_of(*args)
        return 40 * loss, terms | {"td_loss": 40 * loss.detach()}

    monkeypatch.setattr(MazeVecEnv, "step", step_kept)
    monkeypatch.setattr(ReplayBuffer, "sample", sample_kept)
    monkeypatch.setattr(dqn_sofe, "dqn_loss", loss_kept)
    settings = {"augment": True, "tau": tau, "n_step": n_step, "num_envs": 4, "log_every": 1}
    settings |= {"channels": 8, "embedding_dim": 16, "minibatch_size": 12, "gradient_steps": 3}
    settings |= {"exploration_fraction": 0.5, "gamma": 0.9, "eval_episodes": 0, "network": "cnn"}
    _, folder = train(tmp_path, **settings)
    network, target, first, first_target = ours
    for x in (first, first_target):
        x.to(memory_format=torch.contiguous_format)

    args = Args(**(TINY | settings))
    peer = make_peer(args, MazeVecEnv(1, engine="numpy"), first, first_target)
    smooth_l1 = torch.nn.functional.smooth_l1_loss
    monkeypatch.setattr(torch.nn.functional, "smooth_l1_loss", lambda *x: 40 * smooth_l1(*x))
    norms, epsilons, clip = [], [], torch.nn.utils.clip_grad_norm_
    monkeypatch.setattr(
        torch.nn.utils, "clip_grad_norm_", lambda *x: norms.append(clip(*x)) or norms[-1]
    )
    peer.exploration_rate, taken, losses = 1.0, 0, [[]]
    for event in events:
        if event == "step":
            epsilons.append(peer.exploration_rate)
            taken += 4
            peer._current_progress_remaining = 1 - taken / 96
            peer._on_step()
            if taken % 8 == 4:
                losses.append([])
        else:
            losses[-1].append(train_peer(peer, event, 0.9))
    assert taken == 96 and max(norms) > 10
    losses = [part for part in losses if part]
    updates = rows(folder, "updates.csv")
    # more than learning_starts steps, and n_step rows, as in stable-baselines3
    assert [int(row["step"]) for row in updates] == list(range(24, 97, 8))
    assert [len(part) for part in losses] == [3] * len(updates)
    for row, part in zip(updates, losses, strict=True):
        assert float(row["td_loss"]) == pytest.approx(np.mean(part), rel=1e-4)
        assert float(row["epsilon"]) == pytest.approx(epsilons[int(row["step"]) // 4 - 1], rel=1e-4)
    for mine, theirs, old in ((network, peer.q_net, first), (target, peer.q_net_target, first)):
        for left, right in pairs(mine, theirs):
            assert torch.allclose(left, right, atol=1e-5)
        moved = zip(mine.parameters(), old.parameters(), strict=True)
        assert any(not torch.allclose(left, right, atol=1e-4) for left, right in moved)


# --- The replay buffer ---------------------------------------------------------------------------

N = 3
NEAR = LEVEL.replace("W..GW", "WG..W")  # a goal 2 moves from the start


@pytest.fixture
def recorded(monkeypatch, tmp_path):
    """Train in a 5x5 maze with goal, and write down by other means what the buffer should hold.

    The task pays 4 times a running number, from which a sampled transition is recognised. With no
    exploration all actions come from the network, which here answers at random, so that all phi
    that are acted on pass through it.
    """

    def run(**settings):
        log = SimpleNamespace(steps=[], acted=[], samples=[], bonuses=[], replay=[])
        sample, bonus_of = ReplayBuffer.sample, dqn_sofe.compute_bonus

        def make_envs(args, num_envs):
            envs = MazeVecEnv(num_envs, level=NEAR, goal=True, max_steps=7, engine="numpy")
            step = envs.step

            def kept(actions):
                obs, rewards, *rest = step(actions)
                log.goal = rewards.max()
                rewards = 4.0 * (len(log.steps) * N + np.arange(N))
                log.steps.append(copy.deepcopy((actions, obs, rewards, *rest)))
                return obs, rewards, *rest

            envs.step = kept
            return envs

        class Network(dqn_sofe.QNetwork):
            def forward(self, obs, phi):
                if len(obs) == N and not torch.is_grad_enabled():
                    log.acted.append((obs.clone(), phi.clone()))
                    return torch.rand(N, 4)
                return super().forward(obs, phi)

        def sample_kept(self, M, device):
            batch = sample(self, M, device)
            log.samples.append((int(self.total), {k: v.clone() for k, v in batch.items()}))
            return batch

        class Kept(ReplayBuffer):
            def __init__(self, *args):
                super().__init__(*args)
                log.replay.append(self)

        def bonus_kept(*args):
            log.bonuses.append(bonus_of(*args))
            return log.bonuses[-1]

        monkeypatch.setattr(dqn_sofe, "make_envs", make_envs)
        monkeypatch.setattr(dqn_sofe, "QNetwork", Network)
        monkeypatch.setattr(Kept, "sample", sample_kept)
        monkeypatch.setattr(dqn_sofe, "ReplayBuffer", Kept)
        monkeypatch.setattr(dqn_sofe, "compute_bonus", bonus_kept)
        fixed = {"num_envs": N, "epsilon_start": 0.0, "epsilon_end": 0.0, "learning_starts": 0}
        fixed |= {"minibatch_size": 16, "log_every": 3, "eval_episodes": 0, "augment": True}
        fixed |= {"buffer_size": 61, "total_timesteps": 252, "gradient_steps": 3}
        _, log.folder = train(tmp_path, **(fixed | settings))
        log.replay = log.replay[0]
        return log

    return run


def phi_of(visits, bonus, shape):
    """As a dense layer gets it, see --network in TINY."""
    phi = slow_phi(visits, bonus, shape)
    return phi / phi.size**0.5


def expected_transitions(log, bonus, counts, beta):
    """A list of what each env did in each step, from positions, and what the network was shown."""
    shape = (5, 5)
    tables = [Counter() for _ in range(N)] if counts == "episodic" else [Counter()] * N
    for env in range(N):
        tables[env][1, 1] += 1
    transitions = []
    for t, (actions, next_obs, paid, terminated, truncated, info) in enumerate(log.steps):
        obs, phi = log.acted[t]
        ended = terminated | truncated
        ends = info["final_info"]["cell"] if ended.any() else info["cell"]
        cells = np.where(ended[:, None], ends, info["cell"]).tolist()
        for env in range(N):
            value = beta * slow_bonus(tables[env], tuple(cells[env]), bonus, shape)
            exact = np.float32(paid[env]) + (beta * log.bonuses[t][env]).numpy()
            assert exact - paid[env] == pytest.approx(value, abs=2e-4)
            assert phi[env].numpy() == pytest.approx(phi_of(tables[env], bonus, shape), abs=1e-6)
            transitions.append({"reward": exact, "action": actions[env]})
            transitions[-1] |= {"obs": obs[env], "phi": phi[env], "terminated": terminated[env]}
            transitions[-1] |= {"ended": ended[env], "next_obs": next_obs[env]}
        for env in range(N):
            tables[env][tuple(cells[env])] += 1
        for env in np.flatnonzero(ended):
            transitions[env - N]["next_obs"] = info["final_obs"][env]
            transitions[env - N]["next_phi"] = phi_of(tables[env], bonus, shape)
        for env in np.flatnonzero(ended):
            if counts == "episodic":
                tables[env] = Counter()
            tables[env][1, 1] += 1
        for env in np.flatnonzero(~ended):
            if t + 1 < len(log.acted):  # exactly what the next action was taken on
                transitions[env - N]["next_phi"] = log.acted[t + 1][1][env].numpy()
            else:
                transitions[env - N]["next_phi"] = phi_of(tables[env], bonus, shape)
    return transitions


@pytest.mark.parametrize("bonus", ["sqrt", "smax"])
@pytest.mark.parametrize("counts", ["episodic", "global"])
@pytest.mark.parametrize("buffer_size", [61, 1000])
def test_every_transition_is_as_it_was_lived(recorded, bonus, counts, buffer_size):
    """All that is stored at the end, and all that was ever sampled, rings wrapped around or not."""
    log = recorded(bonus=bonus, counts=counts, beta=0.5, buffer_size=buffer_size)
    transitions, replay, total = expected_transitions(log, bonus, counts, 0.5), log.replay, 84
    assert len(transitions) == total * N == 3 * 84 and int(replay.total) == total
    assert replay.packed and replay.capacity == buffer_size // N
    ends = Counter((one["terminated"], one["ended"]) for one in transitions)
    assert ends[True, True] > 5 and ends[False, True] > 5

    def same_phi(found, one, last):
        if one["ended"] or last:
            assert found.numpy() == pytest.approx(one["next_phi"], abs=1e-6)
        else:
            assert np.array_equal(found, one["next_phi"])

    kept = min(replay.L, total)
    assert kept == (20 + 2 * 3 if buffer_size == 61 else total)
    for row in range(total - kept, total):
        at = np.full(N, row % replay.L), np.arange(N)
        obs, next_obs = (replay.observations(name, *at) for name in ("obs", "next_obs"))
        phi, next_phi = replay.phi(*at, 0), replay.phi(*at, 1)
        assert phi.dtype == next_phi.dtype == torch.float32
        for env in range(N):
            one = transitions[row * N + env]
            assert np.array_equal(obs[env], one["obs"]) and torch.equal(phi[env], one["phi"])
            assert np.array_equal(next_obs[env], one["next_obs"])
            same_phi(next_phi[env], one, row == total - 1)
        stored = {name: column[row % replay.L] for name, column in replay.columns.items()}
        here = transitions[row * N :][:N]
        assert stored["actions"].tolist() == [one["action"] for one in here]
        assert stored["rewards"].tolist() == [one["reward"] for one in here]
        assert stored["terminated"].tolist() == [one["terminated"] for one in here]

    seen, old = set(), 0
    assert len(log.samples) > 100
    for rows_done, batch in log.samples:
        numbers = (batch["rewards"] // 4).long().tolist()
        oldest = max(0, rows_done - buffer_size // N)
        assert min(numbers) >= oldest * N and max(numbers) < rows_done * N
        old += sum(number < (oldest + 2) * N for number in numbers) if oldest else 0
        seen |= set(numbers)
        for i, number in enumerate(numbers):
            one = transitions[number]
            assert batch["rewards"][i] == one["reward"] and batch["actions"][i] == one["action"]
            assert torch.equal(batch["obs"][i], one["obs"])
            assert torch.equal(batch["phi"][i], one["phi"])
            assert np.array_equal(batch["next_obs"][i], one["next_obs"])
            same_phi(batch["next_phi"][i], one, number >= (total - 1) * N)
            assert batch["discounts"][i].item() == pytest.approx(0.99 * (not one["terminated"]))
    assert len(seen) > 0.9 * (total - 2) * N
    assert old > 10 or buffer_size > 61


def test_the_bonus_is_stored_as_it_was_paid(recorded):
    """With the beta of its time, and not computed anew from today's counts."""
    log = recorded(
        anneal_beta=True, beta=0.7, ext_coef=0.0, counts="global", buffer_size=1000, log_every=1
    )
    for t, paid in enumerate(log.bonuses):
        beta = 0.7 * (1 - (t // 2) / 42)
        expected = (beta * paid).numpy()
        assert log.replay.columns["rewards"][t] == pytest.approx(expected, rel=1e-6)
    assert len(log.bonuses) == 84
    paid = log.replay.columns["rewards"][:84]
    totals, episodes = np.zeros(N), []
    for t, (_, _, _, terminated, truncated, _) in enumerate(log.steps):
        totals += paid[t]
        for env in np.flatnonzero(terminated | truncated):
            episodes.append(totals[env])
            totals[env] = 0
    logged = [float(row["bonus"]) for row in rows(log.folder, "episodes.csv")]
    assert logged == pytest.approx(episodes, rel=1e-4)
    for row in rows(log.folder, "updates.csv"):
        t = int(row["step"]) // N
        raw = torch.stack(log.bonuses[t - 2 : t]).mean().item()
        assert float(row["raw_bonus"]) == pytest.approx(raw, rel=1e-4)
        assert float(row["bonus"]) == pytest.approx(paid[t - 2 : t].mean(), rel=1e-4)
    for rows_done, batch in log.samples:
        assert set(batch["rewards"].tolist()) <= set(
            log.replay.columns["rewards"][:rows_done].flatten().tolist()
        )


def test_initial_weights_are_pytorchs_own():
    """But those of a dense layer on the maps, which have a deviation of 0.1."""
    torch.manual_seed(0)
    envs = MazeVecEnv(1, engine="numpy")
    sizes = dict(augment=True, channels=16, embedding_dim=64, num_threads=1)
    has_own_weights(QNetwork(envs, PHI, Args(**sizes)))
    dense = QNetwork(envs, PHI, Args(network="mlp", **sizes))
    has_own_weights(dense.head)
    for tower in (dense.obs_tower, dense.phi_tower):
        assert tower[1].weight.std().item() == pytest.approx(0.1, rel=0.02)


def test_more_visits_than_16_bits_are_refused():
    args = Args(augment=True, num_envs=1, num_threads=1, buffer_size=100)
    replay = ReplayBuffer(MazeVecEnv(1, engine="numpy"), (1, 32, 32), args)
    counts = np.zeros((1, 32, 32), np.int64)
    counts[0, 3, 3] = 65535
    replay.put(counts=counts)
    assert replay.columns["counts"][0, 0, 3, 3] == 65535
    with pytest.raises(SystemExit, match="--counts global"):
        replay.put(counts=counts + 1)


class CounterEnv(gym.vector.VectorEnv):
    """What is seen is the number of steps so far, plus 0.25 for floats; 5 of them are an episode.

    The episodes of even envs end in a termination, those of odd ones in a truncation.
    """

    def __init__(self, num_envs, dtype=np.uint8):
        self.num_envs, self.offset = num_envs, 0.25 if dtype == np.float32 else 0
        self.single_observation_space = gym.spaces.Box(0, 255, (1, 2, 3), dtype)
        self.single_action_space = gym.spaces.Discrete(2)
        self.reachable = np.ones((1, 6), bool)

    def cells(self, at):
        return np.stack([np.zeros_like(at), at], axis=1)

    def observe(self):
        return self.show(self.at)

    def show(self, at):
        obs = np.zeros((self.num_envs, 1, 2, 3), self.single_observation_space.dtype)
        obs += at[:, None, None, None].astype(obs.dtype)
        return obs + np.asarray(self.offset, obs.dtype)

    def reset(self, seed=None, options=None):
        self.at = np.zeros(self.num_envs, np.int64)
        return self.observe(), {"cell": self.cells(self.at)}

    def step(self, actions):
        self.at = self.at + 1
        ended, at = self.at == 5, self.at
        self.at = np.where(ended, 0, at)
        info = {"cell": self.cells(self.at)}
        if ended.any():
            info["final_obs"] = np.array(list(self.show(at)), object)
            for env, obs in enumerate(self.show(at)):
                info["final_obs"][env] = obs
            numbers = np.full(self.num_envs, 5.0)
            episode = {"r": numbers, "l": numbers, "coverage": numbers / 5}
            info["final_info"] = {"cell": self.cells(at), "episode": episode}
        even = np.arange(self.num_envs) % 2 == 0
        return self.observe(), np.ones(self.num_envs), ended & even, ended & ~even, info

    def get_state(self):
        return {"at": self.at}

    def set_state(self, state):
        self.at = np.asarray(state["at"])


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_in_a_counter_the_next_observation_is_one_more(monkeypatch, tmp_path, dtype):
    """Observations that are not of zeros and ones, unpacked: a whole run with n_step 1."""
    batches, replays, sample = [], [], ReplayBuffer.sample

    def sample_kept(self, M, device):
        replays.append(self)
        batches.append(sample(self, M, device))
        return batches[-1]

    monkeypatch.setattr(ReplayBuffer, "sample", sample_kept)
    monkeypatch.setattr(dqn_sofe, "make_envs", lambda args, n: CounterEnv(n, dtype))
    train(tmp_path, num_envs=4, augment=True, eval_episodes=0, minibatch_size=32)
    assert not replays[0].packed and replays[0].columns["obs"].dtype == dtype
    joined = {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}
    offset = 0.25 if dtype == np.float32 else 0
    at = joined["obs"].flatten(1)
    assert joined["obs"].numpy().dtype == dtype and set((at - offset).flatten().tolist()) == set(
        range(5)
    )
    assert torch.equal(joined["next_obs"], joined["obs"] + 1)
    # phi is the map of where the episode has been, one cell longer after each step
    for maps, last in ((joined["phi"], at), (joined["next_phi"], at + 1)):
        visited = torch.arange(6) <= (last[:, :1] - offset)
        assert torch.allclose(maps.flatten(1), torch.where(visited, 0.5**0.5, 1.0) / 6**0.5)
    zero = joined["discounts"] == 0
    assert zero.any() and set((at[zero, 0] - offset).tolist()) == {4}
    assert set((at[joined["discounts"] == joined["discounts"].max(), 0] - offset).tolist()) == set(
        range(5)
    )


@pytest.mark.parametrize("n_step", [1, 2, 5])
def test_n_step_targets_are_the_slow_sums(n_step):
    """Random ends of both kinds, a ring that has wrapped around, each start row and env."""
    rng, envs_num, total, capacity = np.random.default_rng(n_step), 3, 150, 40
    args = Args(num_envs=envs_num, n_step=n_step, buffer_size=envs_num * capacity, gamma=0.9)
    args.train_frequency, args.log_every = 2, 3
    envs = CounterEnv(envs_num, np.float32)
    replay, lived = ReplayBuffer(envs, (envs_num, 1, 6), args), []
    for row in range(total):
        code = (row * envs_num + np.arange(envs_num)).astype(np.float32)
        obs = np.broadcast_to(code[:, None, None, None], (envs_num, 1, 2, 3))
        draw = rng.random(envs_num)
        one = {"rewards": rng.normal(size=envs_num).astype(np.float32), "terminated": draw < 0.15}
        one["ended"] = draw < 0.3
        lived.append(one)
        replay.put(obs=obs, actions=code.astype(int) % 7)
        replay.put(next_obs=obs + 0.5, visits=None, **one)
        replay.total += 1
        if row < n_step:
            continue
        if row in (n_step, capacity, total - 1):
            batch, found = replay.sample(4000, torch.device("cpu")), Counter()
            for i in range(4000):
                code = int(batch["obs"][i].flatten()[0])
                first, env = divmod(code, envs_num)
                found[first] += 1
                value, discount = 0.0, 1.0
                for last in range(first, first + n_step):
                    value += discount * lived[last]["rewards"][env]
                    discount *= 0.9
                    if lived[last]["ended"][env]:
                        discount *= not lived[last]["terminated"][env]
                        break
                assert batch["actions"][i] == code % 7
                assert batch["rewards"][i].item() == pytest.approx(value, abs=1e-5)
                assert batch["discounts"][i].item() == pytest.approx(discount, abs=1e-6)
                assert batch["next_obs"][i].unique().item() == last * envs_num + env + 0.5
            possible = range(max(0, row + 1 - capacity), row + 2 - n_step)
            assert set(found) == set(possible)
            mean = 4000 / len(possible)
            assert all(abs(times - mean) < 5 * math.sqrt(mean) for times in found.values())
    assert replay.phi(np.array([0, 1]), np.array([0, 0]), 1).shape == (2, 0, 1, 1)


# --- Memory --------------------------------------------------------------------------------------


def lazily(monkeypatch, free=2**36):
    """Arrays of which no page is taken, on a machine with so many bytes free."""
    told, check, zeros = [], runs.check_memory, np.zeros

    def check_kept(what, num_bytes, device):
        told.append(num_bytes)
        check(what, num_bytes, device)

    def thin(shape, dtype=float):
        big = np.prod(shape, dtype=float) > 1e6
        return np.broadcast_to(zeros((), dtype), shape) if big else zeros(shape, dtype)

    monkeypatch.setattr(runs, "check_memory", check_kept)
    monkeypatch.setattr(runs.psutil, "virtual_memory", lambda: SimpleNamespace(available=free))
    monkeypatch.setattr(np, "zeros", thin)
    return told


@pytest.mark.parametrize(("counts", "tables"), [("episodic", 16), ("global", 1)])
def test_a_million_transitions_fit_in_4_gigabytes(monkeypatch, capsys, counts, tables):
    envs = MazeVecEnv(16, engine="numpy")
    told = lazily(monkeypatch)
    args = Args(augment=True, counts=counts)
    replay = ReplayBuffer(envs, (tables, 32, 32), args)
    assert args.num_envs == 16 and replay.capacity * 16 == 1_000_000
    taken = sum(column.nbytes for column in replay.columns.values())
    assert told == [taken] and taken < 4e9
    assert len({len(column) for column in replay.columns.values()}) == 1
    printed = re.search(r"replay buffer: (\d+) MiB of 65536 MiB free", capsys.readouterr().out)
    assert int(printed.group(1)) == round(taken / 2**20)


def test_a_buffer_larger_than_the_memory_is_refused(monkeypatch, tmp_path):
    told = lazily(monkeypatch, free=2**30)
    made, thin = [], np.zeros

    def counted(shape, *args, **kwargs):
        made.append(np.prod(shape, dtype=float))
        return thin(shape, *args, **kwargs)

    monkeypatch.setattr(np, "zeros", counted)
    with pytest.raises(SystemExit) as end:
        train(tmp_path, augment=True, buffer_size=10**9)
    assert str(end.value).startswith("error: the replay buffer needs ")
    assert str(end.value).endswith("GiB and 1.0 GiB are free") and "\n" not in str(end.value)
    assert told[0] > 1e12 and max(made, default=0) < 1e6
    assert not list(tmp_path.iterdir())


# --- Schedules -----------------------------------------------------------------------------------


def test_epsilon_falls_linearly_over_environment_steps_and_starts_at_random(monkeypatch, tmp_path):
    """512 envs and a network that always prefers action 0: shares of other actions, by step."""
    envs_num, total, starts = 512, 512 * 40, 512 * 8
    taken, losses = [], []
    loss_of = dqn_sofe.dqn_loss

    def make_envs(args, num_envs):
        envs = MazeVecEnv(num_envs, level=LEVEL, max_steps=100, engine="numpy")
        step = envs.step
        envs.step = lambda actions: taken.append(np.mean(actions != 0)) or step(actions)
        return envs

    class Network(dqn_sofe.QNetwork):
        def forward(self, obs, phi):
            if len(obs) == envs_num and not torch.is_grad_enabled():
                return torch.tensor([[1.0, 0, 0, 0]]).expand(envs_num, 4)
            return super().forward(obs, phi)

    def counted(*args):
        losses.append(len(taken))
        return loss_of(*args)

    monkeypatch.setattr(dqn_sofe, "make_envs", make_envs)
    monkeypatch.setattr(dqn_sofe, "QNetwork", Network)
    monkeypatch.setattr(dqn_sofe, "dqn_loss", counted)
    settings = {"num_envs": envs_num, "total_timesteps": total, "learning_starts": starts}
    settings |= {"exploration_fraction": 0.5, "epsilon_start": 0.8, "epsilon_end": 0.1}
    settings |= {"train_frequency": 4, "gradient_steps": 3, "log_every": 1, "eval_episodes": 0}
    _, folder = train(tmp_path, **settings, buffer_size=10_000)
    epsilons = [0.8 - 0.7 * min(1, t / 20) for t in range(40)]
    for t, share in enumerate(taken):
        chance = 0.75 * (1 if t < 8 else epsilons[t])
        assert abs(share - chance) < 4.5 * math.sqrt(chance * (1 - chance) / envs_num), t
    assert losses == [t for t in range(12, 41, 4) for _ in range(3)]
    updates = rows(folder, "updates.csv")
    assert [int(row["step"]) for row in updates] == [512 * t for t in range(12, 41, 4)]
    for row in updates:  # the last epsilon before the row
        assert float(row["epsilon"]) == pytest.approx(epsilons[int(row["step"]) // 512 - 1])


@pytest.mark.parametrize("target_interval", [4, 24, 30])
def test_the_target_moves_once_in_target_interval_environment_steps(
    monkeypatch, tmp_path, target_interval
):
    """With 4 envs, whether the interval is a multiple of them or not."""
    networks, weights, loss_of = [], [], dqn_sofe.dqn_loss
    step = MazeVecEnv.step

    def loss_kept(*args):
        networks[:] = args[:2]
        return loss_of(*args)

    def step_kept(self, actions):
        weights.append([list(map(torch.clone, x.parameters())) for x in networks])
        return step(self, actions)

    monkeypatch.setattr(dqn_sofe, "dqn_loss", loss_kept)
    monkeypatch.setattr(MazeVecEnv, "step", step_kept)
    settings = {"num_envs": 4, "train_frequency": 1, "gradient_steps": 1, "learning_starts": 0}
    settings |= {"tau": 0.5, "learning_rate": 0.01, "eval_episodes": 0}
    train(tmp_path, **settings, target_interval=target_interval, total_timesteps=120)
    moved = []
    for number, (before, after) in enumerate(pairwise(weights)):
        if not before:
            continue
        done = 4 * (number + 1)  # environment steps when `after` was seen
        expected = done // target_interval > (done - 4) // target_interval
        for online, old, new in zip(before[0], before[1], after[1], strict=True):
            assert torch.allclose(new, (online + old) / 2 if expected else old, atol=1e-6)
        moved += [done] if expected else []
    assert len(moved) >= 3 and len(weights) == 30


# --- Whole runs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("env_id", ["Maze1-v0", "DeepSea-v0"])
@pytest.mark.parametrize(
    ("bonus", "augment"),
    [("none", False)] + [(b, a) for b in ("sqrt", "salesman", "smax") for a in (False, True)],
)
def test_every_bonus_with_and_without_sofe(tmp_path, env_id, bonus, augment):
    counts, network = ("global", "mlp") if env_id == "DeepSea-v0" else ("episodic", "cnn")
    settings = {"env_id": env_id, "counts": counts, "network": network, "deepsea_size": 4}
    settings["engine"] = "auto"
    metrics, folder = train(tmp_path, bonus=bonus, augment=augment, **settings)
    assert {"eval/greedy_return", "eval/sampled_coverage"} <= metrics.keys()
    assert all(np.isfinite(value) for value in metrics.values())
    episodes = rows(folder, "episodes.csv")
    assert len(episodes) == (96 // 4 if env_id == "DeepSea-v0" else 96 // 6)
    assert (sum(float(row["bonus"]) for row in episodes) > 0) == (bonus != "none")
    updates = rows(folder, "updates.csv")
    assert [int(row["step"]) for row in updates] == list(range(24, 97, 8))
    assert all(np.isfinite(float(value)) for row in updates for value in row.values())
    content = torch.load(folder / "checkpoint.pt", weights_only=True)
    assert content["global_step"] == 96 and content["script"] == "dqn_sofe"
    assert ("counts" in content["ring"]) == augment
    assert all(len(column) == 24 for column in content["ring"].values())  # 20 and 4 spare rows


def test_the_same_seed_gives_the_same_csv(tmp_path):
    settings = {"augment": True, "counts": "global", "bonus": "smax", "n_step": 2, "double_q": True}
    first, second, other = (
        texts(train(tmp_path, name=f"run{index}", seed=seed, **settings)[1])
        for index, seed in enumerate((1, 1, 2))
    )
    assert first == second and len(first) == 4
    assert first["updates.csv"] != other["updates.csv"]


def test_a_run_is_resumed_before_its_first_update(tmp_path, monkeypatch):
    """There are evaluations by then, and no updates.csv."""
    settings = {"learning_starts": 60, "eval_every": 32, "log_every": 1, "checkpoint_every": 16}
    _, whole = train(tmp_path, name="whole", **settings)
    checkpoint = dqn_sofe.runs.Run.checkpoint

    def stop_at_40(self, step, **rest):
        checkpoint(self, step, **rest)
        if step == 40:
            raise RuntimeError("stopped")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="stopped"):
        patch.setattr(dqn_sofe.runs.Run, "checkpoint", stop_at_40)
        train(tmp_path, name="parts", **settings)
    parts = tmp_path / "parts"
    assert "evals.csv" in texts(parts) and "updates.csv" not in texts(parts)
    dqn_sofe.main(Args(resume=str(parts)))
    assert texts(parts) == texts(whole)


@pytest.mark.parametrize(
    ("settings", "done"),
    [
        ({"env_id": "Maze3-v0", "max_steps": 7, "engine": "auto", "network": "cnn"}, 64),
        ({"env_id": "DeepSea-v0", "deepsea_size": 5, "counts": "global", "n_step": 3}, 64),
        ({"log_every": 5, "bonus": "smax", "buffer_size": 1000}, 80),  # 64 are rounded up
        ({"learning_starts": 60, "augment": False, "train_frequency": 3}, 72),
        ({"learning_starts": 60, "eval_every": 24}, 64),  # its first row; nothing is due there
    ],
    ids=str,
)
def test_a_resumed_run_equals_one_that_never_stopped(tmp_path, settings, done):
    """The fall of epsilon stays that of the first part, here the same 48 steps."""
    settings = {"augment": True, "eval_every": 80} | settings
    parts = {"name": "parts", "total_timesteps": 64, "exploration_fraction": 0.75}
    whole = {"name": "whole", "total_timesteps": 128, "exploration_fraction": 0.375}
    metrics, whole_folder = train(tmp_path, **whole, **settings)
    _, folder = train(tmp_path, **parts, **settings)
    assert torch.load(folder / "checkpoint.pt", weights_only=True)["global_step"] == done
    assert dqn_sofe.main(Args(resume=str(folder), total_timesteps=128)) == metrics
    left, right = texts(whole_folder), texts(folder)
    for name in ("episodes.csv", "updates.csv", "evals.csv"):
        assert right[name] == left[name]
    assert right["evals.csv"].count("\n") > 2
    left, right = (
        torch.load(f / "checkpoint.pt", weights_only=True) for f in (whole_folder, folder)
    )
    assert left["rows"] == right["rows"]
    for part in (left["ring"], left["state"]["q_network"], left["state"]["target_network"]):
        assert len(part) > 5
    for name, column in left["ring"].items():
        assert torch.equal(column, right["ring"][name])
    for network in ("q_network", "target_network"):
        for name, weights in left["state"][network].items():
            assert torch.equal(weights, right["state"][network][name])


def command(**settings):
    line = [sys.executable, str(ROOT / "dqn_sofe.py")]
    for key, value in settings.items():
        flag = f"--{key.replace('_', '-')}"
        line += [flag] if value is True else [flag, str(value)]
    return line


def test_a_signal_saves_and_the_resumed_run_is_the_same(tmp_path):
    """Stopped where the ring has wrapped around several times, between two complete states."""
    settings = TINY | {"total_timesteps": 640, "augment": True, "eval_episodes": 0}
    settings |= {"log_every": 4, "engine": "auto", "exploration_fraction": 1.0, "n_step": 2}
    process = subprocess.Popen(
        command(**settings, runs_dir=tmp_path, run_name="cut"), stderr=subprocess.PIPE, text=True
    )
    updates = tmp_path / "cut" / "updates.csv"
    deadline = time.monotonic() + 60
    while not (updates.exists() and updates.read_text().count("\n") > 15):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGTERM
    assert len(error.strip().splitlines()) == 1 and "--resume" in error
    content = torch.load(tmp_path / "cut" / "checkpoint.pt", weights_only=True)
    done = content["global_step"]
    assert 200 < done < 640 and done % 16 == 0
    assert content["rows"] == done // 2 > 3 * len(content["ring"]["rewards"])

    dqn_sofe.main(Args(resume=str(tmp_path / "cut")))
    _, whole = train(tmp_path, name="whole", **settings)
    assert texts(tmp_path / "cut") == texts(whole)


@pytest.mark.parametrize("buffer_size", [12, 40])
def test_a_stop_at_any_step_leaves_a_complete_state(tmp_path, monkeypatch, buffer_size):
    """An interrupt late in a stretch of log_every updates: the rows of its start are all there."""
    settings = {"augment": True, "buffer_size": buffer_size, "log_every": 6, "eval_episodes": 0}
    settings |= {"total_timesteps": 192, "bonus": "salesman", "n_step": 2}
    _, whole = train(tmp_path, name="whole", **settings)
    calls, loss_of = [], dqn_sofe.dqn_loss

    def stopping(*args):
        calls.append(1)
        if len(calls) == 71:  # in update 39 or 40 of 48, the last of its stretch being 42
            signal.raise_signal(signal.SIGINT)
        return loss_of(*args)

    with monkeypatch.context() as patch:
        patch.setattr(dqn_sofe, "dqn_loss", stopping)
        with pytest.raises(SystemExit):
            train(tmp_path, name="cut", **settings)
    content = torch.load(tmp_path / "cut" / "checkpoint.pt", weights_only=True)
    assert content["global_step"] == 144
    dqn_sofe.main(Args(resume=str(tmp_path / "cut")))
    assert texts(tmp_path / "cut") == texts(whole)


# --- Failures ------------------------------------------------------------------------------------


def test_a_loss_that_is_not_a_number_keeps_the_last_good_state(tmp_path, monkeypatch, capfd):
    calls, loss_of = [], dqn_sofe.dqn_loss

    def spoiled(*args):
        loss, terms = loss_of(*args)
        calls.append(1)
        if len(calls) > 20:  # 2 in each update from the fifth on: in the fifteenth update
            loss = loss * float("nan")
            terms["td_loss"] = loss.detach()
        return loss, terms

    monkeypatch.setattr(dqn_sofe, "dqn_loss", spoiled)
    with pytest.raises(SystemExit) as end:
        train(tmp_path, augment=True)
    assert end.value.code == 1
    error = capfd.readouterr().err
    assert error.count("\n") == 1 and "td_loss is nan in the update at step 64" in error
    assert "--resume" in error
    content = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    assert content["global_step"] == 56
    for network in ("q_network", "target_network"):
        assert all(torch.isfinite(x).all() for x in content["state"][network].values())
    monkeypatch.undo()
    dqn_sofe.main(Args(resume=str(tmp_path / "run")))
    _, whole = train(tmp_path, name="whole", augment=True)
    assert texts(tmp_path / "run") == texts(whole)


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path):
    """A limit on the size of files stands in for the disk: writing fails in the same calls."""
    resource = pytest.importorskip("resource")

    def small_files(limit):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    _, folder = train(tmp_path, augment=True, checkpoint_every=16, eval_episodes=0)
    before = (folder / "checkpoint.pt").read_bytes()
    result = subprocess.run(
        command(resume=folder, total_timesteps=100_000),
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: small_files(len(before) // 2),
    )
    lines = result.stderr.strip().splitlines()
    assert result.returncode == 1 and len(lines) == 1, result.stderr
    assert all(word in lines[0] for word in ("cannot write", "make room", "--resume"))
    assert (folder / "checkpoint.pt").read_bytes() == before
    assert not (folder / "lock").exists() and not list(folder.glob("*.tmp"))


def test_a_buffer_that_does_not_fit_the_checkpoint_is_named(tmp_path):
    _, folder = train(tmp_path, augment=True, eval_episodes=0)
    path = folder / "checkpoint.pt"
    content = torch.load(path, weights_only=True)
    for ring in (
        {name: column[:, :1] for name, column in content["ring"].items()},
        {name: column[:3] for name, column in content["ring"].items()},
        {name: column for name, column in content["ring"].items() if name != "visits"},
    ):
        torch.save(content | {"ring": ring}, path)
        with pytest.raises(SystemExit, match=r"replay buffer: .*start the run anew"):
            dqn_sofe.main(Args(resume=str(folder)))


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"learning_starts": 1000, "total_timesteps": 1000}, "--learning-starts --total-timesteps"),
        ({"buffer_size": 15}, "--buffer-size --num-envs"),
        ({"buffer_size": 31, "n_step": 2}, "--buffer-size --num-envs --n-step"),
        ({"tau": 1.1}, "--tau"),
        ({"tau": 0.0}, "--tau"),
        ({"gamma": 1.5}, "--gamma"),
        ({"epsilon_start": 1.5}, "--epsilon-start"),
        ({"epsilon_end": -0.1}, "--epsilon-end"),
        ({"exploration_fraction": 1.5}, "--exploration-fraction"),
        ({"n_step": 0}, "--n-step"),
        ({"train_frequency": 0}, "--train-frequency"),
        ({"gradient_steps": 0}, "--gradient-steps"),
        ({"target_interval": 0}, "--target-interval"),
        ({"minibatch_size": 0}, "--minibatch-size"),
        ({"log_every": 0}, "--log-every"),
        ({"learning_rate": float("nan")}, "--learning-rate"),
        ({"augment": True, "bonus": "none"}, "--augment --bonus"),
        ({"goal": True}, "--goal --env-id"),
        ({"view": 5, "env_id": "DeepSea-v0"}, "--view --env-id"),
        ({"eval_every": 10, "eval_episodes": 0}, "--eval-every --eval-episodes"),
    ],
    ids=str,
)
def test_impossible_flags_are_refused_by_name(settings, names):
    with pytest.raises(ValueError) as error:
        Args(**settings)
    assert all(name in str(error.value) for name in names.split())


def test_the_smallest_possible_settings_work(tmp_path):
    """No warm-up, a buffer of exactly n_step rows, no exploration at all."""
    _, folder = train(
        tmp_path,
        augment=True,
        learning_starts=0,
        buffer_size=6,
        n_step=3,
        exploration_fraction=0.0,
        epsilon_end=0.0,
        log_every=1,
        train_frequency=1,
        total_timesteps=20,
    )
    assert [int(row["step"]) for row in rows(folder, "updates.csv")] == list(range(6, 21, 2))
