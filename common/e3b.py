"""The ellipsoids of E3B for N environments at once: bonus, update, and phi for SOFE. [E3B]

An episode's ellipsoid is C = ridge I + sum of psi psi^T over the embeddings psi seen in it, and the
bonus of a state is psi^T C^-1 psi. One more embedding changes the inverse by a product of a vector
with itself (Sherman and Morrison), so no matrix is ever inverted:

    u = C^-1 psi        b = psi^T u  (the bonus)        v = u / sqrt(1 + b)        C^-1 -= v v^T

Two forms hold the same C^-1. `dense` keeps the matrices, (N, d, d). `factored` keeps the vectors v,
of which an episode of k updates has k: C^-1 = I / ridge - V^T V. It reads k d numbers where the
other reads and writes d^2, so it is the faster one while episodes are shorter than d, on a CPU,
where the time is that of the memory; `benchmarks/e3b_speed.csv` has the figures.

Rounding: give it embeddings of length 1. Then float32 keeps the bonus of a state that was seen a
thousand times within 0.1% of float64's. A longer embedding loses more, 1% at length sqrt(512): the
small bonus of a known state is a difference of terms as large as the first one, |psi|^2 / ridge.

[E3B]  Henaff et al. 2022, Exploration via Elliptical Episodic Bonuses
"""

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

SMALL = 256  # with fewer dimensions than this the dense form is as fast as the other


class Ellipsoids:
    """The inverse ellipsoids C^-1 of N environments, changed in place. [E3B]

    inv_cov    (N, d, d) float32   C^-1 in the dense form, else of length 0
    factors    (N, K, d) float32   the vectors v in the factored form; K grows with the episodes
    diagonals  (N, d) float32      the diagonals of C^-1 in the factored form, else of length 0
    updates    (N,) list of int    how many updates each env has had since its reset
    form       dense or factored

    Order in a step, where s_0 counts as seen when an episode starts: read `diagonal` or `full` as
    phi_t; `update` with psi(s'), which gives the bonus; where the episode ended, `reset` and
    `update` with psi(s_0) of the new one.
    """

    def __init__(
        self,
        num_envs: int,
        dim: int,
        ridge: float,
        device: torch.device | str = "cpu",
        form: Literal["auto", "dense", "factored"] = "auto",
        max_updates: int | None = None,
    ):
        """
        num_envs      N
        dim           d, length of an embedding
        ridge         lambda > 0: C is ridge I before the first update
        form          auto: factored on a CPU where d >= SMALL and max_updates <= d, else dense.
                      Take dense where `full` is read in each step
        max_updates   updates of the longest episode (None: not known)
        """
        if num_envs < 1 or dim < 1 or not ridge > 0:
            raise ValueError("num_envs, dim and ridge must be greater than 0")
        if form not in ("auto", "dense", "factored"):
            raise ValueError(f"form is auto, dense or factored, not {form!r}")
        self.num_envs, self.dim, self.ridge = num_envs, dim, ridge
        self.device = torch.device(device)
        if form == "auto":
            short = max_updates is not None and max_updates <= dim
            fits = self.device.type == "cpu" and dim >= SMALL and short
            form = "factored" if fits else "dense"
        self.form = form
        self.updates = [0] * num_envs
        size = dim if form == "dense" else 0
        self.inv_cov = torch.zeros((num_envs, size, size), device=self.device)
        self.factors = torch.zeros((num_envs, 0, dim), device=self.device)
        self.diagonals = torch.zeros((num_envs, dim if form == "factored" else 0), device=device)
        self.reset(range(num_envs))

    def reset(self, env_ids: Any) -> None:
        """C = ridge I in some envs; env_ids is a list or an array of their numbers."""
        for i in _numbers(env_ids):
            self.updates[i] = 0
            if self.form == "dense":
                self.inv_cov[i].zero_().diagonal().fill_(1 / self.ridge)
            else:
                self.diagonals[i] = 1 / self.ridge

    def solve(self, embedding: Tensor, env_ids: Any = None) -> Tensor:
        """u = C^-1 psi.

        embedding   (K, d) float32   psi in the envs env_ids (None: in all, K = N)
        returns     (K, d) float32
        """
        env_ids, embedding = self._ids(env_ids, embedding), self._own(embedding)
        if self.device.type != "cpu" and self.form == "dense":
            everyone = env_ids == list(range(self.num_envs))
            inv_cov = self.inv_cov if everyone else self.inv_cov[env_ids]
            return torch.bmm(inv_cov, embedding.unsqueeze(2)).squeeze(2)
        # Matrix after matrix is faster on a CPU than a batch of them.
        u = torch.empty_like(embedding)
        for row, (i, psi) in enumerate(zip(env_ids, embedding, strict=True)):
            if self.form == "dense":
                torch.mv(self.inv_cov[i], psi, out=u[row])
            else:
                v = self.factors[i, : self.updates[i]]
                torch.div(psi, self.ridge, out=u[row])
                u[row].addmv_(v.T, torch.mv(v, psi), alpha=-1)
        return u

    def subtract(self, v: Tensor, env_ids: Any = None) -> None:
        """C^-1 -= v v^T in each env, each at most once; v and env_ids as in `solve`."""
        env_ids = self._ids(env_ids, v)
        if self.form == "factored":
            needed = 1 + max((self.updates[i] for i in env_ids), default=-1)
            if needed > self.factors.shape[1]:
                room = self.factors.new_zeros((self.num_envs, needed, self.dim))
                self.factors = torch.cat([self.factors, room], 1)
            for i, row in zip(env_ids, v, strict=True):
                self.factors[i, self.updates[i]] = row
                self.diagonals[i].addcmul_(row, row, value=-1)
        elif self.device.type == "cpu":
            for i, row in zip(env_ids, v, strict=True):
                self.inv_cov[i].addr_(row, row, alpha=-1)
        elif env_ids == list(range(self.num_envs)):
            self.inv_cov.baddbmm_(v.unsqueeze(2), v.unsqueeze(1), alpha=-1)
        else:
            self.inv_cov[env_ids] -= v.unsqueeze(2) * v.unsqueeze(1)
        for i in env_ids:
            self.updates[i] += 1

    def bonus(self, embedding: Tensor, env_ids: Any = None) -> Tensor:
        """psi^T C^-1 psi without an update. [E3B eq. 1]

        embedding, env_ids   as in `solve`
        returns   (K,) float32   > 0; at most |psi|^2 / ridge, in an episode's first update
        """
        own = self._own(embedding)
        return (own * self.solve(own, env_ids)).sum(1)

    def update(self, embedding: Tensor, env_ids: Any = None) -> Tensor:
        """Add psi psi^T to C in each env, each at most once; return the bonus from before."""
        own = self._own(embedding)
        u = self.solve(own, env_ids)
        bonus = (own * u).sum(1)
        self.subtract(u / (1 + bonus).sqrt().unsqueeze(1), env_ids)
        return bonus

    def _own(self, embedding: Tensor) -> Tensor:
        """A copy at the start of a block of memory: the sums of a BLAS depend on the alignment."""
        return embedding.detach().to(self.device, torch.float32, copy=True).contiguous()

    def _ids(self, env_ids: Any, embedding: Tensor) -> list[int]:
        env_ids = list(range(self.num_envs)) if env_ids is None else _numbers(env_ids)
        if embedding.shape != (len(env_ids), self.dim):
            raise ValueError(
                f"embedding must be {(len(env_ids), self.dim)}, got {tuple(embedding.shape)}"
            )
        return env_ids

    def diagonal(self, env_ids: Any = None) -> Tensor:
        """The diagonal of C^-1 in some envs (None: in all), (K, d) float32, a copy."""
        if self.form == "factored":
            diagonals = self.diagonals
        else:
            diagonals = self.inv_cov.diagonal(dim1=1, dim2=2)
        return diagonals.clone() if env_ids is None else diagonals[_numbers(env_ids)]

    def full(self, env_ids: Any = None) -> Tensor:
        """C^-1 in some envs (None: in all), (K, d, d) float32.

        Of all envs in the dense form it is no copy: read it, or copy it, before the next update.
        """
        if self.form == "dense":
            return self.inv_cov if env_ids is None else self.inv_cov[_numbers(env_ids)]
        env_ids = range(self.num_envs) if env_ids is None else _numbers(env_ids)
        full = torch.zeros((len(env_ids), self.dim, self.dim), device=self.device)
        for row, i in enumerate(env_ids):
            v = self.factors[i, : self.updates[i]]
            full[row].diagonal().fill_(1 / self.ridge)
            full[row].addmm_(v.T, v, alpha=-1)
        return full

    def get_state(self) -> dict[str, Any]:
        """A copy of everything that `set_state` and `rebuild` need."""
        longest = max(self.updates)
        return {
            "updates": list(self.updates),
            "inv_cov": self.inv_cov.clone(),
            "factors": self.factors[:, :longest].clone(),
            "diagonals": self.diagonals.clone(),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Put back what `get_state` found; ValueError where it was of another size or form."""
        for name in ("inv_cov", "diagonals"):
            saved, mine = state[name], getattr(self, name)
            if saved.shape != mine.shape:
                raise ValueError(f"{name} {list(saved.shape)}, not {list(mine.shape)}")
            mine.copy_(saved)
        self.factors = state["factors"].to(self.device, copy=True)
        self.updates = list(state["updates"])

    def rebuild(
        self,
        state: dict[str, Any],
        embeddings: Tensor,
        dones: Tensor,
        start_embeddings: Tensor | None = None,
        full: bool = False,
    ) -> Iterator[Tensor]:
        """phi of each step of a rollout, bit for bit as it was, from what a rollout can hold.

        All (N, d, d) matrices of 80 steps, 32 envs and d = 512 are 2.7 GB; the first ones and the
        embeddings are 44 MB. This object stays as it is.

        state             what `get_state` gave before the first step
        embeddings        (T, N, d)      psi of the true s' that each action led to
        dones             (T, N) bool    whether the episode ended there
        start_embeddings  (T, N, d)      where it did, psi(s_0) of the next one; other rows are not
                                         read (None: s_0 is not counted)
        full              bool           the whole matrices, or the diagonals
        returns           T + 1 tensors (N, d) or (N, d, d): phi_t, on which action t was chosen,
                          and at the end phi_T; changed by the next step: use it before
        """
        twin = Ellipsoids(self.num_envs, self.dim, self.ridge, self.device, self.form)
        twin.set_state(state)
        read = twin.full if full else twin.diagonal
        yield read()
        for t in range(len(embeddings)):
            twin.update(embeddings[t])
            ended = _numbers(dones[t].nonzero().flatten())
            twin.reset(ended)
            if start_embeddings is not None and ended:
                twin.update(start_embeddings[t, ended], ended)
            yield read()


class RunningStd:
    """The standard deviation of all numbers met so far, however many come at once."""

    def __init__(self):
        self.moments = torch.zeros(3, dtype=torch.float64)  # how many, their sum, sum of squares

    def update(self, x: Tensor) -> float:
        """Take in x, of any shape; return the deviation with x, at least 1e-4; of one number 1."""
        x = x.detach().cpu().double()
        self.moments += torch.stack([torch.tensor(x.numel()), x.sum(), x.square().sum()])
        if self.moments[0] < 2:
            return 1.0
        mean, mean_square = self.moments[1:] / self.moments[0]
        return max((mean_square - mean**2).clamp(min=0).sqrt().item(), 1e-4)

    def state_dict(self) -> dict[str, Tensor]:
        return {"moments": self.moments}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.moments = state["moments"].clone()


def _numbers(env_ids: Any) -> list[int]:
    return env_ids.tolist() if hasattr(env_ids, "tolist") else list(env_ids)
