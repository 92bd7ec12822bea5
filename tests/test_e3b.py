"""The ellipsoids of E3B against NumPy's inverse in float64, and the rebuilding of phi."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from common.e3b import Ellipsoids

ROOT = Path(__file__).resolve().parent.parent
FORMS = ("dense", "factored")


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def unit(*shape, seed=0):
    return normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)), dim=-1)


@pytest.mark.parametrize("form", FORMS)
def test_bonus_and_inverse_against_numpy_over_50_episodes(form):
    rng = np.random.default_rng(0)
    for episode in range(50):
        d, n, ridge = int(rng.integers(2, 40)), int(rng.integers(1, 5)), float(rng.uniform(0.1, 1))
        ellipsoids = Ellipsoids(n, d, ridge, form=form)
        cov = np.stack([ridge * np.eye(d)] * n)  # (N, d, d)
        for _ in range(int(rng.integers(1, 40))):
            embedding = unit(n, d, seed=int(rng.integers(2**31)))
            inverse = np.stack([np.linalg.inv(matrix) for matrix in cov])
            psi = embedding.double().numpy()
            expected = np.einsum("ni,nij,nj->n", psi, inverse, psi)
            assert np.allclose(ellipsoids.full().numpy(), inverse, atol=2e-5), episode
            diagonal = inverse.diagonal(axis1=1, axis2=2)
            assert np.allclose(ellipsoids.diagonal().numpy(), diagonal, atol=2e-5)
            assert np.allclose(ellipsoids.bonus(embedding).numpy(), expected, rtol=1e-4)
            assert np.allclose(ellipsoids.update(embedding).numpy(), expected, rtol=1e-4)
            cov += psi[:, :, None] * psi[:, None, :]


@pytest.mark.parametrize("form", FORMS)
def test_one_hot_embeddings_are_counts(form):
    """Each state its own axis: the bonus is 1 / (ridge + n), that of a table of visits."""
    d, ridge = 6, 0.1
    ellipsoids = Ellipsoids(1, d, ridge, form=form)
    counts = np.zeros(d)
    for state in np.random.default_rng(0).integers(d, size=300):
        bonus = ellipsoids.update(torch.eye(d)[[state]]).item()
        assert bonus == pytest.approx(1 / (ridge + counts[state]), rel=2e-5)
        counts[state] += 1
    # To the rounding of what the diagonal starts with, 1 / ridge.
    assert ellipsoids.diagonal()[0].numpy() == pytest.approx(1 / (ridge + counts), abs=2e-6)


@pytest.mark.parametrize("form", FORMS)
def test_rounding_over_1200_updates_with_revisits(form):
    """Twelve places, visited a hundred times each: float32 must not drift from float64."""
    d, n, ridge = 64, 2, 0.1
    places, ellipsoids = unit(12, d), Ellipsoids(n, d, ridge, form=form)
    inverse = np.stack([np.eye(d) / ridge] * n)
    rng, worst = np.random.default_rng(0), 0.0
    for _ in range(1200):
        embedding = places[rng.integers(12, size=n)]
        psi = embedding.double().numpy()
        u = np.einsum("nij,nj->ni", inverse, psi)
        expected = (u * psi).sum(1)
        inverse -= u[:, :, None] * u[:, None, :] / (1 + expected)[:, None, None]
        bonus = ellipsoids.update(embedding).numpy()
        worst = max(worst, (abs(bonus - expected) / expected).max())
    assert worst < 1e-3
    assert abs(ellipsoids.full().numpy() - inverse).max() < 1e-4
    assert abs(ellipsoids.diagonal() - ellipsoids.full().diagonal(dim1=1, dim2=2)).max() < 1e-4


@pytest.mark.parametrize("form", FORMS)
def test_a_reset_leaves_the_other_envs_as_they_are(form):
    ellipsoids = Ellipsoids(4, 8, 0.5, form=form)
    for t in range(5):
        ellipsoids.update(unit(4, 8, seed=t))
    before = ellipsoids.full().clone(), ellipsoids.diagonal()
    ellipsoids.reset(torch.tensor([1, 3]))
    for array, then in zip((ellipsoids.full(), ellipsoids.diagonal()), before, strict=True):
        assert (array[[0, 2]] == then[[0, 2]]).all() and (array[[1, 3]] != then[[1, 3]]).any()
    assert (ellipsoids.full()[[1, 3]] == torch.eye(8) / 0.5).all()
    assert (ellipsoids.diagonal()[[1, 3]] == 1 / 0.5).all()
    assert ellipsoids.updates == [5, 0, 5, 0]
    assert ellipsoids.bonus(unit(1, 8), [3]).item() == pytest.approx(1 / 0.5)


@pytest.mark.parametrize("form", FORMS)
def test_some_envs_alone_are_as_all_together(form):
    """Updates, bonuses and readings by env_ids, in any order, and a bonus that changes nothing."""
    some, everyone = Ellipsoids(3, 16, 0.1, form=form), Ellipsoids(3, 16, 0.1, form=form)
    for t in range(20):
        embedding = unit(3, 16, seed=t)
        expected = everyone.update(embedding)
        first = some.update(embedding[[2]], [2])
        others = some.bonus(embedding[[1, 0]], np.array([1, 0]))
        assert torch.equal(others, some.bonus(embedding[[1, 0]], [1, 0]))
        assert torch.equal(others, some.update(embedding[[1, 0]], torch.tensor([1, 0])))
        assert torch.equal(torch.cat([others.flip(0), first]), expected)
    assert torch.equal(some.full(), everyone.full())
    assert torch.equal(some.full([2, 0]), everyone.full()[[2, 0]])
    assert torch.equal(some.diagonal([2, 0]), everyone.diagonal()[[2, 0]])
    assert some.full([]).shape == (0, 16, 16) and some.diagonal([]).shape == (0, 16)
    kept = some.diagonal()
    some.update(unit(3, 16, seed=99))
    assert torch.equal(kept, everyone.diagonal())  # a copy


def act(ellipsoids, embeddings, dones, starts, full):
    """What an actor sees: phi of each step; it counts s_0 with `starts`."""
    read = ellipsoids.full if full else ellipsoids.diagonal
    phis = [read().clone()]
    for t in range(len(embeddings)):
        ellipsoids.update(embeddings[t])
        ended = dones[t].nonzero().flatten()
        if len(ended):
            ellipsoids.reset(ended)
            if starts is not None:
                ellipsoids.update(starts[t][ended], ended)
        phis.append(read().clone())
    return phis


@pytest.mark.parametrize("full", [False, True], ids=["diagonal", "full"])
@pytest.mark.parametrize("counted", [False, True], ids=["s0-not-counted", "s0-counted"])
@pytest.mark.parametrize(("form", "d"), [("dense", 48), ("dense", 33), ("factored", 48)])
def test_phi_of_a_rollout_is_rebuilt_bit_for_bit(form, d, counted, full):
    """Rollout after rollout, with episodes across their borders and several ends in one step."""
    ellipsoids = Ellipsoids(5, d, 0.1, form=form)
    ellipsoids.update(unit(5, d, seed=100))
    ended = 0
    for rollout in range(3):
        embeddings, starts = unit(30, 5, d, seed=rollout), unit(30, 5, d, seed=50 + rollout)
        dones = torch.rand(30, 5, generator=torch.Generator().manual_seed(rollout)) < 0.1
        ended += int(dones.sum())
        starts = starts if counted else None
        state = ellipsoids.get_state()
        phis = act(ellipsoids, embeddings, dones, starts, full)
        after = ellipsoids.get_state()
        for _ in range(2):  # as often as one likes: neither the state nor this object changes
            rebuilt = ellipsoids.rebuild(state, embeddings, dones, starts, full)
            alike = [torch.equal(phi, seen) for phi, seen in zip(rebuilt, phis, strict=True)]
            assert len(alike) == 31 and all(alike)
        for key, value in ellipsoids.get_state().items():
            assert torch.equal(value, after[key]) if torch.is_tensor(value) else value == after[key]
    assert ended > 30


@pytest.mark.parametrize("form", FORMS)
def test_a_state_is_a_copy_and_goes_on_alike(form):
    one, two = Ellipsoids(2, 8, 0.1, form=form), Ellipsoids(2, 8, 0.1, form=form)
    for t in range(4):
        one.update(unit(2, 8, seed=t))
    state = one.get_state()
    kept = {key: value.clone() for key, value in state.items() if torch.is_tensor(value)}
    two.set_state(state)
    two.reset([0])
    two.update(unit(1, 8, seed=77), [0])
    one.update(unit(2, 8, seed=5))
    assert all(torch.equal(state[key], value) for key, value in kept.items())
    two.set_state(state)
    two.update(unit(2, 8, seed=5))
    assert torch.equal(one.full(), two.full()) and one.updates == two.updates == [5, 5]
    with pytest.raises(ValueError, match=r"\[2, 8"):
        Ellipsoids(2, 9, 0.1, form=form).set_state(state)


def test_a_rollout_with_full_ellipsoids_takes_little_memory():
    """T = 80, N = 32, d = 512: all matrices are 2.7 GB; the peak of rebuilding them is measured."""
    code = f"""
import resource, sys
sys.path.insert(0, {str(ROOT)!r})
import torch
from common.e3b import Ellipsoids
torch.set_num_threads(1)
T, N, d = 80, 32, 512
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
ellipsoids = Ellipsoids(N, d, 0.1, form="dense")
ellipsoids.update(torch.randn(N, d) / d**0.5)
before = peak()
state = ellipsoids.get_state()
embeddings, starts = torch.randn(2, T, N, d) / d**0.5
dones = torch.rand(T, N) < 0.02
total = sum(phi[:, 0, 0].sum() for phi in
            ellipsoids.rebuild(state, embeddings, dones, starts, full=True))
held = sum(x.numel() * x.element_size() for x in
           (state["inv_cov"], embeddings, starts, dones, ellipsoids.inv_cov))
print(peak() - before, held / 2**20)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    grown, held = (float(word) for word in out.stdout.split())  # MiB
    assert grown < 150 and held < 100


def test_the_factored_form_holds_what_the_longest_episode_needs():
    ellipsoids = Ellipsoids(2, 300, 0.1, max_updates=300)
    assert ellipsoids.form == "factored"
    for t in range(70):
        ellipsoids.update(unit(2, 300, seed=t))
        if t % 10 == 9:
            ellipsoids.reset([0, 1])
    assert ellipsoids.factors.shape[1] < 25 and ellipsoids.inv_cov.numel() == 0
    assert ellipsoids.get_state()["factors"].shape[1] == 0


@pytest.mark.parametrize(
    ("dim", "max_updates", "form"),
    [(128, 100, "dense"), (512, None, "dense"), (512, 513, "dense"), (512, 512, "factored")],
)
def test_the_form_is_chosen_by_size(dim, max_updates, form):
    assert Ellipsoids(1, dim, 0.1, max_updates=max_updates).form == form
    assert Ellipsoids(1, dim, 0.1, form="dense", max_updates=1).form == "dense"


def test_no_gradient_flows_through_the_ellipsoid():
    ellipsoids = Ellipsoids(1, 4, 0.1)
    assert not ellipsoids.update(unit(1, 4).requires_grad_()).requires_grad
    assert not ellipsoids.full().requires_grad


@pytest.mark.parametrize("shape", [(2, 4), (3, 5), (3,)])
def test_embeddings_of_another_shape_are_refused(shape):
    with pytest.raises(ValueError, match=r"embedding must be \(3, 4\)"):
        Ellipsoids(3, 4, 0.1).update(torch.zeros(shape))


@pytest.mark.parametrize("values", [(0, 4, 0.1), (1, 0, 0.1), (1, 4, 0.0), (1, 4, float("nan"))])
def test_bad_sizes_are_refused(values):
    with pytest.raises(ValueError, match="form is auto, dense or factored"):
        Ellipsoids(2, 3, 0.1, form="Factored")
    with pytest.raises(ValueError, match="greater than 0"):
        Ellipsoids(*values)


@pytest.mark.parametrize("ids", [[2, 0, 1], [1, 2], [0, 1, 2]], ids=str)
def test_the_batched_form_of_an_accelerator_takes_the_envs_in_any_order(ids):
    loop, batch = Ellipsoids(3, 5, 0.1), Ellipsoids(3, 5, 0.1)
    batch.device = SimpleNamespace(type="cuda")  # its tensors stay on the CPU
    batch._own = torch.Tensor.clone
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        psi = torch.randn((len(ids), 5), generator=generator)
        assert torch.allclose(batch.update(psi, ids), loop.update(psi, ids), rtol=1e-4)
    assert torch.allclose(batch.inv_cov, loop.inv_cov, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA here")
def test_cuda_gives_the_same_and_rebuilds_bit_for_bit():
    cpu, cuda = Ellipsoids(4, 64, 0.1), Ellipsoids(4, 64, 0.1, "cuda")
    embeddings, starts = unit(2, 30, 4, 64)
    dones = torch.rand(30, 4, generator=torch.Generator().manual_seed(0)) < 0.1
    state = cuda.get_state()
    expected = act(cpu, embeddings, dones, starts, True)
    inputs = embeddings.cuda(), dones.cuda(), starts.cuda()
    phis = act(cuda, *inputs, True)
    assert (expected[-1] - phis[-1].cpu()).abs().max() < 1e-4
    for phi, seen in zip(cuda.rebuild(state, *inputs, True), phis, strict=True):
        assert torch.equal(phi, seen)


def test_the_peers_of_the_benchmark_compute_the_same(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from e3b_speed import make_contenders

    contenders = make_contenders(3, 24)
    for t in range(40):
        embedding = unit(3, 24, seed=t)
        first, *others = (contender.update(embedding) for contender in contenders.values())
        assert len(others) == 3 and all(torch.allclose(first, other, 1e-4) for other in others)
