"""Environments and `evaluate` of the scripts of the mazes, from actions and positions alone."""

import inspect
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from run_files import quick  # noqa: F401, a fixture
from test_bonuses import LEVEL, slow_phi
from torch.distributions import Categorical

import a2c_sofe
import dqn_sofe
import ppo_lstm_sofe
import ppo_sofe
from common import deepsea, mazes
from common.mazes import MazeVecEnv

E, CELLS = 16, 8  # episodes of each kind; cells of the level that can be reached
SCRIPTS = {"ppo": ppo_sofe, "a2c": a2c_sofe, "ppo_lstm": ppo_lstm_sofe, "dqn": dqn_sofe}
SIZES = {"ppo": {"num_envs": 2, "num_steps": 8, "minibatch_size": 8}}


@pytest.mark.parametrize("script", SCRIPTS)
def test_flags_reach_the_environments(script, monkeypatch):
    module, made = SCRIPTS[script], []
    for kind, name in ((mazes, "MazeVecEnv"), (deepsea, "DeepSeaVecEnv")):
        monkeypatch.setattr(
            kind, name, lambda *args, _name=name, **rest: made.append((_name, args, rest))
        )
    settings = SIZES.get(script, {}) | {"engine": "numpy", "max_steps": 77}
    module.make_envs(module.Args(env_id="Maze2-v0", goal=True, view=5, **settings), 3)
    module.make_envs(module.Args(env_id="Maze3-v0", **settings), 4)
    module.make_envs(module.Args(env_id="DeepSea-v0", deepsea_size=14, seed=6, **settings), 2)
    assert made == [
        ("MazeVecEnv", (3, "Maze2-v0", True, 5, 77, "numpy"), {}),
        ("MazeVecEnv", (4, "Maze3-v0", False, None, 77, "numpy"), {}),
        ("DeepSeaVecEnv", (2, 14), {"mapping_seed": 6}),
    ]
    parameters = list(inspect.signature(MazeVecEnv).parameters)
    assert parameters[:6] == ["num_envs", "maze", "goal", "view", "max_steps", "engine"]


class Network:
    """Scores of the actions that any change of obs or phi changes; it keeps what it was shown."""

    def __init__(self, script):
        self.script, self.seen = script, []
        self.weights = torch.randn(2, 4, generator=torch.Generator().manual_seed(3))

    def __call__(self, obs, phi, starts=None, state=None):
        places = torch.arange(1, 26).float().sqrt()
        obs, phi = obs.float().flatten(-3), phi.flatten(-3)
        sums = [(x * places.repeat(x.shape[-1] // 25)).sum(-1, keepdim=True) for x in (obs, phi)]
        scores = (sums[0] * self.weights[0] + sums[1] * self.weights[1]).sin()
        self.seen.append(SimpleNamespace(scores=scores, phi=phi, starts=starts, state=state))
        if self.script == "dqn":
            return scores
        policy, values = Categorical(logits=scores), scores[..., 0]
        return (policy, values) if state is None else (policy, values, state + 1)


@pytest.fixture(params=SCRIPTS)
def played(request, monkeypatch):
    """Evaluate in a 5x5 maze with a goal; return args, network, steps of the envs and metrics."""

    def play(**settings):
        module, steps = SCRIPTS[request.param], []

        def make_envs(args, num_envs):
            envs = MazeVecEnv(num_envs, level=LEVEL, goal=True, max_steps=25, engine="numpy")
            step = envs.step

            def kept(actions):
                steps.append((np.array(actions), *step(actions)))
                return steps[-1][1:]

            envs.step = kept
            return envs

        monkeypatch.setattr(module, "make_envs", make_envs)
        settings = SIZES.get(request.param, {}) | settings
        args = module.Args(augment=True, eval_episodes=E, device="cpu", **settings)
        network = Network(request.param)
        trained = torch.zeros((3 if args.counts == "episodic" else 1, 5, 5)).long()
        trained[:, 1:4, 1] = 7
        kept = trained.clone()
        metrics = module.evaluate(network, trained, args)
        assert torch.equal(trained, kept)
        return args, network, steps, metrics

    play.script = request.param
    return play


@pytest.mark.parametrize("counts", ["episodic", "global"])
def test_an_evaluation_follows_from_actions_and_positions(played, counts):
    """Actions, phi of each step, and return, length and coverage of each env's first episode."""
    more = {"epsilon_end": 0.5} if played.script == "dqn" else {}
    args, network, steps, metrics = played(counts=counts, **more)
    tables = [
        dict.fromkeys([(1, 1), (2, 1), (3, 1)], 7 * (counts == "global")) for _ in range(2 * E)
    ]
    visited = [{(1, 1)} for _ in range(2 * E)]
    for table in tables:
        table[1, 1] += 1
    results, returns, likeliest, choices = {}, np.zeros(2 * E), 0, 0
    for t, ((actions, _, rewards, terminated, truncated, info), seen) in enumerate(
        zip(steps, network.seen, strict=True)
    ):
        scores = seen.scores.reshape(2 * E, 4)
        ended = terminated | truncated
        cells = np.where(ended[:, None], info.get("final_info", info)["cell"], info["cell"])
        for env in set(range(2 * E)) - set(results):
            expected = slow_phi(tables[env], "sqrt", (5, 5)).flatten()
            assert seen.phi.reshape(2 * E, -1)[env].numpy() == pytest.approx(expected, abs=1e-6)
            is_likeliest = actions[env] == scores[env].argmax().item()
            if env < E:
                assert is_likeliest
            else:
                likeliest, choices = likeliest + is_likeliest, choices + 1
            cell = tuple(cells[env].tolist())
            tables[env][cell] = tables[env].get(cell, 0) + 1
            visited[env].add(cell)
            returns[env] += rewards[env]
            if ended[env]:
                results[env] = returns[env], t + 1, len(visited[env]) / CELLS
        if played.script == "ppo_lstm":
            assert (seen.state == t).all() and seen.state.shape == (2, 2, 2 * E, args.lstm_size)
            before = steps[t - 1][3] | steps[t - 1][4] if t else np.ones(2 * E, bool)
            assert np.array_equal(seen.starts[0].numpy(), before)
    lengths = {result[1] for result in results.values()}
    assert len(results) == 2 * E and len(lengths) > 2 and len(steps) == max(lengths)
    for kind, envs in (("greedy", range(E)), ("sampled", range(E, 2 * E))):
        means = np.mean([results[env] for env in envs], axis=0)
        for name, mean in zip(("return", "length", "coverage"), means, strict=True):
            assert metrics[f"eval/{kind}_{name}"] == pytest.approx(mean)
    assert 0.25 < likeliest / choices < 0.8  # in the mean 0.62 with epsilon 0.5


def test_without_random_actions_both_halves_of_dqn_are_greedy(monkeypatch):
    args = dqn_sofe.Args(augment=True, eval_episodes=4, epsilon_end=0.0, max_steps=5, device="cpu")
    network = Network("dqn")
    monkeypatch.setattr(
        dqn_sofe, "make_envs", lambda args, n: MazeVecEnv(n, level=LEVEL, max_steps=5)
    )
    metrics = dqn_sofe.evaluate(network, torch.zeros(1, 5, 5).long(), args)
    for name in ("return", "length", "coverage"):
        assert metrics[f"eval/greedy_{name}"] == metrics[f"eval/sampled_{name}"]
