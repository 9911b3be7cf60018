"""EAGLE-3's training-time test against an independent dense implementation: losses and all gradients."""

import dataclasses
import itertools
import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from torchspec.attention import local_plan
from torchspec.config.schema import Parallel
from torchspec.distributed.fsdp import shard
from torchspec.distributed.mesh import Mesh
from torchspec.drafts.base import FSDP_METHODS
from torchspec.drafts.eagle3 import blocks as blocks_module
from torchspec.drafts.eagle3 import model as eagle3
from torchspec.drafts.eagle3.blocks import TrainingTimeTest, make_blocks
from torchspec.drafts.eagle3.model import Eagle3
from torchspec.drafts.eagle3.spec import Eagle3Spec, entering_layer_ids, output_layer_ids
from torchspec.drafts.trainer import DraftTrainer
from torchspec.errors import ConfigError
from torchspec.records import Batch, Taps

SPEC = Eagle3Spec(
    vocab_size=13,
    draft_vocab_size=13,
    dim=8,
    heads=4,
    kv_heads=2,
    head_dim=6,
    ffn_dim=10,
    norm_eps=1e-5,
    rope_theta=100.0,
    max_len=64,
    aux_layers=(1, 2, 3),
    fc_norm=True,
    norm_output=True,
)
DECAY = 0.8
# A prompt and a response, a lone token, one shorter than K, a hole (a tool's tokens), generated throughout.
DOCUMENTS = ["ppgggggggggg", "p", "pgg", "ppgggpgggggg", "gggg"]


def make_batch(documents):
    """Documents as strings, a letter per token: p given, g generated. Only what the draft reads is filled."""
    lengths = torch.tensor([0, *map(len, documents)])
    chain = [
        len(text[i + 2 :]) - len(text[i + 2 :].lstrip("g")) for text in documents for i in range(len(text))
    ]
    zeros = torch.zeros(len(chain))
    return Batch(
        tokens=zeros.long(),
        positions=torch.tensor([i for text in documents for i in range(len(text))], dtype=torch.int64),
        targets=zeros.long(),
        target_mask=zeros.bool(),
        rollout_logprobs=zeros,
        advantages=zeros,
        chain=torch.tensor(chain, dtype=torch.int64),
        cu_seqlens=lengths.cumsum(0).to(torch.int32),
    )


def make_taps(rows, dim=SPEC.dim, seed=1):
    generator = torch.Generator().manual_seed(seed)
    embeds, *aux, final = torch.randn(5, rows, dim, generator=generator, dtype=torch.float64)
    return Taps(embeds=embeds, aux=tuple(aux), final=final)


def make_draft(spec=SPEC, seed=0):
    """In fp64, with weights large enough that every part of the model matters."""
    torch.manual_seed(seed)
    reduced = spec.draft_vocab_size < spec.vocab_size
    ids = torch.arange(spec.vocab_size)[:: spec.vocab_size // spec.draft_vocab_size][: spec.draft_vocab_size]
    draft = Eagle3(spec, ids - torch.arange(len(ids)) if reduced else None).double()
    with torch.no_grad():
        for weight in draft.parameters():
            weight.copy_(torch.randn_like(weight) * 0.4 + (weight.dim() == 1))
    return draft


def head_weight(seed=2):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SPEC.vocab_size, SPEC.dim, generator=generator, dtype=torch.float64)


# ---------------------------------------------------------------------------- the dense implementation
def rms(x, weight, eps):
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def dense_rotate(x, positions, spec):
    """As a rotation of complex numbers (x_j, x_{j + R/2}) by position * theta^(-2j / R); the rest of a head stays."""
    half = int(spec.head_dim * spec.partial_rotary_factor) // 2
    rotated = 2 * half
    speeds = torch.tensor([spec.rope_theta ** (-j / half) for j in range(half)], dtype=torch.float64)
    if spec.rope_scaling:
        speeds = dense_llama3(speeds, spec.rope_scaling)
    a, b = x[..., : rotated // 2], x[..., rotated // 2 : rotated]
    turned = torch.complex(a, b) * torch.exp(1j * positions[:, None, None] * speeds)
    return torch.cat([turned.real, turned.imag, x[..., rotated:]], dim=-1)


def dense_llama3(speeds, scaling):
    """Llama 3.1's scaling in fp64, number by number."""
    factor, low, high, length = scaling.values()
    found = []
    for speed in speeds.tolist():
        wave = 2 * math.pi / speed
        smooth = (length / wave - low) / (high - low)
        mixed = (1 - smooth) * speed / factor + smooth * speed
        found.append(speed if wave < length / high else speed / factor if wave > length / low else mixed)
    return torch.tensor(found, dtype=torch.float64)


def dense_valid(documents, passes):
    """(pass, row, label row) of every trained row, by the definition."""
    start = 0
    for text in documents:
        for d, i in itertools.product(range(1, passes + 1), range(len(text))):
            drafted = range(i + 2, i + d + 2)
            if all(j < len(text) and text[j] == "g" for j in drafted):
                yield d, start + i, start + i + d + 1
        start += len(text)


def dense_mask(documents, passes, window=None):
    """Keys of all passes side by side; the staircase by the definition, [T, T * passes].

    The query of row i in the last pass stands at i + passes - 1, the key of row j in pass p at j + p - 1.
    """
    window = window or 10**6
    document = [n for n, text in enumerate(documents) for _ in text]
    rows = range(len(document))
    return torch.tensor(
        [
            [
                document[i] == document[j]
                and (j <= i if p == 1 else j == i)
                and (i + passes - 1) - (j + p - 1) < window
                for p in range(1, passes + 1)
                for j in rows
            ]
            for i in rows
        ]
    )


def dense_losses(draft, documents, taps, head, passes, denominator):
    spec, w = draft.spec, dict(draft.named_parameters())
    positions = torch.tensor([i for text in documents for i in range(len(text))])
    aux = taps.aux
    if spec.fc_norm:
        aux = [rms(x, w[f"fc_norm.{i}.weight"], spec.norm_eps) for i, x in enumerate(aux)]
    hidden = torch.cat(list(aux), -1) @ w["fc.weight"].T
    teacher_head = head
    if spec.draft_vocab_size < spec.vocab_size:
        teacher_head = head[draft.d2t + torch.arange(spec.draft_vocab_size)]
    group = spec.heads // spec.kv_heads
    keys, values, logits = [], [], []
    for d in range(1, passes + 1):
        embeds = torch.cat([taps.embeds[d:], taps.embeds[:d]])  # wraps round: those rows must not matter
        x = torch.cat(
            [
                rms(embeds, w["midlayer.input_layernorm.weight"], spec.norm_eps),
                rms(hidden, w["midlayer.hidden_norm.weight"], spec.norm_eps),
            ],
            dim=-1,
        )
        q, k, v = (
            (x @ w[f"midlayer.self_attn.{n}_proj.weight"].T).view(len(x), -1, spec.head_dim) for n in "qkv"
        )
        q = dense_rotate(q, positions + d - 1, spec)
        keys.append(dense_rotate(k, positions + d - 1, spec).repeat_interleave(group, 1))
        values.append(v.repeat_interleave(group, 1))
        scores = torch.einsum("thd,shd->hts", q, torch.cat(keys)) / spec.head_dim**0.5
        scores = scores.masked_fill(~dense_mask(documents, d, spec.window), -torch.inf)
        out = torch.einsum("hts,shd->thd", scores.softmax(-1), torch.cat(values)).flatten(1)
        if spec.norm_before_residual:
            hidden = rms(hidden, w["midlayer.hidden_norm.weight"], spec.norm_eps)
        hidden = hidden + out @ w["midlayer.self_attn.o_proj.weight"].T
        y = rms(hidden, w["midlayer.post_attention_layernorm.weight"], spec.norm_eps)
        gate, up = (y @ w[f"midlayer.mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        hidden = hidden + (gate * gate.sigmoid() * up) @ w["midlayer.mlp.down_proj.weight"].T
        normed = rms(hidden, w["norm.weight"], spec.norm_eps)
        logits.append(normed @ w["lm_head.weight"].T)
        hidden = normed if spec.norm_output else hidden

    loss, sums = torch.zeros((), dtype=torch.float64), torch.zeros(4, passes, dtype=torch.float64)
    for d, row, label in dense_valid(documents, passes):
        teacher = (teacher_head @ taps.final[label - 1]).softmax(-1)  # what the policy says about the label
        student = logits[d - 1][row].log_softmax(-1)
        ce = -(teacher * student).sum()
        loss = loss + DECAY ** (d - 1) * ce / denominator
        agree = float(teacher.argmax() == student.argmax())
        overlap = torch.minimum(teacher, student.exp()).sum().item()
        sums[:, d - 1] += torch.tensor([1.0, ce.item(), overlap, agree], dtype=torch.float64)
    return loss, sums


# ------------------------------------------------------------------------------------------ the tests
def counts(batch, passes):
    return TrainingTimeTest(passes=passes, pass_decay=DECAY, loss_rows=1).counts(batch)


def table(stats):
    """[4, K]: scored rows, cross-entropy, overlap and top-1 agreement of each pass."""
    return torch.stack([stats.counts, *(stats.sums[name] for name in ("ce", "overlap", "top1"))])


def run(draft, documents, taps, head, passes, loss_rows=5, row_block=0):
    """Our loss, sums and gradients (by name)."""
    objective = TrainingTimeTest(passes=passes, pass_decay=DECAY, loss_rows=loss_rows, row_block=row_block)
    trainer = DraftTrainer(draft, objective)
    batch = make_batch(documents)
    draft.zero_grad()
    head = head if draft.teacher_rows is None else head[draft.teacher_rows]
    stats = trainer.backward(batch, taps, head, trainer.denominator(trainer.counts(batch)))
    return stats, {name: p.grad.clone() for name, p in draft.named_parameters()}


def assert_equals_dense(spec, passes, documents=DOCUMENTS, tol=1e-10):
    draft, head = make_draft(spec), head_weight()
    taps = make_taps(sum(map(len, documents)))
    stats, grads = run(draft, documents, taps, head, passes)
    denominator = max(sum(DECAY ** (d - 1) for d, _, _ in dense_valid(documents, passes)), 1.0)
    loss, sums = dense_losses(draft, documents, taps, head, passes, denominator)
    torch.testing.assert_close(stats.loss, loss.detach(), rtol=tol, atol=tol)
    torch.testing.assert_close(table(stats), sums, rtol=tol, atol=tol)
    names = list(grads)
    expected = torch.autograd.grad(loss, list(draft.parameters()))
    for name, grad in zip(names, expected, strict=True):
        assert grad.abs().max() > 1e-6, name
        torch.testing.assert_close(grads[name], grad, rtol=tol, atol=tol, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("passes", [1, 2, 4, 7])
def test_equals_dense_staircase(passes, kv_heads):
    assert_equals_dense(dataclasses.replace(SPEC, kv_heads=kv_heads), passes)


@pytest.mark.parametrize("draft_vocab_size", [13, 5])
@pytest.mark.parametrize("norm_output", [False, True])
@pytest.mark.parametrize("fc_norm", [False, True])
def test_equals_dense_in_every_variant(fc_norm, norm_output, draft_vocab_size):
    variant = dict(fc_norm=fc_norm, norm_output=norm_output, draft_vocab_size=draft_vocab_size)
    assert_equals_dense(dataclasses.replace(SPEC, **variant), passes=4)


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16.0,
}


@pytest.mark.parametrize(
    "variant",
    [
        {"norm_before_residual": True},
        {"partial_rotary_factor": 1 / 3},
        {"partial_rotary_factor": 0.5, "head_dim": 8},
        {"rope_scaling": LLAMA3, "head_dim": 16},
        {"rope_scaling": LLAMA3, "head_dim": 16, "partial_rotary_factor": 0.5, "norm_before_residual": True},
        {"head_dim": 2, "heads": 8, "kv_heads": 4},
        {"window": 2},
        {"window": 3},
        {"window": 5, "norm_before_residual": True},
        {"window": 100},
    ],
    ids=lambda v: ", ".join(v),
)
def test_equals_dense_in_what_other_tools_train(variant):
    assert_equals_dense(dataclasses.replace(SPEC, **variant), passes=4)


def drop_a_diagonal(q, trunk, branch_k, branch_v, cu, *place):
    return TRUNK_ATTENTION(q, trunk, branch_k[1:], branch_v[1:], cu, *place)


def ignore_documents(q, trunk, branch_k, branch_v, cu, *place):
    return TRUNK_ATTENTION(q, trunk, branch_k, branch_v, cu[[0, -1]], *place)


def rope_without_the_pass(x, positions, theta):
    return ROTATE(x, positions - positions.min(), theta)


def rope_of_queries_one_too_far(x, positions, theta):
    return ROTATE(x, positions + (x.shape[1] == SPEC.heads), theta)


def swap_two_anchors(batch, plan, passes, row_block):
    blocks = MAKE_BLOCKS(batch, plan, passes, row_block)
    blocks[0].rows[:2] = blocks[0].rows[:2].flip(0)
    return blocks


def score_a_chain_beyond_its_end(batch, plan, passes, row_block):
    longer = dataclasses.replace(batch, chain=batch.chain + (batch.chain > 0))
    return MAKE_BLOCKS(longer, plan, passes, row_block)


def embeds_one_too_far(batch, plan, passes, row_block):
    further = MAKE_BLOCKS(batch, plan, passes + 1, row_block)
    return [
        dataclasses.replace(b, newest=b.newest[1:], scored=b.scored[:-1], teacher=b.teacher[:-1])
        for b in further
    ]


TRUNK_ATTENTION, ROTATE, MAKE_BLOCKS = eagle3.trunk_attention, eagle3.rotate, blocks_module.make_blocks
MUTATIONS = [
    (eagle3, "trunk_attention", drop_a_diagonal),
    (eagle3, "trunk_attention", ignore_documents),
    (eagle3, "rotate", rope_without_the_pass),
    (eagle3, "rotate", rope_of_queries_one_too_far),
    (blocks_module, "make_blocks", swap_two_anchors),
    (blocks_module, "make_blocks", score_a_chain_beyond_its_end),
    (blocks_module, "make_blocks", embeds_one_too_far),
]


@pytest.mark.parametrize(("module", "name", "mutant"), MUTATIONS, ids=[m.__name__ for *_, m in MUTATIONS])
def test_the_comparison_catches(module, name, mutant, monkeypatch):
    monkeypatch.setattr(module, name, mutant)
    with pytest.raises(AssertionError):
        assert_equals_dense(SPEC, passes=3, tol=1e-6)


def test_scored_rows_literally():
    batch = make_batch(["pggg", "pgpgg"])
    assert counts(batch, 3).tolist() == [4, 2, 0]
    (block,) = make_blocks(batch, local_plan(batch.cu_seqlens, ""), 3, 0)
    assert block.rows.tolist() == [0, 1, 5, 6]
    assert block.ranges.tolist() == [[0, 2], [5, 7]]
    assert [x.tolist() for x in block.scored] == [[0, 1, 2, 3], [0, 2], []]
    assert [x.tolist() for x in block.teacher] == [[1, 2, 6, 7], [2, 7], []]
    one, two = make_blocks(batch, local_plan(batch.cu_seqlens, ""), 3, 3)
    assert [one.rows.tolist(), two.rows.tolist()] == [[0, 1, 5], [6]]
    assert [x.tolist() for x in two.scored] == [[0], [], []]


@pytest.mark.parametrize("seed", range(20))
def test_scored_rows_by_brute_force(seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (4,), generator=generator).tolist()
    documents = ["".join("pgg"[i] for i in torch.randint(3, (n,), generator=generator)) for n in lengths]
    expected = torch.zeros(5, sum(lengths), dtype=torch.bool)
    for d, row, _ in dense_valid(documents, 5):
        expected[d - 1, row] = True
    batch = make_batch(documents)
    found = torch.zeros_like(expected)
    for block in make_blocks(batch, local_plan(batch.cu_seqlens, ""), 5, row_block=seed % 4):
        for d in range(5):
            rows = block.rows[block.scored[d]]
            found[d, rows] = True
            assert torch.equal(block.teacher[d], rows + d + 1)
    assert torch.equal(found, expected)
    assert torch.equal(counts(batch, 5), expected.sum(1))


def test_packing_does_not_matter():
    """A pack's sums and gradients are those of its documents trained one by one."""
    draft, head = make_draft(), head_weight()
    trainer = DraftTrainer(draft, TrainingTimeTest(passes=4, pass_decay=DECAY, loss_rows=3))
    batch, taps = make_batch(DOCUMENTS), make_taps(sum(map(len, DOCUMENTS)))
    denominator = trainer.denominator(trainer.counts(batch))
    packed, grads = run(draft, DOCUMENTS, taps, head, passes=4)
    draft.zero_grad()
    starts = batch.cu_seqlens.tolist()
    parts = []
    for text, start in zip(DOCUMENTS, starts, strict=False):
        rows = slice(start, start + len(text))
        own = Taps(embeds=taps.embeds[rows], aux=tuple(x[rows] for x in taps.aux), final=taps.final[rows])
        parts.append(trainer.backward(make_batch([text]), own, head, denominator))
    total = sum(parts[1:], start=parts[0])
    torch.testing.assert_close(table(total), table(packed), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(total.loss, packed.loss, rtol=1e-12, atol=1e-12)
    for name, p in draft.named_parameters():
        torch.testing.assert_close(p.grad, grads[name], rtol=1e-11, atol=1e-12)


def test_a_document_changes_nothing_in_others():
    """The middle document is not trained: whatever it holds, loss and gradients stay the same bits."""
    documents, draft, head = ["pgggg", "pppppp", "pggg"], make_draft(), head_weight()
    taps, other = make_taps(15), make_taps(15, seed=9)
    before, grads = run(draft, documents, taps, head, passes=4)
    for x, y in zip(
        (taps.embeds, *taps.aux, taps.final), (other.embeds, *other.aux, other.final), strict=True
    ):
        x[5:11] = y[5:11]
    after, grads_after = run(draft, documents, taps, head, passes=4)
    assert torch.equal(before.loss, after.loss)
    assert torch.equal(table(before), table(after))
    assert all(torch.equal(grads[name], grads_after[name]) for name in grads)


@pytest.mark.parametrize("row_block", [1, 2, 5, 19])
def test_row_blocks_do_not_matter(row_block):
    draft, head, taps = make_draft(), head_weight(), make_taps(sum(map(len, DOCUMENTS)))
    whole, grads = run(draft, DOCUMENTS, taps, head, passes=7)
    split, grads_split = run(draft, DOCUMENTS, taps, head, passes=7, row_block=row_block)
    torch.testing.assert_close(split.loss, whole.loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(table(split), table(whole), rtol=1e-12, atol=0)
    for name in grads:
        torch.testing.assert_close(grads_split[name], grads[name], rtol=1e-11, atol=1e-13)


def test_chunking_of_the_loss_does_not_matter():
    draft, head, taps = make_draft(), head_weight(), make_taps(sum(map(len, DOCUMENTS)))
    (one, grads), (many, grads_many) = (
        run(draft, DOCUMENTS, taps, head, passes=4, loss_rows=rows) for rows in (1000, 1)
    )
    torch.testing.assert_close(table(one), table(many), rtol=1e-12, atol=0)
    for name in grads:
        torch.testing.assert_close(grads[name], grads_many[name], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("documents", [["ppp", "p"], []], ids=["nothing generated", "no tokens"])
def test_empty_microbatch_gives_every_parameter_a_zero_gradient(documents):
    stats, grads = run(make_draft(), documents, make_taps(sum(map(len, documents))), head_weight(), passes=3)
    assert stats.loss.item() == 0.0
    assert not table(stats).any()
    assert set(grads) == {name for name, _ in make_draft().named_parameters()}
    assert not any(grad.any() for grad in grads.values())


def test_no_gradient_reaches_the_policy():
    taps = make_taps(15)
    leaves = [x.requires_grad_() for x in (taps.embeds, *taps.aux, taps.final, head_weight())]
    run(make_draft(), ["pgggg", "pggg", "pggggg"], taps, leaves[-1], passes=3)
    assert all(x.grad is None for x in leaves)


@pytest.mark.parametrize(("dtype", "tol"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1)])
def test_lower_precision_follows_fp64(dtype, tol):
    """Draft in `dtype`, taps in fp64 as a stand-in for "another dtype": one rounding error per operation."""
    documents, head = ["p" + "g" * 30], head_weight()
    exact, grads = run(make_draft(), documents, make_taps(31), head, passes=4)
    ours, rough = run(make_draft().to(dtype), documents, make_taps(31), head, passes=4)
    assert torch.allclose(ours.loss, exact.loss, rtol=tol / 10)
    assert all(grad.dtype == dtype for grad in rough.values())
    expected, found = (torch.cat([g[name].double().flatten() for name in grads]) for g in (grads, rough))
    assert (found - expected).norm() < tol * expected.norm()


def test_llama3_scaling_is_transformers():
    spec = dataclasses.replace(SPEC, rope_scaling=LLAMA3, head_dim=16)
    keys = ("hidden_size", "num_attention_heads", "head_dim", "rope_theta", "rope_scaling")
    config = LlamaConfig(**{key: spec.hf_config()[key] for key in keys})
    theirs, scale = ROPE_INIT_FUNCTIONS["llama3"](config)
    exact = torch.tensor([100.0 ** (-j / 8) for j in range(8)], dtype=torch.float64)
    assert scale == 1.0
    torch.testing.assert_close(dense_llama3(exact, LLAMA3).float(), theirs, rtol=1e-5, atol=0)


def test_positions_far_beyond_any_table():
    """Attention depends on distances only, also at a million tokens (fp64)."""
    q, spec = torch.randn(4, 2, 6, dtype=torch.float64), dataclasses.replace(SPEC, rope_theta=1e4)
    near, far = (
        torch.einsum("thd,shd->hts", *(eagle3.rotate(q, torch.arange(4) + start, spec) for _ in range(2)))
        for start in (0, 1_000_000)
    )
    torch.testing.assert_close(near, far, rtol=0, atol=1e-8)


def test_learns_its_teacher():
    """A few hundred steps on one pack: the overlap of every pass rises far above where it started."""
    torch.manual_seed(0)
    documents = ["pp" + "g" * 14]
    draft = Eagle3(SPEC)
    taps, head = make_taps(16), 2 * head_weight()
    taps = Taps(embeds=taps.embeds.float(), aux=tuple(x.float() for x in taps.aux), final=taps.final.float())
    optim = torch.optim.Adam(draft.parameters(), lr=1e-2)
    first, _ = run(draft, documents, taps, head, passes=3)
    for _ in range(150):
        last, _ = run(draft, documents, taps, head, passes=3)
        optim.step()
    overlaps = [stats.sums["overlap"] / stats.counts for stats in (first, last)]
    assert overlaps[0].max() < 0.6
    assert overlaps[1].min() > 0.8


@pytest.fixture
def lone_world():
    mesh = Mesh(Parallel(), "cpu")
    yield mesh
    mesh.close()


@pytest.mark.parametrize("row_block", [0, 4])
@pytest.mark.parametrize("documents", [DOCUMENTS, ["ppp"]], ids=["packed", "nothing generated"])
def test_fsdp_finds_the_loss(lone_world, documents, row_block):
    """Wrapped at the root, the same gradients arrive as sharded ones, for an empty microbatch too."""
    taps, head = make_taps(sum(map(len, documents))), head_weight()
    stats, grads = run(make_draft(), documents, taps, head, passes=3, row_block=row_block)
    draft = make_draft()
    shard(draft, [], lone_world, torch.float64, methods=FSDP_METHODS)
    sharded_stats, sharded = run(draft, documents, taps, head, passes=3, row_block=row_block)
    assert torch.equal(table(sharded_stats), table(stats))
    for name, grad in grads.items():
        assert torch.equal(sharded[name].full_tensor(), grad)
    full, rounded = dict(draft.hf_weights()), dict(draft.hf_weights(torch.bfloat16))
    assert all(torch.equal(full[name], p) for name, p in make_draft().named_parameters())
    assert all(torch.equal(rounded[name], p.bfloat16()) for name, p in make_draft().named_parameters())


@pytest.mark.parametrize("row_block", [0, 6])
def test_fsdp_in_mixed_precision(lone_world, row_block):
    """Compute in bf16, gradients in fp32. FSDP2 refuses to reduce gradients of which only some were kept."""
    documents, head = ["p" + "g" * 30, "pggg"], head_weight()
    _, grads = run(make_draft(), documents, make_taps(35), head, passes=4)
    draft = make_draft().float()
    shard(draft, [], lone_world, torch.bfloat16, methods=FSDP_METHODS)
    _, rough = run(draft, documents, make_taps(35), head, passes=4, row_block=row_block)
    expected, found = (
        torch.cat([x.double().flatten() for x in tensors])
        for tensors in (grads.values(), [rough[name].full_tensor() for name in grads])
    )
    assert all(grad.dtype == torch.float32 for grad in rough.values())
    assert (found - expected).norm() < 0.1 * expected.norm()


EAGLE3_NAMES = [
    "fc.weight",
    "midlayer.input_layernorm.weight",
    "midlayer.hidden_norm.weight",
    "midlayer.self_attn.q_proj.weight",
    "midlayer.self_attn.k_proj.weight",
    "midlayer.self_attn.v_proj.weight",
    "midlayer.self_attn.o_proj.weight",
    "midlayer.post_attention_layernorm.weight",
    "midlayer.mlp.gate_proj.weight",
    "midlayer.mlp.up_proj.weight",
    "midlayer.mlp.down_proj.weight",
    "norm.weight",
    "lm_head.weight",
]


@pytest.mark.parametrize(
    ("changes", "extra"),
    [
        (dict(fc_norm=False, norm_output=False), []),
        ({}, [f"fc_norm.{i}.weight" for i in range(3)]),
        (dict(draft_vocab_size=5), [f"fc_norm.{i}.weight" for i in range(3)] + ["d2t", "t2d"]),
    ],
    ids=["EAGLE-3", "EAGLE-3.1", "reduced"],
)
def test_checkpoint_names_are_vllms(changes, extra):
    weights = dict(make_draft(dataclasses.replace(SPEC, **changes)).hf_weights())
    assert sorted(weights) == sorted(EAGLE3_NAMES + extra)
    assert weights["fc.weight"].shape == (8, 24)
    assert weights["midlayer.self_attn.k_proj.weight"].shape == (12, 16)
    if "d2t" in weights:
        assert weights["t2d"].nonzero().flatten().tolist() == (weights["d2t"] + torch.arange(5)).tolist()


def test_the_two_conventions_of_layer_ids_differ_by_one():
    assert output_layer_ids([0, 14, 25]) == [-1, 13, 24]
    assert entering_layer_ids([-1, 13, 24]) == [0, 14, 25]
    config = SPEC.hf_config()
    written = config["eagle_aux_hidden_state_layer_ids"], config["eagle_config"]
    assert written[0] == list(SPEC.aux_layers)
    assert written[1]["eagle_aux_hidden_state_layer_ids"] == [i - 1 for i in SPEC.aux_layers]


def test_spec_survives_config_json():
    changes = [
        dict(draft_vocab_size=5, fc_norm=False, norm_output=False),
        dict(rope_scaling=LLAMA3, norm_before_residual=True),
        dict(partial_rotary_factor=1 / 3),
    ]
    for spec in (SPEC, *(dataclasses.replace(SPEC, **change) for change in changes)):
        assert Eagle3Spec.from_hf_config(spec.hf_config()) == spec


def test_config_json_as_other_tools_write_it():
    config = SPEC.hf_config()
    del config["rope_theta"], config["draft_vocab_size"]
    config["rope_parameters"] = {"rope_theta": 100.0, "rope_type": "default"}
    config["eagle_config"] = {
        # the ids of layers whose outputs are tapped, one less than of those they enter
        "eagle_aux_hidden_state_layer_ids": [i - 1 for i in config.pop("eagle_aux_hidden_state_layer_ids")],
        "use_aux_hidden_state": True,
    }
    assert Eagle3Spec.from_hf_config(config) == SPEC


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers = 2; only 1 is supported"),
        ({"norm_before_fc": True}, "norm_before_fc = True; only False"),
        ({"target_hidden_size": 16}, "target_hidden_size = 16; only 8"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "RoPE scaling 'linear' is not supported"),
        ({"intermediate_size": None}, "'intermediate_size' is missing"),
    ],
)
def test_unsupported_checkpoints_are_refused(changes, message):
    config = {k: v for k, v in {**SPEC.hf_config(), **changes}.items() if v is not None}
    with pytest.raises(ConfigError, match=message):
        Eagle3Spec.from_hf_config(config)


def test_d2t_must_fit_the_spec():
    with pytest.raises(ValueError, match=r"d2t has shape None; .* it must be \[5\]"):
        Eagle3(dataclasses.replace(SPEC, draft_vocab_size=5))
    with pytest.raises(ValueError, match="it must be None"):
        Eagle3(SPEC, torch.zeros(13, dtype=torch.int64))


def test_random_init_is_seeded():
    torch.manual_seed(3)
    one = Eagle3(SPEC)
    torch.manual_seed(3)
    two = Eagle3(SPEC)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert 0.015 < one.fc.weight.std() < 0.025
    assert torch.equal(one.norm.weight, torch.ones(8))
