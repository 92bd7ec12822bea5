"""The numbers of the result tables in README.md and docs/ are those of paper/results/*.csv."""

import csv
import re
import sys
from itertools import takewhile
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "paper"))

import table_deepsea  # noqa: E402
from experiments import last_tenth  # noqa: E402
from fig_coverage import random_walks_coverage  # noqa: E402

from common.mazes import random_walk_coverage  # noqa: E402

README = (ROOT / "README.md").read_text().splitlines()
PAGE = (ROOT / "docs" / "results.md").read_text().splitlines()
ARMS = {"SOFE": "sofe", "with SOFE": "sofe", "without": "plain"}
ARMS_IN_ORDER = ("sofe", "plain")
NAMES = {"PPO with LSTM": "ppo_lstm"}
PAPERS = ("SOFE", "without", "SOFE, the paper", "DeRL, the paper")


def table(header: str, lines: list[str] = PAGE) -> list[list[str]]:
    """The cells of the rows below a header that begins so, in docs/results.md or elsewhere."""
    start = next(k for k, line in enumerate(lines) if line.startswith(header))
    lines = list(takewhile(lambda line: line.startswith("|"), lines[start + 2 :]))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def results(name: str) -> list[dict[str, str]]:
    with open(ROOT / "paper" / "results" / f"{name}.csv") as file:
        return list(csv.DictReader(file))


def curves(name: str, column: str = "coverage", **chosen: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps (bins,) and the curves (seeds, bins) of one arm."""
    rows = [row for row in results(name) if all(row[key] == chosen[key] for key in chosen)]
    steps = sorted({int(row["step"]) for row in rows})
    values = np.array([float(row[column]) for row in rows]).reshape(-1, len(steps))
    return np.array(steps), values


def evaluations(name: str, column: str, arm: str, **chosen: str) -> list[float]:
    """What the trained agents of one arm reached, one number of each seed."""
    chosen = chosen | {"arm": arm}
    rows = [
        row for row in results(f"{name}_eval") if all(row[key] == chosen[key] for key in chosen)
    ]
    return [float(row[column]) for row in rows]


def numbers(text: str) -> list[float]:
    return [float(word) for word in text.split(", ")]


def agree(text: str, values) -> None:
    """What is written is the value rounded to its digits; the CSV files are rounded themselves."""
    assert numbers(text) == pytest.approx(np.atleast_1d(values), abs=0.00501)


@pytest.mark.parametrize("row", table("| bonus | arm | at 200k"), ids=lambda r: "-".join(r[:2]))
def test_coverage_of_ppo(row):
    steps, coverage = curves("coverage_ppo_maze1", bonus=row[0], arm=ARMS[row[1]])
    for text, step in zip(row[2:5], (200_000, 300_000, 500_000), strict=True):
        agree(text, coverage[:, steps == step].mean(0))
    agree(row[5], coverage.mean(1))


@pytest.mark.parametrize("row", table("| algorithm | arm | at 200k"), ids=lambda r: "-".join(r[:2]))
def test_coverage_of_the_other_algorithms(row):
    name = f"coverage_{NAMES.get(row[0], row[0].lower())}_maze1"
    steps, coverage = curves(name, bonus="sqrt", arm=ARMS[row[1]])
    for text, step in zip(row[2:5], (200_000, 300_000, 500_000), strict=True):
        agree(text, coverage[:, steps == step].mean(0))
    agree(row[5], coverage[:, -1])
    agree(row[6], evaluations(name, "sampled_coverage", ARMS[row[1]]))
    agree(row[7], coverage.mean(1))


@pytest.mark.parametrize("bonus", ["sqrt", "salesman"])
def test_each_seed_of_ppo_with_sofe_is_ahead_of_each_without(bonus):
    sofe, plain = (curves("coverage_ppo_maze1", bonus=bonus, arm=arm)[1] for arm in ARMS_IN_ORDER)
    assert sofe.mean(1).min() > plain.mean(1).max() and sofe[:, -1].min() > plain[:, -1].max()
    trained = [
        evaluations("coverage_ppo_maze1", "sampled_coverage", arm, bonus=bonus)
        for arm in ARMS_IN_ORDER
    ]
    assert min(trained[0]) > max(trained[1])


@pytest.mark.parametrize("algorithm", ["dqn", "ppo_lstm"])
def test_each_seed_of_dqn_and_ppo_with_lstm_with_sofe_is_ahead_of_each_without(algorithm):
    name = f"coverage_{algorithm}_maze1"
    sofe, plain = (curves(name, arm=arm)[1] for arm in ARMS_IN_ORDER)
    assert sofe.mean(1).min() > plain.mean(1).max()
    if algorithm == "ppo_lstm":
        assert sofe[:, -1].min() > plain[:, -1].max()
    sofe, plain = (evaluations(name, "sampled_coverage", arm) for arm in ARMS_IN_ORDER)
    assert min(sofe) > max(plain)


@pytest.mark.parametrize(("arm", "count"), [("sofe", 282), ("plain", 153)])
def test_cells_of_the_last_heatmap(arm, count):
    rows = results("heatmaps_a2c")
    last = [row for row in rows if row["arm"] == arm and row["step"] == "500000"]
    assert len(last) == count and f"{count}" in "\n".join(PAGE)


def test_goal_reaching():
    rows = results("goal_reaching")
    columns = ("sampled_success", "without_goal", "greedy_success")
    for row, column in zip(table("| share of goals reached"), columns, strict=True):
        seeds = [
            np.mean([float(r[column]) for r in rows if r["seed"] == seed])
            for seed in ("1", "2", "3")
        ]
        agree(row[1], seeds)


@pytest.mark.parametrize("row", table("| bonus | SOFE | without |"), ids=lambda r: r[0])
def test_coverage_of_the_3d_map(row):
    for text, arm in zip(row[1:], ("sofe", "plain"), strict=True):
        agree(text, curves("coverage_sac_godot", bonus=row[0], arm=arm)[1][:, -1])


def deepsea(algorithm: str, arm: str, size: str) -> list[dict[str, str]]:
    rows = results(f"table_deepsea_{algorithm}")
    return [row for row in rows if row["arm"] == arm and row["size"] == size]


def test_seeds_that_solve_deepsea():
    """The table has all rows of the CSV files: the counts, and the episodes of each seed."""
    algorithm, rows = "", set()
    for row in table("| algorithm | size | SOFE"):
        algorithm = row[0].split(",")[0] or algorithm
        name = NAMES.get(algorithm, algorithm.lower())
        rows.add((name, row[1]))
        for arm, count, episodes in (("sofe", row[2], row[4]), ("plain", row[3], row[5])):
            seeds = deepsea(name, arm, row[1])
            solved = sum(float(seed["greedy_return"]) >= 0.95 for seed in seeds)
            assert count == f"{solved} of {len(seeds)}", row
            reached = [seed["episodes_to_0.95"] for seed in seeds]
            words = [f"{int(text):,}" if text else "never" for text in reached]
            assert episodes == ", ".join(words), row
    for name in ("ppo", "a2c", "dqn", "ppo_lstm"):
        sizes = {row["size"] for row in results(f"table_deepsea_{name}")}
        assert {size for algorithm, size in rows if algorithm == name} == sizes


def test_returns_in_deepsea():
    """README's table: mean and deviation over the seeds, and the paper's numbers."""
    algorithm, rows = "", []
    for label, arm, *cells in table("| algorithm | agent | 10", README):
        algorithm = NAMES.get(label, label.lower()) or algorithm
        rows.append((algorithm, arm))
        if "the paper" in arm:
            printed = table_deepsea.PRINTED[algorithm][arm.split(",")[0]]
            assert cells == [*printed.split(", "), "", ""]
            continue
        for cell, size in zip(cells, map(str, table_deepsea.ALL_SIZES), strict=True):
            seeds = [float(row["greedy_return"]) for row in deepsea(algorithm, ARMS[arm], size)]
            solved = f"{sum(value >= 0.95 for value in seeds)} of {len(seeds)}"
            assert cell == (f"{table_deepsea.summary(seeds)}, {solved}" if seeds else "not run")
    printed = [(name, arm) for name in ("ppo", "a2c", "dqn") for arm in PAPERS]
    assert len(rows) == len(set(rows))
    assert set(rows) == {*printed, ("ppo_lstm", "SOFE"), ("ppo_lstm", "without")}


def test_success_of_e3b():
    training, *evaluated = table("| | no bonus | E3B | E3B, diagonal")
    for place, arm in enumerate(("none", "e3b", "diagonal", "full"), 1):
        steps, success = curves("e3b_multiroom", "success", arm=arm)
        agree(training[place], success[:, steps > 0.9 * steps[-1]].mean(1))
        for row, policy in zip(evaluated, ("sampled", "greedy"), strict=True):
            agree(row[place], evaluations("e3b_multiroom", f"{policy}_success", arm))


def test_success_in_procgen():
    rows = results("e3b_procgen_eval")
    assert f"{np.mean([float(row['sampled_success']) for row in rows]):.2f}" == "0.32"
    greedy = [float(row["greedy_success"]) for row in rows]
    words = f"({min(greedy):.2f} to {max(greedy):.2f})"
    assert f"with greedy ones below it {words}" in " ".join(PAGE)


@pytest.mark.parametrize("row", table("| S-Max | arm | at 200k"), ids=lambda row: "-".join(row[:2]))
def test_coverage_with_smax(row):
    algorithm, arm = row[0].lower(), ARMS[row[1]]
    steps, coverage = curves(f"smax_{algorithm}", algorithm=algorithm, arm=arm)
    for text, step in zip(row[2:5], (200_000, 300_000, 500_000), strict=True):
        agree(text, coverage[:, steps == step].mean(0))
    agree(row[5], coverage[:, -1])
    agree(row[6], evaluations(f"smax_{algorithm}", "sampled_coverage", arm))
    agree(row[7], coverage.mean(1))


def test_encodings_of_the_counts():
    page = (ROOT / "docs" / "ppo_sofe.md").read_text().splitlines()
    encodings = ("isqrt", "log", "max", "raw")
    for row, encoding in zip(table("| encoding |", page), encodings, strict=True):
        maze, deepsea = (
            [line for line in results(f"ablation_encoding_{task}") if line["encoding"] == encoding]
            for task in ("maze1", "deepsea14")
        )
        coverage = [float(line["coverage"]) for line in maze]
        agree(row[3].replace(" ± ", ", "), [np.mean(coverage), np.std(coverage)])
        agree(row[4], np.mean([float(line["greedy_return"]) for line in deepsea]))
        reached = [line["episodes_to_0.95"] for line in deepsea]
        assert row[5] == ", ".join(f"{int(text):,}" if text else "never" for text in reached)


@pytest.mark.parametrize("row", table("| arm | in the first half"), ids=lambda row: row[0])
def test_success_with_a_goal(row):
    arm = {"counts with SOFE": "sofe", "counts": "plain", "no bonus": "none"}[row[0]]
    steps, success = curves("sparse_ppo", "return", counts="episodic", arm=arm)
    episodes = curves("sparse_ppo", "rows", counts="episodic", arm=arm)[1]
    parts = (steps <= 500_000, steps > 500_000, steps > 950_000)
    agree(row[4], evaluations("sparse_ppo", "sampled_return", arm))
    for text, part in zip(row[1:4], parts, strict=True):
        goals = np.nansum((success * episodes)[:, part], axis=1)
        agree(text, goals / episodes[:, part].sum(1))
        if part is parts[0]:
            assert round(goals.sum()) == {"sofe": 145, "plain": 6, "none": 1}[arm]


def test_goals_that_a_seed_came_to():
    def goals(arm: str, seed: int, late: bool) -> int:
        steps, success = curves("sparse_ppo", "return", arm=arm)
        episodes = curves("sparse_ppo", "rows", arm=arm)[1]
        return round(np.nansum((success * episodes)[seed - 1, (steps > 500_000) | (not late)]))

    assert goals("plain", 2, late=True) == 47 and goals("sofe", 2, late=False) == 2


def test_goals_that_a2c_came_to():
    text, best = " ".join(PAGE), 0.0
    for arm, words in (
        ("sofe", "with SOFE they come to the goal in {}, {} and {} of a thousand episodes"),
        ("plain", "without in {}, {} and {}, without a bonus"),
        ("none", "without a bonus in {}, {} and {} "),
    ):
        _, success = curves("sparse_a2c", "return", counts="episodic", arm=arm)
        episodes = curves("sparse_a2c", "rows", counts="episodic", arm=arm)[1]
        goals = np.nansum(success * episodes, axis=1).round().astype(int)
        assert words.format(*goals) in text and np.allclose(episodes.sum(1), 1000, atol=11)
        assert set(evaluations("sparse_a2c", "sampled_return", arm)) == {0}
        best = max(best, np.nanmax(success))
    assert best == pytest.approx(0.38, abs=0.005)


@pytest.mark.parametrize("name", ["a2c_maze1_global", "ppo_maze1_global_sqrt"])
def test_coverage_of_runs_with_global_counts(name):
    for column, suffix in (("global_coverage", ""), ("sampled_coverage", "_eval")):
        words = []
        for arm in ARMS_IN_ORDER:
            if suffix:
                ends = evaluations(f"coverage_{name}", column, arm)
            else:
                ends = curves(f"coverage_{name}", column, arm=arm)[1][:, -1]
            words.append(", ".join(f"{end:.2f}" for end in ends))
        place = " of the maze in an episode" if suffix and "a2c" in name else ""
        assert f"{words[0]}{place} with SOFE and {words[1]} without" in " ".join(PAGE)


SCORES = table("| task | what is counted", README)
E3B = {"MultiRoom-N4": "e3b_multiroom", "Procgen-Maze": "e3b_procgen"}


def study(task: str, algorithm: str) -> tuple[str, str, str]:
    """CSV file, panel and column of a row of the README's first table of results."""
    task, _, bonus = task.partition(", ")
    if task == "3D map":
        return "coverage_sac_godot", bonus, "coverage"
    if bonus == "S-Max":
        return f"smax_{algorithm.lower()}", algorithm.lower(), "coverage"
    if task.endswith("with a goal"):
        return f"sparse_{algorithm.lower()}", "episodic", "return"
    name = f"coverage_{NAMES.get(algorithm, algorithm.lower())}_maze{task[-1]}"
    column = "coverage"
    if bonus.endswith(", global counts"):
        name, bonus, column = f"{name}_global", bonus.split(",")[0], "global_coverage"
    if not (ROOT / "paper" / "results" / f"{name}.csv").exists():
        name += "_sqrt"  # of the two bonuses of PPO, one was run
    return name, bonus, column


def measures(task: str, algorithm: str) -> dict[str, list[np.ndarray]]:
    """Measure -> one number of each seed, with SOFE and without."""
    if task in E3B:
        name = E3B[task]
        arms = ("diagonal" if "diagonal" in algorithm else "full", "e3b")
        both = [curves(name, "success", arm=arm) for arm in arms]
        evaluated = [evaluations(name, "sampled_success", arm) for arm in arms]
    else:
        name, panel, column = study(task, algorithm)
        first = next(iter(results(name)[0]))  # the column of the panels
        both = [curves(name, column, **{first: panel}, arm=arm) for arm in ARMS_IN_ORDER]
        evaluated = [
            evaluations(name, f"sampled_{column.removeprefix('global_')}", arm, **{first: panel})
            for arm in ARMS_IN_ORDER
            if (ROOT / "paper" / "results" / f"{name}_eval.csv").exists()
        ]
    found = {"at the end": [last_tenth(*curve) for curve in both]}
    found |= {"over training": [np.nanmean(values, 1) for _, values in both]}
    return found | ({"evaluated": evaluated} if evaluated else {})


def with_tasks(rows: list[list[str]]) -> list[list[str]]:
    """The rows, with the task of the one above where a row names none."""
    task = ""
    return [[(task := row[0] or task), *row[1:]] for row in rows]


@pytest.mark.parametrize("row", with_tasks(SCORES), ids=lambda row: f"{row[0]}-{row[2]}")
def test_where_sofe_is_ahead(row):
    """What the README's first table says of SOFE follows from the files, as do its numbers."""
    task, _, algorithm, sofe, plain, _, verdict = row
    found = measures(task, algorithm)
    agree(sofe, found["at the end"][0])
    agree(plain, found["at the end"][1])
    ahead = [name for name, (own, other) in found.items() if min(own) > max(other)]
    behind = [name for name, (own, other) in found.items() if max(own) < min(other)]
    words = [f"ahead {', '.join(ahead)}"] * bool(ahead)
    words += [f"behind {', '.join(behind)}"] * bool(behind)
    assert verdict == ("; ".join(words) or "not separated")


def test_what_the_readme_begins_with():
    """Where SOFE is ahead or behind by all measures, which its first page names."""
    found = {"ahead": set(), "behind": set()}
    for task, _, algorithm, *_, verdict in with_tasks(SCORES):
        word, _, names = verdict.partition(" ")
        if names == "at the end, over training, evaluated":
            found[word].add((task, algorithm))
    maze = {("Maze 1, sqrt", "PPO"), ("Maze 1, salesman", "PPO"), ("Maze 1, sqrt", "PPO with LSTM")}
    e3b = ("MultiRoom-N4", "IMPALA, E3B, ellipsoid shown")
    assert found["ahead"] == maze | {("Maze 2, S-Max", "PPO")}
    assert found["behind"] == {("Maze 3, salesman", "PPO"), e3b}
    text = " ".join(line.strip() for line in README)
    for words in (
        "ahead by all of our measures with PPO in Maze 1, with and without an LSTM, and with PPO "
        "and S-Max in Maze 2.",
        "behind by all of them with PPO and salesman in Maze 3, and with E3B's whole ellipsoid in "
        "MiniHack.",
    ):
        assert words in text


def test_agents_that_cover_less_than_a_random_walk():
    """Evaluated with sampled actions, in the mazes: what the README counts is all there is."""
    less = {}
    for path in (ROOT / "paper" / "results").glob("coverage_*maze*_eval.csv"):
        if "_global" in path.stem:  # there an episode is paid for what the run has not seen
            continue
        algorithm, maze = path.stem.removeprefix("coverage_").split("_maze")
        walk = random_walk_coverage(f"Maze{maze[0]}-v0", 1000)[-1]
        for row in results(path.stem):
            key = (row["arm"], algorithm, maze[0])
            less[key] = less.get(key, 0) + (float(row["sampled_coverage"]) < walk)
    less = {key: count for key, count in less.items() if count}
    sofe = {("sofe", "dqn", "1"): 3, ("sofe", "a2c", "2"): 2}
    of_a2c = {("plain", "a2c", "1"): 1, ("plain", "a2c", "2"): 3, ("plain", "a2c", "3"): 2}
    assert less == sofe | of_a2c | {("plain", "dqn", "1"): 3}
    text = (
        "with SOFE three of DQN, and two of A2C in Maze 2; without SOFE three of DQN, and of A2C "
    )
    assert text + "one in Maze 1, three in Maze 2, two in Maze 3." in " ".join(
        line.strip() for line in README
    )


def test_coverage_at_equal_processor_time():
    """What SOFE has when the arm without, which takes less time a step, is at its end."""
    speeds, script = {}, ""
    for row in table(
        "| environment steps/s", (ROOT / "docs" / "speed.md").read_text().splitlines()
    ):
        script = row[0].split("`")[1] if "`" in row[0] else script
        small = row[0] == "CPU setting" or (row[0] == "" and script in speeds)
        if small:
            speeds.setdefault(script, []).append(float(row[2]))
    text = " ".join(line.strip() for line in README)
    for name, panel, words in (
        ("coverage_ppo_maze1", "sqrt", "{} against {} with sqrt"),
        ("coverage_ppo_maze1", "salesman", "{} against {} with salesman"),
        ("coverage_ppo_lstm_maze1", "sqrt", "PPO with LSTM ({} against {})"),
        ("coverage_a2c_maze1", "sqrt", "A2C ({} against {})"),
    ):
        algorithm = re.search("ppo_lstm|ppo|a2c", name)[0]
        without, with_sofe = speeds[f"{algorithm}_sofe.py"]
        first = next(iter(results(name)[0]))
        (steps, sofe), plain = (curves(name, **{first: panel}, arm=arm) for arm in ARMS_IN_ORDER)
        part = sofe[:, steps <= steps[-1] * with_sofe / without][:, -2:]
        both = part.mean(), last_tenth(*plain).mean()
        assert words.format(*(f"{value:.2f}" for value in both)) in text


@pytest.mark.parametrize("maze", ["1", "2", "3"])
def test_random_walks_of_the_mazes(maze):
    walk = random_walk_coverage(f"Maze{maze}-v0", 1000)[-1]
    for row in with_tasks(SCORES):
        if row[0].startswith(f"Maze {maze}, "):
            everywhere = row[0].endswith("global counts")  # of the 500 episodes of a run, together
            walks = random_walks_coverage(f"Maze{maze}-v0", 500_000, 1000) if everywhere else walk
            agree(row[5], walks)


def test_the_first_table_has_all_studies():
    """Each panel of each file of curves with an arm without SOFE has one row."""
    panels = set()
    for path in (ROOT / "paper" / "results").glob("*.csv"):
        kind = path.stem.split("_")[0]
        if kind in ("coverage", "smax", "sparse") and not path.stem.endswith("_eval"):
            panels |= {(path.stem, next(iter(row.values()))) for row in results(path.stem)}
    rows = with_tasks(SCORES)
    assert {study(row[0], row[2])[:2] for row in rows if row[0] not in E3B} == panels
    e3b = [(row[0], row[2].split(", ")[-1]) for row in rows if row[0] in E3B]
    shown = [("MultiRoom-N4", "diagonal shown"), ("MultiRoom-N4", "ellipsoid shown")]
    assert e3b == [*shown, ("Procgen-Maze", "diagonal shown")]
    assert len(rows) == len(panels) + len(e3b)


@pytest.mark.parametrize(
    "row", table("| algorithm | maze | arm"), ids=lambda row: "-".join(row[:3])
)
def test_coverage_of_mazes_2_and_3(row):
    algorithm, _, bonus = row[0].partition(", ")
    name, bonus, column = study(f"Maze {row[1]}, {bonus or 'sqrt'}", algorithm)
    values = curves(name, column, bonus=bonus, arm=ARMS[row[2]])[1]
    agree(row[3], values[:, -1])
    agree(row[4], evaluations(name, "sampled_coverage", ARMS[row[2]], bonus=bonus))
    agree(row[5], values.mean(1))


def test_greedy_agents_of_maze_1():
    agents = [
        float(row["greedy_coverage"])
        for path in (ROOT / "paper" / "results").glob("coverage_*_maze1_eval.csv")
        for row in results(path.stem)
    ]
    worse = sum(coverage < 0.06 for coverage in agents)
    for text in (README, PAGE):
        assert f"{worse} of the {len(agents)} agents" in " ".join(text)
