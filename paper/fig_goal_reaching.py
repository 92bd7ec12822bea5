"""Does an agent trained with SOFE walk to the one unvisited cell? [SOFE app:behaviour_analysis]

    python paper/fig_goal_reaching.py --small    # uses the runs of fig_coverage.py, or makes them
    python paper/fig_goal_reaching.py --paper    # the paper's network, for a GPU

PPO trained on reward-free exploration of Maze 1 (sqrt bonus, episodic counts, SOFE) is shown a
table in which every reachable cell, the start among them, counts as visited once, but for one: the
paper asks for any number above 0. The table goes on counting as the agent walks, as it does in
training. A walk has the 1000 steps of an episode, from the maze's start, and ends at the goal. All
448 cells are goals in turn, once with the likeliest actions (greedy) and four times with sampled
ones. For comparison, 64 sampled walks are shown the same table with no cell left out: how many of
them come by each cell shows what the agent reaches without being told.

Writes paper/results/goal_reaching.csv, a row for each seed and goal: the length of a shortest path,
success and length of the greedy walk, share of successes and mean length of the successful sampled
walks, and the share of the walks without a goal that came by. The figure paper/figures/
goal_reaching.png has sampled walks of seed 1 to the goals at a quarter, half, three quarters and
all of the goals in order of distance (if the first of the four fails, it is the one drawn), and the
success at each cell, with and without a goal shown, mean over seeds.
"""

import numpy as np
import torch
from experiments import (
    FIGURES,
    RESULTS,
    RUNS,
    command_of,
    launch,
    parse_size,
    write_csv,
    write_records,
)
from fig_coverage import SIZES, jobs, names

import ppo_sofe
from common.mazes import MazeVecEnv, shortest_paths

MAZE, VISITS = "Maze1-v0", 1
SAMPLES = {"smoke": (1, 2), "small": (4, 64), "paper": (4, 64)}  # to each goal, without a goal


def load_agent(folder):
    """The agent of a finished run of ppo_sofe.py, and the arguments that it was trained with."""
    content = torch.load(folder / "checkpoint.pt", map_location="cpu", weights_only=True)
    args = ppo_sofe.Args(**content["args"])
    envs = ppo_sofe.make_envs(args, 1)
    counts = torch.zeros((1, *envs.reachable.shape), dtype=torch.int64)
    phi = ppo_sofe.augment(counts, torch.tensor([0]), args)
    agent = ppo_sofe.Agent(envs, phi.shape[1:], args)
    agent.load_state_dict(content["state"]["agent"])
    envs.close()
    return agent, args


def act(agent, args, generator=None):
    """What `walk` takes: the actions of an agent, the likeliest or sampled with a generator."""

    @torch.no_grad()
    def choose(obs, counts):
        phi = ppo_sofe.augment(counts, torch.arange(len(counts)), args)
        policy, _ = agent(obs, phi)
        if generator is None:
            return policy.logits.argmax(1)
        return policy.probs.multinomial(1, generator=generator).squeeze(1)

    return choose


def walk(choose, goals, limit: int, maze: str = MAZE):
    """Walk to all goals at the same time, each from the start in a maze of its own.

    choose    (obs (K, C, H, W), counts (K, H, W)) -> actions (K,), of the walks that go on
    goals     (N, 2) int64    row and column of the cell left out; (-1, -1) leaves out none
    limit     int             steps of a walk
    returns   lengths (N,) float64, moves to the goal, nan where it was not reached;
              paths (limit + 1, N, 2) int64, where each was; it stays at its goal
    """
    envs = MazeVecEnv(len(goals), maze, max_steps=limit + 1, engine="numpy")
    obs, info = envs.reset()
    ids = torch.arange(len(goals))
    counts = VISITS * torch.from_numpy(envs.reachable).long().repeat(len(goals), 1, 1)
    counts[(ids, *torch.from_numpy(goals).T)] = 0  # (-1, -1) is a wall, which never counts
    lengths = np.full(len(goals), np.nan)
    paths = np.repeat(info["cell"][None], limit + 1, 0)  # (limit + 1, N, 2)
    for step in range(1, limit + 1):
        going = np.flatnonzero(np.isnan(lengths))
        if len(going) == 0:
            paths[step:] = paths[step - 1]
            break
        actions = np.zeros(len(goals), np.int64)
        actions[going] = choose(torch.from_numpy(obs[going]), counts[going])
        cells = envs.advance(actions)[3]
        obs = envs.observe()
        paths[step] = paths[step - 1]
        paths[step, going] = cells[going]
        ppo_sofe.visit(counts, ids[going], torch.from_numpy(cells[going]))
        lengths[going[(cells[going] == goals[going]).all(1)]] = step
    envs.close()
    return lengths, paths


def visited_share(paths, shape) -> np.ndarray:
    """Share of walks that came by each cell, (H, W) float64."""
    seen = np.zeros((paths.shape[1], *shape), bool)
    seen[np.arange(paths.shape[1]), paths[..., 0], paths[..., 1]] = True
    return seen.mean(0)


def mean_length(lengths) -> float | None:
    """Mean of the successful walks, None where there is none."""
    return None if np.isnan(lengths).all() else np.nanmean(lengths)


def measure(agent, args, goals, samples: int, free: int, shape):
    """Greedy and sampled walks to all goals, and walks without a goal.

    goals     (N, 2) int64
    samples   int    sampled walks to each goal
    free      int    sampled walks without a goal
    returns   greedy (N,), sampled (samples, N): lengths as from `walk`; paths (limit + 1, N, 2) of
              the first sampled walk to each goal; share (H, W) of the walks without a goal
    """
    generator = torch.Generator().manual_seed(args.seed + 20_000)
    greedy, _ = walk(act(agent, args), goals, args.max_steps)
    sampled, paths = walk(act(agent, args, generator), np.tile(goals, (samples, 1)), args.max_steps)
    _, without = walk(act(agent, args, generator), np.full((free, 2), -1), args.max_steps)
    share = visited_share(without, shape)
    return greedy, sampled.reshape(samples, -1), paths[:, : len(goals)], share


def draw(path, walls, goals, shortest, lengths, paths, maps, caption: str) -> None:
    """Walks to four goals, and maps of success.

    lengths   (N,)              of the walks, nan where the goal was not reached
    paths     (limit + 1, N, 2)
    maps      title -> (H, W) float64, nan for cells that are no goals
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.4 * (4 + len(maps)), 3.4), layout="constrained")
    axes = figure.subplots(1, 4 + len(maps))
    for ax in axes:
        ax.imshow(np.where(walls, 0.2, 1.0), cmap="gray", vmin=0, vmax=1)
        ax.set(xticks=[], yticks=[])
    order = np.argsort(shortest, kind="stable")
    for ax, quarter in zip(axes, range(1, 5), strict=False):
        k = order[len(order) * quarter // 4 - 1]
        ax.plot(paths[:, k, 1], paths[:, k, 0], color="tab:green", linewidth=1.5)
        for (row, column), color in ((paths[0, k], "gold"), (goals[k], "tab:red")):
            ax.plot(column, row, "s", color=color, markersize=5)
        moves = "not reached" if np.isnan(lengths[k]) else f"{lengths[k]:.0f} moves"
        ax.set_title(f"{moves}, shortest {shortest[k]}", fontsize=9)
    for ax, (title, values) in zip(axes[4:], maps.items(), strict=True):
        image = ax.imshow(np.ma.masked_invalid(values), cmap="viridis", vmin=0, vmax=1)
        ax.set_title(title, fontsize=9)
    figure.colorbar(image, ax=axes[-1], label="share of walks")
    figure.supxlabel(caption, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main():
    args = parse_size(__doc__)
    torch.set_num_threads(1)
    _, steps, seeds, limit = SIZES[args.size]
    seeds = args.seeds or seeds
    prefix = "" if args.size == "small" else f"{args.size}-"
    which = ("ppo", "1", "episodic")
    runs = names(*which, ("sqrt",), seeds, args.size)
    runs = {key: of_seeds for key, of_seeds in runs.items() if key[1] == "sofe"}
    lines_of = jobs(*which, args.size, runs)
    launch(lines_of, args.jobs)

    envs = MazeVecEnv(1, MAZE, engine="numpy")
    walls, start = envs.walls, tuple(envs.engine.cells[0])
    distances, _ = shortest_paths(walls, start)
    goals = np.argwhere(distances > 0)
    shortest = distances[tuple(goals.T)]
    rows, successes, shares = [], [], []
    for seed, name in enumerate(runs["sqrt", "sofe"], 1):
        agent, run_args = load_agent(RUNS / name)
        result = measure(agent, run_args, goals, *SAMPLES[args.size], walls.shape)
        greedy, sampled, paths, share = result
        if seed == 1:
            shown = sampled[0], paths
        success, without = (~np.isnan(sampled)).mean(0), share[tuple(goals.T)]
        successes.append(success)
        shares.append(without)
        for k, (row, column) in enumerate(goals.tolist()):
            to_goal = [int(not np.isnan(greedy[k])), mean_length(greedy[k])]
            to_goal += [f"{success[k]:.4g}", mean_length(sampled[:, k])]
            rows.append([seed, row, column, shortest[k], *to_goal, f"{without[k]:.4f}"])
        lengths = np.concatenate([greedy[None], sampled])
        for policy, some in (("greedy", lengths[:1]), ("sampled", lengths[1:])):
            reached = ~np.isnan(some)
            ratio = (some / shortest)[reached].mean() if reached.any() else np.nan
            text = f"reached {reached.mean():.3f}, length / shortest {ratio:.2f}"
            print(f"seed {seed}, {policy:7s} {text}")
        print(f"seed {seed}, no goal came by {without.mean():.3f}")

    committed = args.size != "smoke" and not args.seeds
    results, figures = (RESULTS, FIGURES) if committed else (RUNS, RUNS)
    header = ["seed", "row", "column", "shortest", "greedy_success", "greedy_length"]
    header += ["sampled_success", "sampled_length", "without_goal"]
    path = write_csv(f"{prefix}goal_reaching", header, rows, results)
    write_records(path.stem, lines_of, results)
    maps = {}
    titles = ("goal shown: reached", "no goal shown: came by")
    for title, of_seeds in zip(titles, (successes, shares), strict=True):
        maps[title] = np.full(walls.shape, np.nan)
        maps[title][tuple(goals.T)] = np.mean(of_seeds, 0)
    network = "paper's network" if args.size == "paper" else "16 channels, 128 features"
    caption = (
        f"PPO with SOFE, {MAZE}, sqrt bonus, episodic counts, {network}, {steps:,} steps, "
        f"shown a table in which each cell but one was visited once. Sampled walks of at most "
        f"{limit} steps.\nGreen: a walk of seed 1, of whose walks {successes[0].mean():.2f} "
        f"reach their goal; yellow: its start; red: the goal, the unvisited cell. Maps: mean of "
        f"{seeds} seeds. {command_of('fig_goal_reaching.py', args)}"
    )
    picture = figures / f"{prefix}goal_reaching.png"
    draw(picture, walls, goals, shortest, *shown, maps, caption)
    print(f"wrote {path} and {picture}")


if __name__ == "__main__":
    main()
