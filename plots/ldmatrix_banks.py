# SPDX-License-Identifier: MIT
"""The bank map of one ldmatrix.x4 of K, before and after the swizzle.

The traces are those of `./step-05 --device cpu --head-dim 128 --trace-csv FILE`, and of step 06.
"""

import bank_map
import style

ROW_BYTES = 128 * 2  # of K in shared memory: head dim 128, fp16
BLOCK_ROWS = 16  # of K, which one ldmatrix.x4 reads; K lies at a multiple of as many rows
MATRIX_LANES = 8  # each supplies a row, 16 bytes, of an 8 x 8 matrix


def lane_and_row(rows):
    """What stands in a cell: the lane that is served, and the row of the 16 x 16 block that it supplies."""
    row = int(rows[0]["address"]) // ROW_BYTES % BLOCK_ROWS
    return f"{bank_map.lanes_of(rows)}: row {row}"


def name_matrices(axes, request):
    """A line beside the wavefronts of each of the four matrices."""
    for matrix in range(len(request) // MATRIX_LANES):
        rows = [row for row in request if int(row["lane"]) // MATRIX_LANES == matrix]
        top = min(int(row["wavefront"]) for row in rows)
        bottom = max(int(row["wavefront"]) for row in rows) + 1
        right = max(int(row["bank"]) + int(row["bytes"]) // 4 for row in rows)
        axes.plot([right + 0.5] * 2, [top + 0.15, bottom - 0.15], color=style.INK, linewidth=1.5,
                  clip_on=False, zorder=4)
        axes.text(right + 0.9, (top + bottom) / 2, f"matrix {matrix}", va="center", fontsize=12,
                  zorder=4)


bank_map.compare(
    "ldmatrix_banks", "The bank map of one ldmatrix.x4 of K, before and after the swizzle.",
    "ldmatrix.x4 reads four 8×8 matrices of K: in a cell, a lane and the row of K that it supplies",
    "ldmatrix", "05-tensor-cores", "06-swizzle", lane_and_row, (20, 15), name_matrices)
