"""A2C against stable-baselines3 and against slow sums; whole runs, repeatability, resume."""

import copy
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from run_files import CSVS, quick, rows, texts  # noqa: F401, quick is a fixture
from stable_baselines3 import A2C
from stable_baselines3.common.vec_env import DummyVecEnv
from test_bonuses import LEVEL, slow_bonus, slow_phi
from test_targets import PHI, OurTowers, StubEnv, fill_and_train, pairs, slow_advantages

import a2c_sofe
from a2c_sofe import Agent, Args, a2c_loss
from common.mazes import MazeVecEnv

ROOT = Path(__file__).parent.parent
TINY = {
    "num_envs": 2,
    "num_steps": 4,
    "log_every": 2,
    "channels": 4,
    "embedding_dim": 8,
    "max_steps": 6,
    "total_timesteps": 48,
    "eval_episodes": 2,
    "device": "cpu",
}


def train(tmp_path, name="run", **settings):
    args = Args(**(TINY | {"runs_dir": str(tmp_path), "run_name": name} | settings))
    return a2c_sofe.main(args), tmp_path / name


# --- Against stable-baselines3 -------------------------------------------------------------------


def make_peer(args, envs, agent):
    """stable-baselines3's A2C with its own RMSprop, and the weights of our agent."""
    peer = A2C(
        "MultiInputPolicy",
        DummyVecEnv([lambda: StubEnv(envs)]),
        n_steps=args.batch_size,
        ent_coef=args.ent_coef,
        normalize_advantage=args.norm_adv,
        policy_kwargs={
            "features_extractor_class": OurTowers,
            "features_extractor_kwargs": {"agent": agent},
            "normalize_images": False,
        },
        device="cpu",
    )
    assert isinstance(peer.policy.optimizer, torch.optim.RMSprop)
    with torch.no_grad():
        for ours, theirs in pairs(agent, peer.policy):
            theirs.copy_(ours)
    return peer


def train_peer(peer, batch):
    batch = batch | {"logprobs": torch.zeros(len(batch["returns"]))}
    fill_and_train(peer, batch, batch["returns"] - batch["advantages"])


@pytest.mark.parametrize("norm_adv", [False, True])
def test_loss_gradient_and_steps_are_those_of_stable_baselines3(norm_adv):
    """Three steps on different batches, so that the running mean of RMSprop matters."""
    torch.manual_seed(0)
    M = 32
    args = Args(augment=True, num_envs=1, num_steps=M, channels=8, embedding_dim=16)
    args.ent_coef, args.norm_adv = 0.01, norm_adv
    envs = MazeVecEnv(1, engine="numpy")
    agent = Agent(envs, PHI, args)
    peer = make_peer(args, envs, agent)
    agent = agent.to(memory_format=torch.channels_last)
    optimizer = torch.optim.RMSprop(agent.parameters(), lr=7e-4, alpha=0.99, eps=1e-5)
    norms = []
    for scale in (3.0, 0.1, 10.0):
        batch = {
            "obs": torch.randint(0, 2, (M, 2, 32, 32), dtype=torch.uint8),
            "phi": torch.rand(M, 1, 32, 32),
            "actions": torch.randint(0, 4, (M,)),
            "advantages": torch.randn(M) * scale + 1,
            "returns": torch.randn(M) * scale,
        }
        train_peer(peer, batch)
        loss, terms = a2c_loss(agent, batch, args)
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm))
        optimizer.step()

        logged = peer.logger.name_to_value
        for name, theirs in (
            ("policy_loss", logged["train/policy_loss"]),
            ("value_loss", logged["train/value_loss"]),
            ("entropy", -logged["train/entropy_loss"]),
        ):
            assert terms[name].item() == pytest.approx(theirs, rel=1e-5, abs=1e-5)
        weighted = terms["policy_loss"] + 0.5 * terms["value_loss"] - 0.01 * terms["entropy"]
        assert loss.item() == pytest.approx(weighted.item(), rel=1e-6)
        for ours, theirs in pairs(agent, peer.policy):
            assert torch.allclose(ours.grad, theirs.grad, atol=1e-5)
            assert torch.allclose(ours, theirs, atol=1e-5)
    assert max(norms) > 0.5  # the clipping did something


@pytest.mark.parametrize("norm_adv", [False, True])
def test_updates_of_main_are_those_of_stable_baselines3(monkeypatch, tmp_path, norm_adv):
    """The optimiser, its epsilon, the clipping and the order of calls as they stand in `main`."""
    updates = 4
    before, batches, seen = [], [], {}
    compute_gae, loss_of, make_agent = a2c_sofe.compute_gae, a2c_sofe.a2c_loss, a2c_sofe.Agent

    def agent_kept(*args):
        seen["agent"] = make_agent(*args)
        return seen["agent"]

    def before_the_update(*args):
        agent = copy.deepcopy(seen["agent"])
        before.append(agent.to(memory_format=torch.contiguous_format))
        return compute_gae(*args)

    def loss_kept(agent, batch, args):
        batches.append({name: tensor.clone() for name, tensor in batch.items()})
        return loss_of(agent, batch, args)

    monkeypatch.setattr(a2c_sofe, "Agent", agent_kept)
    monkeypatch.setattr(a2c_sofe, "compute_gae", before_the_update)
    monkeypatch.setattr(a2c_sofe, "a2c_loss", loss_kept)
    M = 48
    settings = {"augment": True, "num_envs": 4, "num_steps": 12, "channels": 8, "max_steps": 7}
    settings |= {"embedding_dim": 16, "ent_coef": 0.01, "norm_adv": norm_adv}
    train(tmp_path, **settings, eval_episodes=0, total_timesteps=updates * M)

    args = Args(**(settings | {"num_envs": 1, "num_steps": M}))
    peer = make_peer(args, MazeVecEnv(1, engine="numpy"), before[0])
    assert len(batches) == updates
    for batch, first, then in zip(batches, before, [*before[1:], seen["agent"]], strict=True):
        train_peer(peer, batch)
        moved = False
        for (ours, theirs), old in zip(pairs(then, peer.policy), first.parameters(), strict=True):
            assert torch.allclose(ours, theirs, atol=1e-5)
            moved |= not torch.allclose(ours, old, atol=1e-4)
        assert moved


def test_a_rollout_of_one_sample_gives_no_nan(tmp_path):
    """Its advantage has no deviation, which is why it is not normalised."""
    settings = {"num_envs": 1, "num_steps": 1, "norm_adv": True, "augment": True}
    _, folder = train(tmp_path, **settings, total_timesteps=12)
    assert len(rows(folder, "updates.csv")) == 6
    for row in rows(folder, "updates.csv"):
        assert all(np.isfinite(float(value)) for value in row.values())


def test_norm_adv_normalises_the_advantages_of_the_rollout():
    args = Args(channels=4, embedding_dim=8)
    agent = Agent(MazeVecEnv(1, engine="numpy"), PHI, args)
    batch = {
        "obs": torch.zeros(4, 2, 32, 32, dtype=torch.uint8),
        "phi": torch.zeros(4, 0, 32, 32),
        "actions": torch.zeros(4, dtype=torch.int64),
        "advantages": torch.tensor([1.0, 2.0, 3.0, 6.0]),
        "returns": torch.zeros(4),
    }
    logprob = agent(batch["obs"], batch["phi"])[0].log_prob(batch["actions"])[0].item()
    assert a2c_loss(agent, batch, args)[1]["policy_loss"].item() == pytest.approx(-3 * logprob)
    args.norm_adv = True
    assert a2c_loss(agent, batch, args)[1]["policy_loss"].item() == pytest.approx(0.0, abs=1e-6)


# --- Rewards, phi and targets of a run, from the positions ---------------------------------------

N, T, ROLLOUTS = 3, 5, 24


@pytest.fixture
def recorded(monkeypatch, tmp_path):
    """Train in a 5x5 maze with goal; return what the envs, the targets and the loss were given."""

    def run(**settings):
        log = {"steps": [], "gae": [], "batches": [], "agents": [], "obs": []}
        compute_gae, loss_of, make_agent = a2c_sofe.compute_gae, a2c_sofe.a2c_loss, a2c_sofe.Agent
        seen = {}

        def make_envs(args, num_envs):
            envs = MazeVecEnv(num_envs, level=LEVEL, goal=True, max_steps=7, engine="numpy")
            step = envs.step

            def kept(actions):
                log["obs"].append(envs.observe().copy())
                log["steps"].append((actions.copy(), *copy.deepcopy(step(actions))))
                return log["steps"][-1][1:]

            envs.step = kept
            return envs

        def agent_kept(*args):
            seen["agent"] = make_agent(*args)
            return seen["agent"]

        def recording_gae(*args):
            log["gae"].append([x.clone() if torch.is_tensor(x) else x for x in args])
            log["agents"].append(copy.deepcopy(seen["agent"]))
            return compute_gae(*args)

        def recording_loss(agent, batch, args):
            log["batches"].append({name: tensor.clone() for name, tensor in batch.items()})
            return loss_of(agent, batch, args)

        monkeypatch.setattr(a2c_sofe, "make_envs", make_envs)
        monkeypatch.setattr(a2c_sofe, "Agent", agent_kept)
        monkeypatch.setattr(a2c_sofe, "compute_gae", recording_gae)
        monkeypatch.setattr(a2c_sofe, "a2c_loss", recording_loss)
        fixed = {"num_envs": N, "num_steps": T, "augment": True, "eval_episodes": 0}
        fixed |= {"channels": 16, "embedding_dim": 32, "total_timesteps": N * T * ROLLOUTS}
        _, log["folder"] = train(tmp_path, **(fixed | settings))
        return log

    return run


@pytest.mark.parametrize(("bonus", "counts"), [("sqrt", "episodic"), ("smax", "global")])
def test_rewards_phi_and_targets_follow_from_the_positions(recorded, bonus, counts):
    """Every slot of 24 rollouts: episode ends of both kinds, 3 envs, V(s') at the time limits."""
    log = recorded(
        bonus=bonus, counts=counts, beta=0.5, ext_coef=2.0, gamma=0.9, gae_lambda=0.8, log_every=8
    )
    shape = (5, 5)
    tables = [Counter() for _ in range(N)] if counts == "episodic" else [Counter()] * N
    for env in range(N):
        tables[env][1, 1] += 1
    ends, cuts, matters = Counter(), 0, 0.0
    episode_bonus, episodes = np.zeros(N), []
    for index, (actions, _, paid, terminated, truncated, info) in enumerate(log["steps"]):
        rollout, t = divmod(index, T)
        rewards, _, final_values, *_ = log["gae"][rollout]
        agent, batch = log["agents"][rollout], log["batches"][rollout]
        slot = {name: x.unflatten(0, (T, N))[t] for name, x in batch.items()}
        assert np.array_equal(slot["actions"], actions)
        assert np.array_equal(slot["obs"], log["obs"][index])
        ended = terminated | truncated
        cells = np.where(
            ended[:, None], info["final_info"]["cell"] if ended.any() else -1, info["cell"]
        )
        cells = [tuple(cell) for cell in cells.tolist()]
        for env in range(N):
            phi = slow_phi(tables[env], bonus, shape)
            assert slot["phi"][env].numpy() == pytest.approx(phi, abs=1e-6)
            value = 0.5 * slow_bonus(tables[env], cells[env], bonus, shape)
            episode_bonus[env] += value
            expected = value + 2 * paid[env]
            assert rewards[t, env].item() == pytest.approx(expected, rel=1e-4, abs=1e-5)
        for env in range(N):
            tables[env][cells[env]] += 1
        for env in np.flatnonzero(truncated):
            obs, cell = torch.as_tensor(info["final_obs"][env])[None], cells[env]
            after, before = (
                torch.as_tensor(slow_phi(table, bonus, shape), dtype=torch.float32)[None]
                for table in (tables[env], tables[env] - Counter([cell]))
            )
            value = agent(obs, after)[1].item()
            assert final_values[t, env].item() == pytest.approx(value, abs=1e-5)
            matters = max(matters, abs(agent(obs, before)[1].item() - value))
            cuts += 1
        for env in np.flatnonzero(ended):
            ends["terminated" if terminated[env] else "truncated"] += 1
            episodes.append(episode_bonus[env])
            episode_bonus[env] = 0
            if counts == "episodic":
                tables[env] = Counter()
            tables[env][1, 1] += 1
    assert len(log["steps"]) == T * ROLLOUTS
    assert ends["terminated"] > 2 and cuts > 15
    assert matters > 1e-3 or counts == "global"  # the phi before the visit gives other values
    in_the_csv = [float(row["bonus"]) for row in rows(log["folder"], "episodes.csv")]
    assert in_the_csv == pytest.approx(episodes, rel=1e-4)

    for index, (gae, batch) in enumerate(zip(log["gae"], log["batches"], strict=True)):
        assert gae[-2:] == [0.9, 0.8]
        ended = [np.stack([step[kind] for step in log["steps"]]) for kind in (3, 4)]
        for ours, theirs in zip(gae[3:5], ended, strict=True):
            assert np.array_equal(ours, theirs[index * T : (index + 1) * T])
        slow = slow_advantages(*gae).reshape(-1)
        assert batch["advantages"].numpy() == pytest.approx(slow, abs=1e-5)
        values = log["agents"][index](batch["obs"], batch["phi"])[1].detach().numpy()
        assert batch["returns"].numpy() == pytest.approx(slow + values, abs=1e-5)


def test_beta_is_annealed(recorded):
    log = recorded(bonus="salesman", ext_coef=0.0, beta=0.6, anneal_beta=True)
    for index, gae in enumerate(log["gae"]):
        paid = gae[0][gae[0] > 0].numpy()
        assert paid == pytest.approx(0.6 * (1 - index / ROLLOUTS), rel=1e-5)
    assert sum(gae[0].any().item() for gae in log["gae"]) > ROLLOUTS / 2


# --- Whole runs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("env_id", ["Maze1-v0", "DeepSea-v0"])
@pytest.mark.parametrize(
    ("bonus", "augment"),
    [("none", False)] + [(b, a) for b in ("sqrt", "salesman", "smax") for a in (False, True)],
)
def test_every_bonus_with_and_without_sofe(tmp_path, env_id, bonus, augment):
    counts, network = ("global", "mlp") if env_id == "DeepSea-v0" else ("episodic", "cnn")
    settings = {"env_id": env_id, "counts": counts, "network": network, "deepsea_size": 4}
    metrics, folder = train(tmp_path, bonus=bonus, augment=augment, **settings)
    assert {"eval/greedy_return", "eval/sampled_coverage"} <= metrics.keys()
    assert all(np.isfinite(value) for value in metrics.values())
    episodes = rows(folder, "episodes.csv")
    assert len(episodes) == (48 // 4 if env_id == "DeepSea-v0" else 48 // 6)
    assert (sum(float(row["bonus"]) for row in episodes) > 0) == (bonus != "none")
    updates = rows(folder, "updates.csv")
    assert [int(row["step"]) for row in updates] == [16, 32, 48]
    assert all(np.isfinite(float(value)) for row in updates for value in row.values())
    content = torch.load(folder / "checkpoint.pt", weights_only=True)
    assert content["global_step"] == 48 and content["script"] == "a2c_sofe"


@pytest.mark.parametrize("log_every", [2, 3])
def test_a_row_of_losses_is_the_mean_of_log_every_rollouts(tmp_path, monkeypatch, log_every):
    terms, bonuses = [], []
    loss_of, bonus_of = a2c_sofe.a2c_loss, a2c_sofe.compute_bonus

    def kept(*args):
        loss, found = loss_of(*args)
        terms.append({name: value.item() for name, value in found.items()})
        return loss, found

    def bonus_kept(*args):
        bonuses.append(bonus_of(*args).mean().item())
        return bonuses[-1] + torch.zeros(2)

    monkeypatch.setattr(a2c_sofe, "a2c_loss", kept)
    monkeypatch.setattr(a2c_sofe, "compute_bonus", bonus_kept)
    _, folder = train(tmp_path, augment=True, log_every=log_every, beta=0.5, eval_episodes=0)
    updates = rows(folder, "updates.csv")
    assert [int(row["step"]) for row in updates] == list(range(8 * log_every, 49, 8 * log_every))
    for index, row in enumerate(updates):
        for name in ("policy_loss", "value_loss", "entropy"):
            part = [term[name] for term in terms[index * log_every :][:log_every]]
            assert float(row[name]) == pytest.approx(np.mean(part), rel=1e-4, abs=1e-6)
        part = np.mean(bonuses[index * log_every * 4 :][: log_every * 4])
        assert float(row["raw_bonus"]) == pytest.approx(part, rel=1e-4)
        assert float(row["bonus"]) == pytest.approx(0.5 * part, rel=1e-4)


def test_the_same_seed_gives_the_same_csv(tmp_path):
    settings = {"augment": True, "counts": "global", "bonus": "smax"}
    first, second, other = (
        texts(train(tmp_path, name=f"run{index}", seed=seed, **settings)[1])
        for index, seed in enumerate((1, 1, 2))
    )
    assert first == second and len(first) == 4
    assert first["updates.csv"] != other["updates.csv"]


@pytest.mark.parametrize(
    ("settings", "done"),
    [
        ({"env_id": "Maze3-v0", "max_steps": 7}, 32),
        ({"env_id": "DeepSea-v0", "deepsea_size": 5, "counts": "global"}, 32),
        ({"log_every": 3, "bonus": "smax", "eval_every": 24}, 48),  # 32 are rounded up to rows
    ],
    ids=str,
)
def test_a_resumed_run_equals_one_that_never_stopped(tmp_path, settings, done):
    settings = {"augment": True, "eval_every": 48} | settings
    whole, whole_folder = train(tmp_path, name="whole", total_timesteps=96, **settings)
    _, folder = train(tmp_path, name="parts", total_timesteps=32, **settings)
    contents = [torch.load(folder / "checkpoint.pt", weights_only=True)]
    assert contents[0]["global_step"] == done
    resumed = a2c_sofe.main(Args(resume=str(folder), total_timesteps=96))
    assert resumed == whole
    left, right = texts(whole_folder), texts(folder)
    for name in ("episodes.csv", "updates.csv", "evals.csv"):
        assert right[name] == left[name]
    assert right["evals.csv"].count("\n") == (5 if settings["eval_every"] == 24 else 3)
    contents = [torch.load(f / "checkpoint.pt", weights_only=True) for f in (whole_folder, folder)]
    for name, weights in contents[0]["state"]["agent"].items():
        assert torch.equal(weights, contents[1]["state"]["agent"][name])


def test_a_signal_saves_and_the_resumed_run_is_the_same(tmp_path):
    settings = TINY | {"total_timesteps": 1440, "augment": True, "eval_episodes": 0}
    settings |= {"log_every": 3, "network": "mlp"}
    line = [sys.executable, str(ROOT / "a2c_sofe.py")]
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in settings.items()]
    flags[flags.index("--augment=True")] = "--augment"
    where = ["--runs-dir", str(tmp_path), "--run-name", "cut"]
    process = subprocess.Popen([*line, *flags, *where], stderr=subprocess.PIPE, text=True)
    updates = tmp_path / "cut" / "updates.csv"
    deadline = time.monotonic() + 60
    while not (updates.exists() and updates.stat().st_size > 400):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGTERM
    assert len(error.strip().splitlines()) == 1 and "--resume" in error
    done = torch.load(tmp_path / "cut" / "checkpoint.pt", weights_only=True)["global_step"]
    assert 0 < done < 1440 and done % 24 == 0

    a2c_sofe.main(Args(resume=str(tmp_path / "cut")))
    _, whole = train(tmp_path, name="whole", **settings)
    assert texts(tmp_path / "cut") == texts(whole)
