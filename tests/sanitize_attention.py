"""Small calls of make_plan and paged_attention, for compute-sanitizer to watch.

    compute-sanitizer --tool memcheck python3 tests/sanitize_attention.py
    compute-sanitizer --tool racecheck python3 tests/sanitize_attention.py --every 4
    compute-sanitizer --tool initcheck python3 tests/sanitize_attention.py --right
    compute-sanitizer --tool synccheck python3 tests/sanitize_attention.py --long

Each tensor has an allocation of its own that ends with its last element, so that a byte past it is
seen. Slots of the caches that no sequence uses, out, and all of the workspace but its counters are
never initialised, so that reading one is seen, too. Results are compared with the CPU backend's.

memcheck and initcheck find nothing. racecheck takes what the merge reads behind __syncthreads() for
a race with what was written before it, in the instances whose warps share keys in pairs (32 rows,
head_dim up to 128), and in no other: whichever barrier the pairs use, and with another one behind
the merge. A build in which every warp looked, behind that barrier, whether all had come to it,
found none missing in 3,000 launches. In the WGMMA kernel it names the ring of items, which one lane
of a warp hands on at mbarriers, for all lanes behind __syncwarp(): that order it does not follow.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import pagetile
import torch

BF16, FP16 = torch.bfloat16, torch.float16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
INT_MAX, INT_MIN = 2**31 - 1, -(2**31)
DEVICE = "cuda"


def int32(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def dense(shape) -> list[int]:
    return [math.prod(shape[i + 1 :]) for i in range(len(shape))]


def raw(x: torch.Tensor) -> torch.Tensor:
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.dtype.itemsize])


def exact(dtype, shape, strides, offset, device) -> torch.Tensor:
    """Memory up to the last element and no further, not initialised."""
    last = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    return torch.empty(last + 1, dtype=dtype, device=device).as_strided(shape, strides, offset)


class Call:
    """One call's tensors, twice: on the CPU and on the GPU."""

    def __init__(
        self,
        q_lens=(1, 3, 0, 1),
        kv_lens=(300, 40, 7, 0),
        heads=(4, 2),
        dims=(64, 64),
        dtypes=(BF16, BF16),
        page_size=16,
        layout="NHD",
        pad=0,
        offset=0,
        scales=None,
        alibi=False,
        sinks=False,
        bounds=None,
        **options,
    ) -> None:
        dtype, cache_dtype = dtypes
        tokens, batch = sum(q_lens), len(q_lens)
        pages_of = [-(-n // page_size) for n in kv_lens]
        pages = sum(pages_of) + 1
        width = max(1, *pages_of)
        order = torch.randperm(pages).tolist()
        table = torch.full((batch, width), INT_MAX, dtype=torch.int32)
        slots = []
        for b, (count, length) in enumerate(zip(pages_of, kv_lens, strict=True)):
            table[b, :count] = int32([order.pop() for _ in range(count)])
            slots += [
                int(table[b, j // page_size]) * page_size + j % page_size for j in range(length)
            ]
        self.slots = torch.tensor(slots, dtype=torch.long)
        self.twins = {"cpu": {}, DEVICE: {}}
        self.add("q", torch.randn(tokens, heads[0], dims[0]).to(dtype), pad, offset)
        for name, dim in zip(("k_cache", "v_cache"), dims, strict=True):
            rows = torch.randn(len(slots), heads[1], dim).to(cache_dtype)
            self.add_cache(name, rows, (pages, page_size, heads[1], dim), layout, pad, offset)
        self.out_dtype = BF16 if dtype in (E4M3, E5M2) else dtype
        self.out_shape = (tokens, heads[0], dims[1])
        self.add("block_table", table)
        self.add("seqused_k", int32(kv_lens))
        self.add("cu_seqlens_q", int32([*itertools.accumulate(q_lens, initial=0)]))
        if scales:
            shape = {"one": (1,), "heads": (heads[1],), "batch_heads": (batch, heads[1])}[scales]
            for name in ("k_scale", "v_scale"):
                self.add(name, torch.rand(shape) + 0.5)
        if alibi:
            self.add("alibi_slopes", torch.rand(heads[0]) / 8)
        if sinks:
            self.add("sinks", torch.randn(heads[0]))
        most_q, most_k = bounds or (max(1, *q_lens), max(1, *kv_lens))
        self.options = {"max_seqlen_q": most_q, "max_seqlen_k": most_k, "layout": layout, **options}
        sizes = {"max_seqlen_q": most_q, "max_seqlen_k": most_k}
        sizes |= {"num_q_heads": heads[0], "num_kv_heads": heads[1]}
        sizes |= {"head_dim": dims[0], "head_dim_v": dims[1]}
        sizes["batch_invariant"] = options.get("batch_invariant", False)
        self.sizes = sizes
        names = ("causal", "window", "num_splits")
        self.plan_options = {n: options[n] for n in names if n in options} | {
            "page_size": page_size
        }

    def add(self, name, values, pad=0, offset=0) -> None:
        *outer, last = values.shape
        strides = dense((*outer, last + pad)) if outer else [1]
        for device, tensors in self.twins.items():
            tensors[name] = exact(values.dtype, values.shape, strides, offset, device)
            raw(tensors[name]).copy_(raw(values))

    def add_cache(self, name, rows, shape, layout, pad, offset) -> None:
        """Only the slots that sequences use are written."""
        pages, size, heads, dim = shape
        if layout == "legacy":
            x = math.gcd(dim, 16 // rows.dtype.itemsize)
            of_keys = name == "k_cache"
            there = (pages, heads, dim // x, size, x) if of_keys else (pages, heads, dim, size)
            order = (0, 3, 1, 2, 4) if of_keys else (0, 3, 1, 2)
            rows = rows.view(-1, heads, dim // x, x) if of_keys else rows
            strides = dense(there)
        else:
            there = shape if layout == "NHD" else (pages, heads, size, dim)
            order = (0, 1, 2, 3) if layout == "NHD" else (0, 2, 1, 3)
            strides = dense((*there[:-1], dim + pad))
        for device, tensors in self.twins.items():
            cache = exact(rows.dtype, there, strides, offset, device)
            slots = self.slots.to(device)
            if device == "cpu":
                raw(cache).fill_(0xFF if rows.dtype.itemsize == 1 else -1)  # NaN
            tokens_first = raw(cache).permute(order)
            tokens_first[slots // size, slots % size] = raw(rows).to(device)
            tensors[name] = cache

    def new_out(self, device) -> torch.Tensor:
        return torch.empty(self.out_shape, dtype=self.out_dtype, device=device)

    def on(self, device, **more) -> tuple[torch.Tensor, torch.Tensor]:
        lse = torch.empty(self.out_shape[1], self.out_shape[0], device=device)
        return pagetile.paged_attention(
            **{"out": self.new_out(device), **self.twins[device], **self.options, **more},
            softmax_lse=lse, return_softmax_lse=True,
        )  # fmt: skip

    def plan(self) -> pagetile.Plan:
        lengths = {n: self.twins[DEVICE][n] for n in ("seqused_k", "cu_seqlens_q")}
        return pagetile.make_plan(**lengths, **self.sizes, **self.plan_options)

    def workspace(self, counters: int) -> torch.Tensor:
        """As small as may be. Zeroed where the counters are, and not initialised behind them."""
        size = pagetile.workspace_size(**self.sizes, device=DEVICE)
        workspace = torch.empty(size, dtype=torch.uint8, device=DEVICE)
        workspace[:counters].zero_()
        return workspace

    def change_lens(self, lens) -> torch.Tensor:
        """Of both; returns what they were."""
        before = self.twins["cpu"]["seqused_k"].clone()
        for tensors in self.twins.values():
            tensors["seqused_k"].copy_(lens)
        return before

    def check(self, *results) -> None:
        expected = self.on("cpu")
        for result in results:
            for actual, right in zip(result, expected, strict=True):
                torch.testing.assert_close(actual.cpu(), right, atol=2e-2, rtol=2e-2)


# fmt: off
KINDS = [(BF16, BF16), (FP16, FP16), (BF16, E4M3), (FP16, E5M2), (E4M3, E4M3), (E5M2, E4M3)]
DIMS = [(64, 64), (128, 128), (96, 96), (192, 192), (256, 256), (192, 128), (72, 72), (8, 8),
        (40, 136)]
FORMS = [  # of the queries and the heads
    {},
    {"heads": (1, 1), "q_lens": (1,), "kv_lens": (700,)},
    {"heads": (8, 1), "q_lens": (1, 2), "kv_lens": (513, 33)},
    {"heads": (20, 4), "q_lens": (1, 9), "kv_lens": (65, 130)},
    {"heads": (6, 6), "q_lens": (17, 33), "kv_lens": (40, 33)},
]
LAYOUTS = [
    {"layout": "NHD"}, {"layout": "HND"}, {"layout": "HND", "pad": 8}, {"layout": "NHD", "pad": 3},
    {"layout": "HND", "pad": 2, "offset": 2}, {"layout": "NHD", "offset": 1}, {"layout": "legacy"},
    {"layout": "NHD", "page_size": 1}, {"layout": "HND", "page_size": 3},
    {"layout": "NHD", "page_size": 8, "pad": 4, "offset": 4},
]
OPTIONS = [
    {},
    {"window": (40, 0)},
    {"window": (100, 3), "causal": False, "num_splits": 3},
    {"softmax_scale": -0.2, "sinks": True},
    {"softcap": 5.0, "alibi": True, "sinks": True},
    {"num_splits": 1},
    {"batch_invariant": True},
    {"pdl": True},
]
LONG = [
    {"q_lens": (1, 1), "kv_lens": (6000, 2049), "heads": (8, 2), "batch_invariant": True},
    {"q_lens": (1,) * 40, "kv_lens": (9000, *range(39)), "heads": (32, 8)},
    {"q_lens": (2, 5), "kv_lens": (4100, 2500), "window": (2100, 0), "batch_invariant": True},
    {"q_lens": (40,), "kv_lens": (2000,), "heads": (12, 2)},
    {"q_lens": (1,) * 300, "kv_lens": tuple(i % 40 for i in range(300))},
    {"q_lens": (0, 0), "kv_lens": (0, 30)},
    {"q_lens": (1,), "kv_lens": (3000,), "heads": (32, 8)},
    {"q_lens": (2,), "kv_lens": (90,), "heads": (28, 14), "window": (60, 0)},
]
# fmt: on


def calls():
    """Every kind with every head_dim; layouts, forms and options go round beside them."""
    for i, (dtypes, dims) in enumerate(itertools.product(KINDS, DIMS)):
        options = dict(OPTIONS[i % len(OPTIONS)])
        if dtypes[1] in (E4M3, E5M2):
            options["scales"] = ("one", "heads", "batch_heads")[i % 3]
        yield Call(dims=dims, dtypes=dtypes, **FORMS[i % 5], **LAYOUTS[i % 10], **options)
    for form, layout in itertools.product(FORMS, LAYOUTS):
        yield Call(**form, **layout)
    for form, options in itertools.product(FORMS[1:], OPTIONS[1:]):
        yield Call(**form, **options)
    for form in LONG:
        yield Call(**form)


LONG_QUERIES = [  # enough tiles for a prefill kernel; beside them, what the split-KV kernel does
    {"q_lens": (40, 1, 90), "kv_lens": (50, 300, 170), "heads": (16, 4)},
    {"q_lens": (200,), "kv_lens": (333,), "heads": (16, 16)},
    {"q_lens": (1, 0, 129, 33), "kv_lens": (700, 5, 129, 20), "heads": (20, 4)},
    {"q_lens": (70,) * 9, "kv_lens": (70, 90, 160, 161, 319, 320, 321, 71, 0), "heads": (14, 2)},
]


def long_calls():
    """The prefill kernels': every kind with every head_dim, layouts and options beside them."""
    for i, (dtypes, dims) in enumerate(itertools.product(KINDS, DIMS)):
        options = dict(OPTIONS[i % len(OPTIONS)])
        if dtypes[1] in (E4M3, E5M2):
            options["scales"] = ("one", "heads", "batch_heads")[i % 3]
        yield Call(dims=dims, dtypes=dtypes, **LONG_QUERIES[i % 4], **LAYOUTS[i % 10], **options)
    for form, options in itertools.product(LONG_QUERIES, OPTIONS[1:]):
        yield Call(dims=(128, 128), **form, **options)


def wrong_calls():
    """Metadata that nobody should believe: whatever comes out, nothing outside is read."""
    for options in ({}, {"window": (40, 0)}, {"batch_invariant": True}, {"num_splits": 3}):
        for name, values in (
            ("seqused_k", (INT_MAX, INT_MIN, -1, 5000)),
            ("cu_seqlens_q", (0, INT_MAX, 0, INT_MIN, 3)),
            ("cu_seqlens_q", (-5, 2, 1, 99, 4)),
        ):
            call = Call(bounds=(3, 320), **options)
            call.twins[DEVICE][name] = int32(values).to(DEVICE)
            yield call
        call = Call(bounds=(3, 320), **options)
        wild = (INT_MAX, -1, INT_MIN, call.twins[DEVICE]["k_cache"].shape[0])
        table = call.twins[DEVICE]["block_table"]
        table.copy_(
            int32(wild).to(DEVICE)[torch.arange(table.numel(), device=DEVICE) % 4].view_as(table)
        )
        yield call


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--every", type=int, default=1, metavar="N", help="each N-th call alone")
    parser.add_argument("--begin", type=int, default=0, metavar="I", help="from call I on")
    parser.add_argument("--end", type=int, metavar="I", help="up to call I")
    text = "no calls with wrong metadata: they read slots that nobody wrote"
    parser.add_argument("--right", action="store_true", help=text)
    parser.add_argument("--counters", type=int, default=49152, metavar="BYTES",
                        help="of a workspace: what is zeroed before its first use")  # fmt: skip
    parser.add_argument("--long", action="store_true", help="calls with long queries instead")
    parser.add_argument("--prefill", choices=("best", "portable", "none"), default="best",
                        help="the kernel for long queries")  # fmt: skip
    arguments = parser.parse_args()
    pagetile._C.choose_prefill(arguments.prefill)
    torch.manual_seed(0)
    attended = planned = 0
    every_call = long_calls() if arguments.long else calls()
    chosen = itertools.islice(every_call, arguments.begin, arguments.end, arguments.every)
    for i, call in enumerate(chosen):
        plan, workspace = call.plan(), call.workspace(arguments.counters)
        call.check(
            call.on(DEVICE),
            call.on(DEVICE, plan=plan, workspace=workspace),
            call.on(DEVICE, workspace=workspace),
        )
        attended, planned = attended + 3, planned + 1
        if i % 4 == 0:  # plans made for other lengths, shorter and longer
            lens = call.change_lens(call.twins["cpu"]["seqused_k"] // 2)
            call.check(call.on(DEVICE, plan=plan, workspace=workspace))
            plan = call.plan()
            call.change_lens(lens)
            call.check(call.on(DEVICE, plan=plan, workspace=workspace))
            attended, planned = attended + 2, planned + 1
    wrong = () if arguments.right else itertools.islice(wrong_calls(), 0, None, arguments.every)
    for call in wrong:
        plan, workspace = call.plan(), call.workspace(arguments.counters)
        call.on(DEVICE, plan=plan, workspace=workspace)
        call.on(DEVICE)
        attended, planned = attended + 2, planned + 1
    torch.cuda.synchronize()
    print(f"OK: {attended} calls of paged_attention, {planned} of make_plan")


if __name__ == "__main__":
    main()
