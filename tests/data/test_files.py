"""Documents are read in three forms, for training and for every command that looks at them."""

from __future__ import annotations

import json

import pytest

from hf_cp.data.files import load_features


def test_documents_in_three_forms(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "one"}) + "\n\n" + json.dumps({"text": "two"}) + "\n")
    assert load_features(tmp_path / "a.jsonl") == [{"text": "one"}, {"text": "two"}]

    (tmp_path / "folder" / "inner").mkdir(parents=True)
    (tmp_path / "folder" / "b.txt").write_text("bb")
    (tmp_path / "folder" / "inner" / "a.md").write_text("aa")
    (tmp_path / "folder" / "picture.png").write_text("no text")
    found = load_features(tmp_path / "folder")
    assert found == [{"name": "b.txt", "text": "bb"}, {"name": "inner/a.md", "text": "aa"}]

    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list([{"input_ids": [1, 2, 3]}]).save_to_disk(tmp_path / "saved")
    assert list(load_features(tmp_path / "saved")) == [{"input_ids": [1, 2, 3]}]

    for nothing in (tmp_path / "empty", tmp_path / "does-not-exist"):
        with pytest.raises(ValueError, match="0 text files"):
            load_features(nothing)


def test_a_line_that_is_not_json_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n{"text": "two}\n')
    with pytest.raises(ValueError, match=r"a.jsonl, line 3 is not JSON"):
        load_features(tmp_path / "a.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="holds no document"):
        load_features(tmp_path / "empty.jsonl")
