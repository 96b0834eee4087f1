# SPDX-License-Identifier: MIT
"""libattention.so for PyTorch: attention(), attention_backward(), and trainable_attention(), whose gradients autograd
finds. And for HuggingFace transformers: register() makes it the implementation "libattention". Tensors are on the GPU,
or, with a library for the emulator, on the CPU. LIBATTENTION names the library; default: ./libattention.so."""

import ctypes
import functools
import os

import torch


class Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), *((name + "_stride", ctypes.c_int64) for name in ("batch", "head", "row"))]


workspaces = {}  # by stream: its calls share one, which is 0 before its first use, and grows
Array = ctypes.c_void_p * 2  # on the device, on the host
KINDS = {"size": ctypes.c_size_t, "int": ctypes.c_int, "int64": ctypes.c_int64, "float": ctypes.c_float,
         "pointer": ctypes.c_void_p, "tensor": Tensor, "array": Array}
FIELDS = """size struct_bytes; int type head_dim batch heads kv_heads seqlen_q seqlen_k head_dim_v; tensor Q K V O; pointer lse;
    float scale softcap; pointer alibi_slopes; int64 alibi_stride; pointer sink_logits;
    int causal window window_left window_right sinks; array lengths_q lengths_k starts_k cu_seqlens_q cu_seqlens_k;
    int total_q total_k; array page_table; int64 page_table_stride; int page_size pages; array cache_index; int caches;
    tensor K_new V_new; int seqlen_new; array lengths_new cu_seqlens_new; int total_new rope; pointer rope_cos rope_sin;
    int rope_positions rope_dim rope_one_position; pointer workspace; size workspace_bytes; pointer stream;
    int mma_only"""


class Problem(ctypes.Structure):  # struct attention_problem
    _fields_ = [(name, KINDS[kind]) for kind, *names in map(str.split, FIELDS.split(";")) for name in names]


class Gradients(ctypes.Structure):  # struct attention_gradients
    _fields_ = [("struct_bytes", ctypes.c_size_t), *((name, Tensor) for name in ("dO", "dQ", "dK", "dV")),
                ("deterministic", ctypes.c_int), ("d_sink_logits", ctypes.c_void_p)]


@functools.cache
def library():
    lib = ctypes.CDLL(os.environ.get("LIBATTENTION", "./libattention.so"))
    lib.attention_message.restype = ctypes.c_char_p
    return lib


def call(name, *arguments):
    if getattr(library(), name)(*arguments) != 0:
        raise RuntimeError(f"{name}: {library().attention_message().decode()}")


class Memory:
    """Where the library finds tensors: where they are, or, for the emulator, in copies that it has allocated."""

    def __init__(self):
        self.copies = []

    def address(self, x):
        if x is None or x.numel() == 0:
            return None
        if x.is_cuda:
            return x.data_ptr()
        # From the first element to the last: strides stay.
        size = x.element_size() * (1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride())))
        memory = ctypes.c_void_p()
        call("attention_allocate", ctypes.byref(memory), ctypes.c_size_t(size))
        call("attention_upload", memory, ctypes.c_void_p(x.data_ptr()), ctypes.c_size_t(size))
        self.copies.append((memory, x, size))
        return memory.value

    def tensor(self, x):  # [batch, rows, heads, head_dim], or packed [rows, heads, head_dim]
        batch, row, head = (x.stride() if x.dim() == 4 else (0, *x.stride()))[:3]
        return Tensor(self.address(x), batch, head, row)

    def release(self, written):
        for memory, x, size in self.copies:
            if any(x is y for y in written):
                call("attention_download", ctypes.c_void_p(x.data_ptr()), memory, ctypes.c_size_t(size))
            call("attention_release", memory)


def fits(x):
    """The tensor, or a copy that the library takes: 16 bytes at once, and the elements of a row side by side."""
    right = x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(s % 8 == 0 for s in x.stride()[:-1])
    return x if right else x.contiguous()


def problem_of(memory, q, k, v, o, lse, *, k_new=None, v_new=None, scale=0, causal=False, window=None, softcap=0,
               alibi_slopes=None, sink_logits=None, rope=None, arrays={}, **sizes):
    """The struct of a call; `memory` finds its tensors."""
    packed, paged, rows_k = "cu_seqlens_q" in arrays, "page_table" in arrays, k.shape[-3]
    p = Problem(struct_bytes=ctypes.sizeof(Problem), type=int(q.dtype == torch.bfloat16), head_dim=q.shape[-1],
                batch=arrays["cu_seqlens_q"].numel() - 1 if packed else q.shape[0], heads=q.shape[-2],
                kv_heads=k.shape[-2], seqlen_q=q.shape[-3], total_q=q.shape[0], total_k=k.shape[0], caches=k.shape[0],
                head_dim_v=v.shape[-1], seqlen_k=rows_k * (arrays["page_table"].shape[1] if paged else 1), pages=k.shape[0],
                page_size=rows_k, Q=memory.tensor(q), K=memory.tensor(k), V=memory.tensor(v), O=memory.tensor(o),
                lse=memory.address(lse), scale=scale, softcap=softcap, causal=bool(causal),
                sink_logits=memory.address(sink_logits), alibi_slopes=memory.address(alibi_slopes),
                alibi_stride=alibi_slopes.stride(0) if alibi_slopes is not None and alibi_slopes.dim() == 2 else 0)
    if window is not None and tuple(window) != (-1, -1):
        p.window, p.window_left, p.window_right = 1, *(max(int(side), -1) for side in window)
    if k_new is not None:
        if k_new.numel() == 0:  # its address is NULL, which says that k and v hold all keys: a rotation would turn them
            raise ValueError("k_new has no rows: without new keys it must be None")
        p.K_new, p.V_new, p.seqlen_new = memory.tensor(k_new), memory.tensor(v_new), k_new.shape[-3]
        p.total_new = k_new.shape[0]
    if rope is not None:
        p.rope, p.rope_cos, p.rope_sin = rope[2], memory.address(rope[0]), memory.address(rope[1])
        p.rope_positions, p.rope_dim = rope[0].shape[0], 2 * rope[0].shape[1]
    for name, values in arrays.items():
        setattr(p, name, Array(memory.address(values), None))
    if paged:
        p.page_table_stride = arrays["page_table"].stride(0)
    for name, value in {**sizes, "stream": torch.cuda.current_stream(q.device).cuda_stream if q.is_cuda else 0}.items():
        setattr(p, name, value)
    return p


def run(function, workspace_bytes, memory, device, written, p, *more):
    """Calls a function of the library, with as much workspace as it wants."""
    arguments, needed = [ctypes.byref(x) for x in (p, *more)], ctypes.c_size_t()
    call(workspace_bytes, *arguments, ctypes.byref(needed))
    if needed.value > 0:
        space = workspaces.get((device, p.stream))
        if space is None or space.numel() < needed.value or device.type != "cuda":
            space = workspaces[device, p.stream] = torch.zeros(needed.value, dtype=torch.uint8, device=device)
        p.workspace, p.workspace_bytes = memory.address(space), needed.value
    try:
        call(function, *arguments)
    finally:
        memory.release(written)


def attention(q, k, v, *, k_new=None, v_new=None, return_lse=False, **options):
    """Attention of q, [batch, seqlen, heads, head_dim], on k and v. With cu_seqlens a tensor is packed, [rows, heads,
    head_dim]; with a page_table k and v are [pages, page_size, kv_heads, head_dim]. Options are those of problem_of:
    `arrays` are int32 tensors and `sizes` numbers, named as in attention.h; window is (left, right) and rope (cos, sin,
    enum attention_rope). k_new and v_new are stored in k and v. Rows of O behind a sequence's length are 0."""
    q, k_new, v_new = (x if x is None else fits(x) for x in (q, k_new, v_new))
    if k_new is None:
        k, v = fits(k), fits(v)
    o, lse, memory = q.new_zeros(*q.shape[:-1], v.shape[-1]), None, Memory()
    if return_lse:
        lse = torch.full_like(o[..., 0].transpose(-1, -2), -torch.inf, dtype=torch.float32,
                              memory_format=torch.contiguous_format)
    p = problem_of(memory, q, k, v, o, lse, k_new=k_new, v_new=v_new, **options)
    run("attention_forward", "attention_workspace_bytes", memory, q.device,
        [o, lse, k, v] if k_new is not None else [o, lse], p)
    return (o, lse) if return_lse else o


def attention_backward(q, k, v, o, lse, dO, deterministic=False, **options):
    """dq, dk, dv and the gradient of sink_logits (None without) of what attention(..., return_lse=True) returned. Rows
    behind a sequence's length are 0. deterministic: with the same bits in every run, on a GPU for which the library has
    such a kernel, and for head dims above 128 without a soft cap, slopes and sinks."""
    # Copies that fits() makes must live until the call: their memory would be the workspace's otherwise.
    memory, dO, tensors = Memory(), fits(dO), [fits(x) for x in (q, k, v, o)]
    dq, dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in tensors[:3])
    sinks = options.get("sink_logits")
    d_sinks = None if sinks is None else torch.zeros_like(sinks)
    p = problem_of(memory, *tensors, lse, **options)
    g = Gradients(ctypes.sizeof(Gradients), *map(memory.tensor, (dO, dq, dk, dv)), int(deterministic),
                  memory.address(d_sinks))
    run("attention_backward", "attention_backward_workspace_bytes", memory, q.device, [dq, dk, dv, d_sinks], p, g)
    return dq, dk, dv, d_sinks


class TrainableAttention(torch.autograd.Function):
    """Keeps q, k, v, o, the log-sum-exp and the sinks' logits until the backward pass."""

    @staticmethod
    def forward(ctx, q, k, v, sink_logits, deterministic, options):
        o, lse = attention(q, k, v, return_lse=True, sink_logits=sink_logits, **options)
        ctx.save_for_backward(q, k, v, o, lse, sink_logits)
        ctx.options = {**options, "deterministic": deterministic}
        ctx.mark_non_differentiable(lse)
        return o, lse

    @staticmethod
    def backward(ctx, dO, _):
        *tensors, sinks = ctx.saved_tensors
        return *attention_backward(*tensors, dO, sink_logits=sinks, **ctx.options), None, None


def trainable_attention(q, k, v, *, sink_logits=None, return_lse=False, deterministic=False, **options):
    """As attention(), and autograd finds the gradients of q, k, v and sink_logits, as attention_backward() has them."""
    o, lse = TrainableAttention.apply(q, k, v, sink_logits, deterministic, options)
    return (o, lse) if return_lse else o


def for_transformers(module, query, key, value, attention_mask, scaling=None, sliding_window=None, softcap=None,
                     s_aux=None, is_causal=None, **_):
    """What transformers calls in each layer; query is [batch, heads, seqlen, head_dim]. The mask is None, or [batch,
    keys], true where a key is no padding; padding is on one side. Gradients are those of trainable_attention()."""
    arrays, queries = {}, query.shape[2]
    if attention_mask is not None:
        first, count = attention_mask.int().argmax(1), attention_mask.sum(1)
        behind = attention_mask.shape[1] - first - count
        arrays = {"starts_k": first, "lengths_k": count, "lengths_q": (queries - behind).clamp(0, queries)}
        arrays = {name: values.int() for name, values in arrays.items()}
    trains = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    o = (trainable_attention if trains else attention)(
        *(x.transpose(1, 2) for x in (query, key, value)), scale=scaling or 0, arrays=arrays,
        causal=module.is_causal if is_causal is None else is_causal, softcap=softcap or 0,
        window=(sliding_window - 1, -1) if sliding_window else None, sink_logits=None if s_aux is None else s_aux.float())
    return o, None


def register(name="libattention"):
    """Makes the library an attention implementation of transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import flash_attention_mask
    AttentionInterface.register(name, for_transformers)
    AttentionMaskInterface.register(name, flash_attention_mask)
