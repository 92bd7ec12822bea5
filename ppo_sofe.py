"""PPO with exploration bonuses, and SOFE: the agent sees the statistics that the bonus is made of.

A bonus made of visit counts pays less for a cell each time, so an agent that sees only the maze
chases a moving reward. SOFE shows it the counts, phi_t, beside the observation, and the reward
becomes a fixed function of what it sees: see `visit`, `compute_bonus`, `augment`, `phi_tower`.

    python ppo_sofe.py --bonus sqrt --ext-coef 0 --augment      # reward-free exploration with SOFE
    python ppo_sofe.py --bonus sqrt --ext-coef 0                # the same bonus without SOFE
The defaults are the paper's and want a GPU; `make run` shows the smaller CPU setting.

Sources; a tag names a label of the paper, an equation or a function there
    [SOFE]  Castanyer et al. 2024, Improving Intrinsic Exploration by Creating Stationary Objectives
    [PPO]   Schulman et al. 2017, Proximal Policy Optimization Algorithms
    [GAE]   Schulman et al. 2016, High-Dimensional Continuous Control Using GAE
    [SB3]   stable-baselines3, which the paper used: initialisation, losses, epsilon of Adam

Where the paper is silent (more in docs/ppo_sofe.md): sqrt pays beta / sqrt(N_t(s') + 1), so that a
first visit pays beta; s_0 counts once when an episode starts; counts enter the network as
1 / sqrt(1 + N); a time limit is no death, V(s') is bootstrapped with the phi of the old episode.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch
import torch.nn as nn
import tyro
from torch.distributions import Categorical

from common import deepsea, mazes, runs

SIGMA_FLOOR = 0.03  # S-Max: smallest standard deviation, about 1 / sqrt(1000 steps)


@dataclass
class Args:
    # Run
    seed: int = 1
    """seed of the networks, the actions, the minibatches, and of DeepSea's action map"""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """where to compute; auto is CUDA where there is one, else the CPU"""
    num_threads: int = 1
    """CPU threads of PyTorch; 1 is best where several runs share a machine"""
    total_timesteps: int = 1_000_000
    """environment steps, summed over the envs, rounded up to whole rollouts"""
    runs_dir: str = "runs"
    """folder in which the run makes its own folder"""
    run_name: str | None = None
    """name of the run's folder (None: made from the settings and the time)"""
    resume: str | None = None
    """folder of a run to go on with; its arguments are taken from there"""
    checkpoint_every: int = 100_000
    """environment steps between two checkpoints on disk"""
    eval_episodes: int = 10
    """episodes of an evaluation, greedy and again sampled (0: no evaluation)"""
    eval_every: int = 0
    """environment steps between two evaluations (0: only one at the end)"""
    capture_video: bool = False
    """write a sampled episode of the last evaluation as evaluation.gif"""
    track: bool = False
    """mirror the run to Weights & Biases (pip install wandb)"""
    # Environment
    env_id: Literal["Maze1-v0", "Maze2-v0", "Maze3-v0", "DeepSea-v0"] = "Maze1-v0"
    """the environment, see common/mazes.py and common/deepsea.py"""
    goal: bool = False
    """Maze 2 only: a goal 75 moves from the start, worth 1, that ends the episode"""
    view: int | None = None
    """mazes only: odd side of the window round the avatar that is seen, in cells (None: all)"""
    max_steps: int = 1000
    """mazes only: time limit of an episode in steps, a truncation"""
    engine: Literal["auto", "griddly", "numpy"] = "auto"
    """mazes only: what runs them, with equal results; auto is Griddly where it is installed"""
    deepsea_size: int = 10
    """DeepSea only: rows, columns and steps of an episode"""
    # Algorithm, as in [SOFE tab:ppo_hyperparameters]; network as in [SOFE app:train_details]
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
    """epsilon of the clipped ratio"""
    norm_adv: bool = True
    """normalise the advantages of each minibatch"""
    ent_coef: float = 0.0
    """weight of the policy's entropy, >= 0"""
    vf_coef: float = 0.5
    """weight of the value loss, >= 0"""
    max_grad_norm: float = 0.5
    """largest global norm of the gradient"""
    network: Literal["cnn", "mlp"] = "cnn"
    """cnn: the paper's towers; mlp: one linear layer each, phi of length 1 at most, for DeepSea"""
    channels: int = 64
    """channels of each convolution of a tower (64: the paper; 16: the CPU setting)"""
    embedding_dim: int = 512
    """features that a tower ends in (512: the paper; 128: the CPU setting)"""
    # Exploration bonus
    bonus: Literal["none", "sqrt", "salesman", "smax"] = "sqrt"
    """the intrinsic reward, see `compute_bonus`"""
    counts: Literal["episodic", "global"] = "episodic"
    """episodic: a table per env and episode; global: one for the run, which DeepSea needs"""
    augment: bool = False
    """SOFE: show the bonus's statistics phi_t to the agent"""
    beta: float = 1.0
    """weight of the bonus, >= 0; with --ext-coef 0 it is the scale of all that is learned from"""
    anneal_beta: bool = False
    """lower beta linearly to 0 over total_timesteps; phi does not show beta"""
    ext_coef: float = 1.0
    """weight of the task's own reward, >= 0; 0 is the reward-free setting"""

    @property
    def batch_size(self) -> int:
        """B = T * N, samples per iteration"""
        return self.num_steps * self.num_envs

    def __post_init__(self):
        runs.check_args(
            self,
            "seed eval_every eval_episodes beta ext_coef ent_coef vf_coef gamma gae_lambda",
            "gamma gae_lambda",
            ("--augment and --bonus none: no statistics", self.augment and self.bonus == "none"),
            ("--goal and --env-id: Maze2-v0 only", self.goal and self.env_id != "Maze2-v0"),
            ("--view and --env-id: mazes only", self.view and self.env_id == "DeepSea-v0"),
            ("--view: an odd number of cells", self.view and self.view % 2 == 0),
            ("--minibatch-size and --num-steps: M > B", self.minibatch_size > self.batch_size),
            ("--eval-every and --eval-episodes 0", self.eval_every and not self.eval_episodes),
            ("--capture-video and --eval-episodes 0", self.capture_video > self.eval_episodes),
            (mazes.NO_GRIDDLY, self.engine == "griddly" and not mazes.griddly_installed()),
        )


# region shared:env_and_bonus
def make_envs(args, num_envs):
    """N envs with SAME_STEP autoreset; put your own in here, README.md lists what it must give."""
    if args.env_id == "DeepSea-v0":
        return deepsea.DeepSeaVecEnv(num_envs, args.deepsea_size, mapping_seed=args.seed)
    maze = (args.env_id, args.goal, args.view, args.max_steps, args.engine)
    return mazes.MazeVecEnv(num_envs, *maze)


# What the paper is about: count the visits, pay for them, show the counts.
def visit(counts, table_ids, cells):
    """Record that each env reached its cell. [SOFE sec:method: the update of phi is Markovian]

    counts      (R, H, W) int64   visit tables, changed in place: R = N, one per env, or 1 for all
    table_ids   (K,)      int64   the table of each env; several envs may share one
    cells       (K, 2)    int64   (row, column) of s'; (-1, -1), where it is no cell, adds 0
    """
    counts.index_put_((table_ids, *cells.T), (cells[:, 0] >= 0).long(), accumulate=True)


def fit_gaussian(counts):
    """Mean and deviation of the one-hot maps of the cells visited, (R, H, W) each. [SOFE app:smax]

    The pixels are 0 or 1: the mean is mu = N / sum N and the variance mu (1 - mu), here floored.
    The bonus is a function of the two; how they go on also depends on sum N, which is not shown.
    """
    mu = counts / counts.sum((1, 2), keepdim=True)
    return mu, (mu * (1 - mu)).sqrt().clamp(min=SIGMA_FLOOR)


def compute_bonus(counts, table_ids, cells, bonus):
    """B(s' | phi_t): what it pays to reach s', from counts that do not hold this visit yet.

    counts, table_ids, cells   as in `visit`
    bonus                   sqrt      1 / sqrt(N_t(s') + 1)                       [SOFE sqrt_rew]
                            salesman  1 if N_t(s') = 0, else 0                [SOFE salesman_rew]
                            smax      -log p(s') of the Gaussian, less its smallest possible
                                      value, times SIGMA_FLOOR^2        [SOFE eq:smirl_reward]
    returns                 (K,) float32; 0 where s' is no cell
    """
    at_cell = (table_ids, *cells.T)
    if bonus == "sqrt":
        value = (counts[at_cell] + 1).rsqrt()
    elif bonus == "salesman":
        value = counts[at_cell] == 0
    elif bonus == "smax":
        # -log p sums (x - mu)^2 / (2 sigma^2) + log sigma over the map, where x is 1 at s', else 0.
        mu, sigma = fit_gaussian(counts)
        everywhere = ((mu / sigma).square() / 2 + (sigma / SIGMA_FLOOR).log()).sum((1, 2))  # (R,)
        at_s = (1 - 2 * mu[at_cell]) / (2 * sigma[at_cell].square())  # (K,)
        value = (everywhere[table_ids] + at_s) * SIGMA_FLOOR**2
    else:
        value = torch.zeros_like(table_ids)
    return torch.where(cells[:, 0] >= 0, value, 0.0)


def augment(counts, table_ids, args):
    """phi_t as the network sees it. [SOFE sec:method: the augmented state is the pair (obs, phi)]

    counts, table_ids   as in `visit`
    returns          (K, F, H, W) float32; F = 1 map of counts, 2 of the Gaussian, 0 without SOFE
    """
    if not args.augment:
        return torch.zeros((len(table_ids), 0, *counts.shape[1:]), device=counts.device)
    phi = (counts + 1).rsqrt().unsqueeze(1)  # bounded; paper/ablation_encoding.py has others
    if args.bonus == "smax":  # stretched to fill [0, 1]: most of mu is below 0.01
        mu, sigma = fit_gaussian(counts)
        phi = torch.stack([mu / (mu + SIGMA_FLOOR**2), SIGMA_FLOOR / sigma], dim=1)
    # A dense layer adds up all cells: of length 1 at most, phi does not drown a one-hot obs.
    return phi[table_ids] / (phi[0].numel() ** 0.5 if args.network == "mlp" else 1)


# endregion
# region shared:gae_and_towers
def compute_gae(rewards, values, final_values, terminations, truncations, gamma, gae_lambda):
    """Advantages of a rollout; index t is the action at t and what came of it. [GAE eq. 16]

    rewards                    (T, N)
    values                     (T + 1, N)   the last row is V of the observation after the rollout
    final_values               (T, N)       V of the true s' where an episode was truncated
    terminations, truncations  (T, N) bool
    returns                    (T, N)       add values[:T] for the targets of the critic
    """
    dones = terminations | truncations
    next_values = torch.where(truncations, final_values, values[1:]).masked_fill(terminations, 0.0)
    deltas = rewards + gamma * next_values - values[:-1]
    advantages = torch.zeros_like(values)
    for t in reversed(range(len(rewards))):
        advantages[t] = deltas[t] + gamma * gae_lambda * ~dones[t] * advantages[t + 1]
    return advantages[:-1]


def init_layer(layer, gain=2**0.5):
    """Orthogonal weights and zero biases. [SB3 ActorCriticPolicy]"""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def make_tower(shape, args):
    """Features (M, D) of maps (M, C, H, W): the CNN of [SOFE app:train_details] or one layer."""
    channels, height, width = shape
    if args.network == "mlp":
        hidden = init_layer(nn.Linear(channels * height * width, args.embedding_dim))
        nn.init.normal_(hidden.weight, std=0.1)
        return nn.Sequential(nn.Flatten(), hidden, nn.ReLU(inplace=True))
    layers = []
    for _ in range(3):
        convolution = nn.Conv2d(channels, args.channels, kernel_size=3, stride=2, padding=1)
        layers += [init_layer(convolution), nn.ReLU(inplace=True)]
        channels, height, width = args.channels, (height + 1) // 2, (width + 1) // 2
    linear = init_layer(nn.Linear(channels * height * width, args.embedding_dim))
    return nn.Sequential(*layers, nn.Flatten(), linear, nn.ReLU(inplace=True))


def make_head(features, outputs, gain):
    """Two hidden layers of 64; a linear head could only add f(obs) to g(phi). [SB3 net_arch]"""
    first, second = init_layer(nn.Linear(features, 64)), init_layer(nn.Linear(64, 64))
    last = init_layer(nn.Linear(64, outputs), gain)
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), last)


# endregion
# region shared:agent_and_evaluate
class Agent(nn.Module):
    """Policy and value heads on the features of the observation and, with SOFE, of phi."""

    def __init__(self, envs, phi_shape, args):
        super().__init__()
        self.obs_tower = make_tower(envs.single_observation_space.shape, args)
        self.phi_tower = make_tower(phi_shape, args) if args.augment else None
        features = args.embedding_dim * (2 if args.augment else 1)
        self.actor = make_head(features, envs.single_action_space.n, 0.01)
        self.critic = make_head(features, 1, 1.0)

    def forward(self, obs, phi):
        """obs (M, C, H, W) and phi (M, F, H, W) -> the policy and the values (M,)."""
        features = self.obs_tower(obs.float())
        if self.phi_tower is not None:
            features = torch.cat([features, self.phi_tower(phi)], dim=1)
        policy = Categorical(logits=self.actor(features), validate_args=False)
        return policy, self.critic(features).squeeze(1)


@torch.no_grad()
def evaluate(agent, counts, args, folder=None):
    """Play E = `eval_episodes` with the likeliest actions and E with sampled ones, one env each.

    counts    (R, H, W) int64   of training, never written: every env counts on in a copy of its
                                own (global) or from an empty table (episodic)
    folder    where --capture-video puts the first sampled episode (None: nowhere)
    returns   eval/greedy_return, _length, _coverage and eval/sampled_..., means over E episodes
    """
    E, device = args.eval_episodes, counts.device
    envs = make_envs(args, 2 * E)
    if folder and args.capture_video:
        envs = runs.GifRecorder(envs, E, folder / "evaluation.gif")
    obs, info = envs.reset(seed=args.seed + 10_000)
    generator = torch.Generator(device).manual_seed(args.seed + 10_000)  # not that of training
    table_ids = torch.arange(2 * E, device=device)
    counts = counts[:1].repeat(2 * E, 1, 1) * (args.counts == "global")
    visit(counts, table_ids, torch.as_tensor(info["cell"], device=device))
    results = np.full((3, 2 * E), np.nan)  # of the first episode of each env
    while np.isnan(results).any():
        policy, _ = agent(torch.as_tensor(obs, device=device), augment(counts, table_ids, args))
        sampled = policy.probs[E:].multinomial(1, generator=generator).squeeze(1)
        actions = torch.cat([policy.logits[:E].argmax(1), sampled])
        obs, _, terminated, truncated, info = envs.step(actions.cpu().numpy())
        ended = (terminated | truncated) & np.isnan(results[0])
        if ended.any():
            episode = info["final_info"]["episode"]
            results[:, ended] = [episode[key][ended] for key in ("r", "l", "coverage")]
        visit(counts, table_ids, torch.as_tensor(info["cell"], device=device))
    envs.close()
    metrics, means = {}, results.reshape(3, 2, E).mean(2).tolist()
    for name, (greedy, sampled) in zip(("return", "length", "coverage"), means, strict=True):
        metrics |= {f"eval/greedy_{name}": greedy, f"eval/sampled_{name}": sampled}
    return metrics


# endregion
def ppo_loss(agent, batch, args):
    """Loss of one minibatch. [PPO eq. 7 and 9; SB3 PPO.train]

    batch     obs (M, C, H, W), phi (M, F, H, W), actions, logprobs, advantages, returns (M,)
    returns   loss (), and its terms and diagnostics as a dict of detached () tensors
    """
    policy, values = agent(batch["obs"], batch["phi"])
    logratio = policy.log_prob(batch["actions"]) - batch["logprobs"]
    ratio = logratio.exp()
    advantages = batch["advantages"]
    if args.norm_adv and len(advantages) > 1:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    pg_loss = -torch.min(advantages * ratio, advantages * clipped_ratio).mean()
    v_loss, entropy = nn.functional.mse_loss(values, batch["returns"]), policy.entropy().mean()
    loss = pg_loss + args.vf_coef * v_loss - args.ent_coef * entropy
    approx_kl, clipfrac = (ratio - 1 - logratio).mean(), (ratio != clipped_ratio).float().mean()
    terms = {"policy_loss": pg_loss, "value_loss": v_loss, "entropy": entropy}
    terms |= {"approx_kl": approx_kl, "clipfrac": clipfrac}
    return loss, {name: term.detach() for name, term in terms.items()}


def main(args: Args) -> dict[str, float]:
    args = runs.resume_args(args, "ppo_sofe")
    device = runs.set_up(args)  # seeds and threads as well
    to_device = partial(torch.as_tensor, device=device)
    T, N, B = args.num_steps, args.num_envs, args.batch_size
    envs = make_envs(args, N)
    table_ids = torch.arange(N, device=device) * (args.counts == "episodic")  # global: all 0
    counts = torch.zeros(int(table_ids[-1]) + 1, *envs.reachable.shape, device=device).long()
    phi_shape = augment(counts, table_ids, args).shape[1:]
    episode_bonus = torch.zeros(N, device=device)
    agent = Agent(envs, phi_shape, args).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(agent.parameters(), args.learning_rate, eps=1e-5, fused=True)
    obs_space = envs.single_observation_space
    size = np.prod(obs_space.shape) * obs_space.dtype.itemsize + 4 * np.prod(phi_shape) + 40
    runs.check_memory("rollout", B * size, device)
    obs = to_device(np.zeros((T, N, *obs_space.shape), obs_space.dtype))
    phis = torch.zeros((T, N, *phi_shape), device=device)
    actions = torch.zeros((T, N), dtype=torch.int64, device=device)
    logprobs, final_values, ext_rewards, int_rewards = torch.zeros((4, T, N), device=device)
    values = torch.zeros((T + 1, N), device=device)
    terminations, truncations = torch.zeros((2, T, N), dtype=torch.bool, device=device)

    kept = dict(agent=agent, optimizer=optimizer, envs=envs, counts=counts, bonus=episode_bonus)
    run = runs.Run(args, "ppo_sofe", envs.reachable, kept)  # kept: what a checkpoint holds
    global_step = run.start_step
    if args.resume is None:
        _, info = envs.reset(seed=args.seed)
        visit(counts, table_ids, to_device(info["cell"]))
        run.log_step(0, info["cell"])
    next_obs = to_device(envs.observe())  # as reset returned it, or as the checkpoint left it
    next_phi = augment(counts, table_ids, args)
    num_iterations = -(-args.total_timesteps // B)  # rounded up

    for iteration in range(global_step // B, num_iterations):
        run.checkpoint(global_step)
        beta = args.beta * ((1 - iteration / num_iterations) if args.anneal_beta else 1)
        for t in range(T):
            obs[t], phis[t] = next_obs, next_phi
            with torch.no_grad():
                policy, values[t] = agent(next_obs, next_phi)
                actions[t] = policy.sample()
                logprobs[t] = policy.log_prob(actions[t])
            env_obs, env_rewards, terminated, truncated, info = envs.step(actions[t].cpu().numpy())
            global_step += N
            ext_rewards[t] = to_device(np.float32(env_rewards))
            terminations[t], truncations[t] = to_device(terminated), to_device(truncated)

            # The bonus of the true s' from the statistics before it, then the visit.
            ended, cells = np.flatnonzero(terminated | truncated), info["cell"].copy()
            if len(ended):
                cells[ended] = info["final_info"]["cell"][ended]
            run.log_step(global_step, cells)
            cells = to_device(cells)
            int_rewards[t] = beta * compute_bonus(counts, table_ids, cells, args.bonus)
            episode_bonus += int_rewards[t]
            visit(counts, table_ids, cells)
            if len(ended):
                cut = np.flatnonzero(truncated)
                if len(cut):  # V(s') with the phi of the episode that was cut off
                    final_obs = to_device(np.stack(info["final_obs"][cut]))
                    final_phi = augment(counts, table_ids[cut], args)
                    final_values[t, cut] = agent(final_obs, final_phi)[1].detach()
                run.log_episodes(global_step, info, ended, episode_bonus[ended].tolist())
                episode_bonus[ended] = 0
                if args.counts == "episodic":
                    counts[ended] = 0
                visit(counts, table_ids[ended], to_device(info["cell"][ended]))
            next_obs, next_phi = to_device(env_obs), augment(counts, table_ids, args)

        values[T] = agent(next_obs, next_phi)[1].detach()
        rewards = args.ext_coef * ext_rewards + int_rewards  # (T, N)
        rollout = (rewards, values, final_values, terminations, truncations)
        advantages = compute_gae(*rollout, args.gamma, args.gae_lambda)
        batch = {"obs": obs, "phi": phis, "actions": actions, "logprobs": logprobs}
        batch |= {"advantages": advantages, "returns": advantages + values[:T]}
        batch = {name: tensor.flatten(0, 1) for name, tensor in batch.items()}  # (B, ...)
        terms = []
        for _ in range(args.update_epochs):
            for ids in torch.randperm(B, device=device).split(args.minibatch_size):
                minibatch = {name: tensor[ids] for name, tensor in batch.items()}
                loss, loss_terms = ppo_loss(agent, minibatch, args)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()
                terms.append(loss_terms)

        losses = {f"losses/{k}": torch.stack([x[k] for x in terms]).mean() for k in terms[0]}
        left, whole = (x.var(correction=0) for x in (advantages, batch["returns"]))  # A = R - V
        losses["losses/explained_variance"] = 1 - left / whole.clamp(min=1e-8)
        losses["explore/bonus"] = int_rewards.mean()
        losses["explore/raw_bonus"] = int_rewards.mean() / max(beta, 1e-8)  # without beta
        run.log_update(global_step, {name: value.item() for name, value in losses.items()})
        if run.eval_due(global_step, B) and iteration + 1 < num_iterations:
            run.log_eval(global_step, evaluate(agent, counts, args))

    run.checkpoint(global_step, write=True)
    metrics = evaluate(agent, counts, args, run.folder) if args.eval_episodes else {}
    envs.close()
    run.finish(global_step, metrics)
    return metrics


if __name__ == "__main__":
    main(tyro.cli(Args))
