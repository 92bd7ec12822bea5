"""The bonuses that E3B is compared with, ICM and RND, and the inverse dynamics that psi learns by.

Each class holds the networks of one bonus. Called with a rollout it gives its loss (), a sum over T
and a mean over N, and the bonus (T, N). Of a rollout they read

    obs       dict of (T + 1, N, ...)
    actions   (T, N) int64
    starts    (T + 1, N) bool           the observation at this index begins an episode
    bonus     (T, N)                    what the actor has paid; 0 but with E3B

After a step that ends an episode comes the next s_0, not s': nothing is learned there, nor paid.

[ICM]  Pathak et al. 2017, Curiosity-driven Exploration by Self-supervised Prediction
[RND]  Burda et al. 2018, Exploration by Random Network Distillation
[E3B]  Henaff et al. 2022, Exploration via Elliptical Episodic Bonuses, and its code: the sizes
"""

import torch
import torch.nn as nn


def embed(encoder, rollout):
    """The embeddings (T + 1, N, d) of all observations of a rollout."""
    embedding = encoder({k: x.flatten(0, 1) for k, x in rollout["obs"].items()})
    return embedding.unflatten(0, rollout["starts"].shape)


class InverseNet(nn.Sequential):
    """Logits (..., A) of the action between two states, from both embeddings (..., 2 d)."""

    def __init__(self, d, num_actions):
        super().__init__(nn.Linear(2 * d, 256), nn.ReLU(), nn.Linear(256, num_actions))

    def loss(self, psi, rollout, scale=1.0):
        """Cross-entropy () of the actions, from scale times psi (T + 1, N, d). [ICM; E3B]"""
        logits = self(scale * torch.cat([psi[:-1], psi[1:]], dim=2)).transpose(1, 2)
        loss = nn.functional.cross_entropy(logits, rollout["actions"], reduction="none")
        return loss.masked_fill(rollout["starts"][1:], 0.0).mean(1).sum()


class NoBonus(nn.Module):
    def forward(self, rollout):
        return rollout["bonus"].sum(), rollout["bonus"]  # both 0


class ICM(nn.Module):
    """Pays for psi(s') that was not foreseen from psi(s) and the action. [ICM; E3B]"""

    def __init__(self, encoder, d, num_actions):
        """
        encoder       gives psi, (M, d), of a dict of observations (M, ...)
        num_actions   A
        """
        super().__init__()
        self.encoder, self.num_actions = encoder, num_actions
        self.inverse = InverseNet(d, num_actions)
        self.dynamics = nn.Sequential(nn.Linear(d + num_actions, d), nn.ReLU(), nn.Linear(d, d))

    def forward(self, rollout):
        psi = embed(self.encoder, rollout)
        inverse_loss = self.inverse.loss(psi, rollout)
        one_hot = nn.functional.one_hot(rollout["actions"], self.num_actions)
        guess = self.dynamics(torch.cat([psi[:-1], one_hot], dim=2))
        error = (guess - psi[1:]).norm(dim=2).masked_fill(rollout["starts"][1:], 0.0)
        return error.mean(1).sum() + 0.1 * inverse_loss, error.detach()


class RND(nn.Module):
    """Pays where a predictor of a random network still fails. [RND; E3B]"""

    def __init__(self, predictor, target):
        """Both turn a dict of observations (M, ...) into (M, d); the target does not learn."""
        super().__init__()
        self.encoder, self.target = predictor, target.requires_grad_(False)

    def forward(self, rollout):
        error = embed(self.encoder, rollout) - embed(self.target, rollout)
        error = error[1:].norm(dim=2).masked_fill(rollout["starts"][1:], 0.0)
        return error.mean(1).sum(), error.detach()
