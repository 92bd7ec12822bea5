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


def rows(folder, name):
    """The rows of a CSV file of a run, as dicts of strings."""
    return list(csv.DictReader((folder / name).read_text().splitlines()))


def texts(folder, names=CSVS):
    """Name -> text of the CSV files that are there."""
    return {name: (folder / name).read_text() for name in names if (folder / name).exists()}
