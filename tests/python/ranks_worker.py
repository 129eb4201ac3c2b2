"""Run by tests/python/test_ranks.py: `python ranks_worker.py RANKS:CASE,CASE ...` runs each case in that many processes
with gloo, forked once PyTorch is imported. Prints a line for each case that passed on every rank: RANKS."""

import datetime
import os
import sys
import tempfile
import time
import traceback

import torch
import torch._dynamo  # before the fork: each process would import it at its first call
import torch.distributed as dist

import tessera
import tessera.torch
import torch_reference as reference

BATCH, HEADS, HEADS_KV, DIM, DIM_V = 2, 8, 4, 16, 24
MASKS = ({"causal": True}, {}, {"window": (9, 4)}, {"causal": True, "window": (13, -1), "softcap": 4.0, "scale": 0.3})


def tensors(dtype, *shape, heads=HEADS, heads_kv=HEADS_KV, seed=0):
    """q, k, v and the cotangents of o and lse, the same on every rank."""
    of = lambda n, h, d: reference.random(*shape, h, d, dtype=dtype, seed=seed + n, requires_grad=False)  # noqa: E731
    lse_shape = (shape[0], heads, shape[1]) if len(shape) == 2 else (heads, shape[0])
    d_lse = reference.random(*lse_shape, seed=seed + 5, requires_grad=False)
    return of(1, heads, DIM), of(2, heads_kv, DIM), of(3, heads_kv, DIM_V), of(4, heads, DIM_V), d_lse


def results(attend, q, k, v, d_o, d_lse, sink=None):
    """o, lse and the gradients of q, k, v (and the sink), as one list."""
    leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    if sink is not None:
        leaves.append(sink.detach().clone().requires_grad_())
    o, lse = attend(*leaves)
    loss = (o * d_o.to(o.dtype)).sum() + (lse * d_lse.to(lse.dtype)).sum()
    loss.backward()
    return [o.detach(), lse.detach(), *(leaf.grad for leaf in leaves)]


def sharded(parallel, options, inputs, sink=None, cu_seqlens=None):
    """The same by all ranks: results put together again."""
    rows = 0 if cu_seqlens is not None else 1
    shard = lambda t, dim: parallel.shard(t, dim, cu_seqlens)  # noqa: E731
    q, k, v, d_o = (shard(t, rows) for t in inputs[:4])
    d_lse = shard(inputs[4], inputs[4].dim() - 1)

    def attend(q, k, v, sink=None):
        return parallel.attention(q, k, v, cu_seqlens=cu_seqlens, return_lse=True, sink=sink, **options)

    o, lse, d_q, d_k, d_v, *d_sink = results(attend, q, k, v, d_o, d_lse, sink)
    whole = [parallel.unshard(t, rows, cu_seqlens) for t in (o, d_q, d_k, d_v)]
    for gradient in d_sink:
        dist.all_reduce(gradient)
    return [whole[0], parallel.unshard(lse, lse.dim() - 1, cu_seqlens), *whole[1:], *d_sink]


NAMES = ("o", "lse", "d_q", "d_k", "d_v", "d_sink")


def compare(what, ours, plain, exact):
    for name, a, b, c in zip(NAMES, ours, plain, exact):
        reference.check(f"{what}: {name}", a, b, c)


def strategies(ranks, heads=HEADS, heads_kv=HEADS_KV):
    yield "auto", 0
    yield "ring", 0
    yield "all_gather", 0
    if heads % ranks == 0:
        yield "all_to_all", 0
    if ranks == 4:
        yield "mesh", 2
        yield "mesh", 0


def exact_and_plain(inputs, dtype, options, sink=None):
    of = lambda to: results(  # noqa: E731
        lambda q, k, v, sink=None: reference.attention(q, k, v, sink=sink, **options),
        *(t.to(to) for t in inputs), sink=None if sink is None else sink.to(to),
    )  # fmt: skip
    return of(torch.float64), of(dtype)


# ---- cases ----------------------------------------------------------------------------------------------------------


def dense(ranks):
    """Each strategy, layout and mask against float64, as one process is judged."""
    length = 2 * ranks * 6
    for dtype in (torch.float32, torch.bfloat16):
        for n, options in enumerate(MASKS):
            inputs = tensors(dtype, BATCH if n % 2 else 1, length, seed=n)
            exact, plain = exact_and_plain(inputs, dtype, options)
            for strategy, head_ranks in strategies(ranks):
                for layout in ("zig_zag", "contiguous") if dtype == torch.float32 else ("zig_zag",):
                    parallel = tessera.torch.context_parallel(layout=layout, strategy=strategy, head_ranks=head_ranks)
                    ours = sharded(parallel, options, inputs)
                    compare(f"{ranks} ranks, {strategy}, {layout}, {dtype}, {options}", ours, plain, exact)


def few_kv_heads(ranks):
    """One KV head, which several ranks read, and as many query heads as ranks."""
    inputs = tensors(torch.float32, 2, 4 * ranks, heads=ranks, heads_kv=1)
    exact, plain = exact_and_plain(inputs, torch.float32, {"causal": True})
    for strategy, head_ranks in strategies(ranks, ranks, 1):
        parallel = tessera.torch.context_parallel(strategy=strategy, head_ranks=head_ranks)
        compare(f"{ranks} ranks, {strategy}", sharded(parallel, {"causal": True}, inputs), plain, exact)


def sinks(ranks):
    sink = reference.random(HEADS, seed=9, requires_grad=False)
    for dtype in (torch.float32, torch.bfloat16):
        inputs = tensors(dtype, 1, 4 * ranks)
        exact, plain = exact_and_plain(inputs, dtype, {"causal": True}, sink)
        for strategy, head_ranks in strategies(ranks):
            parallel = tessera.torch.context_parallel(strategy=strategy, head_ranks=head_ranks)
            compare(
                f"{ranks} ranks, {strategy}, {dtype}", sharded(parallel, {"causal": True}, inputs, sink), plain, exact
            )


def packed(ranks):
    """Sequences of a packed batch, cut where chunks end, some of them empty or of one row."""
    lengths = [37, 1, 0, 80, 5, 22]
    lengths.append(-sum(lengths) % (2 * ranks) + 2 * ranks)
    cu_seqlens = [0]
    for length in lengths:
        cu_seqlens.append(cu_seqlens[-1] + length)
    inputs = tensors(torch.float32, cu_seqlens[-1])

    def by_sequence(dtype, options):
        """Each sequence for itself, as one dense call."""

        def attend(q, k, v):
            parts = [
                reference.attention(*(t[None, a:b] for t in (q, k, v)), **options)
                for a, b in zip(cu_seqlens, cu_seqlens[1:])
                if b > a
            ]
            return torch.cat([o[0] for o, _ in parts]), torch.cat([lse[0] for _, lse in parts], 1)

        return results(attend, *(t.to(dtype) for t in inputs))

    for options in ({"causal": True}, {}, {"window": (6, 2)}):
        exact, plain = by_sequence(torch.float64, options), by_sequence(torch.float32, options)
        for strategy, head_ranks in strategies(ranks):
            for layout in ("planned", "zig_zag"):
                parallel = tessera.torch.context_parallel(
                    layout=layout, strategy=strategy, head_ranks=head_ranks, chunk_rows=8
                )
                ours = sharded(parallel, options, inputs, cu_seqlens=torch.tensor(cu_seqlens, dtype=torch.int32))
                compare(f"{ranks} ranks, {strategy}, {layout}, {options}", ours, plain, exact)
                positions = parallel.unshard(parallel.position_ids(cu_seqlens=cu_seqlens), 0, cu_seqlens)
                assert positions.tolist() == [i for length in lengths for i in range(length)]


def positional(ranks):
    """ALiBi and dropout mean in every chunk what they mean in the whole: the result is that of one process."""
    length = 64 * ranks
    slopes = torch.linspace(0.05, 0.6, HEADS)
    dropout = {"dropout_p": 0.3, "dropout_seed": 12, "dropout_offset": 5}
    inputs = tensors(torch.float32, 2, length, seed=4)
    for options in (
        {"alibi_slopes": slopes, "causal": True}, {"alibi_slopes": slopes, "window": (70, 9)},
        {**dropout, "causal": True}, {**dropout, "alibi_slopes": slopes, "window": (37, 0)},
    ):  # fmt: skip
        alone = results(lambda q, k, v: tessera.torch.attention(q, k, v, return_lse=True, **options), *inputs)
        for strategy, head_ranks in strategies(ranks):
            parallel = tessera.torch.context_parallel(strategy=strategy, head_ranks=head_ranks)
            for name, ours, one in zip(NAMES, sharded(parallel, options, inputs), alone):
                text = f"{strategy}, {options}, {name}"
                torch.testing.assert_close(ours, one, rtol=1e-4, atol=1e-4, msg=lambda m, text=text: f"{text}: {m}")


def programs(ranks):
    """A score program, a bias and a mask mean in every chunk what they mean in the whole: the result is that of one
    process, and the gradients of bias and of a program's tensors are the sum over the ranks; beside other options, and
    of a packed batch."""
    length = 64 * ranks
    random = lambda *shape, seed: reference.random(*shape, seed=seed, requires_grad=False)  # noqa: E731
    table, gain, weights = random(HEADS, 2 * length, seed=1), torch.tensor(0.7), random(length, 3, seed=3)
    document = torch.arange(length) // 13
    longest = 2 * length // 3
    cu_seqlens = torch.tensor([0, longest, length], dtype=torch.int32)
    whole, packed = (tensors(torch.float32, *shape, seed=6) for shape in ((2, length), (length,)))

    def mask(b, h, i, j):
        return (j <= i) & (document[i] == document[j])

    some = random(2, 1, length, length, seed=5) > -0.3
    some[:, :, 5::11] = False  # rows that see no key

    cases = (
        (whole, {}, {"score_mod": "s * gain[] + table[h, i - j + len_k]", "captured": {"gain": gain, "table": table}}),
        (whole, {"causal": True, "sink": random(HEADS, seed=4)},
         {"score_mod": "s + table[h, i] * h_kv + 0.1 * b", "captured": {"table": table}}),
        (whole, {"sink": random(HEADS, seed=4)}, {"mask_mod": "i % 7 != 3 && (i + j) % 5 != h"}),  # some rows see none
        (whole, {"window": (40, 0), "alibi_slopes": torch.linspace(0.05, 0.6, HEADS), "softcap": 9.0},
         {"score_mod": "s + w[i, b] * w[j, 2]", "mask_mod": mask, "captured": {"w": weights}}),
        (whole, {"dropout_p": 0.3, "dropout_seed": 12}, {"mask_mod": mask}),
        (packed, {}, {"score_mod": "s + w[i, b] * w[j, 2] + gain[] * (q_pos - j)", "mask_mod": "j <= q_pos + b",
                      "captured": {"w": weights, "gain": 0.01 * gain}}),
        (whole, {"causal": True, "sink": random(HEADS, seed=4), "mask": some},
         {"bias": random(2, HEADS, length, length, seed=6)}),
        (whole, {"window": (50, 20), "mask": some[0, 0, :1]},
         {"bias": random(HEADS, 1, length, seed=7), "score_mod": "s * gain[]", "captured": {"gain": gain}}),
        (packed, {"causal": True, "alibi_slopes": torch.linspace(0.05, 0.6, HEADS), "window": (90, 0)},
         {"score_mod": "s + w[i, 0] * w[j, 2] + gain[] * (len_q - j)",
          "captured": {"w": weights, "gain": 0.01 * gain}}),
        (packed, {"causal": True, "mask": some[0, :, :longest, :longest]},
         {"bias": random(2, 1, longest, longest, seed=8)}),
    )  # fmt: skip
    for inputs, others, program in cases:
        others = dict(others)
        shared = {**program.get("captured", {}), **({"bias": program["bias"]} if "bias" in program else {})}
        sink, cu = others.pop("sink", None), cu_seqlens if inputs is packed else None
        of_one = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": longest, "max_seqlen_k": longest}
        of_one = {} if cu is None else of_one

        def gradients(attend, *arguments, **more):
            """The results, then the gradients of the program's tensors."""
            leaves = {n: x.clone().requires_grad_() for n, x in shared.items()}
            given = {**others, **program, **({"bias": leaves["bias"]} if "bias" in leaves else {})}
            if "captured" in given:
                given["captured"] = {n: leaves[n] for n in given["captured"]}
            return [*attend(given, *arguments, **more), *(x.grad for x in leaves.values())]

        def by_one(options):
            def attend(q, k, v, sink=None):
                return tessera.torch.attention(q, k, v, sink=sink, return_lse=True, **of_one, **options)

            return results(attend, *inputs, sink=sink)

        def by_all(options, parallel):
            return sharded(parallel, options, inputs, sink, None if cu is None else cu.tolist())

        alone = gradients(by_one)
        for strategy, head_ranks in strategies(ranks):
            parallel = tessera.torch.context_parallel(
                layout="zig_zag" if cu is None else "planned", strategy=strategy, head_ranks=head_ranks, chunk_rows=8
            )
            ours = gradients(by_all, parallel)
            for gradient in ours[len(ours) - len(shared) :]:
                dist.all_reduce(gradient)
            for n, (a, b) in enumerate(zip(ours, alone)):
                text = f"{strategy}, {list(others)}, {program.keys()}, result {n}"
                torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-4, msg=lambda m, text=text: f"{text}: {m}")


def repeated(ranks):
    """The same bits every time, however late a rank is."""
    inputs = tensors(torch.float32, 1, 8 * ranks)
    for strategy, head_ranks in strategies(ranks):
        parallel = tessera.torch.context_parallel(strategy=strategy, head_ranks=head_ranks)
        first = sharded(parallel, {"causal": True}, inputs)
        for late in range(2):
            if dist.get_rank() == late:
                time.sleep(0.05)
            again = sharded(parallel, {"causal": True}, inputs)
            assert all(torch.equal(a, b) for a, b in zip(first, again)), strategy


def flat_error(ranks):
    """The error equals that of one process for any number of ranks, also if scores share a large number: 16-bit partial
    results and gradients travel and add up in float32, and are rounded once."""
    for dtype, shared in ((torch.float32, 0.0), (torch.float32, 64.0), (torch.bfloat16, 0.0), (torch.float16, 0.0)):
        q, k, *others = tensors(dtype, 1, 256, seed=3)
        with torch.no_grad():
            if shared:
                q[..., 0] = k[..., 0] = shared
        inputs = (q, k, *others)
        exact, _ = exact_and_plain(inputs, dtype, {"causal": True})
        alone = results(lambda q, k, v: tessera.torch.attention(q, k, v, causal=True, return_lse=True), *inputs)

        def rms(values):
            return [(a.double() - b).square().mean().sqrt().item() for a, b in zip(values, exact)]

        for strategy, head_ranks in strategies(ranks):
            parallel = tessera.torch.context_parallel(strategy=strategy, head_ranks=head_ranks)
            for name, ours, one in zip(NAMES, rms(sharded(parallel, {"causal": True}, inputs)), rms(alone)):
                text = f"{strategy}, {dtype}, {shared}: {name} has {ours / one:.3f} times one process's error"
                # A sum in float32 is itself rounded at each step; rounding to 16 bits covers that.
                assert ours <= (1.1 if dtype == torch.float32 or name == "lse" else 1.02) * one, text


def in_models(ranks):
    """Activation checkpointing walks the forward list again in the backward pass; a compiled program calls it between
    its graphs; a mesh of two dimensions gives the groups."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.utils.checkpoint import checkpoint

    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("ring", "heads"))
    parallel = tessera.torch.context_parallel(mesh)
    assert parallel.ranks == ranks
    q, k, v, d_o, _ = (
        parallel.shard(t, 1) for t in tensors(torch.float32, 1, 4 * ranks)[:4] + (torch.zeros(1, 4 * ranks),)
    )
    assert "mesh of 2" in parallel.plan(q, k, v, causal=True) or ranks == 2
    gradients = []
    for keep in (True, False):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        attend = lambda q, k, v: parallel.attention(q, k, v, causal=True)  # noqa: E731
        o = attend(*leaves) if keep else checkpoint(attend, *leaves, use_reentrant=False)
        gradients.append(torch.autograd.grad((o * d_o).sum(), leaves))
    attend = torch.compile(lambda q, k, v: 2 * parallel.attention(q, 1 * k, v, causal=True), backend="eager")
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    gradients.append([d / 2 for d in torch.autograd.grad((attend(*leaves) * d_o).sum(), leaves)])
    for others in gradients[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradients[0], others))


def small_model(ranks):
    """A small decoder of Transformers' with a window in every second layer: the first loss on all ranks is that on one,
    to float32's last digits, and so are the gradients."""
    import copy

    import tessera.transformers
    import transformers

    torch.manual_seed(0)
    config = transformers.Gemma2Config(
        vocab_size=61, num_hidden_layers=2, hidden_size=48, intermediate_size=64, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, query_pre_attn_scalar=16, sliding_window=11, attn_logit_softcapping=2.0,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    alone = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="tessera")
    tokens = torch.randint(1, 61, (2, 8 * ranks + 1), generator=torch.Generator().manual_seed(1))
    inputs, labels = tokens[:, :-1], tokens[:, 1:].contiguous()

    def loss_of(model, inputs, labels, **more):
        return model(inputs, labels=labels, shift_labels=labels, use_cache=False, **more).loss

    one = loss_of(alone, inputs, labels)
    one.backward()
    for strategy in ("ring", "all_to_all" if ranks == 2 else "mesh"):
        model = copy.deepcopy(alone)
        model.zero_grad()
        parallel = tessera.torch.context_parallel(strategy=strategy)
        model.set_attn_implementation(tessera.transformers.context_parallel(parallel))
        positions = parallel.position_ids(inputs.shape[1])[None]
        mine = loss_of(model, parallel.shard(inputs), parallel.shard(labels), position_ids=positions)
        mine.backward()
        mean = mine.detach().clone()
        dist.all_reduce(mean)
        assert abs(mean.item() / ranks - one.item()) <= 4 * torch.finfo(torch.float32).eps * one.item(), (
            mean / ranks,
            one,
        )
        for (name, ours), theirs in zip(model.named_parameters(), alone.parameters()):
            gradient = ours.grad / ranks
            dist.all_reduce(gradient)
            assert (gradient - theirs.grad).abs().max() <= 1e-5 * theirs.grad.abs().max() + 1e-8, name
    try:
        model(parallel.shard(inputs), attention_mask=torch.zeros(2, 8), use_cache=False)
    except ValueError as error:
        assert "attention_mask: with padding" in str(error)
    else:
        raise AssertionError("not refused")


def megatron(ranks):
    """megatron-core's core attention with context parallelism: its rows are those of zig_zag, and the result is that of
    one process."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.utils import get_batch_on_this_cp_rank

    import tessera.megatron

    parallel_state.initialize_model_parallel(context_parallel_size=ranks)
    groups = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
    inputs = tensors(torch.float32, 2, 4 * ranks)
    settings = dict(num_layers=1, hidden_size=HEADS * DIM, num_attention_heads=HEADS, num_query_groups=HEADS_KV)
    exact, plain = exact_and_plain(inputs, torch.float32, {"causal": True})
    for strategy in (None, "p2p", "a2a", "all_gather"):
        config = TransformerConfig(**settings, attention_dropout=0.0, context_parallel_size=ranks)
        layer = tessera.megatron.TesseraAttention(
            config, 1, AttnMaskType.causal, "self", cp_comm_type=strategy, pg_collection=groups
        )
        mine = get_batch_on_this_cp_rank({str(n): t for n, t in enumerate(inputs[:4])}, groups.cp)
        q, k, v, d_o = (t.transpose(0, 1) for t in mine.values())
        leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
        o = layer(*leaves, None)
        gradients = torch.autograd.grad(o, leaves, d_o.flatten(2))
        o = o.unflatten(2, (HEADS, DIM_V))
        whole = [layer.parallel.unshard(t.detach().transpose(0, 1)) for t in (o, *gradients)]
        reference.check(f"{strategy}: o", whole[0], plain[0], exact[0])
        alone = [t.clone().requires_grad_() for t in inputs[:3]]
        by_one = torch.autograd.grad(tessera.torch.attention(*alone, causal=True), alone, inputs[3])
        for ours, theirs in zip(whole[1:], by_one):
            assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max(), strategy
    try:
        layer(*leaves, torch.zeros(1, 1, 4, 4 * ranks, dtype=torch.bool))
    except tessera.Error as error:
        assert "attention_mask: given with context_parallel_size" in str(error)
    else:
        raise AssertionError("not refused")
    parallel_state.destroy_model_parallel()


def refused(ranks):
    """In words, by name, and on every rank alike."""
    parallel = tessera.torch.context_parallel()
    q, k, v, *_ = tensors(torch.float32, 1, 8)  # of this rank alone

    def complains(words, **options):
        try:
            parallel.attention(q, k, v, **options)
        except tessera.Error as error:
            assert words in str(error), error
        else:
            raise AssertionError(f"{words}: not refused")

    complains("block_mask: not accepted by context_parallel yet", block_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool))
    complains(f"bias: shape [8, {8 * ranks}], accepted [1|1, {HEADS}|1, {8 * ranks}|1,", bias=torch.ones(8, 8 * ranks))
    complains("captured: given without score_mod and mask_mod", captured={"c": 1.0})
    complains("score, column 5: 'c' is no name here", score_mod="s + c")
    complains("dropout_seed: absent with dropout_p", dropout_p=0.1)
    complains("dropout_p: with a chunk that begins at row 4", dropout_p=0.1, dropout_seed=1)
    complains("q: rank 4, accepted [T / N, Hq, D] with cu_seqlens", cu_seqlens=[0, 5])
    q, k, v = (t[0] for t in (q, k, v))
    complains("cu_seqlens: ends at 5", cu_seqlens=[0, 5])
    complains("cu_seqlens: [1, 5]", cu_seqlens=[1, 5])
    q, k, v = (t[None, :3] for t in (q, k, v))
    complains("do not divide into the")
    parallel = tessera.torch.context_parallel(strategy="all_to_all")
    q, k, v, *_ = tensors(torch.float32, 1, 8, heads=3 * ranks + 1, heads_kv=1)
    complains("do not divide over")
    for wrong in ({"layout": "star"}, {"strategy": "star"}, {"link_gbps": -1.0}, {"width": 1}):
        try:
            tessera.torch.context_parallel(**wrong)
        except tessera.Error as error:
            assert next(iter(wrong)) in str(error)
        else:
            raise AssertionError(f"{wrong}: not refused")


def disagreement(ranks):
    """Ranks that plan different problems are told, and none of them waits."""
    parallel = tessera.torch.context_parallel()
    q, k, v, *_ = tensors(torch.float32, 1, 8)
    for options in ({"causal": dist.get_rank() == 0}, {"score_mod": f"s * {1 + dist.get_rank()}"}):
        try:
            parallel.attention(q, k, v, **options)
        except tessera.Error as error:
            assert "is another than that of rank" in str(error), error
        else:
            raise AssertionError(f"{options}: not refused")


def lost_peer(ranks):
    """A rank that does not come: the others get an error that names the step, and do not wait forever."""
    parallel = tessera.torch.context_parallel(strategy="ring")
    q, k, v, *_ = tensors(torch.float32, 1, 8)
    parallel.attention(q, k, v)  # the problem is known to all
    if dist.get_rank() == 1:
        return
    try:
        parallel.attention(q, k, v)
    except RuntimeError as error:
        assert "step 1 of" in str(error) and "rank 1" in str(error), error
    else:
        raise AssertionError("nothing was said")


def run(rank, ranks, names, store):
    torch.set_num_threads(1)
    seconds = 2 if "lost_peer" in names else 120
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=datetime.timedelta(seconds=seconds)
    )
    for name in names:
        globals()[name](ranks)


def launch(ranks, names):
    """Whether all held, on every rank."""
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(ranks):
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    run(rank, ranks, names, f"{folder}/store")
                    status = 0
                except BaseException:
                    sys.stderr.write(f"rank {rank} of {ranks}:\n{traceback.format_exc()}\n")
                sys.stderr.flush()
                os._exit(status)
            children.append(child)
        return all([os.waitpid(child, 0)[1] == 0 for child in children])


def main():
    if "small_model" in str(sys.argv):
        try:
            import tessera.transformers  # noqa: F401  before the fork, as it takes long
        except ImportError:  # no Transformers, or one that this does not suit
            globals()["small_model"] = lambda ranks: None
    for argument in sys.argv[1:]:
        ranks, _, names = argument.partition(":")
        if launch(int(ranks), names.split(",")):
            print(ranks, flush=True)


if __name__ == "__main__":
    main()
