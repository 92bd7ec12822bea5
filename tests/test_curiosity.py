"""ICM, RND and inverse dynamics against slow loops, with an encoder of one matrix."""

import numpy as np
import pytest
import torch

from common.curiosity import ICM, RND, InverseNet, NoBonus, embed

T, N, A, d = 6, 3, 4, 5


class Matrix(torch.nn.Module):
    """psi = W x of the observation x, and a place for it in a dict."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(d, 7))

    def forward(self, obs):
        assert obs["x"].dim() == 2
        return obs["x"] @ self.weight.T


@pytest.fixture
def rollout():
    torch.manual_seed(0)
    starts = torch.zeros(T + 1, N, dtype=torch.bool)
    starts[0] = starts[3, 1] = starts[6, 2] = True
    obs, actions = {"x": torch.randn(T + 1, N, 7)}, torch.randint(A, (T, N))
    return {"obs": obs, "actions": actions, "starts": starts, "bonus": torch.zeros(T, N)}


def test_embeddings_are_those_of_their_own_observation(rollout):
    encoder = Matrix()
    psi = embed(encoder, rollout)
    assert psi.shape == (T + 1, N, d)
    assert torch.allclose(psi[4, 2], encoder.weight @ rollout["obs"]["x"][4, 2], atol=1e-5)


def pairs(rollout):
    """Every (t, n) whose next observation belongs to the same episode."""
    return (~rollout["starts"][1:]).nonzero().tolist()


def inverse_loss(net, psi, rollout):
    """The slow sum; mean over N."""
    total = 0.0
    for t, n in pairs(rollout):
        logprobs = net(torch.cat([psi[t, n], psi[t + 1, n]])).log_softmax(0)
        total -= logprobs[rollout["actions"][t, n]].item() / N
    return total


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_the_inverse_loss(rollout, scale):
    net, psi = InverseNet(d, A), torch.randn(T + 1, N, d)
    expected = inverse_loss(net, scale * psi, rollout)
    assert net.loss(psi, rollout, scale).item() == pytest.approx(expected, rel=1e-4)


def test_icm(rollout):
    icm = ICM(Matrix(), d, A)
    loss, bonus = icm(rollout)
    psi, expected = embed(icm.encoder, rollout), np.zeros((T, N))
    for t, n in pairs(rollout):
        one_hot = torch.eye(A)[rollout["actions"][t, n]]
        error = icm.dynamics(torch.cat([psi[t, n], one_hot])) - psi[t + 1, n]
        expected[t, n] = error.square().sum().sqrt().item()
    assert np.allclose(bonus, expected, atol=1e-5) and not bonus.requires_grad
    total = expected.sum() / N + 0.1 * inverse_loss(icm.inverse, psi, rollout)
    assert loss.item() == pytest.approx(total, rel=1e-4)
    loss.backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in icm.parameters())
    assert [name for name, _ in icm.named_children()] == ["encoder", "inverse", "dynamics"]


def test_rnd(rollout):
    rnd = RND(Matrix(), Matrix())
    loss, bonus = rnd(rollout)
    expected, difference = np.zeros((T, N)), rnd.encoder.weight - rnd.target.weight
    for t, n in pairs(rollout):
        error = difference @ rollout["obs"]["x"][t + 1, n]
        expected[t, n] = error.square().sum().sqrt().item()
    assert np.allclose(bonus, expected, atol=1e-5) and not bonus.requires_grad
    assert loss.item() == pytest.approx(expected.sum() / N, rel=1e-4)
    loss.backward()
    assert rnd.encoder.weight.grad.abs().max() > 0 and rnd.target.weight.grad is None


def test_no_bonus_learns_nothing(rollout):
    loss, bonus = NoBonus()(rollout)
    assert loss == 0 and not loss.requires_grad and not list(NoBonus().parameters())
    assert torch.equal(bonus, torch.zeros(T, N))
