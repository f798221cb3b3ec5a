"""From data sets to this rank's batches: documents, packed samples, collator, loader."""

from hf_cp.data.collator import DataCollatorForContextParallel, WholeSample
from hf_cp.data.dataset import PackedDataset
from hf_cp.data.documents import Document, prepare_documents, to_documents
from hf_cp.data.loader import ContextParallelDataLoader
from hf_cp.data.streaming import StreamDataLoader

__all__ = [
    "ContextParallelDataLoader",
    "DataCollatorForContextParallel",
    "Document",
    "PackedDataset",
    "StreamDataLoader",
    "WholeSample",
    "prepare_documents",
    "to_documents",
]
