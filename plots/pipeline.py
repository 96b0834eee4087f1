# SPDX-License-Identifier: MIT
"""The timeline of one block over two K/V tiles: step 07, and step 08 with its pipeline.

A schematic. The order is that of the two kernels; the lengths are chosen to be readable.
"""

import style
from style import pyplot

COPY_Q, COPY, PRODUCT, SOFTMAX = 1.3, 2.6, 3.4, 2.4  # lengths as drawn
TILES = 2
ROWS = {"copies": 0, "tensor cores": 1, "softmax": 2}
COLOURS = {"copies": "#A9D5F2", "tensor cores": "#8CD3BB", "softmax": "#F7D78D"}
HEIGHT = 0.7  # of a box; rows are 1 apart


class Timeline:
    """One step's panel, from left to right. `now` is the time that the block has reached."""

    def __init__(self, axes, title):
        self.axes, self.now = axes, 0
        self.copied = 0  # when the copies that were started will have arrived
        axes.set_title(title, fontsize=15, pad=48)
        for name, y in ROWS.items():
            axes.text(-0.3, y, name, ha="right", va="center", fontsize=12.5)

    def box(self, row, start, length, text):
        y = ROWS[row]
        self.axes.add_patch(pyplot.Rectangle((start, y - HEIGHT / 2), length, HEIGHT, zorder=3,
                                             facecolor=COLOURS[row], edgecolor="white"))
        self.axes.text(start + length / 2, y, text, ha="center", va="center", fontsize=12.5,
                       zorder=4)

    def copy(self, text, length=COPY):
        """A copy that begins when the one before has arrived, and that nobody waits for yet."""
        self.copied = max(self.copied, self.now)
        self.box("copies", self.copied, length, text)
        self.copied += length

    def commit(self):
        self.axes.text(self.now + 0.12, HEIGHT / 2 + 0.03, "commit", va="top", fontsize=10.5,
                       color=style.BLUE, zorder=4)

    def wait(self):
        """Goes on when all copies have arrived; until then the tensor cores are idle."""
        if self.copied > self.now:
            self.idle(self.copied)
            self.now = self.copied
        else:
            y = ROWS["copies"]
            self.axes.plot([self.copied, self.now], [y, y], color=style.BLUE, linestyle=":",
                           linewidth=1.8, zorder=2)

    def idle(self, end):
        y = ROWS["tensor cores"]
        self.axes.add_patch(pyplot.Rectangle((self.now, y - HEIGHT / 2), end - self.now, HEIGHT,
                                             facecolor="none", edgecolor=style.RED, hatch="///",
                                             linewidth=0, alpha=0.45, zorder=1))
        self.axes.text((self.now + end) / 2, y, "idle", ha="center", va="center", fontsize=12.5,
                       fontweight="bold", color=style.RED, zorder=4,
                       bbox={"facecolor": "white", "edgecolor": "none", "pad": 2})

    def barrier(self, name):
        """A point that no warp passes before all have reached it."""
        self.axes.plot([self.now] * 2, [-0.5, 2.45], color=style.INK, linewidth=1.6, zorder=5)
        self.axes.text(self.now, -0.58, name, ha="center", va="bottom", fontsize=12,
                       fontweight="bold", linespacing=1.3)

    def compute(self, row, length, text):
        self.box(row, self.now, length, text)
        self.now += length

    def iteration(self, start, tile):
        """Names the iteration of the loop that lasted from `start` until now."""
        self.axes.annotate("", (start + 0.1, 2.72), (self.now - 0.1, 2.72), arrowprops={
            "arrowstyle": "<->", "color": style.GREY, "shrinkA": 0, "shrinkB": 0})
        self.axes.text((start + self.now) / 2, 2.82, f"iteration {tile}", ha="center",
                       va="top", fontsize=11.5, color=style.GREY)

    def legend(self, lines):
        self.axes.text(0, 3.5, "\n".join(lines), va="top", fontsize=12.5, linespacing=1.6)


def larger_tile(axes):
    """Step 07, in the order of its source; returns when it ends."""
    t = Timeline(axes, "07-larger-tile: copies, then computation")
    t.copy("$Q$", COPY_Q)
    for tile in range(TILES):
        start = t.now
        t.barrier("barrier 1")
        t.copy(f"$K_{tile}$")
        t.copy(f"$V_{tile}$")
        t.commit()
        t.wait()
        t.barrier("wait,\nbarrier 2")
        t.compute("tensor cores", PRODUCT, f"$Q\\,K_{tile}^T$")
        t.compute("softmax", SOFTMAX, "softmax")
        t.compute("tensor cores", PRODUCT, f"$P\\,V_{tile}$")
        t.iteration(start, tile)
    t.legend(["Barrier 1: all warps have read the previous K and V, which may now be overwritten.",
              "Wait, barrier 2: Q, K and V are there for all warps."])
    return t.now


def kv_pipeline(axes):
    """Step 08, in the order of its source; returns when it ends."""
    t = Timeline(axes, "08-kv-pipeline: copies during the computation")
    t.copy("$Q$", COPY_Q)
    t.copy("$K_0$")
    t.commit()
    for tile in range(TILES):
        t.wait()
        start = t.now
        t.barrier("wait,\nbarrier 1")
        t.copy(f"$V_{tile}$")
        t.commit()
        t.compute("tensor cores", PRODUCT, f"$Q\\,K_{tile}^T$")
        t.compute("softmax", SOFTMAX, "softmax")
        t.wait()
        t.barrier("wait,\nbarrier 2")
        if tile + 1 < TILES:
            t.copy(f"$K_{tile + 1}$")
            t.commit()
        t.compute("tensor cores", PRODUCT, f"$P\\,V_{tile}$")
        t.iteration(start, tile)
    axes.text(t.now - PRODUCT + 0.2, ROWS["copies"], "no next $K$", va="center", fontsize=11.5,
              color=style.GREY)
    t.legend([
        "Wait, barrier 1: Q and K are there for all warps; all have read the previous V, which the"
        " next may overwrite.",
        "Wait, barrier 2: V is there for all warps; all have read K, which the next may overwrite.",
        "Dotted: the copy has arrived before anybody waits for it."])
    return t.now


def main():
    arguments = style.parser(__doc__).parse_args()
    figure, (above, below) = pyplot.subplots(2, 1, figsize=(13, 10.4))
    before, after = larger_tile(above), kv_pipeline(below)
    below.annotate("", (after, 1), (before, 1), arrowprops={
        "arrowstyle": "<|-|>", "color": style.GREEN, "linewidth": 2.5, "shrinkA": 4, "shrinkB": 0})
    below.text((before + after) / 2, 0.8, "saved, if the block\nhas the SM to itself", ha="center", va="bottom", fontsize=12.5,
               fontweight="bold", color=style.GREEN)
    for axes in (above, below):
        axes.set_xlim(-3.6, before + 0.3)
        axes.set_ylim(5, -0.6)
        axes.axis("off")
    figure.suptitle("The next copy is under way while the tensor cores work", x=0.02, y=1.02,
                    ha="left", fontsize=18, fontweight="bold")
    figure.text(0.02, 0.945, "A schematic, not to scale: one block over two K/V tiles, in the "
                "order of the two kernels. Hatched: the tensor cores have no data yet.\nOn the H200 two "
                "blocks share an SM and work during each other's waits: the kernel gains next to "
                "nothing.",
                fontsize=12.5, linespacing=1.5)
    figure.tight_layout(rect=(0, 0, 1, 0.94), h_pad=2)
    style.save(figure, arguments.out, "pipeline")


main()
