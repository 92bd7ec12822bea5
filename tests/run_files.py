"""What the tests of the scripts share: quick runs, and what a run wrote."""

import csv

import pytest
import torch

from common import runs

CSVS = ("episodes.csv", "updates.csv", "evals.csv", "visits.csv")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """One thread, and no picture of the visits, which takes half of the time of a tiny run."""
    torch.set_num_threads(1)
    monkeypatch.setattr(runs, "draw_visits", lambda *args: None)


def has_own_weights(network):
    """All layers have the initial weights that PyTorch gives them, and nobody else."""
    layers = [m for m in network.modules() if isinstance(m, torch.nn.Conv2d | torch.nn.Linear)]
    assert layers
    for layer in layers:
        most = layer.weight[0].numel() ** -0.5
        assert layer.weight.abs().max() <= most
        assert layer.weight.std().item() == pytest.approx(most / 3**0.5, rel=0.15)
        assert 0 < layer.bias.abs().max() <= most


def rows(folder, name):
    """The rows of a CSV file of a run, as dicts of strings."""
    return list(csv.DictReader((folder / name).read_text().splitlines()))


def texts(folder, names=CSVS):
    """Name -> text of the CSV files that are there."""
    return {name: (folder / name).read_text() for name in names if (folder / name).exists()}
