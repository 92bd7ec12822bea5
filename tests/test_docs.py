"""The README's code runs, its files exist, and the scripts keep to the style guide's limits."""

import inspect
import re
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import get_args

import pytest

import ppo_sofe

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SCRIPTS = sorted(ROOT.glob("*_sofe*.py"))
DOCUMENTS = sorted((ROOT / "docs").glob("*.md"))


BLOCKS = re.findall(r"```python\n(.*?)```", README, re.S)
RESUMED = """
for name, total in (("whole", 384), ("parts", 192)):
    sizes = dict(num_envs=2, num_steps=24, minibatch_size=48, channels=8, embedding_dim=8)
    places = dict(runs_dir=".", run_name=name, eval_episodes=0)
    ppo_sofe.main(ppo_sofe.Args(augment=True, total_timesteps=total, **sizes, **places))
ppo_sofe.main(ppo_sofe.Args(resume="parts", total_timesteps=384))
"""


def run_code(code, folder):
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout


@pytest.mark.parametrize("block", BLOCKS)
def test_the_code_of_the_readme_runs(block, tmp_path):
    run_code(block, tmp_path)


def test_a_run_in_the_environment_of_the_readme_is_resumed_in_mid_episode(tmp_path):
    (block,) = [block for block in BLOCKS if "class Corridor" in block]
    run_code(block.partition("ppo_sofe.main(")[0] + RESUMED, tmp_path)
    whole, parts = (
        {name: (tmp_path / run / name).read_text() for name in ("episodes.csv", "updates.csv")}
        for run in ("whole", "parts")
    )
    assert whole == parts
    ends = [line.split(",")[0] for line in whole["episodes.csv"].splitlines()]
    assert len(ends) > 15 and ends.count("192") < 2


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_the_commands_of_the_documents_parse(script):
    """Each command line of a script that is written somewhere is one that it accepts."""
    texts = [README, (ROOT / "Makefile").read_text(), script.read_text()]
    text = "\n".join(texts + [path.read_text() for path in DOCUMENTS])
    words = r"((?: +(?:\\\n\s*)?(?:--?[a-z][\w-]*|[$\w./-]+))+)"
    lines = re.findall(script.name.replace(".", r"\.") + words, text)
    commands = [shlex.split(line.replace("\\\n", " ")) for line in lines if "--" in line]
    assert len(commands) >= 4
    module = import_module(script.stem)
    for command in commands:
        if "--help" in command or "$s" in command:
            continue
        module.tyro.cli(module.Args, args=command)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_flag_means_the_same_in_every_script(script):
    """Fields that two scripts have are of the same type, and most are described in the same words.

    The rest are those whose unit or reason differs with the algorithm.
    """
    theirs = {"seed", "total_timesteps", "checkpoint_every", "eval_episodes", "learning_rate"}
    theirs |= {"num_steps", "gae_lambda", "norm_adv", "minibatch_size"}
    if script.stem == "sac_sofe_godot":  # no mazes, no DeepSea, no S-Max
        theirs |= {"max_steps", "counts", "bonus", "embedding_dim"}
    if script.stem == "impala_e3b_sofe":  # games of another kind, and bonuses
        theirs |= {"embedding_dim", "max_grad_norm", "env_id", "bonus", "augment", "beta"}
    own, first = import_module(script.stem).Args, ppo_sofe.Args
    helps = [
        dict(
            re.findall(r'^    (\w+): [^\n]*\n    """(.*?)"""', inspect.getsource(args), re.M | re.S)
        )
        for args in (own, first)
    ]
    common = own.__dataclass_fields__.keys() & first.__dataclass_fields__.keys()
    assert len(common) > (20 if script.stem in ("sac_sofe_godot", "impala_e3b_sofe") else 25)
    for name in common:
        types = [
            fields[name].type for fields in (own.__dataclass_fields__, first.__dataclass_fields__)
        ]
        fewer = set(get_args(types[0])) < set(get_args(types[1]))
        other = script.stem == "impala_e3b_sofe" and name in ("env_id", "bonus", "augment")
        assert types[0] == types[1] or fewer or other, name
        assert name in theirs or helps[0][name] == helps[1][name], name


PAPER = {  # [SOFE tab:ppo_hyperparameters and its neighbours; app:train_details]
    "ppo_sofe": {
        "learning_rate": 0.0003, "num_steps": 2048, "minibatch_size": 64, "update_epochs": 10,
        "gae_lambda": 0.95, "clip_coef": 0.2, "norm_adv": True, "ent_coef": 0.0, "vf_coef": 0.5,
        "max_grad_norm": 0.5,
    },
    "a2c_sofe": {
        "learning_rate": 0.0007, "num_steps": 5, "gae_lambda": 1.0, "norm_adv": False,
        "ent_coef": 0.0, "vf_coef": 0.5, "max_grad_norm": 0.5, "rms_prop_eps": 1e-5,
    },
    "dqn_sofe": {
        "learning_rate": 0.0001, "buffer_size": 1_000_000, "learning_starts": 50_000,
        "minibatch_size": 32, "tau": 1.0, "train_frequency": 4, "gradient_steps": 4,
        "target_interval": 10_000, "exploration_fraction": 0.1, "epsilon_start": 1.0,
        "epsilon_end": 0.05, "max_grad_norm": 10.0, "double_q": False, "n_step": 1,
    },
}  # fmt: skip


@pytest.mark.parametrize("script", PAPER)
def test_the_defaults_are_the_papers_table(script):
    fields = import_module(script).Args.__dataclass_fields__
    table = PAPER[script] | {"num_envs": 16, "gamma": 0.99, "channels": 64, "embedding_dim": 512}
    assert {name: fields[name].default for name in table} == table


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_every_script_has_its_page(script):
    assert (ROOT / "docs" / f"{script.stem}.md").exists()
    assert f"(docs/{script.stem}.md)" in README


def anchors(page: Path) -> set[str]:
    """What the headings of a page are called in links to it."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", ["README.md", *(f"docs/{path.name}" for path in DOCUMENTS)])
def test_links_and_pictures_exist(document):
    path = ROOT / document
    for target in re.findall(r"\]\((?!http)([^)]+)\)", path.read_text()):
        file, _, anchor = target.partition("#")
        page = path.parent / file if file else path
        assert page.exists(), target
        assert not anchor or anchor in anchors(page), target


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_read_in_one_sitting(script):
    """450 lines; 500 with a replay buffer, a memory, or an actor beside the learner."""
    longer = ("dqn_sofe.py", "ppo_lstm_sofe.py", "sac_sofe_godot.py", "impala_e3b_sofe.py")
    assert len(script.read_text().splitlines()) <= (500 if script.name in longer else 450)


def test_shared_regions_are_the_same_in_all_scripts():
    """Copies between scripts, `# region shared:NAME` to `# endregion`, are alike to the byte."""
    copies = {}
    for script in SCRIPTS:
        text = script.read_text()
        regions = re.findall(r"^# region shared:(\w+)\n(.*?)^# endregion\n", text, re.S | re.M)
        assert text.count("# region") == text.count("# endregion") == len(regions), script.name
        assert len({name for name, _ in regions}) == len(regions), script.name
        for name, body in regions:
            copies.setdefault(name, {})[script.stem] = body
    on_policy = {"ppo_sofe", "a2c_sofe", "ppo_lstm_sofe"}
    assert {name: set(bodies) for name, bodies in copies.items()} == {
        "env_and_bonus": on_policy | {"dqn_sofe"},
        "gae_and_towers": on_policy,
        "agent_and_evaluate": {"ppo_sofe", "a2c_sofe"},
    }
    for name, bodies in copies.items():
        assert len(set(bodies.values())) == 1, name


def test_common_is_thin():
    """Files of common/ import nothing of the project, and each has a test file."""
    for path in (ROOT / "common").glob("[a-z]*.py"):
        assert not re.search(r"^(from|import) (common|\w+_sofe)", path.read_text(), re.M), path.name
        assert (ROOT / "tests" / f"test_{path.name}").exists()
