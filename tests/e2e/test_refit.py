"""Refit: after it the engine is as good as new; the draft is the trainer's, chain by chain."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoints import (
    AUX_LAYERS,
    DIM,
    FFN,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    MAX_POSITIONS,
    NORM_EPS,
    ROPE_THETA,
    VOCAB,
    draft_weights,
    engine_config,
    requests,
    write_draft,
)
from safetensors.torch import load_file

from torchspec.attention import branch_attention
from torchspec.checkpoint.export import export_draft
from torchspec.drafts.base import Verifier
from torchspec.drafts.eagle3.model import Eagle3
from torchspec.drafts.eagle3.spec import Eagle3Spec
from torchspec.drafts.vocab import target_ids
from torchspec.models.hf import load_hf
from torchspec.models.policy import Policy
from torchspec.models.spec import PolicySpec
from torchspec.records import Batch, Rollout, SamplingLaw, Taps
from torchspec.rollout.engine import Sampling
from torchspec.rollout.vllm.engine import VllmEngine
from torchspec.training.refit import refit

pytestmark = pytest.mark.e2e

K = 4
ALONE = SimpleNamespace(is_main=True, barrier=lambda: None)  # a mesh of one; torch.distributed is vLLM's here
GREEDY = Sampling(temperature=0.0, max_new_tokens=40)


class Weights:
    """A model, as far as refit knows one."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self.weights = weights

    def hf_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.weights.items()


def stored(folder: Path) -> Weights:
    weights = load_file(folder / "model.safetensors")
    return Weights(dict(sorted(weights.items(), key=lambda item: "layers" not in item[0])))


def start(policy: Path, draft: Path | None) -> VllmEngine:
    return VllmEngine(
        engine_config(max_len=MAX_POSITIONS, num_draft_tokens=K), policy, draft, seed=0, device_type="cpu"
    )


def fresh(policy: Path, batch) -> list[list[int]]:
    engine = start(policy, None)
    found = tokens(engine, batch)
    engine.close()
    return found


def tokens(engine: VllmEngine, batch) -> list[list[int]]:
    return [r.tokens for r in engine.generate(batch, GREEDY)]


@pytest.fixture(params=["policy", "tied"])
def refitted(request, folders, tmp_path):
    """An engine that starts in the dangerous state: its draft's head equals the policy's."""
    old, new = folders[request.param], folders[f"{request.param}2"]
    policy = stored(old).weights
    head = policy["model.embed_tokens.weight" if request.param == "tied" else "lm_head.weight"]
    draft = write_draft(tmp_path / "draft", draft_weights(seed=4) | {"lm_head.weight": head.clone()})
    engine = start(old, draft)
    yield engine, old, new
    engine.close()


def test_after_refit_the_engine_is_as_good_as_new(refitted):
    engine, old, new = refitted
    # Prompts of more than two blocks of the cache (128 tokens each), and seen before: the old prefixes must
    # not be used. With EAGLE, vLLM never reuses the last full block.
    batch = requests(8, seed=1, shortest=260, longest=275)
    before = tokens(engine, batch)
    assert tokens(engine, batch) == before == fresh(old, batch)
    assert engine.counters.cached_tokens >= 8 * 128

    assert engine.shared_names() == {"embed_tokens.weight"}
    refit(engine, None, Weights(draft_weights(seed=5)), policy_version=0, draft_version=1)
    assert tokens(engine, batch) == before, "a draft update changed the policy"

    policy = stored(new)
    refit(engine, policy, Weights(draft_weights(seed=6)), policy_version=1, draft_version=2)
    for tensor in policy.weights.values():
        tensor.zero_()  # the engine must have copied
    rollouts = engine.generate(batch, GREEDY)
    after = [r.tokens for r in rollouts]
    assert after != before
    assert after == fresh(new, batch)
    assert {(r.policy_version, r.draft_version) for r in rollouts} == {(1, 2)}

    with pytest.raises(ValueError, match=r"embed_tokens\.weight is the policy's own"):
        engine.update(None, {"embed_tokens.weight": torch.ones(1)}.items(), policy_version=1, draft_version=1)


@pytest.fixture(scope="module")
def engine_of_two(folders) -> Iterator[VllmEngine]:
    engine = start(folders["policy"], folders["draft"])
    yield engine
    engine.close()


HARMED = [
    ("policy", "model.layers.3.self_attn.q_norm.weight"),
    ("policy", "model.embed_tokens.weight"),
    ("policy", "lm_head.weight"),
    ("draft", "midlayer.hidden_norm.weight"),
    ("draft", "lm_head.weight"),
]


@pytest.mark.parametrize(("model", "harmed"), HARMED)
def test_the_engine_must_hold_what_was_sent(engine_of_two, folders, model, harmed) -> None:
    engine = engine_of_two
    weights = {"policy": stored(folders["policy2"]), "draft": Weights(draft_weights(seed=5))}

    def harm(worker) -> None:
        target = worker.model_runner.get_model() if model == "policy" else worker.get_draft_model()
        load = target.load_weights

        def one_number_changes_on_the_way(pairs):
            for name, tensor in pairs:
                if name == harmed:
                    tensor = tensor.clone()
                    tensor.view(-1)[3] += 1e-6
                yield name, tensor

        target.load_weights = lambda pairs: load(one_number_changes_on_the_way(pairs))

    def mend(worker) -> None:
        for target in (worker.model_runner.get_model(), worker.get_draft_model()):
            vars(target).pop("load_weights", None)

    engine._ask(harm)
    with pytest.raises(
        RuntimeError, match=r"refit: .* in the engine is not what the trainer sent \(checksum"
    ):
        refit(engine, weights["policy"], weights["draft"], policy_version=1, draft_version=1)
    engine._ask(mend)
    refit(engine, weights["policy"], weights["draft"], policy_version=1, draft_version=1)
    # On CPU, where linear layers are repacked: norms of layers, first and last norm and head.
    assert engine._ask(lambda worker: worker.weight_transfer_engine.compare()) == 8


def test_an_incomplete_update_raises(folders):
    engine = start(folders["policy"], folders["draft"])
    batch = requests(4, seed=4)
    before = tokens(engine, batch)
    policy, draft = stored(folders["policy"]).weights, draft_weights(seed=4)
    for left_out in ("model.layers.2.self_attn.q_proj.weight", "model.norm.weight", "lm_head.weight"):
        part = Weights({name: x for name, x in policy.items() if name != left_out})
        with pytest.raises(RuntimeError, match="incomplete"):
            refit(engine, part, None, policy_version=1, draft_version=1)
    for left_out in ("midlayer.mlp.up_proj.weight", "fc.weight", "lm_head.weight"):
        part = Weights({name: x for name, x in draft.items() if name != left_out})
        with pytest.raises(RuntimeError, match="incomplete"):
            refit(engine, None, part, policy_version=1, draft_version=1)
    assert engine.policy_version == engine.draft_version == 0
    refit(engine, Weights(policy), Weights(draft), policy_version=1, draft_version=1)
    assert tokens(engine, batch) == before
    engine.close()


def torch_draft(weights: dict[str, torch.Tensor], norms: bool, window: int | None = None) -> Eagle3:
    spec = Eagle3Spec(
        vocab_size=VOCAB,
        draft_vocab_size=weights["lm_head.weight"].shape[0],
        dim=DIM,
        heads=HEADS,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        ffn_dim=FFN,
        norm_eps=NORM_EPS,
        rope_theta=ROPE_THETA,
        max_len=MAX_POSITIONS,
        aux_layers=AUX_LAYERS,
        fc_norm=norms,
        norm_output=norms,
        window=window,
    )
    draft = Eagle3(spec, weights.get("d2t"))
    draft.load_state_dict(weights, strict=False)
    return draft


def torch_policy(folder: Path) -> Policy:
    policy = Policy(PolicySpec.from_hf(folder))
    policy.init_weights(0)
    load_hf(policy, folder)
    return policy


@torch.no_grad()
def greedy_chains(
    draft: Eagle3, taps: Taps, batch: Batch, embedding: torch.Tensor
) -> tuple[list[list[int]], list[float]]:
    """What the draft proposes after each prefix, as at serving: own tokens, own keys; and by what margin.

    Row i follows token i + 1.
    """
    hidden, stash, chains, margins = draft._project(list(taps.aux)), [], [], []
    newest, layer, window = batch.tokens.roll(-1), draft.midlayer, draft.spec.window
    for d in range(K):
        x, positions = layer.inputs(embedding[newest], hidden), batch.positions + d
        stash.append(layer.self_attn.keys(x, positions))
        keys, values = map(list, zip(*stash))
        q = layer.self_attn.queries(x, positions)
        attended, _ = branch_attention(
            q, keys[0], values[0], keys[1:], values[1:], batch.cu_seqlens, window=window
        )
        hidden = layer.outputs(hidden, attended)
        normed = draft.norm(hidden)
        if draft.spec.norm_output:
            hidden = normed
        best = draft.lm_head(normed).topk(2)
        margins.append(best.values[:, 0] - best.values[:, 1])
        newest = best.indices[:, 0]
        if draft.spec.draft_vocab_size != draft.spec.vocab_size:
            newest = target_ids(draft.d2t)[newest]
        chains.append(newest)
    return torch.stack(chains, dim=1).tolist(), torch.stack(margins).min(0).values.tolist()


def one_document(rollout: Rollout) -> Batch:
    ids = torch.tensor(rollout.prompt_tokens + rollout.tokens)
    nothing = torch.zeros(len(ids))
    return Batch(
        tokens=ids,
        positions=torch.arange(len(ids)),
        targets=nothing.long(),
        target_mask=nothing.bool(),
        rollout_logprobs=nothing,
        advantages=nothing,
        chain=nothing.long(),
        cu_seqlens=torch.tensor([0, len(ids)], dtype=torch.int32),
    )


def record_proposals(engine: VllmEngine) -> dict[tuple[str, int], list[int]]:
    """{(problem id, tokens so far): chain}, filled while the engine generates."""
    proposals = {}

    def install(worker):
        runner = worker.model_runner
        propose = runner.propose_draft_token_ids

        def recording(scheduler_output, sampled, *args, **kwargs):
            drafts = propose(scheduler_output, sampled, *args, **kwargs)
            batch = runner.input_batch
            for row, request in enumerate(batch.req_ids):
                new = sum(t >= 0 for t in sampled[row].tolist())
                if drafts[row]:
                    known = int(batch.num_tokens_no_spec[batch.req_id_to_index[request]]) + new
                    problem = runner.requests[request].sampling_params.extra_args["problem_id"]
                    proposals[problem, known] = drafts[row]
            return drafts

        runner.propose_draft_token_ids = recording

    engine._ask(install)
    return proposals


@pytest.mark.parametrize(
    ("draft_vocab", "norms", "window"),
    [
        (VOCAB, True, None),
        (VOCAB, False, None),
        (25, True, None),
        (25, False, None),
        (VOCAB, True, 9),
    ],
    ids=["own-eagle3.1", "own-eagle3", "reduced-eagle3.1", "reduced-eagle3", "own-eagle3.1-window"],
)
def test_the_torch_draft_and_the_engines_propose_the_same_chains(
    folders, tmp_path, draft_vocab, norms, window
):
    def weights(seed):
        return draft_weights(seed, draft_vocab=draft_vocab, fc_norm=norms)

    kept = {name: x for name, x in weights(7).items() if name == "d2t"}  # the vocabulary stays
    flags = {"fc_norm": norms, "norm_output": norms}
    if window:
        flags |= {"layer_types": ["sliding_attention"], "sliding_window": window}
    policy = torch_policy(folders["policy2"])
    draft = torch_draft(weights(9) | kept, norms, window)
    engine = start(folders["policy"], write_draft(tmp_path / "start", weights(7), **flags))
    refit(engine, policy, draft, policy_version=1, draft_version=1)
    batch = requests(12, seed=2, shortest=4, longest=150)

    proposals = record_proposals(engine)
    rollouts = engine.generate(batch, GREEDY)
    engine.close()
    embedding = dict(policy.hf_weights())["model.embed_tokens.weight"]
    compared = 0
    for rollout in rollouts:
        pack = one_document(rollout)
        with torch.no_grad():
            taps = policy(pack, law=SamplingLaw(), logprob_rows=64, aux_layers=AUX_LAYERS).taps
        chains, margins = greedy_chains(draft, taps, pack, embedding)
        for (problem, known), chain in proposals.items():
            if problem == rollout.problem_id and known < len(pack.tokens):
                assert margins[known - 2] > 1e-5, "a tie: choose another seed"
                assert chains[known - 2][: len(chain)] == chain, (problem, known)
                compared += 1
    assert compared > 200

    layout = "speculators" if norms == (draft_vocab == VOCAB) else "eagle3"
    verifier = Verifier(str(folders["policy2"]), "Qwen3ForCausalLM", K, embedding)
    export_draft(draft, tmp_path / "exported", ALONE, layout, verifier)
    engine = start(folders["policy2"], tmp_path / "exported")
    assert "embed_tokens.weight" in engine.shared_names(), (
        "a copy would stay behind when the policy is refitted"
    )
    again = record_proposals(engine)
    assert [r.tokens for r in engine.generate(batch, GREEDY)] == [r.tokens for r in rollouts]
    engine.close()
    assert again == proposals


LAWS = (
    SamplingLaw(),
    SamplingLaw(temperature=0.7),
    SamplingLaw(top_k=5),
    SamplingLaw(temperature=1.3, top_p=0.8),
    SamplingLaw(temperature=0.9, top_p=0.9, top_k=20),
)


def test_the_policys_logprobs_are_the_engines(folders):
    """With torchspec's own policy, under several sampling laws, under speculation and after a refit."""
    policy = torch_policy(folders["policy2"])
    engine = start(folders["policy"], folders["draft"])
    refit(engine, policy, None, policy_version=1, draft_version=0)
    for law in LAWS:
        rollouts = engine.generate(requests(6, seed=3), Sampling(**asdict(law), max_new_tokens=50))
        for rollout in rollouts:
            pack = one_document(rollout)
            pack.targets = pack.tokens.roll(-1)
            rows = slice(len(rollout.prompt_tokens) - 1, -1)
            pack.target_mask[rows] = True
            found = policy(pack, law=law, logprob_rows=16).logprobs[rows].detach()
            torch.testing.assert_close(found, torch.tensor(rollout.logprobs), rtol=0, atol=1e-4)
    engine.close()
