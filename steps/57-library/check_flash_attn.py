# SPDX-License-Identifier: MIT
"""Runs FlashAttention's own tests, unchanged, over libattention.so: tests/test_flash_attn.py of a checkout, or with
--hopper hopper/test_flash_attn.py. `flash_attn` is this file then: its functions call the library.

Each test function gets as many cases of its grid as --cases says, drawn from the seed. What the library does not
have is left out, and counted: dropout, and in Hopper's tests chunks, qv, fp8 and merging; and deterministic gradients
where the GPU is not Hopper. Gradients are the library's where attention_backward takes the call, on Hopper the
deterministic ones, too. The tests ask for others in the same cases: those of a cache. These are the textbook's formula's in
fp32, and say nothing of the library. A V of more than 256 columns is the formula's, too, because a case has it beside what
is tested. --emulator runs on the CPU, with a library built for the emulator.
"""

import argparse
import collections
import contextlib
import math
import os
import random
import re
import sys
import types

try:
    import einops  # noqa: F401  their tests need it
    import pytest
    import torch
except ImportError as error:
    print(f"SKIP: {error.name} is not installed here")
    sys.exit(0)

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from attention_torch import attention, trainable_attention  # noqa: E402

by_formula = collections.Counter()  # calls that the library does not answer, by reason
by_library = gradients_by_library = deterministic_by_library = 0


def formula(q, k, v, scale, causal=False, window=(-1, -1), softcap=0, slopes=None, chunk=0):
    """The textbook's attention of [batch, rows, heads, head_dim] in fp32: what gradients come from."""
    group = q.shape[2] // k.shape[2]
    Q, K, V = (x.transpose(1, 2).float() for x in (q, k, v))
    K, V = (x.repeat_interleave(group, 1) for x in (K, V))
    scores = Q @ K.transpose(2, 3) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    own = torch.arange(q.shape[1], device=q.device)[:, None] + k.shape[1] - q.shape[1]
    key = torch.arange(k.shape[1], device=q.device)[None]
    if slopes is not None:
        scores = scores - slopes.reshape(-1, slopes.shape[-1], 1, 1) * (own - key).abs()
    hidden = (key > own) if causal else torch.zeros_like(scores[0, 0], dtype=torch.bool)
    if window[0] >= 0:
        hidden = hidden | (key < own - window[0])
    if window[1] >= 0:
        hidden = hidden | (key > own + window[1])
    if chunk:
        hidden = hidden | (key // chunk != own // chunk)
    weights = torch.softmax(scores.masked_fill(hidden, -math.inf), -1).masked_fill(hidden.all(1)[:, None], 0)
    return (weights @ V).transpose(1, 2).to(q.dtype)


def packed_formula(q, k, v, arrays, slopes=None, **alike):
    """The same of packed sequences, [rows, heads, head_dim]. A row behind a sequence's length is 0."""
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    rows = []  # of each sequence: from where to where
    for side in "qk":
        starts, lengths = arrays[f"cu_seqlens_{side}"].tolist(), arrays.get(f"lengths_{side}")
        ends = starts[1:] if lengths is None else [i + n for i, n in zip(starts, lengths.tolist())]
        rows.append([slice(*pair) for pair in zip(starts, ends)])
    for b, (i, j) in enumerate(zip(*rows)):
        if i.stop > i.start and j.stop > j.start:
            own = slopes if slopes is None or slopes.dim() == 1 else slopes[b]
            out[i] = formula(q[i][None], k[j][None], v[j][None], slopes=own, **alike)[0]
    return out + 0 * (q.sum() + k.sum() + v.sum())  # autograd wants to find them, also if no sequence has a key


class WithGradient(torch.autograd.Function):
    """The library's O, with the gradients of the formula's."""

    @staticmethod
    def forward(ctx, out, shadow):
        return out.clone()

    @staticmethod
    def backward(ctx, gradient):
        return None, gradient


def differentiable(out, q, k, v, arrays, alike):
    if "page_table" in arrays or not trains(q, k, v):
        return out
    return WithGradient.apply(out, by_the_formula(q, k, v, arrays, alike))


def by_the_formula(q, k, v, arrays, alike):
    return packed_formula(q, k, v, arrays, **alike) if "cu_seqlens_q" in arrays else formula(q, k, v, **alike)


def trains(*tensors):
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def has_hoppers_kernels():
    """On the emulator, too, which runs every instruction."""
    return torch.cuda.get_device_capability() == (9, 0)


def padded(x, columns):
    return x if x is None or x.shape[-1] == columns else torch.nn.functional.pad(x, (0, columns - x.shape[-1]))


def run(q, k, v, *, scale, causal, window, softcap, slopes=None, arrays={}, k_new=None, v_new=None, rope=None, chunk=0,
        deterministic=False, **sizes):
    """A call of the library, of any head dims that its kernels may be padded to. Returns O and the log-sum-exp."""
    global by_library, gradients_by_library, deterministic_by_library
    window = tuple(int(side) for side in window)
    scale = scale or q.shape[-1] ** -0.5
    alike = dict(scale=scale, causal=causal, window=window, softcap=softcap, slopes=slopes, chunk=chunk)
    reason = "a V of more than 256 columns" if v.shape[-1] > 256 else "attention in chunks" if chunk else None
    if reason:
        if set(arrays) - {"cu_seqlens_q", "cu_seqlens_k", "lengths_q", "lengths_k"}:
            pytest.skip(f"left out: {reason}")
        by_formula[reason] += 1
        return by_the_formula(q, k, v, arrays, alike), None
    by_library += 1
    columns = -(-max(q.shape[-1], v.shape[-1]) // 8) * 8
    others = (k_new, rope, arrays.get("page_table"), arrays.get("cache_index"))
    same_bits = has_hoppers_kernels() and (columns <= 128 or (not softcap and slopes is None))
    if trains(q, k, v) and all(x is None for x in others) and (not deterministic or same_bits):
        gradients_by_library += 1
        deterministic_by_library += bool(deterministic)
        out, lse = trainable_attention(*(padded(x, columns) for x in (q, k, v)), scale=scale, causal=causal,
                                       window=window, softcap=softcap, alibi_slopes=slopes, arrays=arrays,
                                       return_lse=True, deterministic=deterministic, **sizes)
        return out[..., :v.shape[-1]], lse
    with torch.no_grad():
        Q, K, K_new = (padded(x, -(-q.shape[-1] // 8) * 8) for x in (q, k, k_new))
        V, V_new = (padded(x, -(-v.shape[-1] // 8) * 8) for x in (v, v_new))
        out, lse = attention(Q, K, V, k_new=K_new, v_new=V_new, scale=scale, causal=causal, window=window,
                             softcap=softcap, alibi_slopes=slopes, rope=rope, arrays=arrays, return_lse=True, **sizes)
        for cache, copy in ((k, K), (v, V)):
            if k_new is not None and copy is not cache:
                cache.copy_(copy[..., :cache.shape[-1]])
    return differentiable(out[..., :v.shape[-1]], q, k, v, arrays, alike), lse


def refuse(dropout_p=0, qv=None, q_descale=None, **_):
    for reason, wanted in (("dropout", dropout_p), ("qv", qv is not None), ("fp8", q_descale is not None)):
        if wanted:
            pytest.skip(f"left out: {reason}")


# --- flash_attn's functions ------------------------------------------------------------------------------------------


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                    alibi_slopes=None, deterministic=False, return_attn_probs=False, attention_chunk=0, **other):
    refuse(dropout_p, **other)
    out, lse = run(q, k, v, scale=softmax_scale, causal=causal, window=window_size, softcap=softcap,
                   slopes=alibi_slopes, chunk=attention_chunk, deterministic=deterministic)
    return (out, lse, None) if return_attn_probs else out


def flash_attn_qkvpacked_func(qkv, *arguments, **options):
    return flash_attn_func(*qkv.unbind(2), *arguments, **options)


def flash_attn_kvpacked_func(q, kv, *arguments, **options):
    return flash_attn_func(q, *kv.unbind(2), *arguments, **options)


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
                           softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
                           deterministic=False, return_attn_probs=False, block_table=None, seqused_q=None,
                           seqused_k=None, attention_chunk=0, **other):
    refuse(dropout_p, **other)
    arrays = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "lengths_q": seqused_q,
              "lengths_k": seqused_k}
    if block_table is not None:
        arrays["lengths_k"] = seqused_k if seqused_k is not None else cu_seqlens_k.diff()
        arrays["cu_seqlens_k"], arrays["page_table"] = None, block_table
    out, lse = run(q, k, v, scale=softmax_scale, causal=causal, window=window_size, softcap=softcap,
                   slopes=alibi_slopes, arrays={n: a for n, a in arrays.items() if a is not None},
                   chunk=attention_chunk, deterministic=deterministic, seqlen_q=max_seqlen_q,
                   seqlen_k=max_seqlen_k)
    return (out, lse, None) if return_attn_probs else out


def flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, *arguments, **options):
    return flash_attn_varlen_func(*qkv.unbind(1), cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *arguments, **options)


def flash_attn_varlen_kvpacked_func(q, kv, *arguments, **options):
    return flash_attn_varlen_func(q, *kv.unbind(1), *arguments, **options)


def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None,
                            cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None,
                            page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None,
                            softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                            rotary_interleaved=True, alibi_slopes=None, return_softmax_lse=False, attention_chunk=0,
                            rotary_seqlens=None, q_descale=None, **tuning):
    refuse(qv=qv, q_descale=q_descale)
    table = block_table if block_table is not None else page_table
    if table is not None and cache_batch_idx is not None:  # then it chooses rows of the table
        table, cache_batch_idx = table[cache_batch_idx.long()], None
    batch = cu_seqlens_q.numel() - 1 if cu_seqlens_q is not None else q.shape[0]
    if isinstance(cache_seqlens, int):
        cache_seqlens = torch.full((batch,), cache_seqlens, dtype=torch.int32, device=q.device)
    lengths = cache_seqlens
    if k is not None:
        lengths = lengths + (cu_seqlens_k_new.diff() if cu_seqlens_k_new is not None else k.shape[1])
    if table is not None and (lengths > table.shape[1] * k_cache.shape[1]).any():
        raise RuntimeError("block_table has no entry for the last keys of a sequence")
    if cache_leftpad is not None:
        lengths = lengths - cache_leftpad
    arrays = {"lengths_k": lengths, "starts_k": cache_leftpad, "page_table": table, "cache_index": cache_batch_idx,
              "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_new": cu_seqlens_k_new}
    sizes = {"seqlen_q": max_seqlen_q} if cu_seqlens_q is not None else {}
    rope = None
    if rotary_cos is not None:
        rope = (*(table.float().contiguous() for table in (rotary_cos, rotary_sin)), 2 if rotary_interleaved else 1)
        all_alike = not causal and tuple(int(side) for side in window_size) == (-1, -1)
        sizes["rope_one_position"] = all_alike
    out, lse = run(q, k_cache, v_cache, scale=softmax_scale, causal=causal, window=window_size, softcap=softcap,
                   slopes=alibi_slopes, arrays={n: a.int() for n, a in arrays.items() if a is not None}, k_new=k,
                   v_new=v, rope=rope, chunk=attention_chunk, **sizes)
    return (out, lse) if return_softmax_lse else out


def _flash_attn_varlen_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
                               softmax_scale, causal, window_size_left=-1, window_size_right=-1, num_splits=0, **other):
    if num_splits > 1:
        raise RuntimeError("num_splits > 1 is not supported")
    return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
                                  softmax_scale, causal, (window_size_left, window_size_right),
                                  return_attn_probs=True, **other)


def left_out(*_, **__):
    pytest.skip("left out: merging of results, or an entry point of their C++")


# --- their tests -----------------------------------------------------------------------------------------------------

OURS = [flash_attn_func, flash_attn_qkvpacked_func, flash_attn_kvpacked_func, flash_attn_varlen_func,
        flash_attn_varlen_qkvpacked_func, flash_attn_varlen_kvpacked_func, flash_attn_with_kvcache,
        _flash_attn_varlen_forward]


def install(checkout, hopper):
    """Makes `flash_attn` a module of these functions, whose other parts are the checkout's."""
    entry = types.SimpleNamespace(fwd=left_out, bwd=left_out, varlen_fwd=left_out, varlen_bwd=left_out)
    interface = types.ModuleType("flash_attn_interface" if hopper else "flash_attn.flash_attn_interface")
    package = types.ModuleType("flash_attn")
    package.__path__ = [os.path.join(checkout, "flash_attn")]
    for module in (interface, package):
        vars(module).update({f.__name__: f for f in OURS}, USE_TRITON_ROCM=False, flash_attn_gpu=entry,
                            _get_block_size_n=left_out, flash_attn_combine=left_out,
                            get_scheduler_metadata=lambda *_, **__: None)
    sys.modules.update({"flash_attn": package, interface.__name__: interface})
    sys.path.insert(0, os.path.join(checkout, "hopper"))


class ToCpu(torch.overrides.TorchFunctionMode):
    """What the tests put on a GPU is on the CPU."""

    def __torch_function__(self, function, kinds, arguments=(), options=None):
        options = dict(options or {})
        if "device" in options:
            options["device"] = "cpu"
        return function(*arguments, **options)


def rotary_on_cpu(checkout):
    """Their rotation is a Triton kernel: on the CPU it is their test's own formula, in fp32."""
    module = types.ModuleType("flash_attn.ops.triton.rotary")

    def apply_rotary(x, cos, sin, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None, interleaved=False, **_):
        from flash_attn.layers.rotary import rotate_half
        offsets = torch.as_tensor(seqlen_offsets).reshape(-1, 1)
        at = (offsets + torch.arange(x.shape[1])).clamp(max=cos.shape[0] - 1).expand(x.shape[0], -1).long()
        doubled = [t.float()[at][:, :, None] for t in (cos, sin)]
        doubled = [t.repeat_interleave(2, -1) if interleaved else t.repeat(1, 1, 1, 2) for t in doubled]
        turning, rest = x[..., :doubled[0].shape[-1]].float(), x[..., doubled[0].shape[-1]:]
        turned = turning * doubled[0] + rotate_half(turning, interleaved) * doubled[1]
        return torch.cat([turned.to(x.dtype), rest], -1)

    module.apply_rotary = apply_rotary
    sys.modules[module.__name__] = module


def why_left_out(test, parameters):
    if parameters.get("dropout_p"):
        return "dropout"
    if parameters.get("has_qv"):
        return "qv"
    if test.endswith("_deterministic") and not has_hoppers_kernels():
        return "a deterministic backward pass, which is Hopper's alone"
    if "race_condition" in test and not torch.cuda.is_available():
        return "70 GB of memory"
    return "merging of results, and entry points of their C++" if re.search("combine|bw_compat", test) else None


class Sample:
    """A pytest plugin: some cases of each test's grid, drawn before pytest makes all of them, and what they gave."""

    def __init__(self, options):
        self.options, self.count = options, collections.Counter()

    @pytest.hookimpl(tryfirst=True)
    def pytest_generate_tests(self, metafunc):
        marks = metafunc.definition.own_markers
        grids = [(re.split(", *", mark.args[0]), list(mark.args[1])) for mark in marks if mark.name == "parametrize"]
        marks[:] = [mark for mark in marks if mark.name != "parametrize"]
        draw = random.Random(f"{self.options.seed} {metafunc.function.__name__}")
        cases = {}
        for _ in range(20 * self.options.cases):
            case = {}
            for names, values in grids:
                value = draw.choice(values)
                case.update(zip(names, value if len(names) > 1 else [value]))
            if len(cases) < self.options.cases and self.is_wanted(metafunc.function.__name__, case):
                cases[tuple(case.values())] = case
        names = [name for names, _ in grids for name in names]
        if names:
            metafunc.parametrize(names, list(cases))

    def is_wanted(self, test, case):
        if not re.search(self.options.only, test):
            return False
        why = why_left_out(test, case)
        if why:
            self.count[f"drawn and left out: {why}"] += 1
        lengths = [n for name, n in case.items() if name.startswith("seqlen") and isinstance(n, int)]
        return not why and max(lengths, default=0) <= self.options.longest

    def pytest_collection_modifyitems(self, items):
        """Leaves out tests that have no grid."""
        items[:] = [item for item in items if hasattr(item, "callspec") or self.is_wanted(item.name, {})]

    def pytest_runtest_setup(self, item):
        """Sets switches of Hopper's tests. The first leaves out windows in their grids, which are drawn already, and chunks
        in their functions. The second leaves out gradients: for one key they are 0, and so is what the tests tolerate."""
        item.module.DISABLE_LOCAL = True
        item.module.DISABLE_BACKWARD = hasattr(item, "callspec") and item.callspec.params.get("seqlen_k", 4) < 4

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.count["failed"] += 1
            last = str(report.longrepr).strip().splitlines()[-1]
            print(f"\nFAILED {report.nodeid}\n  {last}", flush=True)
        elif report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
            if "empty parameter set" in reason:  # no case of this test was drawn
                return
            self.count[reason.replace("Skipped: ", "") if "left out" in reason else "skipped by the test itself"] += 1
        elif report.when == "call":
            self.count["passed"] += 1


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", help="a checkout of github.com/Dao-AILab/flash-attention")
    parser.add_argument("--hopper", action="store_true", help="hopper/test_flash_attn.py, in bf16 and fp16")
    parser.add_argument("--emulator", action="store_true", help="on the CPU")
    parser.add_argument("--cases", type=int, default=50, help="of each test's grid; default: %(default)s")
    parser.add_argument("--longest", type=int, default=1 << 30, help="no case with more queries or keys")
    parser.add_argument("--only", default="", help="tests whose name holds this regular expression")
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    options = parser.parse_args()
    tests = os.path.join(options.checkout, "hopper" if options.hopper else "tests", "test_flash_attn.py")
    if not os.path.exists(tests):
        parser.error(f"{tests}: no such file; the checkout is of github.com/Dao-AILab/flash-attention")
    if not options.emulator and not torch.cuda.is_available():
        print("SKIP: no GPU, or none that PyTorch was built for; --emulator runs on the CPU")
        return 0
    os.environ["FLASH_ATTENTION_DISABLE_FP8"] = "TRUE"  # a switch of Hopper's tests for what a build has not
    install(options.checkout, options.hopper)
    if options.emulator:
        torch.cuda.get_device_capability = lambda *_: (9, 0)
        torch.cuda.synchronize = lambda *_: None
        rotary_on_cpu(options.checkout)
    sample = Sample(options)
    with ToCpu() if options.emulator else contextlib.nullcontext():
        status = pytest.main(["-q", "--no-header", "--tb=short", "-p", "no:cacheprovider", "--show-capture=no",
                              "--disable-warnings", tests], plugins=[sample])
    for what, count in sorted(sample.count.items()):
        print(f"{count:6} {what}")
    print(f"{by_library:6} calls answered by the library, {gradients_by_library} with its gradients, of which "
          f"{deterministic_by_library} deterministic; by the formula: "
          + (", ".join(f"{n} of {why}" for why, n in by_formula.items()) or "none"))
    print(f"{sample.count['passed']} passed, {sample.count['failed']} failed")
    return 0 if status == pytest.ExitCode.OK else 1


if __name__ == "__main__":
    sys.exit(main())
