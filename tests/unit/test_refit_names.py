"""refit: which weights go where, in which order, seen by an engine that only writes down."""

import torch

from torchspec.training.refit import FrozenCopy, refit


class Engine:
    def __init__(self, shared=()):
        self.shared, self.calls = frozenset(shared), []

    def shared_names(self):
        return self.shared

    def update(self, policy, draft, *, policy_version, draft_version):
        names = [weights and [name for name, _ in weights] for weights in (policy, draft)]
        self.calls.append((*names, policy_version, draft_version))


class Model:
    def __init__(self, *names):
        self.names, self.pulled = names, []

    def hf_weights(self, dtype=None):
        for name in self.names:
            self.pulled.append(name)
            yield name, torch.zeros(1, dtype=dtype)


def test_shared_names_stay_but_are_gathered_all_the_same():
    engine, draft = (
        Engine(["embed_tokens.weight"]),
        Model("fc.weight", "embed_tokens.weight", "lm_head.weight"),
    )
    refit(engine, Model("model.norm.weight"), draft, policy_version=3, draft_version=2)
    assert engine.calls == [(["model.norm.weight"], ["fc.weight", "lm_head.weight"], 3, 2)]
    assert draft.pulled == list(draft.names), "hf_weights is a collective: every rank takes every pair"


def test_a_drafts_own_embedding_is_sent():
    engine = Engine()
    refit(engine, None, Model("embed_tokens.weight"), policy_version=1, draft_version=1)
    assert engine.calls == [(None, ["embed_tokens.weight"], 1, 1)]


def test_none_leaves_a_model_alone():
    engine = Engine()
    refit(engine, Model("a"), None, policy_version=1, draft_version=0)
    refit(engine, None, None, policy_version=2, draft_version=0)
    assert engine.calls == [(["a"], None, 1, 0), (None, None, 2, 0)]


def test_weights_are_pulled_one_by_one():
    class Lazy(Engine):
        def update(self, policy, draft, **_):
            for count, _ in enumerate(policy, start=1):
                assert len(model.pulled) == count
            for count, _ in enumerate(draft, start=1):
                assert len(other.pulled) == count

    model, other = Model("a", "b", "c"), Model("d", "e")
    refit(Lazy(), model, other, policy_version=1, draft_version=1)
    assert model.pulled == ["a", "b", "c"]


def test_weights_travel_in_the_engines_dtype():
    class Dtypes(Engine):
        def update(self, policy, draft, **_):
            self.calls.append([x.dtype for weights in (policy, draft) for _, x in weights])

    class Draft:
        def hf_weights(self, dtype=None):
            yield "fc.weight", torch.ones(1)
            yield "d2t", torch.ones(1, dtype=torch.int64)

    engine, versions = Dtypes(), {"policy_version": 1, "draft_version": 1}
    refit(engine, Model("a"), FrozenCopy(Draft()), **versions, dtype=torch.bfloat16)
    refit(engine, Model("a"), FrozenCopy(Draft()), **versions)
    assert engine.calls == [
        [torch.bfloat16, torch.bfloat16, torch.int64],
        [torch.float32, torch.float32, torch.int64],
    ]
