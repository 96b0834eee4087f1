# SPDX-License-Identifier: MIT
"""Compares libattention.so with PyTorch's attention, over the shapes of FlashAttention's own tests.

The rule is that of tests/test_flash_attn.py: the largest error of the library's output, against attention
in double precision, is at most twice that of PyTorch's attention in the element type, plus 1e-5. One line
per case; the last line is 'N passed, N failed'. Exit status 0 also where there is nothing to check with.
"""

import argparse
import ctypes
import math
import sys

try:
    import torch
except ImportError:
    print("SKIP: PyTorch is not installed here")
    sys.exit(0)

SHAPES = [(113, 203), (128, 217), (113, 211), (108, 256), (256, 512), (512, 256), (1024, 1024),
          (1023, 1024), (1024, 1023), (2048, 2048)]
MASKS = {"full": {}, "causal": {"causal": 1}, "window": {"causal": 1, "window": 57}}
HEADS = {"as many": (6, 6), "grouped": (6, 2), "one": (6, 1)}
HEAD_DIMS = [32, 64, 80, 96, 128, 192, 256]
TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
BATCH = 2
NO_WINDOW = -1


# attention.h
class Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p)] + [
        (name, ctypes.c_int64) for name in ("batch_stride", "head_stride", "row_stride")]


class Array(ctypes.Structure):
    _fields_ = [("device", ctypes.c_void_p), ("host", ctypes.c_void_p)]


def fields(kind, names):
    return [(name, kind) for name in names.split()]


class Problem(ctypes.Structure):
    _fields_ = (
        fields(ctypes.c_size_t, "struct_bytes")
        + fields(ctypes.c_int, "type head_dim batch heads kv_heads seqlen_q seqlen_k")
        + fields(Tensor, "Q K V O")
        + fields(ctypes.c_int, "causal window sinks")
        + fields(Array, "lengths_q lengths_k cu_seqlens_q cu_seqlens_k")
        + fields(ctypes.c_int, "total_q total_k")
        + fields(Array, "page_table")
        + fields(ctypes.c_int, "page_size pages")
        + fields(Tensor, "K_new V_new")
        + fields(ctypes.c_int, "rope")
        + fields(ctypes.c_void_p, "rope_cos rope_sin")
        + fields(ctypes.c_int, "rope_positions")
        + fields(ctypes.c_void_p, "workspace")
        + fields(ctypes.c_size_t, "workspace_bytes")
        + fields(ctypes.c_void_p, "stream"))


class Library:
    def __init__(self, path):
        self.library = ctypes.CDLL(path)
        self.library.attention_message.restype = ctypes.c_char_p

    def call(self, name, *arguments):
        if getattr(self.library, name)(*arguments) != 0:
            raise RuntimeError(f"{name}: {self.library.attention_message().decode()}")

    def attention(self, q, k, v, causal=0, window=NO_WINDOW):
        """q, k and v are [batch, seqlen, heads, head_dim], as FlashAttention has them."""
        def tensor(x):
            batch, row, head, column = x.stride()
            assert column == 1
            return Tensor(x.data_ptr(), batch, head, row)

        o = torch.full_like(q, math.nan)
        p = Problem(struct_bytes=ctypes.sizeof(Problem), type=int(q.dtype == torch.bfloat16),
                    head_dim=q.shape[3], batch=q.shape[0], heads=q.shape[2], kv_heads=k.shape[2],
                    seqlen_q=q.shape[1], seqlen_k=k.shape[1], Q=tensor(q), K=tensor(k), V=tensor(v),
                    O=tensor(o), causal=causal, window=window,
                    stream=torch.cuda.current_stream().cuda_stream)
        needed = ctypes.c_size_t()
        self.call("attention_workspace_bytes", ctypes.byref(p), ctypes.byref(needed))
        workspace = torch.zeros(max(needed.value, 1), dtype=torch.uint8, device="cuda")
        p.workspace, p.workspace_bytes = workspace.data_ptr(), needed.value
        self.call("attention_forward", ctypes.byref(p))
        return o


def by_definition(q, k, v, dtype, causal=0, window=NO_WINDOW):
    """Softmax(Q K^T / sqrt(d)) V, computed in this type; a row that sees nothing is 0."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2).to(dtype) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = q / math.sqrt(q.shape[-1]) @ k.transpose(2, 3)
    own = torch.arange(q.shape[2], device=q.device)[:, None] + k.shape[2] - q.shape[2]
    key = torch.arange(k.shape[2], device=q.device)[None, :]
    hidden = torch.zeros_like(scores[0, 0], dtype=torch.bool)
    if causal:
        hidden |= key > own
    if window != NO_WINDOW:
        hidden |= (key > own) | (key <= own - window)
    weights = torch.softmax(scores.masked_fill(hidden, -math.inf), dim=-1)
    weights = weights.masked_fill(hidden.all(-1, keepdim=True), 0)
    return (weights @ v).transpose(1, 2)


def fused(q, k, v, causal):
    """PyTorch's own attention, where it has this problem: it aligns a causal mask at the top left."""
    if causal and q.shape[1] != k.shape[1]:
        return None
    o = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=bool(causal),
        enable_gqa=q.shape[2] != k.shape[2])
    return o.transpose(1, 2)


def largest(x):
    return x.abs().max().item()


def check(library, shape, heads, head_dim, dtype, mask):
    """Whether the library is right, and a line that says how far off it and PyTorch are."""
    seqlen_q, seqlen_k = shape
    q, k, v = (torch.randn(BATCH, seqlen, h, head_dim, device="cuda", dtype=dtype)
               for seqlen, h in ((seqlen_q, heads[0]), (seqlen_k, heads[1]), (seqlen_k, heads[1])))
    expected = by_definition(q, k, v, torch.float64, **mask)
    error = largest(library.attention(q, k, v, **mask) - expected)
    allowed = 2 * largest(by_definition(q, k, v, dtype, **mask) - expected) + 1e-5
    line = f"error {error:.2e}, at most {allowed:.2e}"
    peer = fused(q, k, v, mask.get("causal")) if "window" not in mask else None
    if peer is not None:
        line += f", PyTorch's kernel {largest(peer - expected):.2e}"
    return error <= allowed, line  # NaN is not


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", default="./libattention.so", help="default: %(default)s")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("SKIP: no GPU, or none that PyTorch was built for")
        return 0
    library = Library(arguments.library)
    torch.manual_seed(1)
    passed = failed = 0
    cases = [(shape, heads, 128, dtype, mask) for shape in SHAPES for heads in HEADS
             for dtype in TYPES for mask in MASKS]
    cases += [(shape, "grouped", head_dim, dtype, mask) for shape in SHAPES for head_dim in HEAD_DIMS
              if head_dim != 128 for dtype in TYPES for mask in MASKS]
    for shape, heads, head_dim, dtype, mask in cases:
        right, line = check(library, shape, HEADS[heads], head_dim, TYPES[dtype], MASKS[mask])
        passed, failed = passed + right, failed + (not right)
        print(f"{shape[0]}x{shape[1]} {HEADS[heads][0]}/{HEADS[heads][1]} heads of {head_dim}, "
              f"{dtype}, {mask}: {line}: {'passed' if right else 'FAILED'}", flush=True)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


sys.exit(main())
