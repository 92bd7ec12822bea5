"""IMPALA with the elliptical bonus of E3B, or ICM or RND, and SOFE: the agent sees the ellipsoid.

E3B pays for a state whose embedding is unlike those met before in the episode. The same state pays
less each time, so an agent that sees only the game chases a moving reward. SOFE shows it what the
bonus is made of, the inverse of the ellipsoid C_t or its diagonal, and the bonus of a state becomes
a function of what it sees (the diagonal: in part): see `visit` and `augment`.

    python impala_e3b_sofe.py --augment diagonal                 # MiniHack-MultiRoom-N6 with SOFE
    python impala_e3b_sofe.py                                    # the same bonus without SOFE
The defaults are those published, for a GPU; a CPU setting and deviations: docs/impala_e3b_sofe.md.

Sources; [SOFE x] is the label x of the paper, other tags name a section, figure or equation
  [SOFE]   Castanyer et al. 2024, Improving Intrinsic Exploration by Creating Stationary Objectives
  [E3B]    Henaff et al. 2022, Exploration via Elliptical Episodic Bonuses, and its code
  [IMPALA] Espeholt et al. 2018, IMPALA: Scalable Distributed Deep-RL
  [ICM]    Pathak et al. 2017; [RND] Burda et al. 2018; both with the settings of [E3B]

Order of events in a step: act on (obs, phi_t); step; pay for the true s' from the ellipsoid before
it, then add it; where an episode ended, a new ellipsoid with s_0; only then phi_{t+1}. A time limit
is no death: V(s') is bootstrapped, by the actor, with the old episode's phi and memory. The psi of
bonus and phi is the actor's copy, renewed once per rollout, and the ellipsoid keeps embeddings as
they were: the learner, whose own psi has moved on, sees the phi that was acted on and its bonus.
"""

import copy
import threading
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch
import torch.nn as nn
import tyro

from common import curiosity, e3b, minihack, procgen, runs, trunks

WEIGHTS = {"none": 0.0, "e3b": 1.0, "icm": 0.1, "rnd": 0.001}  # of the bonuses, as in [E3B]


@dataclass
class Args:
    # Run
    seed: int = 1
    """seed of the networks, the actions and the levels"""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """where to compute; auto is CUDA where there is one, else the CPU"""
    num_threads: int = 1
    """CPU threads of PyTorch; 1 is best where several runs share a machine"""
    total_timesteps: int = 100_000_000
    """environment steps, summed over the envs, rounded up to whole rollouts"""
    runs_dir: str = "runs"
    """folder in which the run makes its own folder"""
    run_name: str | None = None
    """name of the run's folder (None: made from the settings and the time)"""
    resume: str | None = None
    """folder of a run to go on with; its arguments are taken from there"""
    checkpoint_every: int = 1_000_000
    """environment steps between two checkpoints on disk"""
    eval_episodes: int = 10
    """episodes of an evaluation on levels apart, greedy and again sampled (0: no evaluation)"""
    eval_every: int = 0
    """environment steps between two evaluations (0: only one at the end)"""
    track: bool = False
    """mirror the run to Weights & Biases (pip install wandb)"""
    sync: bool = False
    """act and learn in turn, in one thread: repeatable, and slower"""
    # Environment
    env_id: str = "MiniHack-MultiRoom-N6-v0"
    """a MiniHack level, or procgen-maze; see common/minihack.py and common/procgen.py"""
    penalty_step: float = 0.0
    """MiniHack only: cost, >= 0, of a step in which no time passes (MiniHack's own: 0.01)"""
    num_workers: int = 1
    """MiniHack only: processes that the envs are spread over (0: in this one)"""
    # Algorithm, as in [E3B], whose batches are 8 rollouts
    learning_rate: float = 1e-4
    """step size of RMSprop (alpha 0.99, epsilon 1e-5), and of Adam for E3B's psi and inverse net"""
    num_envs: int = 8
    """N, parallel environments"""
    num_steps: int = 80
    """T, steps of each environment per rollout, and how far back gradients reach"""
    gamma: float = 0.99
    """discount per step, in [0, 1]"""
    ent_coef: float = 0.005
    """weight of the policy's entropy, >= 0"""
    vf_coef: float = 0.5
    """weight of the value loss, >= 0"""
    max_grad_norm: float = 40.0
    """largest norm of the gradient of each network"""
    hidden_dim: int = 1024
    """units of the trunk's layers and of the LSTM (1024: MiniHack; 256 is usual for Procgen)"""
    glyph_dim: int = 64
    """MiniHack only: size of the embedding of a glyph"""
    crop_only: bool = False
    """MiniHack only: read the 9 x 9 cells round the agent and the status alone, for a CPU"""
    shallow: bool = False
    """Procgen only: the small network of IMPALA in place of the large one, for a CPU"""
    # Exploration bonus
    bonus: Literal["none", "icm", "rnd", "e3b"] = "e3b"
    """the intrinsic reward, with its published weight: e3b 1, icm 0.1, rnd 0.001"""
    augment: Literal["none", "diagonal", "full"] = "none"
    """SOFE: show the agent the diagonal of E3B's C_t^-1, or all of it"""
    beta: float = 1.0
    """weight of the bonus, >= 0; its sum with the task's reward is clamped to [-1, 1]"""
    ext_coef: float = 1.0
    """weight of the task's own reward, >= 0; 0 is the reward-free setting"""
    embedding_dim: int = 512
    """d, size of the embedding psi"""
    ridge: float = 0.1
    """C of an episode begins as this times the identity"""
    phi_dim: int = 1024
    """features that the encoder of phi ends in"""
    phi_channels: int = 8
    """--augment full: channels of each convolution of the encoder of phi"""
    pool_stride: Literal[1, 2] = 2
    """--augment full: stride of its max-pooling; 1 is the paper's, with 2 billion weights"""

    @property
    def batch_size(self) -> int:
        """B = T * N, samples per iteration"""
        return self.num_steps * self.num_envs

    def __post_init__(self):
        sofe, full, d = self.augment != "none", self.augment == "full", self.embedding_dim
        # Five poolings leave a pixel of C^-1; psi less its mean is 0 where it is one number.
        least = (32 if self.pool_stride == 2 else 6) if full else 1 + (self.bonus == "e3b")
        runs.check_args(
            self,
            "seed eval_every eval_episodes beta ext_coef ent_coef vf_coef gamma "
            "penalty_step num_workers",
            "gamma",
            *trunks.flag_rules(self),
            ("--augment and --bonus: only e3b has an ellipsoid", sofe and self.bonus != "e3b"),
            (f"--embedding-dim: {least} or more for this --bonus and --augment", d < least),
            ("--eval-every and --eval-episodes 0", self.eval_every and not self.eval_episodes),
        )


def make_envs(args, num_envs, split):
    """N envs with SAME_STEP autoreset on the levels of a split, "train" or "eval"."""
    try:
        if args.env_id == "procgen-maze":
            return procgen.ProcgenVecEnv("maze", num_envs, split=split)
        settings = dict(penalty_step=-args.penalty_step, split=split, stagger=split == "train")
        return minihack.MiniHackVecEnv(args.env_id, num_envs, args.num_workers, **settings)
    except (ModuleNotFoundError, ValueError) as error:
        runs.fail(f"--env-id {args.env_id}: {error}")


# What the paper is about: pay for what the ellipsoid does not hold yet, add it, show the ellipsoid.
def visit(ellipsoids, embedding, env_ids=None):
    """Pay for s' and add it: b = psi^T C_t^-1 psi, then C becomes C + psi psi^T. [SOFE e3b_eq]

    The inverse is C^-1 - u u^T / (1 + b) then, with u = C^-1 psi: nothing is inverted.
    ellipsoids   C_t^-1 of each env's episode up to s_t, see e3b.Ellipsoids, changed in place
    embedding    (K, d)   psi(s'), of length 1, in the envs env_ids (None: in all)
    returns      (K,)     b, in [0, 1 / ridge]
    `Ellipsoids.update` is the same rule, and replays it for the learner: change both.
    """
    u = ellipsoids.solve(embedding, env_ids)
    bonus = (embedding * u).sum(1)
    ellipsoids.subtract(u / (1 + bonus).sqrt().unsqueeze(1), env_ids)  # C^-1 -= v v^T
    return bonus


def augment(ellipsoids, args, env_ids=None):
    """phi_t as the network sees it. [SOFE sec:method: the augmented state is the pair (obs, phi)]

    returns   (K, d) the diagonal of C_t^-1, or (K, d, d) all of it, of the envs env_ids (None: of
              all); times ridge, so that the eigenvalues are in [0, 1]. None without SOFE
    """
    if args.augment != "none":
        show = ellipsoids.diagonal if args.augment == "diagonal" else ellipsoids.full
        return args.ridge * show(env_ids)


class Agent(nn.Module):
    """Policy and value: an LSTM on the features of the observation and of phi. [E3B C.1.1]"""

    def __init__(self, envs, args):
        super().__init__()
        self.trunk = trunks.make_trunk(args)
        self.phi_encoder = None if args.augment == "none" else trunks.make_phi_encoder(args)
        features = args.hidden_dim + args.phi_dim * (args.augment != "none")
        self.lstm = trunks.EpisodeLSTM(features, args.hidden_dim)
        self.policy_head = nn.Linear(args.hidden_dim, int(envs.single_action_space.n))
        self.critic = nn.Linear(args.hidden_dim, 1)

    def forward(self, obs, phi_features, starts, memory):
        """Read T steps of K envs; the memory forgets what came before an episode.

        obs            dict of (T, K, ...)
        phi_features   (T, K, P)       None without SOFE
        starts         (T, K) bool     the observation at this index begins an episode
        memory         (2, K, L)       h and c before the first step; never written
        returns        the policy and the values of (T, K), and the memory after the last step
        """
        features = self.trunk({k: x.flatten(0, 1) for k, x in obs.items()})
        features = features.unflatten(0, starts.shape)  # (T, K, D)
        if phi_features is not None:
            features = torch.cat([features, phi_features], dim=2)
        outputs, memory = self.lstm(features, starts, memory)  # (T, K, L)
        logits = self.policy_head(outputs)
        policy = torch.distributions.Categorical(logits=logits, validate_args=False)
        return policy, self.critic(outputs).squeeze(2), memory


class InverseDynamics(nn.Module):
    """E3B's psi, which learns by telling which action led from a state to the next. [E3B]"""

    def __init__(self, envs, args):
        super().__init__()
        self.encoder = trunks.Encoder(args, unit=True)  # of length 1, as in `visit`
        self.inverse = curiosity.InverseNet(args.embedding_dim, int(envs.single_action_space.n))

    def forward(self, rollout):
        """Loss (), sum over T and mean over N, and the bonus (T, N), which the actor has paid.

        After a step that ends an episode comes the next s_0: nothing is learned there.
        """
        psi = curiosity.embed(self.encoder, rollout)  # (T + 1, N, d)
        return self.inverse.loss(psi, rollout, psi.shape[2] ** 0.5), rollout["bonus"]


def make_explorer(envs, args):
    """What a bonus learns: E3B's psi, ICM or RND. It turns a rollout into a loss and the bonus."""
    encoder = partial(trunks.Encoder, args, unit=False)
    if args.bonus == "e3b":
        return InverseDynamics(envs, args)
    if args.bonus == "icm":
        return curiosity.ICM(encoder(), args.embedding_dim, int(envs.single_action_space.n))
    return curiosity.RND(encoder(), encoder()) if args.bonus == "rnd" else curiosity.NoBonus()


def vtrace(
    behaviour_logprobs, target_logprobs, rewards, values, final_values, terminations, truncations,
    gamma, rho_bar=1.0, c_bar=1.0,
):  # fmt: skip
    """Targets of the critic and advantages of the policy, corrected for its lag. [IMPALA eq. 1]

    behaviour_logprobs, target_logprobs, rewards   (T, N)   index t is the action at t
    values                     (T + 1, N)   the last row is V of the observation after the rollout
    final_values               (T, N)       V of the true s' where an episode was truncated
    terminations, truncations  (T, N) bool
    returns                    vs (T, N), pg_advantages (T, N)
    """
    rhos = (target_logprobs - behaviour_logprobs).exp()
    clipped_rhos, cs = rhos.clamp(max=rho_bar), rhos.clamp(max=c_bar)
    dones = terminations | truncations
    next_values = torch.where(truncations, final_values, values[1:]).masked_fill(terminations, 0.0)
    deltas = clipped_rhos * (rewards + gamma * next_values - values[:-1])
    vs = values.clone()
    for t in reversed(range(len(rewards))):
        vs[t] += deltas[t] + gamma * ~dones[t] * cs[t] * (vs[t + 1] - values[t + 1])
    next_vs = torch.where(dones, next_values, vs[1:])
    return vs[:-1], clipped_rhos * (rewards + gamma * next_vs - values[:-1])


def impala_loss(agent, rollout, phi_features, rewards, args):
    """Loss of a rollout: sums over T, means over N. [IMPALA sec. 4.2; E3B]

    rollout        as `Actor.collect` returns it
    phi_features   (T + 1, N, P)   None without SOFE
    rewards        (T, N)          weighted and clamped
    returns        loss (), and a dict of detached () tensors
    """
    policy, values, _ = agent(rollout["obs"], phi_features, rollout["starts"], rollout["memory"])
    policy = torch.distributions.Categorical(logits=policy.logits[:-1], validate_args=False)
    logprobs = policy.log_prob(rollout["actions"])
    both = rollout["logprobs"], logprobs.detach()
    ends = rollout["final_values"], rollout["terminations"], rollout["truncations"]
    vs, pg_advantages = vtrace(*both, rewards, values.detach(), *ends, args.gamma)
    pg_loss = -(pg_advantages * logprobs).mean(1).sum()
    v_loss = 0.5 * (vs - values[:-1]).square().mean(1).sum()
    entropy = policy.entropy().mean(1).sum()
    loss = pg_loss + args.vf_coef * v_loss - args.ent_coef * entropy
    terms = {"policy_loss": pg_loss, "value_loss": v_loss, "entropy": entropy / len(rewards)}
    terms["lag"] = (both[1] - both[0]).abs().max()  # about 0 with the actor's weights
    return loss, {name: term.detach() for name, term in terms.items()}


def backward(agent, rollout, rewards, args):
    """Add the gradient of `impala_loss` to the agent's; return the terms of the loss.

    The matrices of a whole rollout, (T + 1, N, d, d), are never in memory. They are rebuilt step by
    step from the first ones and the embeddings, bitwise as they were, and that twice: for their
    features, and for the gradient of the encoder where the features' gradient is known.
    """
    encoder = agent.phi_encoder
    if args.augment != "full":
        phi_features = None if encoder is None else encoder(rollout["phi"])
        loss, terms = impala_loss(agent, rollout, phi_features, rewards, args)
        loss.backward()
        return terms
    replica = e3b.Ellipsoids(args.num_envs, args.embedding_dim, args.ridge, rewards.device, "dense")
    met = rollout["embedding"], rollout["starts"][1:], rollout["start_embedding"]
    rebuild = partial(replica.rebuild, rollout["first_ellipsoids"], *met, full=True)
    with torch.no_grad():
        features = torch.stack([encoder(args.ridge * inv_cov) for inv_cov in rebuild()])
    loss, terms = impala_loss(agent, rollout, features.requires_grad_(), rewards, args)
    loss.backward()
    for inv_cov, gradient in zip(rebuild(), features.grad, strict=True):
        encoder(args.ridge * inv_cov).backward(gradient)
    rollout["last_phi"] = args.ridge * inv_cov
    return terms


class Actor:
    """N environments, what belongs to their episodes, and copies of the networks to act with."""

    def __init__(self, envs, agent, explorer, args):
        self.envs, self.args, N = envs, args, envs.num_envs
        self.agent, self.explorer = copy.deepcopy(agent), copy.deepcopy(explorer)
        self.device, self.ellipsoids = agent.critic.bias.device, None
        self.memory = torch.zeros((2, N, args.hidden_dim), device=self.device)
        self.starts = torch.ones_like(self.memory[0, :, 0], dtype=torch.bool)
        if args.bonus == "e3b":
            form = "dense" if args.augment == "full" else "auto"
            size = N, args.embedding_dim, args.ridge, self.device
            self.ellipsoids = e3b.Ellipsoids(*size, form, envs.max_steps + 1)
        self.clock = runs.Stopwatch()  # inference, environment, bonus

    def to_device(self, arrays):  # on a CPU no copy: the envs return new arrays in each step
        return {k: torch.as_tensor(x, device=self.device) for k, x in arrays.items()}

    @torch.no_grad()
    def reset(self, seed):
        self.obs = self.to_device(self.envs.reset(seed=seed)[0])
        if self.ellipsoids is not None:
            visit(self.ellipsoids, self.explorer.encoder(self.obs))  # s_0 counts

    def read(self, obs, phi, starts, memory):
        """Policy, values and memory after one observation (K, ...)."""
        phi_features = None if phi is None else self.agent.phi_encoder(phi)[None]
        return self.agent({k: x[None] for k, x in obs.items()}, phi_features, starts[None], memory)

    @torch.no_grad()
    def step(self, greedy=0, generator=None):
        """One step of every env, the first `greedy` of them by the likeliest action.

        returns   dict of (N, ...) tensors, `info`, and (F,) the envs whose episode ended
        """
        self.clock.start()
        ellipsoids, step = self.ellipsoids, {"obs": self.obs, "starts": self.starts}
        phi = augment(ellipsoids, self.args)
        if self.args.augment == "diagonal":
            step["phi"] = phi
        policy, _, self.memory = self.read(self.obs, phi, self.starts, self.memory)
        actions = policy.probs[0].multinomial(1, generator=generator).squeeze(1)
        actions[:greedy] = policy.logits[0, :greedy].argmax(1)
        step |= {"actions": actions, "logprobs": policy.log_prob(actions)[0]}
        actions = actions.cpu().numpy()  # waits for the device
        self.clock.lap("inference")
        obs, rewards, terminated, truncated, info = self.envs.step(actions)
        self.clock.lap("environment")
        outcome = dict(terminations=terminated, truncations=truncated)
        step |= self.to_device(outcome | {"ext_rewards": np.float32(rewards)})
        step["bonus"], step["final_values"] = torch.zeros((2, len(rewards)), device=self.device)
        self.obs, self.starts = self.to_device(obs), step["terminations"] | step["truncations"]
        # The bonus of the true s' from the ellipsoid before it, then the visit.
        ended, cut = np.flatnonzero(terminated | truncated), np.flatnonzero(truncated)
        next_obs = self.to_device(info["final_obs"]) if len(ended) else self.obs
        if ellipsoids is not None:
            step["embedding"] = self.explorer.encoder(next_obs)
            step["bonus"] = visit(ellipsoids, step["embedding"])
            step["start_embedding"] = torch.zeros_like(step["embedding"])
        if len(cut):  # V(s') with phi and memory of the episode that was cut off
            final_obs, no_start = {k: x[cut] for k, x in next_obs.items()}, ~self.starts[cut]
            final = final_obs, augment(ellipsoids, self.args, cut), no_start, self.memory[:, cut]
            step["final_values"][cut] = self.read(*final)[1][0]
        if ellipsoids is not None and len(ended):
            start = self.explorer.encoder({k: x[ended] for k, x in self.obs.items()})
            step["start_embedding"][ended] = start
            ellipsoids.reset(ended)
            visit(ellipsoids, start, ended)  # s_0 counts
        self.clock.lap("bonus")
        return step, info, ended

    @torch.no_grad()
    def collect(self, agent, explorer, lock):
        """Take the learner's weights, then T steps.

        returns   dict of what `step` gives, (T, N, ...), obs, starts and phi with one row more;
                  memory and first_ellipsoids from before; and log, T pairs of info and ended
        """
        with lock:
            self.agent.load_state_dict(agent.state_dict())
            self.explorer.load_state_dict(explorer.state_dict())
        rollout = {"memory": self.memory}
        if self.args.augment == "full":
            rollout["first_ellipsoids"] = self.ellipsoids.get_state()
        steps, *log = zip(*(self.step() for _ in range(self.args.num_steps)), strict=True)
        last = {"obs": self.obs, "starts": self.starts, "phi": augment(self.ellipsoids, self.args)}
        rollout["log"] = list(zip(*log, strict=True))
        return rollout | runs.stack_steps(steps, last)

    def get_state(self):
        state = {"memory": self.memory, "starts": self.starts, "envs": self.envs.get_state()}
        return state | {"ellipsoids": self.ellipsoids and self.ellipsoids.get_state()}

    def set_state(self, state):
        self.memory, self.starts = (state[k].to(self.device) for k in ("memory", "starts"))
        if self.ellipsoids is not None:
            self.ellipsoids.set_state(state["ellipsoids"])
        self.envs.set_state(state["envs"])
        self.obs = self.to_device(self.envs.observe())


def evaluate(agent, explorer, args):
    """Play E = `eval_episodes` with the likeliest actions and E with sampled ones, one env each.

    returns   eval/greedy_return, _length, _coverage, _success and eval/sampled_..., means over E
              episodes of levels that are not trained on; those that are NaN are left out
    """
    E, names = args.eval_episodes, ("return", "length", "coverage", "success")
    envs, metrics = make_envs(args, 2 * E, "eval"), {}
    actor = Actor(envs, agent, explorer, args)
    actor.reset(args.seed + 10_000)
    generator = torch.Generator(actor.device).manual_seed(args.seed + 10_000)  # not of training
    episodes = runs.FirstEpisodes(2 * E, ("r", "l", "coverage", "success"))
    while episodes.playing.any():
        _, info, ended = actor.step(E, generator)
        episodes.record(info, ended)
    envs.close()
    for kind, part in (("greedy", episodes.results[:, :E]), ("sampled", episodes.results[:, E:])):
        means = zip(names, part.mean(1).tolist(), strict=True)
        metrics |= {f"eval/{kind}_{name}": mean for name, mean in means if np.isfinite(mean)}
    return metrics


@runs.in_one_line(minihack.WorkerError)
def main(args: Args) -> dict[str, float]:
    args = runs.resume_args(args, "impala_e3b_sofe")
    device = runs.set_up(args)  # seeds and threads as well
    N, B = args.num_envs, args.batch_size
    envs = make_envs(args, N, "train")
    with torch.device("meta"):  # nothing is allocated: the largest encoder has 2 billion weights
        runs.check_training_memory([Agent(envs, args), make_explorer(envs, args)], device)
    agent, explorer = Agent(envs, args).to(device), make_explorer(envs, args).to(device)
    actor = Actor(envs, agent, explorer, args)
    rmsprop = partial(torch.optim.RMSprop, lr=args.learning_rate, alpha=0.99, eps=1e-5)
    optimizers = {"optimizer": rmsprop(agent.parameters())}
    if args.bonus != "none":
        kind = partial(torch.optim.Adam, lr=args.learning_rate) if args.bonus == "e3b" else rmsprop
        optimizers["explorer_optimizer"] = kind(explorer.parameters())
    episode_bonus, std = torch.zeros(N, device=device), e3b.RunningStd()
    lock = threading.Lock()  # of the learner's weights, which the actor copies
    collect = partial(actor.collect, agent, explorer, lock)
    rollouts = runs.Producer(collect, threaded=not args.sync, source=actor)  # starts at `get`
    kept = dict(agent=agent, explorer=explorer, actor=rollouts, bonus=episode_bonus, std=std)
    run = runs.Run(args, "impala_e3b_sofe", None, kept | optimizers, more=("success",))
    global_step, num_iterations = run.start_step, -(-args.total_timesteps // B)  # rounded up
    try:
        if args.resume is None:
            actor.reset(args.seed)
        for iteration in range(global_step // B, num_iterations):
            run.checkpoint(global_step, share=0.05)
            rollout = rollouts.get(partial(run.crash, "the actor"))
            explorer_loss, raw_bonus = explorer(rollout)
            # E3B's is divided by its running deviation, over all steps of all envs.
            deviation = std.update(raw_bonus) if args.bonus == "e3b" else 1.0
            int_rewards = args.beta * WEIGHTS[args.bonus] * raw_bonus / deviation
            rewards = args.ext_coef * rollout["ext_rewards"] + int_rewards
            terms = backward(agent, rollout, rewards.clamp(-1, 1), args)
            if explorer_loss.requires_grad:
                explorer_loss.backward()
            for network in (agent, *explorer.children()):
                nn.utils.clip_grad_norm_(network.parameters(), args.max_grad_norm)
            with lock:
                for optimizer in optimizers.values():
                    optimizer.step()
                    optimizer.zero_grad()
                if "last_phi" in rollout:  # BatchNorm's statistics take a step towards the latest
                    agent.phi_encoder.move_statistics(rollout["last_phi"])

            for t, (info, ended) in enumerate(rollout["log"]):
                episode_bonus += int_rewards[t]
                if len(ended):
                    bonuses = episode_bonus[ended].tolist()
                    run.log_episodes(global_step + (t + 1) * N, info, ended, bonuses)
                    episode_bonus[ended] = 0
            global_step += B
            terms["explorer_loss"] = explorer_loss
            losses = {f"losses/{k}": x for k, x in terms.items()}
            losses |= {"explore/bonus": int_rewards.mean(), "explore/raw_bonus": raw_bonus.mean()}
            run.log_update(global_step, {name: value.item() for name, value in losses.items()})
            run.log_times(global_step, actor.clock.seconds | {"learner_waits": rollouts.waited})
            if run.eval_due(global_step, B) and iteration + 1 < num_iterations:
                run.log_eval(global_step, evaluate(agent, explorer, args))
        run.checkpoint(global_step, write=True)
        metrics = evaluate(agent, explorer, args) if args.eval_episodes else {}
    finally:
        if rollouts.close():  # else the actor is still in a step of theirs
            envs.close()
    run.finish(global_step, metrics)
    return metrics


if __name__ == "__main__":
    main(tyro.cli(Args))
