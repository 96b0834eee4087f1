"""The bank map: one warp's read of K from shared memory, before and after the swizzle.

A trace has a row for each lane of each request, from `./step-02 --trace-csv FILE`.
"""

import style
from style import pyplot

BANKS = 32  # of 4 bytes each; a wavefront serves one 4-byte word of every bank
PANELS = [("02-loop-inverted", "before", style.RED), ("03-bank-conflicts", "after", style.GREEN)]


def worst_read(rows, line):
    """The request to draw: the read that takes the most wavefronts, of `line` if there is one.

    Among equals, the one that uses the most banks: a map of a broadcast would show nothing.
    """
    requests = {}
    for row in rows:
        if row["op"] == "load" and line in (None, row["line"]):
            requests.setdefault((row["line"], row["request"]), []).append(row)
    if not requests:
        raise SystemExit(f"the trace has no load at line {line or 'any'}")

    def cost(request):
        return (len({row["wavefront"] for row in request}), len({row["bank"] for row in request}))

    return max(requests.values(), key=cost)


def names(lanes):
    """The lanes of a cell, in few letters: 7, 6 7, 0-31"""
    lanes = sorted(lanes)
    return " ".join(map(str, lanes)) if len(lanes) < 3 else f"{lanes[0]}-{lanes[-1]}"


def draw(axes, request, step, when, colour):
    """One panel: banks across, wavefronts down, in each cell the lane that is served there."""
    wavefronts = 1 + max(int(row["wavefront"]) for row in request)
    for y in range(wavefronts):  # what a wavefront could serve
        for x in range(BANKS):
            axes.add_patch(pyplot.Rectangle((x, y), 1, 1, facecolor="#F6F6F6", edgecolor="#DDDDDD",
                                            linewidth=0.4))
    cells = {}
    for row in request:
        words = max(1, int(row["bytes"]) // 4)
        cells.setdefault((int(row["wavefront"]), int(row["bank"]), words), []).append(
            int(row["lane"]))
    for (y, x, words), lanes in cells.items():
        axes.add_patch(pyplot.Rectangle((x, y), words, 1, facecolor=colour, edgecolor="white",
                                        linewidth=0.5, zorder=2))
        axes.text(x + words / 2, y + 0.53, names(lanes), ha="center", va="center", color="white",
                  fontsize=7.5, fontweight="bold", zorder=3)
    plural = "" if wavefronts == 1 else "s"
    axes.text(BANKS / 2, 16.5, f"{wavefronts} wavefront{plural}", ha="center", va="center",
              fontsize=30, fontweight="bold", color=colour, zorder=4)
    banks = len({row["bank"] for row in request})
    axes.text(BANKS / 2, 19, f"{len(request)} lanes in {banks} bank{'' if banks == 1 else 's'}",
              ha="center", va="center", fontsize=15, color=style.INK, zorder=4)
    axes.set_title(f"{when}: {step}, line {request[0]['line']}", fontsize=14, pad=14)
    axes.set_xlim(-0.1, BANKS + 0.1)
    axes.set_ylim(BANKS + 0.1, -0.1)
    axes.set_aspect("equal")
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    ticks = [0, 4, 8, 12, 16, 20, 24, 28, 31]
    axes.set_xticks([t + 0.5 for t in ticks], ticks)
    axes.set_yticks([t + 0.5 for t in ticks], ticks)
    axes.tick_params(length=0, labelsize=10)
    axes.set_xlabel("bank of shared memory")
    axes.set_ylabel("wavefront: one pass through shared memory")
    for spine in axes.spines.values():
        spine.set_visible(False)


def main():
    p = style.parser("The bank map: one warp's read of K, before and after the swizzle.")
    for step, when, _ in PANELS:
        p.add_argument(f"--line-{when}", metavar="N",
                       help=f"the line of {step} to draw; default: its costliest read")
    arguments = p.parse_args()
    figure, panels = pyplot.subplots(1, 2, figsize=(14, 7.9))
    for axes, (step, when, colour) in zip(panels, PANELS):
        rows = style.read(arguments.results / f"trace-{step}.csv")
        draw(axes, worst_read(rows, getattr(arguments, f"line_{when}")), step, when, colour)
    panels[1].set_ylabel("")
    figure.suptitle("A warp reads 32 rows of K: the number in a cell is the lane it serves",
                    x=0.02, y=1.02, ha="left", fontsize=18, fontweight="bold")
    figure.tight_layout(w_pad=2.5)
    style.save(figure, arguments.out, "bank_map")


main()
