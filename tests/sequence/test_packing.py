"""Packing: every document once, samples full, similar lengths together; the manifest round trip."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_cp.config import ContextParallelConfig
from hf_cp.data.manifest import DocumentCounts, PackingManifest
from hf_cp.sequence.packing import pack_documents


def lognormal_lengths(count: int, *, max_tokens: int, seed: int = 0) -> list[int]:
    lengths = np.random.default_rng(seed).lognormal(6.5, 1.2, count).astype(int)
    return np.clip(lengths, 1, max_tokens).tolist()


def spread_inside_samples(samples: list[list[int]], lengths: list[int]) -> float:
    """Token-weighted standard deviation of log length around the mean of the own sample."""
    variance = 0.0
    for sample in samples:
        tokens = np.array([lengths[document] for document in sample], dtype=float)
        logs = np.log(tokens)
        variance += (tokens * (logs - np.average(logs, weights=tokens)) ** 2).sum()
    return float(np.sqrt(variance / sum(lengths)))


def random_samples(lengths: list[int], *, max_tokens: int) -> list[list[int]]:
    samples, sample, used = [], [], 0
    for document in np.random.default_rng(1).permutation(len(lengths)).tolist():
        if used + lengths[document] > max_tokens:
            samples, sample, used = [*samples, sample], [], 0
        sample.append(document)
        used += lengths[document]
    return [*samples, sample]


def manifest_of(lengths: list[int], max_tokens: int, **kwargs) -> PackingManifest:
    samples = tuple(tuple(sample) for sample in pack_documents(lengths, max_tokens))
    return PackingManifest(lengths=tuple(lengths), samples=samples, max_tokens=max_tokens, **kwargs)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(40, 100))
@settings(deadline=None)
def test_every_document_is_in_one_sample_that_is_not_too_long(lengths: list[int], max_tokens: int) -> None:
    samples = pack_documents(lengths, max_tokens)
    assert sorted(document for sample in samples for document in sample) == list(range(len(lengths)))
    sums = sorted(sum(lengths[document] for document in sample) for sample in samples)
    assert sums[-1] <= max_tokens
    # Best fit opens a sample only if nothing else fits, so no two samples could have been one.
    assert len(sums) < 2 or sums[0] + sums[1] > max_tokens


def test_choice_of_samples_is_the_documented_one() -> None:
    # 8 -> sample A (room 2); 7 -> B (room 3); 3 fits B exactly; 2 fits A exactly; the last 2 opens C.
    assert pack_documents([2, 7, 3, 8, 2], 10) == [[0, 3], [1, 2], [4]]
    assert pack_documents(np.array([2, 7, 3, 8, 2], dtype=np.uint8), 10) == [[0, 3], [1, 2], [4]]


def test_samples_are_full_and_packing_is_fast() -> None:
    lengths = lognormal_lengths(100_000, max_tokens=8192)
    start = time.perf_counter()
    samples = pack_documents(lengths, 8192)
    assert time.perf_counter() - start < 5.0  # about 0.2 s; the machine may be busy
    assert sum(lengths) / (len(samples) * 8192) >= 0.99


@pytest.mark.parametrize("max_tokens", [8192, 32768])
def test_samples_hold_documents_of_similar_length(max_tokens: int) -> None:
    lengths = lognormal_lengths(20_000, max_tokens=max_tokens)
    bucketed = spread_inside_samples(pack_documents(lengths, max_tokens), lengths)
    assert bucketed < 0.5 * spread_inside_samples(random_samples(lengths, max_tokens=max_tokens), lengths)


@pytest.mark.parametrize(
    ("lengths", "max_tokens", "message"),
    [
        ([], 8, "no document to pack"),
        ([3, 0, 2], 8, "Document 1 has 0 tokens"),
        ([3, 9], 8, "Document 1 has 9 tokens, more than the 8 of a sample"),
        ([3], 0, "max_tokens=0"),
    ],
)
def test_impossible_requests_are_refused(lengths: list[int], max_tokens: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack_documents(lengths, max_tokens)


def test_manifest_survives_saving(tmp_path) -> None:
    manifest = manifest_of([5, 3, 2, 4, 1], 7, sources=(0, 1, 1, 3, 4), counts=DocumentCounts(split=1, empty=2))
    path = tmp_path / "sub" / "manifest.json"
    manifest.save(path, config=ContextParallelConfig(ring_degree=2))
    assert PackingManifest.load(path) == manifest
    assert [p.name for p in path.parent.iterdir()] == ["manifest.json"]
    data = json.loads(path.read_text())
    assert data["counts"] == {"empty": 2, "truncated": 0, "split": 1, "dropped": 0}
    by_documents = {tuple(sample["documents"]): sample for sample in data["samples"]}
    # zigzag over 2: 5 tokens = chunks 1,1,1,2 -> 3+2; 2 tokens = 0,1,0,1 -> 1+1: rank 0 holds 4, so 8 slots for 7.
    assert by_documents[(0, 2)] == {
        "documents": [0, 2],
        "sources": [0, 1],
        "lengths": [5, 2],
        "tokens": 7,
        "padding": 1,
    }


def test_manifest_of_an_earlier_version(tmp_path) -> None:
    """Its samples were called rows."""
    manifest, path = manifest_of([5, 3, 2], 8), tmp_path / "manifest.json"
    manifest.save(path)
    path.write_text(path.read_text().replace('"samples": [', '"rows": ['))
    assert json.loads(path.read_text()).keys() >= {"rows", "digest"}
    assert PackingManifest.load(path) == manifest


def test_edited_manifest_is_refused(tmp_path) -> None:
    path = tmp_path / "manifest.json"
    manifest_of([5, 3, 2], 8).save(path)
    path.write_text(path.read_text().replace('"lengths": [5, 3]', '"lengths": [4, 3]'))
    with pytest.raises(ValueError, match="was changed after it was written"):
        PackingManifest.load(path)


def test_manifest_statistics() -> None:
    manifest = manifest_of([5, 3, 2, 4], 8)
    assert manifest.num_tokens == 14
    assert manifest.sample_tokens == (8, 6)
    assert manifest.fill == 14 / 16
    assert manifest.padding(ContextParallelConfig()) == (0, 0)
    assert "4 documents (14 tokens) in 2 samples of at most 8 tokens, 87.50% full" in str(manifest)


def test_digest_follows_lengths_and_samples() -> None:
    digests = {
        manifest_of([5, 3], 8).digest,
        manifest_of([3, 5], 8).digest,
        manifest_of([5, 3], 9).digest,
        PackingManifest(lengths=(5, 3), samples=((0,), (1,)), max_tokens=8).digest,
    }
    assert len(digests) == 4
    assert manifest_of([5, 3], 8).digest == manifest_of([5, 3], 8, counts=DocumentCounts(empty=1)).digest


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"samples": ((0,),)}, "each of the 2 documents exactly once"),
        ({"samples": ((0, 1), (1,))}, "each of the 2 documents exactly once"),
        ({"samples": ()}, "at least one sample"),
        ({"samples": ((0, 1),), "max_tokens": 7}, "8 tokens, more than max_tokens=7"),
        ({"samples": ((0, 1),), "sources": (0,)}, "1 sources for 2 documents"),
    ],
)
def test_impossible_manifests_are_refused(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PackingManifest(lengths=(5, 3), **fields)
