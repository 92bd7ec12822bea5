"""SAC with exploration bonuses in a 3D map, and SOFE: the agent sees what the bonus is made of.

A bonus made of visit counts pays less for a place each time, so an agent that sees only the map
chases a moving reward. SOFE shows it the counts, phi_t, beside the observation, and the reward
becomes a fixed function of what it sees: see `visit`, `compute_bonus`, `augment`, `phi_tower`.
The replay buffer keeps the counts of each step, so that an old reward is met with its own phi_t.

    python sac_sofe_godot.py --bonus sqrt --augment      # reward-free exploration with SOFE
    python sac_sofe_godot.py --bonus sqrt                # the same bonus without SOFE
The defaults want a GPU; docs/sac_sofe_godot.md has the smaller CPU setting. The map runs in the
Godot 3 engine (Debian, Ubuntu: apt install godot3-server).

Sources; a tag names a label of the paper, a section or a function there
    [SOFE]  Castanyer et al. 2024, Improving Intrinsic Exploration by Creating Stationary Objectives
    [SAC]   Haarnoja et al. 2018, Soft Actor-Critic (ICML); [SAC+] their Algorithms and Applications
    [SB3]   stable-baselines3, which the paper used: its defaults where the paper is silent

The setting is the paper's reward-free one, --ext-coef 0. The paper passes observations through the
same CNN as counts; raycasts are no map, and pass one layer here. Where it is silent (more in
docs/sac_sofe_godot.md): sqrt pays beta / sqrt(N_t(s') + 1), a first visit beta; s_0 counts once
when an episode starts; counts enter the networks as 1 / sqrt(1 + N); a time limit is no death, the
target goes on with the true s' and the old episode's phi; lava is one, no value follows.
"""

import copy
import math
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch
import torch.nn as nn
import tyro
from torch.nn.functional import softplus

from common import godot, runs


@dataclass
class Args:
    # Run
    seed: int = 1
    """seed of the networks, the actions and the replay samples"""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """where to compute; auto is CUDA where there is one, else the CPU"""
    num_threads: int = 1
    """CPU threads of PyTorch; 1 is best where several runs share a machine"""
    total_timesteps: int = 1_000_000
    """environment steps, summed over the envs, rounded up to whole rows of the log"""
    runs_dir: str = "runs"
    """folder in which the run makes its own folder"""
    run_name: str | None = None
    """name of the run's folder (None: made from the settings and the time)"""
    resume: str | None = None
    """folder of a run to go on with; its arguments are taken from there"""
    checkpoint_every: int = 500_000
    """environment steps between two checkpoints on disk, which hold the replay buffer"""
    eval_episodes: int = 10
    """episodes of an evaluation, greedy and again sampled (0: no evaluation)"""
    eval_every: int = 0
    """environment steps between two evaluations (0: only one at the end)"""
    track: bool = False
    """mirror the run to Weights & Biases (pip install wandb)"""
    # Environment: N agents in one map, each in its own episode, who do not meet
    max_steps: int = 1000
    """time limit of an episode in steps, a truncation"""
    action_repeat: int = 8
    """ticks of 1/60 s that an action is held for: the length of a step"""
    engine_path: str | None = None
    """program of the engine, Godot 3 (None: godot3-server or godot3, where the shell finds it)"""
    # Algorithm, as in [SB3 SAC]; tower of phi as in [SOFE app:train_details]
    learning_rate: float = 3e-4
    """step size of Adam, for the actor, the critic and the temperature"""
    num_envs: int = 8
    """N, parallel environments"""
    buffer_size: int = 1_000_000
    """transitions in the replay buffer, summed over the envs"""
    learning_starts: int = 100
    """environment steps, summed over the envs, of uniform random actions before the first update"""
    minibatch_size: int = 256
    """M, transitions per gradient step"""
    gradient_steps: int = 1
    """gradient steps after each step of the N envs"""
    init_alpha: float = 1.0
    """temperature at the start, > 0, in units of the reward; it adapts from there"""
    tau: float = 0.005
    """how far the target critic moves at each gradient step, in (0, 1]"""
    gamma: float = 0.99
    """discount per step, in [0, 1]"""
    log_every: int = 100
    """steps of each env per row of updates.csv and per state that a stopped run can go on from"""
    channels: int = 64
    """channels of each convolution of a tower (64: the paper; 16: the CPU setting)"""
    embedding_dim: int = 512
    """features that a tower ends in (512: the paper; 64: the CPU setting)"""
    hidden_dim: int = 256
    """units of each of the two layers between the towers and an output"""
    # Exploration bonus
    bonus: Literal["none", "sqrt", "salesman"] = "sqrt"
    """the intrinsic reward, see `compute_bonus`; none: this map then has no reward at all"""
    counts: Literal["episodic", "global"] = "episodic"
    """episodic: a table per env and episode; global: one for the run"""
    augment: bool = False
    """SOFE: show the bonus's statistics phi_t to the agent"""
    beta: float = 1.0
    """weight of the bonus, >= 0; with --ext-coef 0 it is the scale of all that is learned from"""
    anneal_beta: bool = False
    """lower beta linearly to 0 over total_timesteps; phi does not show beta"""
    ext_coef: float = 0.0
    """weight of the task's own reward, >= 0; 0 is the reward-free setting"""

    def __post_init__(self):
        no_updates = max(self.learning_starts, self.num_envs) >= self.total_timesteps
        runs.check_args(
            self,
            "seed eval_every eval_episodes beta ext_coef gamma learning_starts",
            "gamma tau",
            ("--augment and --bonus none: no statistics", self.augment and self.bonus == "none"),
            ("--learning-starts >= --total-timesteps: no update", no_updates and not self.resume),
            ("--buffer-size < --num-envs", self.buffer_size < self.num_envs),
            ("--eval-every and --eval-episodes 0", self.eval_every and not self.eval_episodes),
        )


def make_envs(args, num_envs):
    """N agents in an engine of their own; README.md lists what environments of yours must give."""
    return godot.GodotVecEnv(num_envs, args.max_steps, args.action_repeat, args.engine_path)


# What the paper is about: count the visits, pay for them, show the counts. As in the other scripts,
# without S-Max, which the paper has for the mazes alone; hence no shared region.
def visit(counts, table_ids, cells):
    """Record that each env reached its cell. [SOFE sec:method: the update of phi is Markovian]

    counts      (R, H, W) int64   visit tables, changed in place: R = N, one per env, or 1 for all
    table_ids   (K,)      int64   the table of each env; several envs may share one
    cells       (K, 2)    int64   (row, column) of s'; (-1, -1), where it is no cell, adds 0
    """
    counts.index_put_((table_ids, *cells.T), (cells[:, 0] >= 0).long(), accumulate=True)


def compute_bonus(counts, table_ids, cells, bonus):
    """B(s' | phi_t): what it pays to reach s', from counts that do not hold this visit yet.

    counts, table_ids, cells   as in `visit`
    bonus                      sqrt      1 / sqrt(N_t(s') + 1)                    [SOFE sqrt_rew]
                               salesman  1 if N_t(s') = 0, else 0             [SOFE salesman_rew]
    returns                    (K,) float32; 0 where s' is no cell
    """
    visits = counts[(table_ids, *cells.T)]
    if bonus == "sqrt":
        value = (visits + 1).rsqrt()
    elif bonus == "salesman":
        value = (visits == 0).float()
    else:
        value = torch.zeros(len(visits), device=counts.device)
    return torch.where(cells[:, 0] >= 0, value, 0.0)


def augment(counts, table_ids, args):
    """phi_t as the networks see it. [SOFE sec:method: the augmented state is the pair (obs, phi)]

    counts, table_ids   as in `visit`
    returns             (K, F, H, W) float32; F = 1 map of counts, 0 without SOFE
    The encoding is fixed, bounded and invertible; paper/ablation_encoding.py compares others.
    """
    if not args.augment:
        return torch.zeros((len(table_ids), 0, *counts.shape[1:]), device=counts.device)
    return (counts + 1).rsqrt().unsqueeze(1)[table_ids]


def make_tower(shape, args):
    """A CNN for maps (M, C, H, W), a layer for (M, C): features (M, D). [SOFE app:train_details]"""
    channels, *size = shape
    layers = []
    for _ in range(3 if size else 0):
        convolution = nn.Conv2d(channels, args.channels, kernel_size=3, stride=2, padding=1)
        layers += [convolution, nn.ReLU(inplace=True)]
        channels, size = args.channels, [(side + 1) // 2 for side in size]
    linear = nn.Linear(channels * math.prod(size), args.embedding_dim)
    return nn.Sequential(*layers, nn.Flatten(), linear, nn.ReLU(inplace=True))


class Towers(nn.Module):
    """Features of the observation and, with SOFE, of phi; one for the actor, one for the critic."""

    def __init__(self, envs, phi_shape, args):
        super().__init__()
        self.obs_tower = make_tower(envs.single_observation_space.shape, args)
        self.phi_tower = make_tower(phi_shape, args) if args.augment else None
        self.size = args.embedding_dim * (2 if args.augment else 1)

    def forward(self, obs, phi):
        features = self.obs_tower(obs)
        if self.phi_tower is None:
            return features
        return torch.cat([features, self.phi_tower(phi)], dim=1)


def make_head(inputs, outputs, args):
    hidden, relu = args.hidden_dim, partial(nn.ReLU, inplace=True)
    first, second = nn.Linear(inputs, hidden), nn.Linear(hidden, hidden)
    return nn.Sequential(first, relu(), second, relu(), nn.Linear(hidden, outputs))


class Actor(nn.Module):
    """The Gaussian of which `squash` makes actions. [SB3 Actor]"""

    def __init__(self, envs, phi_shape, args):
        super().__init__()
        self.towers = Towers(envs, phi_shape, args)
        self.head = make_head(self.towers.size, 2 * envs.single_action_space.shape[0], args)

    def forward(self, obs, phi):
        """obs (M, D) and phi (M, F, H, W) -> mean and log of the deviation, (M, A) each."""
        mean, log_std = self.head(self.towers(obs, phi)).chunk(2, dim=1)
        return mean, log_std.clamp(-20, 2)


class Critic(nn.Module):
    """Two soft Q on the same features. [SB3 ContinuousCritic]"""

    def __init__(self, envs, phi_shape, args):
        super().__init__()
        self.towers = Towers(envs, phi_shape, args)
        inputs = self.towers.size + envs.single_action_space.shape[0]
        self.qf1, self.qf2 = (make_head(inputs, 1, args) for _ in range(2))

    def forward(self, obs, phi, actions):
        """obs (M, D), phi (M, F, H, W) and actions (M, A) -> both Q (M, 2)."""
        inputs = torch.cat([self.towers(obs, phi), actions], dim=1)
        return torch.cat([self.qf1(inputs), self.qf2(inputs)], dim=1)


def squash(mean, log_std, noise):
    """Actions a = tanh(u), u = mean + sigma noise, and log p(a). [SAC app: enforcing action bounds]

    mean, log_std, noise   (M, A)   noise is standard normal, or 0 for the greedy action
    returns                actions (M, A) in [-1, 1], logprobs (M,)
    The density of u is divided by da/du = 1 - tanh(u)^2. Its logarithm is written as
    2 (log 2 - u - softplus(-2 u)), which is finite where tanh(u) is rounded to 1.
    """
    u = mean + log_std.exp() * noise
    log_normal = -(noise.square() + math.log(2 * math.pi)) / 2 - log_std
    log_slope = 2 * (math.log(2) - u - softplus(-2 * u))
    return u.tanh(), (log_normal - log_slope).sum(1)


class ReplayBuffer:
    """The latest steps of the N envs as a ring of L rows; `total += 1` completes a row.

    obs, next_obs   (L, N, D) float32
    counts          (L, N or 1, H, W)       before the step; after it: the same plus the visits;
                                            uint16 if episodic, int64 of the one global table
    visits          (L, N, 2, 2) int16      cells of s', and of the next s_0 if the episode ended,
                                            else (-1, -1)
    The log_every oldest rows are not sampled any more: what the last row of the log began from can
    still be saved whole.
    """

    def __init__(self, envs, table_shape, args):
        N, self.args = args.num_envs, args
        obs, actions = envs.single_observation_space.shape, envs.single_action_space.shape
        self.total = np.zeros((), np.int64)  # rows completed
        self.capacity = args.buffer_size // N  # rows that are sampled from
        self.L = self.capacity + args.log_every
        kinds = dict(obs=((N, *obs), "f4"), next_obs=((N, *obs), "f4"))
        kinds |= dict(actions=((N, *actions), "f4"), rewards=((N,), "f4"))
        kinds |= dict(terminated=((N,), "?"), ended=((N,), "?"))
        if args.augment:  # an episode's counts fit in 16 bits, those of a run may not
            counts = "u2" if args.counts == "episodic" else "i8"
            kinds |= dict(counts=(table_shape, counts), visits=((N, 2, 2), "i2"))
        row_bytes = sum(math.prod(s) * np.dtype(kind).itemsize for s, kind in kinds.values())
        runs.check_memory("replay buffer", self.L * row_bytes, torch.device("cpu"))
        self.columns = {name: np.zeros((self.L, *s), kind) for name, (s, kind) in kinds.items()}

    def put(self, **values):
        for name in values.keys() & self.columns.keys():
            value, column = values[name], self.columns[name]
            if name == "counts" and value.max() > np.iinfo(column.dtype).max:
                runs.fail("a cell was visited 65536 times in an episode: take --counts global")
            column[self.total % self.L] = value

    def sample(self, M, device):
        """M transitions, drawn uniformly with replacement.

        returns   dict of tensors on the device: obs, next_obs (M, D); phi, next_phi (M, F, H, W);
                  actions (M, A); rewards (M,); discounts (M,), of the value of next_obs, 0 where
                  the episode was terminated
        """
        columns, total = self.columns, int(self.total)  # rows are counted on; modulo L: places
        rows = torch.randint(max(0, total - self.capacity), total, (M,)).numpy() % self.L
        at = (rows, torch.randint(self.args.num_envs, (M,)).numpy())
        batch = {name: columns[name][at] for name in ("obs", "next_obs", "actions", "rewards")}
        batch["discounts"] = np.float32(self.args.gamma) * ~columns["terminated"][at]
        batch |= {"phi": self.phi(*at, False), "next_phi": self.phi(*at, True)}
        return {name: torch.as_tensor(value, device=device) for name, value in batch.items()}

    def phi(self, rows, env, after):
        """phi (M, F, H, W) before or after the steps in rows (M,) of env (M,), as it was seen."""
        if not self.args.augment:
            return torch.zeros(len(rows), 0, 1, 1)
        episodic = self.args.counts == "episodic"
        counts = self.columns["counts"][rows, env if episodic else 0].astype(np.int64)
        counts, ids = torch.from_numpy(counts), torch.arange(len(rows))
        if after:
            # Add the env's own s', or with one table those of all envs and their new s_0. Where
            # this env's episode ended, phi is from before any s_0 was counted.
            which = env[:, None] if episodic else np.arange(self.args.num_envs)[None]
            visits = self.columns["visits"][rows[:, None], which]  # (M, 1 or N, s' and s_0, 2)
            visits[self.columns["ended"][rows, env], :, 1] = -1
            visits = torch.from_numpy(visits).long()
            visit(counts, ids.repeat_interleave(visits[0].numel() // 2), visits.flatten(0, 2))
        return augment(counts, ids, self.args)


def critic_loss(critic, critic_target, actor, alpha, batch, noise):
    """Squared soft Bellman error of both Q, with a target Q and no V. [SAC+; SB3 SAC.train]

    batch     dict            what `ReplayBuffer.sample` returns
    alpha     ()              the temperature
    noise     (M, A)          of the actions that the actor takes in s'
    returns   loss (), and Q of the actions in the batch, mean ()
    """
    with torch.no_grad():
        next_state = batch["next_obs"], batch["next_phi"]
        next_actions, next_logprobs = squash(*actor(*next_state), noise)
        next_values = critic_target(*next_state, next_actions).amin(1) - alpha * next_logprobs
        td_target = batch["rewards"] + batch["discounts"] * next_values
    q = critic(batch["obs"], batch["phi"], batch["actions"])  # (M, 2)
    return (q - td_target[:, None]).square().mean(0).sum() / 2, q.detach().mean()


def actor_loss(critic, alpha, batch, actions, logprobs):
    """Minus the soft value of the actor's own actions (M, A). [SAC+; SB3 SAC.train]"""
    return (alpha * logprobs - critic(batch["obs"], batch["phi"], actions).amin(1)).mean()


def alpha_loss(log_alpha, logprobs, target_entropy):
    """Raises the temperature where the entropy is below its target. [SAC+; linear as in SB3]"""
    entropy = -logprobs.detach().mean()
    return log_alpha * (entropy - target_entropy)


def descend(optimizer, loss):
    """A step of the optimizer; gradients of no other weights are computed."""
    weights = optimizer.param_groups[0]["params"]
    optimizer.zero_grad()
    loss.backward(inputs=weights)
    optimizer.step()


@torch.no_grad()
def evaluate(actor, counts, args):
    """Play E = `eval_episodes` greedily and E with sampled actions, one env each.

    counts    (R, H, W) int64   of training, never written: every env counts on in a copy of its
                                own (global) or from an empty table (episodic)
    returns   eval/greedy_return, _length, _coverage and eval/sampled_..., means over E episodes
    """
    E, device = args.eval_episodes, counts.device
    envs = make_envs(args, 2 * E)
    obs, info = envs.reset(seed=args.seed + 10_000)
    generator = torch.Generator(device).manual_seed(args.seed + 10_000)  # not that of training
    table_ids = torch.arange(2 * E, device=device)
    counts = counts[:1].repeat(2 * E, 1, 1) * (args.counts == "global")
    visit(counts, table_ids, torch.as_tensor(info["cell"], device=device))
    episodes = runs.FirstEpisodes(2 * E, ("r", "l", "coverage"))
    while episodes.playing.any():
        phi = augment(counts, table_ids, args)
        mean, log_std = actor(torch.as_tensor(obs, device=device), phi)
        noise = torch.randn(mean.shape, generator=generator, device=device)
        actions, _ = squash(mean, log_std, noise * (table_ids >= E)[:, None])
        obs, _, terminated, truncated, info = envs.step(actions.cpu().numpy())
        episodes.record(info, np.flatnonzero(terminated | truncated))
        visit(counts, table_ids, torch.as_tensor(info["cell"], device=device))
    envs.close()
    metrics, means = {}, episodes.results.reshape(3, 2, E).mean(2).tolist()
    for name, (greedy, sampled) in zip(("return", "length", "coverage"), means, strict=True):
        metrics |= {f"eval/greedy_{name}": greedy, f"eval/sampled_{name}": sampled}
    return metrics


@runs.in_one_line(godot.EngineError)
def main(args: Args) -> dict[str, float]:
    args = runs.resume_args(args, "sac_sofe_godot")
    device = runs.set_up(args)  # seeds and threads as well
    to_device = partial(torch.as_tensor, device=device)
    N = args.num_envs
    envs = make_envs(args, N)
    A = envs.single_action_space.shape[0]  # the target entropy is -A [SB3 SAC.target_entropy]
    table_ids = torch.arange(N, device=device) * (args.counts == "episodic")  # global: all 0
    counts = torch.zeros(int(table_ids[-1]) + 1, *envs.reachable.shape, device=device).long()
    phi_shape = augment(counts, table_ids, args).shape[1:]
    episode_bonus = torch.zeros(N, device=device)
    replay = ReplayBuffer(envs, counts.shape, args)
    actor, critic = Actor(envs, phi_shape, args), Critic(envs, phi_shape, args)
    actor, critic = (x.to(device, memory_format=torch.channels_last) for x in (actor, critic))
    critic_target = copy.deepcopy(critic).requires_grad_(False)
    weights, target_weights = list(critic.parameters()), list(critic_target.parameters())
    log_alpha = torch.tensor(math.log(args.init_alpha), device=device, requires_grad=True)
    adam = partial(torch.optim.Adam, lr=args.learning_rate, fused=True)
    actor_adam, critic_adam, alpha_adam = adam(actor.parameters()), adam(weights), adam([log_alpha])
    kept = dict(actor=actor, critic=critic, critic_target=critic_target, envs=envs, counts=counts)
    kept |= dict(actor_adam=actor_adam, critic_adam=critic_adam, alpha_adam=alpha_adam)
    kept |= dict(bonus=episode_bonus, log_alpha=log_alpha.detach())  # detached: the same memory
    run = runs.Run(args, "sac_sofe_godot", envs.reachable, kept, (replay.total, replay.columns))
    global_step = run.start_step
    if args.resume is None:
        _, info = envs.reset(seed=args.seed)
        visit(counts, table_ids, to_device(info["cell"]))
        run.log_step(0, info["cell"])
    next_obs = envs.observe()  # as reset returned it, or as the checkpoint left it
    next_phi = augment(counts, table_ids, args)
    log_steps = N * args.log_every  # environment steps
    num_updates = -(-args.total_timesteps // log_steps) * args.log_every  # rounded up
    for update in range(global_step // N, num_updates):
        if update % args.log_every == 0:
            run.checkpoint(global_step)
            terms, bonuses = [], []
        beta = args.beta * ((1 - update / num_updates) if args.anneal_beta else 1)
        if global_step < args.learning_starts:
            actions = torch.rand(N, A, device=device) * 2 - 1
        else:
            with torch.no_grad():
                noise = torch.randn(N, A, device=device)
                actions, _ = squash(*actor(to_device(next_obs), next_phi), noise)
        actions = actions.cpu().numpy()
        replay.put(obs=next_obs, counts=counts.cpu().numpy(), actions=actions)
        next_obs, ext_rewards, terminated, truncated, info = envs.step(actions)
        global_step += N

        # The bonus of the true s' from the statistics before it, then the visit.
        ended, cells = np.flatnonzero(terminated | truncated), info["cell"].copy()
        final_obs, starts = next_obs.copy(), np.full_like(cells, -1)  # starts: s_0, if any
        if len(ended):
            cells[ended], starts[ended] = info["final_info"]["cell"][ended], cells[ended]
            final_obs[ended] = np.stack(info["final_obs"][ended])
        run.log_step(global_step, cells)
        replay.put(next_obs=final_obs, visits=np.stack([cells, starts], axis=1))
        cells = to_device(cells)
        raw_bonus = compute_bonus(counts, table_ids, cells, args.bonus)
        int_rewards = beta * raw_bonus
        episode_bonus += int_rewards
        visit(counts, table_ids, cells)
        rewards = args.ext_coef * np.float32(ext_rewards) + int_rewards.cpu().numpy()
        replay.put(rewards=rewards, terminated=terminated, ended=terminated | truncated)
        replay.total += 1
        bonuses.append(torch.stack([int_rewards, raw_bonus]))
        if len(ended):
            run.log_episodes(global_step, info, ended, episode_bonus[ended].tolist())
            episode_bonus[ended] = 0
            if args.counts == "episodic":
                counts[ended] = 0
            visit(counts, table_ids[ended], to_device(info["cell"][ended]))
        next_phi = augment(counts, table_ids, args)

        for _ in range(args.gradient_steps if global_step > args.learning_starts else 0):
            batch = replay.sample(args.minibatch_size, device)
            alpha = log_alpha.detach().exp()  # before its step, as in [SB3 SAC.train]
            noise, next_noise = torch.randn(2, args.minibatch_size, A, device=device)
            actions, logprobs = squash(*actor(batch["obs"], batch["phi"]), noise)
            temperature_loss = alpha_loss(log_alpha, logprobs, target_entropy=-A)
            descend(alpha_adam, temperature_loss)
            qf_loss, q = critic_loss(critic, critic_target, actor, alpha, batch, next_noise)
            descend(critic_adam, qf_loss)
            pi_loss = actor_loss(critic, alpha, batch, actions, logprobs)
            descend(actor_adam, pi_loss)
            torch._foreach_lerp_(target_weights, [w.detach() for w in weights], args.tau)
            logged = dict(qf_loss=qf_loss, qf_values=q, actor_loss=pi_loss, alpha=alpha)
            logged |= dict(alpha_loss=temperature_loss, entropy=-logprobs.mean())
            terms.append({name: value.detach() for name, value in logged.items()})
        row_done = (update + 1) % args.log_every == 0
        if row_done and terms:
            losses = {f"losses/{k}": torch.stack([x[k] for x in terms]).mean() for k in terms[0]}
            bonus, raw_bonus = torch.stack(bonuses).mean((0, 2))
            losses |= {"explore/bonus": bonus, "explore/raw_bonus": raw_bonus}
            run.log_update(global_step, {name: value.item() for name, value in losses.items()})
        if row_done and run.eval_due(global_step, log_steps) and update + 1 < num_updates:
            run.log_eval(global_step, evaluate(actor, counts, args))

    run.checkpoint(global_step, write=True)
    metrics = evaluate(actor, counts, args) if args.eval_episodes else {}
    envs.close()
    run.finish(global_step, metrics, lambda axes: godot.draw_map(axes, envs.map, envs.reachable))
    return metrics


if __name__ == "__main__":
    main(tyro.cli(Args))
