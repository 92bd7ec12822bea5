"""Bonuses and phi of a training run, recomputed with dictionaries from the positions alone."""

import csv
import math
from collections import Counter

import numpy as np
import pytest
import torch

import ppo_sofe
from common.mazes import MazeVecEnv
from ppo_sofe import SIGMA_FLOOR, Args, augment, compute_bonus, visit

LEVEL = "WWWWW\nWA..W\nW.W.W\nW..GW\nWWWWW"
N, T = 3, 40


def slow_gaussian(visits, shape):
    """Mean and deviation of the list of one-hot maps, the textbook way."""
    maps = []
    for cell, times in visits.items():
        one_hot = np.zeros(shape)
        one_hot[cell] = 1
        maps += [one_hot] * times
    return np.mean(maps, axis=0), np.maximum(np.std(maps, axis=0), SIGMA_FLOOR)


def slow_bonus(visits, cell, bonus, shape):
    if bonus == "sqrt":
        return 1 / math.sqrt(visits[cell] + 1)
    if bonus == "salesman":
        return float(visits[cell] == 0)
    mu, sigma = slow_gaussian(visits, shape)
    one_hot = np.zeros(shape)
    one_hot[cell] = 1
    density = np.exp(-(((one_hot - mu) / sigma) ** 2) / 2) / (sigma * np.sqrt(2 * np.pi))
    least = np.prod(shape) * math.log(SIGMA_FLOOR * math.sqrt(2 * math.pi))
    with np.errstate(divide="ignore"):
        surprise = -np.log(density)
    # exp underflows far from the mean: there the logarithm is written out
    log_density = ((one_hot - mu) / sigma) ** 2 / 2 + np.log(sigma * np.sqrt(2 * np.pi))
    surprise = np.where(np.isfinite(surprise), surprise, log_density).sum()
    return SIGMA_FLOOR**2 * (surprise - least)


def slow_phi(visits, bonus, shape):
    if bonus == "smax":
        mu, sigma = slow_gaussian(visits, shape)
        return np.stack([mu / (mu + SIGMA_FLOOR**2), SIGMA_FLOOR / sigma])
    table = np.zeros(shape)
    for cell, times in visits.items():
        table[cell] = times
    return 1 / np.sqrt(1 + table)[None]


@pytest.fixture
def recorded(monkeypatch, tmp_path):
    """Train in a 5x5 maze with goal; return what the envs, the targets and the loss were given."""

    def train(**settings):
        log = {"steps": [], "gae": [], "batches": [], "weights": []}

        def make_envs(args, num_envs):
            envs = MazeVecEnv(num_envs, level=LEVEL, goal=True, max_steps=7, engine="auto")
            step = envs.step
            envs.step = lambda actions: log["steps"].append(step(actions)) or log["steps"][-1]
            return envs

        class Agent(ppo_sofe.Agent):
            def __init__(self, *args):
                super().__init__(*args)
                log["agent"] = self

        compute_gae, ppo_loss = ppo_sofe.compute_gae, ppo_sofe.ppo_loss

        def recording_gae(*args):
            log["gae"].append([x.clone() if torch.is_tensor(x) else x for x in args])
            log["weights"].append({k: v.clone() for k, v in log["agent"].state_dict().items()})
            return compute_gae(*args)

        def recording_loss(agent, batch, *rest):
            log["batches"].append({key: value.clone() for key, value in batch.items()})
            return ppo_loss(agent, batch, *rest)

        monkeypatch.setattr(ppo_sofe, "make_envs", make_envs)
        monkeypatch.setattr(ppo_sofe, "Agent", Agent)
        monkeypatch.setattr(ppo_sofe, "compute_gae", recording_gae)
        monkeypatch.setattr(ppo_sofe, "ppo_loss", recording_loss)
        monkeypatch.setattr(torch, "randperm", lambda n, device=None: torch.arange(n))
        settings = {"augment": True, "total_timesteps": 3 * N * T} | settings
        ppo_sofe.main(
            Args(
                **settings,
                num_envs=N,
                num_steps=T,
                minibatch_size=N * T,
                update_epochs=1,
                channels=16,  # with 4 and 8 all of the phi tower is dead at this seed
                embedding_dim=32,
                eval_episodes=0,
                device="cpu",
                runs_dir=str(tmp_path),
            )
        )
        return log

    return train


@pytest.mark.parametrize("bonus", ["sqrt", "salesman", "smax"])
@pytest.mark.parametrize("counts", ["episodic", "global"])
def test_rewards_and_phi_follow_from_the_positions(recorded, bonus, counts):
    """Bonus and phi of every slot, over 3 rollouts, episode ends of both kinds and 3 envs."""
    log = recorded(bonus=bonus, counts=counts, beta=0.5, ext_coef=2.0)
    shape = (5, 5)
    tables = [Counter() for _ in range(N)] if counts == "episodic" else [Counter()] * N
    for env in range(N):
        tables[env][1, 1] += 1
    dones_seen, shared = 0, 0
    for index, (_, ext_rewards, terminated, truncated, info) in enumerate(log["steps"]):
        iteration, t = divmod(index, T)
        rewards = log["gae"][iteration][0][t]
        phis = log["batches"][iteration]["phi"].reshape(T, N, -1, *shape)[t]
        dones = terminated | truncated
        cells = [
            tuple((info["final_info"]["cell"] if dones[env] else info["cell"])[env].tolist())
            for env in range(N)
        ]
        shared += len(set(cells)) < N
        for env in range(N):
            assert phis[env].numpy() == pytest.approx(slow_phi(tables[env], bonus, shape), abs=1e-6)
            expected = (
                0.5 * slow_bonus(tables[env], cells[env], bonus, shape) + 2 * ext_rewards[env]
            )
            assert rewards[env].item() == pytest.approx(expected, rel=1e-4, abs=1e-5)
        for env in range(N):
            tables[env][cells[env]] += 1
        for env in np.flatnonzero(dones):
            dones_seen += 1
            if counts == "episodic":
                tables[env] = Counter()
            tables[env][1, 1] += 1
    assert dones_seen > 20 and shared > 20
    assert sum(step[2].sum() for step in log["steps"]) > 0  # some ended at the goal
    assert sum(step[3].sum() for step in log["steps"]) > 0  # and some at the time limit


@pytest.mark.parametrize("counts", ["episodic", "global"])
def test_a_truncated_episode_is_valued_with_its_own_phi(recorded, counts):
    """V(s') of the true last observation, with the counts that include the visit of s'."""
    log = recorded(bonus="sqrt", counts=counts, total_timesteps=N * T)
    final_values = log["gae"][0][2]
    agent = log["agent"]
    agent.load_state_dict(log["weights"][0])
    tables = [Counter() for _ in range(N)] if counts == "episodic" else [Counter()] * N
    for env in range(N):
        tables[env][1, 1] += 1
    checked, matters = 0, 0.0
    for t, (_, _, terminated, truncated, info) in enumerate(log["steps"]):
        dones = terminated | truncated
        for env in range(N):
            cell = (info["final_info"]["cell"] if dones[env] else info["cell"])[env]
            tables[env][tuple(cell.tolist())] += 1
        for env in np.flatnonzero(truncated):
            phi = torch.as_tensor(slow_phi(tables[env], "sqrt", (5, 5)), dtype=torch.float32)
            obs = torch.as_tensor(info["final_obs"][env])
            value = agent(obs[None], phi[None])[1].item()
            cell = tuple(info["final_info"]["cell"][env].tolist())
            before = slow_phi(tables[env] - Counter({cell: 1}), "sqrt", (5, 5))
            before = torch.as_tensor(before, dtype=torch.float32)
            matters = max(matters, abs(agent(obs[None], before[None])[1].item() - value))
            assert final_values[t, env].item() == pytest.approx(value, abs=1e-6)
            checked += 1
        for env in np.flatnonzero(dones):
            if counts == "episodic":
                tables[env] = Counter()
            tables[env][1, 1] += 1
    assert checked > 5
    assert matters > 1e-3  # the phi before the visit of s' gives other values


def test_values_and_ends_of_a_rollout(recorded, tmp_path):
    """Values of the states before and after each action, kinds of ends, explained variance."""
    log = recorded(bonus="sqrt", learning_rate=0.01)
    rows = list(csv.DictReader(next(tmp_path.glob("*/updates.csv")).read_text().splitlines()))
    agent = log["agent"]
    for index, (gae, batch) in enumerate(zip(log["gae"], log["batches"], strict=True)):
        _, values, _, *ends, _, _ = gae
        steps = log["steps"][index * T : (index + 1) * T]
        for ours, kind in zip(ends, (2, 3), strict=True):
            assert np.array_equal(ours.numpy(), np.stack([step[kind] for step in steps]))
        agent.load_state_dict(log["weights"][index])
        states = [(batch["obs"], batch["phi"], values[:T].flatten())]
        if index + 1 < len(log["batches"]):  # the state after the rollout begins the next one
            after = log["batches"][index + 1]
            states.append((after["obs"][:N], after["phi"][:N], values[T]))
        for obs, phi, found in states:
            assert torch.allclose(agent(obs, phi)[1], found, atol=1e-5)
            assert found.abs().min() > 1e-6
        advantages, returns = batch["advantages"].numpy(), batch["returns"].numpy()
        assert advantages + values[:T].flatten().numpy() == pytest.approx(returns, abs=1e-5)
        explained = 1 - advantages.var() / returns.var()
        assert float(rows[index]["explained_variance"]) == pytest.approx(explained, abs=1e-4)
    assert log["gae"][0][3].any() and log["gae"][0][4].any()


def test_episode_bonuses_in_the_csv_are_sums_of_the_rewards_paid(recorded, tmp_path):
    log = recorded(bonus="sqrt", ext_coef=0.0)
    rewards = torch.cat([gae[0] for gae in log["gae"]]).numpy()
    rows = next(tmp_path.glob("*/episodes.csv")).read_text().split()[1:]
    start, expected = [0] * N, []
    for index, (_, _, terminated, truncated, _) in enumerate(log["steps"]):
        for env in np.flatnonzero(terminated | truncated):
            expected.append(rewards[start[env] : index + 1, env].sum())
            start[env] = index + 1
    assert [float(row.split(",")[3]) for row in rows] == pytest.approx(expected, rel=1e-4)


def test_beta_is_annealed_and_the_discounts_arrive_where_they_belong(recorded, tmp_path):
    """Three rollouts pay beta, 2/3 beta and 1/3 beta for a first visit; gamma is not lambda."""
    log = recorded(bonus="salesman", ext_coef=0.0, beta=0.6, anneal_beta=True, gamma=0.9)
    rows = list(csv.DictReader(next(tmp_path.glob("*/updates.csv")).read_text().splitlines()))
    for gae, beta, row in zip(log["gae"], (0.6, 0.4, 0.2), rows, strict=True):
        paid = gae[0].unique()
        assert paid.tolist() == pytest.approx([0.0, beta])
        assert gae[-2:] == [0.9, 0.95]
        assert float(row["bonus"]) == pytest.approx(gae[0].mean().item(), rel=1e-4)
        assert float(row["raw_bonus"]) == pytest.approx(gae[0].mean().item() / beta, rel=1e-4)


def test_worked_example():
    """Six moves in the paper's 5x5 maze: the table and what each move pays."""
    counts = torch.zeros((1, 5, 5), dtype=torch.int64)
    table = torch.tensor([0])
    visit(counts, table, torch.tensor([[1, 1]]))
    path = [(1, 2), (1, 1), (1, 1), (2, 1), (3, 1), (2, 1)]
    paid = {"sqrt": [], "salesman": []}
    for cell in path:
        cell = torch.tensor([cell])
        for bonus, values in paid.items():
            values.append(compute_bonus(counts, table, cell, bonus).item())
        visit(counts, table, cell)
    assert paid["sqrt"] == pytest.approx([1, 2**-0.5, 3**-0.5, 1, 1, 2**-0.5])
    assert paid["salesman"] == [1, 0, 0, 1, 1, 0]
    assert counts[0].tolist() == [
        [0, 0, 0, 0, 0],
        [0, 3, 1, 0, 0],
        [0, 2, 0, 0, 0],
        [0, 1, 0, 0, 0],
        [0, 0, 0, 0, 0],
    ]


def test_no_cell_pays_nothing_and_is_not_counted():
    counts = torch.ones((2, 4, 4), dtype=torch.int64)
    cells, tables = torch.tensor([[-1, -1], [0, 0]]), torch.tensor([0, 1])
    for bonus in ("sqrt", "salesman", "smax"):
        assert compute_bonus(counts, tables, cells, bonus)[0] == 0
    visit(counts, tables, cells)
    assert counts[0].sum() == 16 and counts[1].sum() == 17


def test_two_envs_in_one_cell_are_both_counted():
    counts, tables = torch.zeros((1, 3, 3), dtype=torch.int64), torch.tensor([0, 0])
    cells = torch.tensor([[1, 1], [1, 1]])
    assert compute_bonus(counts, tables, cells, "sqrt").tolist() == [1, 1]
    visit(counts, tables, cells)
    assert counts[0, 1, 1] == 2


def test_counts_do_not_wrap():
    counts, table = torch.zeros((1, 2, 2), dtype=torch.int64), torch.tensor([0])
    for _ in range(300):
        visit(counts, table, torch.tensor([[0, 1]]))
    assert counts[0, 0, 1] == 300
    phi = augment(counts, table, Args(augment=True))
    assert phi[0, 0, 0, 1].item() == pytest.approx(301**-0.5)


@pytest.mark.parametrize("network", ["cnn", "mlp"])
@pytest.mark.parametrize("bonus", ["sqrt", "salesman", "smax"])
def test_the_reward_is_a_function_of_what_the_agent_sees(bonus, network):
    """From phi as the network sees it and s', the statistics and the bonus can be had back."""
    generator = torch.Generator().manual_seed(0)
    counts = torch.randint(0, 30, (4, 6, 6), generator=generator)
    tables, cells = torch.arange(4), torch.randint(0, 6, (4, 2), generator=generator)
    phi = augment(counts, tables, Args(augment=True, bonus=bonus, network=network)).double()
    assert phi.min() >= 0 and phi.max() <= 1
    if network == "mlp":  # no longer than a one-hot observation
        lengths = phi.flatten(1).norm(dim=1)
        assert lengths.min() > 0.1 and lengths.max() <= 1
        phi *= phi[0].numel() ** 0.5
    if bonus == "smax":
        mu = SIGMA_FLOOR**2 * phi[:, 0] / (1 - phi[:, 0])
        total = counts.sum((1, 2), keepdim=True)  # any total gives the same mean
        rebuilt = mu * total
    else:
        rebuilt = phi[:, 0] ** -2 - 1
    assert torch.allclose(rebuilt, counts.double(), atol=1e-3)
    rebuilt = rebuilt.round().long()
    expected = compute_bonus(counts, tables, cells, bonus)
    assert torch.equal(compute_bonus(rebuilt, tables, cells, bonus), expected)


def test_without_sofe_there_is_no_phi():
    counts = torch.ones((3, 4, 5), dtype=torch.int64)
    assert augment(counts, torch.arange(3), Args()).shape == (3, 0, 4, 5)
