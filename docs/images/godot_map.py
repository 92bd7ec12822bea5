"""Draw the Godot map for the documents: from above, and as the engine renders it.

    python docs/images/godot_map.py

Writes godot_map.png, and godot_map_3d.png where the programs godot3 and Xvfb are installed
(apt-get install godot3 xvfb).
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image, ImageOps

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent.parent))

from common.godot import PROJECT, draw_map, load_map  # noqa: E402


def draw_from_above(path: Path) -> None:
    figure = Figure(figsize=(6, 5.4))
    axes = figure.subplots()
    draw_map(axes, load_map())
    ticks = range(-60, 61, 20)
    axes.set(xticks=ticks, yticks=ticks)
    axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1), fontsize=8)
    figure.savefig(path, dpi=110, bbox_inches="tight")


def render(path: Path) -> None:
    """Run the engine with a display of its own, in memory."""
    ours, theirs = os.pipe()
    screen = ["-screen", "0", "1280x800x24", "-displayfd", str(theirs)]
    display = subprocess.Popen(["Xvfb", *screen], pass_fds=[theirs], stderr=subprocess.DEVNULL)
    os.close(theirs)
    try:
        with os.fdopen(ours) as answer:
            number = answer.readline().strip()
        command = ["godot3", "--audio-driver", "Dummy", "--path", str(PROJECT), f"--picture={path}"]
        environment = os.environ | {"DISPLAY": f":{number}", "LANG": "en_US.UTF-8"}
        subprocess.run(command, env=environment, check=True, timeout=60)
    finally:
        display.terminate()
        display.wait()
    with Image.open(path) as image:
        picture = image.convert("RGB")
    box = ImageOps.invert(picture).getbbox()  # all that is not white
    picture.crop(box).save(path, optimize=True)


if __name__ == "__main__":
    draw_from_above(FOLDER / "godot_map.png")
    if shutil.which("godot3") and shutil.which("Xvfb"):
        render(FOLDER / "godot_map_3d.png")
    else:
        print("godot3 and Xvfb are needed for godot_map_3d.png")
