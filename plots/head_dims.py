# SPDX-License-Identifier: MIT
"""Step 56's budget: the registers of a thread that computes, and the shared memory of a block, of each of its kernels.

Drawn from the tiles that chapter 56 has in its table.
"""

import style
from style import pyplot

# d, V's d, warpgroups that compute, keys of a tile, stages of Q, stages of K and of V, registers of a thread
KERNELS = [(64, 64, 3, 128, 2, 3, 160), (96, 96, 3, 96, 2, 2, 160), (128, 128, 2, 128, 2, 2, 232),
           (192, 128, 2, 128, 1, 2, 232), (192, 192, 2, 112, 1, 2, 232), (256, 256, 2, 80, 1, 2, 232)]


def padded(d):
    return (d + 63) // 64 * 64


def stack(axes, y, parts):
    left = 0
    for size, color, name in parts:
        axes.barh(y, size, left=left, height=0.62, color=color, edgecolor="white", linewidth=1.5)
        axes.text(left + size / 2, y, f"{name} {size:g}", ha="center", va="center", fontsize=11)
        left += size


def main():
    arguments = style.parser(__doc__).parse_args()
    figure, (registers, memory) = pyplot.subplots(1, 2, figsize=(15, 5.2), sharey=True)
    for y, (d, dv, warpgroups, keys, q_stages, stages, limit) in enumerate(KERNELS):
        stack(registers, y, [(keys // 2, style.SKY, "S"), (keys // 4, style.ORANGE, "P"),
                             (dv // 2, style.GREEN, "O")])
        registers.plot([limit] * 2, [y - 0.4, y + 0.4], color=style.RED, linewidth=2.5)
        memory_of = [warpgroups * 64 * padded(d) * q_stages, keys * padded(d) * stages,
                     keys * padded(dv) * stages]
        stack(memory, y, [(2 * n / 1024, color, name) for n, color, name in
                          zip(memory_of, (style.SKY, style.ORANGE, style.GREEN), "QKV")])
    memory.axvline(227, color=style.RED, linewidth=2.5)
    registers.set_yticks(range(len(KERNELS)), [f"{d}" if d == dv else f"{d} with {dv}"
                                               for d, dv, *_ in KERNELS])
    registers.invert_yaxis()
    registers.set_ylabel("head dim")
    registers.set_title("registers of a thread; red: what it has", fontsize=13)
    memory.set_title("KB of shared memory; red: what a block may have", fontsize=13)
    figure.suptitle("What each head dim's tiles take", x=0.02, ha="left", fontsize=17,
                    fontweight="bold")
    figure.tight_layout()
    style.save(figure, arguments.out, "head_dims")


main()
