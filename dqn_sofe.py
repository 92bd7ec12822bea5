"""DQN with exploration bonuses, and SOFE: the agent sees the statistics that the bonus is made of.

A bonus made of visit counts pays less for a cell each time, so an agent that sees only the maze
chases a moving reward. SOFE shows it the counts, phi_t, beside the observation, and the reward
becomes a fixed function of what it sees: see `visit`, `compute_bonus`, `augment`, `phi_tower`.
The replay buffer keeps the counts of each step, so that an old reward is met with its own phi_t.

    python dqn_sofe.py --bonus sqrt --ext-coef 0 --augment      # reward-free exploration with SOFE
    python dqn_sofe.py --bonus sqrt --ext-coef 0                # the same bonus without SOFE
The defaults are the paper's and want a GPU; README.md has the smaller CPU setting.

Sources; a tag names a label of the paper, an equation or a function there
    [SOFE]  Castanyer et al. 2024, Improving Intrinsic Exploration by Creating Stationary Objectives
    [DQN]   Mnih et al. 2015; double DQN: van Hasselt et al. 2016; n-step: Hessel et al. 2018
    [SB3]   stable-baselines3, which the paper used: network (PyTorch's own initial weights), units

Where the paper is silent (more in docs/dqn_sofe.md): sqrt pays beta / sqrt(N_t(s') + 1), a first
visit beta; s_0 counts once when an episode starts; counts enter the network as 1 / sqrt(1 + N); a
time limit is no death, the target goes on with the old episode's phi; rewards are stored as paid.
"""

import copy
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch
import torch.nn as nn
import tyro

from common import deepsea, mazes, runs

SIGMA_FLOOR = 0.03  # S-Max: smallest standard deviation, about 1 / sqrt(1000 steps)


@dataclass
class Args:
    # Run
    seed: int = 1
    """seed of the networks, the actions, the replay samples, and of DeepSea's action map"""
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
    """episodes of an evaluation, greedy and again with epsilon_end (0: no evaluation)"""
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
    # Algorithm, as in [SOFE tab:dqn_hyperparameters]; network as in [SOFE app:train_details]
    learning_rate: float = 1e-4
    """step size of Adam"""
    num_envs: int = 16
    """N, parallel environments"""
    buffer_size: int = 1_000_000
    """transitions in the replay buffer, summed over the envs"""
    learning_starts: int = 50_000
    """environment steps, summed over the envs, of uniform random actions before the first update"""
    minibatch_size: int = 32
    """M, transitions per gradient step"""
    train_frequency: int = 4
    """steps of each environment, so N times as many of all, between updates [SB3 DQN.train_freq]"""
    gradient_steps: int = 4
    """gradient steps per update"""
    target_interval: int = 10_000
    """environment steps, summed over the envs, between two updates of the target network"""
    tau: float = 1.0
    """how far the target network moves then, in (0, 1]; below 1 it is a soft update"""
    gamma: float = 0.99
    """discount per step, in [0, 1]"""
    exploration_fraction: float = 0.1
    """part of total_timesteps over which epsilon falls linearly"""
    epsilon_start: float = 1.0
    """epsilon, the probability of a random action, at step 0; until learning starts it is 1"""
    epsilon_end: float = 0.05
    """probability of a random action once epsilon has fallen, and in the sampled evaluation"""
    double_q: bool = False
    """double DQN: the network chooses the next action, the target network values it"""
    n_step: int = 1
    """rewards summed in a target; those after the first are of old actions, uncorrected"""
    max_grad_norm: float = 10.0
    """largest global norm of the gradient"""
    log_every: int = 25
    """updates per row of updates.csv and per state that a stopped run can go on from"""
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

    def __post_init__(self):
        smallest = self.num_envs * self.n_step
        no_updates = max(self.learning_starts, smallest) >= self.total_timesteps and not self.resume
        runs.check_args(
            self,
            "seed eval_every eval_episodes beta ext_coef gamma learning_starts epsilon_start "
            "epsilon_end exploration_fraction",
            "gamma tau epsilon_start epsilon_end exploration_fraction",
            ("--augment and --bonus none: no statistics", self.augment and self.bonus == "none"),
            ("--goal and --env-id: Maze2-v0 only", self.goal and self.env_id != "Maze2-v0"),
            ("--view and --env-id: mazes only", self.view and self.env_id == "DeepSea-v0"),
            ("--view: an odd number of cells", self.view and self.view % 2 == 0),
            ("--learning-starts or N * --n-step >= --total-timesteps: no update", no_updates),
            ("--buffer-size < --num-envs * --n-step", self.buffer_size < smallest),
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
def make_tower(shape, args):
    """Features (M, D) of maps (M, C, H, W): the CNN of [SOFE app:train_details] or one layer."""
    channels, height, width = shape
    if args.network == "mlp":
        hidden = nn.Linear(channels * height * width, args.embedding_dim)
        nn.init.normal_(hidden.weight, std=0.1)
        return nn.Sequential(nn.Flatten(), hidden, nn.ReLU(inplace=True))
    layers = []
    for _ in range(3):
        convolution = nn.Conv2d(channels, args.channels, kernel_size=3, stride=2, padding=1)
        layers += [convolution, nn.ReLU(inplace=True)]
        channels, height, width = args.channels, (height + 1) // 2, (width + 1) // 2
    linear = nn.Linear(channels * height * width, args.embedding_dim)
    return nn.Sequential(*layers, nn.Flatten(), linear, nn.ReLU(inplace=True))


class QNetwork(nn.Module):
    """Q from the features of the observation and, with SOFE, of phi. [SB3 QNetwork]"""

    def __init__(self, envs, phi_shape, args):
        super().__init__()
        self.obs_tower = make_tower(envs.single_observation_space.shape, args)
        self.phi_tower = make_tower(phi_shape, args) if args.augment else None
        features = args.embedding_dim * (2 if args.augment else 1)
        hidden, last = nn.Linear(64, 64), nn.Linear(64, envs.single_action_space.n)
        self.head = nn.Sequential(nn.Linear(features, 64), nn.ReLU(), hidden, nn.ReLU(), last)

    def forward(self, obs, phi):
        """obs (M, C, H, W) and phi (M, F, H, W) -> Q of each action (M, A)."""
        features = self.obs_tower(obs.float())
        if self.phi_tower is not None:
            features = torch.cat([features, self.phi_tower(phi)], dim=1)
        return self.head(features)


class ReplayBuffer:
    """The latest steps of the N envs as a ring of L rows; `total += 1` completes a row.

    obs, next_obs   (L, N, bytes) uint8     zeros and ones are packed to bits; other maps flattened
    actions, rewards, terminated, ended     (L, N), where a truncated episode has ended as well
    counts          (L, N or 1, H, W)       before the step; after it: the same plus the visits
    visits          (L, N, 2, 2) int16      cells of s', and of the next s_0 if the episode ended
    L exceeds what is sampled: a stopped run goes back to its latest row of the log and lacks none.
    """

    def __init__(self, envs, table_shape, args):
        N, space = args.num_envs, envs.single_observation_space
        self.args, self.shape, self.pixels = args, space.shape, int(np.prod(space.shape))
        self.total = np.zeros((), np.int64)  # rows completed
        self.capacity = args.buffer_size // N  # rows that are sampled from
        self.L = self.capacity + args.train_frequency * args.log_every
        self.packed = space.dtype == np.uint8 and space.high.max() == 1
        width, dtype = (-(-self.pixels // 8), "u1") if self.packed else (self.pixels, space.dtype)
        kinds = dict(obs=((N, width), dtype), next_obs=((N, width), dtype), actions=((N,), "i8"))
        kinds |= dict(rewards=((N,), "f4"), terminated=((N,), "?"), ended=((N,), "?"))
        if args.augment:  # an episode's counts fit in 16 bits, those of a run may not
            counts = "u2" if args.counts == "episodic" else "i8"
            kinds |= dict(counts=(table_shape, counts), visits=((N, 2, 2), "i2"))
        row_bytes = sum(int(np.prod(s)) * np.dtype(kind).itemsize for s, kind in kinds.values())
        runs.check_memory("replay buffer", self.L * row_bytes, torch.device("cpu"))
        self.columns = {name: np.zeros((self.L, *s), kind) for name, (s, kind) in kinds.items()}

    def put(self, **values):
        """Fill columns of the present row; without SOFE there are none for counts and visits."""
        for name in values.keys() & self.columns.keys():
            value, column = values[name], self.columns[name]
            if name in ("obs", "next_obs"):
                pixels = value.reshape(len(value), -1)
                value = np.packbits(pixels, axis=1) if self.packed else pixels
            if name == "counts" and value.max() > np.iinfo(column.dtype).max:
                runs.fail("a cell was visited 65536 times in an episode: take --counts global")
            column[self.total % self.L] = value

    def sample(self, M, device):
        """M transitions, drawn uniformly with replacement.

        returns   dict of tensors on the device: obs, next_obs (M, C, H, W); phi, next_phi
                  (M, F, H, W); actions (M,); rewards (M,), discounted sum of up to n_step of them;
                  discounts (M,), of the value of next_obs, 0 where the episode was terminated
        """
        args, columns = self.args, self.columns
        total = int(self.total)  # rows are counted on; modulo L they are places
        first = torch.randint(max(0, total - self.capacity), total - args.n_step + 1, (M,)).numpy()
        env = torch.randint(args.num_envs, (M,)).numpy()
        rewards, discounts = np.zeros(M, np.float32), np.ones(M, np.float32)
        last, going_on = first, np.ones(M, bool)
        for k in range(args.n_step):  # fewer rewards where the episode ends
            last = np.where(going_on, first + k, last)
            at = (last % self.L, env)
            rewards += discounts * going_on * columns["rewards"][at]
            discounts[going_on] *= args.gamma
            going_on &= ~columns["ended"][at]
        discounts *= ~columns["terminated"][at]
        batch = {"rewards": torch.from_numpy(rewards), "discounts": torch.from_numpy(discounts)}
        batch |= {"next_obs": self.observations("next_obs", *at), "next_phi": self.phi(*at, True)}
        at = (first % self.L, env)
        batch |= {"obs": self.observations("obs", *at), "phi": self.phi(*at, False)}
        batch["actions"] = torch.from_numpy(columns["actions"][at])
        return {name: tensor.to(device) for name, tensor in batch.items()}

    def observations(self, name, rows, env):
        stored = self.columns[name][rows, env]
        pixels = np.unpackbits(stored, axis=1, count=self.pixels) if self.packed else stored
        return torch.from_numpy(pixels.reshape(-1, *self.shape))

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


def dqn_loss(q_network, target_network, batch, args):
    """Loss () and terms to log, of what `ReplayBuffer.sample` gives. [DQN alg. 1; SB3 DQN.train]"""
    with torch.no_grad():
        next_q = target_network(batch["next_obs"], batch["next_phi"])  # (M, A)
        chooser = q_network(batch["next_obs"], batch["next_phi"]) if args.double_q else next_q
        next_values = next_q.gather(1, chooser.argmax(1, keepdim=True)).squeeze(1)
        td_target = batch["rewards"] + batch["discounts"] * next_values
    q = q_network(batch["obs"], batch["phi"]).gather(1, batch["actions"][:, None]).squeeze(1)
    loss = nn.functional.smooth_l1_loss(q, td_target)
    return loss, {"td_loss": loss.detach(), "q_values": q.detach().mean()}


@torch.no_grad()
def evaluate(q_network, counts, args, folder=None):
    """Play E = `eval_episodes` greedily and E with epsilon_end of random actions, one env each.

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
        q = q_network(torch.as_tensor(obs, device=device), augment(counts, table_ids, args))
        noise = torch.rand(len(q), 1 + q.shape[1], generator=generator, device=device)
        explore = noise[:, 0] < args.epsilon_end * (table_ids >= E)
        actions = torch.where(explore, noise[:, 1:].argmax(1), q.argmax(1))
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


def main(args: Args) -> dict[str, float]:
    args = runs.resume_args(args, "dqn_sofe")
    device = runs.set_up(args)  # seeds and threads as well
    to_device = partial(torch.as_tensor, device=device)
    N, envs = args.num_envs, make_envs(args, args.num_envs)
    table_ids = torch.arange(N, device=device) * (args.counts == "episodic")  # global: all 0
    counts = torch.zeros(int(table_ids[-1]) + 1, *envs.reachable.shape, device=device).long()
    phi_shape = augment(counts, table_ids, args).shape[1:]
    episode_bonus = torch.zeros(N, device=device)
    replay = ReplayBuffer(envs, counts.shape, args)
    q_network = QNetwork(envs, phi_shape, args).to(device, memory_format=torch.channels_last)
    target_network = copy.deepcopy(q_network).requires_grad_(False)
    weights, target_weights = list(q_network.parameters()), list(target_network.parameters())
    optimizer = torch.optim.Adam(weights, args.learning_rate, fused=True)
    # A checkpoint holds `kept`: exploration_steps too, for a longer run goes on with this schedule.
    exploration_steps = torch.tensor(args.exploration_fraction * args.total_timesteps)
    kept = dict(q_network=q_network, target_network=target_network, optimizer=optimizer, envs=envs)
    kept |= dict(counts=counts, bonus=episode_bonus, exploration_steps=exploration_steps)
    run = runs.Run(args, "dqn_sofe", envs.reachable, kept, (replay.total, replay.columns))
    global_step = run.start_step
    if args.resume is None:
        _, info = envs.reset(seed=args.seed)
        visit(counts, table_ids, to_device(info["cell"]))
        run.log_step(0, info["cell"])
    next_obs = envs.observe()  # as reset returned it, or as the checkpoint left it
    next_phi = augment(counts, table_ids, args)
    update_steps = args.train_frequency * N  # environment steps
    log_steps = update_steps * args.log_every
    num_updates = -(-args.total_timesteps // log_steps) * args.log_every  # rounded up
    for update in range(global_step // update_steps, num_updates):
        if update % args.log_every == 0:
            run.checkpoint(global_step)
            terms, bonuses = [], []
        beta = args.beta * ((1 - update / num_updates) if args.anneal_beta else 1)
        for _ in range(args.train_frequency):
            progress = min(1.0, global_step / max(exploration_steps.item(), 1e-8))
            epsilon = args.epsilon_start + progress * (args.epsilon_end - args.epsilon_start)
            actions = torch.randint(int(envs.single_action_space.n), (N,), device=device)
            explore = torch.rand(N, device=device) < epsilon + (global_step < args.learning_starts)
            if not explore.all():
                with torch.no_grad():
                    greedy = q_network(to_device(next_obs), next_phi).argmax(1)
                actions = torch.where(explore, actions, greedy)
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
            if global_step % args.target_interval < N:
                torch._foreach_lerp_(target_weights, [w.detach() for w in weights], args.tau)

        if global_step > args.learning_starts and replay.total >= args.n_step:
            for _ in range(args.gradient_steps):
                batch = replay.sample(args.minibatch_size, device)
                loss, loss_terms = dqn_loss(q_network, target_network, batch, args)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(weights, args.max_grad_norm)
                optimizer.step()
                terms.append(loss_terms)
        row_done = (update + 1) % args.log_every == 0
        if row_done and terms:
            losses = {f"losses/{k}": torch.stack([x[k] for x in terms]).mean() for k in terms[0]}
            bonus, raw_bonus = torch.stack(bonuses).mean((0, 2))
            losses |= {"explore/bonus": bonus, "explore/raw_bonus": raw_bonus}
            losses = {name: value.item() for name, value in losses.items()}
            run.log_update(global_step, losses | {"explore/epsilon": epsilon})
        if row_done and run.eval_due(global_step, log_steps) and update + 1 < num_updates:
            run.log_eval(global_step, evaluate(q_network, counts, args))

    run.checkpoint(global_step, write=True)
    metrics = evaluate(q_network, counts, args, run.folder) if args.eval_episodes else {}
    envs.close()
    run.finish(global_step, metrics)
    return metrics


if __name__ == "__main__":
    main(tyro.cli(Args))
