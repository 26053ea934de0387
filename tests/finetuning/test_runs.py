"""Finished runs on disk."""

from __future__ import annotations

import pytest

from attnbalance.errors import ModelError
from attnbalance.files.outputs import MARKER
from attnbalance.finetuning.runs import load_run


def test_a_folder_without_a_run_is_refused(llama, tmp_path):
    for path, held in ((llama, "the result of `pretrain`"), (tmp_path, f"no {MARKER}"), (tmp_path / "x", "nothing")):
        with pytest.raises(ModelError, match=held):
            load_run(path)
