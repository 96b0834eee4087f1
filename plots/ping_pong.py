"""Who does what in steps 33, 34 and 35: two warpgroups, the tensor cores and the producer's copies.

A model, not a measurement: the order is that of the kernels, the lengths are counted. A product of 64 x
128 x 128 is 512 clocks of the tensor cores, a softmax of 64 x 128 some 750 of a warpgroup, and a change
of turn is drawn with the length that chapter 34 counts.
"""

import style
from style import pyplot

PRODUCT, SOFTMAX, GAP, COPY = 512, 750, 330, 900
BOTH = 1250  # two softmaxes at once: 2 x 512 clocks of exponentials are among them
COLOURS = ["#8CD3BB", "#A9D5F2"]  # of the two warpgroups
SOFT = "#F7D78D"
ROWS = {"warpgroup 0": 0, "warpgroup 1": 1, "tensor cores": 2, "copies": 3}
RIGHT = 8200  # clocks
HEIGHT = 0.74  # of a box; rows are 1 apart


class Panel:
    """One step's panel: boxes, and from when to when the tensor cores are busy."""

    def __init__(self, axes, title):
        self.axes, self.busy = axes, []
        axes.set_title(title, fontsize=13.5, pad=8)
        for name, y in ROWS.items():
            axes.text(-120, y, name, ha="right", va="center", fontsize=11.5)

    def box(self, row, begin, end, text, colour, **more):
        if begin >= RIGHT:
            return
        y, end = ROWS[row], min(end, RIGHT)
        self.axes.add_patch(pyplot.Rectangle((begin, y - HEIGHT / 2), end - begin, HEIGHT, zorder=3,
                                             facecolor=colour, edgecolor="white", linewidth=1.2, **more))
        if end - begin > 300:
            self.axes.text((begin + end) / 2, y, text, ha="center", va="center", fontsize=10, zorder=4)

    def product(self, group, begin, end, text):
        """The warpgroup's product, and the same box at the tensor cores."""
        self.box("tensor cores", begin, end, text, COLOURS[group])
        self.busy.append((begin, end))

    def softmax(self, group, begin, tile, length=SOFTMAX):
        self.box(f"warpgroup {group}", begin, begin + length, f"softmax$_{tile}$", SOFT)
        return begin + length

    def idle(self):
        """Hatches what is left of the tensor cores' row; their share of work after the first tile."""
        now, y = 0, ROWS["tensor cores"]
        for begin, end in sorted(self.busy) + [(RIGHT, RIGHT)]:
            if now < min(begin, RIGHT):
                self.axes.add_patch(pyplot.Rectangle(
                    (now, y - HEIGHT / 2), min(begin, RIGHT) - now, HEIGHT, facecolor="none",
                    edgecolor=style.RED, hatch="///", linewidth=0, alpha=0.5, zorder=1))
            now = max(now, end)

    def copies(self, released):
        """Each K and V is asked for when both warpgroups have released the one two tiles before."""
        landed = 0
        for name, at in sorted(released, key=lambda r: r[1]):
            begin = max(at, landed)
            self.box("copies", begin, begin + COPY, name, "#E3D3EA")
            landed = begin + COPY


def in_step(axes):
    """Step 33 at its worst: both multiply, each at half of the speed; then both have their softmax."""
    p, now, released = Panel(axes, "33-two-consumers, when the two are in step"), 0, []
    tile = 0
    while now < RIGHT:
        for group in (0, 1):
            p.box(f"warpgroup {group}", now, now + 2 * PRODUCT, f"$Q\\,K_{tile}^T$", COLOURS[group])
            p.product(group, now + group * PRODUCT, now + (group + 1) * PRODUCT, f"$Q\\,K_{tile}^T$")
            p.softmax(group, now + 2 * PRODUCT, tile, BOTH)
        now += 2 * PRODUCT
        released.append((f"$K_{tile + 2}$", now))
        now += BOTH
        for group in (0, 1):
            p.box(f"warpgroup {group}", now, now + 2 * PRODUCT, f"$P\\,V_{tile}$", COLOURS[group])
            p.product(group, now + group * PRODUCT, now + (group + 1) * PRODUCT, f"$P\\,V_{tile}$")
        now += 2 * PRODUCT
        released.append((f"$V_{tile + 2}$", now))
        tile += 1
    p.idle()
    p.copies(released)


def ping_pong(axes):
    """Step 34: a turn is P V and the next Q K^T; it ends when they are done."""
    p, now, released = Panel(axes, "34-ping-pong: P V and the next Q K$^T$ in turns"), 0, []
    ready, tile, group = [0, 0], [0, 0], 0  # when a warpgroup has P; its tile
    while now < RIGHT:
        begin = max(now, ready[group])
        row, t = f"warpgroup {group}", tile[group]
        if t > 0:
            p.box(row, begin, begin + PRODUCT, f"$P\\,V_{t - 1}$", COLOURS[group])
            p.product(group, begin, begin + PRODUCT, f"$P\\,V_{t - 1}$")
            begin += PRODUCT
            if group == 1:
                released.append((f"$V_{t + 1}$", begin))
        p.box(row, begin, begin + PRODUCT, f"$Q\\,K_{t}^T$", COLOURS[group])
        p.product(group, begin, begin + PRODUCT, f"$Q\\,K_{t}^T$")
        now = begin + PRODUCT
        if group == 1:
            released.append((f"$K_{t + 2}$", now))
        ready[group] = p.softmax(group, now, t)
        tile[group] += 1
        now += GAP
        group = 1 - group
    p.idle()
    p.copies(released)


def overlap(axes):
    """Step 35: Q K^T of the next tile and P V of this one are started together, one behind the other."""
    p, free, released = Panel(axes, "35-overlap: the softmax of a tile also beside P V of the one before"), 0, []
    ready, tile, group = [0, 0], [0, 0], 0
    while free < RIGHT:
        begin = max(free, ready[group])
        t = tile[group]
        p.product(group, begin, begin + PRODUCT, f"$Q\\,K_{t}^T$")
        scores = free = begin + PRODUCT
        if group == 1:
            released.append((f"$K_{t + 2}$", free))
        if t > 0:
            p.product(group, free, free + PRODUCT, f"$P\\,V_{t - 1}$")
            free += PRODUCT
            if group == 1:
                released.append((f"$V_{t + 1}$", free))
        ready[group] = max(p.softmax(group, scores, t), free)
        tile[group] += 1
        group = 1 - group
    p.idle()
    p.copies(released)


def main():
    arguments = style.parser(__doc__).parse_args()
    figure, panels = pyplot.subplots(3, 1, figsize=(14, 9.6), sharex=True)
    for draw, axes in zip((in_step, ping_pong, overlap), panels):
        draw(axes)
        axes.set_xlim(-1250, RIGHT)
        axes.set_ylim(3.5, -0.5)
        axes.set_yticks([])
        for side in ("left", "bottom"):
            axes.spines[side].set_visible(False)
        axes.tick_params(axis="x", length=0, labelbottom=False)
    panels[-1].set_xticks(range(0, RIGHT, 1024))
    panels[-1].tick_params(axis="x", length=3, labelbottom=True)
    panels[-1].set_xlabel("clocks, as counted")
    figure.suptitle("Who does what: two warpgroups and a producer", x=0.02, y=1.0, ha="left", fontsize=17,
                    fontweight="bold")
    figure.text(0.02, 0.93, "A model in the order of the kernels, with counted lengths: a product of 64 x "
                "128 x 128 is 512 clocks, a softmax some 750 (two at once 1,250), a change of turn in step 34 some 330.\n"
                "Green and blue: products of warpgroup 0 and 1. Hatched: the tensor cores have nothing to "
                "do.", fontsize=11.5, linespacing=1.4)
    figure.tight_layout(rect=(0, 0, 1, 0.94), h_pad=1.2)
    style.save(figure, arguments.out, "ping_pong")


main()
