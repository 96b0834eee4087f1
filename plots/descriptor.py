# SPDX-License-Identifier: MIT
"""The 64 bits of a wgmma's descriptor: its fields, and their values for K and V of step 31.

Computed as in common/kernel/wgmma.h, where K and V lie in shared memory at head dim 128: behind Q, 32 KB.
"""

import style
from style import pyplot

# Name, first bit, bits, colour; the bits between them are 0.
FIELDS = [("start", 0, 14, "#A9D5F2"), ("leading", 16, 14, "#8CD3BB"), ("stride", 32, 14, "#F7D78D"),
          ("base\noffset", 49, 3, "#E3D3EA"), ("mode", 62, 2, "#F4B6A0")]
NARROW = {"base\noffset": (64 - 52.4, "right"), "mode": (2.4, "left")}  # where their names stand beside them
UNIT, K, V, SLAB, STRIDE = 16, 32768, 49152, 8192, 1024  # bytes
# What is described: where it begins, its leading offset, and what the start says.
OPERANDS = [("K, columns 0 to 15", K, 16, "K begins at byte 32,768"),
            ("K, columns 16 to 31", K + 32, 16, "32 bytes later: start + 2"),
            ("K, columns 64 to 79", K + SLAB, 16, "the next slab: start + 512"),
            ("V, keys 0 to 15", V, SLAB, "V begins at byte 49,152"),
            ("V, keys 16 to 31", V + 2 * STRIDE, SLAB, "two atoms later: start + 128")]
HEIGHT = 0.72  # of a box; rows are 1 apart


def values(begin, leading):
    """The fields' values, and the descriptor."""
    fields = {"start": begin // UNIT, "leading": leading // UNIT, "stride": STRIDE // UNIT,
              "base\noffset": 0, "mode": 1}
    return fields, sum(fields[name] << first for name, first, _, _ in FIELDS)


def box(axes, y, first, bits, colour, text, **font):
    axes.add_patch(pyplot.Rectangle((64 - first - bits, y - HEIGHT / 2), bits, HEIGHT, facecolor=colour,
                                    edgecolor=style.GREY, linewidth=1))
    axes.text(64 - first - bits / 2, y, text, ha="center", va="center", **{"fontsize": 13, **font})


def main():
    arguments = style.parser(__doc__).parse_args()
    figure, axes = pyplot.subplots(figsize=(15, 5.6))
    axes.add_patch(pyplot.Rectangle((0, -HEIGHT / 2), 64, HEIGHT, facecolor="white", edgecolor=style.GREY))
    for name, first, bits, colour in FIELDS:
        box(axes, 0, first, bits, colour, "" if name in NARROW else name, fontweight="bold")
        if name in NARROW:
            axes.text(NARROW[name][0], 0, name, ha=NARROW[name][1], va="center", fontsize=12, fontweight="bold")
        axes.text(64 - first - bits / 2, -0.5, f"{first + bits - 1} to {first}", ha="center", va="bottom",
                  fontsize=12, color=style.INK)
    for y, (operand, begin, leading, says) in enumerate(OPERANDS, 1):
        fields, whole = values(begin, leading)
        y += 0.35
        axes.add_patch(pyplot.Rectangle((0, y - HEIGHT / 2), 64, HEIGHT, facecolor="white",
                                        edgecolor=style.GREY, linewidth=0.6))
        for name, first, bits, colour in FIELDS:
            unread = name == "leading" and operand[0] == "K"
            box(axes, y, first, bits, "white" if unread else colour,
                f"{fields[name]:,}" + (", not read" if unread else ""))
        axes.text(-0.8, y - 0.14, operand, ha="right", va="center", fontsize=13, fontweight="bold")
        axes.text(-0.8, y + 0.2, says, ha="right", va="center", fontsize=11.5)
        axes.text(64.8, y, f"0x{whole >> 32:08X} {whole & 0xFFFFFFFF:08X}", ha="left", va="center",
                  fontsize=12.5, family="DejaVu Sans Mono")
    axes.text(-0.8, 0, "bits", ha="right", va="center", fontsize=13)
    axes.text(64.8, 0, "the 64 bits", ha="left", va="center", fontsize=13)
    axes.set_xlim(-18.5, 81)
    axes.set_ylim(5.9, -1)
    axes.axis("off")
    figure.suptitle("A wgmma's descriptor", x=0.02, y=1.05, ha="left", fontsize=18, fontweight="bold")
    figure.text(0.02, 0.91, "Where an operand begins, and how it lies; offsets in units of 16 bytes. Stride: from 8 "
                "rows to the next 8, 1,024 bytes. Leading: from a slab to the next,\n8,192 bytes, read for V alone. "
                "Base offset: 0, because tiles begin at a multiple of 1,024. Mode 1: the 128-byte swizzle.",
                fontsize=12.5, linespacing=1.5)
    figure.tight_layout(rect=(0, 0, 1, 0.93))
    style.save(figure, arguments.out, "descriptor")


main()
