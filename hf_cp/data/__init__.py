"""From data sets to this rank's batches: documents, packed samples, collator, loader."""

from hf_cp.data.collator import DataCollatorForContextParallel, PackedRow
from hf_cp.data.documents import Document, prepare_documents, to_documents
from hf_cp.data.loader import ContextParallelDataLoader
from hf_cp.data.packed import PackedDataset
from hf_cp.data.streaming import StreamDataLoader

__all__ = [
    "ContextParallelDataLoader",
    "DataCollatorForContextParallel",
    "Document",
    "PackedDataset",
    "PackedRow",
    "StreamDataLoader",
    "prepare_documents",
    "to_documents",
]
