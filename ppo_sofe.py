"""PPO with exploration bonuses, and SOFE: the agent sees the statistics that the bonus is made of.

A bonus that depends on visit counts pays less for the same cell each time, so an agent that sees only
the maze chases a moving reward. SOFE shows it the counts phi_t beside the observation, and the reward
becomes a fixed function of what it sees. `visit`, `bonus` and `augment` below are all there is to it.

    python ppo_sofe.py --bonus sqrt --augment --ext-coef 0      # SOFE, reward-free exploration
    python ppo_sofe.py --bonus sqrt --ext-coef 0                # the same bonus without SOFE

Sources
    [SOFE]  Castanyer, Romoff, Berseth 2024, Improving Intrinsic Exploration by Creating Stationary
            Objectives; tags name the section, equation or table by its label there
    [PPO]   Schulman et al. 2017, Proximal Policy Optimization Algorithms
    [GAE]   Schulman et al. 2016, High-Dimensional Continuous Control Using GAE
    [SB3]   stable-baselines3, which the paper used: initialisation, activations, losses

Choices where the paper is silent (docs/ppo_sofe.md says more)
    - the visit that is paid for is counted: beta / sqrt(N_t(s') + 1), so that a first visit pays beta
    - s_0 counts as visited once when an episode starts
    - the counts enter the network as 1 / sqrt(1 + N), the best of four encodings in our ablation
    - a time limit is no death: V(s') with the old episode's phi is bootstrapped there
"""

from dataclasses import dataclass
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import tyro
from torch.distributions import Categorical

from common import deepsea, mazes, runs

SIGMA_FLOOR = 0.03  # S-Max: smallest standard deviation, about 1 / sqrt(1000), see `gaussian`


@dataclass
class Args:
    seed: int = 1
    """seed of the networks, the actions, the minibatches, and of DeepSea's action map"""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """where to compute; auto is CUDA where there is one, else the CPU"""
    num_threads: int = 1
    """CPU threads of PyTorch; two runs of one thread are faster than one run of two"""
    total_timesteps: int = 1_000_000
    """environment steps to train for, summed over the envs"""
    runs_dir: str = "runs"
    """folder in which the run makes its own folder"""
    run_name: str | None = None
    """name of the run's folder (None: made from the settings and the time)"""
    resume: str | None = None
    """folder of a run to go on with; its arguments are taken from there"""
    checkpoint_every: int = 100_000
    """environment steps between two checkpoints on disk"""
    track: bool = False
    """mirror the run to Weights & Biases (pip install wandb)"""

    env_id: Literal["Maze1-v0", "Maze2-v0", "Maze3-v0", "DeepSea-v0"] = "Maze1-v0"
    """the environment, see common/mazes.py and common/deepsea.py"""
    goal: bool = False
    """Maze 2 only: a goal 75 moves from the start, worth 1, that ends the episode"""
    view: int | None = None
    """mazes only: odd side of the window round the avatar that is seen, in cells (None: the whole map)"""
    max_steps: int = 1000
    """mazes only: time limit of an episode in steps, a truncation"""
    stagger: bool = False
    """mazes only: shorten the first episodes, so that the envs reach the time limit at different steps"""
    deepsea_size: int = 10
    """DeepSea only: rows, columns and steps of an episode"""
    engine: Literal["auto", "griddly", "numpy"] = "auto"
    """mazes only: what runs them, with equal results; auto is Griddly where it is installed"""

    learning_rate: float = 3e-4
    """step size of Adam"""
    num_envs: int = 16
    """N, parallel environments"""
    num_steps: int = 2048
    """T, steps of each environment per rollout"""
    minibatch_size: int = 64
    """M, samples per gradient step; the last of an epoch is smaller where M does not divide B"""
    update_epochs: int = 10
    """passes over the rollout per iteration"""
    gamma: float = 0.99
    """discount per step, in [0, 1]"""
    gae_lambda: float = 0.95
    """lambda of GAE, in [0, 1]"""
    clip_coef: float = 0.2
    """epsilon of PPO's clipped ratio"""
    norm_adv: bool = True
    """normalise the advantages of each minibatch"""
    ent_coef: float = 0.0
    """weight of the policy's entropy"""
    anneal_ent: bool = False
    """lower ent_coef linearly to 0 over total_timesteps"""
    vf_coef: float = 0.5
    """weight of the value loss"""
    max_grad_norm: float = 0.5
    """largest global norm of the gradient"""
    network: Literal["cnn", "mlp"] = "cnn"
    """cnn: the paper's towers; mlp: one hidden layer per input, for DeepSea"""
    channels: int = 64
    """channels of each convolution of a tower (64: the paper; 16: the CPU setting)"""
    embedding_dim: int = 512
    """features that a tower ends in (512: the paper; 128: the CPU setting)"""

    bonus: Literal["none", "sqrt", "salesman", "smax"] = "sqrt"
    """intrinsic reward: by visit counts [SOFE sqrt_rew, salesman_rew] or S-Max [SOFE eq:smirl_reward]"""
    counts: Literal["episodic", "global"] = "episodic"
    """episodic: a table per environment, cleared with its episode; global: one table for the whole run"""
    augment: bool = False
    """SOFE: show the bonus's statistics phi_t to the agent"""
    encoding: Literal["isqrt", "log", "max", "raw"] = "isqrt"
    """how counts enter the network: 1/sqrt(1+N), log(1+N), N/max N or N"""
    beta: float = 1.0
    """weight of the bonus"""
    anneal_beta: bool = False
    """lower beta linearly to 0 over total_timesteps"""
    ext_coef: float = 1.0
    """weight of the task's own reward; 0 is the reward-free setting"""

    eval_episodes: int = 10
    """episodes of each evaluation, greedy and sampled (0: no evaluation)"""
    eval_every: int = 0
    """environment steps between two evaluations (0: only at the end)"""
    capture_video: bool = False
    """mazes and DeepSea: write an episode of the last evaluations as .gif"""

    @property
    def batch_size(self) -> int:
        """B = T * N, samples per iteration"""
        return self.num_steps * self.num_envs

    def __post_init__(self):
        positive = "num_threads total_timesteps checkpoint_every max_steps num_envs num_steps"
        positive += " minibatch_size update_epochs channels embedding_dim learning_rate"
        for name in positive.split():
            if getattr(self, name) <= 0:
                raise ValueError(f"--{name.replace('_', '-')} must be greater than 0")
        if self.augment and self.bonus == "none":
            raise ValueError(
                "--augment shows the statistics of a bonus: it cannot go with --bonus none"
            )
        if self.goal and self.env_id != "Maze2-v0":
            raise ValueError(
                f"--goal is in Maze2-v0 only: it cannot go with --env-id {self.env_id}"
            )
        if self.view is not None and (self.view < 1 or self.view % 2 == 0):
            raise ValueError(f"--view {self.view} must be an odd number of cells")
        if self.view is not None and self.env_id == "DeepSea-v0":
            raise ValueError("--view is for mazes: it cannot go with --env-id DeepSea-v0")
        if self.deepsea_size < 2:
            raise ValueError("--deepsea-size must be at least 2")
        if self.minibatch_size > self.batch_size:
            raise ValueError(
                f"--minibatch-size {self.minibatch_size} is larger than the batch, "
                f"--num-steps {self.num_steps} x --num-envs {self.num_envs}"
            )
        if self.engine == "griddly" and not mazes.griddly_installed():
            raise ValueError("--engine griddly: pip install griddly==1.6.7, or take --engine numpy")


def make_envs(args: Args, num_envs: int) -> gym.vector.VectorEnv:
    """N environments with SAME_STEP autoreset, info["cell"] and `reachable`; the place for your own."""
    if args.env_id == "DeepSea-v0":
        return deepsea.DeepSeaVecEnv(num_envs, args.deepsea_size, mapping_seed=args.seed)
    return mazes.MazeVecEnv(
        num_envs, args.env_id, None, args.goal, args.view, args.max_steps, args.engine
    )


# --- Network ---------------------------------------------------------------------------------------


def init_layer(layer: nn.Module, gain: float) -> nn.Module:
    """Orthogonal weights and zero biases. [SB3 ActorCriticPolicy]"""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def make_tower(shape: tuple[int, int, int], args: Args) -> nn.Sequential:
    """Features of (C, H, W) maps: the paper's CNN [SOFE app:train_details], or one hidden layer."""
    dim = args.embedding_dim
    if args.network == "mlp":
        hidden = nn.Linear(int(np.prod(shape)), dim)
        nn.init.normal_(
            hidden.weight, std=0.1
        )  # a larger one drowns the cells that are seldom seen
        nn.init.zeros_(hidden.bias)
        return nn.Sequential(nn.Flatten(), hidden, nn.ReLU())
    layers: list[nn.Module] = []
    (inputs, height, width), gain = shape, 2**0.5
    for _ in range(3):
        layers += [init_layer(nn.Conv2d(inputs, args.channels, 3, 2, 1), gain), nn.ReLU()]
        inputs, height, width = args.channels, (height + 1) // 2, (width + 1) // 2
    linear = init_layer(nn.Linear(inputs * height * width, dim), gain)
    return nn.Sequential(*layers, nn.Flatten(), linear, nn.ReLU())


class Agent(nn.Module):
    """Policy and value heads on the features of the observation and, with SOFE, of phi."""

    def __init__(self, envs: gym.vector.VectorEnv, args: Args):
        super().__init__()
        self.obs_tower = make_tower(envs.single_observation_space.shape, args)
        features = args.embedding_dim
        self.phi_tower = None
        if args.augment:
            num_maps = 2 if args.bonus == "smax" else 1
            self.phi_tower = make_tower((num_maps, *envs.reachable.shape), args)
            features += args.embedding_dim
        self.actor = init_layer(nn.Linear(features, envs.single_action_space.n), 0.01)
        self.critic = init_layer(nn.Linear(features, 1), 1.0)

    def forward(self, obs: torch.Tensor, phi: torch.Tensor) -> tuple[Categorical, torch.Tensor]:
        """obs (B, C, H, W), phi (B, F, H, W) -> the policy and the values (B,)."""
        features = self.obs_tower(obs.float())  # (B, D)
        if self.phi_tower is not None:
            features = torch.cat([features, self.phi_tower(phi)], dim=1)  # (B, 2 D)
        policy = Categorical(logits=self.actor(features), validate_args=False)
        return policy, self.critic(features).squeeze(1)


# --- Bonus and augmentation: what the paper is about -----------------------------------------------


def visit(counts: torch.Tensor, tables: torch.Tensor, cells: torch.Tensor) -> None:
    """Record that each env reached its cell. [SOFE sec:method, the Markovian update of phi]

    counts   (R, H, W) int64   visits: R = N tables of the episodes, or one global table; changed in place
    tables   (K,)      int64   which table each env counts in; several may share one
    cells    (K, 2)    int64   (row, column) of s', or (-1, -1) where s' is no cell of the map
    """
    is_cell = (cells[:, 0] >= 0).long()
    counts.index_put_((tables, cells[:, 0], cells[:, 1]), is_cell, accumulate=True)


def gaussian(counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and deviation of the visited one-hot cell maps, each (R, H, W). [SOFE app:smax]

    The state of S-Max is the map with a 1 at the avatar. Its mean over the visits is mu = N / sum N, and
    as its pixels are 0 or 1 its variance is mu (1 - mu), kept above SIGMA_FLOOR squared.
    """
    mu = counts / counts.sum((1, 2), keepdim=True)
    return mu, (mu * (1 - mu)).sqrt().clamp(min=SIGMA_FLOOR)


def compute_bonus(
    counts: torch.Tensor, tables: torch.Tensor, cells: torch.Tensor, bonus: str
) -> torch.Tensor:
    """B(s' | phi_t), the bonus for reaching s', from the counts before this visit.

    counts, tables, cells   as in `visit`
    bonus                   sqrt      1 / sqrt(N_t(s') + 1)                      [SOFE sqrt_rew]
                            salesman  1 if N_t(s') = 0, else 0                   [SOFE salesman_rew]
                            smax      -log p(s') with p = N(mu_t, sigma_t), less its least value, in
                                      units of 1 / SIGMA_FLOOR^2                 [SOFE eq:smirl_reward]
    returns                 (K,) float32, 0 where s' is no cell
    """
    at_cell = (tables, cells[:, 0], cells[:, 1])
    if bonus == "sqrt":
        value = (counts[at_cell] + 1).float().rsqrt()
    elif bonus == "salesman":
        value = (counts[at_cell] == 0).float()
    elif bonus == "smax":
        # -log p sums (x - mu)^2 / 2 sigma^2 + log sigma over the pixels; x is 0 but for a 1 at s'.
        mu, sigma = gaussian(counts)
        elsewhere = ((mu / sigma).square() / 2 + (sigma / SIGMA_FLOOR).log()).sum((1, 2))  # (R,)
        here = (1 - 2 * mu[at_cell]) / (2 * sigma[at_cell].square())
        value = SIGMA_FLOOR**2 * (elsewhere[tables] + here)
    else:
        value = torch.zeros(len(cells), device=counts.device)
    return value * (cells[:, 0] >= 0)


def augment(counts: torch.Tensor, tables: torch.Tensor, args: Args) -> torch.Tensor:
    """phi_t as the network sees it: fixed, bounded, invertible maps of the statistics. [SOFE sec:method]

    counts, tables   as in `visit`
    returns          (K, F, H, W) float32; F = 1 for counts, 2 for S-Max, 0 without --augment
    """
    if not args.augment:
        return torch.zeros((len(tables), 0, *counts.shape[1:]), device=counts.device)
    if args.bonus == "smax":
        mu, sigma = gaussian(counts)
        maps = torch.stack([mu / (mu + SIGMA_FLOOR**2), SIGMA_FLOOR / sigma], dim=1)
    elif args.encoding == "isqrt":
        maps = (counts + 1).float().rsqrt().unsqueeze(1)
    elif args.encoding == "log":
        maps = counts.float().log1p().unsqueeze(1)
    elif args.encoding == "max":
        maps = (counts / counts.amax((1, 2), keepdim=True).clamp(min=1)).unsqueeze(1)
    else:
        maps = counts.float().unsqueeze(1)
    return maps[tables]


# --- Targets and losses ----------------------------------------------------------------------------


def compute_gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    next_value: torch.Tensor,
    final_values: torch.Tensor,
    terminations: torch.Tensor,
    truncations: torch.Tensor,
    gamma: float,
    gae_lambda: float,
) -> torch.Tensor:
    """Advantages; terminations[t], truncations[t] are the outcome of the action at t. [GAE eq. 16]

    rewards, values            (T, N)
    next_value                 (N,)    V of the observation after the rollout
    final_values               (T, N)  V of the true s' where an episode was truncated, else unused
    terminations, truncations  (T, N)  bool
    returns                    (T, N)  advantages; add `values` for the value targets
    """
    advantages = torch.zeros_like(rewards)
    following = torch.zeros_like(next_value)  # advantage at t + 1
    for t in reversed(range(len(rewards))):
        bootstrap = torch.where(truncations[t], final_values[t], next_value)
        bootstrap = bootstrap.masked_fill(terminations[t], 0.0)
        going_on = ~(terminations[t] | truncations[t])
        delta = rewards[t] + gamma * bootstrap - values[t]
        following = delta + gamma * gae_lambda * going_on * following
        advantages[t] = following
        next_value = values[t]
    return advantages


def ppo_loss(
    agent: Agent, batch: dict[str, torch.Tensor], ent_coef: float, args: Args
) -> tuple[torch.Tensor, torch.Tensor]:
    """Clipped surrogate, value and entropy loss of one minibatch. [PPO eq. 7 and 9; SB3 PPO.train]

    batch     obs (M, C, H, W), phi (M, F, H, W), actions, logprobs, advantages, returns (M,)
    returns   loss (), and (5,) pg_loss, v_loss, entropy, approx_kl, clipfrac, without gradient
    """
    policy, values = agent(batch["obs"], batch["phi"])
    logratio = policy.log_prob(batch["actions"]) - batch["logprobs"]
    ratio = logratio.exp()
    advantages = batch["advantages"]
    if args.norm_adv and len(advantages) > 1:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    pg_loss = -torch.min(advantages * ratio, advantages * clipped).mean()
    v_loss = F.mse_loss(values, batch["returns"])
    entropy = policy.entropy().mean()
    loss = pg_loss + args.vf_coef * v_loss - ent_coef * entropy
    with torch.no_grad():
        approx_kl = ((ratio - 1) - logratio).mean()
        clipfrac = ((ratio - 1).abs() > args.clip_coef).float().mean()
    return loss, torch.stack([pg_loss, v_loss, entropy, approx_kl, clipfrac]).detach()


# --- Evaluation ------------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(
    agent: Agent, args: Args, counts: torch.Tensor, greedy: bool, video: str | None = None
) -> dict[str, float]:
    """Play `eval_episodes` episodes, one in each of as many fresh envs, with the same augmentation.

    counts    (R, H, W) int64   the table of training; read as it stands and never written with global
                                counts, replaced by new tables with episodic ones
    greedy    take the likeliest action, else sample
    video     path of a .gif of the first episode (None: none)
    returns   mean return, length, coverage
    """
    envs, device = make_envs(args, args.eval_episodes), counts.device
    obs, info = envs.reset(seed=args.seed + 10_000)
    counts, tables = (
        counts.clone(),
        torch.zeros(args.eval_episodes, dtype=torch.int64, device=device),
    )
    if args.counts == "episodic":
        counts = torch.zeros(
            (args.eval_episodes, *counts.shape[1:]), dtype=torch.int64, device=device
        )
        tables = torch.arange(args.eval_episodes, device=device)
        visit(counts, tables, torch.as_tensor(info["cell"], device=device))
    results = np.full((args.eval_episodes, 3), np.nan)
    frames = []
    with torch.random.fork_rng():  # evaluation must not change the course of training
        torch.manual_seed(args.seed + 10_000)
        while np.isnan(results).any():
            if video and np.isnan(results[0]).any():
                frames.append(envs.render()[0])
            policy, _ = agent(torch.as_tensor(obs, device=device), augment(counts, tables, args))
            actions = policy.logits.argmax(1) if greedy else policy.sample()
            obs, _, terminations, truncations, info = envs.step(actions.cpu().numpy())
            for i in np.flatnonzero((terminations | truncations) & np.isnan(results[:, 0])):
                episode = info["final_info"]["episode"]
                results[i] = episode["r"][i], episode["l"][i], episode["coverage"][i]
            if args.counts == "episodic":
                visit(counts, tables, torch.as_tensor(info["cell"], device=device))
    envs.close()
    if video:
        runs.save_gif(video, frames, fps=30)
    return dict(zip(("return", "length", "coverage"), results.mean(0).tolist(), strict=True))


# --- Training --------------------------------------------------------------------------------------


def main(args: Args) -> dict[str, float]:
    args = runs.resume_args(args, "ppo_sofe")
    torch.set_num_threads(args.num_threads)
    torch.manual_seed(args.seed)
    device = runs.select_device(args.device)

    envs = make_envs(args, args.num_envs)
    agent = Agent(envs, args).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)

    T, N, B = args.num_steps, args.num_envs, args.batch_size
    run_table = torch.zeros(N, dtype=torch.int64, device=device)  # every env counts in table 0
    visits = torch.zeros((1, *envs.reachable.shape), dtype=torch.int64, device=device)
    counts, tables = visits, run_table
    if args.counts == "episodic":
        tables = torch.arange(N, device=device)
        counts = torch.zeros((N, *envs.reachable.shape), dtype=torch.int64, device=device)
    phi_shape = augment(counts, tables, args).shape[1:]
    obs_shape = envs.single_observation_space.shape
    size = B * (int(np.prod(obs_shape)) + 4 * int(np.prod(phi_shape)) + 40)
    runs.check_memory("rollout", size, device)
    obs = torch.zeros((T, N, *obs_shape), dtype=torch.uint8, device=device)
    phis = torch.zeros((T, N, *phi_shape), device=device)
    actions = torch.zeros((T, N), dtype=torch.int64, device=device)
    logprobs, values, final_values, ext_rewards, int_rewards = torch.zeros((5, T, N), device=device)
    terminations, truncations = torch.zeros((2, T, N), dtype=torch.bool, device=device)

    name = f"ppo-{args.env_id}-{args.bonus}-{'sofe' if args.augment else 'plain'}-seed{args.seed}"
    run = runs.Run(args, "ppo_sofe", name, device)
    num_iterations = -(-args.total_timesteps // B)  # the last rollout is a whole one
    first, update, episode_bonus = 1, 0, torch.zeros(N, device=device)
    saved = run.load()
    if saved:
        agent.load_state_dict(saved["agent"])
        optimizer.load_state_dict(saved["optimizer"])
        first, update, next_eval = saved["iteration"], saved["update"], saved["next_eval"]
        counts.copy_(saved["counts"])
        visits.copy_(saved["visits"])
        episode_bonus.copy_(saved["episode_bonus"])
        next_obs, info = envs.set_state(saved["envs"])
    else:
        next_eval = args.eval_every
        next_obs, info = envs.reset(
            seed=args.seed,
            options={"elapsed": np.arange(N) * args.max_steps // N if args.stagger else 0},
        )
        cells = torch.as_tensor(info["cell"], device=device)
        visit(visits, run_table, cells)
        if args.counts == "episodic":
            visit(counts, tables, cells)
    next_obs = torch.as_tensor(next_obs, device=device)
    next_phi = augment(counts, tables, args)
    global_step = (first - 1) * B

    def state(iteration: int) -> dict:
        return {
            "agent": agent.state_dict(),
            "optimizer": optimizer.state_dict(),
            "iteration": iteration,
            "update": update,
            "next_eval": next_eval,
            "counts": counts,
            "visits": visits,
            "episode_bonus": episode_bonus,
            "envs": envs.get_state(),
        }

    for iteration in range(first, num_iterations + 1):
        run.checkpoint(global_step, state(iteration))
        left = 1 - (iteration - 1) / num_iterations  # goes from 1 to 0
        beta = args.beta * (left if args.anneal_beta else 1)
        ent_coef = args.ent_coef * (left if args.anneal_ent else 1)

        for t in range(T):
            obs[t], phis[t] = next_obs, next_phi
            with torch.no_grad():
                policy, values[t] = agent(next_obs, next_phi)
                actions[t] = policy.sample()
                logprobs[t] = policy.log_prob(actions[t])
            env_obs, rewards, terminated, truncated, info = envs.step(actions[t].cpu().numpy())
            global_step += N
            ext_rewards[t] = torch.as_tensor(rewards, device=device)
            terminations[t] = torch.as_tensor(terminated, device=device)
            truncations[t] = torch.as_tensor(truncated, device=device)

            # The bonus of the true s' from the statistics before the visit, then the visit.
            ended = np.flatnonzero(terminated | truncated)
            cells = info["cell"].copy()  # (N, 2)
            if len(ended):
                cells[ended] = info["final_info"]["cell"][ended]
            cells = torch.as_tensor(cells, device=device)
            int_rewards[t] = beta * compute_bonus(counts, tables, cells, args.bonus)
            episode_bonus += int_rewards[t]
            visit(visits, run_table, cells)
            if args.counts == "episodic":
                visit(counts, tables, cells)

            if len(ended):
                cut = np.flatnonzero(truncated)
                if len(cut):  # V(s') with the phi of the episode that was cut off
                    final_obs = torch.as_tensor(np.stack(info["final_obs"][cut]), device=device)
                    with torch.no_grad():
                        _, final_values[t, cut] = agent(
                            final_obs, augment(counts, tables, args)[cut]
                        )
                starts = torch.as_tensor(info["cell"][ended], device=device)
                visit(visits, run_table[ended], starts)
                if args.counts == "episodic":
                    counts[ended] = 0
                    visit(counts, tables[ended], starts)
                episode = info["final_info"]["episode"]
                run.log_episodes(
                    global_step,
                    episode["r"][ended],
                    episode["l"][ended],
                    episode_bonus[ended].tolist(),
                    episode["coverage"][ended],
                )
                episode_bonus[ended] = 0
            next_obs = torch.as_tensor(env_obs, device=device)
            next_phi = augment(counts, tables, args)

        rewards = args.ext_coef * ext_rewards + int_rewards  # (T, N)
        with torch.no_grad():
            _, next_value = agent(next_obs, next_phi)
        advantages = compute_gae(
            rewards,
            values,
            next_value,
            final_values,
            terminations,
            truncations,
            args.gamma,
            args.gae_lambda,
        )
        batch = {
            "obs": obs,
            "phi": phis,
            "actions": actions,
            "logprobs": logprobs,
            "advantages": advantages,
            "returns": advantages + values,
        }
        batch = {key: value.flatten(0, 1) for key, value in batch.items()}  # (B, ...)
        metrics = []
        for _ in range(args.update_epochs):
            for ids in torch.randperm(B, device=device).split(args.minibatch_size):
                minibatch = {key: value[ids] for key, value in batch.items()}
                loss, terms = ppo_loss(agent, minibatch, ent_coef, args)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()
                metrics.append(terms)
                update += 1

        names = ("policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac")
        means = torch.stack(metrics).mean(0).tolist()
        coverage = (visits[0] > 0).sum().item() / envs.reachable.sum()
        residual = (batch["returns"] - values.flatten()).var()
        run.log_update(
            global_step,
            {f"losses/{name}": mean for name, mean in zip(names, means, strict=True)}
            | {
                "losses/explained_variance": (1 - residual / batch["returns"].var()).item(),
                "explore/bonus": int_rewards.mean().item(),
                "explore/global_coverage": float(coverage),
            },
        )
        run.progress(global_step, bonus=int_rewards.mean().item(), entropy=means[2])
    run.finish(global_step, state(num_iterations + 1), visits[0].cpu(), envs.reachable)
    envs.close()
    metrics = {}
    run.summary(metrics)
    return metrics


if __name__ == "__main__":
    main(tyro.cli(Args))
