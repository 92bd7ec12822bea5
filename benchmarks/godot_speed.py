"""Agent steps per second of the Godot map, and how the time divides between engine and Python.

    python benchmarks/godot_speed.py

Random actions, 1 to 16 avatars in one engine, an action held for 1 to 8 ticks; one decision of one
avatar is a step. All settings take turns, several rounds; the figures are medians over the rounds.
Engine and Python wait for each other, so the steps per second are per second of the processor time
of both together, which other programs on the machine do not change. Writes
benchmarks/godot_speed.csv.
"""

import csv
import sys
import time
from pathlib import Path
from statistics import median

import numpy as np
import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from common.godot import GodotVecEnv  # noqa: E402

ROUNDS, SECONDS = 5, 1.0
AVATARS, REPEATS = (1, 4, 8, 16), (1, 4, 8)


def measure(envs, engine, actions):
    """Microseconds of processor time per step, in the engine and in Python, over about SECONDS."""
    before, start = engine.cpu_times(), time.process_time()
    done, stop = 0, time.monotonic() + SECONDS
    while time.monotonic() < stop:
        for row in actions[:20]:
            envs.step(row)
        done += 20 * envs.num_envs
    after = engine.cpu_times()
    theirs = after.user + after.system - before.user - before.system
    return 1e6 * theirs / done, 1e6 * (time.process_time() - start) / done


def main():
    contenders, times = {}, {}
    random = np.random.default_rng(0)
    for num_envs in AVATARS:
        for repeat in REPEATS:
            envs = GodotVecEnv(num_envs, action_repeat=repeat)
            envs.reset(seed=0)
            actions = random.uniform(-1, 1, (20, num_envs, 3)).astype(np.float32)
            contenders[num_envs, repeat] = (
                envs,
                psutil.Process(envs.engine.process.pid),
                actions,
            )
            times[num_envs, repeat] = []
    for _ in range(ROUNDS):
        for setting, contender in contenders.items():
            times[setting].append(measure(*contender))
    for envs, _, _ in contenders.values():
        envs.close()
    table = []
    for setting, rounds in times.items():
        engine, python = (median(column) for column in zip(*rounds, strict=True))
        speed, share = 1e6 / (engine + python), engine / (engine + python)
        table.append([*setting, round(speed), round(engine), round(python), round(share, 2)])
        print(
            "{:2d} avatars, {} ticks: {:5d} steps/s, engine {} us, Python {} us".format(*table[-1])
        )
    with open(ROOT / "benchmarks" / "godot_speed.csv", "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        header = ["num_envs", "action_repeat", "steps_per_cpu_second", "engine_us_per_step"]
        writer.writerow([*header, "python_us_per_step", "engine_share"])
        writer.writerows(table)


if __name__ == "__main__":
    main()
