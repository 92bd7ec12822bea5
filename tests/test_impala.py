"""IMPALA with E3B: V-trace by its definition, ratios without lag, bonuses by hand, whole runs."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from run_files import quick, rows, texts  # noqa: F401, quick is a fixture

import impala_e3b_sofe
from common import minihack, procgen, runs, trunks
from impala_e3b_sofe import Actor, Agent, Args, backward, impala_loss, make_explorer, vtrace

pytestmark = pytest.mark.skipif(
    not (minihack.minihack_installed() and procgen.procgen_installed()),
    reason="needs MiniHack and Procgen",
)
ROOT = Path(__file__).parent.parent
TINY = {
    "env_id": "MiniHack-Room-5x5-v0",
    "num_workers": 0,
    "num_envs": 2,
    "num_steps": 6,
    "hidden_dim": 8,
    "glyph_dim": 2,
    "embedding_dim": 32,
    "phi_dim": 8,
    "phi_channels": 2,
    "total_timesteps": 36,
    "eval_episodes": 0,
    "device": "cpu",
    "sync": True,
}
OPEN = []  # environments that a test has left open
ARMS = [("none", "none"), ("icm", "none"), ("rnd", "none")]
ARMS += [("e3b", augment) for augment in ("none", "diagonal", "full")]


@pytest.fixture(autouse=True)
def short_episodes(monkeypatch):
    """Truncations within a rollout: 4 steps an episode of MiniHack."""
    init = minihack.MiniHackVecEnv.__init__

    def short(self, *args, **kwargs):
        init(self, *args, **(kwargs | {"max_steps": 4}))

    monkeypatch.setattr(minihack.MiniHackVecEnv, "__init__", short)
    yield
    while OPEN:
        OPEN.pop().close()


def train(tmp_path, name="run", **settings):
    args = Args(**(TINY | {"runs_dir": str(tmp_path), "run_name": name} | settings))
    return impala_e3b_sofe.main(args), tmp_path / name


class Recorder:
    """Keeps what the environments were given and gave."""

    def __init__(self, envs):
        self.envs, self.num_envs, self.max_steps = envs, envs.num_envs, envs.max_steps
        self.single_observation_space = envs.single_observation_space
        self.single_action_space = envs.single_action_space
        self.seen = []

    def reset(self, seed):
        self.first, info = self.envs.reset(seed=seed)
        return self.first, info

    def step(self, actions):
        self.seen.append((actions, *self.envs.step(actions)))
        return self.seen[-1][1:]

    def __getattr__(self, name):
        return getattr(self.envs, name)


class Cells(torch.nn.Module):
    """A psi that tells all cells apart, which an encoder does not before it has learned."""

    def __init__(self, d):
        super().__init__()
        table = torch.nn.functional.normalize(torch.randn(21, 79, d), dim=2)
        self.table = torch.nn.Parameter(table)

    def forward(self, obs):
        return self.table[obs["blstats"][:, 1], obs["blstats"][:, 0]]


def make_rollout(cells=False, **settings):
    """Networks, the recorded environments and a rollout without lag."""
    torch.manual_seed(0)
    args = Args(**(TINY | {"num_envs": 3, "num_steps": 11} | settings))
    envs = Recorder(impala_e3b_sofe.make_envs(args, args.num_envs, "train"))
    agent, explorer = Agent(envs, args), make_explorer(envs, args)
    with torch.no_grad():  # else all policies and values are nearly alike at first
        agent.policy_head.weight.mul_(20)
        agent.critic.weight.mul_(20)
    if cells:
        explorer.encoder = Cells(args.embedding_dim)
    actor = Actor(envs, agent, explorer, args)
    actor.reset(3)
    OPEN.append(envs.envs)
    rollout = actor.collect(agent, explorer, threading.Lock())
    return args, envs, agent, explorer, actor, rollout


# --- V-trace -------------------------------------------------------------------------------------


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)[:, None]


def test_vtrace_of_a_worked_example():
    logrhos = tensor([0.5, 2.0, 1.5, 0.25]).log()
    nothing = torch.zeros(4, 1, dtype=torch.bool)
    terminations = torch.tensor([[False], [False], [True], [False]])
    values = tensor([0.5, 1.0, -1.0, 3.0, 2.0])
    vs, advantages = vtrace(
        torch.zeros(4, 1), logrhos, tensor([1.0, 0.0, 2.0, -1.0]), values,
        tensor([0.0] * 4), terminations, nothing, 0.9,
    )  # fmt: skip
    assert vs.flatten().tolist() == pytest.approx([1.56, 1.8, 2.0, 2.45])
    assert advantages.flatten().tolist() == pytest.approx([1.06, 0.8, 3.0, -0.55])


def definition(rho, r, v, final, terminated, truncated, gamma, rho_bar, c_bar):
    """vs and advantages of one env as the sums of the paper, one episode after the other."""
    T = len(r)
    vs, advantages, first = np.zeros(T), np.zeros(T), 0
    while first < T:
        ends = [t for t in range(first, T) if terminated[t] or truncated[t]]
        last = ends[0] if ends else T - 1
        after = 0.0 if terminated[last] else final[last] if truncated[last] else v[T]
        own = np.append(v[first : last + 1], after)
        for s in range(first, last + 1):
            vs[s] = v[s]
            for t in range(s, last + 1):
                carried = np.prod(np.minimum(c_bar, rho[s:t])) * gamma ** (t - s)
                delta = r[t] + gamma * own[t + 1 - first] - v[t]
                vs[s] += carried * min(rho_bar, rho[t]) * delta
        for s in range(first, last + 1):
            following = after if s == last else vs[s + 1]
            advantages[s] = min(rho_bar, rho[s]) * (r[s] + gamma * following - v[s])
        first = last + 1
    return vs, advantages


def random_case(rng, T, N):
    terminated = rng.random((T, N)) < 0.15
    truncated = (rng.random((T, N)) < 0.15) & ~terminated
    numbers = [rng.normal(size=(T, N)) for _ in range(4)] + [rng.normal(size=(T + 1, N))]
    behaviour, target, rewards, final, values = (torch.from_numpy(x) for x in numbers)
    ends = torch.from_numpy(terminated), torch.from_numpy(truncated)
    return [behaviour, target, rewards, values, final, *ends]


def test_vtrace_equals_its_definition_on_200_random_cases():
    rng = np.random.default_rng(0)
    for _ in range(200):
        T, N = int(rng.integers(1, 13)), int(rng.integers(1, 4))
        case = random_case(rng, T, N)
        gamma, rho_bar, c_bar = rng.random(), *(0.5 + rng.random(2))
        vs, advantages = vtrace(*case, gamma, rho_bar, c_bar)
        behaviour, target, rewards, values, final, *ends = (x.numpy() for x in case)
        for n in range(N):
            columns = [x[:, n] for x in (rewards, values, final, *ends)]
            rho = np.exp(target[:, n] - behaviour[:, n])
            expected = definition(rho, *columns, gamma, rho_bar, c_bar)
            assert np.allclose(vs[:, n], expected[0], atol=1e-12)
            assert np.allclose(advantages[:, n], expected[1], atol=1e-12)


@pytest.mark.parametrize("which", [5, 6], ids=["termination", "truncation"])
def test_nothing_leaks_across_an_end(which):
    case = random_case(np.random.default_rng(1), 9, 2)
    case[5].zero_()
    case[6].zero_()
    case[which][4, 0] = True
    other = [x.clone() for x in case]
    for i in (0, 1, 2, 3):
        other[i][5:, 0] += 7.0
    for before, after in zip(vtrace(*case, 0.9), vtrace(*other, 0.9), strict=True):
        assert torch.equal(before[:5, 0], after[:5, 0])
        assert torch.equal(before[:, 1], after[:, 1])
        assert not torch.equal(before[5:, 0], after[5:, 0])
    other[4][4, 0] += 1.0  # V(s') counts where the episode was cut off, and only there
    changed = vtrace(*case, 0.9)[0][4, 0] != vtrace(*other, 0.9)[0][4, 0]
    assert changed == (which == 6)


def test_a_perfect_critic_leaves_no_advantage():
    """A reward of 1 for ever, which time limits cut: V = 1 / (1 - gamma) everywhere."""
    gamma, value = 0.9, 10.0
    case = random_case(np.random.default_rng(2), 20, 3)
    for i, constant in ((2, 1.0), (3, value), (4, value)):
        case[i] = torch.full_like(case[i], constant)
    case[5].zero_()
    assert case[6].sum() > 3
    vs, advantages = vtrace(*case, gamma)
    assert torch.allclose(vs, torch.full_like(vs, value)) and advantages.abs().max() < 1e-12


# --- Actor and learner ---------------------------------------------------------------------------


@pytest.mark.parametrize("env_id", ["MiniHack-Room-5x5-v0", "procgen-maze"])
@pytest.mark.parametrize("augment", ["none", "diagonal", "full"])
def test_without_lag_all_ratios_are_one(env_id, augment):
    """Across episode ends too: the learner reads what the actor read, from the same memory."""
    args, _, agent, explorer, actor, rollout = make_rollout(env_id=env_id, augment=augment)
    if env_id == "MiniHack-Room-5x5-v0":
        assert rollout["truncations"].sum() > 4 and rollout["starts"][0].all()
    assert backward(agent, rollout, torch.zeros(11, 3), args)["lag"] < 1e-5
    second = actor.collect(agent, explorer, threading.Lock())
    assert not second["starts"][0].all() and second["memory"].abs().max() > 0
    assert backward(agent, second, torch.zeros(11, 3), args)["lag"] < 1e-5
    if augment != "none":  # and phi is what the policy acted on
        with torch.no_grad():
            for parameter in agent.phi_encoder.parameters():
                parameter.mul_(3.0)
        assert backward(agent, second, torch.zeros(11, 3), args)["lag"] > 1e-5


@pytest.mark.parametrize("augment", ["none", "diagonal", "full"])
def test_bonus_phi_and_final_values_from_the_observations_alone(augment):
    """C by its definition in float64, V(s') by reading the episode from its start."""
    args, envs, agent, explorer, _, rollout = make_rollout(cells=True, augment=augment)

    def psi(obs, i):
        with torch.no_grad():
            tensors = {k: torch.as_tensor(x[i : i + 1]) for k, x in obs.items()}
            return explorer.encoder(tensors)[0].double().numpy()

    def start(obs, i):
        return args.ridge * np.eye(args.embedding_dim) + np.outer(psi(obs, i), psi(obs, i))

    obs, cut, apart = envs.first, 0, 0
    C = [start(obs, i) for i in range(3)]
    episode = [[] for _ in range(3)]
    for t, (_, next_obs, _, terminated, truncated, info) in enumerate(envs.seen):
        true = info.get("final_obs", next_obs)
        for i in range(3):
            inverse, embedding = np.linalg.inv(C[i]), psi(true, i)
            assert np.linalg.norm(embedding) == pytest.approx(1, abs=1e-5)
            apart += embedding @ psi(next_obs, i) < 0.8  # s' and the next s_0
            assert rollout["bonus"][t, i].item() == pytest.approx(
                embedding @ inverse @ embedding, rel=1e-3, abs=1e-5
            )
            episode[i].append((obs, inverse))
            if augment == "diagonal":
                shown = args.ridge * np.diag(inverse)
                assert np.allclose(rollout["phi"][t, i], shown, atol=1e-4)
            C[i] = C[i] + np.outer(embedding, embedding)
            if truncated[i]:
                whole = [*episode[i], (true, np.linalg.inv(C[i]))]
                keys = {k: np.stack([o[k][i] for o, _ in whole])[:, None] for k in true}
                phi = np.stack([args.ridge * c for _, c in whole])
                phi = torch.as_tensor(phi, dtype=torch.float32)
                if augment == "diagonal":
                    phi = phi.diagonal(dim1=1, dim2=2)
                features = None if augment == "none" else agent.phi_encoder(phi)[:, None]
                starts = torch.zeros(len(whole), 1, dtype=torch.bool)
                inputs = {k: torch.as_tensor(x) for k, x in keys.items()}
                values = agent(inputs, features, starts, torch.zeros(2, 1, args.hidden_dim))[1]
                value = rollout["final_values"][t, i].item()
                assert value == pytest.approx(values[-1, 0].item(), abs=1e-4)
                cut += 1
            else:
                assert rollout["final_values"][t, i] == 0
            if terminated[i] or truncated[i]:
                C[i], episode[i] = start(next_obs, i), []
        obs = next_obs
    assert cut > 4 and apart > 1


def test_psi_is_renewed_once_per_rollout_and_the_ellipsoid_keeps_what_it_holds():
    _, _, agent, explorer, actor, first = make_rollout(cells=True, augment="full")
    with torch.no_grad():
        explorer.encoder.table.copy_(explorer.encoder.table.roll(1, dims=2))
    before = actor.ellipsoids.full().clone()
    second = actor.collect(agent, explorer, threading.Lock())
    assert torch.equal(second["first_ellipsoids"]["inv_cov"], before)
    for rollout, alike in ((first, False), (second, True)):
        psi = explorer.encoder({"blstats": rollout["obs"]["blstats"][1:].flatten(0, 1)})
        psi = psi.unflatten(0, (11, 3))
        going_on = ~rollout["starts"][1:]
        assert torch.equal(psi[going_on], rollout["embedding"][going_on]) == alike


def test_the_gradient_in_two_stages_is_the_gradient():
    settings = dict(augment="full", phi_channels=8)  # with 2, both may be dead
    args, _, agent, _, _, rollout = make_rollout(**settings)
    rewards = torch.randn(11, 3)
    backward(agent, rollout, rewards, args)
    staged = {k: p.grad.clone() for k, p in agent.named_parameters()}
    fresh = make_rollout(**settings)[2]
    size = args.num_envs, args.embedding_dim, args.ridge
    replica = impala_e3b_sofe.e3b.Ellipsoids(*size, form="dense")
    met = rollout["embedding"], rollout["starts"][1:], rollout["start_embedding"]
    rebuilt = replica.rebuild(rollout["first_ellipsoids"], *met, full=True)
    phi = torch.stack([args.ridge * inv_cov.clone() for inv_cov in rebuilt])
    features = fresh.phi_encoder(phi.flatten(0, 1)).unflatten(0, (12, 3))
    impala_loss(fresh, rollout, features, rewards, args)[0].backward()
    for name, parameter in fresh.named_parameters():
        assert parameter.grad.abs().max() > 0
        assert torch.allclose(staged[name], parameter.grad, rtol=1e-3, atol=1e-5), name
    before, after = fresh.state_dict(), agent.state_dict()
    moved = [k for k in before if "running" in k and not torch.equal(before[k], after[k])]
    assert not moved
    assert torch.equal(rollout["last_phi"], phi[-1])
    agent.phi_encoder.move_statistics(phi[-1])
    after = agent.state_dict()
    moved = [k for k in before if "running" in k and not torch.equal(before[k], after[k])]
    assert len(moved) == 10 and not agent.phi_encoder.layers.training


def test_the_loss_equals_a_slow_loop():
    args, _, agent, _, _, rollout = make_rollout(bonus="none", ent_coef=0.3, vf_coef=0.7, gamma=0.8)
    with torch.no_grad():
        for parameter in agent.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    rewards = torch.randn(11, 3)
    loss, terms = impala_loss(agent, rollout, None, rewards, args)
    inputs = rollout["obs"], None, rollout["starts"], rollout["memory"]
    policy, values, _ = agent(*inputs)
    probs, v = policy.probs.double().detach().numpy(), values.double().detach().numpy()
    expected = np.zeros(3)
    for n in range(3):
        chosen = probs[np.arange(11), n, rollout["actions"][:, n]]
        rho = chosen / rollout["logprobs"][:, n].double().exp().numpy()
        ends = (rollout[k][:, n].numpy() for k in ("final_values", "terminations", "truncations"))
        vs, advantages = definition(rho, rewards[:, n].numpy(), v[:, n], *ends, 0.8, 1.0, 1.0)
        for t in range(11):
            entropy = -(probs[t, n] * np.log(probs[t, n])).sum()
            expected += np.array(
                [-advantages[t] * np.log(chosen[t]), 0.5 * (vs[t] - v[t, n]) ** 2, entropy]
            )
    expected /= 3
    assert terms["policy_loss"].item() == pytest.approx(expected[0], abs=1e-3)
    assert terms["value_loss"].item() == pytest.approx(expected[1], rel=1e-3)
    assert terms["entropy"].item() == pytest.approx(expected[2] / 11, rel=1e-4)
    assert terms["lag"] > 1e-3
    total = expected @ [1, 0.7, -0.3]
    assert loss.item() == pytest.approx(total, abs=2e-3)


def test_inverse_dynamics_learns_nothing_from_pairs_across_ends():
    _, _, _, explorer, _, rollout = make_rollout()
    dones = rollout["starts"][1:]
    loss, bonus = explorer(rollout)
    assert torch.equal(bonus, rollout["bonus"])
    for mask, alike in ((dones, True), (~dones, False)):
        actions = torch.where(mask, (rollout["actions"] + 1) % 8, rollout["actions"])
        again, _ = explorer(rollout | {"actions": actions})
        assert (again == loss).item() == alike
    obs = {k: x.flatten(0, 1) for k, x in rollout["obs"].items()}
    psi = 32**0.5 * explorer.encoder(obs).unflatten(0, (12, 3))
    expected = 0.0
    for t, n in (~dones).nonzero().tolist():
        logits = explorer.inverse(torch.cat([psi[t, n], psi[t + 1, n]]))
        expected -= logits.log_softmax(0)[rollout["actions"][t, n]].item() / 3
    assert loss.item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("bonus", ["icm", "rnd"])
def test_icm_and_rnd_by_hand(bonus):
    _, _, _, explorer, _, rollout = make_rollout(bonus=bonus)
    dones = rollout["starts"][1:]
    loss, paid = explorer(rollout)
    obs = {k: x.flatten(0, 1) for k, x in rollout["obs"].items()}
    psi = explorer.encoder(obs).unflatten(0, (12, 3))
    expected, inverse = np.zeros((11, 3)), 0.0
    for t in range(11):
        for n in range(3):
            if dones[t, n]:
                continue
            action = rollout["actions"][t, n]
            if bonus == "icm":
                one_hot = torch.zeros(8)
                one_hot[action] = 1
                error = explorer.dynamics(torch.cat([psi[t, n], one_hot])) - psi[t + 1, n]
                logits = explorer.inverse(torch.cat([psi[t, n], psi[t + 1, n]]))
                inverse -= logits.log_softmax(0)[action].item() / 3
            else:
                following = {k: x[t + 1, n][None] for k, x in rollout["obs"].items()}
                error = psi[t + 1, n] - explorer.target(following)[0]
            expected[t, n] = error.square().sum().sqrt().item()
    assert dones.any() and np.allclose(paid, expected, atol=1e-5)
    total = expected.sum() / 3 + (0.1 * inverse if bonus == "icm" else 0.0)
    assert loss.item() == pytest.approx(total, rel=1e-4)
    loss.backward()
    if bonus == "rnd":
        assert all(p.grad is None for p in explorer.target.parameters())


def test_running_std():
    assert impala_e3b_sofe.e3b.RunningStd().update(torch.tensor([[9.0]])) == 1
    rng, running = np.random.default_rng(0), impala_e3b_sofe.e3b.RunningStd()
    parts = [rng.exponential(size=(7, 5)) for _ in range(20)]
    for part in parts:
        deviation = running.update(torch.from_numpy(part))
    assert deviation == pytest.approx(np.std(parts), rel=1e-9)


# --- Runs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("env_id", ["MiniHack-Room-5x5-v0", "procgen-maze"])
@pytest.mark.parametrize(("bonus", "augment"), ARMS)
def test_every_bonus_and_augmentation(tmp_path, env_id, bonus, augment):
    settings = {"eval_episodes": 1} if env_id != "procgen-maze" else {}
    metrics, folder = train(tmp_path, env_id=env_id, bonus=bonus, augment=augment, **settings)
    if settings:
        names = {f"eval/{a}_{b}" for a in ("greedy", "sampled") for b in ("return", "success")}
        assert names <= metrics.keys() and all(np.isfinite(x) for x in metrics.values())
        episodes = rows(folder, "episodes.csv")
        assert len(episodes) >= 36 // 4 - 1
        assert (sum(float(row["bonus"]) for row in episodes) > 0) == (bonus != "none")
        assert {row["success"] for row in episodes} <= {"0", "1"}
    assert [int(row["step"]) for row in rows(folder, "updates.csv")] == [12, 24, 36]
    assert all(float(row["lag"]) < 1e-5 for row in rows(folder, "updates.csv"))  # --sync
    assert not (folder / "visits.png").exists()
    content = torch.load(folder / "checkpoint.pt", weights_only=True)
    assert content["global_step"] == 36 and content["script"] == "impala_e3b_sofe"
    moved = [x for k, x in content["state"]["agent"].items() if "num_batches_tracked" in k]
    assert moved == [3] * (5 if augment == "full" else 0)  # BatchNorm's, once per update


def test_the_learner_in_numbers(tmp_path, monkeypatch):
    """The reward is clamped, the bonus over its deviation, RMSprop's first step as by hand."""
    seen = []

    def recorded(agent, rollout, rewards, args):
        weights = [p.detach().clone() for p in agent.parameters()]
        terms = backward(agent, rollout, rewards, args)
        seen.append((weights, [p.grad.clone() for p in agent.parameters()], rewards, rollout))
        return terms

    monkeypatch.setattr(impala_e3b_sofe, "backward", recorded)
    settings = {"total_timesteps": 12, "max_grad_norm": 0.1, "learning_rate": 0.01, "beta": 0.5}
    _, folder = train(tmp_path, **settings)
    weights, gradients, rewards, rollout = seen[0]
    raw = rollout["bonus"].double().numpy()
    expected = (rollout["ext_rewards"] + 0.5 * raw / np.std(raw)).clamp(-1, 1)
    assert torch.allclose(rewards.double(), expected, atol=1e-4) and (rewards == 1).any()
    assert (expected < 1).any()
    norm = sum(g.double().square().sum() for g in gradients).sqrt().item()
    assert norm > 0.1
    agent = torch.load(folder / "checkpoint.pt", weights_only=True)["state"]["agent"]
    named = dict(zip(agent, agent.values(), strict=True))
    for after, before, g in zip(named.values(), weights, gradients, strict=True):
        g = g * 0.1 / norm
        step = 0.01 * g / ((0.01 * g.square()).sqrt() + 1e-5)
        assert torch.allclose(after, before - step, atol=1e-5)


@pytest.mark.parametrize(("bonus", "weight"), [("e3b", 1.0), ("icm", 0.1), ("rnd", 0.001)])
def test_rewards_and_the_explorer_of_each_bonus(tmp_path, monkeypatch, bonus, weight):
    """Weights of the rewards, the deviation over all rollouts, one step of the explorer each."""
    paid, seen, make_explorer = [], [], impala_e3b_sofe.make_explorer

    def recorded(agent, rollout, rewards, args):
        paid.append((rollout["ext_rewards"].clone(), rewards.clone()))
        return backward(agent, rollout, rewards, args)

    def make_and_keep(*args):
        def keep(module, _, output):
            weights = {name: p.detach().clone() for name, p in module.named_parameters()}
            seen.append((weights, output[1].double().numpy().copy()))

        explorer = make_explorer(*args)
        explorer.register_forward_hook(keep)
        return explorer

    monkeypatch.setattr(impala_e3b_sofe, "backward", recorded)
    monkeypatch.setattr(impala_e3b_sofe, "make_explorer", make_and_keep)
    settings = {"ext_coef": 0.5, "beta": 0.4, "penalty_step": 0.25, "learning_rate": 1e-3}
    train(tmp_path, bonus=bonus, augment="none", num_envs=4, total_timesteps=72, **settings)
    assert len(paid) == len(seen) == 3
    for index, (ext_rewards, rewards) in enumerate(paid):
        so_far = [raw for _, raw in seen[: index + 1]]
        deviation = np.std(so_far) if bonus == "e3b" else 1.0
        expected = 0.5 * ext_rewards.numpy() + 0.4 * weight * so_far[-1] / deviation
        assert rewards.numpy() == pytest.approx(expected.clip(-1, 1), abs=1e-5)
    ext_rewards = torch.stack([rewards for rewards, _ in paid])
    assert (ext_rewards == -0.25).any() and set(ext_rewards.unique().tolist()) <= {-0.25, 0.0, 1.0}
    # RMSprop's running mean holds a hundredth of the first square: its step is ten times Adam's.
    most = 1e-3 if bonus == "e3b" else 1e-2
    moved = {
        name: (seen[1][0][name] - weights).abs().max().item()
        for name, weights in seen[0][0].items()
    }
    learned = {name for name in moved if not name.startswith("target")}
    assert all(moved[name] == 0 for name in moved.keys() - learned)
    assert max(moved.values()) == pytest.approx(most, rel=0.05)
    assert sum(moved[name] > 0.5 * most for name in learned) > len(learned) / 2
    assert (len(learned) < len(moved)) == (bonus == "rnd")


def test_impala_is_evaluated_on_other_levels(monkeypatch):
    """The levels of the split "eval"; the first half of the envs takes the likeliest actions."""
    splits, policies, taken = [], [], []
    make_envs, read = impala_e3b_sofe.make_envs, impala_e3b_sofe.Actor.read

    def make_and_keep(args, num_envs, split):
        envs = make_envs(args, num_envs, split)
        step = envs.step
        splits.append(split)

        def kept(actions):
            taken.append((np.array(actions), policies[-1]))
            return step(actions)

        envs.step = kept
        return envs

    def read_and_keep(self, *arguments):
        output = read(self, *arguments)  # before a step, and for the last states of cut episodes
        policies.append(output[0])
        return output

    torch.manual_seed(0)
    args = impala_e3b_sofe.Args(
        env_id="MiniHack-Room-5x5-v0", num_workers=0, hidden_dim=16, glyph_dim=2, crop_only=True,
        embedding_dim=8, augment="none", eval_episodes=3, device="cpu", num_envs=2,
    )  # fmt: skip
    envs = make_envs(args, 1, "train")
    agent = impala_e3b_sofe.Agent(envs, args)
    explorer = impala_e3b_sofe.make_explorer(envs, args)
    envs.close()
    monkeypatch.setattr(impala_e3b_sofe, "make_envs", make_and_keep)
    monkeypatch.setattr(impala_e3b_sofe.Actor, "read", read_and_keep)
    metrics = impala_e3b_sofe.evaluate(agent, explorer, args)
    assert splits == ["eval"] and metrics["eval/sampled_length"] > 1
    likeliest = 0
    for actions, policy in taken:
        best = policy.logits[0].argmax(1).numpy()
        assert np.array_equal(actions[:3], best[:3])
        likeliest += (actions[3:] == best[3:]).mean() / len(taken)
    assert likeliest < 0.9


@pytest.mark.parametrize("split", ["train", "eval"])
def test_flags_reach_the_environments(monkeypatch, split):
    made = []
    monkeypatch.setattr(minihack, "MiniHackVecEnv", lambda *args, **rest: made.append((args, rest)))
    monkeypatch.setattr(
        impala_e3b_sofe.procgen, "ProcgenVecEnv", lambda *args, **rest: made.append((args, rest))
    )
    args = Args(env_id="MiniHack-MultiRoom-N4-v0", penalty_step=0.25, num_workers=2)
    impala_e3b_sofe.make_envs(args, 3, split)
    rest = dict(penalty_step=-0.25, split=split, stagger=split == "train")
    impala_e3b_sofe.make_envs(Args(env_id="procgen-maze"), 5, split)
    assert made == [((args.env_id, 3, 2), rest), (("maze", 5), {"split": split})]


@pytest.mark.parametrize(
    ("flag", "value", "game", "other"),
    [
        ("shallow", True, "procgen-maze", "MiniHack-MultiRoom-N4-v0"),
        ("crop_only", True, "MiniHack-MultiRoom-N4-v0", "procgen-maze"),
        ("penalty_step", 0.01, "MiniHack-MultiRoom-N4-v0", "procgen-maze"),
    ],
)
def test_a_flag_that_its_game_has_no_use_for_is_refused(flag, value, game, other):
    assert getattr(Args(env_id=game, **{flag: value}), flag) == value
    with pytest.raises(ValueError, match=f"--{flag.replace('_', '-')} and --env-id"):
        Args(env_id=other, **{flag: value})


@pytest.mark.parametrize(
    "settings", [{"augment": "full"}, {"augment": "diagonal", "env_id": "procgen-maze"}], ids=str
)
def test_sync_repeats_itself_and_resumes_exactly(tmp_path, settings):
    settings = settings | {"learning_rate": 1e-2}
    _, whole = train(tmp_path, name="whole", **settings)
    _, parts = train(tmp_path, name="parts", total_timesteps=12, **settings)
    impala_e3b_sofe.main(Args(resume=str(parts), total_timesteps=36))
    assert texts(whole) == texts(parts)
    ends = (torch.load(f / "checkpoint.pt", weights_only=True)["state"] for f in (whole, parts))
    first, second = (state["agent"] for state in ends)
    assert all(torch.equal(first[k], second[k]) for k in first)
    _, other = train(tmp_path, name="other", seed=2, total_timesteps=12, **settings)
    assert texts(other)["updates.csv"] != texts(whole)["updates.csv"]


def test_the_thread_learns_from_every_rollout_once(tmp_path, monkeypatch):
    seen, collected, collect = [], [], Actor.collect
    threads = set()

    def recorded(agent, rollout, rewards, args):
        seen.append(rollout["actions"])
        return backward(agent, rollout, rewards, args)

    def collecting(self, *args):
        threads.add(threading.current_thread())
        rollout = collect(self, *args)
        collected.append(rollout["actions"])
        return rollout

    monkeypatch.setattr(impala_e3b_sofe, "backward", recorded)
    monkeypatch.setattr(Actor, "collect", collecting)
    _, folder = train(tmp_path, sync=False, augment="full", total_timesteps=72)
    assert all(a is b for a, b in zip(seen, collected, strict=False)) and len(seen) == 6
    assert len(threads) == 1 and not threads.pop().is_alive()
    assert len(rows(folder, "updates.csv")) == 6
    metrics = impala_e3b_sofe.main(Args(resume=str(folder), total_timesteps=84, eval_episodes=1))
    assert "eval/greedy_return" in metrics


def one_line(error, *words):
    lines = error.strip().splitlines()
    assert len(lines) == 1 and all(word in lines[0] for word in words), error


@pytest.mark.parametrize("sync", [False, True])
def test_an_actor_that_raises(tmp_path, monkeypatch, capfd, sync):
    step, calls = minihack.MiniHackVecEnv.step, []

    def broken(self, actions):
        calls.append(1)
        if len(calls) > 20:
            raise ZeroDivisionError("the dungeon is on fire")
        return step(self, actions)

    monkeypatch.setattr(minihack.MiniHackVecEnv, "step", broken)
    with pytest.raises(SystemExit) as end:
        train(tmp_path, sync=sync, total_timesteps=10**6)
    assert end.value.code == 1
    one_line(capfd.readouterr().err, "the actor", "on fire", "traceback.txt", "--resume")
    assert "broken" in (tmp_path / "run" / "traceback.txt").read_text()
    content = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    assert content["global_step"] <= 36
    monkeypatch.setattr(minihack.MiniHackVecEnv, "step", step)
    impala_e3b_sofe.main(Args(resume=str(tmp_path / "run"), total_timesteps=48))


def test_a_worker_that_dies_while_a_run_is_resumed_is_not_called_a_damaged_file(
    tmp_path, monkeypatch
):
    train(tmp_path, num_workers=2)
    set_state = minihack.MiniHackVecEnv.set_state

    def dead(self, state):
        for worker in self._workers:
            os.kill(worker.process.pid, signal.SIGKILL)
        set_state(self, state)

    monkeypatch.setattr(minihack.MiniHackVecEnv, "set_state", dead)
    with pytest.raises(SystemExit, match=r"^error: MiniHack worker 0 .* died \(signal 9\)"):
        impala_e3b_sofe.main(Args(resume=str(tmp_path / "run"), total_timesteps=96))


@pytest.mark.parametrize("returned", [False, True])
def test_environments_are_not_closed_under_an_actor_that_steps_them(
    tmp_path, monkeypatch, returned
):
    def make_and_keep(*args):
        OPEN.append(make_envs(*args))
        return OPEN[-1]

    make_envs = impala_e3b_sofe.make_envs
    monkeypatch.setattr(impala_e3b_sofe, "make_envs", make_and_keep)
    monkeypatch.setattr(runs.Producer, "close", lambda self: returned)
    train(tmp_path, eval_episodes=0)
    assert OPEN[-1].closed == returned


def test_a_worker_that_is_killed(tmp_path, monkeypatch, capfd):
    step, calls, workers = minihack.MiniHackVecEnv.step, [], []

    def deadly(self, actions):
        calls.append(1)
        if len(calls) == 20:
            workers.extend(worker.process.pid for worker in self._workers)
            os.kill(workers[0], signal.SIGKILL)
        return step(self, actions)

    monkeypatch.setattr(minihack.MiniHackVecEnv, "step", deadly)
    since = time.monotonic()
    with pytest.raises(SystemExit):
        train(tmp_path, sync=False, num_workers=2, total_timesteps=10**6)
    assert time.monotonic() - since < 60  # most of it starts the workers
    one_line(capfd.readouterr().err, "worker", "signal 9", "--resume")
    assert len(workers) == 2 and not any(psutil.pid_exists(pid) for pid in workers)
    torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)


def test_a_loss_that_is_not_a_number(tmp_path, monkeypatch, capfd):
    calls = []

    def spoiled(agent, rollout, rewards, args):
        terms = backward(agent, rollout, rewards, args)
        calls.append(1)
        if len(calls) == 3:
            agent.critic.bias.grad.fill_(float("nan"))
            terms["value_loss"] = torch.tensor(float("nan"))
        return terms

    monkeypatch.setattr(impala_e3b_sofe, "backward", spoiled)
    with pytest.raises(SystemExit) as end:
        train(tmp_path, sync=False, total_timesteps=10**6)
    assert end.value.code == 1
    one_line(capfd.readouterr().err, "value_loss is nan", "step 36", "--resume")
    assert not any("_produce" in thread.name for thread in threading.enumerate())
    state = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["state"]["agent"]
    assert all(x.isfinite().all() for x in state.values())


def test_ctrl_c_ends_the_command(tmp_path):
    """As a command, with a worker: one line, within 15 s, and no process is left."""
    flags = TINY | {"num_workers": 1, "total_timesteps": 10**6, "runs_dir": tmp_path / "here"}
    line = [sys.executable, str(ROOT / "impala_e3b_sofe.py"), "--augment", "diagonal"]
    del flags["sync"]
    for key, value in flags.items():
        line += ["--" + key.replace("_", "-"), str(value)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(line, cwd=tmp_path, **pipes)
    until = time.monotonic() + 90
    while time.monotonic() < until and process.poll() is None:
        updates = list(tmp_path.glob("here/*/updates.csv"))
        if updates and len(updates[0].read_text().splitlines()) > 2:
            break
        time.sleep(0.2)
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    process.send_signal(signal.SIGINT)
    since = time.monotonic()
    output, error = process.communicate(timeout=60)
    assert time.monotonic() - since < 15
    assert process.returncode == 130, error
    one_line(error, "SIGINT", "state saved", "--resume")
    assert "run folder" in output and not any(child.is_running() for child in children)
    folder = Path(re.search(r"run folder: (\S+)", output).group(1))
    assert torch.load(folder / "checkpoint.pt", weights_only=True)["global_step"] > 0


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (["--augment", "full"], 0),
        (["--bonus", "icm", "--beta", "0"], 0),
        (["--augment", "full", "--pool-stride", "1", "--embedding-dim", "6"], 0),
        (["--augment", "full", "--embedding-dim", "31"], 2),
        (["--augment", "full", "--pool-stride", "1", "--embedding-dim", "5"], 2),
        (["--augment", "diagonal", "--bonus", "rnd"], 2),
        (["--pool-stride", "3"], 2),
        (["--embedding-dim", "1"], 2),
        (["--embedding-dim", "1", "--bonus", "rnd"], 0),
        (["--eval-every", "9", "--eval-episodes", "0"], 2),
        (["--ridge", "0"], 2),
        (["--gamma", "1.5"], 2),
    ],
    ids=str,
)
def test_command_lines(line, status, capsys):
    try:
        impala_e3b_sofe.tyro.cli(Args, args=line)
        result = 0
    except SystemExit as end:
        result = end.code
    assert result == status
    error = capsys.readouterr().err
    assert bool(error) == bool(status) and "Traceback" not in error


def test_an_unknown_level_is_named(tmp_path):
    with pytest.raises(SystemExit) as end:
        train(tmp_path, env_id="MiniHack-Nowhere-v0")
    assert "--env-id MiniHack-Nowhere-v0" in str(end.value) and not (tmp_path / "run").exists()


def test_an_encoder_that_does_not_fit_ends_in_one_line(tmp_path, monkeypatch, capsys):
    """The paper's, with 2 billion weights and 16 GiB free, before any of it is allocated."""
    monkeypatch.setattr(runs.psutil, "virtual_memory", lambda: SimpleNamespace(available=2**34))
    paper = {"augment": "full", "pool_stride": 1, "embedding_dim": 512, "phi_dim": 1024}
    before = psutil.Process().memory_info().rss
    with pytest.raises(SystemExit) as end:
        train(tmp_path, **paper, phi_channels=8)
    assert psutil.Process().memory_info().rss - before < 2**30
    # 8 * 507**2 * 1024 weights of the last layer, 9 copies of 4 bytes
    assert re.search(r"needs 70\.\d GiB and 16\.0 GiB are free$", str(end.value.code))
    assert "training of the networks: 72" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


def test_counting_weights_draws_no_random_numbers(tmp_path):
    args = Args(**(TINY | {"augment": "full"}))
    envs = impala_e3b_sofe.make_envs(args, 1, "train")
    OPEN.append(envs)
    before = torch.get_rng_state()
    with torch.device("meta"):
        networks = Agent(envs, args), make_explorer(envs, args)
    assert all(p.is_meta for network in networks for p in network.parameters())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("stride", [1, 2])
def test_the_encoder_of_the_matrix_is_the_papers(stride):
    args = Args(augment="full", embedding_dim=64, phi_channels=3, pool_stride=stride, phi_dim=9)
    encoder = trunks.make_phi_encoder(args)
    kinds = [type(layer).__name__ for layer in encoder.layers]
    assert kinds.count("Conv2d") == kinds.count("BatchNorm2d") == kinds.count("MaxPool2d") == 5
    side = 59 if stride == 1 else 2
    assert encoder.layers[-2].in_features == 3 * side**2
    assert encoder(torch.rand(2, 64, 64)).shape == (2, 9) and not encoder.layers.training
