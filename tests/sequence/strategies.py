"""Random rows and configurations for property tests."""

from __future__ import annotations

from hypothesis import strategies as st

from hf_cp.config import ContextParallelConfig

LAYOUTS = ("document", "zigzag", "contiguous", "striped")

doc_lengths = st.lists(st.one_of(st.integers(1, 3), st.integers(1, 30)), min_size=1, max_size=6)
configs = st.builds(
    ContextParallelConfig,
    ring_degree=st.integers(1, 5),
    ulysses_degree=st.integers(1, 3),
    layout=st.sampled_from(LAYOUTS),
)
