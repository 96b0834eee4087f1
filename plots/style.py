# SPDX-License-Identifier: MIT
"""What every figure shares: the look, the command line, and the results it reads."""

import argparse
import csv
import io
import re
import sys
from pathlib import Path
from statistics import median

import matplotlib

matplotlib.use("Agg")
from PIL import Image  # noqa: E402 (matplotlib brings it along)
from matplotlib import pyplot  # noqa: E402 (the backend is chosen first)

# Okabe and Ito's palette, which the colour-blind can tell apart.
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, RED, PINK = "#0072B2", "#D55E00", "#CC79A7"
GREY, PALE, INK = "#8A8A8A", "#ECECEC", "#222222"

# The default shape of a step on a GPU, where nothing else is said.
BATCH, HEADS, SEQLEN, HEAD_DIM = 16, 16, 8192, 128

ROOT = Path(__file__).resolve().parent.parent

pyplot.rcParams.update({
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.titlesize": 15,
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same bytes on every machine
    "font.size": 12,
    "grid.color": PALE,
    "legend.frameon": False,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
})


def parser(description):
    """The command line of a figure that is drawn from no results."""
    p = argparse.ArgumentParser(description=description)
    p.add_argument("--out", type=Path, default=Path("plots"),
                   help="the directory to write the figure to (default: %(default)s)")
    return p


def results_parser(description):
    """The command line of a figure that is drawn from results."""
    p = parser(description)
    p.add_argument("--results", type=Path, default=Path("plots/results"),
                   help="the directory of the CSV files (default: %(default)s)")
    return p


def gpu_parser(description):
    """The command line of a figure that is drawn from one GPU's results."""
    p = results_parser(description)
    p.add_argument("--gpu", default="h200",
                   help="whose results to draw: the name of a CSV file (default: %(default)s)")
    return p


def read(path):
    """The rows of a CSV file, as dictionaries; ends the program if there is no such file."""
    if not path.is_file():
        sys.exit(f"{path}: no such file; --results names the directory that has it")
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def named(arguments, name):
    """A value that `make ceilings` measured on this GPU; None if it did not."""
    path = arguments.results / f"{arguments.gpu}-ceilings.csv"
    rows = read(path) if path.is_file() else []
    return next((float(r["value"]) for r in rows if r["name"] == name), None)


def skip(reason):
    """Ends a figure that cannot be drawn yet, which is no error."""
    print(f"skipped: {reason}")
    sys.exit()


def read_measured(path, target):
    """The rows of a CSV file; without one the figure is skipped: nothing was measured yet."""
    if not path.is_file():
        skip(f"no {path}; make {target} writes it")
    return read(path)


def options(row):
    """What a row's options say: {"causal": "", "kv-heads": "8"}."""
    return dict(pair.partition("=")[::2] for pair in row["options"].split())


def cache_speed(row):
    """TB/s at which K and V are read, each once."""
    return float(row["kv_bytes"]) / float(row["median_ms"]) / 1e9


def is_step(name):
    """Whether a name is a step of the ladder: no peer and no variant of a step."""
    return re.fullmatch(r"\d\d-[^:]+", name) is not None


def on_tensor_cores(step):
    """Whether a step uses them: its header names an mma instruction."""
    return any(row["step"] == step and "mma" in row["why"] for row in read(ROOT / "build/ladder.csv"))


def speed(rows, step, seqlen=SEQLEN, head_dim=HEAD_DIM, options=""):
    """The median TFLOP/s of a step (or peer) and the batch, the largest that it ran with; or None.

    An interleaved run has several rows of one shape: its repetitions.
    """
    shape = (step, str(seqlen), str(head_dim), options)
    found = [r for r in rows if (r["step"], r["seqlen"], r["head_dim"], r["options"]) == shape]
    if not found:
        return None
    batch = max(int(r["batch"]) for r in found)
    return median(float(r["tflops"]) for r in found if int(r["batch"]) == batch), batch


def matmul_speed(rows):
    """The median TFLOP/s of an fp16 matmul, whose shape is its own; None if there is none."""
    speeds = [float(r["tflops"]) for r in rows if r["step"] == "matmul-fp16"]
    return median(speeds) if speeds else None


def three_digits(value):
    """2.53, 38.1, 712, 1,010: as `s3` in the pages"""
    return f"{float(f'{value:.3g}'):,.0f}" if value >= 1000 else f"{value:#.3g}".rstrip(".")


def spread(positions, gap, highest):
    """Moves sorted positions apart, so that labels at them do not overlap.

    Each is then at least `gap` after the one before and at most `highest`; those that were too
    close stay centred on where they were.
    """
    groups = []  # of positions that touch
    for position in positions:
        groups.append([position])
        while len(groups) > 1:
            below, above = groups[-2:]
            centres = sum(above) / len(above) - sum(below) / len(below)
            if centres >= gap * (len(below) + len(above)) / 2:
                break
            groups[-2:] = [below + above]
    moved = [sum(g) / len(g) + gap * (i - (len(g) - 1) / 2) for g in groups for i in range(len(g))]
    for i in reversed(range(len(moved))):
        moved[i] = min(moved[i], highest)
        highest = moved[i] - gap
    return moved


def save(figure, out, name):
    """Writes NAME.png: the same bytes from the same data and the same matplotlib.

    In 64 colours, which no eye misses here: a third of the file.
    """
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}.png"
    full = io.BytesIO()
    figure.savefig(full, dpi=150, bbox_inches="tight", pad_inches=0.15)
    Image.open(full).convert("RGB").quantize(64, dither=Image.Dither.NONE).save(path, optimize=True)
    print(path)
