# SPDX-License-Identifier: MIT
"""Commands for gdb, in a program that `make debug-NN` has built: waits, lanes, tile. common/emulator/DEBUGGING.md
shows them.
"""

import struct

import gdb

# A fiber's stack grows where it is touched: the emulator handles the signal.
gdb.execute("handle SIGSEGV nostop noprint pass", to_string=True)
gdb.execute("set breakpoint pending on")
gdb.execute("set print thread-events off")


class Waits(gdb.Command):
    """waits: who waits for what in the block of the thread that is stopped."""

    def __init__(self):
        super().__init__("waits", gdb.COMMAND_STACK)

    def invoke(self, argument, from_tty):
        gdb.execute("call (void)debug_waits()")


class Lanes(gdb.Command):
    """lanes VARIABLE: a variable of the kernel in each lane of the warp: a float, a FragmentC, a FragmentA, ..."""

    def __init__(self):
        super().__init__("lanes", gdb.COMMAND_DATA)

    def invoke(self, argument, from_tty):
        value = gdb.parse_and_eval(argument)
        element = value.type.strip_typedefs()
        while element.code in (gdb.TYPE_CODE_ARRAY, gdb.TYPE_CODE_STRUCT):
            element = (element.target() if element.code == gdb.TYPE_CODE_ARRAY else
                       element.fields()[0].type).strip_typedefs()
        if element.sizeof != 4:
            raise gdb.GdbError(f"{argument}: must be of floats, or of registers of two fp16 numbers")
        halves = element.code != gdb.TYPE_CODE_FLT
        gdb.execute(f"call (void)debug_lanes((void *){int(value.address)}, {value.type.sizeof // 4}, "
                    f"(bool){int(halves)})")


class Tile(gdb.Command):
    """tile TILE [ROW [COLUMN]]: 8 x 8 elements of a tile of shared memory, whatever its layout, from there on."""

    def __init__(self):
        super().__init__("tile", gdb.COMMAND_DATA)

    def invoke(self, argument, from_tty):
        words = gdb.string_to_argv(argument)
        if not words:
            raise gdb.GdbError("tile needs a tile, as in: tile smem.K 8 0")
        tile = gdb.parse_and_eval(words[0])
        first = [int(gdb.parse_and_eval(word)) for word in words[1:3]] + [0, 0]
        kind = tile.type.strip_typedefs()
        if kind.code == gdb.TYPE_CODE_REF:
            tile, kind = tile.referenced_value(), kind.target().strip_typedefs()
        while kind.code == gdb.TYPE_CODE_STRUCT and not (kind.name or "").startswith("Tile<"):
            bases = [field.type for field in kind.fields() if field.is_base_class]
            if not bases:
                break
            tile, kind = tile.cast(bases[0]), bases[0].strip_typedefs()  # a TmaTile is a Tile
        if not (kind.name or "").startswith("Tile<"):
            raise gdb.GdbError(f"{words[0]} is a {tile.type}: must be a tile of shared memory, as smem.K or ring.tile[0]")
        size, layout = [int(kind.template_argument(i)) for i in (1, 2)], kind.template_argument(3)
        offset = gdb.parse_and_eval(f"&'{layout.name}::offset'").dereference()
        ends = [min(begin + 8, most) for begin, most in zip(first, size)]
        print("row\\col" + "".join(f"{c:10}" for c in range(first[1], ends[1])))
        for r in range(first[0], ends[0]):
            cells = (tile["data_"][offset(r, c)] for c in range(first[1], ends[1]))
            print(f"{r:7}" + "".join(f"{number(cell):10.4g}" for cell in cells))


def number(cell):
    """The value of an element: of a built-in type, or fp16 or bf16, whose bits are a member."""
    kind = cell.type.strip_typedefs()
    if kind.code != gdb.TYPE_CODE_STRUCT:
        return float(cell)
    bits = int(cell["bits"])
    if kind.sizeof == 1:
        return float(bits)  # of fp8 the bits
    word = struct.pack("<I", bits << 16) if kind.name.endswith("bf16") else struct.pack("<H", bits)
    return struct.unpack("<f" if len(word) == 4 else "<e", word)[0]


for command in (Waits, Lanes, Tile):
    command()
